"""`manage.py export_trace`: this system's own history as a trace for `manage.py simulate`."""

import argparse
import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import Progress as ProgressBar

from airs_site.management.commands.simulate import positive
from airs_site.simulation.trace import write_trace
from airs_site.trace_export import export, span_of
from fulfillment.clock import database_now


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    number = float(text)
    if not 0 < number < 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0, below a day")
    return number


class Command(BaseCommand):
    help = "Write the last days of this system as a trace that `manage.py simulate` reads."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--days", type=positive, default=8, help="up to now, in UTC (8)")
        parser.add_argument("--out", type=Path, default=Path("trace.jsonl.gz"))
        parser.add_argument("--params-out", type=Path, help="params.json beside the trace")
        parser.add_argument(
            "--sample", type=positive, help="one in so many requests (all, or up to two million)"
        )
        parser.add_argument(
            "--batch-seconds", type=seconds, help="of a full batch, where nothing was measured"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        out: Path = options["out"]
        with ProgressBar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("workflows", total=1.0)
            made = export(
                span_of(database_now(), options["days"]),
                sample=options["sample"],
                batch_s=options["batch_seconds"],
                progress=lambda share: bar.update(task, completed=share),
            )
        if not made.evaluations:
            raise CommandError(f"no workflow was submitted in the last {options['days']} days")
        params_out = options["params_out"] or out.parent / "params.json"
        write_trace(out, made.evaluations)
        params_out.write_text(json.dumps(made.params, indent=1) + "\n")
        for note in made.notes:
            self.stdout.write(f"note: {note}")
        workflows = sum(evaluation.at_s >= 0 for evaluation in made.evaluations)
        self.stdout.write(
            f"{workflows:,} workflows, one in {made.params['sample']} requests, written to {out} "
            f"and {params_out}\nmanage.py simulate --params {params_out} --trace {out} "
            f"--scale {made.params['sample']}"
        )
