"""`manage.py service_report`: how the running system did, beside the paper's figures and goals."""

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from airs_site import service_report
from fulfillment.clock import database_now

_MOST_DAYS = 366.0


def days(text: str) -> timedelta:
    """Read a number of days, parts of a day included."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MOST_DAYS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of days above 0, up to {_MOST_DAYS:g}"
        )
    return timedelta(days=number)


class Command(BaseCommand):
    help = "Print the figures of the last days from this system's own history."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--days", type=days, default=timedelta(days=8), help="back from now (8)"
        )
        parser.add_argument("--out", type=Path, help="write the figures there as JSON, too")

    def handle(self, *args: Any, **options: Any) -> None:
        until = database_now()
        written = service_report.document(until - options["days"], until)
        self.stdout.write(service_report.text(written))
        if options["out"] is not None:
            options["out"].write_text(json.dumps(written, indent=1) + "\n")
            self.stdout.write(f"\nwritten to {options['out']}")
