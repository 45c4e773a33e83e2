"""Laws of the queue under any order of events: what may never happen, and that all ends well.

Hypothesis plays claims, take-overs, finishes, deaths and endings in any order in one session; a
storm runs them at once in many. Both end by draining the queue.
"""

import contextlib
import random
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fulfillment import completion, control, ending, folding, leases
from fulfillment.clock import database_now
from fulfillment.errors import Conflict
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
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
    BatchState,
    EndingReason,
    RequestState,
    Source,
    WorkflowState,
)
from fulfillment.scores import Scored
from tests.rating_queue import (
    Message,
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
    submit,
    take,
    threads,
)

WINDOW = 3
OUTCOMES = ("rated", "rated", "bad", "failed", "late", "left")


def finish_of(taken: Taken, outcomes: list[str], *, retry_in_s: float | None) -> Finish:
    """Return a finish that says one of OUTCOMES of each item that was sent."""
    said = dict(zip(sent_items(taken), outcomes, strict=False))
    of = {kind: [i for i, o in said.items() if o == kind] for kind in OUTCOMES}
    return Finish(
        taken=taken,
        scored={i: Scored(score=1.0 + i) for i in of["rated"]},
        failed={**dict.fromkeys(of["bad"], "bad"), **dict.fromkeys(of["failed"], "exhausted")},
        for_good=frozenset(of["bad"]),
        timed_out=dict.fromkeys(of["late"], "deadline"),
        not_before=None if retry_in_s is None else database_now() + timedelta(seconds=retry_in_s),
        calls=1,
    )


def drain(running: Queue) -> None:
    """Let everything end: no harm is done any more, and each executor rates what it gets."""
    executor = boot(slots=1_000)
    Workflow.objects.filter(state=WorkflowState.PAUSED).update(state=WorkflowState.RUNNING)
    for _ in range(60):
        now = database_now() + timedelta(hours=1)
        ExecutorBoot.objects.update(heartbeat_at=now)
        leases.expire(now=now, trust_heartbeats=True)
        end_pauses()
        running.wake_and_run()
        for message in running.take_sent():
            leases.finish([rated(t) for t in take(message, by=executor)])
        check_all()
        if not Workflow.objects.filter(finished_at=None).exists():
            break
    # What was swept while it was computed ends when its lease does.
    leases.expire(now=database_now() + timedelta(hours=2), trust_heartbeats=True)
    leases.wake(now=database_now())


def all_ended_well() -> None:
    """Assert I1 and I5 of everything, and that nothing is left behind."""
    for workflow in Workflow.objects.all():
        finished(workflow)
    assert Event.objects.count() == Workflow.objects.count()
    assert not RatingRequest.objects.filter(state=RequestState.PENDING).exists()
    assert not Batch.objects.exclude(state=BatchState.DONE).exists()
    assert not Flight.objects.exists()
    assert not BatchWait.objects.exists()


class Play:
    """A few workflows over six fingerprints, a window of three, two executors, and what may happen
    to them; `chance` decides the details of a step."""

    def __init__(self) -> None:
        self.executors = [boot(slots=4), boot(slots=4)]
        self.version = rater()
        self.queue = queue(Replica(key="r1", window=WINDOW), Replica(key="r2", window=1))
        self.workflows: list[int] = []
        self.messages: list[Message] = []
        self.works: list[Taken] = []
        self.ended: dict[int, tuple[Any, ...]] = {}

    def submit(self, chance: random.Random) -> None:
        kind = chance.choice(["plain", "plain", "plain", "bypass", "no_store", "hasty"])
        changes: dict[str, Any] = {} if kind in {"plain", "hasty"} else {kind: True}
        if kind == "hasty":
            changes["complete_when"] = 0.5
        workflow = submit(
            chance.choices("abcdef", k=chance.randint(1, 7)),
            of=self.version,
            batch_size=chance.randint(1, 3),
            priority=chance.choice([10, 50, 90]),
            **changes,
        )
        self.workflows.append(workflow.pk)

    def dispatch(self, chance: random.Random) -> None:
        if chance.random() < 0.3:
            end_pauses()
        self.queue.wake_and_run()
        held = Batch.objects.filter(state=BatchState.LEASED)
        assert held.filter(replica="r1").count() <= WINDOW
        assert held.filter(replica="r2").count() <= 1
        self.messages += self.queue.take_sent()

    def take(self, chance: random.Random) -> None:
        """Deliver the newest message, or an old one again."""
        if self.messages:
            message = self.messages[-1] if chance.random() < 0.7 else chance.choice(self.messages)
            self.works += take(message, by=chance.choice(self.executors))

    def dispatch_and_take(self, chance: random.Random) -> None:
        before = len(self.messages)
        self.dispatch(chance)
        for message in self.messages[before:]:
            self.works += take(message, by=chance.choice(self.executors))

    def work(self, chance: random.Random) -> Taken | None:
        """Return work whose lease is current, or any that ever was."""
        leased = dict(Batch.objects.filter(state=BatchState.LEASED).values_list("pk", "fence"))
        current = [w for w in self.works if leased.get(w.batch_id) == w.fence]
        choice = current if current and chance.random() < 0.7 else self.works
        return chance.choice(choice) if choice else None

    def finish(self, chance: random.Random) -> None:
        """Of a lease that is another's by now, or of one that was finished, nothing is written."""
        work = self.work(chance)
        if work is None:
            return
        outcomes = chance.choices(OUTCOMES, k=3)
        said = finish_of(work, outcomes, retry_in_s=chance.choice([None, 0.0, 3_600.0]))
        for _ in range(chance.choice([1, 1, 2])):
            lease = Batch.objects.filter(pk=work.batch_id, state=BatchState.LEASED)
            current = lease.filter(fence=work.fence).exists()
            before = self.written()
            leases.finish([said])
            assert current or self.written() == before

    def finish_two(self, chance: random.Random) -> None:
        one, two = self.work(chance), self.work(chance)
        if one and two and one.batch_id != two.batch_id:
            leases.finish([rated(one), rated(two)])

    def written(self) -> tuple[list[Any], ...]:
        return tuple(
            list(table.objects.order_by("pk").values()) for table in (Batch, Rating, RatingRequest)
        )

    def go_on(self, chance: random.Random) -> None:
        """Extend a lease for a further call, during which workflow or executor may end."""
        work = self.work(chance)
        if work is None:
            return
        probing = chance.choice([None, *sent_items(work)])
        leases.extend(work.batch_id, work.fence, call_limit=timedelta(minutes=1), probing=probing)
        if chance.random() < 0.6:
            self.end(work.workflow_id, chance)
            check_all()
        match chance.choice(["dies", "goes on", "ends"]):
            case "dies":
                self.expire(3_600)
            case "ends":
                outcomes = chance.choices(OUTCOMES, k=3)
                leases.finish([finish_of(work, outcomes, retry_in_s=None)])

    def lose_messages(self, chance: random.Random) -> None:
        """Pick-up leases end after 15 s, started ones later."""
        self.expire(16)

    def expire(self, after_s: float) -> None:
        now = database_now() + timedelta(seconds=after_s)
        ExecutorBoot.objects.update(heartbeat_at=now)
        leases.expire(now=now, trust_heartbeats=True)
        ExecutorBoot.objects.update(heartbeat_at=database_now())

    def lose_executor(self, chance: random.Random) -> None:
        now = database_now()
        ExecutorBoot.objects.filter(pk=chance.choice(self.executors)).update(
            heartbeat_at=now - leases.SILENCE
        )
        leases.expire(now=now, trust_heartbeats=True)
        ExecutorBoot.objects.update(heartbeat_at=now)

    def end_any(self, chance: random.Random) -> None:
        if self.workflows:
            self.end(chance.choice(self.workflows), chance)

    def end(self, workflow: int, chance: random.Random) -> None:
        of = Workflow.objects.filter(pk=workflow)
        match chance.choice(["cancel", "die in it", "deadline_at", "ends_at", "pause", "resume"]):
            case "cancel":
                with contextlib.suppress(Conflict):  # it has ended by itself
                    control.cancel(workflow_id=workflow)
            case "die in it":  # between the cancel and its sweep
                ending.begin(workflow, EndingReason.CANCELLED, database_now())
            case "pause" | "resume" as act:
                with contextlib.suppress(Conflict):
                    {"pause": control.pause, "resume": control.resume}[act](workflow_id=workflow)
            case what:
                of.update(**{what: database_now()})

    def complete(self, chance: random.Random) -> None:
        match chance.choice(["check", "all", "fold"]):
            case "check" if self.workflows:
                completion.check(chance.choice(self.workflows))
            case "fold":
                folding.fold()
            case _:
                check_all()

    def laws_hold(self, *, counted: bool) -> None:
        rows_are_sound()
        self._open_items_are_pending_rows()
        self._what_ended_stays()
        if counted:  # costly: not after every step
            for workflow in Workflow.objects.all():
                counts_add_up(workflow)
                events = Event.objects.filter(workflow=workflow).count()
                assert events == (workflow.finished_at is not None)

    def _open_items_are_pending_rows(self) -> None:
        """Nothing is forgotten, and nothing that ended is worked on for itself (I1)."""
        pending = RatingRequest.objects.filter(state=RequestState.PENDING)
        assert set(pending.values_list("pk", flat=True)) == {
            request_key(batch.workflow_id, position)
            for batch in Batch.objects.exclude(state=BatchState.DONE)
            for position, item in zip(batch.positions, batch.item_of, strict=True)
            if batch.open_mask >> item & 1
        }

    def _what_ended_stays(self) -> None:
        """No terminal request changes, and each score is that of its rating (I3, I13)."""
        now = {
            row[0]: row
            for row in RatingRequest.objects.exclude(state=RequestState.PENDING).values_list(
                "pk", "state", "source", "score", "rating_id", "rated_at", "error", "attempts"
            )
        }
        assert {pk: now.get(pk) for pk in self.ended} == self.ended
        self.ended = now
        scored = {row[4]: row[3] for row in now.values() if row[3] is not None}
        assert scored == dict(Rating.objects.filter(pk__in=scored).values_list("pk", "score"))


MOVES = (
    [Play.submit] * 2
    + [Play.dispatch, Play.take]
    + [Play.dispatch_and_take] * 3
    + [Play.finish] * 3
    + [Play.finish_two, Play.go_on, Play.go_on, Play.lose_messages, Play.lose_executor]
    + [Play.end_any, Play.complete, Play.complete]
)


@pytest.mark.django_db
@settings(
    max_examples=35,
    suppress_health_check=list(HealthCheck),
    # A failure shows its steps; shrinking them here would take minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(MOVES), st.integers(0, 1 << 32)), min_size=40, max_size=40
    )
)
def test_any_order_of_events_keeps_the_laws_and_drains(
    steps: list[tuple[Callable[[Play, random.Random], None], int]],
) -> None:
    with transaction.atomic():
        play = Play()
        for number, (move, seed) in enumerate(steps):
            move(play, random.Random(seed))
            play.laws_hold(counted=number % 8 == 0)
        drain(play.queue)
        play.laws_hold(counted=True)
        all_ended_well()
        transaction.set_rollback(True)


STORM_S = 3.0


@pytest.mark.django_db(transaction=True)
def test_a_storm_of_everything_at_once_keeps_the_laws_and_drains() -> None:
    """Real sessions beside each other: no deadlock, no lost count, nothing written twice."""
    executors = [boot(slots=500) for _ in range(2)]
    version = rater()
    dispatcher = queue(Replica(window=12))
    over = threading.Event()
    lock = threading.Lock()
    posted: list[Message] = []
    chance = random.Random(20_261_130)

    def until_over(step: Callable[[], None]) -> Callable[[], int]:
        def loop() -> int:
            steps = 0
            while not over.is_set():
                step()
                steps += 1
            return steps

        return loop

    def dispatch() -> None:
        now = database_now()
        if chance.random() < 0.2:
            end_pauses()
        if chance.random() < 0.1:
            leases.expire(now=now + timedelta(seconds=16), trust_heartbeats=False)
        dispatcher.wake_and_run()
        with lock:
            posted.extend(dispatcher.take_sent())

    def execute() -> None:
        with lock:
            message = posted.pop(chance.randrange(len(posted))) if posted else None
        if message is None:
            over.wait(0.002)
            return
        works = take(message, by=chance.choice(executors), task=uuid.uuid4())
        if chance.random() < 0.1:
            return  # it died
        finishes = [
            finish_of(
                work,
                [chance.choice(OUTCOMES) for _ in range(12)],
                retry_in_s=chance.choice([None, 0.0]),
            )
            for work in works
        ]
        chance.shuffle(finishes)
        leases.finish(finishes)

    def come_and_go() -> None:
        rows = [f"n{chance.randrange(40)}" for _ in range(chance.randrange(1, 30))]
        with transaction.atomic():
            workflow = submit(rows, of=version, batch_size=chance.choice([1, 3, 12]))
        what = chance.random()
        over.wait(chance.random() * 0.05)
        if what < 0.3:
            with contextlib.suppress(Conflict):  # it has ended by itself
                control.cancel(workflow_id=workflow.pk)
        elif what < 0.5:
            Workflow.objects.filter(pk=workflow.pk).update(deadline_at=database_now())

    def complete() -> None:
        check_all()

    steps = [dispatch, execute, execute, come_and_go, complete]
    with threads(len(steps)) as pool:
        running: list[Future[int]] = [pool.submit(until_over(step)) for step in steps]
        over.wait(STORM_S)
        over.set()
        counts = [future.result(20) for future in running]

    assert min(counts) > 5, counts
    rows_are_sound()
    for workflow in Workflow.objects.all():
        counts_add_up(workflow)
    dispatcher.fleet.live = [replace(dispatcher.fleet.live[0], window=1_000)]
    drain(dispatcher)
    all_ended_well()
    models = RatingRequest.objects.filter(source=Source.MODEL)
    assert models.values("rating_id").distinct().count() == models.count()
