"""Batches formed by length against fixed batches of 12, padded to the longest text in each.

    make bench ARGS="length_sorted"

Texts are those of `../shared/data/trecdl.jsonl`: calls of 12 results of a query, 40 % of which are
archive hits. The others go through the server's own batcher with 16 calls open, and through a loop
that takes twelve at a time as they come and pads them to the longest: to the server's length steps,
or to its exact length, for which a shape of its own is compiled. The same model, the same compiled
code; the loop with as many lanes as it is fastest with; each in a process of its own, in turns.
Queries are left out on both sides: they are embedded once and kept.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tests.benchmarks.model_server import CHECKPOINT, OPEN_CALLS
from tests.benchmarks.report import REPOSITORY, Figure, directory, median, number

TEXTS = REPOSITORY.parent / "shared" / "data" / "trecdl.jsonl"
CALL_ROWS = 12
HITS = 0.4
MOST_LANES = 3
TEXT_SETS = 2
"""In turns; exact lengths of more of them would take minutes to compile."""
SIDES = ("sorted", "fixed", "exact")
NAMES = {
    "fixed": "batches of 12 as they come, padded to the length step of the longest",
    "exact": "batches of 12 as they come, padded to the exact length of the longest",
}

Call = list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one side took for the rows of a round."""

    rows: int
    wall_s: float
    cpu_s: float
    real_tokens: int
    padded_tokens: int

    @property
    def waste(self) -> float:
        """Padding, of all tokens that were computed."""
        return 1 - self.real_tokens / self.padded_tokens


def calls() -> list[Call]:
    """Return calls of up to twelve results of a query, in the order of the file."""
    rows = [json.loads(line) for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    found = []
    for _, group in groupby(rows, key=lambda row: row["query_id"]):
        texts = [row["text"] for row in group]
        found += [texts[i : i + CALL_ROWS] for i in range(0, len(texts), CALL_ROWS)]
    return [call for call in found if len(call) == CALL_ROWS]


def live(number: int, size: int) -> list[Call]:
    """Return the calls of a round, from a place of its own, without the archive's hits."""
    everything, chance = calls(), random.Random(number)
    first = chance.randrange(len(everything))
    chosen = [everything[(first + i) % len(everything)] for i in range(size)]
    return [[text for text in call if chance.random() >= HITS] for call in chosen]


def length_sorted(*, quick: bool) -> Iterator[Figure]:
    """Measure, if the texts are at hand."""
    if not TEXTS.is_file():
        print(f"length_sorted: skipped, there is no {TEXTS}", file=sys.stderr)
        return
    size, count = (40, 2) if quick else (40, 6)
    with ExitStack() as leave:
        sides = {name: leave.enter_context(Side(name)) for name in SIDES}
        for side in sides.values():
            side.round(0, size)
        rounds = [
            {name: side.round(number % TEXT_SETS, size) for name, side in sides.items()}
            for number in range(1, count + 1)
        ]
        lanes = {name: side.lanes for name, side in sides.items()}
    yield from figures(rounds, lanes)


def figures(rounds: Sequence[dict[str, Round]], lanes: dict[str, int]) -> Iterator[Figure]:
    """Return the ratios to each kind of fixed batches, by wall and by CPU time."""
    rows = sum(each["sorted"].rows for each in rounds)
    for name, text in NAMES.items():
        ratios = [each[name].wall_s / each["sorted"].wall_s for each in rounds]
        cpu_ratios = [each[name].cpu_s / each["sorted"].cpu_s for each in rounds]
        spread = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        yield Figure(
            name=f"length_sorted_to_{name}_rows_per_s",
            value=median([each["sorted"].rows / each["sorted"].wall_s for each in rounds]),
            unit="rows/s",
            ratio_to=text,
            ratio=median(ratios),
            n=rows,
            note=f"goal 1.8; ratio of each round: {spread}; {lanes[name]} lanes, of the server"
            f" {lanes['sorted']}; padding {_waste(rounds, name)}, here {_waste(rounds, 'sorted')}",
        )
        yield Figure(
            name=f"length_sorted_to_{name}_rows_per_cpu_s",
            value=median([each["sorted"].rows / each["sorted"].cpu_s for each in rounds]),
            unit="rows/CPU s",
            ratio_to=text,
            ratio=median(cpu_ratios),
            n=rows,
            note=f"{number(median([each[name].rows / each[name].cpu_s for each in rounds]))}"
            " of the other",
        )


def _waste(rounds: Sequence[dict[str, Round]], name: str) -> str:
    return f"{100 * median([each[name].waste for each in rounds]):.0f} %"


class Side:
    """One side in a process of its own, a round a line on its standard input."""

    def __init__(self, name: str) -> None:
        from workers.model_server import __main__ as entry

        cache = directory().parent / "cache" / "jax"
        environment = {**os.environ, **entry.ALLOCATOR, **entry.QUIET}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.sorted_batches", name],
            env={**environment, **entry.compilation_cache(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.lanes = 0
        self._out.readline()  # so that no two sides measure their figures at a time

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._in.close()
        self._out.close()
        self._process.wait(60)

    def round(self, number: int, size: int) -> Round:
        """Compute the calls of one round."""
        self._in.write(json.dumps([number, size]) + "\n")
        self._in.flush()
        answer = json.loads(self._out.readline())
        self.lanes = answer.pop("lanes")
        return Round(**answer)


def main(name: str) -> None:
    """Run one side."""
    from workers.model_server import device

    model = device.load(CHECKPOINT, root=None, sha256=None, version=None, stopping=lambda: False)
    side = Sorted(model) if name == "sorted" else Fixed(model, exact=name == "exact")
    print("ready", flush=True)
    for line in sys.stdin:
        number, size = json.loads(line)
        texts = live(number, size)
        answer = {**side.measure(texts), "rows": sum(map(len, texts)), "lanes": side.lanes}
        print(json.dumps(answer), flush=True)


class Sorted:
    """The server's batcher, and a client with a fixed number of open calls."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.lanes = model.serving.lanes

    def measure(self, texts: Sequence[Call]) -> dict[str, float]:
        """Compute all; returns seconds and tokens."""
        from workers.model_server.meter import Meter

        meter = Meter(started_at=time.monotonic())
        tokens = [_read(self._model, call) for call in texts]
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        asyncio.run(self._embed(tokens, meter))
        return {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "real_tokens": meter.real_tokens,
            "padded_tokens": meter.padded_tokens,
        }

    async def _embed(self, calls: Sequence[Any], meter: Any) -> None:
        from workers.model_server.batcher import Batcher

        model = self._model
        batcher = Batcher(model.device, model.serving, meter, clock=time.monotonic)
        room = asyncio.Semaphore(OPEN_CALLS)

        async def call(tokens: Any) -> None:
            async with room:
                await batcher.embed((), tokens, priority=51, deadline_at=None)

        await asyncio.gather(*map(call, calls))
        batcher.close()


class Fixed:
    """Twelve at a time, as they come."""

    def __init__(self, model: Any, *, exact: bool) -> None:
        self._model = model
        self._exact = exact
        self.lanes = 0

    def measure(self, texts: Sequence[Call]) -> dict[str, float]:
        """Compute all; returns seconds and tokens. The first time lanes are chosen."""
        sequences = [tokens.ids for call in texts for tokens in _read(self._model, call)]
        batches = [sequences[i : i + CALL_ROWS] for i in range(0, len(sequences), CALL_ROWS)]
        shapes = sorted({(CALL_ROWS, self._step(batch)) for batch in batches})
        self._model.device.compile(lambda: False, shapes)
        if not self.lanes:
            took = {lanes: self._run(batches, lanes)[0] for lanes in range(1, MOST_LANES + 1)}
            self.lanes = min(took, key=lambda lanes: took[lanes])
        wall_s, cpu_s = self._run(batches, self.lanes)
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "real_tokens": sum(map(len, sequences)),
            "padded_tokens": sum(CALL_ROWS * self._step(batch) for batch in batches),
        }

    def _run(self, batches: Sequence[Any], lanes: int) -> tuple[float, float]:
        with ThreadPoolExecutor(lanes) as threads:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            list(threads.map(self._embed, batches))
            return time.perf_counter() - wall_s, time.process_time() - cpu_s

    def _embed(self, batch: Any) -> Any:
        return self._model.device.start(batch, CALL_ROWS, self._step(batch)).block_until_ready()

    def _step(self, batch: Any) -> int:
        from workers.model_server.scheduler import step_for

        longest = max(map(len, batch))
        if self._exact:
            return longest
        return step_for(longest, self._model.serving.shaping.steps)


def _read(model: Any, texts: Call) -> Any:
    return model.read({"query": texts, "text": texts}).once


if __name__ == "__main__":
    main(sys.argv[1])
