from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.lifecycle import (
    BATCH_MOVES,
    DISPATCHED,
    ENDINGS,
    FINISHED,
    REQUEST_MOVES,
    UNFINISHED,
    WORKFLOW_MOVES,
    Act,
    BatchState,
    EndingReason,
    Refusal,
    RequestState,
    Source,
    Tally,
    WorkflowState,
    act_upon,
    may_move,
    outcome,
)

S = TypeVar("S")

reasons = st.none() | st.sampled_from(EndingReason)


@st.composite
def tallies(draw: st.DrawFn) -> Tally:
    completed, failed, timed_out, cancelled = (draw(st.integers(0, 3)) for _ in range(4))
    return Tally(
        total=completed + failed + timed_out + cancelled,
        completed=completed,
        failed=failed,
        timed_out=timed_out,
        cancelled=cancelled,
    )


def reachable(moves: Mapping[S, frozenset[S]], start: S) -> set[S]:
    seen = {start}
    edge = [start]
    while edge:
        new = moves[edge.pop()] - seen
        seen |= new
        edge.extend(new)
    return seen


@pytest.mark.parametrize(
    ("enum", "names"),
    [
        (
            WorkflowState,
            "RECEIVING OPEN RUNNING PAUSED ENDING COMPLETED PARTIAL FAILED CANCELLED REOPENING",
        ),
        (RequestState, "PENDING COMPLETED FAILED TIMED_OUT CANCELLED"),
        (Source, "ARCHIVE COALESCED MODEL"),
        (BatchState, "READY LEASED WAITING DELAYED DONE"),
    ],
)
def test_stored_numbers_stay_what_they_were(enum: type[IntEnum], names: str) -> None:
    assert [(member.name, member.value) for member in enum] == [
        (name, number) for number, name in enumerate(names.split())
    ]


def test_every_workflow_state_has_its_row_of_moves() -> None:
    assert WORKFLOW_MOVES.keys() == set(WorkflowState)


def test_every_batch_state_has_its_row_of_moves() -> None:
    assert BATCH_MOVES.keys() == set(BatchState)


def test_states_are_finished_or_unfinished() -> None:
    assert set(WorkflowState) == UNFINISHED | FINISHED
    assert not UNFINISHED & FINISHED


@pytest.mark.parametrize("state", sorted(FINISHED))
def test_finished_workflows_move_only_into_a_new_round(state: WorkflowState) -> None:
    assert WORKFLOW_MOVES[state] <= {WorkflowState.REOPENING}


def test_a_completed_workflow_moves_no_more() -> None:
    assert not WORKFLOW_MOVES[WorkflowState.COMPLETED]


def test_a_done_batch_is_ready_again_in_a_new_round_and_nothing_else() -> None:
    assert BATCH_MOVES[BatchState.DONE] == {BatchState.READY}


def test_a_request_ends_once_and_only_what_did_not_complete_is_opened_again() -> None:
    assert REQUEST_MOVES.keys() == set(RequestState)
    assert not REQUEST_MOVES[RequestState.COMPLETED]
    for state in (RequestState.FAILED, RequestState.TIMED_OUT, RequestState.CANCELLED):
        assert REQUEST_MOVES[state] == {RequestState.PENDING}


@pytest.mark.parametrize("state", sorted(UNFINISHED))
def test_every_unfinished_workflow_can_finish(state: WorkflowState) -> None:
    assert reachable(WORKFLOW_MOVES, state) & FINISHED


@pytest.mark.parametrize("state", BatchState)
def test_every_batch_can_be_done(state: BatchState) -> None:
    assert BatchState.DONE in reachable(BATCH_MOVES, state)


def test_every_workflow_state_is_reached_from_an_upload() -> None:
    assert reachable(WORKFLOW_MOVES, WorkflowState.RECEIVING) == set(WorkflowState)


def test_every_batch_state_is_reached_from_ready() -> None:
    assert reachable(BATCH_MOVES, BatchState.READY) == set(BatchState)


@pytest.mark.parametrize("state", WorkflowState)
def test_no_workflow_state_moves_to_itself(state: WorkflowState) -> None:
    assert not may_move(state, state)


def test_only_unfinished_workflows_are_dispatched() -> None:
    assert DISPATCHED < UNFINISHED


@pytest.mark.parametrize(
    "state",
    [
        WorkflowState.RECEIVING,
        WorkflowState.PAUSED,
        WorkflowState.ENDING,
        WorkflowState.REOPENING,
    ],
)
def test_nothing_is_sent_for_uploads_paused_ending_and_reopening_workflows(
    state: WorkflowState,
) -> None:
    assert state not in DISPATCHED


@pytest.mark.parametrize("state", [WorkflowState.OPEN, WorkflowState.RUNNING, WorkflowState.PAUSED])
def test_an_accepted_workflow_can_be_wound_up(state: WorkflowState) -> None:
    assert may_move(state, WorkflowState.ENDING)


def test_an_ending_workflow_is_not_taken_back() -> None:
    assert WORKFLOW_MOVES[WorkflowState.ENDING] <= FINISHED


def test_an_upload_never_returns_to_receiving() -> None:
    assert not any(WorkflowState.RECEIVING in targets for targets in WORKFLOW_MOVES.values())


def test_every_reason_ends_open_requests_for_good() -> None:
    assert ENDINGS.keys() == set(EndingReason)
    assert all(ending.state is not RequestState.PENDING for ending in ENDINGS.values())
    assert all(ending.state is not RequestState.COMPLETED for ending in ENDINGS.values())


@pytest.mark.parametrize(
    ("completed", "reason", "state"),
    [
        (3, None, WorkflowState.COMPLETED),
        (2, None, WorkflowState.PARTIAL),
        (0, None, WorkflowState.FAILED),
        (3, EndingReason.MAX_DURATION, WorkflowState.COMPLETED),
        (2, EndingReason.COMPLETE_WHEN, WorkflowState.PARTIAL),
        (0, EndingReason.MAX_DURATION, WorkflowState.FAILED),
        (3, EndingReason.CANCELLED, WorkflowState.CANCELLED),
        (0, EndingReason.CANCELLED, WorkflowState.CANCELLED),
    ],
)
def test_outcome_by_what_was_completed(
    completed: int, reason: EndingReason | None, state: WorkflowState
) -> None:
    tally = Tally(total=3, completed=completed, failed=3 - completed)

    assert outcome(tally, reason) is state


@given(tally=tallies(), reason=reasons)
def test_every_outcome_is_a_finished_state(tally: Tally, reason: EndingReason | None) -> None:
    assert outcome(tally, reason) in FINISHED


@given(tally=tallies(), reason=reasons)
def test_completed_means_that_every_request_is(tally: Tally, reason: EndingReason | None) -> None:
    others = tally.failed + tally.timed_out + tally.cancelled

    if outcome(tally, reason) is WorkflowState.COMPLETED:
        assert others == 0
    if outcome(tally, reason) is WorkflowState.PARTIAL:
        assert tally.completed > 0
        assert others > 0


@given(tally=tallies(), reason=reasons)
def test_an_outcome_is_a_move_that_the_checker_may_make(
    tally: Tally, reason: EndingReason | None
) -> None:
    before: Iterable[WorkflowState] = (
        [WorkflowState.ENDING]
        if reason
        else [WorkflowState.RUNNING, WorkflowState.PAUSED, WorkflowState.ENDING]
    )

    assert all(may_move(state, outcome(tally, reason)) for state in before)


# Acts

acts = st.sampled_from(Act)
shown = st.sampled_from([state for state in WorkflowState if state is not WorkflowState.RECEIVING])


@given(act=acts, state=shown, is_closed=st.booleans(), round=st.integers(1, 3))
def test_an_act_leads_to_where_a_workflow_may_move(
    act: Act, state: WorkflowState, is_closed: bool, round: int
) -> None:
    target = act_upon(act, state, is_closed=is_closed, round=round)

    assert isinstance(target, Refusal) or target is state or may_move(state, target)


@given(act=acts, state=shown, is_closed=st.booleans(), round=st.integers(1, 3))
def test_an_act_done_twice_is_done_once(
    act: Act, state: WorkflowState, is_closed: bool, round: int
) -> None:
    once = act_upon(act, state, is_closed=is_closed, round=round)

    if not isinstance(once, Refusal):
        round += once is WorkflowState.REOPENING and once is not state
        assert act_upon(act, once, is_closed=is_closed, round=round) is once


_S = WorkflowState


@pytest.mark.parametrize(
    ("act", "state", "target"),
    [
        (Act.PAUSE, _S.OPEN, _S.PAUSED),
        (Act.PAUSE, _S.RUNNING, _S.PAUSED),
        (Act.PAUSE, _S.ENDING, Refusal.ENDING),
        (Act.PAUSE, _S.REOPENING, Refusal.REOPENING),
        (Act.PAUSE, _S.COMPLETED, Refusal.FINISHED),
        (Act.RESUME, _S.PAUSED, _S.RUNNING),
        (Act.RESUME, _S.RUNNING, _S.RUNNING),
        (Act.RESUME, _S.CANCELLED, Refusal.FINISHED),
        (Act.CANCEL, _S.PAUSED, _S.ENDING),
        (Act.CANCEL, _S.ENDING, _S.ENDING),
        (Act.CANCEL, _S.CANCELLED, _S.CANCELLED),
        (Act.CANCEL, _S.PARTIAL, Refusal.FINISHED),
        (Act.COMPLETE, _S.RUNNING, _S.ENDING),
        (Act.COMPLETE, _S.PARTIAL, _S.PARTIAL),
        (Act.COMPLETE, _S.CANCELLED, Refusal.FINISHED),
        (Act.RETRY, _S.PARTIAL, _S.REOPENING),
        (Act.RETRY, _S.FAILED, _S.REOPENING),
        (Act.RETRY, _S.CANCELLED, _S.REOPENING),
        (Act.RETRY, _S.COMPLETED, Refusal.FINISHED),
        (Act.RETRY, _S.RUNNING, Refusal.UNFINISHED),
        (Act.RETRY, _S.ENDING, Refusal.ENDING),
    ],
)
def test_what_an_act_leads_to(act: Act, state: _S, target: _S | Refusal) -> None:
    assert act_upon(act, state, is_closed=True, round=1) is target


def test_a_paused_workflow_that_takes_rows_is_resumed_open() -> None:
    assert act_upon(Act.RESUME, _S.PAUSED, is_closed=False, round=1) is _S.OPEN


@pytest.mark.parametrize("state", [_S.RUNNING, _S.PAUSED, _S.REOPENING])
def test_a_retry_while_its_round_runs_changes_nothing(state: _S) -> None:
    assert act_upon(Act.RETRY, state, is_closed=True, round=2) is state
