"""Workflows that were given up: best effort all the way, until they are committed to again."""

from datetime import timedelta
from typing import Any

import pytest

from fulfillment import given_up
from fulfillment.clock import database_now
from fulfillment.held import Held
from fulfillment.models import Batch, Workflow, WorkflowForecast
from fulfillment.policy.lifecycle import BatchState
from fulfillment.policy.priority import PriorityClass, celery_priority
from tests.executor_stage import Stage, staged
from tests.fakes import oip, scripted
from tests.rating_queue import Queue, batches, boot, give_up, queue, submit, take

pytestmark = pytest.mark.django_db

HIGH, LAST = celery_priority(90), celery_priority(0)


@pytest.fixture
def dispatcher() -> Queue:
    boot()
    return queue()


def urgent(count: int = 20) -> Workflow:
    return submit([f"n{n}" for n in range(count)], batch_size=1, priority=90)


def steps(dispatcher: Queue) -> dict[int, int]:
    """Return how many batches are sent at each Celery step."""
    dispatcher.run()
    sent: dict[int, int] = {}
    for message in dispatcher.take_sent():
        sent[message.priority] = sent.get(message.priority, 0) + len(message.ids)
    return sent


def test_it_leaves_the_places_that_are_kept_and_travels_last(dispatcher: Queue) -> None:
    give_up(urgent())

    assert steps(dispatcher) == {LAST: 14}
    high = submit(["high"], priority=90)
    assert steps(dispatcher) == {HIGH: 1}
    assert batches(high)[0].state == BatchState.LEASED


def test_what_is_out_of_it_counts_as_best_effort(dispatcher: Queue) -> None:
    give_up(urgent(3))
    dispatcher.run()
    known = Held()

    known.look(database_now())

    assert known.calls("r1") == {PriorityClass.BEST_EFFORT: 3}
    assert dispatcher.memory.held.calls("r1") == known.calls("r1")


def test_an_executor_knows_of_it(dispatcher: Queue) -> None:
    give_up(urgent(1))
    dispatcher.run()

    (taken,) = take(dispatcher.take_sent()[0], by=boot())

    assert (taken.priority, taken.best_effort) == (90, True)


def test_of_equal_items_the_one_that_is_committed_is_sent(dispatcher: Queue) -> None:
    give_up(submit(["a"], priority=90))
    committed = submit(["a"], priority=10)

    dispatcher.run()

    (sent,) = Batch.objects.filter(state=BatchState.LEASED)
    assert sent.workflow_id == committed.pk


@pytest.mark.parametrize(
    "change",
    [
        {"cut_batches": 0.0},
        {"settled_at": database_now},
        {"made_at": lambda: database_now() - given_up.BELIEVED - timedelta(seconds=1)},
        {"round": 0},
    ],
    ids=["committed again", "settled", "forecast long ago", "another round"],
)
def test_else_it_is_of_its_own_class(dispatcher: Queue, change: dict[str, Any]) -> None:
    workflow = urgent()
    give_up(workflow)
    WorkflowForecast.objects.update(**{k: v() if callable(v) else v for k, v in change.items()})

    assert steps(dispatcher) == {HIGH: 16}
    held = [(b.pk, b.fence) for b in batches(workflow) if b.state == BatchState.LEASED]
    assert not any(taken.best_effort for taken in take(held, by=boot()))


@pytest.fixture
def stage() -> Any:
    with staged() as made:
        yield made


@pytest.mark.django_db(transaction=True)
def test_models_are_told_that_it_comes_last(stage: Stage) -> None:
    give_up(submit(["a"], priority=90))
    with scripted(oip(1.0)) as server:
        stage.serve(server.url, sends_priority=True)
        stage.rate()

    assert server.seen[0].json()["parameters"]["priority"] == 101
