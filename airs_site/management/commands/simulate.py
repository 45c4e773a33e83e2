"""`manage.py simulate`: policies in virtual time over a trace, or over generated workloads."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from airs_site.simulation import trace
from airs_site.simulation.campaign import Plan, plain, simulate_all
from airs_site.simulation.cells import Cells, cells
from airs_site.simulation.engine import Options
from airs_site.simulation.errors import SimulationError
from airs_site.simulation.generator import generate
from airs_site.simulation.policies.registry import POLICIES
from airs_site.simulation.report import SERVICE, as_text, document
from airs_site.simulation.scenes import ABLATIONS, DISTURBANCES
from airs_site.simulation.tables import WEEKDAYS, Hour, Table, enough, tables
from airs_site.simulation.trace import Workload
from airs_site.simulation.workload import DAY_S, Evaluation, Params

SAMPLE: Final = settings.BASE_DIR / "samples" / "simulation" / "params.json"
SEEDS: Final = (1, 2, 3)
SCALE: Final = 100
SCALE_OF_ALL: Final = 200
ALL_POLICIES: Final = ("paper", "paper-tuned-1", "paper-tuned-2", "fifo", "isolated", "airs")
FACTORS: Final = (0.5, 0.75, 1.0, 1.5, 2.0)
MARK: Final = "✓ meets its goal, ✗ does not"


def positive(text: str) -> int:
    """Read a whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number from 1")
    return number


def policies(text: str) -> Sequence[str]:
    """Read names of policies, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"no policy {', '.join(unknown) or 'is named'}; there are {', '.join(POLICIES)}"
        )
    return names


def numbers(text: str) -> Sequence[int]:
    """Read whole numbers, separated by commas."""
    return [int(number) for number in text.split(",")]


def factors(text: str) -> Sequence[float]:
    """Read positive numbers, separated by commas."""
    found = [float(number) for number in text.split(",")]
    if not all(0 < number <= 100 for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} has a number that is not above 0, up to 100")
    return found


def hour(text: str) -> Hour:
    """Read an hour of the week: `mon-10`."""
    day, _, number = text.lower().partition("-")
    if day[:3] not in WEEKDAYS or not number.isdigit() or int(number) > 23:
        raise argparse.ArgumentTypeError(f"{text!r} is no hour of the week such as mon-10")
    return Hour(weekday=WEEKDAYS.index(day[:3]), hour=int(number))


class Command(BaseCommand):
    help = "Run scheduling policies in virtual time and compare them."
    requires_system_checks: Sequence[str] = ()  # type: ignore[assignment]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--params", type=Path, help="beside the trace, or the project's own sample"
        )
        parser.add_argument("--trace", type=Path, help="trace.jsonl.gz; without it, --seeds")
        parser.add_argument("--seeds", type=numbers, help="of generated workloads (1,2,3)")
        parser.add_argument(
            "--scale",
            type=positive,
            help=f"1:SCALE ({SCALE}; {SCALE_OF_ALL} with --all; as a trace was exported)",
        )
        parser.add_argument("--days", type=positive, help="only the first days")
        parser.add_argument("--window", type=positive, default=1, help="batches a replica holds")
        parser.add_argument("--policies", type=policies, help=", ".join(POLICIES))
        parser.add_argument(
            "--disturb",
            nargs="*",
            choices=(*DISTURBANCES, "all"),
            default=(),
            help="bad days and sweeps to run too",
        )
        parser.add_argument(
            "--ablate", action="store_true", help=f"switch off each layer of {SERVICE}"
        )
        parser.add_argument(
            "--pool-scale", type=factors, default=(), help="so many times the replicas: 0.5,1,2"
        )
        parser.add_argument("--at", type=hour, help="tell of one hour of the week: mon-10")
        parser.add_argument(
            "--all",
            action="store_true",
            help="all policies, all disturbances, layers and pools; what goes beyond the workload "
            "as it is on the first one only, and not through all policies",
        )
        parser.add_argument("--jobs", type=positive, help="processes (as many as processors)")
        parser.add_argument("--no-plots", action="store_true", help="only figures and tables")
        parser.add_argument(
            "--out", type=Path, help="JSON file; plots go beside it (AIRS_HOME/simulation)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        out = options["out"] or settings.AIRS_HOME / "simulation" / "simulation.json"
        try:
            described = trace.read_parameters(_params_path(options))
            params = _shortened(described, options["days"])
            scale = options["scale"] or params.sample
            scale = scale or (SCALE_OF_ALL if options["all"] else SCALE)
            with _bars(options["jobs"] or os.cpu_count() or 1) as run:
                results = simulate_all(
                    _workloads(described, params, scale, options),
                    _plans(options),
                    Options(window=options["window"]),
                    run,
                )
        except (SimulationError, OSError) as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            raise CommandError("interrupted, nothing is written", returncode=130) from None
        name = options["trace"].name if options["trace"] else params.name
        written = document(trace=name, scale=scale, results=results, params=params)
        found = tables(written, options["at"])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(written, indent=1) + "\n")
        for each in found:
            self.stdout.write(f"{each.title}\n{as_text(each.lines)}\n")
        for policy in written["pool_scale"]:
            replicas = enough(written, policy)
            need = f"{replicas} replicas are enough" if replicas else "no pool of these is enough"
            self.stdout.write(f"{policy}: {need} for 99.5 % whole in time")
        self.stdout.write(f"{MARK}. Written to {out}")
        if not options["no_plots"]:
            self.stdout.write(_draw(written, found, out))


def _shortened(params: Params, days: int | None) -> Params:
    """Return the parameters of only so many days."""
    return replace(params, days=min(days or params.days, params.days))


def _params_path(options: Mapping[str, Any]) -> Path:
    if options["params"]:
        return Path(options["params"])
    return options["trace"].parent / "params.json" if options["trace"] else SAMPLE


def _plans(options: Mapping[str, Any]) -> list[Plan]:
    everything = options["all"]
    names = [name for name in options["disturb"] if name != "all"]
    chosen = options["policies"] or (ALL_POLICIES if everything else ("paper", "fifo", SERVICE))
    ablates = everything or options["ablate"]
    plan = Plan(
        # What a layer adds is told beside the full service.
        policies=list(dict.fromkeys([*chosen, *([SERVICE] if ablates else [])])),
        disturbances=list(DISTURBANCES) if everything or "all" in options["disturb"] else names,
        ablations=list(ABLATIONS) if ablates else (),
        factors=options["pool_scale"] or (FACTORS if everything else ()),
        briefly=everything,
    )
    return [plan, plain(plan)] if everything else [plan]


def _workloads(
    described: Params, params: Params, scale: int, options: Mapping[str, Any]
) -> Iterator[tuple[int | None, Workload]]:
    """Yield workloads of the days of `params`: the first of those that are described."""

    def expanded(rows: Sequence[Evaluation]) -> Workload:
        there = [row for row in rows if row.at_s < params.days * DAY_S]
        return trace.expand(params, there, scale=scale)

    if options["trace"]:
        yield None, expanded(trace.read_trace(options["trace"], described))
    for seed in options["seeds"] or (() if options["trace"] else SEEDS):
        yield seed, expanded(generate(described, seed))


@contextmanager
def _bars(processes: int) -> Iterator[Cells]:
    """Give somebody who runs cells, and show on stderr how far they are, where it can be seen."""
    with ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]} of {task.fields[all]} runs"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("simulating", total=None, done=0, all="?")
        shares: dict[int, float] = {}

        def told(number: int, share: float) -> None:
            shares[number] = share
            bar.update(
                task,
                total=float(run.count),
                completed=sum(shares.values()),
                done=sum(done >= 1 for done in shares.values()),
                all=run.count,
            )

        with cells(processes, told) as run:
            yield run


def _draw(written: Mapping[str, Any], found: Sequence[Table], out: Path) -> str:
    """Write all plots, and the page that has them and the tables; say where."""
    try:
        from airs_site.simulation.page import page
        from airs_site.simulation.plots import PLOTS
        from airs_site.simulation.plots.style import png
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "matplotlib":
            raise
        return "no plots: matplotlib is not installed (pip install -r requirements-dev.txt)"
    pictures = {}
    for plot in PLOTS:
        drawn = plot.draw(written)
        if drawn is not None:
            pictures[plot] = png(drawn, plot.title)
            (out.parent / f"{plot.name}.png").write_bytes(pictures[plot])
    seeds = written["seeds"]
    about = (
        f"{written['trace']}, {f'seeds {seeds}' if seeds else 'one trace'}, scale 1:"
        f"{written['scale']}, {written['replicas']} replicas. {MARK}. Figures of several seeds are "
        "medians; plots show the first."
    )
    html = out.with_suffix(".html")
    html.write_text(
        page(title="AIRS in virtual time", about=about, tables=found, pictures=pictures)
    )
    return f"and {html}, with {len(pictures)} PNG files beside it"
