"""Hosted models of a run: pools, models and raters on a stack, and work for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tests.acceptance.stack import Stack, until
from tests.benchmarks.model_server import CHECKPOINT, make_pairs
from tests.benchmarks.real_model import wait_ready

PAIRS_A_SEED = 300
BATCH = 12
READY_S = 240.0
OPEN = "SELECT count(*) FROM fulfillment_workflow WHERE finished_at IS NULL"
TRIED = """
    SELECT max(b.attempts), count(*) FILTER (WHERE w.state = 5)
    FROM fulfillment_batch b JOIN fulfillment_workflow w ON w.id = b.workflow_id
    WHERE w.rater_id = ANY(%s)
"""
ENDED = """
    SELECT sum(received)::bigint, sum(completed)::bigint, sum(failed)::bigint,
           sum(timed_out)::bigint, sum(cancelled)::bigint, sum(from_model)::bigint,
           sum(model_calls)::bigint, sum(model_calls) FILTER (WHERE w.state = 5)::bigint
    FROM fulfillment_workflowstats s JOIN fulfillment_workflow w ON w.id = s.workflow_id
    WHERE w.rater_id = ANY(%s)
"""


def send(stack: Stack, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Make a call of the API that must succeed; return its answer."""
    answer = stack.client.request(method, f"/api/v1{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def compile_first(stack: Stack) -> None:
    """Let the stack's own model compile the shapes that later servers find in the cache."""
    wait_ready(stack)
    send(stack, "POST", "/models/minilm/stop")
    until(
        lambda: send(stack, "GET", "/models/minilm")["state"] == "STOPPED",
        timeout_s=READY_S,
        what="the first server is gone",
        every_s=0.3,
    )


def host(
    stack: Stack,
    model: str,
    *,
    pool: str,
    replicas: Mapping[str, int],
    autorater: str = "needs_met",
    **fields: Any,
) -> None:
    """Register the real model under an id, with a rater of the same name, and start it."""
    model_fields = {
        "id": model, "kind": "hosted", "checkpoint": CHECKPOINT, "pool": pool,
        "replicas": dict(replicas), **fields,
    }  # fmt: skip
    send(stack, "POST", "/models", model_fields)
    rater = {
        "id": model, "autorater": autorater, "model": model, "mode": "integrated",
        "score_min": 0, "score_max": 4, "batch_size": BATCH,
    }  # fmt: skip
    send(stack, "POST", "/raters", rater)
    send(stack, "POST", f"/models/{model}/start")


def wait_replicas(stack: Stack, model: str, count: int) -> None:
    """Wait until so many replicas of a model serve."""
    until(
        lambda: send(stack, "GET", f"/models/{model}")["replicas"]["ready"] == count,
        timeout_s=READY_S,
        what=f"{count} replicas of {model} serve",
        every_s=0.2,
    )


def bodies(rows: int, *, seed: int, prefix: str) -> bytes:
    """Return NDJSON of so many rows, no two texts alike, 20 to 250 tokens each."""
    lines: list[bytes] = []
    while len(lines) < rows:
        for query, text in make_pairs(seed)[: rows - len(lines)]:
            row = {"query_text": query, "text": f"{prefix} {len(lines)} {text}"}
            lines.append(orjson.dumps(row))
        seed += 1
    return b"\n".join(lines) + b"\n"


def wait_all_ended(stack: Stack, *, timeout_s: float) -> None:
    """Wait until no workflow is open."""
    until(
        lambda: stack.query(OPEN) == [(0,)],
        timeout_s=timeout_s,
        what="all workflows end",
        every_s=0.3,
    )


def check_nothing_in_vain(stack: Stack, raters: Sequence[str]) -> str:
    """Assert that nothing failed and nothing was asked twice; say what was counted.

    What was cancelled before it was sent is no failure.
    """
    ((attempts, batches),) = stack.query(TRIED, list(raters))
    ((received, completed, failed, timed_out, cancelled, rated, calls, of_completed),) = (
        stack.query(ENDED, list(raters))
    )
    assert (failed, timed_out) == (0, 0), f"{failed} failed, {timed_out} timed out"
    assert completed + cancelled == received
    assert attempts <= 1, f"a batch was tried {attempts} times"
    assert (of_completed or 0) == batches, f"{of_completed} calls for {batches} batches"
    return f"{completed:,} requests COMPLETED, {rated:,} by {calls:,} calls; none failed or twice"
