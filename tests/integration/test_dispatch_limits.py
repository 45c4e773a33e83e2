"""Limits beside the windows: a rater's `max_qps`, and replicas that are not there."""

from datetime import timedelta

import pytest

from fulfillment import dispatch, leases
from fulfillment.clock import database_now
from fulfillment.policy.priority import PriorityClass
from tests.rating_queue import Replica, boot, finished, queue, rated, rater, states, submit, take

pytestmark = pytest.mark.django_db


def test_a_rater_starts_no_more_calls_than_its_limit_a_second() -> None:
    boot(slots=100)
    submit([f"n{n}" for n in range(40)], of=rater(max_qps=5), batch_size=1)
    dispatcher = queue(Replica(window=40))
    now = database_now()

    def sent_at(instant: timedelta) -> int:
        return dispatch.run_once(
            now + instant,
            memory=dispatcher.memory,
            directory=dispatcher.fleet,
            publish=lambda batches, priority: None,
        ).sent

    assert sent_at(timedelta()) == 5
    assert sent_at(timedelta(seconds=0.1)) == 0
    assert sent_at(timedelta(seconds=0.5)) == 2
    assert sent_at(timedelta(seconds=10)) == 5, "what was not used is not saved up"


def test_a_replica_that_was_away_rests_and_another_one_serves() -> None:
    boot(slots=100)
    submit([f"n{n}" for n in range(8)], batch_size=1)
    dispatcher = queue(Replica(key="gone", window=4), Replica(key="here", window=4))
    away = {
        "replica": "gone",
        "cls": int(PriorityClass.MIDDLE),
        "succeeded": 0,
        "overloaded": 0,
        "away": 3,
    }

    dispatch.observe(dispatcher.memory, [away], database_now())
    dispatcher.run()
    served = {replica for m in dispatcher.take_sent() for _, _, replica in m.batches}
    dispatch.observe(dispatcher.memory, [], database_now() + dispatch.REST * 2)
    dispatcher.run()
    later = {replica for m in dispatcher.take_sent() for _, _, replica in m.batches}

    assert served == {"here"}
    assert later == {"gone"}


def test_a_workflow_that_the_archive_ends_at_the_claim_is_complete_at_once() -> None:
    executor = boot()
    first, twin = submit(["a", "b"]), submit(["a", "b"])
    dispatcher = queue()
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    leases.finish([rated(taken)])

    dispatcher.wake_and_run()

    assert finished(twin) == "COMPLETED"
    assert states(first) == states(twin) == ["COMPLETED", "COMPLETED"]
