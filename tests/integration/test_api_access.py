"""Tokens, roles, and how everything that goes wrong is answered."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import DisallowedHost
from django.core.management import call_command
from django.db import InterfaceError, OperationalError
from django.test import Client, RequestFactory
from pytest_django import Settings

from airs_site import problems
from fulfillment import intake, raters, tokens
from fulfillment.models import ApiToken
from tests import builders
from tests.builders import NOW, Api

pytestmark = pytest.mark.django_db

PROBLEM = "application/problem+json"


def get(path: str, **headers: str) -> Any:
    return Client(raise_request_exception=False).get(path, headers=headers)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "not_authenticated"),
        ("Bearer", "invalid_token"),
        ("Bearer ", "invalid_token"),
        ("Bearer nonsense", "invalid_token"),
        ("Basic YWRtaW46YWRtaW4=", "invalid_token"),
        ("Token {secret}", "invalid_token"),
        ("Bearer {secret}x", "invalid_token"),
        ("Bearer {secret} {secret}", "invalid_token"),
        ("Bearer sch\xfcl\xe4r", "invalid_token"),
    ],
)
def test_without_a_valid_token_everything_answers_401(header: str | None, code: str) -> None:
    secret = builders.token()
    headers = {"Authorization": header.format(secret=secret)} if header is not None else {}

    for path in ("workflows", "raters", "tokens", "models", "workflows/wf_1/ratings"):
        response = get(f"/api/v1/{path}", **headers)
        assert (response.status_code, response["Content-Type"]) == (401, PROBLEM), path
        assert response["WWW-Authenticate"].startswith("Bearer")
        assert response.json()["code"] == code


def test_a_token_works_until_it_expires() -> None:
    valid = builders.token(expires_at=NOW + timedelta(days=36_500))
    expired = builders.token(expires_at=NOW - timedelta(days=36_500))

    assert get("/api/v1/raters", Authorization=f"bearer {valid}").status_code == 200
    response = get("/api/v1/raters", Authorization=f"Bearer {expired}")
    assert (response.status_code, response.json()["code"]) == (401, "expired_token")


def test_only_the_digest_of_a_token_is_kept() -> None:
    secret = builders.token()

    (row,) = ApiToken.objects.values()

    assert secret not in str(row)
    assert row["hint"] == secret[-4:]
    assert row["digest"] == tokens.digest(secret)


def test_an_admin_issues_lists_and_revokes_tokens() -> None:
    admin = Api("root", "admin")

    issued = admin.post("/tokens", {"user": "carol", "role": "viewer", "expires_at": None})
    secret = issued.json()["secret"]
    listed = admin.get("/tokens").json()
    used = get("/api/v1/raters", Authorization=f"Bearer {secret}")
    revoked = admin.delete(f"/tokens/{issued.json()['id']}")
    refused = get("/api/v1/raters", Authorization=f"Bearer {secret}")
    again = admin.delete(f"/tokens/{issued.json()['id']}")

    assert issued.status_code == 201
    assert secret.startswith("airs_")
    assert [(t["user"], t["role"]) for t in listed["items"]] == [
        ("root", "admin"),
        ("carol", "viewer"),
    ]
    assert secret not in str(listed)
    assert (used.status_code, revoked.status_code, refused.status_code) == (200, 204, 401)
    assert again.status_code == 404


@pytest.mark.parametrize("role", ["viewer", "submitter", "operator"])
def test_nobody_else_touches_tokens(role: str) -> None:
    api = Api("bob", role)

    answers = [api.get("/tokens"), api.post("/tokens", {}), api.delete("/tokens/tok_1")]

    assert [(a.status_code, a.json()["code"]) for a in answers] == [(403, "forbidden")] * 3


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({"role": "viewer"}, "user", "missing_field"),
        ({"user": "", "role": "viewer"}, "user", "empty_field"),
        ({"user": "x", "role": "root"}, "role", "bad_choice"),
        ({"user": "x", "role": "admin", "expires_at": "soon"}, "expires_at", "bad_type"),
        (
            {"user": "x", "role": "admin", "expires_at": "2020-01-01T00:00:00Z"},
            "expires_at",
            "in_the_past",
        ),
        ({"user": "x", "role": "admin", "secret": "mine"}, "secret", "unknown_field"),
    ],
)
def test_a_token_that_cannot_be_is_refused(body: dict[str, Any], field: str, code: str) -> None:
    response = Api("root", "admin").post("/tokens", body)

    assert response.status_code == 422
    assert [(e["field"], e["code"]) for e in response.json()["errors"]] == [(field, code)]


# Raters over HTTP


@pytest.fixture
def operator(settings: Settings) -> Api:
    builders.use_plugins(settings)
    return Api("root", "operator")


FORM = {
    "id": "r1",
    "autorater": "stub",
    "model": builders.MODEL,
    "score_min": 0,
    "score_max": 4,
}


def test_an_operator_registers_shows_and_changes_a_rater(operator: Api) -> None:
    made = operator.post("/raters", FORM)
    same = operator.post("/raters", FORM)
    other = operator.post("/raters", {**FORM, "score_max": 5})
    changed = operator.patch("/raters/r1", {"score_max": 5, "batch_size": 6})
    listed = Api("bob", "viewer").get("/raters").json()
    versions = Api("bob", "viewer").get("/raters/r1/versions").json()

    assert (made.status_code, made["Location"]) == (201, "/api/v1/raters/r1")
    assert made.json() == {
        "id": "r1",
        "autorater": "stub",
        "model": builders.MODEL,
        "mode": "integrated",
        "key_level": "result",
        "freshness_s": 90 * 86_400,
        "deadline_s": 7_200,
        "max_qps": None,
        "batch_size": 12,
        "max_attempts": 8,
        "score_min": 0.0,
        "score_max": 4.0,
        "integer_scores": False,
        "prompt_template": "",
        "config": {},
        "version": 1,
        "paused": None,
        "windows": [],
        "created_at": made.json()["created_at"],
    }
    assert same.status_code == 200
    assert (other.status_code, other.json()["code"]) == (409, "rater_exists")
    assert (changed.json()["version"], changed.json()["batch_size"]) == (2, 6)
    assert listed == {"items": [changed.json()], "next": None}
    assert [(v["version"], v["current"]) for v in versions["items"]] == [(2, True), (1, False)]
    assert versions["items"][0]["spec"]["score_max"] == 5.0


def test_a_paused_rater_says_why_and_resumes_when_asked(operator: Api) -> None:
    operator.post("/raters", FORM)
    raters.pause(rater_id="r1", code="unauthorized", detail="the server said 401", now=NOW)

    paused = operator.get("/raters/r1").json()["paused"]
    resumed = operator.patch("/raters/r1", {"paused": False})
    by_hand = operator.patch("/raters/r1", {"paused": True})

    assert paused == {
        "code": "unauthorized",
        "detail": "the server said 401",
        "at": "2026-11-30T12:00:00Z",
    }
    assert resumed.json()["paused"] is None
    assert by_hand.json()["paused"]["code"] == "operator"


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"model": "nowhere"}, "model", "unknown_model"),
        ({"model_id": "x"}, "model_id", "unknown_field"),
        ({"score_min": "0"}, "score_min", "bad_type"),
        ({"score_min": 4}, "score_max", "out_of_range"),
        ({"mode": "both"}, "mode", "bad_choice"),
        ({"id": "a b"}, "id", "bad_id"),
        ({"id": "x" * 65}, "id", "field_too_long"),
        ({"config": [1]}, "config", "bad_type"),
        ({"batch_size": 61}, "batch_size", "out_of_range"),
        ({"integer_scores": "no"}, "integer_scores", "bad_type"),
        ({"max_qps": 0}, "max_qps", "out_of_range"),
    ],
)
def test_a_rater_that_cannot_work_is_refused(
    operator: Api, changes: dict[str, Any], field: str, code: str
) -> None:
    response = operator.post("/raters", {**FORM, **changes})

    assert response.status_code == 422
    assert [(e["field"], e["code"]) for e in response.json()["errors"]] == [(field, code)]
    assert response.json()["code"] == code


@pytest.mark.parametrize("role", ["viewer", "submitter"])
def test_only_operators_change_raters(operator: Api, role: str) -> None:
    operator.post("/raters", FORM)
    api = Api("bob", role)

    answers = [api.post("/raters", {**FORM, "id": "r2"}), api.patch("/raters/r1", {})]

    assert [a.status_code for a in answers] == [403, 403]


def test_an_unknown_rater_is_not_found(operator: Api) -> None:
    answers = [
        operator.get("/raters/nowhere"),
        operator.get("/raters/nowhere/versions"),
        operator.patch("/raters/nowhere", {"batch_size": 1}),
    ]

    assert [(a.status_code, a.json()["code"]) for a in answers] == [(404, "not_found")] * 3


# Problems


def test_a_problem_names_the_request() -> None:
    response = Api().get("/workflows/wf_1", X_Request_Id="abc-1")

    assert response.json() == {
        "type": "urn:airs:problem:not_found",
        "title": "Not Found",
        "status": 404,
        "detail": "There is no such workflow.",
        "code": "not_found",
        "instance": "abc-1",
    }
    assert response["X-Request-Id"] == "abc-1"


@pytest.mark.parametrize("path", ["/api/v1/nothing", "/api/nothing", "/api/v1/raters/a b"])
def test_an_unknown_address_is_a_problem_document(path: str) -> None:
    response = get(path)

    assert (response.status_code, response["Content-Type"]) == (404, PROBLEM)
    assert response.json()["code"] == "not_found"


def test_outside_the_api_an_unknown_address_is_a_page() -> None:
    assert get("/nothing")["Content-Type"].startswith("text/html")


def test_a_method_that_is_not_there_is_a_problem_document() -> None:
    response = Api().delete("/workflows")

    assert (response.status_code, response.json()["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("error", [OperationalError("secret host"), InterfaceError("secret host")])
def test_a_database_that_is_away_answers_503_with_retry_after(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    api = Api()

    def away(secret: str) -> None:
        raise error

    monkeypatch.setattr(tokens, "find", away)

    response = api.get("/workflows")

    assert (response.status_code, response["Content-Type"]) == (503, PROBLEM)
    assert int(response["Retry-After"]) >= 1
    assert "secret" not in response.content.decode()


def test_an_unexpected_error_tells_nothing_of_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api = Api()

    def fail(**_: Any) -> None:
        raise RuntimeError("secret internals")

    monkeypatch.setattr(intake, "create_empty", fail)

    response = api.post("/workflows", {"rater": "r"}, X_Request_Id="find-me")

    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert "secret" not in response.content.decode()
    assert response.json()["instance"] == "find-me"
    assert "secret internals" in caplog.text


def test_what_fails_before_a_view_is_a_problem_document_too() -> None:
    request = RequestFactory().get("/api/v1/workflows")
    page = RequestFactory().get("/admin/")

    answers = [
        problems.bad_request(request, DisallowedHost()),
        problems.permission_denied(request, PermissionError()),
        problems.page_not_found(request, ValueError()),
        problems.server_error(request),
    ]

    assert [(a.status_code, a["Content-Type"]) for a in answers] == [
        (status, PROBLEM) for status in (400, 403, 404, 500)
    ]
    assert problems.server_error(page)["Content-Type"].startswith("text/html")


def test_the_schema_is_made_without_a_warning(tmp_path: Path) -> None:
    call_command("spectacular", validate=True, fail_on_warn=True, file=str(tmp_path / "schema"))


def test_the_schema_is_valid_and_served_with_its_viewer() -> None:
    validator = pytest.importorskip("openapi_spec_validator")

    response = get("/api/schema?format=json")
    document = response.json()
    viewer = get("/api/docs")

    assert document["openapi"].startswith("3.1")
    validator.validate(document)
    paths = document["paths"]
    assert {"get", "post"} <= paths["/api/v1/workflows"].keys()
    assert {"get", "patch"} <= paths["/api/v1/raters/{rater_id}"].keys()
    upload = paths["/api/v1/workflows"]["post"]
    assert "application/x-ndjson" in upload["requestBody"]["content"]
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert viewer.status_code == 200
    assert "cdn" not in viewer.content.decode()
