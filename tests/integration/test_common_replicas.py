"""Raters that share a model: each gets its part of the replicas, urgent work of any first."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from fulfillment import leases
from fulfillment.leases import Taken
from fulfillment.models import Batch, Workflow
from fulfillment.policy.lifecycle import BatchState
from tests.rating_queue import Queue, Replica, boot, queue, rated, rater, submit, take

pytestmark = pytest.mark.django_db

HIGH, LOW = 90, 10


@pytest.fixture
def executor() -> UUID:
    return boot()


def rows(prefix: str, count: int = 150) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def two(**changes: Any) -> None:
    """Submit more than is served to each of two raters of one model."""
    for name in ("one", "two"):
        submit(rows(name), of=rater(name), batch_size=1, **changes)


def served(
    dispatcher: Queue, executor: UUID, ending: Callable[[list[Taken]], list[Taken]], passes: int
) -> Counter[str]:
    """Return the batches that each rater was served; `ending` are those that end after a pass."""
    out: list[Taken] = []
    counts: Counter[str] = Counter()
    for _ in range(passes):
        dispatcher.run()
        out += [t for m in dispatcher.take_sent() for t in take(m, by=executor)]
        ended = ending(out)
        counts.update(t.rater_id for t in ended)
        leases.finish([rated(t) for t in ended])
        out = [t for t in out if t not in ended]
    return counts


def oldest(out: list[Taken]) -> list[Taken]:
    return out[:1]


def everything(out: list[Taken]) -> list[Taken]:
    return list(out)


@pytest.mark.parametrize(
    ("window", "ending", "passes"),
    [(16, oldest, 60), (16, everything, 8), (3, everything, 12), (1, everything, 12)],
    ids=["one by one", "all at once", "three at once", "one place"],
)
def test_two_raters_get_as_much(
    executor: UUID, window: int, ending: Callable[[list[Taken]], list[Taken]], passes: int
) -> None:
    two()

    counts = served(queue(Replica(window=window)), executor, ending, passes)

    assert abs(counts["one"] - counts["two"]) <= 0.15 * counts.total()


def test_a_slot_goes_to_each_in_turn() -> None:
    executor = boot(slots=1)
    for name in ("one", "two", "three"):
        submit(rows(name, 9), of=rater(name, model_id=name), batch_size=1)
    dispatcher = queue(*(Replica(key=m, model_id=m) for m in ("one", "two", "three")))

    counts = served(dispatcher, executor, everything, 9)

    assert counts == {"one": 3, "two": 3, "three": 3}


def test_urgent_work_of_one_rater_goes_before_a_backlog_of_another(executor: UUID) -> None:
    submit(rows("low"), of=rater("backlog"), batch_size=1, priority=LOW)
    dispatcher = queue(Replica(window=4))
    dispatcher.run()
    out = [t for m in dispatcher.take_sent() for t in take(m, by=executor)]
    submit(rows("high"), of=rater("urgent"), batch_size=1, priority=HIGH)

    leases.finish([rated(t) for t in out])
    counts = served(dispatcher, executor, oldest, 48)

    # The floor of low: one dispatch in four.
    assert counts["urgent"] >= 0.7 * counts.total()
    assert counts["backlog"] >= 0.2 * counts.total()


def test_what_one_has_no_use_for_the_other_gets_in_the_same_pass(executor: UUID) -> None:
    few = submit(rows("few", 2), of=rater("few"), batch_size=1)
    many = submit(rows("many"), of=rater("many", max_qps=100), batch_size=1)
    dispatcher = queue(Replica(window=16))

    assert dispatcher.run().sent == 14
    assert leased(few) == 2
    assert leased(many) == 12


def test_replicas_that_only_one_of_them_may_use_are_filled(executor: UUID) -> None:
    one = submit(rows("one"), of=rater("one"), batch_size=1)
    # Of which one version may use all replicas, and the other one of them.
    two = submit(rows("two"), of=rater("two"), batch_size=1)
    two.rater_version.spec["model_version"] = "v2"
    two.rater_version.save()
    dispatcher = queue(Replica(key="r1", window=4), Replica(key="r2", window=4, version="v2"))

    assert dispatcher.run().sent == 8
    assert (leased(one), leased(two)) == (4, 4)


def leased(workflow: Workflow) -> int:
    return Batch.objects.filter(workflow=workflow, state=BatchState.LEASED).count()
