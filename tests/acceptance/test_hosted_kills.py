"""kill -9 of a hosted model's server and of the agent that keeps it: the workflow ends whole.

The model is tiny and random, so that 5,000 predictions take seconds; everything else is as in life.
"""

from collections.abc import Iterator

import psutil
import pytest

from tests.acceptance.stack import Stack, ndjson, remove, rows, start_stack, until

pytestmark = pytest.mark.acceptance

ROWS = 5_000
FEWER = 2_500
AFTER_FAULT_S = 60.0
WINDOW = 16
BATCH = 12


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with start_stack(without=("flower",)) as running:
        try:
            running.wait_ready()
            _host_tiny(running)
            yield running
        finally:
            remove(running)


def _host_tiny(stack: Stack) -> None:
    stack.client.post("/api/v1/models/minilm/stop")
    model = {
        "id": "tiny", "kind": "hosted", "protocol": "oip", "checkpoint": "tiny:0",
        "window": WINDOW, "replicas": {"min": 1, "default": 1, "max": 1},
    }  # fmt: skip
    answer = stack.client.post("/api/v1/models", json=model)
    assert answer.status_code == 201, answer.text
    answer = stack.client.post("/api/v1/models/tiny/start")
    assert answer.is_success, answer.text
    answer = stack.client.post(
        "/api/v1/raters",
        json={
            "id": "tiny", "autorater": "needs_met", "model": "tiny", "mode": "integrated",
            "score_min": 0, "score_max": 4,
        },
    )  # fmt: skip
    assert answer.status_code == 201, answer.text
    _wait_served(stack)


def _wait_served(stack: Stack) -> None:
    until(
        lambda: stack.client.get("/api/v1/models/tiny").json()["state"] == "READY",
        timeout_s=120,
        what="the tiny model is ready",
        every_s=0.3,
    )


def _server_pid(stack: Stack) -> int:
    servers = stack.client.get("/api/v1/models/tiny").json()["servers"]
    pid: int = next(s["pid"] for s in servers if s["state"] == "READY")
    return pid


@pytest.mark.parametrize("victim", ["model server", "host agent"])
def test_a_killed_host_costs_no_rating(stack: Stack, victim: str) -> None:
    _wait_served(stack)
    documents = rows(ROWS, prefix=f"{victim}-", words=20)
    workflow_id = stack.submit("tiny", ndjson(documents), name=victim)["id"]
    until(
        lambda: stack.workflow(workflow_id)["counts"]["completed"] > ROWS // 20,
        timeout_s=60,
        what="the workflow is under way",
    )

    if victim == "model server":
        psutil.Process(_server_pid(stack)).kill()
    else:
        stack.kill("host-agent")

    result = stack.wait_finished(workflow_id, timeout_s=AFTER_FAULT_S)
    assert result["state"] == "COMPLETED", result
    assert result["sources"] == {"archive": 0, "coalesced": 0, "model": ROWS}
    # Calls that a dying server never answered were made again, and no others.
    smallest = -(-ROWS // BATCH)
    assert smallest <= result["model_calls"] <= smallest + 4 * WINDOW
    assert {rating["state"] for rating in stack.ratings(workflow_id)} == {"COMPLETED"}


def test_a_notice_to_the_server_costs_neither_a_request_nor_an_attempt(stack: Stack) -> None:
    _wait_served(stack)
    documents = rows(FEWER, prefix="notice-", words=20)
    workflow_id = stack.submit("tiny", ndjson(documents), name="notice")["id"]
    until(
        lambda: stack.workflow(workflow_id)["counts"]["completed"] > FEWER // 20,
        timeout_s=60,
        what="the workflow is under way",
    )

    # Another test may have killed it a moment ago.
    failures = "SELECT max(failures) FROM models_admin_modelserver WHERE model_id = 'tiny'"
    ((before,),) = stack.query(failures)

    psutil.Process(_server_pid(stack)).terminate()

    result = stack.wait_finished(workflow_id, timeout_s=AFTER_FAULT_S)
    assert result["counts"]["completed"] == FEWER, result
    tried = stack.query(
        "SELECT max(attempts), max(calls) FROM fulfillment_batch"
        " WHERE workflow_id = (SELECT id FROM fulfillment_workflow WHERE name = 'notice')"
    )
    assert tried == [(1, 1)], "one call a batch, and it was answered"
    ((after,),) = stack.query(failures)
    assert after <= before, "a notice is no failure"


def test_a_version_is_replaced_while_work_of_both_is_under_way(stack: Stack) -> None:
    """Each workflow is rated by the version that it is pinned to, and nothing is asked twice."""
    _wait_served(stack)
    before = stack.client.get("/api/v1/models/tiny").json()["version"]
    first = stack.submit("tiny", ndjson(rows(FEWER, prefix="first-", words=20)), name="first")["id"]
    until(
        lambda: stack.workflow(first)["counts"]["completed"] > FEWER // 20,
        timeout_s=60,
        what="the workflow is under way",
    )

    answer = stack.client.patch("/api/v1/models/tiny", json={"checkpoint": "tiny:1"})
    assert answer.is_success, answer.text
    until(
        lambda: stack.client.get("/api/v1/models/tiny").json()["version"] != before,
        timeout_s=60,
        what="the new version serves",
        every_s=0.3,
    )
    after = stack.client.get("/api/v1/models/tiny").json()["version"]
    second = stack.submit("tiny", ndjson(rows(FEWER, prefix="next-", words=20)), name="next")["id"]

    of = "(SELECT id FROM fulfillment_workflow WHERE name = %s)"
    for workflow_id, name, version in ((first, "first", before), (second, "next", after)):
        result = stack.wait_finished(workflow_id, timeout_s=AFTER_FAULT_S)
        assert result["state"] == "COMPLETED", result
        batches = f"SELECT count(*) FROM fulfillment_batch WHERE workflow_id = {of}"
        assert [(result["model_calls"],)] == stack.query(batches, name), "none in vain"
        pinned = stack.query(
            "SELECT DISTINCT v.spec->>'model_version' FROM fulfillment_ratingrequest r"
            " JOIN fulfillment_rating a ON a.id = r.rating_id"
            " JOIN fulfillment_raterversion v ON v.id = a.rater_version_id"
            f" WHERE r.workflow_id = {of}",
            name,
        )
        assert pinned == [(version,)]
    until(
        lambda: (
            stack.query("SELECT state FROM models_admin_modelversion WHERE version = %s", before)
            == [("retired",)]
        ),
        timeout_s=60,
        what="the old version is retired",
        every_s=0.5,
    )
