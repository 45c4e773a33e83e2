"""Who may do what to models and pools: each role, each act, by REST and in the admin."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

from airs_site.groups import make_groups
from fulfillment import tokens
from models_admin import services
from models_admin.models import AcceleratorPool, AuditEntry, ModelVersion

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OLD = 900_001
"""Key of a version that was replaced."""
ROLES = ("viewer", "submitter", "operator")
ADMIN = "/admin/models_admin"
POOL = {"kind": "cpu", "devices": "2", "agent": "local", "rebalancing": "off", "notes": ""}
MODEL = {
    "kind": "hosted", "protocol": "oip", "model_name": "mini", "timeout_s": "60", "url": "",
    "max_concurrency": "16", "version_label": "", "pool": "", "loader": "", "checkpoint": "tiny:0",
    "serving": "{}", "devices_per_replica": "1", "replicas_min": "0", "replicas_default": "1",
    "replicas_max": "2", "window": "9", "new_api_key": "", "new_headers": "",
}  # fmt: skip

READS = [
    "models", "models/mini", "models/mini/versions", "models/mini/address", "pools", "pools/box",
    "pools/box/decisions", "audit",
]  # fmt: skip
WRITES: list[tuple[str, str, Any]] = [
    ("POST", "pools", {"id": "other", "devices": 1}),
    ("PATCH", "pools/box", {"devices": 4}),
    ("DELETE", "pools/spare", None),
    ("POST", "models", {"id": "two", "kind": "hosted", "checkpoint": "tiny:0"}),
    ("PATCH", "models/mini", {"window": 9}),
    ("POST", "models/mini/start", None),
    ("POST", "models/mini/restart", None),
    ("POST", "models/mini/resize", {"replicas": 2}),
    ("POST", "models/mini/try", {"rows": [{"query": "a", "text": "b"}]}),
    ("POST", "models/mini/versions/old/retire", None),
    ("POST", "models/mini/stop", None),
    ("DELETE", "models/mini", None),
]
PAGES = [
    "modelconfig/", "modelconfig/mini/change/", "modelconfig/mini/replicas/", "acceleratorpool/",
    "acceleratorpool/box/change/", "modelserver/", "modelversion/", "auditentry/",
    "rebalancedecision/", "utilizationsample/",
]  # fmt: skip


def listed(action: str, **more: str) -> dict[str, Any]:
    return {"action": action, "_selected_action": ["mini"], "confirmed": "yes", **more}


ACTS: list[tuple[str, dict[str, Any]]] = [
    ("acceleratorpool/add/", POOL | {"id": "other"}),
    ("acceleratorpool/box/change/", POOL | {"devices": "4"}),
    ("acceleratorpool/spare/delete/", {"post": "yes"}),
    ("modelconfig/add/", MODEL | {"id": "two", "model_name": "two"}),
    ("modelconfig/mini/change/", MODEL),
    ("modelconfig/", listed("start")),
    ("modelconfig/", listed("restart")),
    ("modelconfig/", listed("resize", replicas="2")),
    ("modelconfig/mini/try/", {"try-query": "a", "try-texts": "b"}),
    ("modelversion/", listed("retire") | {"_selected_action": [OLD]}),
    ("modelconfig/", listed("stop")),
    ("modelconfig/mini/delete/", {"post": "yes"}),
]
DONE = [
    "pool_registered", "pool_changed", "pool_removed", "model_registered", "model_changed",
    "model_started", "model_restarted", "model_resized", "model_version_retired", "model_stopped",
    "model_removed",
]  # fmt: skip
"""Of both lists, in their order; a trial needs a replica that is ready, and there is none."""


@pytest.fixture(autouse=True)
def _some() -> None:
    for pool in ("box", "spare"):
        services.register_pool(AcceleratorPool(id=pool, devices=2))
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0", replicas_max=2)
    ModelVersion.objects.create(
        pk=OLD, model_id="mini", version="old", checkpoint="tiny:9", state="retiring",
        first_seen_at=NOW,
    )  # fmt: skip
    AuditEntry.objects.all().delete()


def done() -> list[str]:
    return list(AuditEntry.objects.order_by("pk").values_list("action", flat=True))


def token(role: str) -> Callable[..., Any]:
    _, secret = tokens.issue(user=f"a-{role}", role=role, expires_at=None, now=NOW)
    client = Client(headers={"Authorization": f"Bearer {secret}"})

    def call(method: str, path: str, body: Any = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        address = f"/api/v1/{path}"
        return client.generic(method, address, data=data, content_type="application/json")

    return call


def of_group(name: str) -> Client:
    make_groups()
    user = User.objects.create(username=f"a-{name}", is_staff=True)
    user.groups.add(Group.objects.get(name=name))
    browser = Client()
    browser.force_login(user)
    return browser


@pytest.mark.parametrize("role", ROLES)
def test_every_role_sees_models_and_pools(role: str) -> None:
    call, browser = token(role), of_group(role)

    assert {path: call("GET", path).status_code for path in READS} == dict.fromkeys(READS, 200)
    found = {page: browser.get(f"{ADMIN}/{page}").status_code for page in PAGES}
    assert found == dict.fromkeys(PAGES, 200)


@pytest.mark.parametrize("role", ["viewer", "submitter"])
def test_others_than_operators_change_nothing(role: str) -> None:
    call, browser = token(role), of_group(role)

    by_rest = [call(*write).status_code for write in WRITES]
    for path, form in ACTS:
        browser.post(f"{ADMIN}/{path}", form)
    asked = browser.get(f"{ADMIN}/modelconfig/mini/act/stop/").status_code

    assert by_rest == [403] * len(WRITES)
    assert asked == 403
    assert done() == []


def test_an_operator_does_it_all_by_rest() -> None:
    call = token("operator")

    statuses = [call(*write).status_code for write in WRITES]

    assert [status for status in statuses if status >= 400] == [409]
    assert done() == DONE


def test_an_operator_does_it_all_in_the_admin() -> None:
    browser = of_group("operator")

    statuses = [browser.post(f"{ADMIN}/{path}", form).status_code for path, form in ACTS]

    assert [status for status in statuses if status != 302] == [200]
    assert done() == DONE


def test_a_user_of_no_group_sees_nothing() -> None:
    browser = Client()
    browser.force_login(User.objects.create(username="new", is_staff=True))

    found = {page: browser.get(f"{ADMIN}/{page}").status_code for page in PAGES}
    tried = browser.get(f"{ADMIN}/modelconfig/mini/try/").status_code

    assert found == dict.fromkeys(PAGES, 403)
    assert tried == 403


def test_groups_see_no_tokens_and_only_operators_where_others_send_events() -> None:
    pages = [
        f"/admin/fulfillment/{name}/"
        for name in ("apitoken", "webhookendpoint", "delivery", "purge", "workflow", "rater")
    ]
    found = {
        role: [client.get(page).status_code for page in pages]
        for role, client in ((role, of_group(role)) for role in ROLES)
    }

    assert found == {
        "viewer": [403, 403, 403, 403, 200, 200],
        "submitter": [403, 403, 403, 403, 200, 200],
        "operator": [403, 200, 200, 200, 200, 200],
    }


def test_groups_are_what_they_are_meant_to_be_after_each_start() -> None:
    make_groups()
    operators = Group.objects.get(name="operator")
    wanted = set(operators.permissions.values_list("codename", flat=True))
    operators.permissions.clear()
    Group.objects.get(name="viewer").permissions.set(
        Group.objects.get(name="submitter").permissions.all()[:1]
    )

    assert make_groups() == []

    assert set(operators.permissions.values_list("codename", flat=True)) == wanted
    assert {"change_modelconfig", "delete_acceleratorpool", "change_workflow"} <= wanted
    assert not {code for code in wanted if "user" in code or "apitoken" in code}
