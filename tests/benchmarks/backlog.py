"""The dispatcher beside a backlog: batches claimed a second when 10,000 wait, and when 1M do.

Run by `inside`. Passes are those of the real dispatcher on its own connection, with a model that
has room and a broker that takes all; between them, not timed, what was claimed is done away with.
The two backlogs lie in two databases of one server, so that their rounds take turns: what the
machine does besides meets both.
"""

import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from django.db import connection

from fulfillment import dispatch
from fulfillment.clock import database_now
from fulfillment.models import ExecutorBoot, RaterVersion
from fulfillment.policy.lifecycle import WorkflowState
from tests.benchmarks import queue_rows
from tests.benchmarks.report import Figure, number, spread
from tests.rating_queue import Fleet, Replica

WINDOW = 32
PASSES = 10
ROUNDS = 10
WORKFLOWS = 100


@dataclass(kw_only=True, slots=True)
class _Backlog:
    """A database with a backlog, and the dispatcher that leads there."""

    name: str
    memory: dispatch.Memory = field(default_factory=dispatch.Memory)

    def enter(self) -> None:
        queue_rows.enter(self.name)
        assert dispatch.lead("bench")


def measure(*, quick: bool) -> Iterator[Figure]:
    """Measure passes with a small backlog and with a large one, in turns."""
    small, large = 10_000, 100_000 if quick else 1_000_000
    few, much = _Backlog(name="few"), _Backlog(name="much")
    for backlog in (few, much):
        queue_rows.copy_database(backlog.name)
    for backlog, batches in ((few, small), (much, large)):
        backlog.enter()
        version = queue_rows.version()
        _add(version, batches)
    before, beside = _turns(few, much)
    yield Figure(
        name="backlog_claims_per_s",
        value=statistics.median(beside),
        unit="batches/s",
        ratio_to=f"the same with a backlog of {small:,} batches",
        ratio=statistics.median(beside) / statistics.median(before),
        n=ROUNDS * PASSES * WINDOW,
        note=f"{large:,} batches of 12, {WINDOW} a pass; rounds {spread(beside)};"
        f" with {small:,}: {number(statistics.median(before))} ({spread(before)})",
    )
    many = 1_000 if quick else 10_000
    much.enter()
    ids = queue_rows.workflows(many, version=version, state=WorkflowState.RUNNING)
    queue_rows.batches(ids, 1)
    queue_rows.analyze()
    before, crowd = _turns(few, much)
    yield Figure(
        name="crowd_claims_per_s",
        value=statistics.median(crowd),
        unit="batches/s",
        ratio_to=f"passes with {WORKFLOWS} workflows",
        ratio=statistics.median(crowd) / statistics.median(before),
        n=ROUNDS * PASSES * WINDOW,
        note=f"{many:,} more workflows wait, with a batch each; rounds {spread(crowd)};"
        " passes follow each other without the rest that the dispatcher takes",
    )


def _turns(few: _Backlog, much: _Backlog) -> tuple[list[float], list[float]]:
    rates: dict[str, list[float]] = {few.name: [], much.name: []}
    for _ in range(ROUNDS):
        for backlog in (few, much):
            backlog.enter()
            rates[backlog.name].append(_round(backlog.memory))
    return rates[few.name], rates[much.name]


def _add(version: RaterVersion, batches: int) -> None:
    ids = queue_rows.workflows(WORKFLOWS, version=version, state=WorkflowState.RUNNING)
    queue_rows.batches(ids, batches // WORKFLOWS)
    queue_rows.analyze()


_fleet = Fleet(live=[Replica(key="bench", model_id="bench", version="", window=WINDOW)])


def _round(memory: dispatch.Memory) -> float:
    """Return the batches claimed a second in some passes, those of others not counted."""
    ExecutorBoot.objects.all().delete()
    now = database_now()
    ExecutorBoot.objects.create(
        boot_id=uuid.uuid4(), host="bench", pid=1, slots=10 * WINDOW, plugins={"bench": "1"},
        started_at=now, heartbeat_at=now,
    )  # fmt: skip
    took_s, claimed = 0.0, 0
    for _ in range(PASSES):
        began_at = time.perf_counter()
        done = dispatch.run_once(
            database_now(), memory=memory, directory=_fleet, publish=lambda *_: None
        )
        took_s += time.perf_counter() - began_at
        claimed += done.sent
        _do_away()
    assert claimed >= PASSES * WINDOW // 2, claimed
    return claimed / took_s


def _do_away() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM fulfillment_flight")
        cursor.execute(
            "UPDATE fulfillment_batch SET state = 4, open_mask = 0, lease_until = NULL"
            " WHERE state = 1"
        )
