import json
from datetime import timedelta
from typing import Any

import orjson
import pytest
from pytest_django import Settings

from fulfillment import documents, forecast, raters
from fulfillment.clock import database_now
from fulfillment.models import BatchPayload, Rater, RatingRequest, Upload, Workflow
from fulfillment.policy.lifecycle import RequestState, WorkflowState
from tests import builders
from tests.builders import MODEL, NOW, Api

RATER = builders.RATER


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


def created(api: Api, **fields: Any) -> dict[str, Any]:
    response = api.post("/workflows", {"rater": RATER, **fields})
    assert response.status_code == 202, response.content
    document: dict[str, Any] = response.json()
    return document


def places(response: Any) -> list[tuple[str, str]]:
    return [(e["field"], e["code"]) for e in response.json()["errors"]]


def test_a_json_workflow_with_requests_is_taken_and_closed() -> None:
    api = Api()
    fields = {
        "rater": RATER,
        "name": "tuning <1>",
        "priority": 80,
        "trigger": "automatic",
        "purpose": "launch",
        "batch_size": 2,
        "deadline_s": 600,
        "max_duration_s": 900,
        "complete_when": 0.5,
        "cache": {"max_age_s": 60, "bypass": True, "no_store": True},
        "requests": [builders.row(1), builders.row(2), {"query": "alias"}],
    }

    response = api.post("/workflows", fields)

    assert response.status_code == 202
    document = response.json()
    address = f"/api/v1/workflows/{document['id']}"
    assert response["Location"] == address
    assert document["links"]["self"] == address
    assert {name: document[name] for name in ("accepted", "hits", "coalesced", "pending")} == {
        "accepted": 3,
        "hits": 0,
        "coalesced": 0,
        "pending": 3,
    }
    assert (document["rejected"], document["warnings"]) == ([], [])
    assert document["state"] == "RUNNING"
    assert document["counts"]["total"] == document["counts"]["pending"] == 3
    assert document["rater_version"] == f"{RATER}@1"
    workflow = Workflow.objects.get()
    assert (workflow.owner, workflow.name, workflow.priority) == ("alice", "tuning <1>", 80)
    assert (workflow.trigger, workflow.purpose, workflow.batch_size) == ("automatic", "launch", 2)
    assert workflow.deadline_at - workflow.created_at == timedelta(seconds=600)
    assert workflow.ends_at - workflow.created_at == timedelta(seconds=900)
    assert (workflow.complete_when, workflow.max_age_s) == (0.5, 60)
    assert (workflow.bypass, workflow.no_store) == (True, True)
    assert list(RatingRequest.objects.order_by("id").values_list("request_id", flat=True)) == [
        "r1",
        "r2",
        "row-3",
    ]


def test_an_ndjson_file_makes_the_same_workflow_as_json() -> None:
    api = Api()
    query = (
        f"rater={RATER}&name=tuning&priority=80&trigger=automatic&purpose=launch&batch_size=2"
        "&deadline_s=600&max_duration_s=900&complete_when=0.5&max_age_s=60&bypass=true"
    )
    by_json = created(
        api,
        name="tuning",
        priority=80,
        trigger="automatic",
        purpose="launch",
        batch_size=2,
        deadline_s=600,
        max_duration_s=900,
        complete_when=0.5,
        cache={"max_age_s": 60, "bypass": True},
        requests=[builders.row(1)],
    )

    response = api.upload(f"/workflows?{query}", [builders.row(1)])

    assert response.status_code == 202
    by_file = response.json()
    different = {
        "id", "links", "created_at", "closed_at", "deadline_at", "ends_at", "started_at",
        "timeline",
    }  # fmt: skip
    assert {n: v for n, v in by_file.items() if n not in different} == {
        n: v for n, v in by_json.items() if n not in different
    }
    assert by_file["state"] == "RUNNING"
    one, other = RatingRequest.objects.values_list("fingerprint", flat=True)
    assert one == other


def test_a_workflow_without_requests_stays_open_and_takes_rows_until_it_is_closed() -> None:
    api = Api()
    workflow_id = created(api)["id"]

    by_file = api.upload(f"/workflows/{workflow_id}/requests", [builders.row(1)])
    by_list = api.post(f"/workflows/{workflow_id}/requests", [builders.row(2), {"query": "x"}])
    by_object = api.post(
        f"/workflows/{workflow_id}/requests", {"requests": [builders.row(4), builders.row(1)]}
    )
    open_ = api.get(f"/workflows/{workflow_id}").json()
    closed = api.post(f"/workflows/{workflow_id}/close")
    late = api.post(f"/workflows/{workflow_id}/requests", [builders.row(5)])

    assert by_file.json()["accepted"] == 1
    assert by_list.json()["accepted"] == 2
    assert by_object.status_code == 200
    assert by_object.json()["accepted"] == 1
    (refused,) = by_object.json()["rejected"]
    assert (refused["line"], refused["code"]) == (2, "duplicate_request_id")
    assert (open_["state"], open_["counts"]["total"]) == ("OPEN", 4)
    assert (closed.status_code, closed.json()["state"]) == (200, "RUNNING")
    assert (late.status_code, late.json()["code"]) == (409, "workflow_not_open")


def test_requests_with_close_false_leave_the_workflow_open() -> None:
    api = Api()

    by_json = created(api, requests=[builders.row()], close=False)
    by_file = api.upload(f"/workflows?rater={RATER}&close=false", [builders.row()]).json()

    assert (by_json["state"], by_file["state"]) == ("OPEN", "OPEN")


@pytest.mark.parametrize("body", [{"requests": []}, {"close": True}, {"requests": [], "name": "n"}])
def test_a_workflow_that_would_rate_nothing_is_refused(body: dict[str, Any]) -> None:
    response = Api().post("/workflows", {"rater": RATER, **body})

    assert (response.status_code, response.json()["code"]) == (422, "empty_file")
    assert not Workflow.objects.exists()


def test_cancel_ends_a_workflow_and_says_the_same_again() -> None:
    api = Api()
    workflow_id = created(api, requests=[builders.row(1), builders.row(2)])["id"]

    first = api.post(f"/workflows/{workflow_id}/cancel")
    second = api.post(f"/workflows/{workflow_id}/cancel")

    assert (first.status_code, first.json()["state"]) == (200, "CANCELLED")
    assert first.json()["counts"]["cancelled"] == 2
    assert (second.status_code, second.json()["state"]) == (200, "CANCELLED")
    records = builders.records(api.get(f"/workflows/{workflow_id}/ratings"))
    assert [(r["state"], r["score"]) for r in records] == [("CANCELLED", None)] * 2


def test_cancelling_what_has_ended_is_a_conflict() -> None:
    done = builders.workflow(state=WorkflowState.COMPLETED, owner="alice")

    response = Api().post(f"/workflows/{done.public_id}/cancel")

    assert (response.status_code, response.json()["code"]) == (409, "already_finished")


# What is refused


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rater": None}, ("rater", "missing_field")),
        ({"rater": 1}, ("rater", "bad_type")),
        ({"rater": "no such"}, ("rater", "bad_id")),
        ({"rater": "unknown"}, ("rater", "unknown_rater")),
        ({"priority": 101}, ("priority", "out_of_range")),
        ({"priority": -1}, ("priority", "out_of_range")),
        ({"priority": "50"}, ("priority", "bad_type")),
        ({"priority": True}, ("priority", "bad_type")),
        ({"priority": 50.5}, ("priority", "bad_type")),
        ({"deadline_s": 0}, ("deadline_s", "out_of_range")),
        ({"deadline_s": 30 * 86_400 + 1}, ("deadline_s", "out_of_range")),
        ({"max_duration_s": 0}, ("max_duration_s", "out_of_range")),
        ({"batch_size": 61}, ("batch_size", "out_of_range")),
        ({"batch_size": 0}, ("batch_size", "out_of_range")),
        ({"complete_when": 0}, ("complete_when", "out_of_range")),
        ({"complete_when": 1.01}, ("complete_when", "out_of_range")),
        ({"complete_when": "1"}, ("complete_when", "bad_type")),
        ({"trigger": "cron"}, ("trigger", "bad_choice")),
        ({"purpose": "fun"}, ("purpose", "bad_choice")),
        ({"name": "x" * 257}, ("name", "field_too_long")),
        ({"name": "a\0b"}, ("name", "bad_character")),
        ({"name": 5}, ("name", "bad_type")),
        ({"close": "yes"}, ("close", "bad_type")),
        ({"cache": []}, ("cache", "bad_type")),
        ({"cache": {"bypass": 1}}, ("cache.bypass", "bad_type")),
        ({"cache": {"max_age": 1}}, ("cache.max_age", "unknown_field")),
        ({"requests": {}}, ("requests", "bad_type")),
        ({"unheard_of": 1}, ("unheard_of", "unknown_field")),
        ({"webhook": {"url": "https://127.0.0.1"}}, ("webhook.url", "url_not_allowed")),
    ],
)
def test_a_field_that_cannot_work_is_named(
    fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    body = {"rater": RATER, "requests": [builders.row()], **fields}

    response = Api().post("/workflows", {n: v for n, v in body.items() if v is not None})

    assert response.status_code == 422
    assert places(response) == [expected]
    assert response["Content-Type"] == "application/problem+json"
    assert not Workflow.objects.exists()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ("rater", "missing_field")),
        (f"rater={RATER}&priority=high", ("priority", "bad_type")),
        (f"rater={RATER}&priority=5%30%30", ("priority", "out_of_range")),
        (f"rater={RATER}&priority=", ("priority", "bad_type")),
        (f"rater={RATER}&complete_when=nan", ("complete_when", "bad_type")),
        (f"rater={RATER}&complete_when=1e999", ("complete_when", "bad_number")),
        (f"rater={RATER}&bypass=1", ("bypass", "bad_type")),
        (f"rater={RATER}&rater={RATER}", ("rater", "repeated")),
        (f"rater={RATER}&name=a%00b", ("name", "bad_character")),
        (f"rater={RATER}&unheard_of=1", ("unheard_of", "unknown_field")),
        (f"rater={RATER}&dry_run=1", ("dry_run", "bad_type")),
        (f"rater={RATER}&webhook.url=https://x", ("webhook.url", "unknown_field")),
    ],
)
def test_a_query_parameter_that_cannot_work_is_named(query: str, expected: tuple[str, str]) -> None:
    response = Api().upload(f"/workflows?{query}", [builders.row()])

    assert response.status_code == 422
    assert places(response) == [expected]
    assert not Workflow.objects.exists()


def test_several_bad_fields_are_all_named() -> None:
    response = Api().post("/workflows", {"rater": RATER, "priority": 101, "batch_size": 0})

    assert response.json()["code"] == "invalid_fields"
    assert sorted(places(response)) == [
        ("batch_size", "out_of_range"),
        ("priority", "out_of_range"),
    ]


# Bodies


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b" ", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[1]", 400, "invalid_json"),
        (b'"text"', 400, "invalid_json"),
        (b"[" * 20_000 + b"]" * 20_000, 400, "invalid_json"),
        (b'{"rater":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "invalid_json"),
        (b'{"rater":"r","name":' + b"[" * 101 + b"]" * 101 + b"}", 422, "too_deep"),
        (b'{"rater":"r","priority":NaN}', 400, "bad_number"),
        (b'{"rater":"r","requests":[{"a":-Infinity}]}', 400, "bad_number"),
        (b'{"rater":"r","priority":1e999}', 422, "bad_number"),
        (b'{"rater":"r","name":"\\ud800"}', 422, "bad_character"),
        (b'{"rater":"r","name":"\xff"}', 422, "bad_character"),
        ('{"rater":"r"}'.encode("utf-16"), 422, "unsupported_encoding"),
        ('{"rater":"r"}'.encode("utf-16-le"), 422, "unsupported_encoding"),
        (b'{"rater":"r"} x', 400, "invalid_json"),
    ],
)
def test_a_hostile_json_body_is_refused(body: bytes, status: int, code: str) -> None:
    response = Api().post("/workflows", body)

    assert (response.status_code, response.json()["code"]) == (status, code)
    assert not Workflow.objects.exists()


def test_a_deep_list_of_rows_is_refused() -> None:
    api = Api()
    workflow_id = created(api)["id"]

    response = api.post(f"/workflows/{workflow_id}/requests", b"[" * 20_000 + b"]" * 20_000)

    assert (response.status_code, response.json()["code"]) == (400, "invalid_json")


def test_rows_of_a_json_body_are_judged_one_by_one_by_their_index() -> None:
    rows = rb"""[
        {"request_id": "a", "query_text": "fine"},
        {"request_id": "b", "query_text": "half \ud83d", "text": "\ud83d\ude00 \\ud83d"},
        {"request_id": "c", "query_text": "q", "weight": 1e999},
        ["no object"],
        {"request_id": "d",
         "query_text": "over two lines"}
    ]"""
    body = b'{"rater": "%s", "requests": %s}' % (RATER.encode(), rows)

    document = Api().post("/workflows", body).json()

    assert document["accepted"] == 3
    assert [(r["line"], r["code"]) for r in document["rejected"]] == [
        (3, "bad_number"),
        (4, "not_an_object"),
    ]
    assert [(w["line"], w["code"]) for w in document["warnings"]] == [(2, "surrogate_replaced")]
    stored = RatingRequest.objects.get(request_id="b")
    assert stored.warnings == ["surrogate_replaced"]


def payload_texts() -> list[dict[str, Any]]:
    batches = BatchPayload.objects.order_by("batch_id")
    return [item for batch in batches for item, _ in documents.unpack(bytes(batch.data))]


def test_the_text_of_a_row_arrives_as_it_was_sent() -> None:
    text = 'zwölf \u2028 \ufeff e\u0301 😀 \\ud83d "quoted"\n\t'
    row = {"query_text": text, "context": {"n": 1.5, "big": 2**70}}
    body = json.dumps({"rater": RATER, "requests": [row]}, ensure_ascii=False).encode()

    assert Api().post("/workflows", body).status_code == 202

    (item,) = payload_texts()
    assert item == row


@pytest.mark.parametrize("kind", ["text/tab-separated-values", "application/xml", "", "text/plain"])
def test_other_content_types_are_refused_naming_those_taken(kind: str) -> None:
    response = Api().post(f"/workflows?rater={RATER}", b"x", kind=kind)

    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")
    assert "application/x-ndjson" in response.json()["accepted"]


def test_other_compressions_and_foreign_charsets_are_refused() -> None:
    api, path = Api(), f"/workflows?rater={RATER}"

    brotli = api.upload(path, b"x", Content_Encoding="br")
    latin = api.post(path, b"x", kind="application/x-ndjson; charset=latin-1")
    utf8 = api.post(
        path, builders.ndjson([builders.row()]), kind="application/x-ndjson;charset=UTF-8"
    )

    assert (brotli.status_code, brotli.json()["code"]) == (415, "unsupported_content_encoding")
    assert latin.status_code == 415
    assert utf8.status_code == 202


def test_a_body_over_the_limit_is_refused(settings: Settings) -> None:
    settings.AIRS_MAX_UPLOAD_BYTES = 100
    settings.AIRS_MAX_JSON_BYTES = 100
    rows = [builders.row(n) for n in range(10)]

    upload = Api().upload(f"/workflows?rater={RATER}", rows)
    whole = Api().post("/workflows", {"rater": RATER, "requests": rows})

    for response in (upload, whole):
        assert (response.status_code, response.json()["code"]) == (413, "payload_too_large")
        assert response.json()["limit_bytes"] == 100
    assert not Workflow.objects.exists()


# Idempotency


def test_the_same_key_and_body_give_the_same_workflow() -> None:
    api = Api()
    body = {"rater": RATER, "requests": [builders.row()]}

    first = api.post("/workflows", body, Idempotency_Key="k 1")
    again = api.post("/workflows", body, Idempotency_Key="k 1")
    other = api.post("/workflows", {**body, "priority": 51}, Idempotency_Key="k 1")
    another_user = Api("bob").post("/workflows", body, Idempotency_Key="k 1")

    assert again.status_code == 202
    assert again["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first
    assert again.json()["id"] == first.json()["id"]
    assert again.json()["accepted"] == 1
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    assert another_user.json()["id"] != first.json()["id"]
    assert Workflow.objects.count() == 2


def test_a_key_serves_appends_and_empty_workflows_as_well() -> None:
    api = Api()

    one = api.post("/workflows", {"rater": RATER}, Idempotency_Key="empty")
    same = api.post("/workflows", {"rater": RATER}, Idempotency_Key="empty")
    path = f"/workflows/{one.json()['id']}/requests"
    append = api.upload(path, [builders.row()], Idempotency_Key="rows")
    again = api.upload(path, [builders.row()], Idempotency_Key="rows")

    assert same.json()["id"] == one.json()["id"]
    assert append.json() == again.json()
    assert RatingRequest.objects.count() == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\tbed", "schlüssel"])
def test_a_key_that_is_no_key_is_refused(key: str) -> None:
    response = Api().post("/workflows", {"rater": RATER}, Idempotency_Key=key)

    assert response.status_code == 422
    assert places(response) == [("Idempotency-Key", "bad_key")]
    assert not Upload.objects.exists()


# Who sees what


def test_workflows_of_others_are_hidden_but_from_operators() -> None:
    workflow_id = created(Api("alice"), requests=[builders.row()])["id"]
    paths = [f"/workflows/{workflow_id}", f"/workflows/{workflow_id}/ratings"]

    for role in ("viewer", "submitter"):
        assert [Api("bob", role).get(path).status_code for path in paths] == [404, 404]
        assert Api("bob", role).get("/workflows").json()["items"] == []
    for role in ("operator", "admin"):
        assert [Api("bob", role).get(path).status_code for path in paths] == [200, 200]
        assert len(Api("bob", role).get("/workflows").json()["items"]) == 1
    assert [Api("alice", "viewer").get(path).status_code for path in paths] == [200, 200]
    for act in ("close", "cancel", "requests"):
        assert Api("bob").post(f"/workflows/{workflow_id}/{act}").status_code == 404


def test_a_viewer_changes_nothing() -> None:
    api = Api("alice", "viewer")
    workflow = builders.workflow(owner="alice")
    paths = ["/workflows", *(f"/workflows/{workflow.public_id}/{a}" for a in ("close", "cancel"))]

    for path in paths:
        response = api.post(path, {"rater": RATER})
        assert (response.status_code, response.json()["code"]) == (403, "forbidden")


def test_a_workflow_that_is_being_taken_in_is_hidden() -> None:
    receiving = builders.workflow(state=WorkflowState.RECEIVING, owner="alice", closed_at=None)
    api = Api()

    assert api.get(f"/workflows/{receiving.public_id}").status_code == 404
    assert api.get("/workflows").json()["items"] == []
    for act in ("close", "cancel"):
        assert api.post(f"/workflows/{receiving.public_id}/{act}").status_code == 404


@pytest.mark.parametrize("public_id", ["wf_", "wf_" + "0" * 32, "1", "wf_%00", "x" * 3000])
def test_an_unknown_workflow_is_not_found(public_id: str) -> None:
    response = Api().get(f"/workflows/{public_id}")

    assert (response.status_code, response.json()["code"]) == (404, "not_found")


def test_the_list_is_filtered_and_paged_newest_first() -> None:
    version = raters.find(RATER).current_version
    other = builders.version(builders.rater("other"))
    running = [builders.workflow(version, owner="alice", name=str(n)) for n in range(3)]
    done = builders.workflow(version, owner="bob", state=WorkflowState.COMPLETED)
    foreign = builders.workflow(other, owner="alice")
    api = Api("root", "operator")

    def ids(query: str) -> list[str]:
        return [item["id"] for item in api.get(f"/workflows?{query}").json()["items"]]

    newest_first = [w.public_id for w in (foreign, done, *reversed(running))]
    assert ids("") == newest_first
    assert ids("state=COMPLETED") == [done.public_id]
    assert ids("owner=bob") == [done.public_id]
    assert ids("rater=other") == [foreign.public_id]
    found, cursor = [], ""
    while True:
        page = api.get(f"/workflows?limit=2{cursor}").json()
        found += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert found == newest_first


def test_a_list_costs_the_same_statements_whatever_its_length(
    django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "LOOK_EVERY", timedelta(days=1))
    api = Api()
    for _ in range(20):
        builders.workflow(owner="alice")
    api.get("/workflows")  # looks at the queue, for all who ask within a while

    with django_assert_num_queries(6):  # token, workflows, progress, clock, forecasts, usage
        assert len(api.get("/workflows").json()["items"]) == 20


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("state=DONE", ("state", "bad_choice")),
        ("limit=0", ("limit", "out_of_range")),
        ("limit=501", ("limit", "out_of_range")),
        ("cursor=zzz", ("cursor", "bad_cursor")),
        ("cursor=cjE", ("cursor", "bad_cursor")),  # of another list
        ("owner=a%00", ("owner", "bad_character")),
        ("page=2", ("page", "unknown_field")),
    ],
)
def test_a_list_query_that_cannot_work_is_named(query: str, expected: tuple[str, str]) -> None:
    response = Api().get(f"/workflows?{query}")

    assert response.status_code == 422
    assert places(response) == [expected]


# Answers


def test_a_workflow_shows_all_that_the_interface_promises() -> None:
    workflow = builders.workflow(
        owner="alice",
        name="n",
        started_at=NOW,
        stats={
            "received": 10,
            "completed": 4,
            "failed": 1,
            "from_archive": 1,
            "from_model": 2,
            "coalesced": 1,
            "score_sum": 10.0,
            "model_calls": 3,
            "attempts": 4,
            "accelerator_seconds": 3.5,
            "device_seconds": 1.25,
        },
    )

    document = Api().get(f"/workflows/{workflow.public_id}").json()

    address = f"/api/v1/workflows/{workflow.public_id}"
    assert document == {
        "id": workflow.public_id,
        "name": "n",
        "rater": RATER,
        "rater_version": f"{RATER}@1",
        "owner": "alice",
        "priority": 50,
        "priority_asked": None,
        "priority_reason": "",
        "best_effort": False,
        "trigger": "human",
        "purpose": "tuning",
        "batch_size": 12,
        "complete_when": 1.0,
        "round": 1,
        "state": "RUNNING",
        "ending_reason": None,
        "counts": {
            "total": 10,
            "pending": 5,
            "running": 0,
            "retrying": 0,
            "completed": 4,
            "failed": 1,
            "timed_out": 0,
            "cancelled": 0,
        },
        "sources": {"archive": 1, "coalesced": 1, "model": 2},
        "mean_score": 2.5,
        "scored": 4,
        "eta": None,
        "forecast": None,
        "standing": None,
        "created_at": "2026-11-30T12:00:00Z",
        "closed_at": "2026-11-30T12:00:00Z",
        "started_at": "2026-11-30T12:00:00Z",
        "finished_at": None,
        "deadline_at": "2026-11-30T14:00:00Z",
        "ends_at": "2026-11-30T15:00:00Z",
        "model_calls": 3,
        "attempts": 4,
        "accelerator_seconds": 1.25,
        "retry_at": None,
        "timeline": {
            "accepted_at": "2026-11-30T12:00:00Z",
            "closed_at": "2026-11-30T12:00:00Z",
            "first_dispatch_at": "2026-11-30T12:00:00Z",
            "first_result_at": None,
            "last_result_at": None,
            "finished_at": None,
            "queued_s": 0.0,
            "working_s": None,
            "total_s": None,
        },
        "links": {
            "self": address,
            "ratings": f"{address}/ratings",
            "distributions": f"{address}/distributions",
            "requests": f"{address}/requests",
            "events": f"{address}/events",
            "close": f"{address}/close",
            "pause": f"{address}/pause",
            "resume": f"{address}/resume",
            "cancel": f"{address}/cancel",
            "complete": f"{address}/complete",
            "retry": f"{address}/retry",
        },
    }


# Ratings


def test_ratings_are_streamed_page_by_page_with_a_cursor() -> None:
    workflow = builders.workflow(owner="alice")
    for position in range(5):
        builders.request(workflow, position, state=RequestState.COMPLETED)
    api = Api()
    path = f"/workflows/{workflow.public_id}/ratings?format=jsonl&limit=2&state=COMPLETED"

    first = api.get(path)
    found = [r["request_id"] for r in builders.records(first)]
    following = first["X-Next-Cursor"]
    link = first["Link"]
    while following:
        page = api.get(f"{path}&cursor={following}")
        found += [r["request_id"] for r in builders.records(page)]
        following = page.get("X-Next-Cursor")

    assert first["Content-Type"] == "application/x-ndjson"
    assert first.streaming
    assert found == [f"row-{n}" for n in range(1, 6)]
    assert link == (
        f"</api/v1/workflows/{workflow.public_id}/ratings?format=jsonl&limit=2&state=COMPLETED"
        f'&cursor={first["X-Next-Cursor"]}>; rel="next"'
    )


def test_ratings_as_csv_have_their_header_once() -> None:
    workflow = builders.workflow(owner="alice")
    for position in range(2):
        builders.request(workflow, position)
    api = Api()
    path = f"/workflows/{workflow.public_id}/ratings?format=csv&limit=1"

    first = api.get(path)
    second = api.get(f"{path}&cursor={first['X-Next-Cursor']}")

    assert first["Content-Type"] == "text/csv; charset=utf-8"
    assert first.getvalue().startswith(b"request_id,query_id,")
    assert second.getvalue().startswith(b"row-2,")


def test_an_accept_header_changes_nothing() -> None:
    workflow = builders.workflow(owner="alice")

    for accept in ("text/csv", "application/xml", "*/*", "rubbish"):
        response = Api().get(f"/workflows/{workflow.public_id}/ratings", Accept=accept)
        assert (response.status_code, response["Content-Type"]) == (200, "application/x-ndjson")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("format=xlsx", ("format", "bad_choice")),
        ("all=true&limit=5", ("limit", "not_together")),
        ("state=DONE", ("state", "bad_choice")),
        ("limit=10001", ("limit", "out_of_range")),
        ("cursor=dzE", ("cursor", "bad_cursor")),
        ("follow=1", ("follow", "unknown_field")),
    ],
)
def test_a_ratings_query_that_cannot_work_is_named(query: str, expected: tuple[str, str]) -> None:
    workflow = builders.workflow(owner="alice")

    response = Api().get(f"/workflows/{workflow.public_id}/ratings?{query}")

    assert response.status_code == 422
    assert places(response) == [expected]


def test_nan_never_leaves_as_nan() -> None:
    workflow = builders.workflow(
        owner="alice", stats={"received": 1, "completed": 1, "score_sum": float("nan")}
    )
    builders.request(workflow, 0, state=RequestState.COMPLETED, score=float("nan"))
    api = Api()

    document = orjson.loads(api.get(f"/workflows/{workflow.public_id}").content)
    (record,) = builders.records(api.get(f"/workflows/{workflow.public_id}/ratings"))

    assert document["mean_score"] is None
    assert record["score"] is None


def test_rows_for_a_rater_whose_plug_in_is_gone_are_refused() -> None:
    api = Api()
    workflow = api.post("/workflows", {"rater": RATER}).json()
    del builders.PLUGINS["stub"]

    refused = api.upload(f"/workflows/{workflow['id']}/requests", [builders.row()])

    assert (refused.status_code, refused.json()["code"]) == (422, "rater_unavailable")
    assert not Upload.objects.filter(creates=False).exists()
