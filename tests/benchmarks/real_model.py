"""The whole way with a real model: rater `needs_met`, MiniLM hosted by the agent.

In turns with the same model in a bare loop with its best batching, so that both share the
machine's mood; the ratio of each round is what counts.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.acceptance.stack import Stack, until
from tests.benchmarks import running
from tests.benchmarks.bare_model import bare_model, pairs_of
from tests.benchmarks.model_server import Pair
from tests.benchmarks.report import Figure, median, number, parts, spread

RATER = "needs_met"
BARE = "the same model in a bare loop, best batching"
START_S = 180.0
READY = "SELECT address FROM models_admin_modelserver WHERE address <> '' AND state = 'READY'"


def real_model(stack: Stack, *, seeds_a_round: int, rounds: int) -> Iterator[Figure]:
    """Measure workflows of new rows with the real model."""
    address = wait_ready(stack)
    ratios, cpu_ratios, rates, duties, each = [], [], [], [], []
    with tempfile.TemporaryDirectory() as cache, bare_model(Path(cache)) as bare:
        bare.rate([0])
        running.rate(stack, RATER, _body(pairs_of([0]), "warm"))
        for round_ in range(rounds):
            first = 1 + round_ * seeds_a_round
            seeds = range(first, first + seeds_a_round)
            pairs = pairs_of(seeds)
            bare_s, bare_cpu_s = bare.rate(seeds)
            before = _stats(address)
            run = running.rate(stack, RATER, _body(pairs, f"real{round_}"))
            after = _stats(address)
            ratios.append(bare_s / run.finished_s)
            cpu_ratios.append(bare_cpu_s / run.cost.total_s)
            rates.append(len(pairs) / run.finished_s)
            busy_s = after["busy_seconds"] - before["busy_seconds"]
            duties.append(busy_s / run.finished_s)
            each.append(run.cost.us_each(len(pairs)))
    rows = len(pairs)
    yield Figure(
        name="real_model_requests_per_s",
        value=median(rates),
        unit="requests/s",
        ratio_to=BARE,
        ratio=median(ratios),
        n=rows * rounds,
        note=f"goal 0.95; ratio of each round {', '.join(f'{r:.2f}' for r in ratios)};"
        f" workflows of {rows:,}; bare {number(rows / bare_s)}/s in the last round",
    )
    yield Figure(
        name="real_model_duty_cycle",
        value=median(duties),
        unit="ratio",
        n=rounds,
        note=f"busy time of the model server over the time from upload to COMPLETED;"
        f" {spread(duties)}",
    )
    yield Figure(
        name="real_model_cpu_us_per_request",
        value=median([sum(costs.values()) for costs in each]),
        unit="us CPU",
        ratio_to=f"{BARE}, CPU of its process",
        ratio=median(cpu_ratios),
        n=rows * rounds,
        note=f"goal 0.91, 1.10 times as much; {parts(each[-1])}",
    )


def wait_ready(stack: Stack) -> str:
    """Wait until the model server has compiled its shapes; return its address."""
    address: str = until(
        lambda: (stack.query(READY) or [("",)])[0][0],
        timeout_s=START_S,
        what="the model server is ready",
    )
    return address


def _body(pairs: list[Pair], prefix: str) -> bytes:
    return b"".join(
        orjson.dumps({"request_id": f"{prefix}-{i}", "query_text": query, "text": text}) + b"\n"
        for i, (query, text) in enumerate(pairs)
    )


def _stats(address: str) -> dict[str, Any]:
    answer = httpx.get(f"{address}/v2/models/minilm/stats")
    answer.raise_for_status()
    document: dict[str, Any] = answer.json()
    return document
