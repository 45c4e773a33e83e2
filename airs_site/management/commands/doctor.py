"""`manage.py doctor`: what is wrong with this deployment, and how to mend it.

One line a check, a second one with the remedy where something is to be done. Ends with 1 if any
check FAILs, else with 0.
"""

import threading
from argparse import ArgumentParser
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import orjson
from django.core.management.base import BaseCommand

from airs_site.doctor.examination import examine
from fulfillment.doctor import Finding, Level


class Command(BaseCommand):
    """Prints findings as they are made."""

    help = "Say what is wrong with this deployment and how to mend it; ends with 1 on a FAIL."
    # It must work where checks would fail.
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the form of the answer."""
        parser.add_argument("-o", "--output", choices=("text", "json"), default="text")

    def handle(self, *, output: str, **options: Any) -> None:
        """Examine, print, and end with the worst that was found."""
        found = []
        for finding in examine(here=lambda: datetime.now(UTC), wait=threading.Event().wait):
            found.append(finding)
            if output == "text":
                self._show(finding)
        levels = Counter(finding.level for finding in found)
        if output == "json":
            answer = {
                "worst": max(levels, key=list(Level).index),
                "findings": [asdict(finding) for finding in found],
            }
            self.stdout.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
        else:
            self.stdout.write(", ".join(f"{levels[level]} {level}" for level in Level))
        if levels[Level.FAIL]:
            raise SystemExit(1)

    def _show(self, finding: Finding) -> None:
        style = {
            Level.OK: self.style.SUCCESS,
            Level.WARN: self.style.WARNING,
            Level.FAIL: self.style.ERROR,
        }[finding.level]
        self.stdout.write(f"{style(f'{finding.level:<4}')}  {finding.check:<20} {finding.detail}")
        if finding.remedy:
            self.stdout.write(f"      {'':<20} → {finding.remedy}")
        self.stdout.flush()
