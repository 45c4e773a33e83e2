"""What is READY: read in every pass while little waits, believed for a moment when much does."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from fulfillment import control, dispatch, ready
from fulfillment.clock import database_now
from fulfillment.models import Batch
from fulfillment.policy import ordering
from fulfillment.policy.lifecycle import BatchState
from fulfillment.policy.priority import PriorityClass
from fulfillment.ready import Sight
from tests import builders
from tests.builders import NOW
from tests.rating_queue import (
    Queue,
    Replica,
    archived,
    batches,
    boot,
    give_up,
    queue,
    submit,
    threads,
)

pytestmark = pytest.mark.django_db

MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
MIDDLE = PriorityClass.MIDDLE


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
    decision = ordering.fill(
        sight.line_up(version, None),
        room=room,
        memory=ordering.Memory(),
        taken=sight.taken_of(version),
    )
    sight.take(version, decision.picks)
    return Counter({pick.workflow_id: pick.batches for pick in decision.picks})


def test_little_is_read_in_every_pass() -> None:
    store(3)
    sight = Sight()

    assert [statements(sight, NOW) for _ in range(3)] == [1, 1, 1]


def test_a_workflow_that_ends_before_its_deadline_has_only_until_then() -> None:
    version = builders.version()
    plain = builders.workflow(version, deadline_at=NOW + HOUR, ends_at=NOW + 2 * HOUR)
    short = builders.workflow(version, owner="bob", deadline_at=NOW + HOUR, ends_at=NOW + HOUR / 60)
    over = builders.workflow(version, deadline_at=NOW + HOUR, ends_at=NOW)
    for workflow in (plain, short, over):
        for number in range(20):
            builders.batch(workflow, [number])
    sight = Sight()

    sight.look(NOW + HOUR / 120)

    # The older one would be first among equals.
    assert picks(sight, 1) == {short.pk: 1}
    assert over.pk not in sight.line_up(sight.versions[0], None)[MIDDLE].ready


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


def test_lines_are_made_once_a_reading_and_count_as_part_of_what_it_took() -> None:
    store(3)
    sight = Sight()
    (version,) = sight.look(NOW)
    sight.took = timedelta()

    order = sight.line_up(version, None)

    assert sight.took > timedelta()
    assert sight.line_up(version, 1.0) is order
    (again,) = sight.look(NOW)
    assert sight.line_up(again, None) is not order


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


def passes(dispatcher: Queue) -> int:
    """Run passes as the loop does, which rests in between only; return the batches sent."""
    sent = 0
    for _ in range(10_000):
        done = dispatcher.run()
        sent += done.sent
        if not done.full:
            break
    return sent


def test_for_what_is_gone_the_next_is_sent_in_the_same_pass(dispatcher: Queue) -> None:
    small = submit(["a", "b"], batch_size=1)
    submit([f"n{n}" for n in range(6)], batch_size=1)
    dispatcher.fleet.live = [Replica(window=1)]
    dispatcher.run()
    control.cancel(workflow_id=small.pk)
    dispatcher.fleet.live = [Replica(window=4)]

    done = dispatcher.run()

    assert (done.sent, done.missing) == (4, 1)


def test_room_that_claims_left_free_is_filled_once_another_reading_is_due(
    dispatcher: Queue,
) -> None:
    archived("a")
    submit(["a"])
    submit(["b"])
    dispatcher.memory.sight.look(database_now())
    dispatcher.memory.sight.took = SECOND / 20
    later = submit(["c"])

    sent = passes(dispatcher)

    assert sent == 2
    assert batches(later)[0].state == BatchState.LEASED


@pytest.mark.django_db(transaction=True)
def test_what_others_hold_is_not_tried_again_at_once() -> None:
    """A pass that has read anew and tried all that is READY has nothing to gain from another."""
    boot()
    submit(["a"])
    dispatcher = queue()

    with threads(1) as pool, transaction.atomic():
        Batch.objects.select_for_update().get()
        done = pool.submit(dispatcher.run).result(10)

    assert (done.sent, done.missing, done.full) == (0, 1, False)
    assert dispatcher.run().sent == 1


def test_what_a_claim_did_not_find_is_all_of_its_workflow(dispatcher: Queue) -> None:
    large = submit([f"n{n}" for n in range(100)], batch_size=1, priority=90)
    submit(["a"])
    dispatcher.fleet.live = [Replica(window=1)]
    dispatcher.memory.sight.look(database_now())
    control.pause(workflow_id=large.pk)

    assert claims(dispatcher) == 2
    assert len(dispatcher.sent) == 1


def test_a_pass_that_finds_little_of_what_it_read_ends_and_reads_anew(
    dispatcher: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MOST_CLAIMS", 3)
    small = [submit([f"n{n}"], priority=90) for n in range(8)]
    submit(["a"])
    dispatcher.fleet.live = [Replica(window=1)]
    dispatcher.memory.sight.look(database_now())
    for workflow in small:
        control.pause(workflow_id=workflow.pk)

    done = dispatcher.run()

    assert (done.sent, done.missing, done.full) == (0, 3, True)
    assert dispatcher.memory.sight.rung
    assert dispatcher.run().sent == 1


@pytest.mark.parametrize("window", [1, 8], ids=["nothing of a claim left", "some of it left"])
def test_owners_do_not_pay_for_what_was_not_there(dispatcher: Queue, window: int) -> None:
    gone = submit([f"n{n}" for n in range(5)], batch_size=1, owner="ann")
    left = submit([f"m{n}" for n in range(6)], batch_size=1, owner="bob")
    dispatcher.fleet.live = [Replica(window=window)]
    dispatcher.memory.sight.look(database_now())
    control.pause(workflow_id=gone.pk)

    sent = dispatcher.run().sent

    assert sent == min(window - window // 8, 6)
    usage = dispatcher.memory.orders[left.rater_version_id].usage
    for served in (usage.recent, usage.contended):
        assert {owner: n for owner, n in served.items() if n} == {"bob": sent}


def test_more_ready_than_was_counted_is_read_as_soon_as_that_is_used_up(
    dispatcher: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "READY_LOOK", 4)
    submit([f"n{n}" for n in range(10)], batch_size=1)

    done = dispatcher.run()

    assert (done.sent, done.full) == (4, True)
    assert dispatcher.memory.sight.rung
    monkeypatch.setattr(ready, "BELIEVED_AFTER_RING", -1)
    assert passes(dispatcher) == 6


def test_places_that_high_has_are_not_kept_for_it_again(dispatcher: Queue) -> None:
    high = submit([f"h{n}" for n in range(20)], batch_size=1, priority=90)
    low = submit([f"l{n}" for n in range(20)], batch_size=1, priority=10)

    first = dispatcher.run()

    assert (first.sent, first.put_back) == (16, {})
    out = Batch.objects.filter(state=BatchState.LEASED)
    # It has its share, 0.27 of sixteen, though two places are kept for the highest class.
    assert (out.filter(workflow=high).count(), out.filter(workflow=low).count()) == (12, 4)


def test_places_of_what_was_given_up_since_it_was_read_go_to_others(dispatcher: Queue) -> None:
    submit([f"l{n}" for n in range(14)], batch_size=1, priority=10)
    dispatcher.run()
    dispatcher.memory.sight.read_at = None
    given_up = submit([f"g{n}" for n in range(5)], batch_size=1, priority=90)
    other = submit([f"h{n}" for n in range(9)], batch_size=1, priority=90)
    dispatcher.memory.sight.look(database_now())
    give_up(given_up)

    assert claims(dispatcher) == 2
    assert Batch.objects.filter(workflow=other, state=BatchState.LEASED).count() == 2
    assert claims(dispatcher) == 0
