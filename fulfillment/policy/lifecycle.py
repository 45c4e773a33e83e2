"""States of workflows, requests and batches, and the moves between them.

One enum and one table a kind. The database repeats them: check constraints say which states there
are, triggers which moves (migrations/0003_rules.py). docs/lifecycle.md draws them. The numbers are
stored: append, never renumber.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class WorkflowState(IntEnum):
    """Where a workflow stands, and who moves it on."""

    RECEIVING = 0
    """An upload is being taken in; nothing is sent. Intake opens it or the janitor removes it."""
    OPEN = 1
    """Takes more rows; what it has may already be rated. The client closes it."""
    RUNNING = 2
    """Closed, some items are open. The completion checker ends it."""
    PAUSED = 3
    """Nothing new is sent until the client resumes it; what was started ends, and so may it."""
    ENDING = 4
    """Being wound up for a reason; nothing new is sent. The sweep ends its open items."""
    COMPLETED = 5
    """Every request is COMPLETED."""
    PARTIAL = 6
    """Ended with some requests not COMPLETED."""
    FAILED = 7
    """Ended with no request COMPLETED."""
    CANCELLED = 8
    """Ended because the client cancelled it."""
    REOPENING = 9
    """A new round is made of what did not complete; nothing is sent yet. `retry`, or the checker
    where that died, runs it."""


class RequestState(IntEnum):
    """State of one rating request as stored; RUNNING and RETRYING are read off its batch."""

    PENDING = 0
    COMPLETED = 1
    FAILED = 2
    TIMED_OUT = 3
    CANCELLED = 4


class Source(IntEnum):
    """Where a score came from."""

    ARCHIVE = 0
    """Rated before the request was accepted."""
    COALESCED = 1
    """Rated for an equal request, after this one was accepted."""
    MODEL = 2
    """Rated by a model call for this request."""


class BatchState(IntEnum):
    """State of a batch: what happens next to its open items."""

    READY = 0
    """May be claimed by the dispatcher."""
    LEASED = 1
    """Claimed: on its way to an executor or being computed, until its lease ends."""
    WAITING = 2
    """All open items wait for flights of other batches; the dispatcher wakes it."""
    DELAYED = 3
    """Tries again at `not_before`."""
    DONE = 4
    """No open item."""


class EndingReason(StrEnum):
    """Why a workflow is ENDING; decides the state its open requests get."""

    CANCELLED = "cancelled"
    MAX_DURATION = "max_duration"
    COMPLETE_WHEN = "complete_when"
    FORCED = "forced"


WORKFLOW_MOVES: dict[WorkflowState, frozenset[WorkflowState]] = {
    WorkflowState.RECEIVING: frozenset({WorkflowState.OPEN, WorkflowState.RUNNING}),
    WorkflowState.OPEN: frozenset(
        {WorkflowState.RUNNING, WorkflowState.PAUSED, WorkflowState.ENDING}
    ),
    WorkflowState.RUNNING: frozenset(
        {
            WorkflowState.PAUSED,
            WorkflowState.ENDING,
            WorkflowState.COMPLETED,
            WorkflowState.PARTIAL,
            WorkflowState.FAILED,
        }
    ),
    WorkflowState.PAUSED: frozenset(
        {
            WorkflowState.OPEN,
            WorkflowState.RUNNING,
            WorkflowState.ENDING,
            WorkflowState.COMPLETED,
            WorkflowState.PARTIAL,
            WorkflowState.FAILED,
        }
    ),
    WorkflowState.ENDING: frozenset(
        {
            WorkflowState.CANCELLED,
            WorkflowState.COMPLETED,
            WorkflowState.PARTIAL,
            WorkflowState.FAILED,
        }
    ),
    WorkflowState.COMPLETED: frozenset(),
    WorkflowState.PARTIAL: frozenset({WorkflowState.REOPENING}),
    WorkflowState.FAILED: frozenset({WorkflowState.REOPENING}),
    WorkflowState.CANCELLED: frozenset({WorkflowState.REOPENING}),
    WorkflowState.REOPENING: frozenset({WorkflowState.RUNNING, WorkflowState.ENDING}),
}

DISPATCHED = frozenset({WorkflowState.OPEN, WorkflowState.RUNNING})
"""Workflows whose batches may be claimed and taken over."""

STARTED = DISPATCHED | {WorkflowState.PAUSED}
"""Workflows whose started tries go on, further calls of theirs included."""

UNFINISHED = frozenset(
    {
        WorkflowState.RECEIVING,
        WorkflowState.OPEN,
        WorkflowState.RUNNING,
        WorkflowState.PAUSED,
        WorkflowState.ENDING,
        WorkflowState.REOPENING,
    }
)

FINISHED = frozenset(WorkflowState) - UNFINISHED

BATCH_MOVES: dict[BatchState, frozenset[BatchState]] = {
    BatchState.READY: frozenset({BatchState.LEASED, BatchState.WAITING, BatchState.DONE}),
    BatchState.LEASED: frozenset(
        {BatchState.READY, BatchState.WAITING, BatchState.DELAYED, BatchState.DONE}
    ),
    BatchState.WAITING: frozenset({BatchState.READY, BatchState.DONE}),
    BatchState.DELAYED: frozenset({BatchState.READY, BatchState.DONE}),
    BatchState.DONE: frozenset({BatchState.READY}),
}
"""A DONE batch is READY again in a new round only."""

REQUEST_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.PENDING: frozenset(RequestState) - {RequestState.PENDING},
    RequestState.COMPLETED: frozenset(),
    RequestState.FAILED: frozenset({RequestState.PENDING}),
    RequestState.TIMED_OUT: frozenset({RequestState.PENDING}),
    RequestState.CANCELLED: frozenset({RequestState.PENDING}),
}
"""What did not complete is PENDING again in a new round only."""


def may_move(before: WorkflowState, after: WorkflowState) -> bool:
    """Say whether a workflow may go from one state to the other."""
    return after in WORKFLOW_MOVES[before]


class Act(StrEnum):
    """What a client may do to a workflow once its rows are in."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    COMPLETE = "complete"
    RETRY = "retry"


class Refusal(StrEnum):
    """Why a workflow's state does not allow an act; the code that clients get."""

    FINISHED = "already_finished"
    ENDING = "workflow_ending"
    UNFINISHED = "workflow_unfinished"
    REOPENING = "workflow_reopening"


_S = WorkflowState
_ACTS: dict[Act, dict[WorkflowState, WorkflowState | Refusal]] = {
    Act.PAUSE: {
        _S.OPEN: _S.PAUSED,
        _S.RUNNING: _S.PAUSED,
        _S.PAUSED: _S.PAUSED,
        _S.ENDING: Refusal.ENDING,
        _S.REOPENING: Refusal.REOPENING,
    },
    Act.RESUME: {
        _S.OPEN: _S.OPEN,
        _S.RUNNING: _S.RUNNING,
        _S.PAUSED: _S.RUNNING,
        _S.ENDING: Refusal.ENDING,
        _S.REOPENING: _S.REOPENING,
    },
    Act.CANCEL: {
        _S.OPEN: _S.ENDING,
        _S.RUNNING: _S.ENDING,
        _S.PAUSED: _S.ENDING,
        _S.ENDING: _S.ENDING,
        _S.REOPENING: _S.ENDING,
        _S.CANCELLED: _S.CANCELLED,
    },
    Act.COMPLETE: {
        _S.OPEN: _S.ENDING,
        _S.RUNNING: _S.ENDING,
        _S.PAUSED: _S.ENDING,
        _S.ENDING: _S.ENDING,
        _S.REOPENING: _S.ENDING,
        _S.COMPLETED: _S.COMPLETED,
        _S.PARTIAL: _S.PARTIAL,
        _S.FAILED: _S.FAILED,
    },
    Act.RETRY: {
        _S.OPEN: Refusal.UNFINISHED,
        _S.RUNNING: Refusal.UNFINISHED,
        _S.PAUSED: Refusal.UNFINISHED,
        _S.ENDING: Refusal.ENDING,
        _S.PARTIAL: _S.REOPENING,
        _S.FAILED: _S.REOPENING,
        _S.CANCELLED: _S.REOPENING,
        _S.REOPENING: _S.REOPENING,
    },
}
"""State that an act leads to, the same one where it was done before; else finished ones refuse."""


def act_upon(
    act: Act, state: WorkflowState, *, is_closed: bool, round: int
) -> WorkflowState | Refusal:
    """Return the state that an act leads to, or why it is refused.

    The same state means that the act was done before: it changes nothing and is no error.
    """
    if act is Act.RESUME and state is WorkflowState.PAUSED and not is_closed:
        return WorkflowState.OPEN
    if act is Act.RETRY and round > 1 and state in STARTED:
        return state
    return _ACTS[act].get(state, Refusal.FINISHED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """How many requests of a workflow stand in each terminal state."""

    total: int
    completed: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How requests end that nobody waits for any more."""

    state: RequestState
    code: str


ENDINGS: dict[EndingReason, Ending] = {
    EndingReason.CANCELLED: Ending(state=RequestState.CANCELLED, code="cancelled"),
    EndingReason.MAX_DURATION: Ending(state=RequestState.TIMED_OUT, code="max_duration"),
    EndingReason.COMPLETE_WHEN: Ending(state=RequestState.CANCELLED, code="not_awaited"),
    EndingReason.FORCED: Ending(state=RequestState.CANCELLED, code="not_awaited"),
}

DEADLINE = Ending(state=RequestState.TIMED_OUT, code="deadline")
"""Of what was not started by the deadline."""

VERSION_RETIRED = Ending(state=RequestState.FAILED, code="version_retired")
"""Of what was not started when an operator retired its rater version."""


def outcome(tally: Tally, reason: EndingReason | None) -> WorkflowState:
    """Return the final state of a workflow none of whose items is open.

    Cancelling wins over what was rated before, so that the client finds the word it said.
    """
    if reason is EndingReason.CANCELLED:
        return WorkflowState.CANCELLED
    if tally.completed == tally.total:
        return WorkflowState.COMPLETED
    if tally.completed == 0:
        return WorkflowState.FAILED
    return WorkflowState.PARTIAL
