"""Retry rounds: what did not complete is rated again, nothing twice, nothing lost, counts true."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest
from django.db import connection, transaction

from fulfillment import control, ending, leases, progress, rounds, scores
from fulfillment.clock import database_now
from fulfillment.errors import Conflict
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
    Batch,
    BatchPayload,
    Event,
    FailedFlight,
    Purge,
    PurgeStage,
    Rating,
    RatingRequest,
    Workflow,
    WorkflowStats,
)
from fulfillment.policy.lifecycle import BatchState, EndingReason, WorkflowState
from tests import builders
from tests.rating_queue import (
    Queue,
    batches,
    boot,
    check_all,
    counts_add_up,
    finished,
    flights,
    queue,
    rate_all,
    rated,
    requests,
    rows_are_sound,
    sent_items,
    states,
    submit,
    take,
    threads,
    until_blocked,
)

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def started(*rows: str, **changes: Any) -> tuple[Workflow, Queue, list[Taken]]:
    """Submit rows, claim them and take them over."""
    executor = boot()
    workflow = submit(rows, **changes)
    dispatcher = queue()
    dispatcher.run()
    return workflow, dispatcher, [t for m in dispatcher.take_sent() for t in take(m, by=executor)]


def ended_in_part(*rows: str, failing: int = 1, **changes: Any) -> tuple[Workflow, Queue]:
    """Return a workflow that has ended with its first items FAILED, and its dispatcher."""
    workflow, dispatcher, (taken,) = started(*rows, **changes)
    leases.finish(
        [
            Finish(
                taken=taken,
                failed=dict.fromkeys(range(failing), "exhausted"),
                scored={i: scores.Scored(score=1.0) for i in sent_items(taken)[failing:]},
                calls=1,
            )
        ]
    )
    check_all()
    return workflow, dispatcher


def retry(workflow: Workflow, **more: Any) -> Workflow:
    return control.retry(workflow_id=workflow.pk, **more)


def state_of(workflow: Workflow) -> str:
    workflow.refresh_from_db()
    return WorkflowState(workflow.state).name


# What a round is


def test_a_retry_rates_what_did_not_complete_and_keeps_the_rest() -> None:
    workflow, dispatcher = ended_in_part("a", "b", "b", "c")
    assert finished(workflow) == "PARTIAL"
    kept = requests(workflow)[1:]

    again = retry(workflow)

    assert (again.state, again.round, again.finished_at) == (WorkflowState.RUNNING, 2, None)
    assert states(workflow) == ["PENDING", "COMPLETED", "COMPLETED", "COMPLETED"]
    (row, *others) = requests(workflow)
    assert (row.error, row.attempts) == (None, 0)
    assert counts_add_up(workflow)["failed"] == 0
    assert progress.read(again)["counts"]["pending"] == 1
    assert rate_all(dispatcher, boot()) == 1
    check_all()
    assert finished(workflow) == "COMPLETED"
    assert [(r.score, r.rating_id) for r in others] == [(r.score, r.rating_id) for r in kept]
    assert Event.objects.count() == 2


@pytest.mark.parametrize("end", [control.cancel, control.complete])
def test_what_was_not_awaited_can_be_retried(end: Any) -> None:
    boot()
    workflow = submit(names(40), batch_size=12)
    end(workflow_id=workflow.pk)

    again = retry(workflow)

    assert (again.state, again.ending_reason) == (WorkflowState.RUNNING, "")
    assert set(states(workflow)) == {"PENDING"}
    assert rate_all(queue(), boot()) == 40
    check_all()
    assert finished(workflow) == "COMPLETED"


def test_a_round_has_the_time_that_the_workflow_had() -> None:
    accepted_at = database_now() - 5 * HOUR
    workflow = submit(["a"], created_at=accepted_at, deadline_in=-4 * HOUR, ends_in=-3 * HOUR)
    check_all()
    assert finished(workflow) == "FAILED"

    first = retry(workflow)
    control.cancel(workflow_id=workflow.pk)
    second = retry(workflow)

    for again in (first, second):
        assert again.accepted_at is not None
        assert abs(again.deadline_at - again.accepted_at - HOUR) < timedelta(seconds=1)
        assert abs(again.ends_at - again.accepted_at - 2 * HOUR) < timedelta(seconds=1)
    assert second.accepted_at > first.accepted_at > accepted_at + 4 * HOUR
    assert second.round == 3


def test_attempts_and_losses_start_anew() -> None:
    workflow, dispatcher, (taken,) = started("a", "b")
    leases.finish([Finish(taken=taken, not_before=database_now())])
    dispatcher.wake_and_run()
    take(dispatcher.take_sent()[0], by=boot())
    leases.expire(now=database_now() + HOUR, trust_heartbeats=False)
    (batch,) = batches(workflow)
    assert (batch.attempts, batch.lost) == (1, 1)
    control.cancel(workflow_id=workflow.pk)

    retry(workflow)

    (batch,) = batches(workflow)
    assert (batch.state, batch.attempts, batch.lost, batch.round) == (BatchState.READY, 0, 0, 2)
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=boot())
    assert taken.attempts == 0


def test_a_failure_of_the_last_round_does_not_fail_this_one_and_a_later_one_does() -> None:
    workflow, dispatcher, (taken,) = started("a")
    leases.finish([Finish(taken=taken, failed={0: "bad"}, for_good=frozenset({0}))])
    check_all()
    assert FailedFlight.objects.exists()

    retry(workflow)

    assert dispatcher.wake_and_run().sent == 1
    follower = submit(["a"])
    (taken,) = take(dispatcher.take_sent()[0], by=boot())
    leases.finish([Finish(taken=taken, failed={0: "bad"}, for_good=frozenset({0}))])
    dispatcher.wake_and_run()
    check_all()
    assert [finished(w) for w in (workflow, follower)] == ["FAILED", "FAILED"]


def test_a_bypass_takes_nothing_that_was_rated_before_the_round() -> None:
    workflow = submit(["a"], bypass=True)
    control.cancel(workflow_id=workflow.pk)
    other, dispatcher, (taken,) = started("a", bypass=True)
    leases.finish([rated(taken)])
    check_all()

    retry(workflow)

    assert finished(other) == "COMPLETED"
    assert dispatcher.wake_and_run().sent == 1


def test_complete_when_is_of_the_first_round_only() -> None:
    """A retry says that the rest is wanted."""
    workflow, _, (one, _) = started("a", "b", batch_size=1, complete_when=0.5)
    leases.finish([rated(one)])
    check_all()
    assert finished(workflow) == "PARTIAL"

    retry(workflow)
    check_all()

    assert state_of(workflow) == "RUNNING"


def test_a_cancelled_workflow_whose_requests_all_completed_is_completed_by_a_retry() -> None:
    workflow, _, (taken,) = started("a")
    leases.finish([rated(taken)])
    control.cancel(workflow_id=workflow.pk)
    assert finished(workflow) == "CANCELLED"

    assert retry(workflow).state == WorkflowState.COMPLETED

    assert finished(workflow) == "COMPLETED"


def test_a_round_can_be_cancelled_paused_and_retried() -> None:
    workflow, dispatcher = ended_in_part("a", "b", "c", failing=3)
    retry(workflow)
    control.pause(workflow_id=workflow.pk)
    assert dispatcher.wake_and_run().sent == 0
    control.cancel(workflow_id=workflow.pk)
    assert finished(workflow) == "CANCELLED"

    retry(workflow)

    assert rate_all(dispatcher, boot()) == 3
    check_all()
    assert finished(workflow) == "COMPLETED"
    assert [e.kind for e in Event.objects.order_by("round")] == [
        "workflow.failed", "workflow.cancelled", "workflow.completed",
    ]  # fmt: skip


# Idempotency and refusals


def test_a_retry_of_a_round_that_runs_changes_nothing() -> None:
    workflow, _ = ended_in_part("a", "b")
    first = retry(workflow)

    second = retry(workflow)

    assert (second.round, second.deadline_at) == (2, first.deadline_at)


def test_the_key_of_the_last_retry_makes_no_further_round() -> None:
    workflow, dispatcher = ended_in_part("a", "b")
    retry(workflow, key="k1")
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=boot())
    leases.finish([Finish(taken=taken, failed={0: "exhausted"})])
    check_all()
    assert finished(workflow) == "PARTIAL"

    assert retry(workflow, key="k1").round == 2
    assert finished(workflow) == "PARTIAL"
    assert retry(workflow, key="k2").round == 3


def all_rows() -> list[Any]:
    tables = (Workflow, WorkflowStats, Batch, BatchPayload)
    rows: list[Any] = [list(table.objects.order_by("pk").values()) for table in tables]
    return [*rows, [list(requests(w)) and states(w) for w in Workflow.objects.all()]]


def test_a_retry_whose_payload_was_erased_changes_nothing() -> None:
    workflow, _ = ended_in_part("a", "b")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("DELETE FROM fulfillment_batchpayload")
        cursor.execute("DELETE FROM fulfillment_batch")
    before = all_rows()

    with pytest.raises(Conflict) as caught:
        retry(workflow)

    assert caught.value.code == "payload_gone"
    assert all_rows() == before
    assert finished(workflow) == "PARTIAL"


def purge_of(url_digest: uuid.UUID, **changes: Any) -> None:
    """Store the record of a purge by url that has walked all requests."""
    now = database_now()
    fields = {"dry_run": False, "stage": PurgeStage.DONE, "last_rating_id": 0, **changes}
    Purge.objects.create(
        actor="root", url_digest=url_digest, created_at=now, finished_at=now,
        last_request_id=RatingRequest.objects.latest("pk").pk, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "is_gone"),
    [
        ({}, True),
        ({"dry_run": True}, False),
        ({"version_ids": [0]}, False),
        ({"before": builders.NOW - 365 * 24 * HOUR}, False),
    ],
)
def test_what_a_purge_has_blanked_is_not_rated_again(changes: Any, is_gone: bool) -> None:
    workflow, _ = ended_in_part("a", "b")
    digest = uuid.uuid4()
    RatingRequest.objects.filter(request_id="row-1").update(url_digest=digest)
    purge_of(digest, **changes)

    if is_gone:
        with pytest.raises(Conflict) as caught:
            retry(workflow)
        assert caught.value.code == "payload_gone"
    else:
        assert retry(workflow).state == WorkflowState.RUNNING


def test_a_purge_of_what_completed_does_not_forbid_a_retry() -> None:
    workflow, _ = ended_in_part("a", "b")
    digest = uuid.uuid4()
    RatingRequest.objects.filter(request_id="row-2").update(url_digest=digest)
    purge_of(digest)

    assert retry(workflow).state == WorkflowState.RUNNING


def test_a_purge_that_comes_while_a_round_is_made_leaves_its_items_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "DONE_IN_CALL", 0)
    workflow = submit(["a", "b"], batch_size=1)
    control.cancel(workflow_id=workflow.pk)
    check_all()
    assert retry(workflow).state == WorkflowState.REOPENING
    digest = uuid.uuid4()
    RatingRequest.objects.filter(request_id="row-1").update(url_digest=digest)
    purge_of(digest)

    check_all()

    assert states(workflow) == ["CANCELLED", "PENDING"]
    counts_add_up(workflow)


def test_only_payloads_that_are_needed_must_be_there() -> None:
    workflow, _, (one, two) = started("a", "b", batch_size=1)
    leases.finish([rated(one), Finish(taken=two, failed={0: "exhausted"})])
    check_all()
    BatchPayload.objects.filter(batch_id=one.batch_id).delete()
    Batch.objects.filter(pk=one.batch_id).delete()

    assert retry(workflow).state == WorkflowState.RUNNING


def test_a_retry_of_a_retired_version_is_refused() -> None:
    workflow, _ = ended_in_part("a", "b")
    old = workflow.rater_version
    builders.version(old.rater, number=2, model_version="v2")
    control.retire(version=old, now=database_now())
    before = all_rows()

    with pytest.raises(Conflict) as caught:
        retry(workflow)

    assert caught.value.code == "version_retired"
    assert all_rows() == before


# A batch that is still computed


def ended_beneath_its_executor() -> tuple[Workflow, Queue, Taken]:
    """Return a workflow that was cancelled and retried while a batch of it is computed."""
    workflow, dispatcher, (taken,) = started("a", "b")
    control.cancel(workflow_id=workflow.pk)
    retry(workflow)
    return workflow, dispatcher, taken


def test_a_round_waits_for_the_lease_of_the_last_one_and_takes_its_rating() -> None:
    workflow, dispatcher, taken = ended_beneath_its_executor()
    assert states(workflow) == ["PENDING", "PENDING"]
    assert counts_add_up(workflow)["cancelled"] == 0
    assert dispatcher.wake_and_run().sent == 0, "both items are in flight"

    leases.finish([rated(taken)])

    assert states(workflow) == ["PENDING", "PENDING"], "the old lease ends nothing of this round"
    dispatcher.wake_and_run()
    check_all()
    assert finished(workflow) == "COMPLETED"
    assert Rating.objects.count() == 2, "each was computed once"
    rows_are_sound()
    assert not flights()


def test_a_round_is_sent_when_the_lease_of_the_last_one_is_lost() -> None:
    workflow, dispatcher, _ = ended_beneath_its_executor()
    dispatcher.wake_and_run()

    leases.expire(now=database_now() + HOUR, trust_heartbeats=False)

    assert not flights(), "though the rows of the lost batch are another's by now"
    assert dispatcher.wake_and_run().sent == 1
    (taken,) = take(dispatcher.take_sent()[0], by=boot())
    assert len(sent_items(taken)) == 2
    leases.finish([rated(taken)])
    check_all()
    assert finished(workflow) == "COMPLETED"


def test_what_the_old_lease_would_retry_is_not_its_business_any_more() -> None:
    _, dispatcher, taken = ended_beneath_its_executor()

    leases.finish([Finish(taken=taken, not_before=database_now() + HOUR)])

    assert dispatcher.wake_and_run().sent == 1
    (again,) = take(dispatcher.take_sent()[0], by=boot())
    assert again.attempts == 0
    assert again.payload == taken.payload


def test_a_round_beneath_an_executor_can_be_retried_again() -> None:
    workflow, dispatcher, taken = ended_beneath_its_executor()
    control.cancel(workflow_id=workflow.pk)
    retry(workflow)
    leases.finish([rated(taken)])

    dispatcher.wake_and_run()
    check_all()

    assert finished(workflow) == "COMPLETED"
    assert workflow.round == 3
    rows_are_sound()


# In chunks, and half-way


class Killed(BaseException):
    """The process is gone."""


def dies_in(act: Callable[[], Any], *, statement: int) -> bool:
    """Do it, dying before the n-th statement; say whether there was one. What is open is lost."""
    left = iter(range(statement - 1, -1, -1))

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if next(left, 1) == 0:
            raise Killed
        return execute(sql, params, many, context)

    try:
        with connection.execute_wrapper(watch):
            act()
    except Killed:
        return True
    return False


def test_a_large_round_is_opened_in_chunks_by_the_call_and_the_checker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "DONE_IN_CALL", 500)
    monkeypatch.setattr(rounds, "MOST_ROWS", 800)
    workflow = submit(names(2_000), batch_size=1)
    control.cancel(workflow_id=workflow.pk)
    while state_of(workflow) == "ENDING":
        check_all()

    again = retry(workflow)

    opened = states(workflow).count("PENDING")
    assert again.state == WorkflowState.REOPENING
    assert 0 < opened < 2_000
    seen = [opened]
    boot()
    while state_of(workflow) == "REOPENING":
        counts_add_up(workflow)
        assert queue().wake_and_run().sent == 0, "nothing is sent of half a round"
        check_all()
        seen.append(states(workflow).count("PENDING"))
    assert seen == sorted(set(seen))
    assert seen[-1] == 2_000
    assert state_of(workflow) == "RUNNING"
    assert Event.objects.count() == 1


def test_a_round_that_died_half_way_is_ended_by_a_cancel_and_begun_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "DONE_IN_CALL", 1)
    workflow = submit(names(900), batch_size=1)
    ending.begin(workflow.pk, EndingReason.CANCELLED, database_now())
    check_all()
    assert retry(workflow).state == WorkflowState.REOPENING

    control.cancel(workflow_id=workflow.pk)
    check_all()

    assert finished(workflow) == "CANCELLED"
    assert set(states(workflow)) == {"CANCELLED"}
    retry(workflow)
    check_all()
    assert set(states(workflow)) == {"PENDING"}
    assert (state_of(workflow), workflow.round) == ("RUNNING", 3)


def half_done() -> Workflow:
    """Return a CANCELLED workflow: batches all, half and not COMPLETED, and one still computed."""
    executor = boot()
    workflow = submit([uuid.uuid4().hex for _ in range(8)], batch_size=2)
    dispatcher = queue()
    dispatcher.run()
    one, two, *_ = [t for m in dispatcher.take_sent() for t in take(m.leases[:3], by=executor)]
    leases.finish([rated(one), Finish(taken=two, scored={0: scores.Scored(score=1.0)})])
    control.cancel(workflow_id=workflow.pk)
    return workflow


@with_commits
def test_a_retry_killed_at_any_statement_is_finished_by_the_checker_or_has_not_begun() -> None:
    for statement in count(1):
        workflow = half_done()
        assert finished(workflow) == "CANCELLED"
        completed = states(workflow).count("COMPLETED")
        if not dies_in(partial(retry, workflow), statement=statement):
            break

        counts_add_up(workflow)
        begun = state_of(workflow) != "CANCELLED"
        check_all()

        counts_add_up(workflow)
        assert state_of(workflow) == ("RUNNING" if begun else "CANCELLED")
        assert states(workflow).count("PENDING") == (8 - completed if begun else 0)
        if begun:
            control.complete(workflow_id=workflow.pk)
        retry(workflow)
        assert states(workflow).count("PENDING") == 8 - completed
        control.cancel(workflow_id=workflow.pk)
        leases.expire(now=database_now() + HOUR, trust_heartbeats=False)
    assert statement > 12


@with_commits
def test_a_retry_waits_for_who_erases_and_sees_what_is_left() -> None:
    workflow, _ = ended_in_part("a", "b")

    with threads(1) as pool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                "SELECT FROM fulfillment_workflow WHERE id = %s FOR SHARE", [workflow.pk]
            )
            cursor.execute("DELETE FROM fulfillment_batch")
            cursor.execute("DELETE FROM fulfillment_batchpayload")
            retrying = pool.submit(retry, workflow)
            until_blocked(retrying)
        with pytest.raises(Conflict) as caught:
            retrying.result(10)

    assert caught.value.code == "payload_gone"


@with_commits
def test_two_retries_at_once_make_one_round() -> None:
    workflow, _ = ended_in_part(*names(30), failing=10, batch_size=60)

    with threads(4) as pool:
        answers = [f.result(10) for f in [pool.submit(retry, workflow) for _ in range(4)]]

    assert {answer.round for answer in answers} == {2}
    assert states(workflow).count("PENDING") == 10
    counts_add_up(workflow)
