"""What is READY: read in every pass while little waits, believed for a moment when much does."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from fulfillment import dispatch, ready
from fulfillment.clock import database_now
from fulfillment.models import Batch
from fulfillment.policy import ordering
from fulfillment.policy.lifecycle import BatchState
from fulfillment.ready import Sight
from tests import builders
from tests.builders import NOW
from tests.rating_queue import Queue, boot, queue, submit

pytestmark = pytest.mark.django_db

MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)


def store(workflows: int, *, batches: int = 2) -> None:
    version = builders.version()
    for _ in range(workflows):
        workflow = builders.workflow(version)
        for number in range(batches):
            builders.batch(workflow, [number])


def statements(sight: Sight, at: Any) -> int:
    """Return how many statements a look at that time needs."""
    sent = 0

    def count(execute: Any, *rest: Any) -> Any:
        nonlocal sent
        sent += 1
        return execute(*rest)

    with connection.execute_wrapper(count):
        sight.look(at)
    return sent


def picks(sight: Sight, room: int) -> Counter[int]:
    """Take what the order gives, as a pass does."""
    (version,) = sight.versions
    decision = ordering.fill(version.order, room=room, memory=ordering.Memory(), taken=sight.taken)
    sight.take(decision.picks)
    return Counter({pick.workflow_id: pick.batches for pick in decision.picks})


def test_little_is_read_in_every_pass() -> None:
    store(3)
    sight = Sight()

    assert [statements(sight, NOW) for _ in range(3)] == [1, 1, 1]


def test_much_is_believed_for_a_time_that_grows_with_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready, "FEW", 2)
    store(3)
    sight = Sight()

    assert statements(sight, NOW) == 1
    assert timedelta() < sight.took < SECOND
    sight.took = SECOND / 100
    assert statements(sight, NOW + SECOND / 20 - MICROSECOND) == 0
    assert statements(sight, NOW + SECOND / 20) == 1
    assert statements(sight, NOW) == 1  # the clock was set back
    sight.took = 100 * SECOND
    assert statements(sight, NOW + ready.LONGEST) == 1


def test_a_ring_makes_it_look_sooner_but_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "FEW", 2)
    store(3)
    sight = Sight()
    sight.look(NOW)
    sight.took = SECOND / 100

    sight.ring()

    assert statements(sight, NOW + SECOND / 50 - MICROSECOND) == 0
    assert statements(sight, NOW + SECOND / 50) == 1
    sight.took = SECOND / 100
    assert statements(sight, NOW + 2 * SECOND / 50) == 0


def test_what_was_claimed_is_not_picked_again_while_the_reading_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready, "FEW", 2)
    store(3)
    sight = Sight()
    sight.look(NOW)

    first, second, third = (picks(sight, room) for room in (4, 4, 4))
    sight.look(NOW)

    assert [sum(p.values()) for p in (first, second, third)] == [4, 2, 0]
    assert set((first + second).values()) == {2}
    assert sight.wanted(sight.versions[0]) == 0


def test_a_new_reading_forgets_what_was_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "FEW", 2)
    store(3)
    sight = Sight()
    sight.look(NOW)
    picks(sight, 6)
    Batch.objects.filter(position=0).update(state=BatchState.DONE, open_mask=0)

    sight.look(NOW + ready.LONGEST)

    assert sight.wanted(sight.versions[0]) == 3


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Return a dispatcher that believes what it reads for a day, however little waits."""
    monkeypatch.setattr(ready, "FEW", 0)
    monkeypatch.setattr(ready, "LONGEST", timedelta(days=1))
    monkeypatch.setattr(ready, "BELIEVED", 10**9)
    boot()
    return queue()


def claims(dispatcher: Queue) -> int:
    """Return how many statements of one pass look for batches to claim."""
    looked = 0

    def count(execute: Any, sql: str, *rest: Any) -> Any:
        nonlocal looked
        looked += "FOR UPDATE SKIP LOCKED" in sql
        return execute(sql, *rest)

    with connection.execute_wrapper(count):
        dispatcher.run()
    return looked


def test_a_pass_does_not_look_for_what_it_has_claimed_already(dispatcher: Queue) -> None:
    submit(["a"])

    assert [claims(dispatcher) for _ in range(3)] == [1, 0, 0]
    assert len(dispatcher.sent) == 1


def test_a_ring_lets_a_pass_see_what_came_since(
    dispatcher: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(["a"])
    dispatcher.run()
    submit(["b"])
    assert dispatcher.run().sent == 0

    dispatch.observe(dispatcher.memory, [{"rater": "r", "further": 1}], database_now())
    assert dispatcher.run().sent == 0
    dispatch.observe(dispatcher.memory, [{}], database_now())
    monkeypatch.setattr(ready, "BELIEVED_AFTER_RING", -1)

    assert dispatcher.run().sent == 1
