"""Acts upon a workflow: pausing, resuming, forcing, changing, retiring; retry rounds are in
test_rounds."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from fulfillment import claim, control, ending, leases, raters
from fulfillment.clock import database_now
from fulfillment.control import Changes
from fulfillment.errors import Conflict, InvalidFields
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
    Batch,
    BatchWait,
    FailedFlight,
    Flight,
    Rater,
    RaterVersion,
    Rating,
    Workflow,
)
from fulfillment.policy.lifecycle import BatchState, EndingReason, Source, WorkflowState
from tests import builders
from tests.rating_queue import (
    Queue,
    Replica,
    archived,
    batches,
    boot,
    check_all,
    counts_add_up,
    finished,
    flights,
    key,
    queue,
    rated,
    rater,
    requests,
    rows_are_sound,
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


def state_of(workflow: Workflow) -> str:
    workflow.refresh_from_db()
    return WorkflowState(workflow.state).name


WAYS = ["WAITING", "DELAYED", "started", "claimed", "READY"]


def open_in_every_way(**changes: Any) -> tuple[Workflow, Queue, list[Taken]]:
    """Return a workflow of five rows, a batch each, that are open as WAYS says.

    With it come the dispatcher and what is started: the batch that one waits for, and its own.
    """
    executor = boot()
    dispatcher = queue(Replica(window=4))
    submit(["waited"])
    dispatcher.run()
    (held,) = take(dispatcher.take_sent()[0], by=executor)
    workflow = submit(["waited", "b", "c", "d", "e"], batch_size=1, **changes)
    dispatcher.run()
    dispatcher.run()
    pairs = [pair for m in dispatcher.take_sent() for pair in m.leases]
    delayed, running = take(pairs[:2], by=executor)
    leases.finish([Finish(taken=delayed, not_before=database_now() + HOUR)])
    assert ways(workflow) == WAYS
    return workflow, dispatcher, [held, running]


def ways(workflow: Workflow) -> list[str]:
    return [
        BatchState(b.state).name
        if b.state != BatchState.LEASED
        else ("started" if b.started_at else "claimed")
        for b in batches(workflow)
    ]


def refused(act: Callable[..., Any], workflow: Workflow, **more: Any) -> str:
    with pytest.raises(Conflict) as caught:
        act(workflow_id=workflow.pk, **more)
    return caught.value.code


# Pausing


@pytest.mark.parametrize("state", [WorkflowState.OPEN, WorkflowState.RUNNING])
def test_nothing_is_sent_of_a_paused_workflow_until_it_is_resumed(state: WorkflowState) -> None:
    boot()
    workflow = submit(["a", "b"], batch_size=1, state=state)
    dispatcher = queue()

    assert control.pause(workflow_id=workflow.pk).state == WorkflowState.PAUSED
    assert dispatcher.wake_and_run().sent == 0

    assert control.resume(workflow_id=workflow.pk).state == state
    assert dispatcher.wake_and_run().sent == 2


def test_pausing_and_resuming_twice_is_harmless() -> None:
    workflow = submit(["a"])

    for act, state in ((control.pause, "PAUSED"), (control.resume, "RUNNING")):
        assert act(workflow_id=workflow.pk).state == act(workflow_id=workflow.pk).state
        assert state_of(workflow) == state


def test_what_was_started_ends_while_paused_and_what_was_claimed_is_not_started() -> None:
    executor = boot()
    workflow = submit(["a", "b"], batch_size=1)
    dispatcher = queue()
    dispatcher.run()
    pairs = [pair for m in dispatcher.take_sent() for pair in m.leases]
    (one,) = take(pairs[:1], by=executor)

    control.pause(workflow_id=workflow.pk)

    assert take(pairs[1:], by=executor) == []
    assert leases.extend(one.batch_id, one.fence, call_limit=timedelta(minutes=1))
    leases.finish([rated(one)])
    assert states(workflow) == ["COMPLETED", "PENDING"]
    leases.expire(now=database_now() + timedelta(seconds=16), trust_heartbeats=False)
    assert ways(workflow) == ["DONE", "READY"]
    assert batches(workflow)[1].lost == 0
    assert not flights()
    counts_add_up(workflow)


def test_deadline_and_max_duration_go_on_while_paused() -> None:
    late, over = submit(["a"]), submit(["b"])
    for workflow in (late, over):
        control.pause(workflow_id=workflow.pk)
    Workflow.objects.filter(pk=late.pk).update(deadline_at=database_now())
    Workflow.objects.filter(pk=over.pk).update(ends_at=database_now())

    check_all()

    assert [finished(w) for w in (late, over)] == ["FAILED", "FAILED"]
    assert [requests(w)[0].error for w in (late, over)] == ["deadline", "max_duration"]


def test_a_paused_workflow_is_closed_paused_and_then_resumed_running() -> None:
    workflow = submit(["a"], state=WorkflowState.OPEN)
    control.pause(workflow_id=workflow.pk)

    assert control.close(workflow_id=workflow.pk).state == WorkflowState.PAUSED

    assert control.resume(workflow_id=workflow.pk).state == WorkflowState.RUNNING


def test_the_second_look_goes_on_while_paused_and_does_not_stand_in_the_way_of_others() -> None:
    """A DELAYED batch whose flight is gone is looked at once, paused or not."""
    executor = boot()
    dispatcher = queue()
    submit(["a"])
    dispatcher.run()
    (leader,) = take(dispatcher.take_sent()[0], by=executor)
    workflow = submit(["a", "b"], batch_size=2)
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    leases.finish([Finish(taken=taken, not_before=database_now() + HOUR)])
    control.pause(workflow_id=workflow.pk)

    leases.finish([rated(leader)])
    claim.look_again(database_now())

    assert states(workflow) == ["COMPLETED", "PENDING"]
    assert not BatchWait.objects.exists()


@pytest.mark.parametrize(
    ("act", "state", "code"),
    [
        (control.pause, WorkflowState.COMPLETED, "already_finished"),
        (control.pause, WorkflowState.CANCELLED, "already_finished"),
        (control.pause, WorkflowState.ENDING, "workflow_ending"),
        (control.pause, WorkflowState.REOPENING, "workflow_reopening"),
        (control.resume, WorkflowState.PARTIAL, "already_finished"),
        (control.resume, WorkflowState.ENDING, "workflow_ending"),
        (control.complete, WorkflowState.CANCELLED, "already_finished"),
        (control.retry, WorkflowState.COMPLETED, "already_finished"),
        (control.retry, WorkflowState.RUNNING, "workflow_unfinished"),
        (control.retry, WorkflowState.PAUSED, "workflow_unfinished"),
        (control.retry, WorkflowState.ENDING, "workflow_ending"),
    ],
)
def test_an_act_that_the_state_does_not_allow_is_a_conflict(
    act: Callable[..., Any], state: WorkflowState, code: str
) -> None:
    workflow = builders.workflow(
        rater(), state=state, ending_reason="cancelled" if state == WorkflowState.ENDING else ""
    )
    before = Workflow.objects.values().get(pk=workflow.pk)

    assert refused(act, workflow) == code

    assert Workflow.objects.values().get(pk=workflow.pk) == before


# Ending by force


@pytest.mark.parametrize(
    ("end", "state", "error"),
    [
        (control.cancel, "CANCELLED", "cancelled"),
        (control.complete, "CANCELLED", "not_awaited"),
    ],
)
def test_ending_reaches_every_open_item_and_keeps_what_was_rated(
    end: Callable[..., Any], state: str, error: str
) -> None:
    workflow, _, (held, running) = open_in_every_way()

    end(workflow_id=workflow.pk)

    assert states(workflow) == [state] * 5
    assert {r.error for r in requests(workflow)} == {error}
    assert ways(workflow) == ["DONE", "DONE", "started", "DONE", "DONE"]
    assert not BatchWait.objects.exists()
    assert finished(workflow) in ("CANCELLED", "FAILED")
    before = list(Rating.objects.values_list("pk", flat=True))
    leases.finish([rated(running), rated(held)])
    assert states(workflow) == [state] * 5
    assert len(before) + 2 == Rating.objects.count(), "late answers reach the archive"
    assert not Flight.objects.exists()
    rows_are_sound()
    counts_add_up(workflow)


def test_completing_says_what_the_requests_say() -> None:
    workflow, _, (one, _) = started("a", "b", batch_size=1)
    leases.finish([rated(one)])

    completed = control.complete(workflow_id=workflow.pk)

    assert completed.state == WorkflowState.PARTIAL
    assert completed.ending_reason == EndingReason.FORCED
    assert finished(workflow) == "PARTIAL"
    assert states(workflow) == ["COMPLETED", "CANCELLED"]
    assert control.complete(workflow_id=workflow.pk).finished_at == completed.finished_at


@pytest.mark.parametrize(
    "state", [WorkflowState.COMPLETED, WorkflowState.PARTIAL, WorkflowState.FAILED]
)
def test_completing_what_has_ended_is_harmless(state: WorkflowState) -> None:
    workflow = builders.workflow(rater(), state=state)

    assert control.complete(workflow_id=workflow.pk).state == state


@pytest.mark.parametrize("state", [WorkflowState.OPEN, WorkflowState.PAUSED])
def test_completing_closes_an_open_or_paused_workflow(state: WorkflowState) -> None:
    workflow = submit(["a"], state=state, closed_at=None)

    assert control.complete(workflow_id=workflow.pk).closed_at is not None
    assert finished(workflow) == "FAILED"


def test_max_duration_reaches_every_open_item() -> None:
    workflow, _, (_, running) = open_in_every_way()
    Workflow.objects.filter(pk=workflow.pk).update(ends_at=database_now())

    check_all()

    assert states(workflow) == ["TIMED_OUT"] * 5
    assert ways(workflow) == ["DONE", "DONE", "started", "DONE", "DONE"]
    leases.finish([rated(running)])
    assert finished(workflow) == "FAILED"


def test_the_deadline_reaches_all_that_was_not_started() -> None:
    workflow, _, (_, running) = open_in_every_way()
    Workflow.objects.filter(pk=workflow.pk).update(deadline_at=database_now())

    check_all()

    assert states(workflow) == ["TIMED_OUT", "TIMED_OUT", "PENDING", "TIMED_OUT", "TIMED_OUT"]
    assert ways(workflow) == ["DONE", "DONE", "started", "DONE", "DONE"]
    counts_add_up(workflow)
    leases.finish([rated(running)])
    check_all()
    assert finished(workflow) == "PARTIAL"
    rows_are_sound()


def test_complete_when_ends_every_open_item_and_takes_late_answers_into_the_archive_only() -> None:
    workflow, _, (_, running) = open_in_every_way(complete_when=0.2)
    check_all()
    assert state_of(workflow) == "RUNNING"
    archived("e")
    Batch.objects.filter(workflow=workflow, state=BatchState.READY).update(state=BatchState.WAITING)
    queue().wake_and_run()
    assert states(workflow).count("COMPLETED") == 1

    check_all()

    assert finished(workflow) == "PARTIAL"
    assert states(workflow) == ["CANCELLED"] * 4 + ["COMPLETED"]
    before = states(workflow)
    leases.finish([rated(running)])
    assert states(workflow) == before
    assert Rating.objects.filter(fingerprint=key("c")).exists()


def test_complete_when_goes_on_while_paused() -> None:
    workflow, _, (one, _) = started("a", "b", batch_size=1, complete_when=0.5)
    control.pause(workflow_id=workflow.pk)
    leases.finish([rated(one)])

    check_all()

    assert finished(workflow) == "PARTIAL"


def test_a_sweep_that_stood_still_touches_nothing_of_a_new_round() -> None:
    """It read ENDING; meanwhile the workflow ended and was retried."""
    workflow = submit(["a"])
    control.cancel(workflow_id=workflow.pk)
    stale = Workflow.objects.get(pk=workflow.pk)
    control.retry(workflow_id=workflow.pk)

    with connection.cursor() as cursor:
        assert not ending._open_batches(cursor, stale, after=0, started_too=True)
    assert states(workflow) == ["PENDING"]


# Changing


def test_a_new_priority_is_what_the_next_pass_goes_by() -> None:
    executor = boot(slots=1)
    first, urgent = submit(["a"], priority=50), submit(["b"], priority=50)
    control.change(
        workflow_id=urgent.pk, changes=Changes(priority=90), now=database_now(), actor="alice"
    )
    dispatcher = queue(Replica(window=1))
    dispatcher.run()
    (message,) = dispatcher.take_sent()

    (taken,) = take(message, by=executor)

    assert (taken.workflow_id, taken.priority) == (urgent.pk, 90)
    assert first.pk != urgent.pk


def test_a_running_call_is_not_recalled_by_a_change() -> None:
    workflow, _, (taken,) = started("a")

    control.change(workflow_id=workflow.pk, changes=Changes(priority=1), now=database_now())

    assert ways(workflow) == ["started"]
    leases.finish([rated(taken)])
    assert states(workflow) == ["COMPLETED"]


def test_a_deadline_counts_from_the_acceptance_and_takes_the_max_duration_along() -> None:
    now = database_now()
    workflow = submit(
        ["a"], created_at=now - HOUR, deadline_in=HOUR, ends_in=HOUR + timedelta(seconds=120)
    )

    changed = control.change(
        workflow_id=workflow.pk, changes=Changes(deadline_s=3 * 3_600, name="later"), now=now
    )

    assert changed.name == "later"
    assert changed.deadline_at == workflow.created_at + 3 * HOUR
    assert changed.ends_at - changed.deadline_at == timedelta(seconds=120)


def test_a_max_duration_below_the_deadline_stays() -> None:
    workflow = submit(["a"], deadline_in=2 * HOUR, ends_in=HOUR)

    changed = control.change(
        workflow_id=workflow.pk, changes=Changes(deadline_s=4 * 3_600), now=database_now()
    )

    assert changed.ends_at == workflow.ends_at


def test_a_deadline_that_is_over_is_refused() -> None:
    now = database_now()
    workflow = submit(["a"], created_at=now - HOUR)

    with pytest.raises(InvalidFields) as caught:
        control.change(workflow_id=workflow.pk, changes=Changes(deadline_s=60), now=now)

    assert [(e["field"], e["code"]) for e in caught.value.errors] == [
        ("deadline_s", "deadline_passed")
    ]


def test_of_what_has_ended_only_the_name_is_changed() -> None:
    workflow = builders.workflow(rater(), state=WorkflowState.COMPLETED)
    now = database_now()

    for changes in (Changes(priority=1), Changes(deadline_s=9_999_999)):
        assert refused(control.change, workflow, changes=changes, now=now) == "already_finished"
    assert control.change(
        workflow_id=workflow.pk, changes=Changes(name="kept"), now=now
    ).name == "kept"  # fmt: skip


# Acceptance: what failed or was rated before a row came counts for nothing


def test_rows_appended_later_do_not_fail_for_what_failed_before_them() -> None:
    workflow = submit(["a"], state=WorkflowState.OPEN, created_at=database_now() - HOUR)
    boot()
    FailedFlight.objects.create(
        fingerprint=key("a"), code="bad", failed_at=database_now() - timedelta(minutes=1)
    )

    assert queue().wake_and_run().sent == 1
    assert states(workflow) == ["PENDING"]


def test_bypass_takes_no_rating_made_before_the_row_came() -> None:
    workflow = submit(["a"], bypass=True, created_at=database_now() - HOUR)
    boot()
    archived("a", age=timedelta(minutes=1))

    assert queue().wake_and_run().sent == 1
    assert states(workflow) == ["PENDING"]


# Retiring a version


def test_retiring_a_version_ends_what_waits_for_it_and_lets_started_tries_end() -> None:
    workflow, _, (held, running) = open_in_every_way()
    old = workflow.rater_version
    builders.version(old.rater, number=2, model_version="v2")

    control.retire(version=old, now=database_now())

    assert states(workflow) == ["FAILED", "FAILED", "PENDING", "FAILED", "FAILED"]
    assert [r.error for r in requests(workflow)].count("version_retired") == 4
    leases.finish([rated(running)])
    check_all()
    assert finished(workflow) == "PARTIAL"
    leases.finish([Finish(taken=held, not_before=database_now())])
    check_all()
    other = Workflow.objects.exclude(pk=workflow.pk).get()
    assert finished(other) == "FAILED"
    assert refused(control.retry, workflow) == "version_retired"


def test_what_the_archive_has_is_taken_before_a_version_is_retired() -> None:
    workflow = submit(["a", "b"])
    archived("a")
    builders.version(workflow.rater, number=2, model_version="v2")

    control.retire(version=workflow.rater_version, now=database_now())

    assert finished(workflow) == "PARTIAL"
    assert states(workflow) == ["COMPLETED", "FAILED"]
    assert requests(workflow)[0].source == Source.ARCHIVE


def test_what_is_left_of_a_retired_version_is_ended_by_the_checker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "DONE_IN_CALL", 0)
    workflow = submit(names(900), batch_size=1)
    builders.version(workflow.rater, number=2, model_version="v2")

    version = control.retire(version=workflow.rater_version, now=database_now())
    assert set(states(workflow)) == {"PENDING"}
    again = control.retire(version=workflow.rater_version, now=database_now())
    check_all()

    assert again.retired_at == version.retired_at
    assert finished(workflow) == "FAILED"


def test_the_current_version_is_not_retired() -> None:
    with pytest.raises(Conflict) as caught:
        control.retire(version=rater(), now=database_now())

    assert caught.value.code == "version_current"
    assert not RaterVersion.objects.exclude(retired_at=None).exists()


def test_a_retired_version_that_the_rater_is_changed_back_to_is_in_use_again(
    settings: Any,
) -> None:
    builders.use_plugins(settings)
    now = database_now()
    made, _ = raters.register(Rater(id="r", autorater="stub", model_id=builders.MODEL), now=now)
    old = made.current_version
    raters.change(rater_id="r", changes={"score_max": 9.0}, now=now)
    assert old is not None
    control.retire(version=old, now=now)

    raters.change(rater_id="r", changes={"score_max": 4.0}, now=now)

    old.refresh_from_db()
    assert raters.find("r").current_version_id == old.pk
    assert old.retired_at is None


# Beside others


@with_commits
def test_a_pause_waits_for_rows_that_are_being_taken_in() -> None:
    workflow = submit(["a"], state=WorkflowState.OPEN)

    with threads(1) as pool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                "SELECT FROM fulfillment_workflow WHERE id = %s FOR SHARE", [workflow.pk]
            )
            pausing = pool.submit(control.pause, workflow_id=workflow.pk)
            until_blocked(pausing)
        assert pausing.result(10).state == WorkflowState.PAUSED


def test_a_million_would_not_hold_the_checker_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick ends so many items of one workflow and goes on to the next."""
    monkeypatch.setattr(control, "DONE_IN_CALL", 0)
    monkeypatch.setattr(ending, "MOST_ITEMS", 400)
    large, small = submit(names(900), batch_size=1), submit(["a"])
    for workflow in (large, small):
        control.cancel(workflow_id=workflow.pk)

    check_all()
    assert finished(small) == "CANCELLED"
    assert states(large).count("PENDING") == 500
    counts_add_up(large)
    check_all()
    assert states(large).count("PENDING") == 100
    check_all()
    assert finished(large) == "CANCELLED"
