"""Leases: taking over, finishing, expiry and waking, all under the fence."""

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from hypothesis import given, settings
from hypothesis import strategies as st

from fulfillment import control, ending, leases
from fulfillment.clock import database_now
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
    Batch,
    BatchWait,
    ExecutorBoot,
    FailedFlight,
    Flight,
    Rating,
    Workflow,
)
from fulfillment.policy.lifecycle import BatchState, RequestState, Source, WorkflowState
from fulfillment.scores import Scored
from tests.rating_queue import (
    CALL,
    Queue,
    Replica,
    batches,
    boot,
    check_all,
    counts_add_up,
    end_pauses,
    finished,
    flights,
    key,
    progress,
    queue,
    rated,
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


def claimed(*rows: str, **changes: Any) -> tuple[Workflow, Queue, list[tuple[int, int]]]:
    """Submit rows and claim them; return what the messages say."""
    workflow = submit(rows, **changes)
    dispatcher = queue()
    dispatcher.run()
    return workflow, dispatcher, [pair for m in dispatcher.take_sent() for pair in m.leases]


def only(workflow: Workflow) -> Batch:
    (batch,) = batches(workflow)
    return batch


def later(seconds: float = 3_600) -> Any:
    return database_now() + timedelta(seconds=seconds)


def expire(*, after_s: float = 0, trust_heartbeats: bool = True) -> int:
    """Run expiry as it will be after some time, in which executors went on beating."""
    now = later(after_s)
    ExecutorBoot.objects.update(heartbeat_at=now)
    return leases.expire(now=now, trust_heartbeats=trust_heartbeats)


# Taking over


def test_taking_over_starts_the_long_lease_and_returns_the_work() -> None:
    executor, task = boot(), uuid.uuid4()
    workflow, _, sent = claimed("a", "b", "a", priority=71, no_store=True)
    before = database_now()

    (taken,) = take(sent, by=executor, task=task)

    batch = only(workflow)
    assert (batch.boot_id, batch.task_id) == (executor, task)
    assert batch.started_at is not None
    assert before <= batch.started_at <= database_now()
    assert batch.lease_until is not None
    # Two readings of the clock in one statement.
    late = batch.lease_until - (batch.started_at + CALL + leases.MARGIN)
    assert timedelta(0) <= late < timedelta(seconds=1)
    assert (taken.batch_id, taken.fence, taken.replica) == (batch.pk, batch.fence, "r1")
    assert (taken.workflow_id, taken.rater_id) == (workflow.pk, workflow.rater_id)
    assert (taken.priority, taken.no_store, taken.best_effort) == (71, True, False)
    assert (list(taken.positions), list(taken.item_of)) == ([0, 2, 1], [0, 0, 1])
    assert taken.fingerprints == [key("a"), key("b")]
    assert (taken.sent, taken.attempts, taken.lost) == (0b11, 0, 0)
    assert taken.deadline_at == workflow.deadline_at
    assert b'"a"' in taken.payload


def test_the_same_message_again_finds_the_same_work() -> None:
    executor, task = boot(), uuid.uuid4()
    _, _, sent = claimed("a")

    first, second = (take(sent, by=executor, task=task)[0] for _ in range(2))

    assert (first.batch_id, first.fence, first.sent) == (second.batch_id, second.fence, second.sent)


@pytest.mark.parametrize("other", ["task", "boot"])
def test_what_was_taken_over_is_no_others(other: str) -> None:
    executor, task = boot(), uuid.uuid4()
    workflow, _, sent = claimed("a")
    take(sent, by=executor, task=task)

    again = take(
        sent,
        by=uuid.uuid4() if other == "boot" else executor,
        task=uuid.uuid4() if other == "task" else task,
    )

    assert again == []
    assert (only(workflow).boot_id, only(workflow).task_id) == (executor, task)


def _cancel(workflow: Workflow) -> None:
    control.cancel(workflow_id=workflow.pk)


def _set(**changes: Any) -> Any:
    return lambda workflow: Workflow.objects.filter(pk=workflow.pk).update(**changes)


def _let_lease_end(workflow: Workflow) -> None:
    assert expire(after_s=16) == 1


def _sweep_at_deadline(workflow: Workflow) -> None:
    Workflow.objects.filter(pk=workflow.pk).update(deadline_at=database_now())
    ending.pass_deadline(workflow.pk, now=database_now())


@pytest.mark.parametrize(
    "change",
    [
        _cancel,
        _set(state=WorkflowState.PAUSED),
        _set(state=WorkflowState.ENDING, ending_reason="cancelled"),
        _let_lease_end,
        _sweep_at_deadline,
        lambda workflow: Workflow.objects.update(deadline_at=database_now()),
    ],
    ids=["cancelled", "paused", "ending", "lease ended", "swept", "deadline passed"],
)
def test_a_message_is_dropped_once_its_work_may_not_be_started(change: Any) -> None:
    executor = boot()
    workflow, _, sent = claimed("a")

    change(workflow)

    assert take(sent, by=executor) == []
    assert only(workflow).started_at is None


def test_of_one_message_only_what_is_current_is_taken() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b", "c", batch_size=1)
    gone, unknown = batches(workflow)[1], 10**9
    Batch.objects.filter(pk=gone.pk).update(fence=gone.fence + 1)

    taken = take([*sent, (unknown, 1)], by=executor)

    assert [t.batch_id for t in taken] == [pk for pk, _ in sent if pk != gone.pk]


@with_commits
def test_taking_over_and_sweeping_take_row_locks_in_one_order() -> None:
    """Against the order they would deadlock, and a client's cancel could be the victim."""
    executor = boot()
    _, _, sent = claimed("a", "b", "c", batch_size=1)
    first, *_, last = sorted(pk for pk, _ in sent)
    many = submit([f"n{n}" for n in range(2_000)], batch_size=1)  # so that it is planned for many
    Batch.objects.filter(workflow=many).update(
        state=BatchState.LEASED, boot_id=executor, lease_until=later()
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE fulfillment_batch")

    with threads(1) as pool:
        with transaction.atomic():
            Batch.objects.select_for_update().get(pk=first)
            taking = pool.submit(take, list(reversed(sent)), by=executor)
            until_blocked(taking)
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '500ms'")
            Batch.objects.select_for_update().get(pk=last)
        assert len(taking.result(10)) == 3


# Extending


def test_extending_moves_the_lease_and_names_the_item_probed() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b")
    (taken,) = take(sent, by=executor)
    before = only(workflow).lease_until

    assert leases.extend(taken.batch_id, taken.fence, call_limit=CALL * 2, probing=1)

    batch = only(workflow)
    assert before is not None
    assert batch.lease_until is not None
    assert batch.lease_until > before + CALL / 2
    assert batch.probing == 1


@pytest.mark.parametrize(
    "change",
    [
        _cancel,
        lambda workflow: expire(after_s=3_600),
        lambda workflow: leases.finish([rated(take_again(workflow))]),
    ],
    ids=["cancelled", "expired", "finished"],
)
def test_a_lease_that_is_lost_cannot_be_extended(change: Any) -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b")
    (taken,) = take(sent, by=executor)

    change(workflow)

    assert not leases.extend(taken.batch_id, taken.fence, call_limit=CALL)


def take_again(workflow: Workflow) -> Taken:
    batch = only(workflow)
    assert batch.boot_id is not None
    (taken,) = take([(batch.pk, batch.fence)], by=batch.boot_id, task=batch.task_id)
    return taken


# Finishing


def test_a_finish_writes_ratings_requests_and_progress() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b", "c")
    (taken,) = take(sent, by=executor)

    empty = leases.finish(
        [
            Finish(
                taken=taken,
                scored={
                    0: Scored(
                        score=1.0,
                        label="Fails",
                        output='{"why": "because"}',
                        warnings=("cut", "blank"),
                        age_s=30.0,
                        url_digest=key("url"),
                    )
                },
                failed={1: "invalid_request"},
                timed_out={2: "deadline"},
                calls=3,
                accelerator_seconds=4.0,
                device_seconds=1.5,
            )
        ]
    )

    assert empty == [workflow.pk]
    one, two, three = requests(workflow)
    (rating,) = Rating.objects.all()
    assert (one.state, one.source, one.score) == (RequestState.COMPLETED, Source.MODEL, 1.0)
    assert (one.label, one.output) == ("Fails", {"why": "because"})
    assert one.warnings == ["cut", "blank"]
    assert one.attempts == 1
    assert (one.rating_id, one.rated_at) == (rating.pk, rating.produced_at)
    assert timedelta(seconds=30) <= database_now() - rating.produced_at < timedelta(seconds=40)
    assert (rating.fingerprint.hex, rating.reusable) == (key("a"), True)
    assert (rating.workflow_id, rating.rater_version_id) == (
        workflow.pk,
        workflow.rater_version_id,
    )
    assert rating.url_digest == uuid.UUID(key("url"))
    assert (two.state, two.error, two.score) == (RequestState.FAILED, "invalid_request", None)
    assert (three.state, three.error) == (RequestState.TIMED_OUT, "deadline")
    batch = only(workflow)
    assert (batch.state, batch.open_mask, batch.attempts) == (BatchState.DONE, 0, 1)
    assert (batch.lease_until, batch.boot_id, batch.started_at) == (None, None, None)
    assert not flights()
    found = counts_add_up(workflow)
    assert (found["model_calls"], found["attempts"]) == (3, 1)
    assert (found["accelerator_seconds"], found["device_seconds"]) == (4.0, 1.5)


def test_equal_rows_get_one_outcome_and_the_first_counts_as_the_models() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b", "a", "b", "a")
    (taken,) = take(sent, by=executor)

    leases.finish([rated(taken, 0, failed={1: "invalid_request"})])

    assert states(workflow) == ["COMPLETED", "FAILED", "COMPLETED", "FAILED", "COMPLETED"]
    sources = [r.source for r in requests(workflow)]
    assert sources == [Source.MODEL, None, Source.COALESCED, None, Source.COALESCED]
    assert Rating.objects.count() == 1
    found = counts_add_up(workflow)
    assert (found["from_model"], found["coalesced"], found["failed"]) == (1, 2, 2)


def test_warnings_of_intake_and_model_stand_together() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b")
    requests(workflow)[0].__class__.objects.filter(workflow=workflow).update(
        warnings=["nul_replaced"]
    )
    (taken,) = take(sent, by=executor)

    leases.finish(
        [Finish(taken=taken, scored={0: Scored(score=1, warnings=("cut",)), 1: Scored(score=1)})]
    )

    assert [r.warnings for r in requests(workflow)] == [["nul_replaced", "cut"], ["nul_replaced"]]


def snapshot() -> dict[str, Any]:
    with connection.cursor() as cursor:
        found = {}
        for table in (
            "batch", "batchwait", "failedflight", "flight", "rating", "ratingrequest", "statsdelta"
        ):  # fmt: skip
            cursor.execute(f"SELECT * FROM fulfillment_{table} ORDER BY 1")
            found[table] = cursor.fetchall()
    return found


@pytest.mark.parametrize("how", ["same finish", "other outcome"])
def test_a_finish_said_twice_writes_nothing(how: str) -> None:
    executor = boot()
    _, _, sent = claimed("a", "b")
    (taken,) = take(sent, by=executor)
    leases.finish([rated(taken, 0, not_before=later())])
    written = snapshot()

    again = (
        rated(taken, 0) if how == "same finish" else Finish(taken=taken, failed={0: "x", 1: "x"})
    )
    assert leases.finish([again]) == []

    assert snapshot() == written


def test_a_finish_under_another_fence_writes_nothing() -> None:
    executor = boot()
    workflow, dispatcher, sent = claimed("a", "b")
    (late,) = take(sent, by=executor)
    expire(after_s=3_600)
    dispatcher.run()
    (current,) = take(dispatcher.take_sent()[0], by=executor)
    written = snapshot()

    assert leases.finish([rated(late)]) == []

    assert snapshot() == written
    leases.finish([rated(current)])
    assert finished_after_check(workflow) == "COMPLETED"
    assert requests(workflow)[0].attempts == 1


def finished_after_check(workflow: Workflow) -> str:
    check_all()
    return finished(workflow)


def test_a_finish_after_expiry_writes_nothing() -> None:
    executor = boot()
    _, _, sent = claimed("a")
    (taken,) = take(sent, by=executor)
    expire(after_s=3_600)
    written = snapshot()

    assert leases.finish([rated(taken, failed={}, for_good=frozenset())]) == []

    assert snapshot() == written


def test_of_several_finishes_the_lost_ones_do_not_touch_the_others() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b", "c", batch_size=1)
    taken = take(sent, by=executor)
    Batch.objects.filter(pk=taken[1].batch_id).update(fence=99)

    leases.finish([rated(t) for t in taken])

    assert states(workflow) == ["COMPLETED", "PENDING", "COMPLETED"]
    counts_add_up(workflow)


def test_a_finish_of_a_cancelled_batch_writes_the_archive_only_and_frees_its_flights() -> None:
    executor = boot()
    workflow, dispatcher, sent = claimed("a", "b")
    (taken,) = take(sent, by=executor)
    control.cancel(workflow_id=workflow.pk)
    assert finished(workflow) == "CANCELLED"
    batch = only(workflow)
    assert (batch.state, batch.open_mask, batch.fence) == (BatchState.LEASED, 0, taken.fence)
    assert flights().keys() == {key("a"), key("b")}
    other = submit(["a", "b"])
    dispatcher.run()
    assert [b.state for b in batches(other)] == [BatchState.WAITING]

    leases.finish([rated(taken, 0, failed={1: "invalid_request"}, for_good=frozenset({1}))])

    assert only(workflow).state == BatchState.DONE
    assert states(workflow) == ["CANCELLED", "CANCELLED"]
    assert not flights()
    assert list(Rating.objects.values_list("fingerprint", flat=True)) == [uuid.UUID(key("a"))]
    counts_add_up(workflow)
    dispatcher.wake_and_run()
    assert [(r.source, r.error) for r in requests(other)] == [
        (Source.COALESCED, None),
        (None, "invalid_request"),
    ]
    assert finished_after_check(other) == "PARTIAL"


def test_what_is_to_be_retried_is_delayed_and_keeps_its_neighbours_outcome() -> None:
    executor = boot()
    workflow, dispatcher, sent = claimed("a", "b", "c")
    (taken,) = take(sent, by=executor)
    not_before = later(60)

    leases.finish([rated(taken, 1, not_before=not_before)])

    batch = only(workflow)
    assert (batch.state, batch.open_mask, batch.sent_mask) == (BatchState.DELAYED, 0b101, 0)
    assert (batch.not_before, batch.attempts, batch.fence) == (not_before, 1, taken.fence + 1)
    assert not flights()
    assert states(workflow) == ["PENDING", "COMPLETED", "PENDING"]
    dispatcher.wake_and_run()
    assert not dispatcher.sent
    rows_are_sound()


def test_a_try_that_costs_nothing_is_not_counted_against_the_limit() -> None:
    executor = boot()
    workflow, _, sent = claimed("a")
    (taken,) = take(sent, by=executor)

    leases.finish([Finish(taken=taken, not_before=later(), cost_attempt=False)])

    assert only(workflow).attempts == 0
    assert progress(workflow)["attempts"] == 1, "progress counts every started try"


def test_a_batch_left_with_waiters_only_waits() -> None:
    executor = boot()
    _, dispatcher, first = claimed("a")
    mixed = submit(["a", "b"])
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)

    leases.finish([rated(taken, not_before=later())])

    batch = only(mixed)
    assert (batch.state, batch.open_mask) == (BatchState.WAITING, 0b01)
    assert [w.fingerprint.hex for w in BatchWait.objects.filter(batch_id=batch.pk)] == [key("a")]
    leases.finish([rated(t) for t in take(first, by=executor)])
    dispatcher.wake_and_run()
    assert states(mixed) == ["COMPLETED", "COMPLETED"]
    assert not BatchWait.objects.exists()


def test_items_left_without_an_outcome_or_a_time_go_again_at_once() -> None:
    """An executor that was told to stop says nothing of the rest: it does not wait for others."""
    executor = boot()
    _, dispatcher, _ = claimed("a")
    mixed = submit(["a", "b", "c"])
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)

    leases.finish([rated(taken, 1)])

    assert only(mixed).state == BatchState.READY
    dispatcher.wake_and_run()
    assert [m.ids for m in dispatcher.sent] == [[taken.batch_id]]
    assert only(mixed).sent_mask == 0b100


def test_a_finish_names_the_workflows_it_left_with_nothing_open() -> None:
    executor = boot()
    small = submit(["a"])
    _, _, sent = claimed("b", "c", batch_size=1)
    taken = {t.workflow_id: t for t in take(sent, by=executor)}

    assert len(taken) == 2
    assert leases.finish([rated(t) for t in taken.values()]) == [small.pk]


def test_only_failures_for_good_are_remembered() -> None:
    executor = boot()
    _, _, sent = claimed("a", "b")
    (taken,) = take(sent, by=executor)

    leases.finish(
        [Finish(taken=taken, failed={0: "timeout", 1: "invalid_request"}, for_good=frozenset({1}))]
    )

    assert [(f.fingerprint.hex, f.code) for f in FailedFlight.objects.all()] == [
        (key("b"), "invalid_request")
    ]


@settings(max_examples=30)
@given(
    scored=st.sets(st.integers(0, 59)),
    failed=st.sets(st.integers(0, 59)),
    retried=st.booleans(),
)
def test_the_largest_batch_ends_exactly_the_items_it_names(
    scored: set[int], failed: set[int], retried: bool
) -> None:
    failed = failed - scored
    executor = boot()
    with transaction.atomic():
        workflow, _, sent = claimed(*(f"i{n}" for n in range(60)), batch_size=60)
        (taken,) = take(sent, by=executor)
        assert taken.sent == (1 << 60) - 1

        leases.finish(
            [
                Finish(
                    taken=taken,
                    scored={i: Scored(score=1.0) for i in scored},
                    failed=dict.fromkeys(failed, "x"),
                    not_before=later() if retried else None,
                )
            ]
        )

        counts_add_up(workflow)
        assert only(workflow).open_mask == sum(1 << i for i in set(range(60)) - scored - failed)
        transaction.set_rollback(True)


# Expiry


def test_a_message_that_got_lost_costs_nothing_but_its_time() -> None:
    boot()
    workflow, _, sent = claimed("a", "b")

    assert expire(after_s=14) == 0
    assert expire(after_s=16) == 1

    batch = only(workflow)
    assert (batch.state, batch.lost, batch.attempts) == (BatchState.READY, 0, 0)
    assert (batch.fence, batch.sent_mask) == (sent[0][1] + 1, 0)
    assert not flights()
    rows_are_sound()


def test_a_started_try_whose_lease_ends_counts_as_lost() -> None:
    executor = boot()
    workflow, _, sent = claimed("a")
    take(sent, by=executor)

    assert expire(after_s=(CALL + leases.MARGIN).total_seconds() - 5) == 0
    assert expire(after_s=(CALL + leases.MARGIN).total_seconds() + 5) == 1

    batch = only(workflow)
    assert (batch.state, batch.lost, batch.attempts) == (BatchState.READY, 1, 0)
    assert (batch.boot_id, batch.task_id, batch.started_at) == (None, None, None)
    rows_are_sound()


def test_a_silent_executor_loses_its_leases_and_no_others() -> None:
    dead, alive = boot(), boot()
    workflow, _, sent = claimed("a", "b", "c", batch_size=1)
    take(sent[:1], by=dead)
    take(sent[1:2], by=alive)
    ExecutorBoot.objects.filter(pk=dead).update(heartbeat_at=later(-15.5))

    assert leases.expire(now=database_now(), trust_heartbeats=True) == 1

    assert [b.state for b in batches(workflow)] == [
        BatchState.READY, BatchState.LEASED, BatchState.LEASED,
    ]  # fmt: skip
    assert [b.lost for b in batches(workflow)] == [1, 0, 0]


def test_heartbeats_that_may_be_old_end_no_lease() -> None:
    executor = boot()
    _, _, sent = claimed("a")
    take(sent, by=executor)
    ExecutorBoot.objects.update(heartbeat_at=later(-60))

    assert leases.expire(now=database_now(), trust_heartbeats=False) == 0


def lose(dispatcher: Queue, executor: uuid.UUID) -> Taken:
    """Send a batch again and lose its executor."""
    dispatcher.wake_and_run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    expire(after_s=3_600)
    return taken


def test_losses_add_up_and_a_finish_forgets_them() -> None:
    executor = boot()
    workflow = submit(["a", "b"])
    dispatcher = queue()

    assert [lose(dispatcher, executor).lost for _ in range(4)] == [0, 1, 2, 3]

    dispatcher.wake_and_run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    assert taken.lost == 4
    leases.finish([rated(taken, 0, not_before=later())])
    assert (only(workflow).lost, only(workflow).attempts) == (0, 1)


def test_an_item_that_was_probed_when_its_executor_died_is_the_culprit() -> None:
    executor = boot()
    workflow, dispatcher, sent = claimed("a", "bad", "c", "bad")
    (taken,) = take(sent, by=executor)
    leases.extend(taken.batch_id, taken.fence, call_limit=CALL, probing=1)

    expire(after_s=3_600)

    batch = only(workflow)
    assert (batch.state, batch.open_mask, batch.lost) == (BatchState.READY, 0b101, 0)
    assert batch.probing is None
    assert states(workflow) == ["PENDING", "FAILED", "PENDING", "FAILED"]
    assert [r.error for r in requests(workflow)] == [None, "worker_lost", None, "worker_lost"]
    counts_add_up(workflow)
    dispatcher.run()
    leases.finish([rated(t) for t in take(dispatcher.take_sent()[0], by=executor)])
    assert finished_after_check(workflow) == "PARTIAL"


def test_a_culprit_that_was_the_last_open_item_ends_its_batch() -> None:
    executor = boot()
    workflow, _, sent = claimed("bad")
    (taken,) = take(sent, by=executor)
    leases.extend(taken.batch_id, taken.fence, call_limit=CALL, probing=0)

    expire(after_s=3_600)

    assert only(workflow).state == BatchState.DONE
    assert finished_after_check(workflow) == "FAILED"


def test_a_cancelled_batch_whose_executor_died_is_done() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b")
    (taken,) = take(sent, by=executor)
    leases.extend(taken.batch_id, taken.fence, call_limit=CALL, probing=1)
    control.cancel(workflow_id=workflow.pk)

    assert expire(after_s=3_600) == 1

    assert only(workflow).state == BatchState.DONE
    assert states(workflow) == ["CANCELLED", "CANCELLED"]
    assert not flights()
    counts_add_up(workflow)


@with_commits
def test_expiry_passes_by_a_batch_that_is_being_finished() -> None:
    executor = boot()
    workflow, _, sent = claimed("a", "b", batch_size=1)
    one, two = take(sent, by=executor)

    with threads(1) as pool, transaction.atomic():
        leases.finish([rated(one)])
        assert pool.submit(expire, after_s=3_600).result(10) == 1

    assert [b.state for b in batches(workflow)] == [BatchState.DONE, BatchState.READY]
    assert two.batch_id == batches(workflow)[1].pk


# Waking


def test_a_retry_is_woken_when_it_is_due() -> None:
    executor = boot()
    workflow, _, sent = claimed("a")
    (taken,) = take(sent, by=executor)
    due = later(30)
    leases.finish([Finish(taken=taken, not_before=due)])

    assert leases.wake(now=due - timedelta(seconds=1)) == 0
    assert only(workflow).state == BatchState.DELAYED
    assert leases.wake(now=due) == 1
    batch = only(workflow)
    assert (batch.state, batch.not_before) == (BatchState.READY, None)


def test_a_waiter_is_woken_by_the_end_of_any_of_its_flights() -> None:
    executor = boot()
    _, dispatcher, first = claimed("a")
    _, _, second = claimed("b")
    both = submit(["a", "b"])
    dispatcher.run()
    assert only(both).state == BatchState.WAITING
    assert leases.wake(now=database_now()) == 0

    leases.finish([rated(t) for t in take(first, by=executor)])

    assert leases.wake(now=database_now()) == 1
    assert only(both).state == BatchState.READY
    dispatcher.run()
    assert only(both).state == BatchState.WAITING
    assert states(both) == ["COMPLETED", "PENDING"]
    leases.finish([rated(t) for t in take(second, by=executor)])
    dispatcher.wake_and_run()
    assert states(both) == ["COMPLETED", "COMPLETED"]


@pytest.mark.parametrize("stale", ["fence moved on", "batch done", "no such batch"])
def test_a_flight_that_is_not_of_a_current_lease_is_swept_and_wakes_its_waiters(
    stale: str,
) -> None:
    boot()
    workflow, dispatcher, _ = claimed("a")
    follower = submit(["a"])
    dispatcher.run()
    batch = only(workflow)
    if stale == "fence moved on":
        Batch.objects.filter(pk=batch.pk).update(fence=batch.fence + 1)
    elif stale == "batch done":
        control.cancel(workflow_id=workflow.pk)
    else:
        Flight.objects.update(batch_id=10**9)

    assert leases.wake(now=database_now()) == 1

    assert not flights()
    assert only(follower).state == BatchState.READY


def test_a_waiter_without_waits_is_woken() -> None:
    boot()
    _, dispatcher, _ = claimed("a")
    follower = submit(["a"])
    dispatcher.run()
    BatchWait.objects.all().delete()

    assert leases.wake(now=database_now()) == 1
    assert only(follower).state == BatchState.READY


def test_nothing_that_is_leased_is_woken() -> None:
    executor = boot()
    _, dispatcher, first = claimed("a")
    mixed = submit(["a", "b"])
    dispatcher.run()
    leases.finish([rated(t) for t in take(first, by=executor)])
    before = only(mixed)

    assert leases.wake(now=later(3_600)) == 0

    after = only(mixed)
    assert (after.state, after.fence, after.sent_mask) == (
        BatchState.LEASED, before.fence, before.sent_mask,
    )  # fmt: skip


def test_a_delayed_batch_whose_waiters_can_go_on_keeps_its_time() -> None:
    executor = boot()
    _, dispatcher, first = claimed("a")
    mixed = submit(["a", "b"])
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    leases.finish([Finish(taken=taken, not_before=later())])
    leases.finish([rated(t) for t in take(first, by=executor)])

    dispatcher.wake_and_run()

    assert only(mixed).state == BatchState.DELAYED
    end_pauses()
    dispatcher.wake_and_run()
    (again,) = take(dispatcher.take_sent()[0], by=executor)
    assert again.sent == 0b10
    assert states(mixed) == ["COMPLETED", "PENDING"]


@with_commits
def test_waking_passes_by_a_waiter_that_another_session_holds() -> None:
    executor = boot()
    _, dispatcher, first = claimed("a")
    follower = submit(["a"])
    dispatcher.run()
    leases.finish([rated(t) for t in take(first, by=executor)])

    with threads(1) as pool, transaction.atomic():
        Batch.objects.select_for_update().get(workflow=follower)
        assert pool.submit(lambda: leases.wake(now=database_now())).result(10) == 0

    assert leases.wake(now=database_now()) == 1


def test_replicas_are_free_again_after_expiry() -> None:
    boot()
    submit(["a", "b"], batch_size=1)
    dispatcher = queue(Replica(window=1))
    dispatcher.run()
    assert dispatcher.run().sent == 0

    expire(after_s=16)

    assert dispatcher.run().sent == 1
