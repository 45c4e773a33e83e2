"""The collected cases about webhooks, from submission to delivery over real sockets.

The cases lie beside the repository (`../shared/cases`); their files are not part of it.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pytest_django import Settings
from standardwebhooks import Webhook

from fulfillment import deliveries, notify, outgoing, raters, webhooks
from fulfillment.clock import database_now
from fulfillment.models import Delivery, DeliveryAttempt, Rater, WebhookEndpoint, Workflow
from fulfillment.policy.delivery import DeliveryState
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.policy.webhook_body import key_of
from tests import builders
from tests.builders import MODEL, Api
from tests.fakes import Step, scripted
from tests.rating_queue import boot, check_all, queue, rate_all

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"

pytestmark = pytest.mark.django_db

ATTEMPT_S = 0.3
"""What an attempt may take here, instead of ten seconds."""


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)
    raters.register(Rater(id=builders.RATER, autorater="stub", model_id=MODEL), now=database_now())


def case(name: str, file: str) -> Any:
    path = CASES / name / file
    if not path.exists():
        pytest.skip(f"the collected case {name} is not at hand")
    return json.loads(path.read_bytes()) if file.endswith(".json") else path.read_bytes()


def receiver(fault: Mapping[str, Any]) -> list[Step]:
    """Return the steps of a scripted receiver; a delay beyond the limit is one without end."""
    return [
        Step(
            status=step["status"],
            headers=step.get("headers", {}),
            hang=step.get("delay_s", 0) > outgoing.LIMIT_S,
        )
        for step in fault["routes"]["/hook"]["steps"]
    ]


def submit_and_finish(rows: bytes, *, webhook: str, name: str = "case") -> Workflow:
    """Upload rows with a webhook and have all of them rated; return the ended workflow."""
    address = f"/workflows?rater={builders.RATER}&name={quote(name)}&webhook_url={quote(webhook)}"
    response = Api().upload(address, rows)
    assert response.status_code == 202, response.content
    rate_all(queue(), boot())
    check_all()
    workflow = Workflow.objects.get(public_id=response.json()["id"])
    assert workflow.state == WorkflowState.COMPLETED
    notify.run_once(database_now())
    return workflow


def send_until_ended(most: int = 8) -> Delivery:
    for _ in range(most):
        Delivery.objects.update(due_at=database_now())
        deliveries.run_once(database_now())
        if Delivery.objects.get().state != DeliveryState.PENDING:
            break
    return Delivery.objects.get()


# W-01


def test_w01_a_slow_and_failing_receiver_gets_the_same_until_it_takes_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case("W-01", "expected.json")["expect"]
    rows, steps = case("W-01", "rows.jsonl"), receiver(case("W-01", "fault_1.json"))
    assert expected["attempt_limit_s"] == outgoing.LIMIT_S
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)
    monkeypatch.setattr(outgoing, "LIMIT_S", ATTEMPT_S)
    with scripted(*steps) as server:
        submit_and_finish(rows, webhook=f"{server.url}/hook")
        delivery = send_until_ended()
        Delivery.objects.update(due_at=database_now())
        assert deliveries.run_once(database_now()) == 0

    seen = server.seen
    assert len(seen) == expected["receiver1"]["attempts"] == delivery.attempts
    ids = {one.headers["webhook-id"] for one in seen}
    assert len(ids) == expected["receiver1"]["distinct_delivery_ids"]
    assert len({one.body for one in seen}) == expected["receiver1"]["distinct_bodies"]
    assert DeliveryState(delivery.state).name == expected["receiver1"]["state"]
    assert DeliveryAttempt.objects.count() == 4


def test_w01_410_stops_at_once(settings: Settings) -> None:
    expected = case("W-01", "expected.json")["expect"]["receiver2"]
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)
    with scripted(*receiver(case("W-01", "fault_2.json"))) as server:
        workflow = submit_and_finish(case("W-01", "rows.jsonl"), webhook=f"{server.url}/hook")
        delivery = send_until_ended()

    assert len(server.seen) == expected["attempts"]
    assert DeliveryState(delivery.state).name == expected["state"]
    (endpoint,) = Api().get(f"/webhook-endpoints?workflow={workflow.public_id}").json()["items"]
    assert endpoint["disabled_reason"] == "gone"


def test_w01_retry_after_is_a_floor(settings: Settings) -> None:
    least_s = case("W-01", "expected.json")["expect"]["receiver3"]["second_attempt_after_s_min"]
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)
    with scripted(*receiver(case("W-01", "fault_3.json"))) as server:
        submit_and_finish(case("W-01", "rows.jsonl"), webhook=f"{server.url}/hook")
        began_at = database_now()
        deliveries.run_once(began_at)
        # Each second until then: nothing is sent.
        for second in range(least_s):
            assert not deliveries.claim(began_at + timedelta(seconds=second), room=1)
        assert deliveries.claim(began_at + timedelta(seconds=least_s + 2), room=1)

    assert len(server.seen) == 1


# W-03


def test_w03_the_signature_is_over_the_exact_bytes() -> None:
    """Standard Webhooks signs the id as well, and writes base64: `../shared/api.md` holds."""
    body, expected = case("W-03", "body.bin"), case("W-03", "expected.json")["expect"]
    key = key_of(expected["secret"])
    at = datetime.fromtimestamp(int(expected["timestamp"]), UTC)

    headers = deliveries.signature(key, event_id="evt_1", at=at, body=body)

    def mac(signed: bytes) -> "hmac.HMAC":
        return hmac.new(key, signed, hashlib.sha256)

    assert hashlib.sha256(body).hexdigest() == expected["body_sha256"]
    stamp = expected["timestamp"].encode()
    assert mac(stamp + b"." + body).hexdigest() == expected["hmac_sha256_hex"]
    assert headers["webhook-timestamp"] == expected["timestamp"]
    by_hand = base64.b64encode(mac(b"evt_1." + stamp + b"." + body).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{by_hand}"


def test_w03_a_live_delivery_verifies_over_its_raw_bytes(settings: Settings) -> None:
    rows = case("W-01", "rows.jsonl")
    assert case("W-03", "expected.json")["expect"]["live_delivery_verifies_over_raw_bytes"]
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)
    with scripted(Step(status=500), Step()) as server:
        submit_and_finish(rows, webhook=f"{server.url}/hook", name="Prüfung 🍸")
        send_until_ended()

    secret = webhooks.secret_of(WebhookEndpoint.objects.get())
    assert secret is not None
    for seen in server.seen:
        Webhook(secret).verify(seen.body, dict(seen.headers))
        assert "Prüfung 🍸".encode() in seen.body
        with pytest.raises(Exception, match="signature"):
            Webhook(secret).verify(seen.body.replace(b":", b": "), dict(seen.headers))


#


class Names:
    """The case's resolver: each look-up of a name takes its next answer, the last one stays."""

    def __init__(self, answers: Mapping[str, Sequence[str]]) -> None:
        self.answers = {name: list(found) for name, found in answers.items()}

    def __call__(self, host: str, port: int) -> Sequence[str]:
        if host not in self.answers:
            raise OSError("no such name")
        found = self.answers[host]
        return [found.pop(0) if len(found) > 1 else found[0]]


def test_x01_what_leads_inside_is_refused_and_the_rest_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    urls, names = case("X-01", "urls.json"), Names(case("X-01", "resolver.json"))
    monkeypatch.setattr(outgoing, "addresses_of", names)
    api = Api()

    answers = {url: api.post("/webhook-endpoints", {"url": url}) for url in urls["deny"]}

    for url, answer in answers.items():
        if "rebind.test" in url:  # leads outside the first time
            assert answer.status_code == 201
            continue
        assert (answer.status_code, answer.json()["code"]) == (422, "url_not_allowed"), url
        assert [place["field"] for place in answer.json()["errors"]] == ["url"]
        in_workflow = api.post(
            "/workflows",
            {"rater": builders.RATER, "webhook": {"url": url}, "requests": [builders.row()]},
        )
        assert in_workflow.status_code == 422
        assert in_workflow.json()["errors"][0]["code"] == "url_not_allowed"
    for url in urls["allow"]:
        assert api.post("/webhook-endpoints", {"url": url}).status_code == 201, url


def test_x01_a_name_that_changes_its_mind_reaches_nothing_inside(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, names = case("W-01", "rows.jsonl"), Names(case("X-01", "resolver.json"))
    monkeypatch.setattr(outgoing, "addresses_of", names)
    with scripted(Step(body=b"secret of the inside")) as inside:
        port = int(inside.url.rpartition(":")[2])
        settings.AIRS_WEBHOOK_PORTS = frozenset({port})
        workflow = submit_and_finish(rows, webhook=f"http://rebind.test:{port}/")
        delivery = send_until_ended()

    assert inside.connections == case("X-01", "expected.json")["expect"]["internal_requests_seen"]
    assert (delivery.state, delivery.code) == (DeliveryState.GIVEN_UP, "url_not_allowed")
    (endpoint,) = Api().get(f"/webhook-endpoints?workflow={workflow.public_id}").json()["items"]
    shown = Api().get(f"/webhook-endpoints/{endpoint['id']}/deliveries").content
    assert b"url_not_allowed" in shown
    assert b"secret of the inside" not in shown
    assert b"127.0.0.1" not in shown
