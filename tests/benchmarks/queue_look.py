"""A look at the queue (sampling, `GET /queue`, the ETA) beside a backlog of a million batches.

Run by `inside`. The floor is the same look with the same workflows and a hundredth of the batches.
"""

import time
from collections.abc import Iterator
from datetime import datetime

from django.db import connection

from fulfillment import board
from fulfillment.clock import database_now
from fulfillment.policy.lifecycle import WorkflowState
from tests.benchmarks import queue_rows
from tests.benchmarks.report import Figure, median, spread

ROUNDS = 9
OUT = """
    UPDATE fulfillment_batch SET state = 1, lease_until = now() + interval '1 minute'
    WHERE id IN (SELECT id FROM fulfillment_batch WHERE state = 0 ORDER BY id LIMIT 128)
"""


def measure(*, quick: bool) -> Iterator[Figure]:
    """Measure the look with few and with many batches, then with many workflows."""
    version = queue_rows.version()
    ids = queue_rows.workflows(100, version=version, state=WorkflowState.RUNNING)
    queue_rows.batches(ids, 100)
    _send()
    few = _looks()
    large = 1_000 if quick else 10_000
    queue_rows.batches(ids, large - 100)
    _send()
    many = _looks()
    yield _figure("queue_look_ms", many, few, f"100 workflows of {large:,} batches", "of 100")
    queue_rows.batches(
        queue_rows.workflows(10_000, version=version, state=WorkflowState.RUNNING), 1
    )
    _send()
    yield _figure("queue_look_crowd_ms", _looks(), few, "10,000 workflows beside them", "without")


def _send() -> None:
    queue_rows.analyze()
    with connection.cursor() as cursor:
        cursor.execute(OUT)


def _looks() -> list[float]:
    now = database_now()
    return [_look_s(now) for _ in range(ROUNDS)]


def _look_s(now: datetime) -> float:
    began_at = time.perf_counter()
    assert board.depths(board.standings(now), now)
    return time.perf_counter() - began_at


def _figure(name: str, took: list[float], few: list[float], what: str, floor: str) -> Figure:
    return Figure(
        name=name,
        value=1e3 * median(took),
        unit="ms",
        ratio_to=f"100 workflows, {floor} batches",
        ratio=median(few) / median(took),
        n=ROUNDS,
        note=f"{what}; rounds {spread([1e3 * t for t in took])} ms",
    )
