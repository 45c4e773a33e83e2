"""The collected cases Q-01, Q-02 and Q-04 on real processes and a real broker.

Their inputs are their own; their waits are shorter. What they say of virtual time is in
tests/integration/test_pipeline_cases.py.
"""

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import redis
from django.conf import settings
from kombu import Connection

from tests.acceptance.stack import Stack, Stub, ndjson, remove, rows, start_stack, start_stub, until
from tests.collected_cases import case, load, stub
from tests.fakes import refusal, scripted

pytestmark = pytest.mark.acceptance

BACK_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    server = start_stub(tmp_path_factory.mktemp("stub"), delay_s=0.5)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stack(model: Stub) -> Iterator[Stack]:
    with start_stack() as running:
        try:
            running.wait_ready()
            running.register(model, rater="plain", max_concurrency=4)
            yield running
        finally:
            remove(running)


def broker_url(stack: Stack) -> str:
    url: str = json.loads((stack.home / "run" / "servers.json").read_text())["redis_url"]
    return url


def deliver_again(stack: Stack) -> int:
    """Give each message that is not acknowledged back to its queue, as the broker's time-out does.

    Return how many of them were executors'.
    """
    options = {**settings.CELERY_BROKER_TRANSPORT_OPTIONS, "visibility_timeout": 0}
    with Connection(broker_url(stack), transport_options=options) as connection:
        channel: Any = connection.default_channel
        held = channel.client.hvals("unacked")
        channel.qos.restore_visible(num=100, interval=1)
    return sum(b"rate_batches" in message for message in held)


def test_q_01_messages_that_are_delivered_again_cost_no_call(stack: Stack) -> None:
    folder = case("Q-01")
    expected = load(folder / "expected.json")["expect"]
    fault = load(folder / "fault.json")
    slow = {"auto": "oip", "delay_s": 1.5}
    later = {"status": 429, "headers": {"Retry-After": "3"}, "text": "later"}
    fault["routes"]["/v2/models/stub/infer"]["steps"] = [slow, slow, later, slow]
    with stub(fault) as server:
        stack.register(server, rater="slow", max_concurrency=16)
        workflow = stack.submit("slow", (folder / "rows.jsonl").read_bytes())["id"]
        again = 0
        deadline = time.monotonic() + BACK_S
        while stack.workflow(workflow)["finished_at"] is None:
            assert time.monotonic() < deadline
            again += deliver_again(stack)
            time.sleep(0.3)

    assert again > 1
    refused = 12
    assert sum(server.items) == expected["model_items"] + refused
    result = stack.workflow(workflow)
    assert (result["state"], result["counts"]["completed"]) == ("COMPLETED", expected["ratings"])
    attempts = Counter(rating["attempts"] for rating in stack.ratings(workflow))
    assert attempts == {1: expected["ratings"] - refused, 2: refused}
    events = stack.query(
        "SELECT count(*) FROM fulfillment_event e JOIN fulfillment_workflow w"
        f" ON w.id = e.workflow_id WHERE w.public_id = '{workflow}'"
    )
    assert events == [(1,)]


def test_q_02_work_goes_on_when_the_broker_comes_back(stack: Stack) -> None:
    """It stands still, ends all connections, is lost three times in a row, and once while idle."""
    folder = case("Q-02")
    expected = load(folder / "expected.json")["expect"]
    body = (folder / "rows.jsonl").read_bytes()
    workflow = stack.submit("plain", body)["id"]
    _under_way(stack, workflow)

    broker = stack.signal("valkey", signal.SIGSTOP)
    time.sleep(4)
    os.kill(broker, signal.SIGCONT)
    with redis.Redis.from_url(broker_url(stack)) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    for _ in range(3):
        _lose_the_broker(stack)
        time.sleep(0.7)
    result = stack.wait_finished(workflow, timeout_s=expected["resume_within_s"])
    assert (result["state"], result["counts"]["completed"]) == ("COMPLETED", expected["completed"])

    _lose_the_broker(stack)
    again = stack.submit("plain", ndjson(rows(60, prefix="idle-")))["id"]
    result = stack.wait_finished(again, timeout_s=expected["resume_within_s"])
    assert result["counts"]["completed"] == 60


def _under_way(stack: Stack, workflow: str) -> None:
    until(
        lambda: stack.workflow(workflow)["counts"]["completed"] > 0,
        timeout_s=30,
        what="the workflow is under way",
    )


def _lose_the_broker(stack: Stack) -> None:
    until(lambda: stack.pid("valkey"), timeout_s=30, what="the broker runs")
    stack.kill("valkey")


def test_q_04_deferred_work_is_in_nobodys_way_and_in_nobodys_memory(stack: Stack) -> None:
    """Twenty thousand items of a rater that is refused; the broker may hold 4 MB more."""
    folder = case("Q-04")
    expected = load(folder / "expected.json")["expect"]
    fresh = [json.loads(line) for line in (folder / "b.jsonl").read_text().splitlines()]
    with scripted(refusal(503, "overloaded", Retry_After="600")) as server:
        stack.register(server, rater="refused", max_concurrency=16)
        before = _executors_bytes(stack)
        deferred = stack.submit("refused", ndjson(rows(20_000, prefix="a", words=3)))["id"]
        until(
            lambda: stack.query("SELECT 1 FROM fulfillment_batch WHERE state = 3 LIMIT 1"),
            timeout_s=30,
            what="some of it is deferred",
        )
        with _little_memory(stack):
            assert _completed(stack, fresh) == expected["rater_b_completed"]
            assert _executors_bytes(stack) - before < expected["worker_rss_growth_mb_max"] << 20
            stack.kill("executors")
            stack.kill("control")
            other = [{**row, "html": f"<p>again {n}</p>"} for n, row in enumerate(fresh)]
            assert _completed(stack, other) == expected["rater_b_completed"]
        counts = stack.workflow(deferred)["counts"]
        assert counts["total"] == counts["pending"] + counts["running"] + counts["retrying"]
        assert counts["total"] == 20_000
        stack.client.post(f"/api/v1/workflows/{deferred}/cancel").raise_for_status()
        assert stack.wait_finished(deferred)["counts"]["cancelled"] == 20_000


def _completed(stack: Stack, documents: list[dict[str, Any]]) -> int:
    workflow = stack.submit("plain", ndjson(documents))["id"]
    count: int = stack.wait_finished(workflow, timeout_s=BACK_S)["counts"]["completed"]
    return count


def _executors_bytes(stack: Stack) -> int:
    pid = stack.pid("executors")
    assert pid is not None
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(int(member.memory_info().rss) for member in family)


@contextlib.contextmanager
def _little_memory(stack: Stack) -> Iterator[None]:
    """Let the broker hold little more than it does."""
    with redis.Redis.from_url(broker_url(stack)) as client:
        most = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (4 << 20))
        try:
            yield
        finally:
            client.config_set("maxmemory", most)
