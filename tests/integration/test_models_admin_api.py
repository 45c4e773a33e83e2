"""Pools and models through the REST API, as operators and others meet it."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from fulfillment import tokens
from models_admin import rebalancer, services
from models_admin.clock import database_now
from models_admin.models import (
    AuditEntry,
    ModelConfig,
    ModelServer,
    ModelVersion,
    RebalanceDecision,
    ReplicaSample,
)
from models_admin.policy.replicas import ServerState
from tests import demand_source
from tests.demand_source import SOURCE
from tests.fakes import Step, scripted

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = "sk-qa-0123456789abcdef"
NOBODY = "http://127.0.0.1:9"
"""An address where nobody answers: asking for a version fails at once."""

EXTERNAL: dict[str, Any] = {"id": "ext", "kind": "external", "url": NOBODY, "model_name": "m"}
HOSTED: dict[str, Any] = {"id": "mini", "kind": "hosted", "checkpoint": "tiny:0"}

Answer = tuple[int, Any]
Call = Callable[..., Answer]


def caller(role: str) -> Call:
    _, secret = tokens.issue(user=f"a-{role}", role=role, expires_at=None, now=NOW)
    client = Client(headers={"Authorization": f"Bearer {secret}"})

    def call(method: str, path: str, body: Any = None) -> Answer:
        response = client.generic(
            method,
            f"/api/v1/{path}",
            data=b"" if body is None else json.dumps(body).encode(),
            content_type="application/json",
        )
        return response.status_code, response.json() if response.content else None

    return call


@pytest.fixture
def api() -> Call:
    return caller("operator")


def places(answer: Answer) -> list[tuple[str, str]]:
    status, problem = answer
    assert status == 422, problem
    return [(error["field"], error["code"]) for error in problem["errors"]]


@contextmanager
def telling(body: bytes) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Run a server that answers all that is asked alike; gives its URL, and what it was asked."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


# Who may


@pytest.mark.parametrize("role", ["viewer", "submitter"])
def test_others_read_and_only_operators_write(role: str) -> None:
    call = caller(role)
    services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")

    assert call("GET", "models")[0] == call("GET", "models/mini")[0] == 200
    assert call("GET", "pools")[0] == 200
    for method, path in [
        ("POST", "models"),
        ("PATCH", "models/mini"),
        ("DELETE", "models/mini"),
        ("PATCH", "pools/box"),
        ("POST", "models/mini/start"),
        ("POST", "models/mini/stop"),
        ("POST", "models/mini/restart"),
        ("POST", "models/mini/resize"),
        ("POST", "pools"),
    ]:
        status, problem = call(method, path, {})
        assert (status, problem["code"]) == (403, "forbidden"), path


def test_without_a_token_nothing_is_told() -> None:
    response = Client().get("/api/v1/models")

    assert response.status_code == 401


# Pools


def test_a_pool_is_registered_once_and_shown(api: Call) -> None:
    pool = {"id": "box", "kind": "gpu", "devices": 2, "notes": "below the desk"}

    assert api("POST", "pools", pool)[0] == 201
    assert api("POST", "pools", pool)[0] == 200
    status, problem = api("POST", "pools", pool | {"devices": 3})
    assert (status, problem["code"]) == (409, "pool_exists")
    assert api("GET", "pools/box") == (
        200,
        pool | {"agent": "local", "devices_used": 0, "rebalancing": "off", "outlook": None},
    )
    assert [item["id"] for item in api("GET", "pools")[1]["items"]] == ["box"]
    assert api("GET", "pools/other")[0] == 404


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"devices": 0}, ("devices", "out_of_range")),
        ({"devices": True}, ("devices", "bad_type")),
        ({"devices": "2"}, ("devices", "bad_type")),
        ({"kind": "abacus"}, ("kind", "bad_choice")),
        ({"rebalancing": "sometimes"}, ("rebalancing", "bad_choice")),
        ({"id": "a b"}, ("id", "bad_id")),
        ({"colour": "red"}, ("colour", "unknown_field")),
    ],
)
def test_a_bad_pool_is_refused_by_field(
    api: Call, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert places(api("POST", "pools", {"id": "box", "kind": "cpu"} | fields)) == [expected]


def test_a_pool_changes_and_keeps_what_started_models_use(api: Call) -> None:
    api("POST", "pools", {"id": "box", "devices": 2})
    api("POST", "models", HOSTED | {"pool": "box", "devices_per_replica": 2})
    api("POST", "models/mini/start")

    assert places(api("PATCH", "pools/box", {"devices": 1})) == [("devices", "pool_too_small")]
    assert api("PATCH", "pools/box", {"devices": 5, "notes": "new"})[1]["devices"] == 5
    assert places(api("PATCH", "pools/box", {"id": "x"})) == [("id", "unknown_field")]
    assert api("PATCH", "pools/none", {"devices": 5})[0] == 404


def test_a_pool_is_removed_when_no_model_belongs_to_it(api: Call) -> None:
    api("POST", "pools", {"id": "box"})
    api("POST", "models", HOSTED | {"pool": "box"})

    status, problem = api("DELETE", "pools/box")
    api("DELETE", "models/mini")

    assert (status, problem["code"]) == (409, "pool_in_use")
    assert "mini" in problem["detail"]
    assert api("DELETE", "pools/box") == (204, None)
    assert api("DELETE", "pools/box")[0] == 404


def test_a_pool_is_rebalanced_when_an_operator_says_so(api: Call, settings: Settings) -> None:
    settings.AIRS_DEMAND = demand_source.NAME
    SOURCE.reset()
    api("POST", "pools", {"id": "box", "devices": 2})
    api("POST", "models", HOSTED | {"pool": "box"})
    api("POST", "models/mini/start")

    assert api("PATCH", "pools/box", {"rebalancing": "dry_run"})[1]["rebalancing"] == "dry_run"
    rebalancer.run_once(NOW)

    outlook = api("GET", "pools/box")[1]["outlook"]
    assert (outlook["at"], outlook["needs"]) == ("2026-01-01T00:00:00Z", {"mini": 0.0})
    assert outlook["reason"].endswith("nothing is worth a move")
    assert api("GET", "pools")[1]["items"][0]["outlook"] == outlook
    status, found = api("GET", "pools/box/decisions")
    assert (status, found["next"]) == (200, None)
    (decision,) = found["items"]
    assert decision | {"id": 0} == {
        "id": 0,
        "at": "2026-01-01T00:00:00Z",
        "mode": "dry_run",
        "outcome": "steady",
        "applied": False,
        "moves": [],
        "needs": {"mini": 0.0},
        "targets": decision["targets"],
        "reason": outlook["reason"],
        "signal_age_s": 30.0,
    }


def test_decisions_come_by_pages_the_newest_first(api: Call) -> None:
    api("POST", "pools", {"id": "box"})
    RebalanceDecision.objects.bulk_create(
        RebalanceDecision(
            pool_id=pool_id,
            at=NOW,
            mode="on",
            outcome="steady",
            applied=False,
            moves=[],
            needs={},
            targets={},
            reason=f"{number}",
        )
        for number in range(201)
        for pool_id in ("box", "other")
    )

    pages = [api("GET", "pools/box/decisions")[1]]
    while pages[-1]["next"]:
        pages.append(api("GET", f"pools/box/decisions?cursor={pages[-1]['next']}")[1])

    assert [len(page["items"]) for page in pages] == [100, 100, 1]
    reasons = [item["reason"] for page in pages for item in page["items"]]
    assert reasons == [str(number) for number in reversed(range(201))]
    assert len(api("GET", "pools/box/decisions?cursor=rubbish")[1]["items"]) == 100
    assert api("GET", "pools/none/decisions")[0] == 404


def test_a_resize_pins_for_an_hour_and_an_operator_may_pin_and_unpin(api: Call) -> None:
    api("POST", "models", HOSTED)
    fresh = api("GET", "models/mini")[1]
    resized = api("POST", "models/mini/resize", {"replicas": 0})[1]
    pinned = api("PATCH", "models/mini", {"pinned": True})[1]
    unpinned = api("PATCH", "models/mini", {"pinned": False})[1]

    assert (fresh["pinned"], fresh["pinned_until"], fresh["start_up_s"]) == (False, None, None)
    assert (resized["pinned"], resized["pinned_until"] > resized["updated_at"]) == (False, True)
    assert (pinned["pinned"], pinned["pinned_until"]) == (True, resized["pinned_until"])
    assert (unpinned["pinned"], unpinned["pinned_until"]) == (False, None)
    assert places(api("POST", "models", EXTERNAL | {"pinned": True})) == [("pinned", "not_allowed")]


def test_a_model_that_lacks_work_is_idle_not_starting(api: Call) -> None:
    api("POST", "models", HOSTED)
    api("POST", "models/mini/start")
    assert api("GET", "models/mini")[1]["state"] == "STARTING"

    assert api("POST", "models/mini/resize", {"replicas": 0})[1]["state"] == "IDLE"


# Registering models


def test_a_hosted_model_is_registered_with_its_version_and_defaults(api: Call) -> None:
    status, model = api("POST", "models", HOSTED)

    assert status == 201
    assert model["version"].startswith("tiny-0")
    assert (model["model_name"], model["loader"]) == ("mini", "bert_encoder")
    assert (model["state"], model["started"]) == ("STOPPED", False)
    assert model["replicas"] == {"min": 0, "default": 1, "max": 1, "wanted": 0, "ready": 0}
    assert (model["window"], model["timeout_s"]) == (16, 60.0)
    assert ModelVersion.objects.get().version == model["version"]


def test_an_external_model_need_not_be_up(api: Call) -> None:
    status, model = api("POST", "models", EXTERNAL | {"protocol": "openai", "model_name": "a/b:c"})

    assert status == 201
    assert (model["version"], model["state"], model["servers"]) == ("", None, [])
    assert api("GET", "models/ext/address")[1]["items"] == [
        {"key": "ext-ext", "url": NOBODY, "version": "", "window": 16, "managed": False}
    ]


def test_an_external_server_that_is_up_is_asked_for_its_version(api: Call) -> None:
    with telling(b'{"name": "m", "versions": ["7"]}') as (url, asked):
        _, model = api("POST", "models", EXTERNAL | {"url": f"{url}/base/", "api_key": KEY})

    assert model["version"] == "7"
    assert asked == [("/base/v2/models/m", f"Bearer {KEY}")]


def test_the_same_registration_again_changes_nothing_and_another_is_a_conflict(api: Call) -> None:
    body = EXTERNAL | {"api_key": KEY, "headers": {"X-A": "env:A"}}

    assert api("POST", "models", body)[0] == 201
    assert api("POST", "models", body)[0] == 200
    others: list[dict[str, Any]] = [
        {"api_key": KEY + "x"},
        {"headers": {"X-A": "b"}},
        {"timeout_s": 3},
    ]
    for change in others:
        status, problem = api("POST", "models", body | change)
        assert (status, problem["code"]) == (409, "model_exists")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"url": "ftp://host/x"}, ("url", "url_not_allowed")),
        ({"url": "http://"}, ("url", "url_not_allowed")),
        ({"url": "http://host:0"}, ("url", "url_not_allowed")),
        ({"url": "http://host:99999"}, ("url", "url_not_allowed")),
        ({"url": "http://u:p@host"}, ("url", "url_not_allowed")),
        ({"url": "http://host/?key=qa-url-key"}, ("url", "url_not_allowed")),
        ({"url": "http://ho st"}, ("url", "url_not_allowed")),
        ({"url": 5}, ("url", "bad_type")),
        ({"model_name": "../x"}, ("model_name", "path_not_allowed")),
        ({"model_name": ".hidden"}, ("model_name", "path_not_allowed")),
        ({"protocol": "soap"}, ("protocol", "bad_choice")),
        ({"timeout_s": 0}, ("timeout_s", "out_of_range")),
        ({"timeout_s": "60"}, ("timeout_s", "bad_type")),
        ({"max_concurrency": 0}, ("max_concurrency", "out_of_range")),
        ({"max_concurrency": 10**30}, ("max_concurrency", "out_of_range")),
        ({"sends_priority": 1}, ("sends_priority", "bad_type")),
        ({"checkpoint": "tiny:0"}, ("checkpoint", "not_allowed")),
        ({"pool": "box"}, ("pool", "not_allowed")),
        ({"api_key": "env:A-B"}, ("api_key", "bad_secret")),
        ({"api_key": "env:AIRS_SECRET_KEY"}, ("api_key", "bad_secret")),
        ({"api_key": "two\nlines"}, ("api_key", "bad_secret")),
        ({"headers": {"Host": "x"}}, ("headers", "bad_header")),
        ({"headers": {"a b": "x"}}, ("headers", "bad_header")),
        ({"headers": {"X-A": "x\r\nY: z"}}, ("headers.X-A", "bad_secret")),
        ({"headers": {"X-A": 1}}, ("headers.X-A", "bad_type")),
        ({"id": "a/b"}, ("id", "bad_id")),
        ({"colour": 1}, ("colour", "unknown_field")),
        ({"kind": "rented"}, ("kind", "bad_choice")),
    ],
)
def test_what_cannot_work_is_refused_by_field(
    api: Call, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    answer = api("POST", "models", EXTERNAL | fields)

    assert places(answer) == [expected]
    assert "qa-url-key" not in json.dumps(answer[1])
    assert not ModelConfig.objects.exists()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"checkpoint": "../x"}, ("checkpoint", "path_not_allowed")),
        ({"checkpoint": "a\0b"}, ("checkpoint", "path_not_allowed")),
        ({"checkpoint": ""}, ("checkpoint", "path_not_allowed")),
        ({"checkpoint": "nothing"}, ("checkpoint", "checkpoint_not_found")),
        ({"checkpoint": ["tiny:0"]}, ("checkpoint", "bad_type")),
        ({"url": NOBODY}, ("url", "not_allowed")),
        ({"protocol": "openai"}, ("protocol", "bad_choice")),
        ({"loader": "pickle"}, ("loader", "bad_choice")),
        ({"pool": "none"}, ("pool", "unknown_pool")),
        ({"pool": "box", "devices_per_replica": 3}, ("pool", "pool_too_small")),
        ({"replicas": {"min": 2}}, ("replicas.default", "out_of_range")),
        ({"replicas": {"max": 0}}, ("replicas.max", "out_of_range")),
        ({"replicas": {"most": 1}}, ("replicas.most", "unknown_field")),
        ({"replicas": {"min": "1"}}, ("replicas.min", "bad_type")),
        ({"serving": {"--exec": "x"}}, ("serving", "bad_option")),
        ({"serving": {"max_queue": "1; rm"}}, ("serving", "bad_option")),
        ({"serving": {"max_queue": 10, "headroom": 10}}, ("serving", "bad_option")),
        ({"serving": {"dtype": "f64"}}, ("serving", "bad_option")),
        ({"serving": {"lengths": [128, 64]}}, ("serving", "bad_option")),
        ({"serving": {"lengths": 64}}, ("serving", "bad_option")),
        ({"serving": {"batch_tokens": 0}}, ("serving", "bad_option")),
        ({"serving": []}, ("serving", "bad_type")),
    ],
)
def test_what_cannot_be_hosted_is_refused_by_field(
    api: Call, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    api("POST", "pools", {"id": "box", "devices": 2})

    assert expected in places(api("POST", "models", HOSTED | fields))
    assert not ModelConfig.objects.exists()


def test_a_lone_problem_lends_its_code_to_the_answer(api: Call) -> None:
    _, problem = api("POST", "models", HOSTED | {"checkpoint": "/etc/passwd"})

    assert problem["code"] == "path_not_allowed"


def test_a_hosted_model_needs_a_checkpoint(api: Call) -> None:
    assert places(api("POST", "models", {"id": "m", "kind": "hosted"})) == [
        ("checkpoint", "missing_field")
    ]


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"[]", b'"x"', b"\xff"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    _, secret = tokens.issue(user="op", role="operator", expires_at=None, now=NOW)

    response = Client(headers={"Authorization": f"Bearer {secret}"}).post(
        "/api/v1/models", data=body, content_type="application/json"
    )

    assert response.status_code in {400, 422}
    assert response["Content-Type"] == "application/problem+json"


# Secrets


def test_secrets_are_sealed_at_rest_and_shown_by_their_last_characters(
    api: Call, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = EXTERNAL | {"api_key": KEY, "headers": {"X-Key": KEY, "X-Env": "env:TEAM", "X-S": "abc"}}

    answers = [
        api("POST", "models", body),
        api("GET", "models/ext"),
        api("GET", "models"),
        api("PATCH", "models/ext", {"timeout_s": 5}),
        api("PATCH", "models/ext", {"api_key": KEY, "url": "http://u:p@x"}),
        api("POST", "models", body | {"timeout_s": 7}),
    ]

    with connection.cursor() as cursor:
        cursor.execute("SELECT row_to_json(m)::text FROM models_admin_modelconfig m")
        (stored,) = cursor.fetchone()
    for text in [stored, json.dumps(answers), caplog.text]:
        assert KEY not in text
    assert answers[1][1]["api_key"] == "…cdef"
    assert answers[1][1]["headers"] == {"X-Key": "…cdef", "X-Env": "env:TEAM", "X-S": "…"}
    assert ModelConfig.objects.get().headers["X-Env"] == "env:TEAM"


def test_a_secret_stays_until_it_is_replaced_or_removed(api: Call) -> None:
    api("POST", "models", EXTERNAL | {"api_key": KEY})

    assert api("PATCH", "models/ext", {"timeout_s": 5})[1]["api_key"] == "…cdef"
    assert api("PATCH", "models/ext", {"api_key": "env:OTHER"})[1]["api_key"] == "env:OTHER"
    assert api("PATCH", "models/ext", {"api_key": None})[1]["api_key"] is None


# Changing and operating


def test_settings_change_and_the_rest_stays(api: Call) -> None:
    before = api("POST", "models", HOSTED)[1]

    status, after = api("PATCH", "models/mini", {"window": 4, "replicas": {"max": 3}})

    assert status == 200
    assert (after["window"], after["window_now"], after["replicas"]["max"]) == (4, 4, 3)
    same = before.keys() - {"window", "window_now", "replicas", "updated_at"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


@pytest.mark.parametrize("field", ["id", "kind", "started", "restart_generation"])
def test_some_fields_never_change(api: Call, field: str) -> None:
    api("POST", "models", HOSTED)

    assert places(api("PATCH", "models/mini", {field: "x"})) == [(field, "unknown_field")]


@pytest.mark.parametrize("change", [{"timeout_s": 9}, {"url": NOBODY + "/other"}, {"version": ""}])
def test_an_external_model_keeps_its_version_until_another_one_is_known(
    api: Call, change: dict[str, Any]
) -> None:
    api("POST", "models", EXTERNAL)
    api("PATCH", "models/ext", {"version": "7"})

    assert api("PATCH", "models/ext", change)[1]["version"] == "7"


def test_start_stop_and_resize_say_what_is_wanted(api: Call) -> None:
    api("POST", "models", HOSTED | {"replicas": {"max": 3}})

    status, started = api("POST", "models/mini/start")
    assert (status, started["state"], started["replicas"]["wanted"]) == (202, "STARTING", 1)
    assert api("POST", "models/mini/start")[0] == 202
    assert api("POST", "models/mini/resize", {"replicas": 3})[1]["replicas"]["wanted"] == 3
    assert api("POST", "models/mini/stop")[1]["replicas"]["wanted"] == 0
    assert api("POST", "models/mini/start")[1]["replicas"]["wanted"] == 3


def test_restart_needs_a_started_model(api: Call) -> None:
    api("POST", "models", HOSTED)

    status, problem = api("POST", "models/mini/restart")
    api("POST", "models/mini/start")

    assert (status, problem["code"]) == (409, "not_started")
    assert api("POST", "models/mini/restart")[0] == 202
    assert ModelConfig.objects.get().restart_generation == 1


@pytest.mark.parametrize("replicas", [-1, 3, True, "1", None])
def test_a_size_out_of_bounds_is_refused(api: Call, replicas: Any) -> None:
    api("POST", "models", HOSTED | {"replicas": {"max": 2}})

    (place,) = places(api("POST", "models/mini/resize", {"replicas": replicas}))

    assert place[0] == "replicas"


@pytest.mark.parametrize("act", ["start", "stop", "restart"])
def test_an_external_model_is_not_ours_to_run(api: Call, act: str) -> None:
    api("POST", "models", EXTERNAL)

    status, problem = api("POST", f"models/ext/{act}")

    assert (status, problem["code"]) == (409, "not_hosted")
    assert api("POST", f"models/none/{act}")[0] == 404


def test_a_model_is_removed_when_it_is_stopped(api: Call) -> None:
    api("POST", "models", HOSTED)
    api("POST", "models/mini/start")

    assert api("DELETE", "models/mini")[0] == 409
    api("POST", "models/mini/stop")
    assert api("DELETE", "models/mini")[0] == 204
    assert api("GET", "models/mini")[0] == api("DELETE", "models/mini")[0] == 404


def test_a_pool_has_room_for_so_many_replicas_only(api: Call) -> None:
    api("POST", "pools", {"id": "box", "devices": 3})
    two = HOSTED | {"pool": "box", "devices_per_replica": 2, "replicas": {"max": 2}}
    api("POST", "models", two | {"id": "first"})
    api("POST", "models", two | {"id": "second"})

    api("POST", "models/first/start")
    refused = [
        api("POST", "models/second/start"),
        api("POST", "models/first/resize", {"replicas": 2}),
        api("PATCH", "models/first", {"devices_per_replica": 4}),
    ]

    assert [(status, problem["code"]) for status, problem in refused[:2]] == [
        (409, "pool_full"),
        (409, "pool_full"),
    ]
    assert refused[2][0] == 422
    assert api("GET", "pools/box")[1]["devices_used"] == 2
    api("POST", "models/first/stop")
    assert api("POST", "models/second/start")[0] == 202


def test_a_model_shows_its_replicas_and_the_list_costs_the_same_for_many(api: Call) -> None:
    for number in range(5):
        api("POST", "models", HOSTED | {"id": f"m{number}"})
        ModelServer.objects.create(
            model_id=f"m{number}",
            agent="local",
            ordinal=0,
            state=ServerState.READY,
            address="http://127.0.0.1:1",
            ready_at=NOW,
            heartbeat_at=NOW,
        )
    ModelConfig.objects.update(started=True)

    with CaptureQueriesContext(connection) as queries:
        _, found = api("GET", "models")

    assert [model["id"] for model in found["items"]] == [f"m{number}" for number in range(5)]
    assert found["next"] is None
    assert {model["state"] for model in found["items"]} == {"READY"}
    assert found["items"][0]["servers"][0]["state"] == "READY"
    assert len(queries) <= 4


def test_pools_say_what_is_used_of_them_and_the_list_costs_the_same_for_many(api: Call) -> None:
    for number in range(5):
        api("POST", "pools", {"id": f"p{number}", "kind": "cpu", "devices": 8})
        for model_id in ("a", "b"):
            hosted = {"id": f"{model_id}{number}", "pool": f"p{number}", "devices_per_replica": 2}
            api("POST", "models", HOSTED | hosted)
    api("POST", "models/a0/start")
    api("POST", "models/b0/start")
    api("POST", "models/a1/start")

    with CaptureQueriesContext(connection) as queries:
        _, found = api("GET", "pools")

    assert [pool["devices_used"] for pool in found["items"]] == [4, 2, 0, 0, 0]
    assert api("GET", "pools/p0")[1]["devices_used"] == 4
    assert len(queries) <= 2


def test_the_schema_describes_these_calls() -> None:
    schema = Client().get("/api/schema?format=json").json()

    assert "/api/v1/models/{model_id}/resize" in schema["paths"]
    form = schema["components"]["schemas"]["ModelForm"]["properties"]
    assert form["api_key"]["writeOnly"]


def test_the_versions_that_were_seen_of_a_model_are_listed(api: Call) -> None:
    api("POST", "models", HOSTED)
    api("PATCH", "models/mini", {"checkpoint": "tiny:1"})

    status, found = api("GET", "models/mini/versions")

    assert (status, found["next"]) == (200, None)
    assert [item["checkpoint"] for item in found["items"]] == ["tiny:1", "tiny:0"]
    assert api("GET", "models/none/versions")[0] == 404


def test_an_old_version_is_retired_and_the_one_that_is_served_is_not(api: Call) -> None:
    _, model = api("POST", "models", HOSTED)
    ModelVersion.objects.create(
        model_id="mini", version="old", checkpoint="tiny:9", state="retiring", first_seen_at=NOW
    )

    status, retired = api("POST", "models/mini/versions/old/retire")
    again, _ = api("POST", "models/mini/versions/old/retire")
    refused, problem = api("POST", f"models/mini/versions/{model['version']}/retire")

    assert (status, again, retired["version"]) == (200, 200, "old")
    assert "operator" in retired["reason"]
    assert (refused, problem["code"]) == (409, "version_serving")
    assert api("POST", "models/mini/versions/none/retire")[0] == 404
    acts = AuditEntry.objects.filter(action="model_version_retired")
    assert [act.detail for act in acts] == [{"version": "old"}]


def test_a_replica_says_how_busy_it_was_since_it_was_ready(api: Call) -> None:
    api("POST", "models", HOSTED)
    model = ModelConfig.objects.get()
    for ordinal, heartbeat_at in enumerate([NOW + timedelta(seconds=100), None]):
        ModelServer.objects.create(
            model=model, agent="local", ordinal=ordinal, ready_at=NOW, busy_seconds=42.0,
            heartbeat_at=heartbeat_at, host="box-1", devices=[0, 3], log_tail="loaded", starts=3,
        )  # fmt: skip

    now = database_now()
    for at, busy_s in ((now, 6.0), (now, 9.0), (now - timedelta(minutes=61), 30.0)):
        ReplicaSample.objects.create(
            at=at, agent="local", model_id="mini", ordinal=0, busy_s=busy_s, lived_s=30.0
        )

    servers = api("GET", "models/mini")[1]["servers"]

    assert [server["busy_share"] for server in servers] == [0.42, None]
    told = ("host", "devices", "restarts", "log_tail", "busy_share_hour")
    assert [servers[0][name] for name in told] == ["box-1", [0, 3], 2, "loaded", 0.25]
    assert servers[1]["busy_share_hour"] is None
    assert "log_tail" not in api("GET", "models")[1]["items"][0]["servers"][0]


def test_a_bad_option_is_named_with_what_it_takes_and_what_to_do(api: Call) -> None:
    serving = {"dtype": "f64", "lengths": [128, 64], "exec": "rm"}

    _, problem = api("POST", "models", HOSTED | {"serving": serving})

    said = " | ".join(error["detail"] for error in problem["errors"])
    assert "dtype is one of auto, f32, bf16" in said
    assert "lengths is a list of 1 to 64 rising whole numbers" in said
    assert "leave it out for the default" in said
    assert "no option 'exec': the options are batch_tokens" in said


def test_what_moves_a_score_is_part_of_the_version(api: Call) -> None:
    options = {"dtype": "bf16", "lengths": [32, 64]}
    _, plain = api("POST", "models", HOSTED)
    _, other = api("POST", "models", HOSTED | {"id": "two", "serving": options})
    _, changed = api("PATCH", "models/mini", {"serving": options})
    _, queue = api("PATCH", "models/mini", {"serving": options | {"max_queue": 7}})

    assert len({plain["version"], other["version"]}) == 2
    assert changed["version"] == queue["version"] == other["version"]


def test_loaders_are_those_that_are_installed(api: Call) -> None:
    (error,) = api("POST", "models", HOSTED | {"loader": "gpt9"})[1]["errors"]

    assert (error["field"], error["code"]) == ("loader", "bad_choice")
    assert "bert_encoder" in error["detail"]
    assert "airs.loaders" in error["detail"]


def test_files_are_looked_at_when_a_model_is_registered_and_changed(
    api: Call, settings: Settings, tmp_path: Path
) -> None:
    settings.AIRS_CHECKPOINT_ROOT = tmp_path
    (entry,) = entry_points(group="airs.loaders", name="bert_encoder")
    for folder in ("good", "short"):
        (tmp_path / folder).mkdir()
        for name, content in entry.load()().random(0).items():
            (tmp_path / folder / name).write_bytes(content)
    weights = tmp_path / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])

    good = api("POST", "models", HOSTED | {"checkpoint": "good"})
    short = api("POST", "models", HOSTED | {"id": "two", "checkpoint": "short"})
    changed = api("PATCH", "models/mini", {"checkpoint": "short"})
    other = api("PATCH", "models/mini", {"loader": "decoder_score"})

    assert good[0] == 201, good
    assert places(short) == places(changed) == [("checkpoint", "checkpoint_unreadable")]
    assert "bytes" in short[1]["errors"][0]["detail"]
    assert places(other) == [("checkpoint", "unknown_architecture")]
    assert ModelConfig.objects.get().checkpoint == "good"


# What an external server answers when it is registered


@pytest.mark.parametrize(
    ("protocol", "step"),
    [
        ("oip", Step(body=b"<html>Welcome to nginx!</html>")),
        ("oip", Step(body=b'["a list"]')),
        ("oip", Step(status=302, headers={"Location": "http://127.0.0.1:9/login"})),
    ],
)
def test_what_no_server_of_the_protocol_answers_is_refused(
    api: Call, protocol: str, step: Step
) -> None:
    with scripted(step) as server:
        model = EXTERNAL | {"url": server.url, "protocol": protocol}
        answer = api("POST", "models", model)

    assert places(answer) == [("url", "wrong_answer")]
    assert "HTTP 200" in (said := answer[1]["errors"][0]["detail"]) or "HTTP 302" in said
    assert "nginx" not in said
    assert not ModelConfig.objects.exists()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step(status=401), "refuses the key (HTTP 401)"),
        (Step(status=404), "no /v2/models/m (HTTP 404)"),
        (Step(status=503), "HTTP 503"),
        (Step(reset=True), "nobody gives a whole answer"),
    ],
)
def test_what_may_be_right_all_the_same_is_a_warning(api: Call, step: Step, said: str) -> None:
    with scripted(step) as server:
        status, model = api("POST", "models", EXTERNAL | {"url": server.url})
        _, changed = api("PATCH", "models/ext", {"timeout_s": 5.0})

    assert status == 201
    (warning,) = model["warnings"]
    assert said.lower() in warning.lower()
    assert changed["warnings"] == []


def test_a_chat_server_is_asked_for_its_models(api: Call) -> None:
    with telling(b'{"object": "list", "data": [{"id": "other"}]}') as (url, asked):
        chat = EXTERNAL | {"protocol": "openai", "url": f"{url}/v1"}
        _, unlisted = api("POST", "models", chat)
        _, listed = api("POST", "models", chat | {"id": "two", "model_name": "other"})

    assert asked == [("/v1/models", None)] * 2
    assert unlisted["warnings"] == ["The server lists 1 models, none named as model_name says."]
    assert listed["warnings"] == []
