"""DELAYED batches: what others have rated meanwhile ends without waiting for the back-off."""

from datetime import timedelta

import pytest

from fulfillment import claim, leases
from fulfillment.clock import database_now
from fulfillment.leases import Finish
from fulfillment.models import Batch, BatchWait, Workflow
from fulfillment.policy.lifecycle import BatchState
from tests.rating_queue import (
    Queue,
    batches,
    boot,
    check_all,
    counts_add_up,
    end_pauses,
    finished,
    flights,
    queue,
    rated,
    states,
    submit,
    take,
)

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


def _delayed_beside_a_flight() -> tuple[Queue, Workflow, Workflow, leases.Taken]:
    """A batch whose own item `own` waits an hour, and whose `shared` waits for another's flight."""
    executor = boot()
    first = submit(["shared"])
    second = submit(["shared", "own"])
    dispatcher = queue()
    dispatcher.run()
    by_workflow = {t.workflow_id: t for m in dispatcher.take_sent() for t in take(m, by=executor)}
    leases.finish([Finish(taken=by_workflow[second.pk], not_before=database_now() + HOUR)])
    assert [b.state for b in batches(second)] == [BatchState.DELAYED]
    return dispatcher, first, second, by_workflow[first.pk]


def test_what_another_batch_rated_is_complete_while_the_rest_still_waits() -> None:
    _, _, second, other = _delayed_beside_a_flight()
    leases.finish([rated(other)])

    ended = claim.look_again(database_now())

    assert ended == 1
    assert states(second) == ["COMPLETED", "PENDING"]
    (batch,) = batches(second)
    assert (batch.state, batch.open_mask) == (BatchState.DELAYED, 0b10)
    assert batch.not_before is not None
    assert batch.not_before > database_now() + HOUR / 2, "a look is no try"
    assert not BatchWait.objects.exists()
    counts_add_up(second)


def test_a_failure_for_good_is_taken_over_too() -> None:
    _, _, second, other = _delayed_beside_a_flight()
    leases.finish([Finish(taken=other, failed={0: "invalid_request"}, for_good=frozenset({0}))])

    claim.look_again(database_now())

    assert states(second) == ["FAILED", "PENDING"]


def test_an_item_whose_flight_failed_is_tried_with_the_rest() -> None:
    dispatcher, first, second, other = _delayed_beside_a_flight()
    leases.finish([Finish(taken=other, failed={0: "http_500"})])

    assert claim.look_again(database_now()) == 0
    assert claim.look_again(database_now()) == 0
    assert states(second) == ["PENDING", "PENDING"]
    assert not BatchWait.objects.exists(), "it is not looked for again and again"
    end_pauses()
    dispatcher.wake_and_run()

    (message,) = dispatcher.take_sent()
    (again,) = take(message, by=boot())
    assert again.sent == 0b11
    leases.finish([rated(again)])
    check_all()
    assert finished(second) == "COMPLETED"
    assert states(first) == ["FAILED"]


def test_a_batch_with_nothing_else_open_is_done() -> None:
    _, _, second, other = _delayed_beside_a_flight()
    Batch.objects.filter(workflow=second).update(open_mask=0b01)
    leases.finish([rated(other)])

    claim.look_again(database_now())

    (batch,) = batches(second)
    assert (batch.state, batch.open_mask, batch.not_before) == (BatchState.DONE, 0, None)


def test_a_flight_that_is_still_up_is_waited_for() -> None:
    _, _, second, _ = _delayed_beside_a_flight()

    assert claim.look_again(database_now()) == 0

    assert BatchWait.objects.count() == 1
    assert len(flights()) == 1
    assert states(second) == ["PENDING", "PENDING"]
