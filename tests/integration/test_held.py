"""What is out: counted in every pass while it is little, believed for a second when it is much."""

import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from fulfillment import dispatch, held, leases
from fulfillment.claim import claim
from fulfillment.clock import database_now
from fulfillment.held import Held
from fulfillment.models import Batch, Workflow
from fulfillment.policy.lifecycle import BatchState
from fulfillment.policy.priority import PriorityClass
from fulfillment.windows import Room
from models_admin.policy.traffic_rules import Rule
from tests import builders
from tests.builders import NOW
from tests.rating_queue import Queue, Replica, batches, boot, queue, rated, rater, submit, take

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)
MANY = 6


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@pytest.fixture
def executor() -> uuid.UUID:
    return boot()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, executor: uuid.UUID) -> Queue:
    """Return a dispatcher whose only replica is full of many."""
    monkeypatch.setattr(held, "FEW", MANY - 1)
    submit(names(3 * MANY), batch_size=1)
    dispatcher = queue(Replica(window=MANY))
    assert dispatcher.run().sent == MANY
    return dispatcher


def come_back(dispatcher: Queue, executor: uuid.UUID, count: int) -> None:
    """Let an executor finish some batches."""
    taken = [t for m in dispatcher.take_sent() for t in take(m, by=executor)]
    leases.finish([rated(t) for t in taken[:count]])


def ring(dispatcher: Queue, replica: str = "r1") -> None:
    met: Mapping[str, Any] = {"replica": replica, "cls": 1, "succeeded": 1, "overloaded": 0}
    dispatch.observe(dispatcher.memory, [met], database_now())


def later(dispatcher: Queue, by: timedelta) -> int:
    return dispatch.run_once(
        database_now() + by,
        memory=dispatcher.memory,
        directory=dispatcher.fleet,
        publish=lambda batches, priority: None,
    ).sent


def test_little_is_counted_in_every_pass(executor: uuid.UUID) -> None:
    submit(names(4), batch_size=1)
    dispatcher = queue(Replica(window=2))
    dispatcher.run()

    come_back(dispatcher, executor, 1)

    assert dispatcher.run().sent == 1


def test_of_many_what_came_back_is_seen_at_a_ring(running: Queue, executor: uuid.UUID) -> None:
    come_back(running, executor, 2)
    assert running.run().sent == 0

    ring(running, "another")
    assert running.run().sent == 0
    ring(running)

    assert running.run().sent == 2
    assert running.memory.held.total == MANY
    assert running.run().sent == 0


def test_a_ring_that_is_lost_costs_a_second(running: Queue, executor: uuid.UUID) -> None:
    come_back(running, executor, 2)

    assert later(running, SECOND / 2) == 0
    assert later(running, SECOND) == 2


def test_a_clock_that_is_set_back_costs_a_count(running: Queue, executor: uuid.UUID) -> None:
    come_back(running, executor, 2)

    assert later(running, -SECOND) == 2


def test_a_batch_that_left_again_through_another_replica_came_back_from_the_first(
    running: Queue, executor: uuid.UUID
) -> None:
    first = running.memory.held
    (taken, *_) = [t for m in running.take_sent() for t in take(m, by=executor)]
    leases.finish([leases.Finish(taken=taken)])
    Batch.objects.filter(pk=taken.batch_id).update(
        state=BatchState.LEASED, replica="r2", lease_until=database_now()
    )
    lease = held.Lease(PriorityClass.MIDDLE, taken.rater_version_id, 1)
    first.add("r2", {taken.batch_id: lease})

    first.ring(["r1", "r2"])
    first.look(database_now())

    assert sum(first.calls("r1").values()) == MANY - 1
    assert sum(first.calls("r2").values()) == 1
    assert first.total == first.of(taken.rater_version_id) == MANY


def test_a_batch_that_is_added_twice_counts_once() -> None:
    known = Held()
    known.add("r1", {1: held.Lease(PriorityClass.LOW, 7, 3)})

    known.add("r1", {1: held.Lease(PriorityClass.HIGH, 7, 2)})

    assert known.total == 1
    assert +known.calls("r1") == {PriorityClass.HIGH: 2}  # type: ignore[operator]


def test_of_many_what_came_back_counts_for_no_rule_any_more(
    running: Queue, executor: uuid.UUID
) -> None:
    known = running.memory.held
    known.regulate([Rule(name="all")])
    known.look(database_now())
    come_back(running, executor, 2)

    known.ring(["r1"])
    known.look(database_now())

    assert known.of_rule(0) == known.of_rule(0, ["r1"]) == known.total == MANY - 2


def test_calls_are_counted_by_replica_and_class() -> None:
    high, low = (builders.workflow(priority=priority) for priority in (90, 10))
    for workflow, replica, calls in ((high, "r1", 3), (high, "r1", 1), (low, "r1", 1)):
        leased(workflow, replica, calls)
    leased(low, "r2", 12)
    builders.batch(high, [100])
    known = Held()

    known.look(NOW)

    assert known.calls("r1") == {PriorityClass.HIGH: 4, PriorityClass.LOW: 1}
    assert known.calls("r2") == {PriorityClass.LOW: 12}
    assert not known.calls("r3")
    assert (known.total, known.of(high.rater_version_id)) == (4, 4)


def leased(workflow: Workflow, replica: str, calls: int) -> None:
    position = Batch.objects.count()
    builders.batch(
        workflow, [position], state=BatchState.LEASED, replica=replica, calls=calls,
        lease_until=NOW,
    )  # fmt: skip


def test_what_a_claim_counted_is_not_out_if_it_met_a_lock(
    running: Queue, executor: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_back(running, executor, 2)
    ring(running)

    def locked(*args: Any, **more: Any) -> Any:
        with transaction.atomic():
            claim(*args, **more)
            raise OperationalError("canceling statement due to lock timeout")

    with monkeypatch.context() as patch:
        patch.setattr("fulfillment.dispatch.claim", locked)
        running.run()

    assert running.run().sent == 2


def statements_and_rooms(monkeypatch: pytest.MonkeyPatch, raters: int) -> tuple[int, int]:
    """Return what a pass needs that serves one rater of so many, of which the others are full."""
    of = [rater(f"rater-{raters}-{n}", model_id=f"m{n}") for n in range(raters)]
    dispatcher = queue(
        *(Replica(key=f"{raters}-{n}", model_id=f"m{n}", window=1) for n in range(raters))
    )
    for n, version in enumerate(of):
        submit(names(3, f"{raters}-{n}-"), of=version, batch_size=1)
    assert dispatcher.run().sent == raters
    first = batches(Workflow.objects.get(rater_version=of[0]))[0]
    Batch.objects.filter(pk=first.pk).update(
        state=BatchState.DONE, open_mask=0, sent_mask=0, lease_until=None
    )
    ring(dispatcher, f"{raters}-0")
    statements = rooms = 0
    made = Room.__init__

    def count(execute: Any, *rest: Any) -> Any:
        nonlocal statements
        statements += 1
        return execute(*rest)

    def make(room: Any, **values: Any) -> None:
        nonlocal rooms
        rooms += 1
        made(room, **values)

    with monkeypatch.context() as patch, connection.execute_wrapper(count):
        patch.setattr(Room, "__init__", make)
        assert dispatcher.run().sent == 1
    Workflow.objects.update(deadline_at=database_now())
    Batch.objects.filter(state=BatchState.LEASED).update(state=BatchState.READY, lease_until=None)
    return statements, rooms


def test_a_pass_looks_at_the_windows_of_raters_that_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boot(slots=1_000)

    one, many = (statements_and_rooms(monkeypatch, raters) for raters in (1, 30))

    assert one == many
    assert one[1] == 1


def test_messages_are_out_until_they_came_back(running: Queue, executor: uuid.UUID) -> None:
    known = running.memory.held
    assert known.messages == len(running.sent) == MANY

    come_back(running, executor, 2)
    ring(running)
    known.look(database_now())
    assert known.messages == MANY - 2
    known.forget()
    known.look(database_now())
    assert known.messages == MANY - 2
