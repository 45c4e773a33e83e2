"""Webhooks over real sockets: what receivers see, what is written down, and what never happens."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from pytest_django import Settings
from standardwebhooks import Webhook

from fulfillment import deliveries, notify, outgoing, signals, webhooks
from fulfillment.clock import database_now
from fulfillment.models import Delivery, DeliveryAttempt, Event, WebhookEndpoint, Workflow
from fulfillment.policy import webhook_body
from fulfillment.policy.addresses import Refusal
from fulfillment.policy.delivery import Answer, DeliveryState
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.policy.webhook_body import key_of
from fulfillment.webhooks import WebhookForm
from tests import builders
from tests.fakes import ScriptedServer, Step, closed_port, scripted

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
OK = Step(status=200)


@pytest.fixture(autouse=True)
def _loopback_is_allowed(settings: Settings) -> None:
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)


class Died(BaseException):
    """What a process under test dies of."""


def standing(url: str, **changes: Any) -> WebhookEndpoint:
    form = WebhookForm(**{"url": url, "secret": SECRET, **changes})
    endpoint, _ = webhooks.register(owner="alice", form=form, now=database_now())
    return endpoint


def finished(*, name: str = "nightly", number: int = 1) -> Event:
    """Store a finished workflow and its event, as the checker writes it."""
    workflow = builders.workflow(state=WorkflowState.COMPLETED, name=name)
    return Event.objects.create(
        workflow=workflow,
        round=number,
        kind="workflow.completed",
        data={"id": workflow.public_id, "name": name, "state": "COMPLETED", "completed": 2},
        created_at=database_now() + timedelta(seconds=1),
    )


def publish() -> int:
    return notify.run_once(database_now())


def make_due() -> None:
    Delivery.objects.update(due_at=database_now())


def end_leases() -> None:
    Delivery.objects.update(lease_until=database_now() - timedelta(seconds=1))


def send() -> int:
    return deliveries.run_once(database_now())


def only() -> Delivery:
    return Delivery.objects.get()


def logged() -> list[tuple[int | None, str]]:
    found = DeliveryAttempt.objects.order_by("delivery_id", "number")
    return [(attempt.status, attempt.code) for attempt in found]


def logged_in_order() -> list[str]:
    return list(DeliveryAttempt.objects.order_by("pk").values_list("code", flat=True))


# What receivers see


def test_a_receiver_can_verify_what_it_gets() -> None:
    with scripted(OK) as server:
        standing(f"{server.url}/hook?x=1")
        event = finished(name="Prüfung 🍸")
        publish()

        assert send() == 1

    (seen,) = server.seen
    assert (seen.method, seen.path) == ("POST", "/hook?x=1")
    assert seen.headers["content-type"] == "application/json"
    document = Webhook(SECRET).verify(seen.body, dict(seen.headers))
    assert document["type"] == "workflow.completed"
    assert document["data"]["name"] == "Prüfung 🍸"
    assert "Prüfung 🍸".encode() in seen.body
    assert seen.headers["webhook-id"] == event.public_id
    assert seen.headers["airs-attempt"] == "1"
    delivery = only()
    assert delivery.state == DeliveryState.DELIVERED
    assert delivery.finished_at is not None
    assert bytes(delivery.body) == seen.body


def test_the_signature_is_an_hmac_over_the_very_bytes() -> None:
    body, at = "Prüfung 🍸".encode(), database_now()

    headers = deliveries.signature(b"key", event_id="evt_1", at=at, body=body)

    signed = f"evt_1.{headers['webhook-timestamp']}.".encode() + body
    code = base64.b64encode(hmac.new(b"key", signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{code}"
    assert headers["webhook-timestamp"] == str(int(at.timestamp()))


@pytest.mark.parametrize(
    ("secret", "key"),
    [
        (SECRET, b"0123456789abcdef01234567"),
        (SECRET.rstrip("="), b"0123456789abcdef01234567"),
        ("test-secret-not-real", b"test-secret-not-real"),
        ("MDEyMzQ1Njc4OWFiY2RlZg==", b"MDEyMzQ1Njc4OWFiY2RlZg=="),
        ("whsec_qa_secret", b"whsec_qa_secret"),
        ("whsec_", b"whsec_"),
        ("Geheimnis ü", "Geheimnis ü".encode()),
    ],
)
def test_a_secret_is_base64_after_its_prefix_or_a_text(secret: str, key: bytes) -> None:
    assert key_of(secret) == key


def test_a_cloud_event_says_the_same() -> None:
    with scripted(OK) as server:
        standing(server.url, format="cloudevents")
        event = finished()
        publish()
        send()

    (seen,) = server.seen
    assert seen.headers["content-type"] == "application/cloudevents+json"
    document = Webhook(SECRET).verify(seen.body, dict(seen.headers))
    assert document["data"] == event.data
    assert {name: document[name] for name in ("specversion", "id", "type", "subject")} == {
        "specversion": "1.0",
        "id": event.public_id,
        "type": "airs.workflow.completed",
        "subject": event.workflow.public_id,
    }


# Who is told


def test_each_event_is_published_once() -> None:
    standing("http://127.0.0.1:9/a")
    standing("http://127.0.0.1:9/b")
    finished()

    assert publish() == 1
    assert publish() == 0

    assert Delivery.objects.count() == 2


def test_publishing_goes_on_where_it_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    standing("http://127.0.0.1:9/a")
    event = finished()

    def die(event: Event) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(notify, "_send_signal", die)
        with pytest.raises(Died):
            publish()
    made = only()

    assert publish() == 1

    assert only() == made
    event.refresh_from_db()
    assert event.published_at is not None


def test_an_event_that_cannot_be_published_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    standing("http://127.0.0.1:9/a")
    bad, good = finished(name="bad"), finished(name="good")

    def fail(fact: Any, layout: Any) -> bytes:
        if fact.id == bad.public_id:
            raise ValueError("a fault of ours")
        return webhook_body.body_of(fact, layout)

    with monkeypatch.context() as patched:
        patched.setattr(notify, "body_of", fail)
        assert publish() == 1
    assert only().event == good

    assert publish() == 1
    assert Delivery.objects.count() == 2


def test_a_workflow_tells_its_own_endpoint_and_its_owners() -> None:
    event = finished()
    other = builders.workflow(owner="bob")
    now = database_now()
    own = webhooks.attach(event.workflow, WebhookForm(url="http://127.0.0.1:9/own"), now=now)
    owners = standing("http://127.0.0.1:9/all")
    webhooks.attach(other, WebhookForm(url="http://127.0.0.1:9/other"), now=now)
    webhooks.register(owner="bob", form=WebhookForm(url="http://127.0.0.1:9/bob"), now=now)

    publish()

    assert {d.endpoint for d in Delivery.objects.all()} == {own, owners}


def test_an_address_that_is_named_twice_is_told_once() -> None:
    event = finished()
    standing("http://127.0.0.1:9/hook")
    form = WebhookForm(url="http://127.0.0.1:9/hook")
    own = webhooks.attach(event.workflow, form, now=database_now())

    publish()

    assert only().endpoint == own
    # Signed with the secret that the receiver has already.
    assert webhooks.secret_of(own) == SECRET
    assert webhooks.generated_secret(own) is None


@pytest.mark.parametrize("change", ["disabled", "younger"])
def test_some_endpoints_are_not_told(change: str) -> None:
    endpoint = standing("http://127.0.0.1:9/hook")
    finished()
    now = database_now()
    if change == "disabled":
        WebhookEndpoint.objects.update(disabled_at=now, disabled_reason="gone")
    else:
        WebhookEndpoint.objects.filter(pk=endpoint.pk).update(created_at=now + timedelta(hours=1))

    assert publish() == 1

    assert not Delivery.objects.exists()


def test_python_code_hears_of_each_event_and_may_fail() -> None:
    heard: list[dict[str, Any]] = []

    def note(sender: Any, **facts: Any) -> None:
        heard.append(facts)
        raise ValueError("a receiver of somebody else's")

    signals.workflow_finished.connect(note)
    try:
        event = finished()
        publish()
        publish()
    finally:
        signals.workflow_finished.disconnect(note)

    (facts,) = heard
    assert facts["event_id"] == event.public_id
    assert (facts["workflow_id"], facts["state"]) == (event.workflow.public_id, "COMPLETED")


# Failing, and trying again


def attempts_until_taken(server: ScriptedServer, most: int = 10) -> Delivery:
    for _ in range(most):
        make_due()
        send()
        if only().state != DeliveryState.PENDING:
            break
    return only()


def test_retries_keep_id_and_bytes_and_get_a_time_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "LIMIT_S", 0.2)
    hang, failing = Step(hang=True), Step(status=500)
    with scripted(hang, failing, failing, OK) as server:
        standing(server.url)
        finished()
        publish()
        delivery = attempts_until_taken(server)

    assert delivery.state == DeliveryState.DELIVERED
    assert delivery.attempts == 4
    assert len({seen.headers["webhook-id"] for seen in server.seen}) == 1
    assert len({seen.body for seen in server.seen}) == 1
    assert [seen.headers["airs-attempt"] for seen in server.seen] == ["1", "2", "3", "4"]
    for seen in server.seen:
        Webhook(SECRET).verify(seen.body, dict(seen.headers))
    assert DeliveryAttempt.objects.get(number=1).duration_s < 5
    assert logged() == [
        (None, "timeout"), (500, "http_error"), (500, "http_error"), (200, ""),
    ]  # fmt: skip


def test_waits_grow() -> None:
    with scripted(Step(status=500)) as server:
        standing(server.url)
        finished()
        publish()
        waits = []
        for _ in range(5):
            make_due()
            send()
            waits.append(only().due_at - database_now())

    assert waits == sorted(waits)
    assert timedelta(seconds=3) < waits[0] < timedelta(seconds=7)
    assert waits[-1] > timedelta(seconds=60)


def test_410_stops_at_once_and_disables_the_endpoint() -> None:
    with scripted(Step(status=410)) as server:
        endpoint = standing(server.url)
        for _ in range(2):
            finished()
        publish()
        Delivery.objects.filter(pk=Delivery.objects.first().pk).update(  # type: ignore[union-attr]
            due_at=database_now() + timedelta(hours=1)
        )
        send()
        make_due()
        assert send() == 0

    endpoint.refresh_from_db()
    assert endpoint.disabled_at is not None
    assert endpoint.disabled_reason == "gone"
    assert len(server.seen) == 1
    assert {d.state for d in Delivery.objects.all()} == {DeliveryState.DISABLED}


def test_retry_after_is_waited_for() -> None:
    with scripted(Step(status=429, headers={"Retry-After": "30"})) as server:
        standing(server.url)
        finished()
        publish()
        before = database_now()
        send()

    delivery = only()
    assert delivery.state == DeliveryState.PENDING
    assert delivery.due_at >= before + timedelta(seconds=30)
    assert not deliveries.claim(before + timedelta(seconds=29), room=1)


def test_a_redirect_is_not_followed() -> None:
    with scripted(OK) as elsewhere, scripted(
        Step(status=302, headers={"Location": elsewhere.url})
    ) as server:  # fmt: skip
        standing(server.url)
        finished()
        publish()
        send()

    assert not elsewhere.seen
    assert logged() == [(302, "redirect_not_followed")]
    assert only().code == "redirect_not_followed"


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (Step(reset=True), "connection_lost"),
        (Step(cut_after=8), "connection_lost"),
        (Step(raw=b"SSH-2.0-OpenSSH_9.6\r\n"), "protocol_error"),
        (Step(status=500, body=b"secret of the receiver"), "http_error"),
    ],
)
def test_what_went_wrong_is_written_down_in_our_own_words(step: Step, code: str) -> None:
    with scripted(step) as server:
        standing(server.url)
        finished()
        publish()
        send()

    ((_, found),) = logged()
    assert found == code
    assert "secret of the receiver" not in json.dumps(
        [*DeliveryAttempt.objects.values("code"), *Delivery.objects.values("code")]
    )


def test_a_port_where_nobody_listens_is_said() -> None:
    with closed_port() as port:
        standing(f"http://127.0.0.1:{port}/")
        finished()
        publish()
        send()

    assert logged() == [(None, "connection_refused")]


def test_an_ipv6_address_is_connected_to(settings: Settings) -> None:
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("::1",)
    standing("http://[::1]:9/")
    finished()
    publish()
    send()

    # Nobody listens there, or the machine has no IPv6.
    ((_, code),) = logged()
    assert code in {"connection_refused", "connection_failed"}


def test_an_answer_counts_without_its_body() -> None:
    with scripted(Step(status=200, endless=True)) as server:
        standing(server.url)
        finished()
        publish()
        send()

    assert only().state == DeliveryState.DELIVERED
    assert DeliveryAttempt.objects.get().duration_s < 5


def test_after_a_day_it_is_given_up_and_can_be_replayed() -> None:
    with scripted(Step(status=500), OK) as server:
        standing(server.url)
        finished()
        publish()
        Delivery.objects.update(began_at=F("began_at") - timedelta(hours=25))
        send()
        given_up = only()
        make_due()
        assert send() == 0

        deliveries.replay(given_up.pk, now=database_now())
        send()

    assert given_up.state == DeliveryState.GIVEN_UP
    assert only().state == DeliveryState.DELIVERED
    first, second = server.seen
    assert first.body == second.body
    assert first.headers["webhook-id"] == second.headers["webhook-id"]


def test_a_replay_that_is_taken_enables_its_endpoint_again() -> None:
    with scripted(Step(status=410), OK) as server:
        endpoint = standing(server.url)
        finished()
        publish()
        send()
        deliveries.replay(only().pk, now=database_now())
        send()

    endpoint.refresh_from_db()
    assert (endpoint.disabled_at, endpoint.disabled_reason) == (None, "")
    assert only().state == DeliveryState.DELIVERED


def test_a_workflow_does_not_depend_on_its_webhook() -> None:
    with scripted(Step(status=500)) as server:
        event = finished()
        form = WebhookForm(url=server.url)
        webhooks.attach(event.workflow, form, now=database_now())
        before = Workflow.objects.values().get()
        publish()
        send()

    assert Workflow.objects.values().get() == before


def test_a_secret_that_cannot_be_read_sends_nothing_and_is_tried_again(settings: Settings) -> None:
    with scripted(OK) as server:
        standing(server.url)
        finished()
        publish()
        kept, settings.SECRET_KEY = settings.SECRET_KEY, "another"
        send()
        assert logged() == [(None, "secret_unreadable")]
        settings.SECRET_KEY = kept
        make_due()
        send()

    assert len(server.seen) == 1
    assert only().state == DeliveryState.DELIVERED


def test_secrets_are_sealed_at_rest() -> None:
    standing("http://127.0.0.1:9/")

    with connection.cursor() as cursor:
        cursor.execute("SELECT t::text FROM fulfillment_webhookendpoint t")
        (row,) = cursor.fetchone()
    assert SECRET not in row
    assert SECRET.removeprefix("whsec_") not in row


# Senders that die, meet each other, or meet slow receivers


def test_a_sender_killed_before_its_record_sends_the_same_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*args: Any, **more: Any) -> None:
        raise Died

    with scripted(OK) as server:
        standing(server.url)
        finished()
        publish()
        with monkeypatch.context() as patched:
            patched.setattr(deliveries, "record", die)
            with pytest.raises(Died):
                send()
        assert send() == 0  # the lease of the dead one still holds
        end_leases()
        assert send() == 1

    first, second = server.seen
    assert first.body == second.body
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert only().state == DeliveryState.DELIVERED


def test_a_delivery_is_claimed_by_one_sender() -> None:
    standing("http://127.0.0.1:9/")
    finished()
    publish()
    now = database_now()

    (first,) = deliveries.claim(now, room=8)

    assert not deliveries.claim(now, room=8)
    (again,) = deliveries.claim(now + deliveries.LEASE, room=8)
    assert again.fence == first.fence + 1


def test_who_lost_its_lease_only_writes_its_attempt_down() -> None:
    standing("http://127.0.0.1:9/")
    finished()
    publish()
    now = database_now()
    (slow,) = deliveries.claim(now, room=8)
    (current,) = deliveries.claim(now + deliveries.LEASE, room=8)

    assert deliveries.record(slow, Answer(status=410), duration_s=31.0) is None
    assert only().state == DeliveryState.PENDING
    assert deliveries.record(current, Answer(status=200), duration_s=0.1) is (
        DeliveryState.DELIVERED
    )
    assert [code for _, code in logged()] == ["gone", ""]
    assert [a.number for a in DeliveryAttempt.objects.order_by("number")] == [1, 2]


def test_a_replay_does_not_wait_for_what_is_on_its_way() -> None:
    standing("http://127.0.0.1:9/")
    finished()
    publish()
    (on_its_way,) = deliveries.claim(database_now(), room=8)

    deliveries.replay(on_its_way.delivery_id, now=database_now())

    deliveries.record(on_its_way, Answer(status=200), duration_s=0.1)
    assert only().state == DeliveryState.PENDING
    assert len(deliveries.claim(database_now(), room=8)) == 1


def test_a_receiver_gets_few_at_a_time_and_none_is_passed_over() -> None:
    slow, quick = standing("http://127.0.0.1:9/slow"), standing("http://127.0.0.1:10/quick")
    for _ in range(10):
        finished()
    publish()

    claimed = deliveries.claim(database_now(), room=6)

    assert sorted(c.endpoint_id for c in claimed) == [slow.pk] * 3 + [quick.pk] * 3
    more = deliveries.claim(database_now(), room=64)
    assert sorted(c.endpoint_id for c in more) == [slow.pk, quick.pk]
    assert not deliveries.claim(database_now(), room=64)
    assert deliveries.PER_RECEIVER == 4


def test_a_slow_receiver_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "LIMIT_S", 2.0)
    with scripted(Step(hang=True)) as slow, scripted(OK) as quick:
        hung = standing(slow.url)
        standing(quick.url)
        for _ in range(12):
            finished()
        publish()
        Delivery.objects.filter(endpoint=hung, pk__in=list(
            Delivery.objects.filter(endpoint=hung).values_list("pk", flat=True)[4:]
        )).delete()  # fmt: skip
        send()

    assert (len(slow.seen), len(quick.seen)) == (4, 12)
    # Twelve in rounds of four, all written down before the first of the slow one's timed out.
    assert logged_in_order() == [*[""] * 12, *["timeout"] * 4]


def test_deleting_an_endpoint_ends_what_is_on_its_way() -> None:
    endpoint = standing("http://127.0.0.1:9/")
    finished()
    publish()
    (claimed,) = deliveries.claim(database_now(), room=8)

    endpoint.delete()

    assert deliveries.record(claimed, Answer(status=200), duration_s=0.1) is None
    assert not DeliveryAttempt.objects.exists()


@with_commits
def test_two_publishers_at_a_time_make_one_delivery() -> None:
    standing("http://127.0.0.1:9/")
    for _ in range(5):
        finished()
    ready = threading.Barrier(2)

    def run() -> None:
        ready.wait(10)
        try:
            publish()
        finally:
            connection.close()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    publish()

    assert Delivery.objects.count() == 5
    assert not Event.objects.filter(published_at=None).exists()


# Addresses


class Names:
    """A resolver by script: each look-up of a name takes its next answer, the last one stays."""

    def __init__(self, **answers: Sequence[str]) -> None:
        self.answers = {name.replace("_", "."): list(found) for name, found in answers.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise OSError("no such name")
        found = self.answers[host]
        return [found.pop(0) if len(found) > 1 else found[0]]


def test_a_name_that_leads_inside_later_is_never_connected_to(settings: Settings) -> None:
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ()
    with scripted(OK) as inside:
        port = int(inside.url.rpartition(":")[2])
        settings.AIRS_WEBHOOK_PORTS = frozenset({port})
        names = Names(rebind_test=["203.0.113.10", "127.0.0.1"])
        url = f"http://rebind.test:{port}/"
        assert not isinstance(outgoing.judge(url, look_up=names), Refusal)
        standing(url)
        finished()
        publish()

        deliveries.run_once(database_now(), look_up=names)

    assert not inside.seen
    assert inside.connections == 0
    assert names.asked == ["rebind.test", "rebind.test"]
    assert logged() == [(None, "url_not_allowed")]
    assert (only().state, only().code) == (DeliveryState.GIVEN_UP, "url_not_allowed")


def test_the_connection_goes_to_the_address_that_was_judged(settings: Settings) -> None:
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.0/8",)
    with scripted(OK) as server:
        port = int(server.url.rpartition(":")[2])
        settings.AIRS_WEBHOOK_PORTS = frozenset({port})
        # Looked up once: a second look would find nothing.
        names = Names(hooks_test=["127.0.0.1", "203.0.113.10"])
        standing(f"http://hooks.test:{port}/path")
        finished()
        publish()

        deliveries.run_once(database_now(), look_up=names)

    (seen,) = server.seen
    assert seen.headers["host"] == f"hooks.test:{port}"
    assert names.asked == ["hooks.test"]


def test_what_an_operator_no_longer_allows_is_not_sent_to(settings: Settings) -> None:
    with scripted(OK) as server:
        standing(server.url)
        finished()
        publish()
        settings.AIRS_ALLOWED_PRIVATE_HOSTS = ()
        send()

    assert server.connections == 0
    assert logged() == [(None, "url_not_allowed")]


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(OK) as proxy, scripted(OK) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        standing(server.url)
        finished()
        publish()
        send()

    assert (len(server.seen), proxy.connections) == (1, 0)


def test_a_name_that_does_not_resolve_is_tried_again() -> None:
    standing("http://hooks.test/")
    finished()
    publish()

    deliveries.run_once(database_now(), look_up=Names())

    assert logged() == [(None, "name_not_resolved")]
    assert only().state == DeliveryState.PENDING


@pytest.mark.parametrize("found", ["127.0.0.1", "10.0.0.1", "::1", "fe80::1%lo", "64:ff9b::a00:1"])
def test_a_name_that_leads_inside_is_refused_when_it_is_registered(
    found: str, settings: Settings
) -> None:
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ()

    judged = outgoing.judge("http://hooks.test/", look_up=Names(hooks_test=[found]))

    assert isinstance(judged, Refusal)
    assert found not in judged.reason
