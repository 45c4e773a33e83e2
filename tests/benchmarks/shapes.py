"""What the device does with batches of so many rows of so many tokens: a table and a plot.

    make bench ARGS="shapes"

The real encoder without HTTP, queue or reading, with as many lanes as the server has: all shapes in
turns, round by round, the median counts. What the warm-up chose is marked, and its full batches are
measured in turns with those of the fixed table. `shapes.png` and `shapes_grid.json` lie beside the
figures.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.model_server import CHECKPOINT
from tests.benchmarks.report import REPOSITORY, Figure, directory, median, number

ROWS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (32, 64, 96, 128, 192, 256)
MOST_TOKENS = 8192
"""Larger calls take a second, and fall behind long before."""
ROUNDS, QUICK_ROUNDS = 5, 2
DUEL_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One batch size at one length."""

    rows: int
    length: int
    rows_per_s: float
    rows_per_cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All that was measured."""

    cells: Sequence[Cell]
    lanes: int
    served: Mapping[int, int]
    """Rows of a full batch of the server, by length."""
    figures: Mapping[str, Any]
    tuned_ratio: float
    rounds: int

    def at(self, length: int) -> list[Cell]:
        """Return the cells of a length, the smallest batch first."""
        return [cell for cell in self.cells if cell.length == length]

    def near(self, length: int) -> Cell:
        """Return the cell nearest to what the server does at a length."""
        served = self.served[length]
        return min(self.at(length), key=lambda cell: abs(cell.rows - served))


def shapes(*, quick: bool) -> Iterator[Figure]:
    """Measure in a process of its own, draw, and give a figure a length."""
    sweep = _measured(QUICK_ROUNDS if quick else ROUNDS)
    place = directory()
    place.mkdir(parents=True, exist_ok=True)
    (place / "shapes_grid.json").write_text(json.dumps(asdict(sweep), indent=1) + "\n")
    (place / "shapes.png").write_bytes(drawn(sweep))
    _show(sweep)
    yield from figures(sweep)


def figures(sweep: Sweep) -> Iterator[Figure]:
    """Return the rate of the server's full batch at each length, and what the tuner brings."""
    for length in sorted({cell.length for cell in sweep.cells}):
        cells, near = sweep.at(length), sweep.near(length)
        best = max(cells, key=lambda cell: cell.rows_per_s)
        yield Figure(
            name=f"shapes_rows_per_s_at_{length}",
            value=near.rows_per_s,
            unit="rows/s",
            ratio_to=f"the best batch size, {best.rows} rows",
            ratio=near.rows_per_s / best.rows_per_s,
            n=sweep.rounds,
            note=f"{near.rows} rows, the server's full batch has {sweep.served[length]}; one row"
            f" {number(cells[0].rows_per_s)}/s, {cells[-1].rows} rows"
            f" {number(cells[-1].rows_per_s)}/s",
        )
    yield Figure(
        name="shapes_tuned",
        value=sweep.figures["batch_tokens"],
        unit="tokens a batch",
        ratio_to="full batches of the fixed table, in turns",
        ratio=sweep.tuned_ratio,
        n=sweep.rounds,
        note=f"{sweep.figures['lanes']} lanes; {sweep.figures['reason']}",
    )


def drawn(sweep: Sweep) -> bytes:
    """Return the picture: a line a length, the server's size marked."""
    from airs_site.simulation.plots import style

    made, panels = style.figure(1, 2, height=4.6)
    shown = (("rows_per_s", "rows a second"), ("rows_per_cpu_s", "rows a CPU second"))
    colours = list(style.COLOURS.values())
    for axes, (field, label) in zip(panels, shown, strict=True):
        for colour, length in zip(colours, sorted(sweep.served), strict=False):
            cells, near = sweep.at(length), sweep.near(length)
            values = [getattr(cell, field) for cell in cells]
            axes.plot([c.rows for c in cells], values, color=colour, label=f"{length} tokens")
            axes.plot([near.rows], [getattr(near, field)], "o", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("rows of a batch (dot: nearest to the server's full batch)")
        axes.set_ylabel(label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    panels[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return style.png(made, f"Batch size and length, {sweep.lanes} lanes")


def _show(sweep: Sweep) -> None:
    lengths = sorted(sweep.served)
    table = Table("rows", *(f"{length} tokens" for length in lengths), title="rows/s (rows/CPU s)")
    for rows in sorted({cell.rows for cell in sweep.cells}):
        found = {cell.length: cell for cell in sweep.cells if cell.rows == rows}
        table.add_row(str(rows), *(_text(found.get(length)) for length in lengths))
    Console(width=140, highlight=False).print(table)


def _text(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell.rows_per_s:.0f} ({cell.rows_per_cpu_s:.0f})"


def _measured(rounds: int) -> Sweep:
    from workers.model_server import __main__ as entry

    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, **entry.ALLOCATOR, **entry.QUIET}
        environment |= entry.compilation_cache(Path(home))
        child = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.shapes", str(rounds)],
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(child.stdout)
    return Sweep(
        cells=[Cell(**cell) for cell in found.pop("cells")],
        served={int(length): rows for length, rows in found.pop("served").items()},
        **found,
    )


def main(rounds: int) -> None:
    """Measure, and print a sweep as JSON."""
    from workers.model_server import device
    from workers.model_server.scheduler import step_for
    from workers.model_server.serving import SERVING

    model = device.load(CHECKPOINT, root=None, sha256=None, version=None, stopping=lambda: False)
    serving = model.serving
    wanted = [(r, s) for r in ROWS for s in LENGTHS if r * s <= MOST_TOKENS]
    model.device.compile(lambda: False, wanted)
    taken = [{shape: _cost(model.device, *shape, serving.lanes) for shape in wanted}
             for _ in range(rounds)]  # fmt: skip
    steps = serving.shaping.steps
    sweep = Sweep(
        cells=[
            Cell(
                rows=shape[0],
                length=shape[1],
                rows_per_s=shape[0] / median([costs[shape][0] for costs in taken]),
                rows_per_cpu_s=shape[0] / median([costs[shape][1] for costs in taken]),
            )
            for shape in wanted
        ],
        lanes=serving.lanes,
        served={s: serving.shaping.rows(step_for(s, steps)) for s in LENGTHS},
        figures=model.chosen.account,
        tuned_ratio=_tuned_ratio(model, SERVING[model.platform]),
        rounds=rounds,
    )
    print(json.dumps(asdict(sweep)))


def _cost(device: Any, rows: int, step: int, lanes: int) -> tuple[float, float]:
    """Wall and CPU seconds of a call while all lanes make such calls."""
    calls = max(1, 1024 // (rows * step))

    def lane(_: int) -> None:
        for _ in range(calls):
            device.run(rows, step)

    with ThreadPoolExecutor(lanes) as threads:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        list(threads.map(lane, range(lanes)))
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return wall_s / (calls * lanes), cpu_s / (calls * lanes)


def _tuned_ratio(model: Any, table: Any) -> float:
    from workers.model_server import tuning
    from workers.model_server.measuring import Watch

    old, new = tuning.trials(table), tuning.trials(model.serving)
    model.device.compile(lambda: False, [(trial.rows, trial.step) for trial in (*old, *new)])
    watch = Watch(model.device, clock=time.perf_counter, limit_s=DUEL_S, interrupted=lambda: None)
    return watch.duel(old, new, limit_s=DUEL_S / 6) or 1.0


if __name__ == "__main__":
    main(int(sys.argv[1]))
