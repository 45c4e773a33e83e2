"""Two models share a pool that is rebalanced: a replica moves to work, and no request notices.

The models are tiny and random; everything else is as in life, but that a round is asked for as soon
as there is something to decide.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.acceptance.stack import REPOSITORY, Stack, ndjson, remove, rows, start_stack, until

pytestmark = pytest.mark.acceptance

ROWS = 1_200
TIMEOUT_S = 90.0
LOOKED_AT = "SELECT ran_at FROM fulfillment_servicerun WHERE name = 'commitments'"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with start_stack(without=("flower",)) as running:
        try:
            running.wait_ready()
            running.client.post("/api/v1/models/minilm/stop")
            yield running
        finally:
            remove(running)


def _post(stack: Stack, path: str, body: dict[str, object]) -> None:
    answer = stack.client.post(f"/api/v1{path}", json=body)
    assert answer.is_success, answer.text


def _host(stack: Stack, model: str) -> None:
    """Host a model that would have the whole pool, with a rater of its name."""
    replicas = {"min": 0, "default": 2, "max": 2}
    _post(
        stack, "/models",
        {"id": model, "kind": "hosted", "checkpoint": "tiny:0", "pool": "box",
         "replicas": replicas},
    )  # fmt: skip
    _post(
        stack, "/raters",
        {"id": model, "autorater": "needs_met", "model": model, "score_min": 0, "score_max": 4},
    )  # fmt: skip
    _post(stack, f"/models/{model}/start", {})


def _call_task(stack: Stack, task: str) -> None:
    """Have the control worker do now what beat asks for each minute."""
    subprocess.run(
        [sys.executable, "-m", "celery", "-A", "airs_site.celery", "call", task],
        cwd=REPOSITORY,
        env=stack.environment,
        check=True,
        capture_output=True,
    )


def _replicas(stack: Stack) -> dict[str, tuple[int, int]]:
    """Return how many replicas each model wants, and how many serve."""
    found = {m: stack.client.get(f"/api/v1/models/{m}").json() for m in ("left", "right")}
    return {m: (f["replicas"]["wanted"], f["replicas"]["ready"]) for m, f in found.items()}


def test_a_replica_moves_while_both_models_work_and_no_request_fails(stack: Stack) -> None:
    _post(stack, "/pools", {"id": "box", "kind": "cpu", "devices": 2, "rebalancing": "on"})
    _host(stack, "left")
    until(
        lambda: _replicas_of(stack, "left") == 2,
        timeout_s=TIMEOUT_S,
        what="both replicas of the first model serve",
        every_s=0.3,
    )
    _host(stack, "right")
    assert _replicas(stack) == {"left": (2, 2), "right": (0, 0)}

    of_left = [_submit(stack, "left", 0)]
    of_right = [_submit(stack, "right", 0)]
    _call_task(stack, "fulfillment.renew_forecasts")
    until(lambda: stack.query(LOOKED_AT), timeout_s=TIMEOUT_S, what="the work was looked at")
    _call_task(stack, "models_admin.rebalance")

    def has_moved() -> bool:
        # The model that gives a replica up has work all the time.
        if stack.workflow(of_left[-1])["finished_at"]:
            of_left.append(_submit(stack, "left", len(of_left)))
        return _replicas(stack) == {"left": (1, 1), "right": (1, 1)}

    until(has_moved, timeout_s=TIMEOUT_S, what="a replica has moved", every_s=0.1)

    for workflow_id in (*of_left, *of_right):
        result = stack.wait_finished(workflow_id)
        assert result["state"] == "COMPLETED", result
        assert result["counts"]["completed"] == ROWS
    assert stack.query("SELECT max(attempts), max(calls) FROM fulfillment_batch") == [(1, 1)]
    (decision,) = [
        each
        for each in stack.client.get("/api/v1/pools/box/decisions").json()["items"]
        if each["moves"]
    ]
    assert decision["applied"]
    assert decision["moves"] == [
        {"model": "left", "before": 2, "after": 1},
        {"model": "right", "before": 0, "after": 1},
    ]


def _replicas_of(stack: Stack, model: str) -> int:
    ready: int = stack.client.get(f"/api/v1/models/{model}").json()["replicas"]["ready"]
    return ready


def _submit(stack: Stack, rater: str, number: int) -> str:
    documents = rows(ROWS, prefix=f"{rater}{number}-", words=20)
    return str(stack.submit(rater, ndjson(documents))["id"])
