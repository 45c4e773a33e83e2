"""Real processes under seeded faults, at random moments of workflows with some thousand rows.

One stack and one model server for the module. The first seeds do one fault each, so that every kind
is met; the others combine them. Every law of `laws` is asked while the harm is done and after it.
"""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psycopg2
import pytest

from tests.acceptance.stack import (
    Stack,
    Stub,
    ndjson,
    remove,
    rows,
    start_stack,
    start_stub,
    until,
)
from tests.chaos import laws
from tests.chaos.faults import DELAY_S, FAULTS, Fault, kill
from tests.fakes import pair_of, stub_score

pytestmark = [pytest.mark.chaos, pytest.mark.acceptance]

WINDOW = 16
BATCH = 12
ROWS, SHARED = 3_000, 1_000
AFTER_FAULT_S = 120.0
COMBINED = 24
"""Seeds beyond one of each fault."""
RATER = "chaos"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    server = start_stub(tmp_path_factory.mktemp("stub"), delay_s=DELAY_S)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stack(stub: Stub) -> Iterator[Stack]:
    # A recomputed hit is a prediction beyond the first, and meant to be.
    with start_stack() as running:
        try:
            running.wait_ready()
            _register(running, stub)
            with running.database() as connection, connection.cursor() as cursor:
                laws.remember_moves(cursor.execute)
            yield running
        finally:
            remove(running)


def _register(stack: Stack, stub: Stub) -> None:
    model = {
        "id": "chaos-model", "kind": "external", "protocol": "oip", "url": stub.url,
        "model_name": "stub", "max_concurrency": WINDOW, "timeout_s": 15,
    }  # fmt: skip
    stack.client.post("/api/v1/models", json=model).raise_for_status()
    rater = {
        "id": RATER, "autorater": "oip_score", "model": "chaos-model", "mode": "isolated",
        "score_min": 0, "score_max": 4, "max_attempts": 20,
    }  # fmt: skip
    stack.client.post("/api/v1/raters", json=rater).raise_for_status()


def drawn(seed: int) -> tuple[random.Random, list[Fault]]:
    """Return the chance of a seed and its faults."""
    chance = random.Random(seed)
    if seed < len(FAULTS):
        return chance, [FAULTS[seed]]
    return chance, [chance.choice(FAULTS) for _ in range(chance.randint(2, 3))]


@pytest.mark.parametrize("seed", range(len(FAULTS) + COMBINED))
def test_faults_cost_no_rating(stack: Stack, stub: Stub, seed: int) -> None:
    chance, faults = drawn(seed)
    first = rows(ROWS, prefix=f"s{seed}-", words=3)
    second = first[:SHARED] + rows(ROWS - SHARED, prefix=f"t{seed}-", words=3)
    dropped = rows(ROWS, prefix=f"c{seed}-", words=3)
    ids = {"first": stack.submit(RATER, ndjson(first), name=f"first {seed}")["id"]}
    _wait_for(stack, ids["first"], chance.uniform(0.05, 0.4))

    with ThreadPoolExecutor(2) as clients:
        others: dict[str, Future[str]] = {
            "second": clients.submit(_submit, stack, second, f"second-{seed}"),
            "dropped": clients.submit(_submit_and_cancel, stack, dropped, f"dropped-{seed}"),
        }
        for fault in faults:
            fault.do(stack, stub, chance)
            time.sleep(chance.uniform(0.0, 1.5))
        ids |= {name: future.result(AFTER_FAULT_S) for name, future in others.items()}

    results = {name: _finished(stack, workflow_id) for name, workflow_id in ids.items()}
    _at_rest(stack)
    assert [results[n]["state"] for n in ("first", "second")] == ["COMPLETED", "COMPLETED"], faults
    assert results["dropped"]["state"] == "CANCELLED"
    assert [r["counts"]["total"] for r in results.values()] == [ROWS] * 3
    for name, documents in (("first", first), ("second", second)):
        _scores_are_right(stack, ids[name], documents)
    _redone_at_most(stub, first + second[SHARED:] + dropped, faults)
    _forget(stack)


def _wait_for(stack: Stack, workflow_id: str, share: float) -> None:
    until(
        lambda: stack.workflow(workflow_id)["counts"]["completed"] > ROWS * share,
        timeout_s=60,
        what="the workflow is under way",
    )


def _persistently(call: Callable[[httpx.Client], httpx.Response], stack: Stack) -> Any:
    """Call as a client does that wants an answer: again after each failure."""
    deadline = time.monotonic() + AFTER_FAULT_S
    with httpx.Client(
        base_url=stack.client.base_url, headers=stack.client.headers, timeout=20
    ) as client:
        while True:
            try:
                answer = call(client)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.is_success:
                return answer.json()
            again = answer is None or answer.status_code >= 500 or answer.status_code == 409
            assert again, answer and answer.text
            assert time.monotonic() < deadline, answer and answer.text
            time.sleep(0.3)


def _submit(stack: Stack, documents: list[dict[str, Any]], key: str) -> str:
    body = ndjson(documents)
    answer = _persistently(
        lambda client: client.post(
            "/api/v1/workflows",
            params={"rater": RATER, "name": key},
            content=body,
            headers={"Content-Type": "application/x-ndjson", "Idempotency-Key": key},
        ),
        stack,
    )
    assert answer["accepted"] == len(documents)
    return str(answer["id"])


def _submit_and_cancel(stack: Stack, documents: list[dict[str, Any]], key: str) -> str:
    workflow_id = _submit(stack, documents, key)
    _persistently(lambda client: client.post(f"/api/v1/workflows/{workflow_id}/cancel"), stack)
    return workflow_id


def _finished(stack: Stack, workflow_id: str) -> dict[str, Any]:
    """Wait for the end; look at the laws and at the counts all the while."""
    deadline = time.monotonic() + AFTER_FAULT_S
    while True:
        try:
            answer = stack.client.get(f"/api/v1/workflows/{workflow_id}")
            broken = laws.broken(stack.query, laws.ALWAYS)
        except (httpx.TransportError, psycopg2.OperationalError):
            answer, broken = None, []
        assert broken == []
        if answer is not None and answer.status_code == 200:
            document: dict[str, Any] = answer.json()
            counts = document["counts"]
            assert sum(counts.values()) == 2 * counts["total"], counts
            if document["finished_at"]:
                return document
        assert time.monotonic() < deadline, f"{workflow_id} does not finish: {answer}"
        time.sleep(0.5)


def _at_rest(stack: Stack) -> None:
    """Wait until the last lease has ended; then nothing may be left."""
    until(
        lambda: not laws.broken(stack.query, laws.AT_REST),
        timeout_s=60,
        what="the queue is at rest",
        every_s=0.5,
    )
    assert laws.broken(stack.query, laws.ALWAYS) == []


def _scores_are_right(stack: Stack, workflow_id: str, documents: list[dict[str, Any]]) -> None:
    ratings = {rating["request_id"]: rating for rating in stack.ratings(workflow_id)}
    assert len(ratings) == len(documents)
    for document in documents[::37]:
        expected = stub_score(document["query_text"], document["text"])
        assert ratings[document["request_id"]]["score"] == pytest.approx(expected, abs=1e-6)


def _redone_at_most(stub: Stub, documents: list[dict[str, Any]], faults: list[Fault]) -> None:
    """Computed again: at most the batches that were out when something was lost."""
    predictions = stub.tally().predictions
    again = sum(max(0, predictions[pair_of(d["query_text"], d["text"])] - 1) for d in documents)
    assert again <= sum(fault.loses for fault in faults) * WINDOW * BATCH, [f.name for f in faults]


def _forget(stack: Stack) -> None:
    """Erase what is over, so that looking at everything stays quick."""
    with stack.database() as connection, connection.cursor() as cursor:
        cursor.execute(
            "TRUNCATE fulfillment_workflow, fulfillment_workflowstats, fulfillment_statsdelta,"
            " fulfillment_ratingrequest, fulfillment_batch, fulfillment_batchpayload,"
            " fulfillment_rating, fulfillment_upload, chaos_move CASCADE"
        )


@pytest.mark.parametrize("loses", [False, True], ids=["unharmed", "executors killed"])
def test_twenty_equal_workflows_cost_one_prediction_a_row(
    stack: Stack, stub: Stub, loses: bool
) -> None:
    documents = rows(600, prefix=f"equal-{loses}-", words=3)
    with ThreadPoolExecutor(4) as clients:
        made = [
            clients.submit(_submit, stack, documents, f"equal-{loses}-{number}")
            for number in range(20)
        ]
        if loses:
            _wait_for(stack, made[0].result(AFTER_FAULT_S), 0.02)
            kill(stack, "executors")
        ids = [future.result(AFTER_FAULT_S) for future in made]

    results = [_finished(stack, workflow_id) for workflow_id in ids]

    assert {result["state"] for result in results} == {"COMPLETED"}
    assert sum(result["sources"]["model"] for result in results) == len(documents)
    predictions = stub.tally().predictions
    again = sum(predictions[pair_of(d["query_text"], d["text"])] - 1 for d in documents)
    assert 0 <= again <= loses * WINDOW * BATCH
    _forget(stack)


def test_logs_hold_no_error_of_our_own(stack: Stack) -> None:
    """What the processes say must never be a Python error; it stands last in file order."""
    for name in ("web", "dispatcher-1", "dispatcher-2", "executors", "control", "beat"):
        log = stack.log(name)
        for mark in ("IntegrityError", "deadlock detected", "KeyError", "TypeError", "NameError"):
            assert mark not in log, f"{name}: {log[log.index(mark) - 2000 :][:4000]}"
