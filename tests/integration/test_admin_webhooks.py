"""Webhooks in the admin: the log is there, secrets are not, and a delivery is sent again."""

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client

from fulfillment import deliveries, notify, webhooks
from fulfillment.clock import database_now
from fulfillment.models import Delivery, Event, WebhookEndpoint
from fulfillment.policy.delivery import Answer, DeliveryState
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.webhooks import WebhookForm
from tests import builders

pytestmark = pytest.mark.django_db

SECRET = "a secret of one's own"


@pytest.fixture
def delivery() -> Delivery:
    """Store a delivery that was refused once with 410."""
    form = WebhookForm(url="https://203.0.113.20/<script>".replace("<", "%3C"), secret=SECRET)
    webhooks.register(owner="alice", form=form, now=database_now())
    workflow = builders.workflow(state=WorkflowState.COMPLETED)
    now = database_now()
    Event.objects.create(
        workflow=workflow, round=1, kind="workflow.completed", created_at=now,
        data={"id": workflow.public_id, "state": "COMPLETED", "name": "<script>alert(1)</script>"},
    )  # fmt: skip
    notify.run_once(now)
    (claimed,) = deliveries.claim(database_now(), room=1)
    deliveries.record(claimed, Answer(status=410), duration_s=0.125)
    return Delivery.objects.get()


def staff(*permissions: str) -> Client:
    user = User.objects.create(username="staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def page(client: Client, path: str) -> str:
    response = client.get(f"/admin/fulfillment/{path}")
    assert response.status_code == 200
    return response.content.decode()


VIEWS = ("view_delivery", "view_deliveryattempt", "view_webhookendpoint", "view_event")


def test_every_attempt_is_shown(delivery: Delivery) -> None:
    client = staff(*VIEWS)

    shown = page(client, f"delivery/{delivery.pk}/change/")

    assert "gone" in shown
    assert "0.125" in shown
    assert ">410<" in shown
    assert "<script>alert" not in shown
    assert "&lt;script&gt;" in shown
    assert "DISABLED" in page(client, "delivery/")
    assert "disabled: gone" in page(client, "webhookendpoint/")
    assert delivery.public_id in page(client, f"delivery/?q={delivery.endpoint.public_id}")


def test_secrets_are_nowhere(delivery: Delivery) -> None:
    client = staff(*VIEWS)
    endpoint = WebhookEndpoint.objects.get()

    for path in ("webhookendpoint/", f"webhookendpoint/{endpoint.pk}/change/"):
        shown = page(client, path)
        assert SECRET not in shown
        assert endpoint.secret not in shown


def replay(client: Client, delivery: Delivery) -> Any:
    return client.post(
        "/admin/fulfillment/delivery/", {"action": "replay", "_selected_action": [delivery.pk]}
    )


def test_a_delivery_is_sent_again_and_it_is_logged(delivery: Delivery) -> None:
    replay(staff(*VIEWS, "change_delivery"), delivery)

    delivery.refresh_from_db()
    assert delivery.state == DeliveryState.PENDING
    (again,) = deliveries.claim(database_now(), room=1)
    assert again.body == bytes(delivery.body)
    assert LogEntry.objects.get().change_message == "Sent again."


def test_who_may_only_look_sends_nothing(delivery: Delivery) -> None:
    replay(staff(*VIEWS), delivery)

    assert Delivery.objects.get().state == DeliveryState.DISABLED
