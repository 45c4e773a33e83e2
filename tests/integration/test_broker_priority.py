"""Priorities on the real broker, through the project's own Celery settings, and a real executor."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from celery import current_app
from celery.contrib.testing.worker import start_worker
from django.conf import settings
from django.db import connection
from kombu import Connection, Consumer, Queue
from kombu.message import Message as BrokerMessage

from fulfillment.clock import database_now
from fulfillment.management.commands.dispatch import TASK, Publisher
from fulfillment.models import Batch, ExecutorBoot, Workflow
from fulfillment.policy.priority import celery_priority
from models_admin.directory import directory
from models_admin.models import ModelConfig, ModelKind
from tests import builders
from tests.fakes import Seen, Step, oip, scripted
from tests.rating_queue import boot, counts_add_up, queue, states, submit, until
from workers.tasks import rate_batches

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 20.0


@pytest.fixture
def broker() -> Iterator[Connection]:
    """A connection as workers make it; the queues are empty before and after."""
    with current_app.connection_for_read() as opened:
        _purge(opened)
        yield opened
        _purge(opened)


@pytest.fixture
def publish() -> Iterator[Publisher]:
    """What the dispatcher sends with."""
    publisher = Publisher()
    yield publisher
    publisher.close()


def _purge(opened: Connection) -> None:
    channel: Any
    with opened.channel() as channel:
        for name in ("ratings", "control"):
            channel.queue_purge(name)


def received(broker: Connection, name: str, count: int) -> list[BrokerMessage]:
    """Return messages in the order in which a worker gets them, one at a time."""
    found: list[BrokerMessage] = []

    def take(body: Any, message: BrokerMessage) -> None:
        message.ack()
        found.append(message)

    channel: Any
    with broker.channel() as channel:
        channel.basic_qos(0, 1, False)
        with Consumer(channel, queues=[Queue(name)], on_message=lambda m: take(None, m)):
            while len(found) < count:
                broker.drain_events(timeout=5)
    return found


def batch_of(message: BrokerMessage) -> int:
    (batches,), _, _ = message.decode()
    number: int = batches[0][0]
    return number


def test_urgent_messages_are_delivered_first(broker: Connection, publish: Publisher) -> None:
    mixed = [5, 9, 0, 3, 8, 1, 7, 2, 6, 4, 0, 9]

    for priority in mixed:
        publish([(priority, 1, "r1")], priority)

    messages = received(broker, "ratings", len(mixed))
    assert [batch_of(m) for m in messages] == sorted(mixed)
    said: list[Any] = [m.properties["priority"] for m in messages]
    assert said == sorted(mixed)


def test_messages_of_one_priority_keep_their_order(broker: Connection, publish: Publisher) -> None:
    for number in range(5):
        publish([(number, 1, "r1")], 4)

    assert [batch_of(m) for m in received(broker, "ratings", 5)] == [0, 1, 2, 3, 4]


def test_api_scores_come_out_in_their_order(broker: Connection, publish: Publisher) -> None:
    scores = [0, 100, 50, 33, 67, 15, 91]

    for score in scores:
        publish([(score, 1, "r1")], celery_priority(score))

    assert [batch_of(m) for m in received(broker, "ratings", 7)] == sorted(scores, reverse=True)


def test_a_message_without_priority_would_overtake_all(
    broker: Connection, publish: Publisher
) -> None:
    """Why each of ours has one: kombu takes a missing priority for 0, the most urgent."""
    publish([(1, 1, "r1")], 1)
    with current_app.producer_pool.acquire() as producer:
        producer.publish(
            [[[[99, 1, "r1"]]], {}, {}], routing_key="ratings", declare=[Queue("ratings")]
        )

    assert [batch_of(m) for m in received(broker, "ratings", 2)] == [99, 1]


def test_a_message_carries_what_the_task_takes(broker: Connection, publish: Publisher) -> None:
    publish([(7, 3, "r1"), (8, 4, "r2")], 2)

    (message,) = received(broker, "ratings", 1)

    assert message.headers["task"] == TASK
    retries: Any = message.headers["retries"]
    assert retries == 0
    assert message.headers["eta"] is None
    uuid.UUID(message.headers["id"])
    assert message.decode()[0] == [[[7, 3, "r1"], [8, 4, "r2"]]]
    assert rate_batches.name == TASK


def test_an_urgent_task_is_run_next_whatever_the_backlog(broker: Connection) -> None:
    """A worker of the project's settings holds no more than it works on."""
    ran: list[str] = []
    busy, go, done = threading.Event(), threading.Event(), threading.Event()

    @current_app.task(name="tests.note")
    def note(name: str) -> None:
        ran.append(name)
        busy.set()
        go.wait(PATIENCE_S)
        if len(ran) == 8:
            done.set()

    def send(name: str, priority: int) -> None:
        note.apply_async(args=(name,), queue="control", priority=priority)

    try:
        with start_worker(
            current_app, concurrency=1, pool="threads", queues=["control"],
            perform_ping_check=False, shutdown_timeout=PATIENCE_S, loglevel="warning",
        ):  # fmt: skip
            for number in range(7):
                send(f"low {number}", 9)
            assert busy.wait(PATIENCE_S)
            send("urgent", 0)
            go.set()
            assert done.wait(PATIENCE_S)
    finally:
        go.set()
        current_app.tasks.pop("tests.note")

    assert "urgent" in ran[:2], ran


def database_url() -> str:
    """Return the address of the test database."""
    at = connection.settings_dict
    return (
        f"postgresql://{quote(at['USER'])}@/{at['NAME']}"
        f"?host={quote(str(at['HOST']), safe='')}&port={at['PORT'] or 5432}"
    )


@contextmanager
def executor() -> Iterator["subprocess.Popen[bytes]"]:
    """Run an executor as `up` does, on the test database and broker."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "celery", "-A", "airs_site", "worker", "-Q", "ratings",
            "-P", "threads", "-c", "2", "--without-gossip", "--without-mingle", "-l", "warning",
        ],
        cwd=ROOT,
        env=os.environ | {"DATABASE_URL": database_url()},
    )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()


@pytest.mark.django_db(transaction=True)
def test_an_executor_is_known_before_its_first_batch_and_ends_its_last_one(
    broker: Connection, publish: Publisher
) -> None:
    """A boot without heartbeat is taken for dead: its leases would end at once, as lost."""
    boot(plugins={"oip_score": "1"})
    workflow, calls, go = _workflow_of_an_external_model(), threading.Event(), threading.Event()

    def answer(seen: Seen) -> bytes:
        calls.set()
        go.wait(PATIENCE_S)
        return oip(1.0).body(seen)  # type: ignore[operator]

    with scripted(Step(body=answer)) as server, executor() as process:
        ModelConfig.objects.update(url=server.url)
        dispatcher = queue()
        dispatcher.fleet = directory  # type: ignore[assignment]
        assert dispatcher.run().sent == 1
        Batch.objects.update(lease_until=database_now() + timedelta(minutes=1))
        for message in dispatcher.take_sent():
            publish(message.batches, message.priority)
        try:
            assert calls.wait(PATIENCE_S), "the executor calls the model"
            batch = Batch.objects.get()
            assert batch.boot_id is not None
            known = ExecutorBoot.objects.get(pk=batch.boot_id)
            assert batch.started_at is not None
            assert known.started_at <= batch.started_at
            assert known.plugins["oip_score"] == "1"
            assert known.slots > 2
            process.send_signal(signal.SIGTERM)
            until(
                lambda: not ExecutorBoot.objects.get(pk=known.pk).slots,
                what="it wants no more",
            )
        finally:
            go.set()
        until(lambda: states(workflow) == ["COMPLETED"], what="the batch is written")

    assert process.returncode == 0
    counts_add_up(workflow)


def _workflow_of_an_external_model() -> Workflow:
    now = database_now()
    ModelConfig.objects.create(
        id=builders.MODEL, kind=ModelKind.EXTERNAL, model_name="m", url="http://127.0.0.1:1",
        version_label="1", created_at=now, updated_at=now,
    )  # fmt: skip
    return submit(
        ["a"],
        of=builders.version(builders.rater(autorater="oip_score"), model_version="1"),
    )


def test_the_settings_are_those_that_were_measured() -> None:
    assert settings.CELERY_BROKER_TRANSPORT_OPTIONS["priority_steps"] == list(range(10))
    assert current_app.conf.worker_prefetch_multiplier == 1
    assert current_app.conf.task_acks_late
    assert current_app.conf.task_reject_on_worker_lost
    assert current_app.conf.task_ignore_result
