"""Traffic rules as operators edit them: by service, REST and admin, audited."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.test import Client

from fulfillment.models import Role
from models_admin import traffic_rules
from models_admin.errors import InvalidFields
from models_admin.models import AuditEntry, TrafficRule
from tests.builders import Api

pytestmark = pytest.mark.django_db

LIST = "/admin/models_admin/trafficrule/"
HALF: dict[str, Any] = {"name": "tuning at night", "purpose": "tuning", "max_share": 0.5}


@pytest.fixture
def operator() -> Api:
    return Api("root", Role.OPERATOR)


def named(response: Any) -> list[tuple[str, str]]:
    assert response.status_code == 422, response.content
    return [(error["field"], error["code"]) for error in response.json()["errors"]]


def test_an_operator_adds_changes_and_deletes_a_rule(operator: Api) -> None:
    made = operator.post("/traffic-rules", HALF)
    again = operator.post("/traffic-rules", HALF)
    rule = made.json()
    address = f"/traffic-rules/{rule['id']}"
    changed = operator.patch(address, {"max_share": 0.25, "owner": "ann", "purpose": None})
    listed = operator.get("/traffic-rules").json()
    gone = operator.delete(address)

    assert (made.status_code, again.status_code, again.json()) == (201, 200, rule)
    assert made["Location"] == f"/api/v1{address}"
    assert rule == {
        "id": rule["id"], "position": 10, "name": "tuning at night", "enabled": True,
        "rater": None, "model": None, "priority_class": None, "trigger": None,
        "purpose": "tuning", "owner": None, "workflow": None, "min_load": 0.0,
        "max_share": 0.5, "max_batches": None, "block": False, "reason": "",
    }  # fmt: skip
    assert changed.json() == {**rule, "max_share": 0.25, "owner": "ann", "purpose": None}
    assert listed == {"items": [changed.json()], "next": None}
    assert (gone.status_code, operator.get(address).status_code) == (204, 404)
    entries = AuditEntry.objects.order_by("pk")
    assert [(e.action, e.actor, e.kind, e.object_id) for e in entries] == [
        (f"traffic_rule_{act}", "root", "traffic rule", "tuning at night")
        for act in ("created", "changed", "deleted")
    ]
    assert entries[1].detail == {
        "max_share": [0.5, 0.25], "owner": ["", "ann"], "purpose": ["tuning", ""],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"max_share": None}, [("max_share", "no_effect")]),
        ({"block": True}, [("block", "block_stands_alone")]),
        ({"max_share": 0}, [("max_share", "out_of_range")]),
        ({"max_share": 1.01}, [("max_share", "out_of_range")]),
        ({"max_share": "half"}, [("max_share", "bad_type")]),
        ({"max_batches": 0}, [("max_batches", "out_of_range")]),
        ({"max_batches": 10**12}, [("max_batches", "out_of_range")]),
        ({"min_load": -0.1}, [("min_load", "out_of_range")]),
        ({"position": -1}, [("position", "out_of_range")]),
        ({"priority_class": "urgent"}, [("priority_class", "bad_choice")]),
        ({"trigger": "robot"}, [("trigger", "bad_choice")]),
        ({"model": "nobody"}, [("model", "unknown_model")]),
        ({"rater": "a b"}, [("rater", "bad_id")]),
        ({"workflow": "wf/1"}, [("workflow", "bad_id")]),
        ({"owner": "a\nb"}, [("owner", "bad_text")]),
        ({"name": " "}, None),
        ({"name": 7}, [("name", "bad_type")]),
        ({"colour": "red"}, [("colour", "unknown_field")]),
    ],
)
def test_what_cannot_be_is_refused_at_its_field(
    operator: Api, fields: dict[str, Any], wrong: list[tuple[str, str]] | None
) -> None:
    found = named(operator.post("/traffic-rules", {**HALF, **fields}))

    assert found == wrong if wrong else [field for field, _ in found] == ["name"]
    assert not TrafficRule.objects.exists()


def test_a_name_is_that_of_one_rule(operator: Api) -> None:
    operator.post("/traffic-rules", HALF)

    other = operator.post("/traffic-rules", {**HALF, "max_share": 0.75})

    assert named(other) == [("name", "taken")]


def test_there_are_a_hundred_rules_at_most(operator: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_rules, "MOST_RULES", 1)
    operator.post("/traffic-rules", HALF)

    assert named(operator.post("/traffic-rules", {**HALF, "name": "n"})) == [
        ("name", "too_many_rules")
    ]


def test_a_rule_outlives_its_model_and_can_be_disabled() -> None:
    rule = TrafficRule.objects.create(position=1, name="n", model="gone", block=True)

    traffic_rules.change(rule.pk, {"enabled": False})

    with pytest.raises(InvalidFields):
        traffic_rules.change(rule.pk, {"model": "gone, too"})
    rule.refresh_from_db()
    assert (rule.enabled, rule.model) == (False, "gone")


def test_only_operators_write_and_everybody_with_a_token_reads(operator: Api) -> None:
    submitter = Api("ann")
    rule = operator.post("/traffic-rules", HALF).json()

    assert submitter.get("/traffic-rules").json()["items"] == [rule]
    for refused in (
        submitter.post("/traffic-rules", {**HALF, "name": "n"}),
        submitter.patch(f"/traffic-rules/{rule['id']}", {"enabled": False}),
        submitter.delete(f"/traffic-rules/{rule['id']}"),
    ):
        assert refused.status_code == 403
    assert TrafficRule.objects.get().enabled


@pytest.mark.parametrize("rule_id", ["1", "traffic_", "traffic_0", "traffic_٣", "rule_1"])
def test_what_is_no_rule_is_not_found(operator: Api, rule_id: str) -> None:
    assert operator.get(f"/traffic-rules/{rule_id}").status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"block": True, "max_share": 0.5},
        {},
        {"max_share": 0.0},
        {"max_share": float("nan")},
        {"max_batches": 0},
        {"block": True, "min_load": 2.0},
        {"block": True, "name": ""},
    ],
)
def test_the_database_says_so_too(fields: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        TrafficRule.objects.create(**{"position": 1, "name": "n", **fields})


FORM = {"position": "5", "name": "n", "enabled": "on", "min_load": "0.5", "max_batches": "2"}


def test_the_admin_calls_the_same_services(admin_client: Client, admin_user: User) -> None:
    added = admin_client.post(f"{LIST}add/", FORM)
    rule = TrafficRule.objects.get()
    listed = admin_client.get(LIST).content.decode()
    admin_client.post(f"{LIST}{rule.pk}/change/", {**FORM, "max_batches": "3"})
    admin_client.post(f"{LIST}{rule.pk}/delete/", {"post": "yes"})

    assert added.status_code == 302
    assert "at most 2 at a time from a load of 50% on" in listed
    assert [(e.action, e.actor) for e in AuditEntry.objects.order_by("pk")] == [
        (f"traffic_rule_{act}", admin_user.username) for act in ("created", "changed", "deleted")
    ]
    assert not TrafficRule.objects.exists()


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"max_batches": ""}, "max_share", "needs an effect"),
        ({"block": "on"}, "block", "stands alone"),
        ({"model": "nobody"}, "model", "none that exists"),
        ({"max_share": "2"}, "max_share", "above 0, up to 1"),
        ({"name": ""}, "name", "required"),
    ],
)
def test_the_admin_shows_errors_at_their_fields(
    admin_client: Client, fields: dict[str, str], field: str, words: str
) -> None:
    page = admin_client.post(f"{LIST}add/", {**FORM, **fields})

    assert page.status_code == 200
    errors = page.context["adminform"].form.errors
    assert list(errors) == [field]
    assert words in str(errors[field])
    assert not TrafficRule.objects.exists()
