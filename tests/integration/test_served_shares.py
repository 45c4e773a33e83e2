"""Who is served when all wait: classes and owners, through the dispatcher and its database.

Two raters, each with a replica that takes its batches in the order of their claims. A turn ends
what each replica has computed for longest; then the dispatcher fills the room. The live benchmark
(`tests/benchmarks/live.py`) shows the same with processes and a clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from fulfillment import leases
from fulfillment.leases import Taken
from fulfillment.models import RaterVersion, Workflow
from fulfillment.policy.ordering import DEFAULT_SHARES, longest_wait
from fulfillment.policy.priority import PriorityClass, priority_class
from tests import builders
from tests.rating_queue import Queue, Replica, boot, queue, rated, submit, take

pytestmark = pytest.mark.django_db

OWNERS = ("ada", "ben", "cleo")
WINDOW = 4
TOGETHER = 4
"""Batches that end in a turn, at each rater."""


@dataclass(kw_only=True)
class Service:
    """Two raters with a replica each, and the batches in the order in which they were sent."""

    executor: UUID
    dispatcher: Queue
    versions: Sequence[RaterVersion]
    sent: list[Taken] = field(default_factory=list)
    held: list[Taken] = field(default_factory=list)

    def submit(self, owner: str, batches: int, **changes: Any) -> list[Workflow]:
        """Submit workflows of so many batches of one request, one to each rater."""
        return [
            submit(
                [f"{of.rater_id} {owner} {changes} {i}" for i in range(batches)],
                of=of, batch_size=1, owner=owner, **changes,
            )
            for of in self.versions
        ]  # fmt: skip

    def turn(self) -> None:
        """End the oldest batches of each rater, and fill the room."""
        ending = [
            batch
            for of in self.versions
            for batch in [b for b in self.held if b.rater_version_id == of.pk][:TOGETHER]
        ]
        leases.finish([rated(batch) for batch in ending])
        ended = {batch.batch_id for batch in ending}
        self.held = [batch for batch in self.held if batch.batch_id not in ended]
        self.dispatcher.run()
        for message in self.dispatcher.take_sent():
            taken = take(message, by=self.executor)
            self.sent += taken
            self.held += taken


@pytest.fixture
def service() -> Service:
    versions = [
        builders.version(builders.rater(name, model_id=name)) for name in ("north", "south")
    ]
    replicas = [Replica(key=of.rater_id, model_id=of.rater_id, window=WINDOW) for of in versions]
    return Service(executor=boot(), dispatcher=queue(*replicas), versions=versions)


def classes(batches: Sequence[Taken]) -> list[PriorityClass]:
    return [priority_class(b.priority, best_effort=b.best_effort) for b in batches]


def longest_gap(of: PriorityClass, order: Sequence[PriorityClass]) -> int:
    """Return the most dispatches in a row without one of the class."""
    places = [-1, *(n for n, cls in enumerate(order) if cls is of), len(order)]
    return max(later - earlier - 1 for earlier, later in pairwise(places))


def test_every_class_is_served_while_others_wait_above_it(service: Service) -> None:
    service.submit("ada", 120, priority=90)
    service.submit("ben", 60, priority=50)
    service.submit("cleo", 60, priority=10)
    service.submit("ada", 30, best_effort=True)

    for _ in range(28):
        service.turn()

    for of in service.versions:
        order = classes([b for b in service.sent if b.rater_version_id == of.pk])
        assert len(order) == 28 * TOGETHER
        for cls in DEFAULT_SHARES:
            wait = longest_wait(cls)
            assert order.count(cls) >= len(order) // wait, cls
            assert longest_gap(cls, order) <= 2 * wait, cls


@pytest.mark.parametrize("window", [4, 8])
def test_a_class_below_gets_its_floor_where_high_fills_the_window(window: int) -> None:
    executor = boot()
    submit([f"low {n}" for n in range(50)], batch_size=1, priority=10)
    submit([f"high {n}" for n in range(150)], batch_size=1, priority=90)
    dispatcher = queue(Replica(window=window))
    held: list[Taken] = []
    ended: Counter[int] = Counter()
    for _ in range(80):
        dispatcher.run()
        held += [
            batch for message in dispatcher.take_sent() for batch in take(message, by=executor)
        ]
        first = held.pop(0)
        leases.finish([rated(first)])
        ended[first.priority] += 1

    # One place comes free at a time, also where two of eight are kept for what is urgent.
    assert ended[10] >= 80 // longest_wait(PriorityClass.LOW)


def test_urgent_work_is_next_whatever_waits_below_it(service: Service) -> None:
    for owner in OWNERS:
        service.submit(owner, 40, priority=50)
        service.submit(owner, 20, best_effort=True)
    for _ in range(3):
        service.turn()
    before = len(service.sent)

    service.submit("ben", 3, priority=90)
    service.turn()

    for of in service.versions:
        order = classes([b for b in service.sent[before:] if b.rater_version_id == of.pk])
        # All three have the room that came, but for what the floors of the classes below took.
        assert order.count(PriorityClass.HIGH) == 3, order


def test_equal_owners_get_equal_shares_at_each_rater(service: Service) -> None:
    for owner in OWNERS:
        service.submit(owner, 60, priority=50)

    for _ in range(24):
        service.turn()

    owner_of = dict(Workflow.objects.values_list("pk", "owner"))
    for of in service.versions:
        counts = Counter(
            owner_of[b.workflow_id] for b in service.sent if b.rater_version_id == of.pk
        )
        assert counts.total() == 24 * TOGETHER
        for owner in OWNERS:
            assert counts[owner] == pytest.approx(8 * TOGETHER, rel=0.1), counts
