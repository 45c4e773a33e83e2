"""Sustained load as in life: 40 % archive hits, uploads of 4,000 rows, a bounded backlog.

The rate is that of finished requests between two looks at the database while a client keeps eight
workflows open; CPU is that of all processes of the stack in between.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.acceptance.stack import REPOSITORY, Stack, Stub, until
from tests.benchmarks import floors, running, stub_model, texts
from tests.benchmarks.costs import Meter
from tests.benchmarks.report import Figure, number, parts

HITS = 0.4
ROWS = 4_000
SETTLE_S = 5.0
ENDED = """
    SELECT coalesce(sum(n), 0)::bigint FROM (
        SELECT sum(completed + failed + timed_out + cancelled) AS n FROM fulfillment_workflowstats
        UNION ALL
        SELECT sum(completed + failed + timed_out + cancelled) FROM fulfillment_statsdelta
    ) AS of
"""
BACKLOG = """
    SELECT coalesce(sum(bit_count(open_mask::bit(64))), 0)::bigint FROM fulfillment_batch
    WHERE state <> 4
"""


def scale(stack: Stack, stub: Stub, *, batches: int, seconds: float) -> Iterator[Figure]:
    """Measure a sustained load at one number of batches a message."""
    rater = stub_model.rater_of(batches)
    known = texts.bodies(ROWS, seed=0, prefix="feed")
    floor = floors.bare_calls(stub.url, known)
    with feeder(stack, rater, "--uploads", "1", "--hits", "1") as warming:
        warming.wait(running.PATIENCE_S)
    until(lambda: _backlog(stack) == 0, timeout_s=running.PATIENCE_S, what="it is rated")
    feeding = feeder(stack, rater, "--hits", str(HITS))
    try:
        time.sleep(SETTLE_S)
        meter = Meter(stack.home, others={"stub": stub.process.pid, "client": feeding.pid})
        began_at, ended, backlog = time.perf_counter(), _ended(stack), _backlog(stack)
        backlogs = []
        while (left := seconds - (time.perf_counter() - began_at)) > 0:
            time.sleep(min(left, 5.0))
            backlogs.append(_backlog(stack))
            assert feeding.poll() is None, "the client died"
        done, cost = _ended(stack) - ended, meter.read()
    finally:
        feeding.terminate()
        feeding.wait(10)
    until(lambda: _backlog(stack) == 0, timeout_s=running.PATIENCE_S, what="the rest is rated")
    rate, cpu_us = done / cost.wall_s, cost.us(done)
    calls_us = 1e6 * floor.cpu_s / floor.count * (1 - HITS)
    name = f"scale_{batches}_a_message"
    yield Figure(
        name=f"{name}_requests_per_s",
        value=rate,
        unit="requests/s",
        ratio_to=stub_model.CALLED,
        ratio=rate * (1 - HITS) / floor.rate,
        n=done,
        note=f"{cost.wall_s:.0f} s, {HITS:.0%} hits; backlog {number(backlog)} at the start, then"
        f" {number(min(backlogs))} to {number(max(backlogs))} items, {number(backlogs[-1])} at the"
        f" end; foreign load {cost.foreign_cores:.1f} cores",
    )
    yield Figure(
        name=f"{name}_cpu_us_per_request",
        value=cpu_us,
        unit="us CPU",
        ratio_to=f"{stub_model.CALLED}, CPU of the caller for the misses",
        ratio=calls_us / cpu_us,
        n=done,
        note=parts(cost.us_each(done)),
    )


def feeder(stack: Stack, rater: str, *more: str) -> "subprocess.Popen[bytes]":
    """Start the client."""
    database = json.loads((stack.home / "run" / "servers.json").read_text())["database_url"]
    return subprocess.Popen(
        [
            sys.executable, "-m", "tests.benchmarks.feeder", "--url",
            f"http://127.0.0.1:{stack.port}", "--token", stack.credentials["api_token"],
            "--database", database, "--rater", rater, "--rows", str(ROWS), *more,
        ],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _ended(stack: Stack) -> int:
    return _number(stack, ENDED)


def _backlog(stack: Stack) -> int:
    return _number(stack, BACKLOG)


def _number(stack: Stack, sql: str, *values: Any) -> int:
    ((value,),) = stack.query(sql, *values)
    return int(value)
