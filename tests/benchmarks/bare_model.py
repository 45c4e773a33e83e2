"""The model of `needs_met` in a bare loop: all rows known beforehand, its best batching, no AIRS.

    python -m tests.benchmarks.bare_model

Each line on standard input is a list of seeds; the answer is wall and CPU seconds. Rows are sorted
by length into full device batches, each text is embedded once, and all lanes are kept busy.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks.model_server import CHECKPOINT, Pair, make_pairs

Cost = tuple[float, float]
"""Wall and CPU seconds."""


def pairs_of(seeds: Sequence[int]) -> list[Pair]:
    """Return the pairs of some seeds."""
    return [pair for seed in seeds for pair in make_pairs(seed)]


class BareModel:
    """The loop, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self._out.readline()

    def rate(self, seeds: Sequence[int]) -> Cost:
        """Rate the pairs of some seeds."""
        self._in.write(json.dumps(list(seeds)) + "\n")
        self._in.flush()
        wall_s, cpu_s = json.loads(self._out.readline())
        return wall_s, cpu_s


@contextlib.contextmanager
def bare_model(cache: Path) -> Iterator[BareModel]:
    """Start the loop with the environment that the model server gives itself."""
    from workers.model_server import __main__ as entry

    environment = {
        **os.environ,
        **entry.ALLOCATOR,
        **entry.QUIET,
        **entry.compilation_cache(cache),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.bare_model"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield BareModel(process)


def main() -> None:
    from workers.model_server import device
    from workers.model_server.scheduler import step_for

    model = device.load(CHECKPOINT, root=None, sha256=None, version=None, stopping=lambda: False)
    shaping = model.serving.shaping
    print("ready", flush=True)
    with ThreadPoolExecutor(model.serving.lanes) as lanes:
        for line in sys.stdin:
            pairs = pairs_of(json.loads(line))
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            by_step: dict[int, list[tuple[int, ...]]] = {}
            texts = [*{text for pair in pairs for text in pair}]
            for tokens in model.read({"query": texts, "text": texts}).once:
                by_step.setdefault(step_for(len(tokens.ids), shaping.steps), []).append(tokens.ids)
            batches = [
                (sequences[i : i + shaping.rows(step)], step)
                for step, sequences in by_step.items()
                for i in range(0, len(sequences), shaping.rows(step))
            ]
            list(lanes.map(lambda batch: model.device.embed(*batch), batches))
            cost = [time.perf_counter() - wall_s, time.process_time() - cpu_s]
            print(json.dumps(cost), flush=True)


if __name__ == "__main__":
    main()
