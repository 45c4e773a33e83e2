"""A stack under measurement: submit, wait by the database's own clock, count CPU."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.acceptance.stack import Stack, Stub, remove, start_stack, start_stub, until
from tests.benchmarks.costs import Cost, Meter

PATIENCE_S = 300.0
FINISHED = """
    SELECT finished_at, state FROM fulfillment_workflow WHERE public_id = %s
"""
COMPLETED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One workflow from its first byte to its end."""

    workflow_id: str
    posted_s: float
    """Until the answer to the upload."""
    finished_s: float
    """Until the workflow was COMPLETED."""
    cost: Cost


@contextlib.contextmanager
def stack(*, without: Sequence[str], **environment: str) -> Iterator[Stack]:
    """Start a stack in a home of its own, and remove both."""
    running = start_stack(without=without, **environment)
    try:
        running.wait_ready()
        running.client.timeout = PATIENCE_S
        yield running
    finally:
        remove(running)


@contextlib.contextmanager
def stub(*, delay_s: float = 0.0) -> Iterator[Stub]:
    """Start the instant model."""
    with tempfile.TemporaryDirectory(prefix="airs-bench-") as directory:
        server = start_stub(Path(directory), delay_s=delay_s)
        try:
            yield server
        finally:
            server.stop()


def rate(
    stack: Stack, rater: str, body: bytes, *, others: Mapping[str, int] | None = None, **fields: Any
) -> Run:
    """Send a workflow and wait until it is COMPLETED; times are PostgreSQL's, one machine's."""
    meter = Meter(stack.home, others=others)
    began_at = datetime.now(UTC)
    workflow_id = str(stack.submit(rater, body, **fields)["id"])
    posted_s = (datetime.now(UTC) - began_at).total_seconds()
    finished_at = wait_completed(stack, workflow_id)
    return Run(
        workflow_id=workflow_id,
        posted_s=posted_s,
        finished_s=(finished_at - began_at).total_seconds(),
        cost=meter.read(),
    )


def wait_completed(stack: Stack, workflow_id: str) -> datetime:
    """Wait until a workflow is COMPLETED, without asking the web server; return since when."""
    with stack.database() as connection, connection.cursor() as cursor:

        def finished() -> datetime | None:
            cursor.execute(FINISHED, [workflow_id])
            (found_row,) = cursor.fetchall()
            finished_at, state = found_row
            assert finished_at is None or state == COMPLETED, f"ended in state {state}"
            found: datetime | None = finished_at
            return found

        since: datetime = until(
            finished, timeout_s=PATIENCE_S, what=f"{workflow_id} finishes", every_s=0.1
        )
    return since
