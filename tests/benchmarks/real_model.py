"""The whole way with the real model, against the same model in a bare loop with its best batching.

In turns, in one run: a workflow of new rows through upload, queue, executors and the hosted model
server; then the same pairs in a process of their own that knows them all beforehand, sorts them by
length and does nothing else (model_server.Bare).
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.acceptance.stack import Stack, until
from tests.benchmarks import running
from tests.benchmarks.model_server import Bare, make_pairs
from tests.benchmarks.report import Figure, median, number, parts, spread

RATER, MODEL = "needs_met", "minilm"
SEEDS_A_ROUND = 4
"""Of 300 pairs each: what starts and ends a workflow must not be what is measured."""


def end_to_end(stack: Stack, *, rounds: int) -> Iterator[Figure]:
    """Measure rounds of workflow and bare loop over the same pairs."""
    from workers.model_server import __main__ as entry  # the bare loop gets the same environment

    _wait_warm(stack)
    ratios, rates, duties, cpu_ms = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, **entry.ALLOCATOR, **entry.QUIET}
        environment |= entry.compilation_cache(Path(directory))
        with Bare(environment) as bare:
            bare.round(0)
            running.rate(stack, RATER, _body(range(1)), others={})
            for number_ in range(rounds):
                seeds = range(1 + number_ * SEEDS_A_ROUND, 1 + (number_ + 1) * SEEDS_A_ROUND)
                bare_s = sum(bare.round(seed)[0] for seed in seeds)
                body = _body(seeds)
                rows = body.count(b"\n")
                busy_s = _busy_s(stack)
                run = running.rate(stack, RATER, body, others={})
                ratios.append(bare_s / run.finished_s)
                rates.append(rows / run.finished_s)
                duties.append((_busy_s(stack, settled=True) - busy_s) / run.finished_s)
                cpu_ms.append(run.cost.us(rows) / 1_000)
    yield Figure(
        name="real_model_requests_per_s",
        value=median(rates),
        unit="requests/s",
        ratio_to="the same model in a bare loop with its best batching",
        ratio=median(ratios),
        n=rows * rounds,
        note=f"goal 0.85; ratio of each round {', '.join(number(r) for r in ratios)};"
        f" rounds {spread(rates)}; {median(cpu_ms):.1f} ms CPU a request"
        f" ({parts(run.cost.us_each(rows))} us)",
    )
    yield Figure(
        name="real_model_duty_cycle",
        value=min(1.0, median(duties)),
        unit="ratio",
        n=rounds,
        note="busy seconds of the model server over the workflow's, upload and ending included",
    )


def _body(seeds: range) -> bytes:
    return b"".join(
        json.dumps({"query_text": query, "text": text}).encode() + b"\n"
        for seed in seeds
        for query, text in make_pairs(seed)
    )


def _wait_warm(stack: Stack) -> None:
    until(
        lambda: stack.client.get(f"/api/v1/models/{MODEL}").json()["state"] == "READY",
        timeout_s=180,
        what="the model is warm",
        every_s=0.5,
    )


def _busy_s(stack: Stack, *, settled: bool = False) -> float:
    """Read the account of the replicas; it reaches the database every few seconds."""

    def busy() -> float:
        servers = stack.client.get(f"/api/v1/models/{MODEL}").json()["servers"]
        return float(sum(server["busy_seconds"] for server in servers))

    before = busy()
    if not settled:
        return before

    def stands_still() -> bool:
        nonlocal before
        last, before = before, busy()
        return before == last

    until(stands_still, timeout_s=20, what="the account stands still", every_s=3.0)
    return before
