"""`manage.py simulate`: policies in virtual time over a trace, or over generated workloads."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import Progress as ProgressBar

from airs_site.simulation import trace
from airs_site.simulation.bound import bound
from airs_site.simulation.cell import DISTURBANCES, disturbed, figures_of
from airs_site.simulation.engine import Options
from airs_site.simulation.errors import SimulationError
from airs_site.simulation.generator import generate
from airs_site.simulation.policies.registry import POLICIES
from airs_site.simulation.report import Result, as_text, document, table
from airs_site.simulation.trace import Progress, Workload


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


class Command(BaseCommand):
    help = "Run scheduling policies in virtual time and compare them."
    requires_system_checks: Sequence[str] = ()  # type: ignore[assignment]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--params", type=Path, required=True, help="params.json of a trace")
        parser.add_argument("--trace", type=Path, help="trace.jsonl.gz; without it, --seeds")
        parser.add_argument("--seeds", type=numbers, default=(), help="of generated workloads")
        parser.add_argument("--scale", type=positive, default=100, help="1:SCALE (100)")
        parser.add_argument("--days", type=positive, help="only the first days")
        parser.add_argument("--window", type=positive, default=1, help="batches a replica holds")
        parser.add_argument("--policies", type=policies, default=("paper", "fifo", "airs"))
        parser.add_argument(
            "--disturb", nargs="*", choices=DISTURBANCES, default=(), help="bad days to run too"
        )
        parser.add_argument("--out", type=Path, default=Path("simulation.json"))

    def handle(self, *args: Any, **options: Any) -> None:
        if not options["trace"] and not options["seeds"]:
            raise CommandError("give --trace, or --seeds for workloads of the same description")
        try:
            results = [
                self._result(seed, workload, options) for seed, workload in self._workloads(options)
            ]
        except (SimulationError, OSError) as error:
            raise CommandError(str(error)) from error
        name = str(options["trace"].name if options["trace"] else options["params"].name)
        written = document(trace=name, scale=options["scale"], results=results)
        options["out"].write_text(json.dumps(written, indent=1) + "\n")
        self.stdout.write(as_text(table(written)))
        self.stdout.write(f"\nwritten to {options['out']}")

    def _workloads(self, options: dict[str, Any]) -> Iterator[tuple[int | None, Workload]]:
        params = trace.read_parameters(options["params"])
        scale = options["scale"]
        if options["trace"]:
            with _bar("requests") as progress:
                rows = trace.read_trace(options["trace"], params)
                workload = trace.expand(params, rows, scale=scale, progress=progress)
            yield None, workload
        for seed in options["seeds"]:
            with _bar(f"requests, seed {seed}") as progress:
                rows = generate(params, seed)
                workload = trace.expand(params, rows, scale=scale, progress=progress)
            yield seed, workload

    def _result(self, seed: int | None, workload: Workload, options: dict[str, Any]) -> Result:
        run = Options(window=options["window"], days=options["days"], seed=seed or 0)
        figures = {}
        for policy in options["policies"]:
            with _bar(policy) as progress:
                figures[policy] = figures_of(workload, policy, run, progress)
        bad_days = {}
        for name in options["disturb"]:
            with _bar(name) as progress:
                bad_days[name] = disturbed(name, workload, options["policies"], run, progress)
        return Result(
            seed=seed,
            figures=figures,
            bound=bound(workload, options["days"]),
            disturbances=bad_days,
        )


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Show a bar on stderr, where one can be seen."""
    with ProgressBar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)
