"""Who did what to models and pools: written with the act, read by REST and in the admin."""

import json
import logging
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from pytest_django import DjangoCaptureOnCommitCallbacks, Settings

from fulfillment import tokens
from models_admin import services, traffic_rules
from models_admin.clock import database_now
from models_admin.errors import ModelsAdminError
from models_admin.models import AcceleratorPool, AuditEntry

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = "sk-qa-0123456789abcdef"
HOSTED: Any = {"kind": "hosted", "checkpoint": "tiny:0"}
EXTERNAL: Any = {"kind": "external", "url": "http://127.0.0.1:9", "model_name": "m"}


def rest(role: str = "operator") -> Client:
    _, secret = tokens.issue(user=f"a-{role}", role=role, expires_at=None, now=NOW)
    return Client(headers={"Authorization": f"Bearer {secret}"})


def written() -> list[tuple[str, str, str, str]]:
    entries = AuditEntry.objects.order_by("pk")
    return list(entries.values_list("actor", "action", "kind", "object_id"))


def detail() -> Any:
    entry = AuditEntry.objects.order_by("-pk").first()
    assert entry is not None
    return entry.detail


def test_each_act_leaves_an_entry_that_says_what_changed() -> None:
    pool = AcceleratorPool(id="box", devices=4)
    services.register_pool(pool, actor="ann")
    assert detail()["devices"] == 4
    services.change_pool("box", {"devices": 5}, actor="ann")
    assert detail() == {"devices": [4, 5]}
    services.register_model("mini", now=NOW, actor="ann", pool="box", replicas_max=3, **HOSTED)
    assert (detail()["checkpoint"], detail()["pool"]) == ("tiny:0", "box")
    services.update_model("mini", now=NOW, actor="bob", window=9, checkpoint="tiny:1")
    changed = detail()
    assert (changed["window"], changed["checkpoint"]) == ([16, 9], ["tiny:0", "tiny:1"])
    services.start_model("mini", now=NOW, actor="bob")
    services.resize_model("mini", 3, now=NOW, actor="bob")
    assert detail() == {"replicas": [1, 3]}
    services.restart_model("mini", now=NOW, actor="bob")
    services.stop_model("mini", now=NOW)
    services.remove_model("mini", actor="ann")
    services.remove_pool("box", actor="ann")

    assert written() == [
        ("ann", "pool_registered", "pool", "box"),
        ("ann", "pool_changed", "pool", "box"),
        ("ann", "model_registered", "model", "mini"),
        ("bob", "model_changed", "model", "mini"),
        ("bob", "model_started", "model", "mini"),
        ("bob", "model_resized", "model", "mini"),
        ("bob", "model_restarted", "model", "mini"),
        ("system", "model_stopped", "model", "mini"),
        ("ann", "model_removed", "model", "mini"),
        ("ann", "pool_removed", "pool", "box"),
    ]


def test_what_changes_nothing_and_what_is_refused_leave_none() -> None:
    services.register_pool(AcceleratorPool(id="box", devices=1))
    services.register_model("mini", now=NOW, pool="box", **HOSTED)
    services.start_model("mini", now=NOW)
    before = written()

    services.register_pool(AcceleratorPool(id="box", devices=1))
    services.change_pool("box", {"devices": 1})
    services.register_model("mini", now=NOW, pool="box", **HOSTED)
    services.update_model("mini", now=NOW, window=16)
    services.start_model("mini", now=NOW)
    for refused in (
        lambda: services.resize_model("mini", 9, now=NOW),
        lambda: services.remove_model("mini"),
        lambda: services.remove_pool("box"),
        lambda: services.update_model("mini", now=NOW, window=0),
    ):
        with pytest.raises(ModelsAdminError):
            refused()

    assert written() == before


def test_an_act_that_is_rolled_back_leaves_neither_entry_nor_line(
    caplog: pytest.LogCaptureFixture,
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    caplog.set_level(logging.INFO)
    services.register_model("mini", now=NOW, **HOSTED)

    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        services.start_model("mini", now=NOW, actor="ann")
        transaction.set_rollback(True)

    assert [action for _, action, _, _ in written()] == ["model_registered"]
    assert "model_started" not in caplog.text
    with django_capture_on_commit_callbacks(execute=True):
        services.start_model("mini", now=NOW, actor="ann")
    assert "model_started id=mini by=ann" in caplog.text


def test_of_a_secret_only_that_it_changed_is_written() -> None:
    services.register_model("ext", now=NOW, api_key=KEY, headers={"X-Key": KEY}, **EXTERNAL)
    registered = detail()
    services.update_model("ext", now=NOW, api_key=f"{KEY}0", headers={"X-Key": f"{KEY}1"})

    assert (registered["api_key"], registered["headers"]) == ("set", "set")
    assert detail() == {"api_key": "changed", "headers": "changed"}
    assert "sk-qa" not in json.dumps(list(AuditEntry.objects.values_list("detail", flat=True)))


def test_rest_lists_it_by_pages_and_filters() -> None:
    AuditEntry.objects.bulk_create(
        AuditEntry(actor="ann", action="model_started", kind=kind, object_id=f"{number % 2}")
        for number in range(202)
        for kind in ("model", "pool")
    )
    api = rest("viewer")

    def get(query: str = "") -> Any:
        response = api.get(f"/api/v1/audit{query}")
        assert response.status_code == 200
        return response.json()

    pages = [get("?kind=model&id=1")]
    while cursor := pages[-1]["next"]:
        pages.append(get(f"?kind=model&id=1&cursor={cursor}"))

    assert [len(page["items"]) for page in pages] == [100, 1]
    assert pages[0]["items"][0] | {"at": ""} == {
        "at": "",
        "actor": "ann",
        "action": "model_started",
        "kind": "model",
        "id": "1",
        "detail": {},
    }
    assert len(get("?cursor=rubbish")["items"]) == 100
    assert get("?actor=nobody") == {"items": [], "next": None}
    assert get("?kind=%00&id=%00")["next"]


def test_admin_and_rest_write_the_same() -> None:
    services.register_model("mini", now=NOW, **HOSTED)
    User.objects.create(username="op", is_staff=True, is_superuser=True)
    browser = Client()
    browser.force_login(User.objects.get(username="op"))

    rest().post("/api/v1/models/mini/start")
    browser.post(
        "/admin/models_admin/modelconfig/",
        {"action": "stop", "_selected_action": ["mini"], "confirmed": "yes"},
    )

    assert written()[1:] == [
        ("a-operator", "model_started", "model", "mini"),
        ("op", "model_stopped", "model", "mini"),
    ]
    page = browser.get("/admin/models_admin/auditentry/?kind=model").content.decode()
    assert "model_stopped" in page
    assert browser.get("/admin/models_admin/auditentry/add/").status_code == 403
    one = AuditEntry.objects.first()
    assert one is not None
    address = f"/admin/models_admin/auditentry/{one.pk}/"
    assert 'name="_save"' not in browser.get(f"{address}change/").content.decode()
    assert browser.post(f"{address}delete/", {"post": "yes"}).status_code == 403


def test_the_list_can_be_narrowed_to_what_was_done_to_traffic_rules() -> None:
    services.register_model("mini", now=NOW, **HOSTED)
    traffic_rules.create({"name": "nights", "max_batches": 2})
    browser = Client()
    browser.force_login(User.objects.create(username="op", is_staff=True, is_superuser=True))

    everything = browser.get("/admin/models_admin/auditentry/").content.decode()
    address = re.search(r'href="(\?kind=traffic[^"]*)"', everything)
    assert address
    page = browser.get(f"/admin/models_admin/auditentry/{address[1]}").content.decode()

    assert "traffic_rule_created" in page
    assert "model_registered" not in page


def test_old_entries_are_erased(settings: Settings) -> None:
    settings.AIRS_KEEP_AUDIT = timedelta(days=2)
    for days in (1, 3):
        AuditEntry.objects.create(
            at=database_now() - timedelta(days=days),
            actor="ann",
            action="model_started",
            kind="model",
            object_id=f"{days}",
        )

    services.erase_old(database_now())

    assert list(AuditEntry.objects.values_list("object_id", flat=True)) == ["1"]
