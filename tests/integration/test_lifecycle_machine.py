"""The whole lifecycle as a state machine: any order of acts, tries and deaths keeps the laws.

Hypothesis plays clients, the dispatcher, executors and the checker on the real database. The model
remembers what was promised: rows that were accepted, states that ended, events that were sent,
calls that are being made. After every step the laws are asked of the tables; at the end everything
drains, and each workflow has ended once a round.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import pytest
from django.db import transaction
from django.db.models import Case, F, When
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from pytest_django import Settings

from fulfillment import completion, control, folding, intake, leases, progress
from fulfillment.clock import database_now
from fulfillment.control import Changes
from fulfillment.errors import Conflict
from fulfillment.intake import Body, WorkflowForm
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
    POSITION_BITS,
    Batch,
    BatchWait,
    Event,
    ExecutorBoot,
    Flight,
    Rating,
    RatingRequest,
    Workflow,
    request_key,
)
from fulfillment.policy.lifecycle import (
    DISPATCHED,
    FINISHED,
    REQUEST_MOVES,
    WORKFLOW_MOVES,
    BatchState,
    RequestState,
    WorkflowState,
)
from fulfillment.scores import Scored
from tests import builders
from tests.rating_queue import (
    Queue,
    Replica,
    boot,
    check_all,
    counts_add_up,
    end_pauses,
    finished,
    queue,
    rated,
    rater,
    rows_are_sound,
    sent_items,
    take,
)

T = TypeVar("T")

TEXTS = "abcdef"
HOUR = timedelta(hours=1)
MOST_WORKFLOWS = 4
EXAMPLES, STEPS = 15, 30

numbers = st.integers(0, 11)
texts = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6)
outcomes = st.lists(
    st.sampled_from(["ok", "ok", "ok", "permanent", "exhausted", "retryable"]),
    min_size=12,
    max_size=12,
)


class Lifecycle(RuleBasedStateMachine):
    """A few workflows over six texts, a window of three batches, two executors.

    Steps choose among what there is by a number: what Hypothesis draws must not depend on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transaction = transaction.atomic()
        self.transaction.__enter__()
        self.rows: dict[int, int] = {}
        """Rows that were accepted, by workflow."""
        self.seen: dict[int, tuple[int, int]] = {}
        """(state, round) of each workflow after the last step."""
        self.ended: dict[int, tuple[Any, ...]] = {}
        """Terminal requests after the last step, with the round of their workflow."""
        self.sent: list[tuple[int, int]] = []
        """Leases that were published, newest last."""
        self.works: list[Taken] = []
        """Batches that were taken over, newest last."""
        self.calls: dict[tuple[int, int], set[str]] = {}
        """Fingerprints that a started try computes, by (batch, fence)."""
        self.rated = 0
        self.steps = 0

    @initialize(some=texts, others=texts, close=st.booleans())
    def start(self, some: list[str], others: list[str], close: bool) -> None:
        self.version = rater()
        self.queue: Queue = queue(Replica(window=3))
        self.boots = [boot(slots=8), boot(slots=8)]
        self.submit(some, close=True, batch_size=2)
        self.submit(others, close=close, batch_size=1)
        self.dispatch_and_take_over(retries_are_due=False, by=0)

    # Clients

    @rule(
        rows=texts,
        close=st.sampled_from([True, True, False]),
        batch_size=st.integers(1, 3),
        bypass=st.booleans(),
        complete_when=st.sampled_from([1.0, 1.0, 0.5]),
        priority=st.sampled_from([10, 50, 90]),
    )
    def submit(self, rows: list[str], close: bool, **fields: Any) -> None:
        if len(self.rows) < MOST_WORKFLOWS:
            form = WorkflowForm(rater=builders.RATER, **fields)
            made = intake.submit(
                form=form, body=body(rows), owner="alice", idempotency_key=None, close=close
            ).workflow
            self.rows[made.pk] = len(rows)

    @rule(one=numbers, rows=texts)
    def append(self, one: int, rows: list[str]) -> None:
        if (workflow := self.workflow(one)) is None:
            return
        of = Workflow.objects.select_related("rater", "rater_version").get(pk=workflow)
        with refused_with("workflow_not_open") as refusals:
            answer = intake.append(
                workflow=of, body=body(rows), owner="alice", idempotency_key=None
            ).answer
            self.rows[workflow] += answer["accepted"]
        assert bool(refusals) == (of.closed_at is not None)

    @rule(one=numbers)
    def close(self, one: int) -> None:
        if (workflow := self.workflow(one)) is not None:
            control.close(workflow_id=workflow)

    @rule(one=numbers, act=st.sampled_from([control.pause, control.resume, control.resume]))
    def pause_or_resume(self, one: int, act: Callable[..., Workflow]) -> None:
        refusals = {"already_finished", "workflow_ending", "workflow_reopening"}
        self.act(act, one, refusals)

    @rule(one=numbers, act=st.sampled_from([control.cancel, control.complete]))
    def end(self, one: int, act: Callable[..., Workflow]) -> None:
        self.act(act, one, {"already_finished"})

    @rule(one=numbers, dies=st.booleans())
    def retry(self, one: int, dies: bool) -> None:
        """`dies`: the process is gone when the round was begun; the checker makes it."""
        before, control.DONE_IN_CALL = control.DONE_IN_CALL, 0 if dies else control.DONE_IN_CALL
        try:
            self.act(
                control.retry,
                one,
                {"already_finished", "workflow_unfinished", "workflow_ending"},
            )
        finally:
            control.DONE_IN_CALL = before

    def act(self, act: Callable[..., Workflow], one: int, refusals: set[str]) -> None:
        """Act, and act again: the same answer. What is refused changes nothing."""
        if (workflow := self.workflow(one)) is None:
            return
        before = standing(workflow)
        with refused_with(*refusals) as refused:
            first = act(workflow_id=workflow)
        if refused:
            assert standing(workflow) == before
        elif act is not control.retry:
            second = act(workflow_id=workflow)
            assert (second.state, second.round) == (first.state, first.round)

    @rule(one=numbers, priority=st.sampled_from([1, 50, 99]), later=st.booleans())
    def change(self, one: int, priority: int, later: bool) -> None:
        if (workflow := self.workflow(one)) is None:
            return
        changes = Changes(priority=priority, deadline_s=20_000 if later else None)
        with refused_with("already_finished", "workflow_ending"):
            control.change(workflow_id=workflow, changes=changes, now=database_now())

    def workflow(self, one: int) -> int | None:
        return chosen(list(self.rows), one)

    # Time

    @rule(one=numbers, field=st.sampled_from(["deadline_at", "deadline_at", "ends_at"]))
    def pass_time(self, one: int, field: str) -> None:
        if (workflow := self.workflow(one)) is not None:
            Workflow.objects.filter(pk=workflow).update(**{field: database_now()})

    # Dispatcher and executors

    @rule(retries_are_due=st.booleans())
    def dispatch(self, retries_are_due: bool) -> None:
        if retries_are_due:
            end_pauses()
        self.queue.wake_and_run()
        assert Batch.objects.filter(state=BatchState.LEASED).count() <= 3
        self.sent += [lease for message in self.queue.take_sent() for lease in message.leases]

    @rule(one=numbers, by=st.integers(0, 1))
    def take_over(self, one: int, by: int) -> None:
        """Deliver a message, perhaps not for the first time."""
        lease = chosen(self.sent, one)
        taken = [] if lease is None else take([lease], by=self.boots[by], task=UUID(int=lease[0]))
        for work in taken:
            workflow = Workflow.objects.get(pk=work.workflow_id)
            assert workflow.state in DISPATCHED
            self.calls[work.batch_id, work.fence] = {work.fingerprints[i] for i in sent_items(work)}
        self.works += taken

    @rule(retries_are_due=st.booleans(), by=st.integers(0, 1))
    def dispatch_and_take_over(self, retries_are_due: bool, by: int) -> None:
        self.dispatch(retries_are_due)
        for newest in range(3):
            self.take_over(newest, by)

    @rule(by=st.integers(0, 1), said=outcomes)
    def work(self, by: int, said: list[str]) -> None:
        self.dispatch_and_take_over(retries_are_due=True, by=by)
        for newest in range(2):
            self.finish(newest, said, later=False)

    @rule(one=numbers)
    def go_on(self, one: int) -> None:
        if (work := chosen(self.works, one)) is not None:
            alone = sent_items(work)[0] if work.lost >= leases.LOST_BEFORE_SINGLES else None
            leases.extend(work.batch_id, work.fence, call_limit=timedelta(minutes=1), probing=alone)

    @rule(one=numbers, said=outcomes, later=st.booleans())
    def finish(self, one: int, said: list[str], later: bool) -> None:
        """Finish, perhaps not for the first time; what is not current writes nothing (I3)."""
        if (work := chosen(self.works, one)) is None:
            return
        by = {kind: [i for i, s in zip(sent_items(work), said, strict=False) if s == kind]
              for kind in set(said)}  # fmt: skip
        retry_at = database_now() + (HOUR if later else timedelta())
        finish = Finish(
            taken=work,
            scored={i: Scored(score=1.0 + i) for i in by.get("ok", ())},
            failed={
                **dict.fromkeys(by.get("permanent", ()), "bad"),
                **dict.fromkeys(by.get("exhausted", ()), "exhausted"),
            },
            for_good=frozenset(by.get("permanent", ())),
            not_before=retry_at if by.get("retryable") else None,
            calls=1,
        )
        leased = Batch.objects.filter(pk=work.batch_id, state=BatchState.LEASED)
        current = leased.filter(fence=work.fence).exists()
        before = terminal_requests()
        emptied = leases.finish([finish])
        assert current or terminal_requests() == before
        assert Rating.objects.count() - self.rated == (len(finish.scored) if current else 0)
        self.rated = Rating.objects.count()
        self.calls.pop((work.batch_id, work.fence), None)
        for workflow_id in emptied:
            completion.check(workflow_id)

    @rule(one=numbers)
    def lose_executor(self, one: int) -> None:
        """The executor of a batch falls silent, and with it all that it held."""
        if (work := chosen(self.works, one)) is not None:
            by = Batch.objects.get(pk=work.batch_id).boot_id
            self.expire(database_now(), dead=by)

    @rule()
    def lose_messages(self) -> None:
        self.expire(database_now() + timedelta(seconds=16), dead=None)

    def expire(self, now: datetime, *, dead: UUID | None) -> None:
        ExecutorBoot.objects.update(heartbeat_at=now)
        if dead is not None:
            ExecutorBoot.objects.filter(pk=dead).update(heartbeat_at=now - 2 * leases.SILENCE)
        leases.expire(now=now, trust_heartbeats=True)
        ExecutorBoot.objects.update(heartbeat_at=database_now())

    # The checker

    @rule(what=st.sampled_from(["all", "fold"]))
    def check(self, what: str) -> None:
        check_all() if what == "all" else folding.fold()

    # Laws

    @invariant()
    def laws_hold(self) -> None:
        rows_are_sound()
        self.workflows_move_as_the_table_says()
        self.requests_end_once_a_round()
        self.open_items_are_pending_rows()
        self.nothing_is_computed_twice_at_once()
        self.steps += 1
        if self.steps % 4 == 0:  # costly: not after every step
            self.counts_add_up()

    def workflows_move_as_the_table_says(self) -> None:
        found = {w.pk: (w.state, w.round) for w in Workflow.objects.all()}
        for workflow, (state, round_) in found.items():
            before, round_before = self.seen.get(workflow, (state, round_))
            assert reachable(WorkflowState(before), WorkflowState(state))
            assert round_before <= round_ <= round_before + 1
            ended = round_ if state in FINISHED else round_ - 1
            rounds = Event.objects.filter(workflow=workflow).order_by("round")
            assert list(rounds.values_list("round", flat=True)) == list(range(1, ended + 1))
        self.seen = found

    def requests_end_once_a_round(self) -> None:
        """What ended stays as it is until a new round opens it; what completed stays (I1, I13)."""
        found = terminal_requests()
        for pk, before in self.ended.items():
            *said, round_ = before
            if list(found.get(pk, ())[:-1]) != said:
                assert REQUEST_MOVES[RequestState(said[0])], "a COMPLETED request changed"
                assert Workflow.objects.get(pk=pk >> POSITION_BITS).round > round_
        completed = {pk: row[2:4] for pk, row in found.items() if row[0] == RequestState.COMPLETED}
        ratings = dict(
            Rating.objects.filter(pk__in={rating for _, rating in completed.values()}).values_list(
                "pk", "score"
            )
        )
        for score, rating in completed.values():
            assert ratings[rating] == score
        self.ended = found

    def open_items_are_pending_rows(self) -> None:
        """Nothing is forgotten, and nothing that ended is worked on (I1); no open bit in DONE."""
        pending = RatingRequest.objects.filter(state=RequestState.PENDING)
        opened = [
            request_key(batch.workflow_id, position)
            for batch in Batch.objects.exclude(state=BatchState.DONE)
            for position, item in zip(batch.positions, batch.item_of, strict=True)
            if batch.open_mask >> item & 1
        ]
        assert sorted(opened) == sorted(pending.values_list("pk", flat=True))
        assert not Batch.objects.filter(state=BatchState.DONE).exclude(open_mask=0).exists()

    def nothing_is_computed_twice_at_once(self) -> None:
        """Started tries of current leases have no text in common (I4); a flight has its lease."""
        current = set(Batch.objects.filter(state=BatchState.LEASED).values_list("pk", "fence"))
        computing = [f for lease, texts in self.calls.items() if lease in current for f in texts]
        assert len(computing) == len(set(computing))
        assert set(Flight.objects.values_list("batch_id", "fence")) <= current

    def counts_add_up(self) -> None:
        for workflow in Workflow.objects.all():
            counts = counts_add_up(workflow)
            assert counts["received"] == self.rows[workflow.pk], "a row was lost"
            shown = progress.read(workflow)["counts"]
            assert sum(shown.values()) == 2 * shown["total"]

    # The end

    def teardown(self) -> None:
        try:
            if self.rows:
                self.drain()
                self.all_ended_well()
        finally:
            self.transaction.__exit__(*_rolled_back())

    def drain(self) -> None:
        """Let everything end: clients close what they left open, and executors rate."""
        executor = boot(slots=1_000)
        for workflow in self.rows:
            with contextlib.suppress(Conflict):
                control.close(workflow_id=workflow)
                control.resume(workflow_id=workflow)
        for _ in range(40):
            now = database_now() + HOUR
            ExecutorBoot.objects.update(heartbeat_at=now)
            leases.expire(now=now, trust_heartbeats=True)
            end_pauses()
            self.queue.wake_and_run()
            for message in self.queue.take_sent():
                leases.finish([rated(t) for t in take(message, by=executor, task=uuid.uuid4())])
            check_all()
            if not Workflow.objects.filter(finished_at=None).exists():
                break
        leases.expire(now=database_now() + 2 * HOUR, trust_heartbeats=True)
        leases.wake(now=database_now())

    def all_ended_well(self) -> None:
        for workflow in Workflow.objects.all():
            finished(workflow)
        assert not Batch.objects.exclude(state=BatchState.DONE).exists()
        assert not Flight.objects.exists()
        assert not BatchWait.objects.exists()


def chosen(among: list[T], one: int) -> T | None:
    """Return one of them, None if there is none; 0 is the newest."""
    return among[-1 - one % len(among)] if among else None


def body(rows: list[str]) -> Body:
    return Body(chunks=[builders.ndjson([{"query_text": text} for text in rows])])


def standing(workflow: int) -> tuple[Any, ...]:
    """Return all that is said of a workflow, its requests and its batches."""
    return (
        Workflow.objects.values().get(pk=workflow),
        list(RatingRequest.objects.filter(workflow=workflow).order_by("pk").values()),
        list(Batch.objects.filter(workflow=workflow).order_by("pk").values()),
    )


def terminal_requests() -> dict[int, tuple[Any, ...]]:
    """Return (state, source, score, rating, when, error, attempts, round) of what has ended.

    While a new round is being made, what it has not opened yet stands as the last one left it.
    """
    round_ended = F("workflow__round") - Case(
        When(workflow__state=WorkflowState.REOPENING, then=1), default=0
    )
    return {
        row[0]: row[1:]
        for row in RatingRequest.objects.exclude(state=RequestState.PENDING).values_list(
            *("pk", "state", "source", "score", "rating_id", "rated_at", "error", "attempts"),
            round_ended,
        )
    }


def reachable(before: WorkflowState, after: WorkflowState) -> bool:
    """Say whether the table leads from one state to the other: a step may make several moves."""
    seen, edge = {before}, {before}
    while edge:
        edge = {state for of in edge for state in WORKFLOW_MOVES[of]} - seen
        seen |= edge
    return after in seen


@contextlib.contextmanager
def refused_with(*codes: str) -> Iterator[list[str]]:
    """Let these conflicts be; give the list that they are put into."""
    refusals: list[str] = []
    try:
        yield refusals
    except Conflict as error:
        if error.code not in codes:
            raise
        refusals.append(error.code)


class _RolledBack(Exception):
    """Ends a transaction without keeping it."""


def _rolled_back() -> tuple[Any, Any, Any]:
    return _RolledBack, _RolledBack(), None


@pytest.mark.django_db
def test_any_order_of_acts_tries_and_deaths_keeps_the_laws(settings_of_plugins: None) -> None:
    run_state_machine_as_test(
        Lifecycle,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # A failure shows its steps; shrinking them here would take minutes.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )


@pytest.fixture
def settings_of_plugins(settings: Settings) -> None:
    builders.use_plugins(settings)
