"""Overload of one model server: low priority is turned away early, high priority hardly notices.

The real server by itself, with its own defaults, over HTTP, in calls of 12 rows of one query. First
its capacity, with 16 calls open. Then calls of high priority on the idle server, and the same calls
at the same pace while three times the capacity is offered in calls of low priority: at random
instants, whether or not earlier ones were answered. What is turned away does not come again.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from tests.benchmarks.model_server import CHECKPOINT, RESULTS, make_pairs
from tests.benchmarks.report import Figure, median, number

HIGH, LOW = 1, 101
OPEN_CALLS = 16
TIMES_CAPACITY = 3.2
HIGH_EVERY_S = 0.7
FILLED_WITHIN_S = 120.0
SEEDS = range(1, 13)
UNLOADED = "the same calls on the idle server"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured."""

    capacity_calls: int
    high_calls: int
    """In each of the two scenes."""


FULL = Sizes(capacity_calls=75, high_calls=80)
QUICK = Sizes(capacity_calls=30, high_calls=15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of a call."""

    status: int
    took_s: float
    retry_after: str | None


class Client:
    """Calls a server; hundreds of different calls take turns."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        calls = [
            pairs[first : first + RESULTS]
            for pairs in map(make_pairs, SEEDS)
            for first in range(0, len(pairs), RESULTS)
        ]
        self._inputs = itertools.cycle(
            [
                {"name": name, "datatype": "BYTES", "shape": [RESULTS, 1], "data": column}
                for name, column in zip(("query", "text"), zip(*call, strict=True), strict=True)
            ]
            for call in calls
        )

    async def call(self, priority: int) -> Answer:
        """Make one call."""
        body = orjson.dumps(
            {"inputs": next(self._inputs), "parameters": {"priority": priority}},
        )
        began_at = time.perf_counter()
        async with self._session.post(f"{self._url}/infer", data=body) as response:
            await response.read()
            return Answer(
                status=response.status,
                took_s=time.perf_counter() - began_at,
                retry_after=response.headers.get("Retry-After"),
            )

    async def stats(self) -> Mapping[str, Any]:
        """Return the server's own account."""
        async with self._session.get(f"{self._url}/stats") as response:
            document: Mapping[str, Any] = await response.json()
            return document


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All that a run has seen."""

    capacity: float
    """Calls a second."""
    unloaded: Sequence[Answer]
    high: Sequence[Answer]
    low: Sequence[Answer]
    offered: float
    """Low calls a second, while `high` was measured."""
    batch_s: float
    """A batch on a lane, while `high` was measured."""
    duty: float


def overload(*, quick: bool) -> Iterator[Figure]:
    """Measure, and give the figures."""
    with tempfile.TemporaryDirectory() as directory, _server(Path(directory)) as url:
        found = asyncio.run(_measure(url, QUICK if quick else FULL))
    assert {answer.status for answer in (*found.unloaded, *found.high)} == {200}
    yield from _high(found)
    yield from _low(found)


def _high(found: Measured) -> Iterator[Figure]:
    beside, alone = _took(found.high), _took(found.unloaded)
    for name, at in (("p50", 0.5), ("p95", 0.95)):
        loaded_s, unloaded_s = float(np.quantile(beside, at)), float(np.quantile(alone, at))
        yield Figure(
            name=f"overload_high_{name}_s",
            value=loaded_s,
            unit="s",
            ratio_to=f"{UNLOADED}; goal 0.5 (twice as long)",
            ratio=unloaded_s / loaded_s,
            n=len(beside),
            note=f"calls of {RESULTS} rows at priority {HIGH}, one each {HIGH_EVERY_S:g} s, beside"
            f" {found.offered:.0f} low calls/s offered ({found.offered / found.capacity:.1f} times"
            f" what the server does); unloaded {number(unloaded_s)} s; a batch that is running when"
            f" it comes takes {number(found.batch_s)} s; all of them were answered",
        )


def _low(found: Measured) -> Iterator[Figure]:
    statuses = Counter(answer.status for answer in found.low)
    refused = [answer for answer in found.low if answer.status == 429]
    answered = _took([answer for answer in found.low if answer.status == 200])
    told = [int(answer.retry_after) for answer in refused if answer.retry_after]
    yield Figure(
        name="overload_low_refused_share",
        value=len(refused) / len(found.low),
        unit="of low calls",
        ratio_to="what cannot be served beside the high calls",
        ratio=len(refused)
        / len(found.low)
        / (1 - (found.capacity - 1 / HIGH_EVERY_S) / found.offered),
        n=len(found.low),
        note=f"by status: {dict(sorted(statuses.items()))}; those that were accepted took"
        f" {number(median(answered))} s; Retry-After on {len(told)} of {len(refused)},"
        f" {min(told)} to {max(told)} s; duty {found.duty:.2f}",
    )
    refused_ms = [1000 * took_s for took_s in _took(refused)]
    yield Figure(
        name="overload_low_refused_ms",
        value=median(refused_ms),
        unit="ms",
        ratio_to="a high call on the idle server",
        ratio=1000 * median(_took(found.unloaded)) / median(refused_ms),
        n=len(refused),
        note=f"until the refusal was read; p95 {number(float(np.quantile(refused_ms, 0.95)))} ms",
    )


def _took(answers: Sequence[Answer]) -> list[float]:
    return [answer.took_s for answer in answers]


async def _measure(url: str, sizes: Sizes) -> Measured:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(session, url)
        await _capacity(client, OPEN_CALLS)
        capacity = await _capacity(client, sizes.capacity_calls)
        unloaded = await _paced(client, sizes.high_calls)
        rate = TIMES_CAPACITY * capacity
        low: list[asyncio.Task[Answer]] = []
        offering = asyncio.create_task(_offer(client, rate, low))
        async with asyncio.timeout(FILLED_WITHIN_S):
            while not any(call.done() and call.result().status == 429 for call in low):
                await asyncio.sleep(0.1)
        first, from_s, before = len(low), time.perf_counter(), await client.stats()
        high = await _paced(client, sizes.high_calls)
        after, seconds = await client.stats(), time.perf_counter() - from_s
        offered = (len(low) - first) / seconds
        offering.cancel()
        answers = await asyncio.gather(*low)
    batches = after["batches_total"] - before["batches_total"]
    return Measured(
        capacity=capacity,
        unloaded=unloaded,
        high=high,
        low=answers[first:],
        offered=offered,
        batch_s=(after["lane_seconds"] - before["lane_seconds"]) / batches,
        duty=(after["busy_seconds"] - before["busy_seconds"]) / seconds,
    )


async def _capacity(client: Client, calls: int) -> float:
    """Return the calls that are done in a second while many are open."""
    room = asyncio.Semaphore(OPEN_CALLS)

    async def send() -> None:
        async with room:
            assert (await client.call(50)).status == 200

    began_at = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(calls)))
    return calls / (time.perf_counter() - began_at)


async def _paced(client: Client, calls: int) -> list[Answer]:
    """Make urgent calls at a steady pace, whether or not earlier ones were answered."""
    made = []
    for _ in range(calls):
        made.append(asyncio.create_task(client.call(HIGH)))
        await asyncio.sleep(HIGH_EVERY_S)
    return list(await asyncio.gather(*made))


async def _offer(client: Client, rate: float, made: list[asyncio.Task[Answer]]) -> None:
    """Make low calls at random instants, so many a second."""
    chance = random.Random(1)
    at = time.perf_counter()
    while True:
        at += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        made.append(asyncio.create_task(client.call(LOW)))


@contextlib.contextmanager
def _server(directory: Path) -> Iterator[str]:
    """Run the server of the real model; the address of its model."""
    from workers.model_server import __main__ as entry  # its environment is part of what we measure

    with subprocess.Popen(
        [
            *(sys.executable, "-m", "workers.model_server", "--model-name", "minilm"),
            *("--checkpoint", CHECKPOINT, "--port", "0", "--cache-dir", str(directory)),
        ],
        env={**os.environ, **entry.ALLOCATOR, **entry.QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline().removeprefix("READY "))
            yield f"{ready['url']}/v2/models/minilm"
        finally:
            process.terminate()
