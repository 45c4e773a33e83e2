"""Who runs the outbox: the checker rings it, beat runs it, and the dispatcher when it is late."""

import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
import redis
from django.conf import settings as configured
from pytest_django import Settings

from fulfillment import leases, recovery, tasks, webhooks
from fulfillment.clock import database_now
from fulfillment.management.commands.dispatch import _Beside
from fulfillment.models import Delivery, Event, ServiceRun
from fulfillment.policy.delivery import DeliveryState
from fulfillment.recovery import Service
from fulfillment.webhooks import WebhookForm
from tests.fakes import Step, scripted
from tests.rating_queue import boot, queue, rated, submit, take

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def messages() -> Any:
    """Return a count of the messages that wait for the control worker at the top priority."""
    client = redis.Redis.from_url(configured.REDIS_URL)
    client.delete("control")
    yield lambda: client.llen("control")
    client.delete("control")
    client.close()


def rated_but_not_ended(*rows: str) -> Any:
    executor = boot()
    workflow = submit(rows)
    dispatcher = queue()
    dispatcher.run()
    for message in dispatcher.take_sent():
        leases.finish([rated(taken) for taken in take(message, by=executor)])
    return workflow


def test_a_workflow_that_ends_rings_the_outbox(messages: Any) -> None:
    ended, other = rated_but_not_ended("a"), submit(["b"])

    tasks.check_completion([other.pk])
    assert messages() == 0
    tasks.check_completion([ended.pk, other.pk])

    assert messages() == 1
    assert Event.objects.get().published_at is None


def test_one_task_publishes_and_sends(settings: Settings) -> None:
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)
    workflow = rated_but_not_ended("a")
    with scripted(Step()) as server:
        form = WebhookForm(url=server.url)
        webhooks.attach(workflow, form, now=database_now())
        tasks.check_completion([workflow.pk])
        tasks.publish_events()

    assert len(server.seen) == 1
    assert Delivery.objects.get().state == DeliveryState.DELIVERED
    ran = set(ServiceRun.objects.values_list("name", flat=True))
    assert {"events", "deliveries"} <= ran


def test_the_dispatcher_does_not_wait_for_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, began = threading.Event(), threading.Event()
    runs: list[datetime] = []

    def wait(now: datetime) -> int:
        runs.append(now)
        began.set()
        assert may_end.wait(10)
        return 1

    slow = Service(run_once=wait, period=timedelta(seconds=5), waits=True)
    monkeypatch.setattr(recovery, "SERVICES", {"slow": slow})
    beside, now = _Beside(), database_now()

    beside.run("slow", now)
    assert began.wait(10)
    beside.run("slow", now)  # one at a time

    may_end.set()
    assert beside._thread is not None
    beside._thread.join(10)
    assert runs == [now]
    assert ServiceRun.objects.get().name == "slow"
