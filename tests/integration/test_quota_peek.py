"""The quota peek: what would leave now, by the same reckoning as what then does."""

from datetime import timedelta
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import windows
from fulfillment.clock import database_now
from fulfillment.models import Rater, RaterCost, Role, SendWindow, Workflow
from fulfillment.policy.lifecycle import WorkflowState
from models_admin.models import AcceleratorPool, ModelConfig, ModelKind, ModelServer, TrafficRule
from models_admin.policy.replicas import ServerState
from tests.builders import MODEL, RATER, Api
from tests.rating_queue import Queue, boot, rater, submit

pytestmark = pytest.mark.django_db


def hosted(*, replicas: int = 1, window: int = 16, **server: Any) -> ModelConfig:
    now = database_now()
    model = ModelConfig.objects.create(
        id=MODEL,
        kind=ModelKind.HOSTED,
        pool=AcceleratorPool.objects.create(id="cpu", kind="cpu", devices=4),
        loader="encoder",
        checkpoint="tiny:0",
        window=window,
        created_at=now,
        updated_at=now,
    )
    for ordinal in range(replicas):
        ModelServer.objects.create(
            model=model,
            agent="local",
            ordinal=ordinal,
            **{
                "state": ServerState.READY,
                "address": f"http://127.0.0.1:900{ordinal}",
                "version": "v1",
                "ready_at": now,
                "heartbeat_at": now,
                **server,
            },
        )
    return model


def external(**fields: Any) -> ModelConfig:
    now = database_now()
    return ModelConfig.objects.create(
        id=MODEL,
        kind=ModelKind.EXTERNAL,
        url="http://127.0.0.1:9",
        version_label="v1",
        created_at=now,
        updated_at=now,
        **fields,
    )


def work(count: int = 40, **changes: Any) -> Workflow:
    return submit([f"row{n}" for n in range(count)], batch_size=1, **changes)


def peek(name: str = RATER, api: Api | None = None, **asked: Any) -> dict[str, Any]:
    query = "&".join(f"{key}={value}" for key, value in asked.items())
    response = (api or Api("root", Role.OPERATOR)).get(f"/quota/{name}?{query}")
    assert response.status_code == 200, response.content
    found: dict[str, Any] = response.json()
    return found


def codes(found: dict[str, Any]) -> list[str]:
    return [reason["code"] for reason in found["reasons"]]


def dispatcher() -> Queue:
    from models_admin.directory import directory

    return Queue(fleet=directory)  # type: ignore[arg-type]


def test_an_idle_rater_has_its_whole_window() -> None:
    boot()
    rater()
    hosted(replicas=2)
    RaterCost.objects.create(
        rater_id=RATER, seconds_a_request=0.5, call_seconds_a_request=1.0, requests=9, exact=True,
        measured_at=database_now(), read_to=database_now(), servers=2, looked_at=database_now(),
    )  # fmt: skip

    found = peek(priority=90)

    assert found == {
        "rater": RATER, "model": MODEL, "model_version": "v1", "priority_class": "high",
        "replicas": 2, "calls_a_batch": 1, "window": 32, "held": 0, "kept_for_high": 0,
        "free": 32, "granted": 32, "service_s": 6.0, "wait_s": 0.0, "reasons": [],
    }  # fmt: skip


def test_what_is_granted_is_what_then_leaves() -> None:
    boot()
    workflow = work(priority=50)
    hosted()
    TrafficRule.objects.create(position=1, name="r", owner="alice", max_batches=9)

    before = peek(workflow=workflow.public_id)
    sent = dispatcher().run().sent
    after = peek(workflow=workflow.public_id)

    assert (before["granted"], before["kept_for_high"], before["free"]) == (9, 2, 16)
    assert codes(before) == ["kept_for_high", "traffic_rule"]
    assert sent == 9
    assert (after["held"], after["granted"]) == (9, 0)
    assert "at most 9 at a time" in after["reasons"][-1]["detail"]


def test_rules_that_name_nothing_of_a_workflow_hold_for_the_rater_itself() -> None:
    boot()
    rater()
    hosted()
    TrafficRule.objects.create(position=1, name="half", rater=RATER, max_share=0.5)
    TrafficRule.objects.create(position=2, name="ann", owner="ann", block=True)
    TrafficRule.objects.create(position=3, name="off", block=True, enabled=False)

    found = peek(priority=90)

    assert (found["granted"], codes(found)) == (8, ["traffic_rule"])


def test_a_full_window_says_so() -> None:
    boot()
    work(priority=90)
    hosted(window=4)
    dispatcher().run()

    found = peek(priority=10)

    assert (found["window"], found["held"], found["free"], found["granted"]) == (4, 4, 0, 0)
    assert codes(found) == ["window_full"]


def test_executors_may_be_what_there_is_too_little_of() -> None:
    rater()
    hosted()
    assert codes(peek(priority=90)) == ["no_executor", "executors_busy"]

    boot(slots=5)
    found = peek(priority=90)

    assert (found["granted"], codes(found)) == (5, ["executors_busy"])


def test_what_is_paused_or_over_gets_nothing() -> None:
    boot()
    workflow = work()
    hosted()

    Workflow.objects.update(state=WorkflowState.PAUSED)
    paused = peek(workflow=workflow.public_id)
    Workflow.objects.update(
        state=WorkflowState.RUNNING, deadline_at=database_now() - timedelta(seconds=1)
    )
    late = peek(workflow=workflow.public_id)
    Rater.objects.update(
        paused_at=database_now(), paused_code="unauthorized", paused_detail="HTTP 401"
    )
    stopped = peek()

    assert (paused["granted"], codes(paused)[0]) == (0, "not_sent")
    assert (late["granted"], codes(late)[0]) == (0, "deadline")
    assert (stopped["granted"], codes(stopped)[0]) == (0, "paused")
    assert stopped["reasons"][0]["detail"] == "the rater is paused, unauthorized: HTTP 401"


def test_no_replica_no_room() -> None:
    boot()
    rater()
    hosted(replicas=1, version="another")

    found = peek()

    assert (found["replicas"], found["window"], found["granted"]) == (0, 0, 0)
    assert codes(found) == ["no_replica"]


def test_a_window_that_backed_off_is_told_with_its_time() -> None:
    boot()
    rater()
    external(max_concurrency=8)
    (replica,) = dispatcher().fleet.replicas(database_now())
    now = database_now()
    SendWindow.objects.create(
        replica=replica.key, model_id=MODEL, ceiling=8, limits=[8.0, 4.0, 4.0, 4.0],
        dropped_at=[None, now, now, now], reason=windows.EXTERNAL, written_at=now,
    )  # fmt: skip

    found = peek(priority=50)

    assert (found["window"], found["granted"]) == (8, 4)
    backed_off = next(r for r in found["reasons"] if r["code"] == "backed_off")
    assert backed_off["detail"].startswith(f"{replica.key} has 4 of 8 calls since it was")


def test_a_limit_of_calls_a_second_is_told() -> None:
    boot()
    rater(max_qps=2.5)
    hosted()

    assert peek(priority=90)["reasons"] == [
        {
            "code": "max_qps",
            "detail": "the rater starts 2.5 calls a second at most, whatever is granted",
        }
    ]


def test_workflows_of_others_are_not_told_of() -> None:
    boot()
    workflow = work(owner="ann")
    other = submit(["x"], of=rater("other"))
    hosted()
    bob, root = Api("bob"), Api("root", Role.OPERATOR)

    for api, public_id in ((bob, workflow.public_id), (root, other.public_id), (root, "wf_1")):
        response = api.get(f"/quota/{RATER}?workflow={public_id}")
        assert response.status_code == 422
        assert [e["field"] for e in response.json()["errors"]] == ["workflow"]
    assert peek(api=Api("ann"), workflow=workflow.public_id)["granted"] == 14
    assert peek(api=bob)["granted"] == 14


@pytest.mark.parametrize(
    ("query", "field"),
    [("priority=101", "priority"), ("priority=-1", "priority"), ("priority=x", "priority"),
     ("colour=red", "colour"), ("workflow=%00", "workflow")],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_name(query: str, field: str) -> None:
    response = Api("root", Role.OPERATOR).get(f"/quota/{RATER}?{query}")

    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == [field]


def test_a_name_that_nobody_has_is_not_found() -> None:
    assert Api("ann").get("/quota/nobody").status_code == 404


@pytest.mark.parametrize("source", ["", "fulfillment.model_quota.quota"])
def test_a_model_by_itself_is_told_by_its_servers(settings: Settings, source: str) -> None:
    settings.AIRS_QUOTA_SOURCE = source
    hosted(replicas=2, window=8, queue_rows=30, busy_seconds=50.0, rows_total=1_200)
    TrafficRule.objects.create(position=1, name="half", model=MODEL, min_load=0.25, max_share=0.5)
    TrafficRule.objects.create(position=2, name="low", priority_class="low", block=True)

    found, low = peek(MODEL), peek(MODEL, priority=10)

    assert (found["rater"], found["model"], found["priority_class"]) == (None, MODEL, "middle")
    assert (found["window"], found["held"], found["free"], found["granted"]) == (16, 5, 11, 8)
    assert (found["service_s"], found["wait_s"]) == (0.5, 1.25)
    assert codes(found) == ["traffic_rule"]
    assert (low["granted"], codes(low)) == (0, ["traffic_rule", "traffic_rule"])


def test_a_batch_in_part_is_one_and_who_is_silent_holds_nothing(settings: Settings) -> None:
    settings.AIRS_QUOTA_SOURCE = ""
    model = hosted(queue_rows=1)
    silent = database_now() - timedelta(minutes=1)
    ModelServer.objects.create(
        model=model, agent="local", ordinal=1, state=ServerState.READY, address="http://x",
        ready_at=silent, heartbeat_at=silent, queue_rows=500, busy_seconds=1.0, rows_total=1,
    )  # fmt: skip

    found = peek(MODEL)

    assert (found["replicas"], found["held"], found["service_s"]) == (1, 1, None)


def test_a_full_or_absent_model_says_so(settings: Settings) -> None:
    settings.AIRS_QUOTA_SOURCE = ""
    model = hosted(window=2, queue_rows=100)
    assert (peek(MODEL)["granted"], codes(peek(MODEL))) == (0, ["window_full"])

    model.servers.update(state=ServerState.DRAINING)
    assert (peek(MODEL)["granted"], codes(peek(MODEL))) == (0, ["no_replica"])
