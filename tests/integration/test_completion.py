"""The completion checker: workflows end once, as what they are, and their counts add up."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from fulfillment import control, leases, scores
from fulfillment.clock import database_now
from fulfillment.completion import check
from fulfillment.control import cancel, close, pause
from fulfillment.errors import Conflict, NotFound
from fulfillment.folding import fold
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
    Batch,
    BatchWait,
    Event,
    Flight,
    RatingRequest,
    StatsDelta,
    Upload,
    Workflow,
    WorkflowStats,
)
from fulfillment.policy.lifecycle import BatchState, EndingReason, Source, WorkflowState
from tests import builders
from tests.rating_queue import (
    Queue,
    archived,
    batches,
    boot,
    check_all,
    counts_add_up,
    finished,
    queue,
    rate_all,
    rated,
    requests,
    states,
    submit,
    take,
    threads,
    until_blocked,
)

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def started(*rows: str, **changes: Any) -> tuple[Workflow, Queue, list[Taken]]:
    """Submit rows, claim them and take them over."""
    executor = boot()
    workflow = submit(rows, **changes)
    dispatcher = queue()
    dispatcher.run()
    return workflow, dispatcher, [t for m in dispatcher.take_sent() for t in take(m, by=executor)]


def finish(taken: Taken, **what: Any) -> None:
    leases.finish([Finish(taken=taken, **what)])


# When


def test_a_workflow_ends_when_nothing_is_open() -> None:
    workflow, _, (one, two) = started("a", "b", batch_size=1)
    leases.finish([rated(one)])
    assert not check(workflow.pk)
    assert not Event.objects.exists()
    leases.finish([rated(two)])

    assert check(workflow.pk)

    assert finished(workflow) == "COMPLETED"
    assert not check(workflow.pk)
    assert Event.objects.count() == 1


@pytest.mark.parametrize("state", [WorkflowState.OPEN, WorkflowState.PAUSED])
def test_a_workflow_that_takes_rows_does_not_end(state: WorkflowState) -> None:
    workflow, _, (taken,) = started("a", state=WorkflowState.OPEN)
    leases.finish([rated(taken)])
    Workflow.objects.update(state=state)

    assert not check(workflow.pk)
    check_all()
    assert not Event.objects.exists()


def test_a_closed_workflow_ends_while_it_is_paused() -> None:
    workflow, _, (taken,) = started("a")
    pause(workflow_id=workflow.pk)
    leases.finish([rated(taken)])

    check_all()

    assert finished(workflow) == "COMPLETED"


def test_closing_a_workflow_with_nothing_open_ends_it() -> None:
    workflow, _, (taken,) = started("a", state=WorkflowState.OPEN)
    leases.finish([rated(taken)])

    closed = close(workflow_id=workflow.pk)

    assert closed.state == WorkflowState.COMPLETED
    assert finished(workflow) == "COMPLETED"
    again = close(workflow_id=workflow.pk)
    assert again.closed_at == closed.closed_at


def test_closing_a_workflow_with_open_items_waits_for_them() -> None:
    workflow, _, (taken,) = started("a", state=WorkflowState.OPEN)

    assert close(workflow_id=workflow.pk).state == WorkflowState.RUNNING

    leases.finish([rated(taken)])
    assert check_all() == 1
    assert finished(workflow) == "COMPLETED"


@pytest.mark.parametrize(("silent_s", "refused"), [(30, True), (61, False)])
def test_closing_waits_for_an_upload_that_lives(silent_s: int, refused: bool) -> None:
    workflow = submit(["a"], state=WorkflowState.OPEN)
    now = database_now()
    Upload.objects.create(
        owner="alice", body_digest=workflow.rater_version.digest, workflow=workflow, creates=False,
        closes=False, first_position=1, rows=1, holder=workflow.rater_version.digest,
        heartbeat_at=now - timedelta(seconds=silent_s), created_at=now,
    )  # fmt: skip

    if refused:
        with pytest.raises(Conflict) as caught:
            close(workflow_id=workflow.pk)
        assert caught.value.code == "upload_in_progress"
    else:
        assert close(workflow_id=workflow.pk).state == WorkflowState.RUNNING


@pytest.mark.parametrize("call", [close, cancel])
def test_a_workflow_that_is_still_received_is_not_there(call: Any) -> None:
    workflow = submit(["a"], state=WorkflowState.RECEIVING)

    with pytest.raises(NotFound):
        call(workflow_id=workflow.pk)


@with_commits
def test_two_checks_at_once_write_one_event() -> None:
    workflow, _, (taken,) = started("a")
    leases.finish([rated(taken)])
    start = threading.Barrier(4)

    def run() -> bool:
        start.wait(10)
        return check(workflow.pk)

    with threads(4) as pool:
        ended = [future.result(10) for future in [pool.submit(run) for _ in range(4)]]

    assert sorted(ended) == [False, False, False, True]
    assert finished(workflow) == "COMPLETED"


@with_commits
def test_a_check_waits_for_rows_that_are_being_taken_in() -> None:
    """Intake holds the workflow FOR SHARE; the check must look again under its own lock."""
    workflow = submit([], state=WorkflowState.RUNNING)

    with threads(1) as pool:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT FROM fulfillment_workflow WHERE id = %s FOR SHARE", [workflow.pk]
                )
            checking = pool.submit(check, workflow.pk)
            until_blocked(checking)
            builders.batch(workflow, [0])
            builders.request(workflow, 0)
        assert not checking.result(10)

    assert not Event.objects.exists()


@with_commits
def test_a_check_does_not_wait_for_a_key_check() -> None:
    workflow, _, (taken,) = started("a")
    leases.finish([rated(taken)])

    with threads(1) as pool, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT FROM fulfillment_workflow WHERE id = %s FOR KEY SHARE", [workflow.pk]
        )
        assert pool.submit(check, workflow.pk).result(10)


@with_commits
def test_a_fold_beside_a_check_loses_nothing() -> None:
    """Whichever takes a delta, both of them end in the stats and in the event."""
    workflow, _, taken = started(*names(40), batch_size=2)
    for one in taken:
        leases.finish([rated(one)])
    assert StatsDelta.objects.count() == len(taken) > 10

    with threads(1) as pool:
        with transaction.atomic():
            assert fold() == len(taken)
            late = pool.submit(rate_rest, workflow)
            late.result(10)
            checking = pool.submit(check, workflow.pk)
            until_blocked(checking)
        assert checking.result(10)

    assert finished(workflow) == "COMPLETED"
    assert WorkflowStats.objects.get(workflow=workflow).completed == 40
    assert not StatsDelta.objects.exists()


def rate_rest(workflow: Workflow) -> None:
    dispatcher = queue()
    rate_all(dispatcher, boot())


@with_commits
def test_folds_at_once_fold_each_delta_once() -> None:
    workflows = [submit(names(1)) for _ in range(5)]
    for _ in range(60):
        for workflow in workflows:
            StatsDelta.objects.create(workflow=workflow, model_calls=1, accelerator_seconds=0.5)
    start = threading.Barrier(3)

    def run() -> int:
        start.wait(10)
        return fold() + fold()

    with threads(3) as pool:
        folded = [future.result(10) for future in [pool.submit(run) for _ in range(3)]]

    assert sum(folded) == 300
    assert set(WorkflowStats.objects.values_list("model_calls", "accelerator_seconds")) == {
        (60, 30.0)
    }


# As what


@pytest.mark.parametrize(
    ("scored", "failed", "timed_out", "state"),
    [
        ([0, 1], [], [], "COMPLETED"),
        ([0], [1], [], "PARTIAL"),
        ([0], [], [1], "PARTIAL"),
        ([], [0, 1], [], "FAILED"),
        ([], [0], [1], "FAILED"),
        ([], [], [0, 1], "FAILED"),
    ],
)
def test_a_workflow_ends_as_what_its_requests_say(
    scored: list[int], failed: list[int], timed_out: list[int], state: str
) -> None:
    workflow, _, (taken,) = started("a", "b")
    leases.finish(
        [
            Finish(
                taken=taken,
                scored={i: scores.Scored(score=1.0) for i in scored},
                failed=dict.fromkeys(failed, "x"),
                timed_out=dict.fromkeys(timed_out, "deadline"),
            )
        ]
    )

    check_all()

    assert finished(workflow) == state


def test_a_workflow_without_rows_that_is_closed_is_completed() -> None:
    workflow = submit([], state=WorkflowState.OPEN)

    assert close(workflow_id=workflow.pk).state == WorkflowState.COMPLETED


# Cancelling


def test_cancelling_keeps_what_was_rated_and_ends_the_rest() -> None:
    workflow, _, (one, _) = started("a", "b", "b", "c", batch_size=2)
    leases.finish([rated(one)])

    cancelled = cancel(workflow_id=workflow.pk)

    assert cancelled.state == WorkflowState.CANCELLED
    assert finished(workflow) == "CANCELLED"
    assert states(workflow) == ["COMPLETED"] * 3 + ["CANCELLED"]
    assert [r.error for r in requests(workflow)] == [None, None, None, "cancelled"]


def test_cancelling_twice_is_harmless() -> None:
    workflow = submit(["a"])

    first, second = cancel(workflow_id=workflow.pk), cancel(workflow_id=workflow.pk)

    assert (second.state, second.finished_at) == (WorkflowState.CANCELLED, first.finished_at)
    assert finished(workflow) == "CANCELLED"


def test_a_workflow_that_is_being_cancelled_can_be_cancelled() -> None:
    workflow = submit(["a"])
    Workflow.objects.update(state=WorkflowState.ENDING, ending_reason=EndingReason.CANCELLED)

    assert cancel(workflow_id=workflow.pk).state == WorkflowState.CANCELLED


@pytest.mark.parametrize("items", [[], [0], [0, 1]], ids=["FAILED", "PARTIAL", "COMPLETED"])
def test_what_has_ended_by_itself_cannot_be_cancelled(items: list[int]) -> None:
    workflow, _, (taken,) = started("a", "b")
    rest = dict.fromkeys({0, 1} - set(items), "x")
    leases.finish(
        [Finish(taken=taken, scored={i: scores.Scored(score=1.0) for i in items}, failed=rest)]
    )
    check_all()
    before = finished(workflow)

    with pytest.raises(Conflict) as caught:
        cancel(workflow_id=workflow.pk)

    assert caught.value.code == "already_finished"
    assert finished(workflow) == before


def test_cancelling_an_open_or_paused_workflow_closes_it() -> None:
    for state in (WorkflowState.OPEN, WorkflowState.PAUSED):
        workflow = submit(["a"], state=state, closed_at=None)

        assert cancel(workflow_id=workflow.pk).closed_at is not None
        assert finished(workflow) == "CANCELLED"


def test_a_started_batch_keeps_its_lease_and_one_not_started_loses_it() -> None:
    executor = boot()
    workflow = submit(["a", "b", "c"], batch_size=1)
    dispatcher = queue()
    dispatcher.run()
    pairs = [pair for m in dispatcher.take_sent() for pair in m.leases]
    take(pairs[:1], by=executor)

    cancel(workflow_id=workflow.pk)

    running, *not_started = batches(workflow)
    assert (running.state, running.open_mask, running.fence) == (BatchState.LEASED, 0, 1)
    assert [(b.state, b.fence, b.lease_until) for b in not_started] == [
        (BatchState.DONE, 2, None)
    ] * 2
    assert finished(workflow) == "CANCELLED"


def test_waiting_and_delayed_batches_are_swept_with_their_waits() -> None:
    workflow, dispatcher, (taken,) = started("a")
    follower = submit(["a"])
    dispatcher.run()
    assert BatchWait.objects.exists()
    finish(taken, not_before=database_now() + timedelta(hours=1))

    for ended in (workflow, follower):
        cancel(workflow_id=ended.pk)
        assert finished(ended) == "CANCELLED"
        assert [b.state for b in batches(ended)] == [BatchState.DONE]
    assert not BatchWait.objects.exists()


def test_many_batches_are_swept_in_chunks() -> None:
    workflow = submit(names(900), batch_size=1)

    cancel(workflow_id=workflow.pk)

    assert set(states(workflow)) == {"CANCELLED"}
    assert finished(workflow) == "CANCELLED"


def test_a_cancel_sweeps_so_much_within_the_call_and_the_checker_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "DONE_IN_CALL", 500)
    workflow = submit(names(1_000), batch_size=1)

    cancelled = cancel(workflow_id=workflow.pk)

    assert cancelled.state == WorkflowState.ENDING
    assert states(workflow).count("PENDING") == 200
    assert not Event.objects.exists()
    counts_add_up(workflow)
    check_all()
    assert finished(workflow) == "CANCELLED"


@with_commits
def test_a_cancel_waits_for_a_finish_and_keeps_what_it_wrote() -> None:
    workflow, _, (taken,) = started("a", "b")

    with threads(1) as pool:
        with transaction.atomic():
            leases.finish([rated(taken, 0, not_before=database_now())])
            cancelling = pool.submit(cancel, workflow_id=workflow.pk)
            until_blocked(cancelling)
        cancelling.result(10)

    assert states(workflow) == ["COMPLETED", "CANCELLED"]
    assert finished(workflow) == "CANCELLED"


# Deadline


def pass_deadline() -> None:
    Workflow.objects.update(deadline_at=database_now())


def test_the_deadline_ends_what_was_not_started_and_lets_the_rest_go_on() -> None:
    executor = boot()
    workflow = submit(names(6), batch_size=1)
    dispatcher = queue()
    dispatcher.run()
    pairs = [pair for m in dispatcher.take_sent() for pair in m.leases]
    one, two, three, four = take(pairs[:4], by=executor)
    leases.finish([rated(one)])
    finish(two, not_before=database_now() + timedelta(hours=1))
    pass_deadline()

    check_all()

    assert states(workflow) == [
        "COMPLETED", "TIMED_OUT", "PENDING", "PENDING", "TIMED_OUT", "TIMED_OUT",
    ]  # fmt: skip
    assert {r.error for r in requests(workflow)} == {None, "deadline"}
    assert not Event.objects.exists()
    counts_add_up(workflow)
    leases.finish([rated(three)])
    finish(four, timed_out={0: "deadline"})
    check_all()
    assert finished(workflow) == "PARTIAL"
    assert states(workflow)[2:4] == ["COMPLETED", "TIMED_OUT"]


def test_a_started_try_that_is_lost_after_the_deadline_is_not_tried_again() -> None:
    workflow, dispatcher, _ = started("a")
    pass_deadline()
    check_all()
    assert states(workflow) == ["PENDING"]

    leases.expire(now=database_now() + timedelta(hours=1), trust_heartbeats=False)
    dispatcher.wake_and_run()
    check_all()

    assert not dispatcher.sent
    assert finished(workflow) == "FAILED"


def test_the_deadline_takes_what_the_archive_has_first() -> None:
    workflow = submit(["a", "b", "a"])
    archived("a", age=timedelta(minutes=1), score=3.0)
    pass_deadline()

    check_all()

    assert states(workflow) == ["COMPLETED", "TIMED_OUT", "COMPLETED"]
    assert [r.source for r in requests(workflow)] == [Source.ARCHIVE, None, Source.ARCHIVE]
    assert finished(workflow) == "PARTIAL"


def test_the_deadline_takes_from_the_archive_only_what_the_workflow_allows() -> None:
    archived("a", age=timedelta(minutes=1))
    strict, bypassing = submit(["a"], max_age_s=30), submit(["a"], bypass=True)
    pass_deadline()

    check_all()

    assert [finished(w) for w in (strict, bypassing)] == ["FAILED", "FAILED"]


def test_a_follower_whose_leader_finishes_before_the_deadline_gets_its_rating() -> None:
    _, dispatcher, (taken,) = started("a")
    follower = submit(["a"])
    dispatcher.run()
    leases.finish([rated(taken)])
    Workflow.objects.filter(pk=follower.pk).update(deadline_at=database_now())

    check_all()

    assert [r.source for r in requests(follower)] == [Source.COALESCED]
    assert finished(follower) == "COMPLETED"


def test_the_deadline_of_an_open_workflow_does_not_end_it() -> None:
    workflow = submit(["a"], state=WorkflowState.OPEN)
    pass_deadline()

    check_all()

    assert states(workflow) == ["TIMED_OUT"]
    assert close(workflow_id=workflow.pk).state == WorkflowState.FAILED


def test_many_batches_time_out_in_chunks() -> None:
    workflow = submit(names(900), batch_size=1)
    pass_deadline()

    check_all()

    assert finished(workflow) == "FAILED"


# Max duration and early completion


@pytest.mark.parametrize("state", [WorkflowState.OPEN, WorkflowState.RUNNING, WorkflowState.PAUSED])
def test_max_duration_ends_everything(state: WorkflowState) -> None:
    before = WorkflowState.OPEN if state == WorkflowState.OPEN else WorkflowState.RUNNING
    workflow, _, (one, two) = started("a", "b", batch_size=1, state=before)
    leases.finish([rated(one)])
    Workflow.objects.update(state=state, ends_at=database_now())

    check_all()

    assert states(workflow) == ["COMPLETED", "TIMED_OUT"]
    assert requests(workflow)[1].error == "max_duration"
    assert finished(workflow) == "PARTIAL"
    leases.finish([rated(two)])
    assert states(workflow) == ["COMPLETED", "TIMED_OUT"]
    counts_add_up(workflow)


@pytest.mark.parametrize(
    ("complete_when", "ended", "state"),
    [(0.5, 1, "RUNNING"), (0.5, 2, "PARTIAL"), (0.75, 2, "RUNNING"), (1.0, 3, "RUNNING")],
)
def test_complete_when_ends_a_workflow_once_that_share_has_ended(
    complete_when: float, ended: int, state: str
) -> None:
    workflow, _, taken = started(*names(4), batch_size=1, complete_when=complete_when)
    leases.finish([rated(t) for t in taken[:ended]])

    check_all()

    workflow.refresh_from_db()
    assert WorkflowState(workflow.state).name == state
    if state == "PARTIAL":
        assert finished(workflow) == "PARTIAL"
        assert {r.error for r in requests(workflow)} == {None, "not_awaited"}


def test_complete_when_waits_until_the_workflow_is_closed() -> None:
    workflow, _, (one, _) = started(
        "a", "b", batch_size=1, complete_when=0.5, state=WorkflowState.OPEN
    )
    leases.finish([rated(one)])

    check_all()

    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.OPEN


def test_failures_count_as_ended_for_complete_when() -> None:
    workflow, _, (one, _) = started("a", "b", batch_size=1, complete_when=0.5)
    finish(one, failed={0: "x"})

    check_all()

    assert finished(workflow) == "FAILED"


# A finished workflow stays as it is (I13)


def test_what_comes_late_changes_nothing_but_the_archive() -> None:
    workflow, dispatcher, (taken,) = started("a")
    cancel(workflow_id=workflow.pk)
    before = list(RatingRequest.objects.values())

    leases.finish([rated(taken)])
    leases.finish([rated(taken)])
    leases.expire(now=database_now() + timedelta(hours=1), trust_heartbeats=False)
    dispatcher.wake_and_run()
    check_all()

    assert list(RatingRequest.objects.values()) == before
    assert finished(workflow) == "CANCELLED"
    assert counts_add_up(workflow)["model_calls"] == 1, "what it cost is counted all the same"
    assert not Flight.objects.exists()
    assert not Batch.objects.exclude(state=BatchState.DONE).exists()
