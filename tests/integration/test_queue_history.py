"""The queue as it stands and over time."""

from datetime import datetime, timedelta
from typing import Any

import orjson
import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from fulfillment import board, leases, queue_history, recovery
from fulfillment.clock import database_now
from fulfillment.models import Flow, QueueSample, StatsDelta, Workflow, WorkflowStats
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from tests import builders
from tests.builders import NOW, RATER, Api
from tests.rating_queue import boot, check_all, queue, rated, submit, take

pytestmark = pytest.mark.django_db

STEP = queue_history.PERIOD


def depths(now: datetime = NOW) -> list[dict[str, Any]]:
    """Return depths by what is not zero."""
    names = (
        "ready", "leased", "delayed", "waiting", "workflows", "open_requests", "paused_requests",
    )  # fmt: skip
    found = board.depths(board.standings(now), now)
    return [
        {
            "of": (depth.rater_id, depth.priority_class.name),
            **{name: value for name in names if (value := getattr(depth, name))},
        }
        for depth in found
    ]


def test_depths_are_those_of_the_batches() -> None:
    executor = boot()
    submit([f"a{i}" for i in range(30)], batch_size=3)
    dispatcher = queue()
    dispatcher.fleet.live[0] = dispatcher.fleet.live[0].__class__(window=4)
    dispatcher.run()
    taken = [t for message in dispatcher.take_sent() for t in take(message, by=executor)]
    assert depths() == [
        {"of": (RATER, "MIDDLE"), "ready": 6, "leased": 4, "workflows": 1, "open_requests": 30}
    ]

    leases.finish([rated(taken[0]), rated(taken[1], 0, not_before=NOW + timedelta(days=999))])

    assert depths() == [
        {
            "of": (RATER, "MIDDLE"),
            "ready": 6,
            "leased": 2,
            "delayed": 1,
            "workflows": 1,
            "open_requests": 26,
        }
    ]


def test_classes_and_raters_stand_apart_and_paused_work_waits_outside() -> None:
    builders.workflow(stats={"received": 24}, priority=90)
    builders.workflow(stats={"received": 12}, best_effort=True)
    other = builders.version(builders.rater("other"))
    builders.workflow(other, stats={"received": 12})
    builders.workflow(other, stats={"received": 50}, state=WorkflowState.PAUSED)
    builders.workflow(other, stats={"received": 50, "failed": 50}, state=WorkflowState.FAILED)
    builders.workflow(other, stats={"received": 50}, state=WorkflowState.RECEIVING)

    assert depths() == [
        {
            "of": ("other", "MIDDLE"),
            "ready": 1,
            "workflows": 1,
            "open_requests": 12,
            "paused_requests": 50,
        },
        {"of": (RATER, "HIGH"), "ready": 2, "workflows": 1, "open_requests": 24},
        {"of": (RATER, "BEST_EFFORT"), "ready": 1, "workflows": 1, "open_requests": 12},
    ]


def test_ages_count_by_open_requests() -> None:
    for age_s, open_requests in ((600, 10), (60, 89), (5, 1)):
        builders.workflow(
            stats={"received": open_requests}, created_at=NOW - timedelta(seconds=age_s)
        )

    (depth,) = board.depths(board.standings(NOW), NOW)

    assert (depth.oldest_s, depth.age_p50_s, depth.age_p90_s, depth.age_p99_s) == (600, 60, 60, 600)


def test_the_oldest_is_one_that_waits_to_be_sent() -> None:
    old, young = (
        builders.workflow(stats={"received": 12}, created_at=NOW - timedelta(seconds=age_s))
        for age_s in (600, 5)
    )
    builders.batch(old, list(range(12)), state=BatchState.DELAYED, not_before=NOW)

    (depth,) = board.depths(board.standings(NOW), NOW)

    assert (depth.oldest_s, depth.age_p99_s) == (5, 600)
    builders.batch(young, list(range(12)), state=BatchState.LEASED)
    (depth,) = board.depths(board.standings(NOW), NOW)
    assert (depth.oldest_s, depth.ready) == (None, 0)


def test_a_sample_says_what_ended_since_the_one_before() -> None:
    executor = boot()
    workflow = submit([f"a{i}" for i in range(6)], batch_size=2)
    dispatcher = queue()
    dispatcher.run()
    first, second, third = (t for m in dispatcher.take_sent() for t in take(m, by=executor))
    leases.finish([rated(first)])
    check_all()
    start = database_now()
    recovery.run(queue_history.SERVICE, start)
    leases.finish([rated(second), rated(third)])
    check_all()
    recovery.run(queue_history.SERVICE, start + STEP)

    recovery.run(queue_history.SERVICE, start + 2 * STEP)
    recovery.run(queue_history.SERVICE, start + 3 * STEP)

    samples = list(QueueSample.objects.order_by("at"))
    assert [(s.open_requests, s.ended, s.worked, s.model_calls) for s in samples] == [
        (4, 2, 2, 1),
        (0, 4, 4, 2),
    ]
    assert [s.period_s for s in samples] == [30.0, 30.0]
    assert samples[0].leased == 2
    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.COMPLETED


def test_a_series_ends_at_zero() -> None:
    workflow = builders.workflow(stats={"received": 12})
    recovery.run(queue_history.SERVICE, NOW)
    Workflow.objects.filter(pk=workflow.pk).update(state=WorkflowState.PAUSED)
    WorkflowStats.objects.filter(workflow=workflow).update(failed=12)

    for n in (1, 2):
        recovery.run(queue_history.SERVICE, NOW + n * STEP)

    assert list(QueueSample.objects.order_by("at").values_list("open_requests", flat=True)) == [
        12,
        0,
    ]


def test_archive_hits_and_what_a_sweep_ends_are_no_work() -> None:
    workflow = submit(["a", "b", "c"])
    StatsDelta.objects.create(workflow=workflow, received=5, completed=5, from_archive=5)
    StatsDelta.objects.create(workflow=workflow, cancelled=3)
    check_all()

    flow = Flow.objects.get()

    assert (flow.ended, flow.worked) == (8, 0)


def test_what_a_retry_takes_back_is_not_counted_off() -> None:
    workflow = submit(["a", "b", "c"])
    StatsDelta.objects.create(workflow=workflow, failed=3)
    StatsDelta.objects.create(workflow=workflow, failed=-3)
    check_all()

    assert Flow.objects.get().ended == 3


def test_old_flows_and_samples_are_erased(settings: Settings) -> None:
    workflow = builders.workflow(stats={"received": 12})
    for n in range(3):
        Flow.objects.create(
            workflow_id=workflow.pk, at=NOW, ended=1, worked=1, model_calls=1, accelerator_seconds=0
        )
        queue_history.run_once(NOW + n * STEP)
    assert (Flow.objects.count(), QueueSample.objects.count()) == (3, 3)

    queue_history.run_once(NOW + settings.AIRS_KEEP_QUEUE_SAMPLES + STEP)

    assert Flow.objects.count() == 0
    assert QueueSample.objects.earliest("at").at == NOW + STEP


def test_two_samplers_count_what_ended_once() -> None:
    workflow = builders.workflow(stats={"received": 12})
    Flow.objects.create(
        workflow_id=workflow.pk, ended=5, worked=5, model_calls=1, accelerator_seconds=0
    )

    queue_history.run_once(NOW)
    queue_history.run_once(NOW + timedelta(seconds=1))

    samples = QueueSample.objects.order_by("at").values_list("ended", "period_s")
    assert list(samples) == [(5, 30.0), (0, 1.0)]


def test_the_look_reads_no_ready_batch() -> None:
    """Whatever the backlog, only what is out is read, by its small indexes."""
    workflow = builders.workflow()
    for number in range(300):
        builders.batch(workflow, [number])
    with connection.cursor() as cursor:
        # What an earlier test left in the statistics must not choose the plan.
        cursor.execute("ANALYZE fulfillment_batch")
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {board._OUT}")
        used = " ".join(row[0] for row in cursor.fetchall())

    assert all(name in used for name in ("batch_leased", "batch_waiting", "batch_delayed")), used
    assert "Seq Scan" not in used
    assert "batch_open" not in used


# The API


def sample(at: datetime, *, rater_id: str = RATER, **changes: Any) -> None:
    values = {
        "ready": 2, "leased": 1, "delayed": 0, "waiting": 0, "workflows": 1, "open_requests": 24,
        "paused_requests": 0, "oldest_s": 5.0, "age_p50_s": 5.0, "age_p90_s": 5.0,
        "age_p99_s": 5.0, "period_s": 30.0, "ended": 60, "worked": 30, "model_calls": 3,
        "accelerator_seconds": 1.5, "device_seconds": 0.5,
    }  # fmt: skip
    QueueSample.objects.create(at=at, rater_id=rater_id, priority_class=1, **{**values, **changes})


def test_the_queue_is_shown_by_rater_and_class() -> None:
    builders.workflow(stats={"received": 24}, created_at=database_now())

    document = orjson.loads(Api(role="viewer").get("/queue").content)

    (item,) = document["items"]
    assert (item["rater"], item["priority_class"]) == (RATER, "middle")
    assert (item["ready"], item["open_requests"], item["leased"]) == (2, 24, 0)
    assert 0 <= item["oldest_s"] < 60


def test_history_is_binned_and_filtered() -> None:
    for n, open_requests in enumerate((24, 48, 12)):
        sample(NOW + n * STEP, open_requests=open_requests, oldest_s=float(n))
    sample(NOW, rater_id="other")
    span = f"since={iso(NOW)}&until={iso(NOW + 4 * STEP)}"

    document = orjson.loads(
        Api(role="viewer").get(f"/queue/history?rater={RATER}&step_s=60&{span}").content
    )

    assert document["step_s"] == 60
    first, second = document["items"]
    assert (first["at"], first["open_requests"], first["most_open_requests"]) == (
        "2026-11-30T12:00:00Z", 36.0, 48,
    )  # fmt: skip
    assert (first["oldest_s"], first["ended_per_s"], first["worked_per_s"]) == (1.0, 2.0, 1.0)
    assert (second["open_requests"], second["ended_per_s"]) == (12.0, 1.0)
    assert (first["accelerator_seconds"], second["accelerator_seconds"]) == (1.0, 0.5)
    everybody = orjson.loads(Api(role="viewer").get(f"/queue/history?{span}").content)
    assert {item["rater"] for item in everybody["items"]} == {RATER, "other"}


def iso(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("step_s=5", ("step_s", "out_of_range")),
        (f"since={iso(NOW)}&until={iso(NOW)}", ("since", "not_before")),
        (f"since={iso(NOW)}&until={iso(NOW + timedelta(days=9))}&step_s=60",
         ("step_s", "out_of_range")),
        ("since=yesterday", ("since", "bad_value")),
        ("until=0001-01-01T00:00:00Z", ("until", "out_of_range")),
        ("depth=1", ("depth", "unknown_field")),
    ],
)  # fmt: skip
def test_a_history_that_cannot_be_given_is_named(query: str, expected: tuple[str, str]) -> None:
    response = Api(role="viewer").get(f"/queue/history?{query}")

    assert response.status_code == 422
    (place,) = orjson.loads(response.content)["errors"]
    assert place["field"] == expected[0]
    assert expected[1] in {place["code"], "bad_value"}


def test_the_admin_lists_samples_of_a_rater(admin_client: Client) -> None:
    sample(NOW, oldest_s=3_723.4)
    sample(NOW, rater_id="other", period_s=0.0, oldest_s=None, age_p90_s=None)
    page = reverse("admin:fulfillment_queuesample_changelist")

    everything = admin_client.get(page).content.decode()
    one = admin_client.get(f"{page}?q={RATER}").content.decode()

    assert "1:02:03" in one
    assert "2.0" in one
    assert "other" in everything
    assert "other" not in one


def test_states_of_batches_are_the_numbers_that_the_look_names() -> None:
    assert (BatchState.LEASED, BatchState.WAITING, BatchState.DELAYED) == (1, 2, 3)
