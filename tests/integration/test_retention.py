"""Retention: what is erased when, in chunks, and what never is."""

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.contrib.sessions.models import Session
from django.db import connection, models, transaction
from pytest_django import Settings

from fulfillment import backlog, control, erasing, folding, intake, raters, retention, spool
from fulfillment.clock import database_now
from fulfillment.errors import Conflict
from fulfillment.intake import Body, Submission, WorkflowForm
from fulfillment.models import (
    Batch,
    BatchPayload,
    Delivery,
    DeliveryAttempt,
    Erasure,
    Event,
    ExecutorBoot,
    FailedFlight,
    Rater,
    Rating,
    RatingRequest,
    ServiceRun,
    StatsDelta,
    Upload,
    WebhookEndpoint,
    Workflow,
    WorkflowStats,
)
from fulfillment.policy.delivery import DeliveryState
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from tests import builders
from tests.builders import MODEL, RATER, ndjson, row
from tests.rating_queue import threads, until_blocked

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

CHUNK = 4
ROWS = [row(n) for n in range(10)]
SECOND = timedelta(seconds=1)
PAYLOADS = timedelta(hours=24)
UPLOADS = timedelta(hours=48)
MICROSECOND = timedelta(microseconds=1)
EVERYTHING = (BatchPayload, Batch, RatingRequest, StatsDelta, WorkflowStats, Upload, Workflow)


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(
        Rater(id=RATER, autorater="stub", model_id=MODEL, batch_size=1), now=database_now()
    )
    monkeypatch.setattr(spool, "CHUNK_ROWS", CHUNK)


def submit(rows: Sequence[Any] = ROWS, *, key: str | None = None, close: bool = True) -> Submission:
    return intake.submit(
        form=WorkflowForm(rater=RATER),
        body=Body(chunks=[ndjson(rows)]),
        owner="alice",
        idempotency_key=key,
        close=close,
    )


def append(to: Workflow, rows: Sequence[Any] = ROWS, *, key: str | None = None) -> Submission:
    return intake.append(
        workflow=to, body=Body(chunks=[ndjson(rows)]), owner="alice", idempotency_key=key
    )


class Killed(BaseException):
    """kill -9, as far as PostgreSQL can tell."""


def killed(call: Callable[[], Any], *, after: int, at: str = "SELECT holder") -> None:
    """Let the process die instead of sending a statement for the (after + 1)-th time."""
    seen = 0

    def wrapper(execute: Any, sql: str, *rest: Any) -> Any:
        nonlocal seen
        if sql.lstrip().startswith(at):
            if seen == after:
                raise Killed
            seen += 1
        return execute(sql, *rest)

    with pytest.raises(Killed), connection.execute_wrapper(wrapper):
        call()


def dying_at(statement: int) -> Callable[..., Any]:
    """Let the process die instead of sending its n-th statement."""
    sent = 0

    def wrapper(execute: Any, *rest: Any) -> Any:
        nonlocal sent
        if sent == statement:
            raise Killed
        sent += 1
        return execute(*rest)

    return wrapper


def silent_for(period: timedelta, now: datetime) -> None:
    """Let the unfinished uploads, and what they made, be so old."""
    Upload.objects.filter(finished_at=None).update(heartbeat_at=now - period)
    Workflow.objects.filter(state=WorkflowState.RECEIVING).update(created_at=now - period)


def counts() -> dict[str, int]:
    return {model.__name__: model._default_manager.count() for model in EVERYTHING}


def finished(state: WorkflowState, *, ago: timedelta, now: datetime, items: int = 5) -> Workflow:
    """Store a workflow that has ended, with its batches and payloads."""
    workflow = builders.workflow(state=state, finished_at=now - ago)
    for position in range(items):
        builders.request(workflow, position)
        batch = builders.batch(workflow, [position], state=BatchState.DONE)
        BatchPayload.objects.create(batch=batch, workflow=workflow, data=b"[]")
    return workflow


def held(of: Workflow) -> tuple[int, int, int]:
    """Return how many batches, payloads and requests a workflow has."""
    return (
        Batch.objects.filter(workflow=of).count(),
        BatchPayload.objects.filter(workflow=of).count(),
        RatingRequest.objects.filter(workflow=of).count(),
    )


# Payloads


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_batches_and_payloads_go_a_day_after_completion_and_requests_stay(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "CHUNK", chunk)
    now = database_now()
    old = [finished(WorkflowState.COMPLETED, ago=timedelta(hours=25), now=now) for _ in range(3)]
    young = finished(WorkflowState.COMPLETED, ago=timedelta(hours=23), now=now)

    erased = retention.run_once(now)

    assert [held(w) for w in old] == [(0, 0, 5)] * 3
    assert held(young) == (5, 5, 5)
    assert erased == 15
    assert retention.run_once(now) == 0


@pytest.mark.parametrize(("ago", "stays"), [(PAYLOADS, True), (PAYLOADS + MICROSECOND, False)])
def test_the_day_is_exact(ago: timedelta, stays: bool) -> None:
    now = database_now()
    workflow = finished(WorkflowState.COMPLETED, ago=ago, now=now)

    retention.run_once(now)

    assert held(workflow) == ((5, 5, 5) if stays else (0, 0, 5))


@pytest.mark.parametrize(
    ("ago", "stays"), [(timedelta(days=14), True), (timedelta(days=14) + MICROSECOND, False)]
)
@pytest.mark.parametrize(
    "state", [WorkflowState.PARTIAL, WorkflowState.FAILED, WorkflowState.CANCELLED]
)
def test_what_a_retry_may_need_stays_for_two_weeks(
    state: WorkflowState, ago: timedelta, stays: bool
) -> None:
    now = database_now()
    workflow = finished(state, ago=ago, now=now)

    retention.run_once(now)

    assert held(workflow) == ((5, 5, 5) if stays else (0, 0, 5))


def test_what_is_gone_cannot_be_retried() -> None:
    now = database_now()
    workflow = finished(WorkflowState.FAILED, ago=timedelta(days=15), now=now)
    retention.run_once(now)

    with pytest.raises(Conflict) as refused:
        control.retry(workflow_id=workflow.pk)

    assert refused.value.code == "payload_gone"


@with_commits
def test_a_retry_that_comes_first_keeps_its_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention has chosen the workflow; before its first chunk a retry opens it again."""
    now = database_now()
    workflow = finished(WorkflowState.PARTIAL, ago=timedelta(days=15), now=now)

    def retried(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith('UPDATE "fulfillment_workflowstats"'):
            Workflow.objects.filter(pk=workflow.pk).update(
                state=WorkflowState.REOPENING, round=2, finished_at=None
            )
        return execute(sql, *rest)

    with connection.execute_wrapper(retried):
        retention.run_once(now)

    assert held(workflow) == (5, 5, 5)


def test_what_is_not_finished_stays() -> None:
    workflows = [submit().workflow, submit(close=False).workflow]

    retention.run_once(database_now() + timedelta(days=300))

    assert [held(w) for w in workflows] == [(10, 10, 10)] * 2


def test_completed_workflows_are_found_among_many_others() -> None:
    now = database_now()
    workflows = [
        finished(state, ago=timedelta(days=days), now=now, items=1)
        for days in (2, 0)
        for state in (WorkflowState.PARTIAL, WorkflowState.COMPLETED, WorkflowState.CANCELLED)
    ]

    retention.run_once(now)

    assert [held(w)[0] for w in workflows] == [1, 0, 1, 1, 1, 1]


def test_erasing_payloads_takes_them_out_of_the_backlog() -> None:
    now = database_now()
    workflow = finished(WorkflowState.COMPLETED, ago=timedelta(hours=25), now=now)
    WorkflowStats.objects.filter(pk=workflow.pk).update(stored_bytes=5_000)
    other = submit([row(99)]).workflow

    retention.run_once(now)

    assert backlog.stored_bytes() == StatsDelta.objects.get(workflow=other).stored_bytes > 0


def test_a_run_erases_no_more_than_its_budget_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasing, "CHUNK", 2)
    monkeypatch.setattr(retention, "MOST_ROWS", 3)
    now = database_now()
    workflow = finished(WorkflowState.COMPLETED, ago=timedelta(hours=25), now=now)

    assert retention.run_once(now) == 3
    assert held(workflow) == (2, 2, 5)
    assert retention.run_once(now) == 2
    assert held(workflow) == (0, 0, 5)


# Workflows


@pytest.mark.parametrize("chunk", [1, 3, 2_000])
def test_workflows_go_ninety_days_after_their_end_with_all_they_had(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "CHUNK", chunk)
    now = database_now()
    young = finished(WorkflowState.PARTIAL, ago=timedelta(days=90), now=now)
    running = submit(key="k").workflow
    before = counts()
    for state in (WorkflowState.COMPLETED, WorkflowState.CANCELLED):
        old = finished(state, ago=timedelta(days=90) + MICROSECOND, now=now)
        Event.objects.create(workflow=old, round=1, kind="x", data={}, created_at=now)
        StatsDelta.objects.create(workflow=old, attempts=1)

    assert retention.run_once(now)

    after = counts()
    assert after == {**before, "Batch": 10, "BatchPayload": 10}  # the young one's payloads went
    assert held(young) == (0, 0, 5)
    assert held(running) == (10, 10, 10)
    assert not Event.objects.exists()
    assert not Erasure.objects.exists()


@with_commits
def test_a_run_that_dies_anywhere_leaves_nothing_that_the_next_does_not_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasing, "CHUNK", 2)
    before = counts()
    for statement in range(1_000):
        now = database_now()
        old = finished(WorkflowState.FAILED, ago=timedelta(days=91), now=now)
        Event.objects.create(workflow=old, round=1, kind="x", data={}, created_at=now)
        try:
            with connection.execute_wrapper(dying_at(statement)):
                retention.run_once(now)
        except Killed:
            # Gone for everybody, or as it was: never half of it.
            assert not Workflow.objects.exists() or held(old) == (5, 5, 5)
            retention.run_once(now)

            assert counts() == before, statement
            assert not Erasure.objects.exists()
        else:
            assert counts() == before
            break
    assert statement > 15


@with_commits
def test_rows_that_somebody_holds_are_left_to_the_next_run() -> None:
    now = database_now()
    marks = [uuid.uuid4() for _ in range(2)]
    for mark in marks:
        FailedFlight.objects.create(fingerprint=mark, code="x", failed_at=now - timedelta(hours=1))

    with transaction.atomic():
        FailedFlight.objects.select_for_update().get(pk=marks[0])
        with threads(1) as pool:
            erased = pool.submit(retention.run_once, now).result(10)

    assert erased == 1
    assert retention.run_once(now) == 1


@with_commits
def test_a_fold_beside_an_erasure_leaves_no_progress_behind() -> None:
    now = database_now()
    old = finished(WorkflowState.FAILED, ago=timedelta(days=91), now=now)
    StatsDelta.objects.create(workflow=old, attempts=1, stored_bytes=1_000)

    with threads(1) as pool:
        with transaction.atomic():
            folding.fold()
            running = pool.submit(retention.run_once, now)
            until_blocked(running)
        running.result(10)

    assert not WorkflowStats.objects.exists()
    assert not Erasure.objects.exists()


# Uploads that died


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 2_000])
def test_what_a_dead_upload_left_is_removed_without_a_trace(
    chunks: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "CHUNK", chunk)
    other = submit([row(99)])
    before = counts()
    killed(lambda: submit(key="k"), after=chunks)
    now = database_now()
    silent_for(control.UPLOAD_SILENCE + SECOND, now)

    assert retention.run_once(now)

    assert counts() == before
    assert held(other.workflow) == (1, 1, 1)
    done = submit(key="k")
    assert (done.replayed, done.answer["accepted"]) == (False, 10)


@pytest.mark.parametrize(
    ("silence", "stays"),
    [(timedelta(seconds=60), True), (timedelta(seconds=60) + MICROSECOND, False)],
)
def test_an_upload_is_dead_after_a_minute_without_heartbeat(
    silence: timedelta, stays: bool
) -> None:
    killed(lambda: submit(key="k"), after=1)
    now = database_now()
    silent_for(silence, now)

    retention.run_once(now)

    assert Workflow.objects.exists() == Upload.objects.exists() == stays


def test_uploads_that_ended_are_not_dead() -> None:
    for close in (True, False):
        submit(close=close)
    before = counts()

    retention.run_once(database_now() + timedelta(hours=1))

    assert counts() == before


@pytest.mark.parametrize(
    "sign_of_life", [{"holder": uuid.uuid4()}, {"heartbeat_at": None}, {"finished_at": None}]
)
def test_an_upload_that_shows_life_at_the_last_moment_is_left_alone(
    sign_of_life: dict[str, Any],
) -> None:
    killed(lambda: submit(key="k"), after=1)
    now = database_now()
    silent_for(timedelta(minutes=2), now)
    before = counts()
    changes = {name: value or now for name, value in sign_of_life.items()}

    def alive(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith('DELETE FROM "fulfillment_upload"') and changes:
            Upload.objects.update(**changes)
            changes.clear()
        return execute(sql, *rest)

    with connection.execute_wrapper(alive):
        retention.run_once(now)

    assert not changes
    assert counts() == before


def test_what_was_taken_over_goes_on_beside_the_janitor() -> None:
    killed(lambda: submit(key="k"), after=1)
    now = database_now()
    silent_for(timedelta(minutes=2), now)

    def janitor(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("SELECT holder"):
            retention.run_once(now)
        return execute(sql, *rest)

    with connection.execute_wrapper(janitor):
        done = submit(key="k")

    assert done.answer["accepted"] == 10
    assert held(done.workflow) == (10, 10, 10)


@with_commits
def test_a_janitor_that_dies_anywhere_leaves_nothing_that_the_next_does_not_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasing, "CHUNK", 4)
    before = counts()
    for statement in range(1_000):
        killed(lambda: submit(key="k"), after=2)
        now = database_now()
        silent_for(timedelta(minutes=2), now)
        try:
            with connection.execute_wrapper(dying_at(statement)):
                retention.run_once(now)
        except Killed:
            retention.run_once(now)

            assert counts() == before, statement
        else:
            assert counts() == before
            break
    assert statement > 15


def test_remains_without_upload_are_removed_after_a_minute_only() -> None:
    remains = builders.workflow(state=WorkflowState.RECEIVING, closed_at=None)
    now = database_now()
    Workflow.objects.update(created_at=now - timedelta(seconds=59))
    retention.run_once(now)
    assert Workflow.objects.get() == remains

    retention.run_once(now + 2 * SECOND)

    assert not Workflow.objects.exists()
    assert not WorkflowStats.objects.exists()


def test_a_dead_append_keeps_its_chunks_and_may_be_resumed_for_two_days() -> None:
    workflow = submit([row(99)], close=False).workflow
    killed(lambda: append(workflow, key="k"), after=1)
    now = database_now()
    silent_for(timedelta(hours=47), now)

    retention.run_once(now)

    assert held(workflow)[2] == 1 + CHUNK
    assert append(workflow, key="k").answer["accepted"] == 10


def test_the_record_of_a_dead_append_goes_after_two_days_and_its_rows_stay() -> None:
    workflow = submit([row(99)], close=False).workflow
    Upload.objects.all().delete()
    killed(lambda: append(workflow, key="k"), after=1)
    now = database_now()
    silent_for(timedelta(hours=48, seconds=1), now)

    assert retention.run_once(now) == 1

    assert not Upload.objects.exists()
    assert held(workflow)[2] == 1 + CHUNK


# Small things


def test_idempotency_records_last_two_days() -> None:
    now = database_now()
    first = submit(key="k").workflow
    Upload.objects.update(finished_at=now - UPLOADS)
    retention.run_once(now)
    assert submit(key="k").workflow == first

    Upload.objects.update(finished_at=now - UPLOADS - MICROSECOND)
    retention.run_once(now)

    assert submit(key="k").workflow != first
    assert held(first) == (10, 10, 10)


def test_deliveries_that_are_over_go_after_a_month_with_their_log() -> None:
    now = database_now()
    event = Event.objects.create(
        workflow=builders.workflow(), round=1, kind="x", data={}, created_at=now, published_at=now
    )
    for days, state in ((31, "DELIVERED"), (29, "GIVEN_UP"), (31, "PENDING")):
        endpoint = WebhookEndpoint.objects.create(
            owner="alice",
            url=f"https://{days}.{state}",
            secret="x",
            generated=True,
            created_at=now,
        )
        is_over = state != "PENDING"
        delivery = Delivery.objects.create(
            event=event,
            endpoint=endpoint,
            receiver="x",
            body=b"{}",
            state=DeliveryState[state],
            began_at=now,
            due_at=now,
            created_at=now,
            finished_at=now - timedelta(days=days) if is_over else None,
        )
        DeliveryAttempt.objects.create(delivery=delivery, number=1, started_at=now, duration_s=1)

    assert retention.run_once(now) == 2

    left = Delivery.objects.order_by("pk").values_list("endpoint__url", flat=True)
    assert list(left) == ["https://29.GIVEN_UP", "https://31.PENDING"]
    assert DeliveryAttempt.objects.count() == 2


@pytest.mark.parametrize(
    ("store", "of", "limit"),
    [
        (
            lambda at: FailedFlight.objects.create(
                fingerprint=uuid.uuid4(), code="x", failed_at=at
            ),
            FailedFlight,
            timedelta(minutes=10),
        ),
        (
            lambda at: ServiceRun.objects.create(name=str(at), ran_at=at),
            ServiceRun,
            timedelta(days=1),
        ),
        (
            lambda at: Session.objects.create(session_key=str(at), session_data="", expire_date=at),
            Session,
            timedelta(),
        ),
        (
            lambda at: ExecutorBoot.objects.create(
                boot_id=uuid.uuid4(), host="h", pid=1, slots=1, started_at=at, heartbeat_at=at
            ),
            ExecutorBoot,
            timedelta(days=1),
        ),
    ],
)
def test_marks_of_failures_and_old_boots_go(
    store: Callable[[datetime], models.Model], of: type[models.Model], limit: timedelta
) -> None:
    now = database_now()
    young = store(now - limit)
    store(now - limit - MICROSECOND)

    assert retention.run_once(now) == 1

    assert list(of._default_manager.values_list("pk", flat=True)) == [young.pk]


def test_the_archive_keeps_its_own_time() -> None:
    now = database_now()
    version = raters.find(RATER).current_version
    assert version is not None
    for days in (99, 101):
        Rating.objects.create(
            fingerprint=UUID(int=days),
            rater_version=version,
            workflow_id=0,
            score=1,
            produced_at=now - timedelta(days=days),
        )

    assert retention.run_once(now) == 1
    assert Rating.objects.get().fingerprint == UUID(int=99)
