"""Webhooks and events over REST: registering, submitting with one, logs, replay, streams."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import deliveries, notify, raters, webhooks
from fulfillment.api import events
from fulfillment.api.events import Follower
from fulfillment.clock import database_now
from fulfillment.errors import TooManyFollowers
from fulfillment.models import Delivery, Event, Rater, WebhookEndpoint, Workflow
from fulfillment.policy.delivery import Answer
from fulfillment.policy.lifecycle import WorkflowState
from tests import builders
from tests.builders import MODEL, Api

pytestmark = pytest.mark.django_db

URL = "https://203.0.113.20/rater?x=1"
OTHER = "https://203.0.113.21/"


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)
    raters.register(Rater(id=builders.RATER, autorater="stub", model_id=MODEL), now=database_now())


@pytest.fixture
def api() -> Api:
    return Api()


def finish(workflow: Workflow, *, number: int = 1) -> Event:
    Workflow.objects.filter(pk=workflow.pk).update(
        state=WorkflowState.COMPLETED, finished_at=database_now(), closed_at=database_now()
    )
    return Event.objects.create(
        workflow=workflow, round=number, kind="workflow.completed",
        data={"id": workflow.public_id, "state": "COMPLETED"}, created_at=database_now(),
    )  # fmt: skip


def delivered(api: Api, *, status: int = 200) -> tuple[dict[str, Any], Delivery]:
    """Register an endpoint and have one delivery to it answered."""
    endpoint = api.post("/webhook-endpoints", {"url": URL}).json()
    finish(builders.workflow())
    notify.run_once(database_now())
    for claimed in deliveries.claim(database_now(), room=8):
        deliveries.record(claimed, Answer(status=status), duration_s=0.25)
    return endpoint, Delivery.objects.get()


# Endpoints


def test_a_registered_endpoint_shows_its_secret_once(api: Api) -> None:
    response = api.post("/webhook-endpoints", {"url": URL})

    assert response.status_code == 201
    made = response.json()
    assert made["secret"].startswith("whsec_")
    assert made["secret"] == webhooks.secret_of(WebhookEndpoint.objects.get())
    assert (made["url"], made["format"], made["workflow"]) == (URL, "standard", None)
    assert response["Location"] == f"/api/v1/webhook-endpoints/{made['id']}"
    del made["secret"]
    assert api.get(f"/webhook-endpoints/{made['id']}").json() == made
    assert api.get("/webhook-endpoints").json() == {"items": [made], "next": None}


def test_a_secret_of_ones_own_is_never_shown(api: Api) -> None:
    made = api.post(
        "/webhook-endpoints",
        {"url": URL, "secret": "test-secret-not-real", "format": "cloudevents"},
    ).json()

    assert "secret" not in made
    assert made["format"] == "cloudevents"
    assert "test-secret" not in str(WebhookEndpoint.objects.values())


def test_the_same_url_again_is_the_same_endpoint_enabled_again(api: Api) -> None:
    made = api.post("/webhook-endpoints", {"url": URL}).json()
    WebhookEndpoint.objects.update(disabled_at=database_now(), disabled_reason="gone")
    assert api.get(f"/webhook-endpoints/{made['id']}").json()["disabled_reason"] == "gone"

    again = api.post("/webhook-endpoints", {"url": URL})

    assert again.status_code == 200
    assert again.json()["id"] == made["id"]
    assert again.json()["disabled_at"] is None
    assert "secret" not in again.json()
    assert webhooks.secret_of(WebhookEndpoint.objects.get()) == made["secret"]


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "url", "missing_field"),
        ({"url": "http://127.0.0.1/"}, "url", "url_not_allowed"),
        ({"url": "ftp://shop.example/"}, "url", "url_not_allowed"),
        ({"url": 7}, "url", "bad_type"),
        ({"url": URL, "secret": "short"}, "secret", "too_short"),
        ({"url": URL, "format": "xml"}, "format", "unknown_choice"),
        ({"url": URL, "colour": "red"}, "colour", "unknown_field"),
    ],
)
def test_what_cannot_work_is_refused_with_its_field(
    api: Api, body: Any, field: str, code: str
) -> None:
    response = api.post("/webhook-endpoints", body)

    assert response.status_code == 422
    assert [place["field"] for place in response.json()["errors"]] == [field]
    if code in {"url_not_allowed", "unknown_field", "bad_type"}:
        assert response.json()["errors"][0]["code"] == code
    assert not WebhookEndpoint.objects.exists()


def test_an_owner_has_so_many_endpoints(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "MOST_ENDPOINTS", 1)
    api.post("/webhook-endpoints", {"url": URL})

    refused = api.post("/webhook-endpoints", {"url": OTHER})

    assert (refused.status_code, refused.json()["code"]) == (409, "too_many_endpoints")
    assert api.post("/webhook-endpoints", {"url": URL}).status_code == 200


def test_viewers_look_and_submitters_write() -> None:
    viewer = Api(role="viewer")

    assert viewer.get("/webhook-endpoints").status_code == 200
    assert viewer.post("/webhook-endpoints", {"url": URL}).status_code == 403


def test_endpoints_of_others_are_not_there(api: Api) -> None:
    made, delivery = delivered(api)
    path = f"/webhook-endpoints/{made['id']}"
    bob, operator = Api("bob"), Api("olga", role="operator")

    for response in (
        bob.get(path),
        bob.get(f"{path}/deliveries"),
        bob.post(f"{path}/deliveries/{delivery.public_id}/replay"),
        bob.delete(path),
        api.get("/webhook-endpoints/we_1"),
    ):
        assert response.status_code == 404
    assert bob.get("/webhook-endpoints").json()["items"] == []
    assert operator.get(path).status_code == 200
    assert operator.delete(path).status_code == 204
    assert not Delivery.objects.exists()


def test_endpoints_are_listed_by_cursor(api: Api) -> None:
    ids = [
        api.post("/webhook-endpoints", {"url": f"{OTHER}{number}"}).json()["id"]
        for number in range(3)
    ]

    first = api.get("/webhook-endpoints?limit=2").json()
    second = api.get(f"/webhook-endpoints?limit=2&cursor={first['next']}").json()

    assert [e["id"] for e in first["items"] + second["items"]] == ids[::-1]
    assert second["next"] is None


# Deliveries


def test_deliveries_are_listed_with_every_attempt(api: Api) -> None:
    endpoint, delivery = delivered(api, status=503)

    page = api.get(f"/webhook-endpoints/{endpoint['id']}/deliveries").json()

    (shown,) = page["items"]
    assert (shown["id"], shown["state"], shown["code"]) == (
        delivery.public_id, "PENDING", "http_error",
    )  # fmt: skip
    assert shown["event"] == delivery.event.public_id
    assert shown["type"] == "workflow.completed"
    assert shown["next_attempt_at"] is not None
    (attempt,) = shown["log"]
    assert (attempt["number"], attempt["status"], attempt["code"], attempt["duration_s"]) == (
        1, 503, "http_error", 0.25,
    )  # fmt: skip
    states = {
        state: len(
            api.get(f"/webhook-endpoints/{endpoint['id']}/deliveries?state={state}").json()["items"]
        )
        for state in ("PENDING", "DELIVERED")
    }
    assert states == {"PENDING": 1, "DELIVERED": 0}


def test_a_delivery_is_replayed(api: Api) -> None:
    endpoint, delivery = delivered(api)
    path = f"/webhook-endpoints/{endpoint['id']}/deliveries"

    response = api.post(f"{path}/{delivery.public_id}/replay")

    assert response.status_code == 202
    assert (response.json()["state"], response.json()["attempts"]) == ("PENDING", 1)
    (again,) = deliveries.claim(database_now(), room=8)
    assert (again.delivery_id, again.number) == (delivery.pk, 2)
    assert again.body == bytes(delivery.body)
    for unknown in ("dlv_1", "dlv_" + "0" * 32):
        assert api.post(f"{path}/{unknown}/replay").status_code == 404


# Submitting with one


@pytest.mark.parametrize("secret", [None, "test-secret-not-real"])
def test_a_workflow_is_submitted_with_a_webhook(api: Api, secret: str | None) -> None:
    given = {"url": URL} if secret is None else {"url": URL, "secret": secret}
    body = {"rater": builders.RATER, "webhook": given, "requests": [builders.row()]}

    response = api.post("/workflows", body, Idempotency_Key="k1")

    assert response.status_code == 202
    shown = response.json()["webhook"]
    endpoint = WebhookEndpoint.objects.get()
    assert (shown["endpoint"], shown["url"], shown["format"]) == (
        endpoint.public_id, URL, "standard",
    )  # fmt: skip
    assert shown.get("secret") == (webhooks.secret_of(endpoint) if secret is None else None)
    assert webhooks.secret_of(endpoint) == (secret or shown["secret"])
    assert endpoint.workflow == Workflow.objects.get()
    # The first answer may have been lost.
    again = api.post("/workflows", body, Idempotency_Key="k1")
    assert again.json()["webhook"] == shown
    assert "secret" not in str(api.get(f"/workflows/{response.json()['id']}").json())
    listed = api.get(f"/webhook-endpoints?workflow={response.json()['id']}").json()["items"]
    assert [e["id"] for e in listed] == [endpoint.public_id]


def test_another_webhook_under_the_same_key_is_a_conflict(api: Api) -> None:
    body = {"rater": builders.RATER, "requests": [builders.row()]}
    api.post("/workflows", {**body, "webhook": {"url": URL}}, Idempotency_Key="k1")

    other = api.post("/workflows", {**body, "webhook": {"url": OTHER}}, Idempotency_Key="k1")

    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    assert WebhookEndpoint.objects.count() == 1


def test_an_upload_names_its_webhook_in_the_query(api: Api) -> None:
    address = f"/workflows?rater={builders.RATER}&webhook_format=cloudevents"

    response = api.upload(f"{address}&webhook_url=https%3A%2F%2F203.0.113.20%2Fa", [builders.row()])

    shown = response.json()["webhook"]
    assert (shown["url"], shown["format"]) == ("https://203.0.113.20/a", "cloudevents")
    assert shown["secret"].startswith("whsec_")


def test_an_upload_is_signed_with_the_secret_its_receiver_has(api: Api) -> None:
    made = api.post("/webhook-endpoints", {"url": OTHER}).json()

    response = api.upload(
        f"/workflows?rater={builders.RATER}&webhook_url={OTHER}", [builders.row()]
    )

    assert "secret" not in response.json()["webhook"]
    endpoint = WebhookEndpoint.objects.get(workflow__isnull=False)
    assert webhooks.secret_of(endpoint) == made["secret"]


@pytest.mark.parametrize(
    ("query", "field", "code"),
    [
        ("webhook_url=http://10.0.0.1/", "webhook_url", "url_not_allowed"),
        ("webhook_format=standard", "webhook_url", "missing_field"),
        ("webhook_secret=test-secret", "webhook_secret", "unknown_field"),
        ("webhook=https://203.0.113.20/", "webhook", "unknown_field"),
    ],
)
def test_a_wrong_webhook_of_an_upload_is_refused(
    api: Api, query: str, field: str, code: str
) -> None:
    response = api.upload(f"/workflows?rater={builders.RATER}&{query}", [builders.row()])

    assert response.status_code == 422
    place = response.json()["errors"][0]
    assert (place["field"], place["code"]) == (field, code)
    assert not Workflow.objects.exists()


@pytest.mark.parametrize(
    ("webhook", "field"),
    [
        ({"url": "http://169.254.169.254/"}, "webhook.url"),
        ({"url": URL, "colour": "red"}, "webhook.colour"),
        ({}, "webhook.url"),
        ("https://203.0.113.20/", "webhook"),
    ],
)
def test_a_wrong_webhook_of_a_workflow_is_refused(api: Api, webhook: Any, field: str) -> None:
    body = {"rater": builders.RATER, "webhook": webhook, "requests": [builders.row()]}

    response = api.post("/workflows", body)

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field
    assert not Workflow.objects.exists()


# Events


def test_events_are_listed_oldest_first(api: Api) -> None:
    workflow = builders.workflow()
    first, second = finish(workflow), finish(workflow, number=2)

    page = api.get(f"/workflows/{workflow.public_id}/events").json()

    assert [event["id"] for event in page["items"]] == [first.public_id, second.public_id]
    assert page["items"][0]["type"] == "workflow.completed"
    assert page["items"][0]["data"] == first.data
    assert Api("bob").get(f"/workflows/{workflow.public_id}/events").status_code == 404
    shown = api.get(f"/workflows/{workflow.public_id}").json()
    assert shown["links"]["events"] == f"/api/v1/workflows/{workflow.public_id}/events"


def follow(api: Api, workflow: Workflow, **headers: str) -> Any:
    return api.get(f"/workflows/{workflow.public_id}/events", Accept="text/event-stream", **headers)


def test_a_stream_ends_with_the_event_of_the_round(api: Api) -> None:
    workflow = builders.workflow()
    event = finish(workflow)

    response = follow(api, workflow)
    chunks = list(response.streaming_content)

    assert response["Content-Type"] == "text/event-stream"
    assert chunks[0] == b"retry: 2000\n\n"
    assert chunks[1].startswith(b"event: progress\ndata: {")
    assert chunks[2].startswith(
        f"id: {event.public_id}\nevent: workflow.completed\ndata: {{".encode()
    )
    assert len(chunks) == 3


def test_a_stream_goes_on_after_the_last_event_that_was_seen(api: Api) -> None:
    workflow = builders.workflow(round=2)
    first, second = finish(workflow), finish(workflow, number=2)

    response = follow(api, workflow, Last_Event_ID=first.public_id)
    text = b"".join(response.streaming_content).decode()

    assert first.public_id not in text
    assert second.public_id in text
    assert follow(api, workflow, Last_Event_ID=second.public_id).status_code == 204


def chunks_of(follower: Follower) -> Iterator[str]:
    return (chunk.decode() for chunk in follower)


def test_a_stream_tells_progress_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    workflow = builders.workflow(stats={"received": 2})
    follower = Follower(workflow.pk, after=0, look_every_s=0.001)
    chunks = chunks_of(follower)

    assert next(chunks).startswith("retry:")
    assert '"completed":0' in next(chunks)
    assert next(chunks) == ": heartbeat\n\n"
    workflow.workflowstats.completed = 1
    workflow.workflowstats.save()
    assert '"completed":1' in next(chunks)
    finish(workflow)
    rest = "".join(chunks)
    follower.close()

    assert "event: workflow.completed" in rest


def test_a_stream_ends_after_a_while() -> None:
    follower = Follower(builders.workflow().pk, after=0, look_every_s=0.001, longest_s=0.05)

    assert len(list(follower)) >= 2
    follower.close()


def test_a_stream_of_an_erased_workflow_ends() -> None:
    follower = Follower(10**9, after=0)

    assert len(list(follower)) == 1
    follower.close()


def test_there_are_so_many_streams_at_a_time(api: Api, settings: Settings) -> None:
    settings.AIRS_EVENT_FOLLOWERS = 1
    workflow = builders.workflow()
    follower = Follower(workflow.pk, after=0)

    refused = follow(api, workflow)
    follower.close()
    follower.close()

    assert (refused.status_code, refused.json()["code"]) == (503, "too_many_followers")
    assert refused["Retry-After"] == "5"
    finish(workflow)
    for _ in range(3):  # each gives its place back
        response = follow(api, workflow)
        assert response.status_code == 200
        assert list(response.streaming_content)
    taken = [Follower(workflow.pk, after=0)]
    with pytest.raises(TooManyFollowers):
        Follower(workflow.pk, after=0)
    taken[0].close()


def test_closing_a_stream_ends_its_wait() -> None:
    follower = Follower(builders.workflow().pk, after=0, look_every_s=60, longest_s=0.0)
    follower.close()

    thread = threading.Thread(target=list, args=(follower,))
    thread.start()
    thread.join(10)

    assert not thread.is_alive()
