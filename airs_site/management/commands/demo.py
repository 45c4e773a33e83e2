"""`manage.py demo`: rate the sample workflow twice with a real model, and say what happened.

Starts `manage.py up` in a process of its own (or uses the one that runs in this home), sends the
sample through the public API like any client, sends it again, prints the report, stops the stack.
Exit status 0 only if every rating of both runs is COMPLETED.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import httpx
from airs_client import Client
from airs_client.displays import display_on
from airs_client.errors import AirsError
from airs_client.results import Rating
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from rich.console import Console

from airs_site.demo_report import Run, render
from airs_site.processes import read_pid

SAMPLE = settings.BASE_DIR / "samples" / "needs_met.jsonl"
RATER = "needs_met"
MODEL = "minilm"
READY_S = 300.0
_POLL_S = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Usage:
    """What the model server has done so far."""

    predictions: int
    busy_s: float


class Command(BaseCommand):
    help = "Rate the sample workflow twice on a real stack and print the report."
    requires_system_checks = []  # the database comes with the stack

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--sample", type=Path, default=SAMPLE, help="NDJSON file of rows")

    def handle(self, *, sample: Path, **options: Any) -> None:
        """Run the demo."""
        if not sample.is_file():
            raise CommandError(f"there is no file {sample}")
        console = Console(file=cast("IO[str]", self.stdout), highlight=False)
        rows = [json.loads(line) for line in sample.read_text().splitlines() if line.strip()]
        with _stack(console) as credentials:
            client = Client(credentials["url"], token=credentials["api_token"])
            with client:
                _wait_for_model(client, console)
                runs = [
                    self._run(client, console, sample, title, bypass=bypass)
                    for title, bypass in _titles(client)
                ]
        console.print(render(runs, rows, width=console.width))
        if not all(run.workflow.state == "COMPLETED" for run in runs):
            raise CommandError("not every rating is COMPLETED")

    def _run(
        self, client: Client, console: Console, sample: Path, title: str, *, bypass: bool
    ) -> Run:
        console.print(f"\n{title}")
        before, started = _usage(client), time.monotonic()
        submission = client.workflows.submit(
            sample, rater=RATER, name=title, bypass=bypass, idempotency_key=uuid.uuid4().hex
        )
        with display_on(console, clock=time.monotonic) as display:
            workflow = client.workflows.wait(submission.workflow.id, on_progress=display.show)
        seconds = time.monotonic() - started
        ratings: list[Rating] = list(client.workflows.ratings(workflow.id))
        after = _usage(client, at_least=before.predictions + workflow.sources.model)
        return Run(
            title=title,
            workflow=workflow,
            ratings=ratings,
            seconds=seconds,
            predictions=after.predictions - before.predictions,
            busy_s=after.busy_s - before.busy_s,
        )


def _titles(client: Client) -> list[tuple[str, bool]]:
    """The first run must show the model at work, also where an earlier demo filled the archive."""
    rated_before = any(
        workflow.counts.completed for workflow in client.workflows.list(rater=RATER).items
    )
    first = (
        "First run, past the archive (an earlier demo has filled it)"
        if rated_before
        else "First run"
    )
    return [(first, rated_before), ("Second run, the same file", False)]


@contextmanager
def _stack(console: Console) -> Iterator[Mapping[str, str]]:
    """Give the credentials of a running stack; one that was started here is stopped again."""
    home: Path = settings.AIRS_HOME
    if read_pid(home, "web") is not None:
        console.print(f"using the stack that runs in {home}")
        yield _credentials(home)
        return
    environment = os.environ | {
        "AIRS_PORT": str(_port("AIRS_PORT", settings.AIRS_PORT)),
        "FLOWER_PORT": str(_port("FLOWER_PORT", settings.FLOWER_PORT)),
        # The report says that the second run calls no model: nothing else may call it meanwhile.
        "AIRS_SHADOW_REFRESH": "0",
    }
    console.print(f"starting the stack in {home} …")
    home.mkdir(parents=True, exist_ok=True)
    log_path = home / "demo-stack.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "up"],
            cwd=settings.BASE_DIR,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_ready(process, int(environment["AIRS_PORT"]), log_path)
        yield _credentials(home) | {"url": f"http://127.0.0.1:{environment['AIRS_PORT']}"}
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
        console.print("stack stopped")


def _port(name: str, wanted: int) -> int:
    """A port that the user named is used or refused by `up`; else a free one is found."""
    if os.environ.get(name):
        return wanted
    for candidate in (wanted, 0):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            port: int = listener.getsockname()[1]
            return port
    raise CommandError("no free port on 127.0.0.1")


def _wait_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CommandError(f"the stack did not start:\n{log.read_text()[-2000:]}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(_POLL_S)
    raise CommandError(f"the stack was not ready within {READY_S:g} s; see {log}")


def _credentials(home: Path) -> dict[str, str]:
    credentials: dict[str, str] = json.loads((home / "credentials.json").read_text())
    return credentials


def _wait_for_model(client: Client, console: Console) -> None:
    """Wait until a replica is warm: the first start compiles every shape."""
    deadline = time.monotonic() + READY_S
    told = False
    while True:
        try:
            model = client.models.get(MODEL)
        except AirsError as error:
            raise CommandError(f"the model {MODEL} is not registered: {error}") from error
        if model.state == "READY":
            return
        if time.monotonic() > deadline:
            raise CommandError(
                f"the model {MODEL} is {model.state} after {READY_S:g} s; see the logs below "
                f"{settings.AIRS_HOME / 'logs'}"
            )
        if not told:
            console.print("the model server loads the weights and compiles its shapes …")
            told = True
        time.sleep(_POLL_S)


def _usage(client: Client, *, at_least: int = 0) -> _Usage:
    """Read what the replicas have done; their account reaches the database every few seconds."""
    deadline = time.monotonic() + 10
    while True:
        servers = client.models.get(MODEL).raw["servers"]
        usage = _Usage(
            predictions=sum(server["rows_total"] for server in servers),
            busy_s=sum(server["busy_seconds"] for server in servers),
        )
        if usage.predictions >= at_least or time.monotonic() > deadline:
            return usage
        time.sleep(_POLL_S)
