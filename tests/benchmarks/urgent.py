"""Urgent work beside a backlog: how long a person waits while a machine's job is being done."""

import time
from collections.abc import Iterator

from tests.acceptance.stack import Stack, Stub
from tests.benchmarks import running, texts
from tests.benchmarks.report import Figure, median, number

ROWS, BACKLOG = 120, 20_000
RATER = "busy"
WINDOW = 16


def beside_a_backlog(stack: Stack, stub: Stub, *, delay_s: float, rounds: int) -> Iterator[Figure]:
    """Measure 120 urgent requests, upload included, while 20,000 of low priority are queued."""
    stack.register(stub, rater=RATER, max_concurrency=WINDOW)
    body = texts.bodies(BACKLOG, seed=900, prefix="backlog")
    backlog = str(stack.submit(RATER, body, priority=10)["id"])
    seconds = []
    for number_ in range(rounds):
        time.sleep(1.0)
        urgent = texts.bodies(ROWS, seed=901 + number_, prefix=f"urgent{number_}")
        seconds.append(running.rate(stack, RATER, urgent, others={}, priority=90).finished_s)
        left = stack.workflow(backlog)["counts"]["pending"]
        assert left > 0, "the backlog ended before the urgent work did: nothing was measured"
    stack.client.post(f"/api/v1/workflows/{backlog}/cancel").raise_for_status()
    calls = -(-ROWS // 12)
    floor_s = -(-calls // WINDOW) * delay_s
    yield Figure(
        name="urgent_120_s",
        value=median(seconds),
        unit="s",
        ratio_to=f"the model's own time for {calls} calls, {WINDOW} at once",
        ratio=floor_s / median(seconds),
        n=rounds,
        note=f"{BACKLOG:,} requests of low priority queued; calls take {delay_s:g} s; worst"
        f" {number(max(seconds))} s",
    )
