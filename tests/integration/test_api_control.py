"""Acts upon workflows and rater versions over HTTP: what they answer, who may, twice."""

from datetime import timedelta
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import raters
from fulfillment.clock import database_now
from fulfillment.models import Batch, BatchPayload, Rater, Workflow
from fulfillment.policy.lifecycle import Act, WorkflowState
from tests import builders
from tests.builders import MODEL, Api

RATER = builders.RATER
ACTS = ("close", *(act.value for act in Act))


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


def created(api: Api, rows: int = 2, **fields: Any) -> str:
    body = {"rater": RATER, "requests": [builders.row(n) for n in range(rows)], **fields}
    response = api.post("/workflows", body)
    assert response.status_code == 202, response.content
    return f"/workflows/{response.json()['id']}"


def version(number: int) -> Any:
    return raters.find_version(RATER, number)


@pytest.mark.parametrize(
    ("acts", "states"),
    [
        (["pause", "pause", "resume", "resume"], ["PAUSED", "PAUSED", "RUNNING", "RUNNING"]),
        (["complete", "complete"], ["FAILED", "FAILED"]),
        (["cancel", "cancel", "retry", "retry"], ["CANCELLED", "CANCELLED", "RUNNING", "RUNNING"]),
        (["pause", "cancel", "retry", "pause"], ["PAUSED", "CANCELLED", "RUNNING", "PAUSED"]),
    ],
)
def test_acts_answer_the_workflow_and_may_be_repeated(acts: list[str], states: list[str]) -> None:
    api = Api()
    path = created(api)

    answers = [api.post(f"{path}/{act}") for act in acts]

    assert [(a.status_code, a.json()["state"]) for a in answers] == [(200, s) for s in states]
    for answer in answers:
        counts = answer.json()["counts"]
        assert sum(counts.values()) - counts["total"] == counts["total"] == 2


def test_a_retry_answers_its_round_and_a_fresh_deadline() -> None:
    api = Api()
    path = created(api, deadline_s=600)
    before = api.post(f"{path}/cancel").json()

    after = api.post(f"{path}/retry").json()

    assert (before["round"], before["ending_reason"]) == (1, "cancelled")
    assert (after["round"], after["ending_reason"], after["finished_at"]) == (2, None, None)
    assert after["deadline_at"] > before["deadline_at"]
    assert after["counts"]["pending"] == 2
    assert after["links"]["retry"] == f"/api/v1{path}/retry"


def test_a_retry_with_the_same_idempotency_key_is_the_same_round() -> None:
    api = Api()
    path = created(api)
    api.post(f"{path}/cancel")
    first = api.post(f"{path}/retry", Idempotency_Key="k").json()
    api.post(f"{path}/cancel")

    again = api.post(f"{path}/retry", Idempotency_Key="k").json()
    other = api.post(f"{path}/retry", Idempotency_Key="l").json()

    assert [(a["round"], a["state"]) for a in (first, again, other)] == [
        (2, "RUNNING"), (2, "CANCELLED"), (3, "RUNNING"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "state", "code"),
    [
        ("pause", WorkflowState.COMPLETED, "already_finished"),
        ("resume", WorkflowState.FAILED, "already_finished"),
        ("complete", WorkflowState.CANCELLED, "already_finished"),
        ("retry", WorkflowState.COMPLETED, "already_finished"),
        ("retry", WorkflowState.RUNNING, "workflow_unfinished"),
        ("retry", WorkflowState.ENDING, "workflow_ending"),
        ("pause", WorkflowState.ENDING, "workflow_ending"),
    ],
)
def test_an_act_that_cannot_be_is_a_conflict(act: str, state: WorkflowState, code: str) -> None:
    reason = "max_duration" if state == WorkflowState.ENDING else ""
    workflow = builders.workflow(state=state, ending_reason=reason)

    response = Api().post(f"/workflows/{workflow.public_id}/{act}")

    assert (response.status_code, response.json()["code"]) == (409, code)
    assert workflow.public_id in response.json()["detail"]


def test_a_retry_without_its_payload_is_refused_and_changes_nothing() -> None:
    api = Api()
    path = created(api)
    before = api.post(f"{path}/cancel").json()
    Batch.objects.all().delete()
    BatchPayload.objects.all().delete()

    response = api.post(f"{path}/retry")

    assert (response.status_code, response.json()["code"]) == (409, "payload_gone")
    assert api.get(path).json() == before


def test_workflows_of_others_are_not_found_but_by_operators() -> None:
    path = created(Api("alice"))

    for act in ACTS:
        assert Api("bob").post(f"{path}/{act}").status_code == 404
    assert Api("bob").patch(path, {"name": "mine"}).status_code == 404
    assert Api("bob", "operator").post(f"{path}/pause").status_code == 200
    assert Api("bob", "operator").patch(path, {"priority": 1}).status_code == 200


def test_a_viewer_acts_upon_nothing() -> None:
    path = created(Api("alice"))
    api = Api("alice", "viewer")

    answers = [*(api.post(f"{path}/{act}") for act in ACTS), api.patch(path, {"name": "x"})]

    assert {(a.status_code, a.json()["code"]) for a in answers} == {(403, "forbidden")}


def test_a_workflow_that_is_being_taken_in_is_acted_upon_by_nobody() -> None:
    receiving = builders.workflow(state=WorkflowState.RECEIVING, closed_at=None)

    for act in ACTS:
        assert Api().post(f"/workflows/{receiving.public_id}/{act}").status_code == 404


def test_who_did_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    api = Api("alice")
    path = created(api)
    public_id = path.rpartition("/")[2]

    with caplog.at_level("INFO", logger="fulfillment.control"):
        for act in ("pause", "pause", "resume", "cancel", "retry", "complete"):
            api.post(f"{path}/{act}")
        api.patch(path, {"name": "x"})

    done = ("paused", "resumed", "cancelled", "retried", "forced", "changed")
    assert caplog.messages == [f"workflow_{what} id={public_id} by=alice" for what in done]


# PATCH


def test_name_priority_and_deadline_are_changed() -> None:
    api = Api()
    path = created(api, priority=10, deadline_s=600)
    before = api.get(path).json()

    response = api.patch(path, {"name": "new", "priority": 90, "deadline_s": 3_600})

    after = response.json()
    assert response.status_code == 200
    assert (after["name"], after["priority"]) == ("new", 90)
    workflow = Workflow.objects.get()
    assert workflow.deadline_at == workflow.created_at + timedelta(hours=1)
    assert workflow.ends_at - workflow.deadline_at == timedelta(seconds=120)
    same = ("id", "state", "round", "counts", "created_at", "owner")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert api.patch(path, {}).json()["priority"] == 90


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({"priority": 101}, "priority", "out_of_range"),
        ({"priority": "90"}, "priority", "bad_type"),
        ({"priority": None}, "priority", "missing_field"),
        ({"deadline_s": 0}, "deadline_s", "out_of_range"),
        ({"name": 1}, "name", "bad_type"),
        ({"rater": "other"}, "rater", "unknown_field"),
        ({"state": "PAUSED"}, "state", "unknown_field"),
    ],
)
def test_a_change_that_cannot_be_is_refused(body: dict[str, Any], field: str, code: str) -> None:
    api = Api()
    path = created(api)

    response = api.patch(path, body)

    assert response.status_code == 422
    assert [(e["field"], e["code"]) for e in response.json()["errors"]] == [(field, code)]


def test_a_deadline_that_is_over_is_refused() -> None:
    workflow = builders.workflow(created_at=database_now() - timedelta(hours=1))

    response = Api().patch(f"/workflows/{workflow.public_id}", {"deadline_s": 60})

    assert (response.status_code, response.json()["code"]) == (422, "deadline_passed")


def test_of_an_ended_workflow_only_the_name_is_changed() -> None:
    workflow = builders.workflow(state=WorkflowState.PARTIAL)
    path = f"/workflows/{workflow.public_id}"

    refused = Api().patch(path, {"priority": 1})

    assert (refused.status_code, refused.json()["code"]) == (409, "already_finished")
    assert Api().patch(path, {"name": "kept"}).json()["name"] == "kept"


# Retiring versions


def test_an_operator_retires_an_old_version() -> None:
    path = created(Api())
    operator = Api("root", "operator")
    operator.patch(f"/raters/{RATER}", {"score_max": 5.0})

    response = operator.post(f"/raters/{RATER}/versions/1/retire")
    again = operator.post(f"/raters/{RATER}/versions/1/retire")

    assert response.status_code == 200
    assert response.json()["retired_at"] is not None
    assert (response.json()["version"], response.json()["current"]) == (1, False)
    assert again.json() == response.json()
    ended = Api().get(path).json()
    assert (ended["state"], ended["counts"]["failed"]) == ("FAILED", 2)
    records = builders.records(Api().get(f"{path}/ratings"))
    assert {(r["state"], r["error"]) for r in records} == {("FAILED", "version_retired")}
    refused = Api().post(f"{path}/retry")
    assert (refused.status_code, refused.json()["code"]) == (409, "version_retired")


@pytest.mark.parametrize(
    ("role", "path", "status", "code"),
    [
        ("operator", f"{RATER}/versions/1/retire", 409, "version_current"),
        ("operator", f"{RATER}/versions/9/retire", 404, "not_found"),
        ("operator", "nobody/versions/1/retire", 404, "not_found"),
        ("submitter", f"{RATER}/versions/1/retire", 403, "forbidden"),
    ],
)
def test_a_version_that_cannot_be_retired(role: str, path: str, status: int, code: str) -> None:
    response = Api("root", role).post(f"/raters/{path}")

    assert (response.status_code, response.json()["code"]) == (status, code)
    assert version(1).retired_at is None
