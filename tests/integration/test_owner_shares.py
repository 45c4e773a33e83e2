"""Weights of owners: by API and admin, and as the dispatcher reads them."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from fulfillment import bell, owner_shares
from fulfillment.models import OwnerShare, Role
from fulfillment.policy.lifecycle import WorkflowState
from tests import builders
from tests.builders import Api

pytestmark = pytest.mark.django_db

LIST = "/admin/fulfillment/ownershare/"


@pytest.fixture
def operator() -> Api:
    return Api("root", Role.OPERATOR)


def test_only_weights_that_differ_are_read_in_one_statement() -> None:
    for owner, weight in (("ann", 2.0), ("bob", 1.0), ("cem", 0.5)):
        owner_shares.put(OwnerShare(owner=owner, weight=weight))

    with CaptureQueriesContext(connection) as captured:
        weights = owner_shares.weights()

    assert weights == {"ann": 2.0, "cem": 0.5}
    assert len(captured) == 1


def test_an_operator_gives_and_takes_a_share(
    operator: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="fulfillment.owner_shares"):
        first = operator.put("/owners/ann/share", {"weight": 2, "note": "launch week"})
        second = operator.put("/owners/ann/share", {"weight": 0.5})
        gone = operator.delete("/owners/ann/share")
        again = operator.delete("/owners/ann/share")

    shown = {"owner": "ann", "unfinished_workflows": 0}
    assert first.json() == {**shown, "weight": 2.0, "note": "launch week"}
    assert second.json() == {**shown, "weight": 0.5, "note": ""}
    assert (gone.status_code, again.status_code) == (204, 404)
    assert owner_shares.weights() == {}
    assert [m for m in caplog.messages if m.startswith("owner_share")] == [
        "owner_share_put owner='ann' weight=2 by=root",
        "owner_share_put owner='ann' weight=0.5 by=root",
        "owner_share_removed owner='ann' by=root",
    ]


def test_an_owner_may_have_any_name_that_a_token_may_have(operator: Api) -> None:
    response = operator.put("/owners/team%2Fann%40corp.example/share", {"weight": 3})

    assert response.json()["owner"] == "team/ann@corp.example"
    assert owner_shares.weights() == {"team/ann@corp.example": 3.0}


def test_owners_with_a_share_or_with_work_are_listed(operator: Api) -> None:
    builders.workflow(owner="ann")
    builders.workflow(owner="ann", state=WorkflowState.OPEN)
    builders.workflow(owner="old", state=WorkflowState.COMPLETED)
    owner_shares.put(OwnerShare(owner="bob", weight=2.0, note="n"))

    listed = operator.get("/owners").json()

    assert listed == {
        "items": [
            {"owner": "ann", "weight": 1.0, "note": "", "unfinished_workflows": 2},
            {"owner": "bob", "weight": 2.0, "note": "n", "unfinished_workflows": 0},
        ],
        "next": None,
    }


def test_others_than_operators_see_themselves_and_change_nothing() -> None:
    owner_shares.put(OwnerShare(owner="ann", weight=2.0))
    builders.workflow(owner="bob")
    bob = Api("bob")

    changed = [bob.put("/owners/bob/share", {"weight": 9}), bob.delete("/owners/ann/share")]

    assert [item["owner"] for item in bob.get("/owners").json()["items"]] == ["bob"]
    assert [a.status_code for a in changed] == [403, 403]
    assert owner_shares.weights() == {"ann": 2.0}


@pytest.mark.parametrize(
    ("owner", "body", "field", "code"),
    [
        ("ann", {}, "weight", "missing_field"),
        ("ann", {"weight": 0}, "weight", "out_of_range"),
        ("ann", {"weight": -1}, "weight", "out_of_range"),
        ("ann", {"weight": 101}, "weight", "out_of_range"),
        ("ann", {"weight": "2"}, "weight", "bad_type"),
        ("ann", {"weight": 2, "owner": "bob"}, "owner", "unknown_field"),
        ("a" * 151, {"weight": 2}, "owner", "bad_id"),
        ("a%00", {"weight": 2}, "owner", "bad_id"),
    ],
)
def test_a_share_that_cannot_be_is_refused(
    operator: Api, owner: str, body: dict[str, Any], field: str, code: str
) -> None:
    response = operator.put(f"/owners/{owner}/share", body)

    assert response.status_code == 422, response.content
    assert [(e["field"], e["code"]) for e in response.json()["errors"]] == [(field, code)]


@pytest.mark.parametrize("weight", [0.0, -1.0, 101.0, float("nan"), float("inf")])
def test_the_database_refuses_a_weight_that_is_none(weight: float) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        OwnerShare.objects.create(owner="ann", weight=weight)


def test_the_dispatcher_is_woken_by_a_new_share(
    operator: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[None] = []
    monkeypatch.setattr(bell, "ring", lambda: rung.append(None))

    operator.put("/owners/ann/share", {"weight": 2})
    operator.delete("/owners/ann/share")

    assert len(rung) == 2


def test_a_share_is_edited_in_the_admin(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))

    with caplog.at_level("INFO", logger="fulfillment.owner_shares"):
        client.post(f"{LIST}add/", {"owner": "ann", "weight": "2", "note": "n"})
        client.post(f"{LIST}ann/change/", {"weight": "3", "note": "n"})
        weights = dict(owner_shares.weights())
        refused = client.post(f"{LIST}ann/change/", {"weight": "0"}).content.decode()
        client.post(f"{LIST}ann/delete/", {"post": "yes"})

    assert weights == {"ann": 3.0}
    assert "greater than or equal to 0.01" in refused
    assert owner_shares.weights() == {}
    assert [m.rpartition(" ")[2] for m in caplog.messages] == ["by=root"] * 3
