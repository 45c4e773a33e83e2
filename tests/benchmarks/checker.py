"""The completion checker's tick beside much work: open workflows, a huge one, and finished ones.

Run by `inside`. A tick that finds nothing to do is what all others cost at least, every five
seconds; it must not grow with what is finished.
"""

import statistics
import time
from collections.abc import Iterator

from django.db import connection

from fulfillment import completion, folding
from fulfillment.clock import database_now
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from tests.benchmarks import queue_rows
from tests.benchmarks.report import Figure, spread

TICKS, ROUNDS = 3, 8
DELTAS = 20_000


def measure(*, quick: bool) -> Iterator[Figure]:
    """Measure ticks with and without finished work, in turns, and folding."""
    part = 10 if quick else 1
    open_, huge, finished, each = 10_000 // part, 83_333 // part, 100_000 // part, 10
    version = queue_rows.version()
    ids = queue_rows.workflows(open_, version=version, state=WorkflowState.RUNNING)
    queue_rows.batches(ids[1:], 1)
    queue_rows.batches(ids[:1], huge)
    queue_rows.copy_database("beside")
    queue_rows.analyze()
    alone = connection.settings_dict["NAME"]
    queue_rows.enter("beside")
    done = queue_rows.workflows(finished, version=version, state=WorkflowState.COMPLETED)
    queue_rows.batches(done, each, state=BatchState.DONE)
    queue_rows.analyze()
    took: dict[str, list[float]] = {alone: [], "beside": []}
    for _ in range(ROUNDS):
        for database, of_database in took.items():
            queue_rows.enter(database)
            of_database += _ticks()
    before, beside = took.values()
    yield Figure(
        name="checker_tick_ms",
        value=statistics.median(beside),
        unit="ms",
        ratio_to="the same tick where nothing is finished",
        ratio=statistics.median(before) / statistics.median(beside),
        n=ROUNDS * TICKS,
        note=f"{open_:,} open workflows, one with {huge * queue_rows.ITEMS:,} open requests;"
        f" {finished:,} finished ones with {finished * each:,} batches;"
        f" ticks {spread(beside)} ms; where nothing is finished {spread(before)} ms",
    )
    rate = _folding(ids)
    yield Figure(
        name="checker_fold_deltas_per_s",
        value=rate,
        unit="deltas/s",
        n=DELTAS,
        note=f"of {len(ids):,} workflows",
    )


def _ticks() -> list[float]:
    """Return the milliseconds of ticks that end nothing, after one that warms up."""
    now = database_now()
    completion.run_once(now)
    took = []
    for _ in range(TICKS):
        began_at = time.perf_counter()
        ended = completion.run_once(now)
        took.append((time.perf_counter() - began_at) * 1_000)
        assert ended == 0
    return took


def _folding(ids: list[int]) -> float:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO fulfillment_statsdelta (workflow_id, attempts)
            SELECT (%s::bigint[])[1 + n %% cardinality(%s::bigint[])], 1
            FROM generate_series(1, %s) n
            """,
            [ids, ids, DELTAS],
        )
    began_at = time.perf_counter()
    while folding.fold():
        pass
    return DELTAS / (time.perf_counter() - began_at)
