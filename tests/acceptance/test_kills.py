"""kill -9 of every process in the middle of a workflow: nothing is lost, nothing is done twice.

One stack and one slow external model for the module; each test starts a workflow of 5,000 rows,
waits until it is well under way, does the harm, and looks at what the client and the model saw.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.acceptance.stack import (
    REPOSITORY,
    Stack,
    Stub,
    ndjson,
    remove,
    rows,
    start_stack,
    start_stub,
    until,
)
from tests.fakes import pair_of, stub_score

pytestmark = pytest.mark.acceptance

ROWS = 5_000
WINDOW = 16
BATCH = 12
AFTER_FAULT_S = 60.0


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    server = start_stub(tmp_path_factory.mktemp("stub"), delay_s=0.25)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stack(stub: Stub) -> Iterator[Stack]:
    with start_stack() as running:
        try:
            running.wait_ready()
            running.register(stub, rater="slow", max_concurrency=WINDOW)
            yield running
        finally:
            remove(running)


def _under_way(stack: Stack, name: str) -> tuple[str, list[dict[str, Any]]]:
    """Submit 5,000 rows of their own and wait until about a tenth of them is rated."""
    documents = rows(ROWS, prefix=f"{name}-", words=3)
    workflow_id = stack.submit("slow", ndjson(documents), name=name)["id"]
    until(
        lambda: stack.workflow(workflow_id)["counts"]["completed"] > ROWS // 10,
        timeout_s=30,
        what="the workflow is under way",
    )
    return workflow_id, documents


def _assert_whole(
    stack: Stack, stub: Stub, workflow_id: str, documents: list[dict[str, Any]], *, in_flight: int
) -> None:
    """Every request COMPLETED once with its own score; computed again at most what was out."""
    result = stack.wait_finished(workflow_id, timeout_s=AFTER_FAULT_S)
    assert result["state"] == "COMPLETED", result
    assert result["counts"]["completed"] == len(documents)
    assert result["sources"] == {"archive": 0, "coalesced": 0, "model": len(documents)}
    by_id = {rating["request_id"]: rating for rating in stack.ratings(workflow_id)}
    assert len(by_id) == len(documents)
    for document in documents[:: len(documents) // 100]:
        rating = by_id[document["request_id"]]
        expected = stub_score(document["query_text"], document["text"])
        assert rating["score"] == pytest.approx(expected, abs=1e-6)
    predictions = stub.tally().predictions
    again = sum(predictions[pair_of(d["query_text"], d["text"])] - 1 for d in documents)
    assert 0 <= again <= in_flight * BATCH
    assert stack.query(
        "SELECT count(*) FROM fulfillment_event e JOIN fulfillment_workflow w"
        " ON w.id = e.workflow_id WHERE w.public_id = %s",
        workflow_id,
    ) == [(1,)]


@pytest.mark.parametrize("victim", ["executors", "dispatcher", "beat", "control", "valkey"])
def test_a_killed_process_costs_no_rating(stack: Stack, stub: Stub, victim: str) -> None:
    workflow_id, documents = _under_way(stack, victim)

    stack.kill("dispatcher-1" if victim == "dispatcher" else victim)

    _assert_whole(stack, stub, workflow_id, documents, in_flight=WINDOW)


def test_killing_both_dispatchers_costs_no_rating(stack: Stack, stub: Stub) -> None:
    workflow_id, documents = _under_way(stack, "dispatchers")

    stack.kill("dispatcher-1")
    stack.kill("dispatcher-2")

    _assert_whole(stack, stub, workflow_id, documents, in_flight=0)


def test_a_killed_database_costs_no_rating(stack: Stack, stub: Stub) -> None:
    workflow_id, documents = _under_way(stack, "postgres")

    stack.kill("postgres")

    _assert_whole(stack, stub, workflow_id, documents, in_flight=WINDOW)


def test_a_broker_that_forgets_everything_costs_no_rating(stack: Stack, stub: Stub) -> None:
    workflow_id, documents = _under_way(stack, "empty")
    import redis

    broker = redis.Redis.from_url(_redis_url(stack))
    broker.flushall()

    _assert_whole(stack, stub, workflow_id, documents, in_flight=WINDOW)


def _redis_url(stack: Stack) -> str:
    import json

    url: str = json.loads((stack.home / "run" / "servers.json").read_text())["redis_url"]
    return url


def test_a_frozen_leader_gives_way_to_the_standby(stack: Stack, stub: Stub) -> None:
    workflow_id, documents = _under_way(stack, "frozen")
    leader = _leader(stack)

    stack.signal(leader, signal.SIGSTOP)

    try:
        _assert_whole(stack, stub, workflow_id, documents, in_flight=0)
        assert _leader(stack) != leader
    finally:
        stack.signal(leader, signal.SIGCONT)


def _leader(stack: Stack) -> str:
    """Return which dispatcher's connection holds the advisory lock."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [
            name
            for name in ("dispatcher-1", "dispatcher-2")
            for (application,) in stack.query(
                "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
                " WHERE l.locktype = 'advisory' AND l.granted AND l.objid = %s",
                0x41495253,
            )
            if application == f"airs-dispatch-{stack.pid(name)}"
        ]
        return bool(found)

    until(look, timeout_s=20, what="a dispatcher leads")
    return found[0]


def test_a_killed_web_server_leaves_an_upload_that_the_same_key_completes(
    stack: Stack, stub: Stub
) -> None:
    documents = rows(60_000, prefix="upload-", words=3)
    body = ndjson(documents)
    answers: list[Any] = []

    def upload() -> None:
        with contextlib.suppress(httpx.HTTPError):
            answers.append(
                httpx.post(
                    f"http://127.0.0.1:{stack.port}/api/v1/workflows",
                    params={"rater": "slow", "name": "upload", "priority": 1},
                    content=body,
                    headers={
                        "Authorization": stack.client.headers["Authorization"],
                        "Content-Type": "application/x-ndjson",
                        "Idempotency-Key": "upload-1",
                    },
                    timeout=60,
                )
            )

    thread = threading.Thread(target=upload)
    thread.start()
    until(
        lambda: stack.query(
            "SELECT 1 FROM fulfillment_upload WHERE key = 'upload-1' AND rows_done > 8000"
        ),
        timeout_s=30,
        what="some chunks are in",
    )
    stack.kill("web")
    thread.join()
    assert not answers, "the upload ended before the kill"

    until(lambda: stack.client.get("/healthz").is_success, timeout_s=30, what="web is back")
    again = stack.submit("slow", body, key="upload-1", name="upload", priority=1)

    assert again["accepted"] == len(documents)
    assert stack.query(
        "SELECT count(*), count(DISTINCT request_id) FROM fulfillment_ratingrequest r"
        " JOIN fulfillment_workflow w ON w.id = r.workflow_id WHERE w.public_id = %s",
        again["id"],
    ) == [(len(documents), len(documents))]
    assert len(stack.query("SELECT 1 FROM fulfillment_workflow WHERE name = 'upload'")) == 1
    stack.client.post(f"/api/v1/workflows/{again['id']}/cancel").raise_for_status()
    stack.wait_finished(again["id"])


def test_two_workflows_with_the_same_new_rows_cost_one_prediction_each(
    stack: Stack, stub: Stub
) -> None:
    documents = rows(2_000, prefix="twins-", words=3)
    body = ndjson(documents)
    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(stack.submit("slow", body, name="twins")["id"])
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    results = [stack.wait_finished(workflow_id) for workflow_id in found]

    assert [r["counts"]["completed"] for r in results] == [2_000, 2_000]
    assert sum(r["sources"]["model"] for r in results) == 2_000
    predictions = stub.tally().predictions
    assert {predictions[pair_of(d["query_text"], d["text"])] for d in documents} == {1}


def test_the_doctor_finds_nothing_wrong_once_what_was_killed_is_back(stack: Stack) -> None:
    """Runs in any order, as the next one."""
    environment = {**os.environ, "AIRS_HOME": str(stack.home)}
    for name in ("DATABASE_URL", "REDIS_URL"):
        environment.pop(name, None)
    said = ""

    def well() -> bool:
        nonlocal said
        done = subprocess.run(
            [sys.executable, "manage.py", "doctor"],
            cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        return done.returncode == 0

    try:
        until(well, timeout_s=AFTER_FAULT_S, what="the doctor ends with 0")
    except AssertionError:
        raise AssertionError(said) from None
    assert "orphans              none" in said


def test_logs_hold_no_unexpected_error(stack: Stack) -> None:
    """Runs in any order: what the processes say must never be a Python error of our own."""
    for name in ("web", "dispatcher-1", "dispatcher-2", "executors", "control"):
        log = stack.log(name)
        for mark in ("IntegrityError", "deadlock detected", "KeyError", "TypeError", "NameError"):
            assert mark not in log, f"{name}: {log[log.index(mark) - 2000 :][:4000]}"
