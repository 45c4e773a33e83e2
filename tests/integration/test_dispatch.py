"""The dispatcher: what a claim leases, parks, ends and sends."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction

from fulfillment import claim, completion, control, dispatch, leases, progress
from fulfillment.clock import database_now
from fulfillment.models import (
    Batch,
    BatchWait,
    ExecutorBoot,
    FailedFlight,
    Flight,
    Rater,
    RaterVersion,
    Rating,
    Workflow,
)
from fulfillment.policy import traffic
from fulfillment.policy.lifecycle import BatchState, RequestState, Source, WorkflowState
from fulfillment.policy.messages import BATCHES_A_THREAD
from fulfillment.policy.priority import PriorityClass
from tests import builders
from tests.rating_queue import (
    SCORE,
    Plans,
    Queue,
    Replica,
    archived,
    batches,
    boot,
    check_all,
    counts_add_up,
    end_pauses,
    finished,
    flights,
    key,
    queue,
    rate_all,
    rated,
    rater,
    requests,
    rows_are_sound,
    states,
    submit,
    take,
    threads,
    until,
    until_blocked,
)

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def held_by(replica: str) -> int:
    return Batch.objects.filter(state=BatchState.LEASED, replica=replica).count()


# What is leased


def test_a_claim_leases_what_has_room_and_no_more() -> None:
    boot()
    workflow = submit(names(10), batch_size=2)
    dispatcher = queue(Replica(window=3))

    done = dispatcher.run()

    assert done.sent == 3
    assert [b.state for b in batches(workflow)] == [BatchState.LEASED] * 3 + [BatchState.READY] * 2
    (leased,) = {b.replica for b in batches(workflow)[:3]}
    assert leased == "r1"
    assert [m.batches for m in dispatcher.sent] == [
        [(b.pk, 1, "r1")] for b in batches(workflow)[:3]
    ]
    assert dispatcher.run().sent == 0


def test_a_claim_bumps_the_fence_and_gives_the_pick_up_lease() -> None:
    boot()
    workflow = submit(["a"])
    Batch.objects.update(fence=7)
    before = database_now()

    dispatcher = queue()
    dispatcher.run()

    (batch,) = batches(workflow)
    assert batch.fence == 8
    assert dispatcher.sent[0].batches == [(batch.pk, 8, "r1")]
    assert batch.lease_until is not None
    assert before + leases.PICK_UP <= batch.lease_until <= database_now() + leases.PICK_UP
    assert batch.boot_id is None
    assert batch.started_at is None


def test_a_claim_inserts_a_flight_for_each_item_it_sends() -> None:
    boot()
    workflow = submit(["a", "b", "a"])

    queue().run()

    (batch,) = batches(workflow)
    assert flights() == {key("a"): batch.pk, key("b"): batch.pk}
    assert set(Flight.objects.values_list("fence", flat=True)) == {batch.fence}
    assert batch.sent_mask == 0b11
    rows_are_sound()


def test_the_first_claim_notes_when_the_workflow_started() -> None:
    boot()
    workflow = submit(names(4), batch_size=2)
    dispatcher = queue(Replica(window=1))

    dispatcher.run()

    workflow.refresh_from_db()
    first = workflow.started_at
    assert first is not None
    leases.finish([rated(t) for t in take(dispatcher.take_sent()[0], by=boot())])
    dispatcher.run()
    workflow.refresh_from_db()
    assert workflow.started_at == first


def test_batches_of_one_workflow_leave_in_input_order() -> None:
    boot()
    workflow = submit(names(6), batch_size=1)
    dispatcher = queue(Replica(window=2))

    left = []
    for _ in range(3):
        dispatcher.run()
        sent = dispatcher.take_sent()
        left += [i for m in sent for i in m.ids]
        leases.finish([rated(t) for m in sent for t in take(m, by=boot())])

    assert left == [b.pk for b in batches(workflow)]


# What is not


def _pause_rater() -> None:
    Rater.objects.update(paused_code="unauthorized", paused_at=database_now())


def _retire_version() -> None:
    RaterVersion.objects.update(retired_at=database_now())


def _pass_deadline() -> None:
    Workflow.objects.update(deadline_at=database_now())


def _silence_boot() -> None:
    ExecutorBoot.objects.update(heartbeat_at=database_now() - leases.SILENCE)


def _take_plugin_away() -> None:
    ExecutorBoot.objects.update(plugins={"stub": "2"})


def _let_boot_leave() -> None:
    ExecutorBoot.objects.update(slots=0)


def _take_in_again() -> None:
    with connection.cursor() as cursor:
        # No move leads there; the trigger that says so is left out.
        cursor.execute("SET LOCAL session_replication_role = replica")
        Workflow.objects.update(state=WorkflowState.RECEIVING)
        cursor.execute("SET LOCAL session_replication_role = origin")


@pytest.mark.parametrize(
    "obstacle",
    [
        _pause_rater,
        _retire_version,
        _pass_deadline,
        _silence_boot,
        _take_plugin_away,
        _let_boot_leave,
        lambda: Workflow.objects.update(state=WorkflowState.PAUSED),
        lambda: Workflow.objects.update(state=WorkflowState.ENDING, ending_reason="cancelled"),
        _take_in_again,
    ],
    ids=[
        "paused rater", "retired version", "passed deadline", "silent executor",
        "no such plug-in version", "executor that leaves", "paused", "ending", "receiving",
    ],
)  # fmt: skip
def test_nothing_is_claimed_that_may_not_be_sent(obstacle: Any) -> None:
    boot()
    workflow = submit(["a"])
    obstacle()
    dispatcher = queue()

    done = dispatcher.run()

    assert done == claim.Pass()
    (batch,) = batches(workflow)
    assert (batch.state, batch.fence) == (BatchState.READY, 0)
    assert not dispatcher.sent
    assert not flights()


@pytest.mark.parametrize("state", [WorkflowState.OPEN, WorkflowState.RUNNING])
def test_open_and_closed_workflows_are_served(state: WorkflowState) -> None:
    boot()
    submit(["a"], state=state)

    assert queue().run().sent == 1


@pytest.mark.parametrize(
    ("pinned", "live", "managed", "sent"),
    [
        ("v1", "v1", True, 1),
        ("v1", "v2", True, 0),
        ("v1", "", True, 1),
        ("", "v2", True, 1),
        ("lab", "lab", False, 1),
        ("lab", "lab\tv2", False, 0),
        ("", "\tv2", False, 0),
        ("lab\tv2", "lab", False, 0),
        ("", "", False, 1),
    ],
)
def test_a_replica_serves_the_version_a_workflow_was_made_with(
    pinned: str, live: str, managed: bool, sent: int
) -> None:
    boot()
    submit(["a"], of=builders.version(model_version=pinned))

    assert queue(Replica(version=live, managed=managed)).run().sent == sent


def test_a_replica_of_another_model_is_not_used() -> None:
    boot()
    submit(["a"])

    assert queue(Replica(model_id="other")).run().sent == 0


def test_only_the_replica_of_the_right_version_gets_batches() -> None:
    boot()
    submit(names(8), batch_size=1)
    dispatcher = queue(
        Replica(key="old", version="v0"),
        Replica(key="right", window=3),
        Replica(key="new", version="v2"),
    )

    dispatcher.run()

    assert {replica for m in dispatcher.sent for _, _, replica in m.batches} == {"right"}
    assert held_by("right") == 3


def test_no_more_leaves_than_executors_have_slots() -> None:
    boot(slots=2)
    boot(slots=1)
    boot(slots=50, age_s=60)
    submit(names(9), batch_size=1)
    dispatcher = queue()

    assert dispatcher.run().sent == 3
    assert dispatcher.run().sent == 0


def test_two_versions_of_one_rater_share_its_slots_without_losing_any() -> None:
    boot(slots=8)
    of = builders.rater()
    old, new = (
        builders.version(of, number=number, model_version=f"v{number}") for number in (1, 2)
    )
    submit(names(12, "old"), of=old, batch_size=1)
    submit(names(12, "new"), of=new, batch_size=1)
    dispatcher = queue(Replica(key="r1", window=4), Replica(key="r2", version="v2", window=4))

    first = dispatcher.run()
    for message in dispatcher.take_sent()[::4]:
        leases.finish([rated(t) for t in take(message, by=boot(slots=0))])
    second = dispatcher.wake_and_run()

    assert (first.sent, second.sent) == (8, 2)
    assert Batch.objects.filter(state=BatchState.LEASED).count() == 8


# Windows


def test_windows_hold_over_passes_and_raters_of_one_model() -> None:
    boot(slots=100)
    one, two = rater("one"), rater("two")
    submit(names(40, "a"), of=one, batch_size=1)
    submit(names(40, "b"), of=two, batch_size=1, owner="bob")
    dispatcher = queue(Replica(key="r1", window=5), Replica(key="r2", window=3))

    for _ in range(6):
        for _ in range(2):
            dispatcher.wake_and_run()
            assert held_by("r1") <= 5
            assert held_by("r2") <= 3
        assert held_by("r1") + held_by("r2") == 8
        for message in dispatcher.take_sent():
            leases.finish([rated(t) for t in take(message, by=boot(slots=0))])

    assert Batch.objects.filter(state=BatchState.DONE, workflow__rater="one").exists()
    assert Batch.objects.filter(state=BatchState.DONE, workflow__rater="two").exists()


def test_a_batch_that_lost_its_room_to_another_rater_stays_ready_without_flights() -> None:
    boot(slots=100)
    submit(names(5, "a"), of=rater("one"), batch_size=1)
    submit(names(5, "b"), of=rater("two"), batch_size=1)
    dispatcher = queue(Replica(window=5))

    dispatcher.run()

    assert held_by("r1") == 5
    assert Batch.objects.filter(state=BatchState.READY).count() == 5
    leased = Batch.objects.filter(state=BatchState.LEASED)
    assert set(flights().values()) == {b.pk for b in leased}
    rows_are_sound()


def external(window: int = 8) -> Replica:
    return Replica(key="ext", window=window, managed=False)


def test_an_external_window_shrinks_with_overload_and_recovers() -> None:
    boot(slots=100)
    submit(names(30), batch_size=1)
    dispatcher = queue(external())

    def room_after(**signal: int) -> int:
        met = {"replica": "ext", "cls": int(PriorityClass.MIDDLE), "succeeded": 0, "overloaded": 0}
        dispatch.observe(dispatcher.memory, [met | signal], start + ahead)
        Batch.objects.filter(state=BatchState.LEASED).update(
            state=BatchState.READY, lease_until=None
        )
        Flight.objects.all().delete()
        dispatch.run_once(
            start + ahead + traffic.COOLING,
            memory=dispatcher.memory,
            directory=dispatcher.fleet,
            publish=lambda batches, priority: None,
        )
        return held_by("ext")

    start, ahead = database_now(), timedelta(0)
    dispatcher.run()
    assert held_by("ext") == 8
    assert room_after(overloaded=1) == 5
    assert room_after(overloaded=9) == 5, "one congestion refuses many calls: it counts once"
    ahead = timedelta(seconds=2)
    assert room_after(overloaded=1) == 3
    assert room_after(succeeded=8) > 3
    assert room_after(succeeded=200) == 8


def test_a_refusal_of_low_calls_leaves_the_room_of_high_ones() -> None:
    boot(slots=100)
    low = submit(names(20, "low"), batch_size=1, priority=10)
    dispatcher = queue(external())
    dispatcher.run()
    overload = {"replica": "ext", "cls": int(PriorityClass.LOW), "succeeded": 0, "overloaded": 1}
    for second in range(0, 20, 2):
        dispatch.observe(dispatcher.memory, [overload], database_now() + timedelta(seconds=second))
    Batch.objects.filter(state=BatchState.LEASED).update(state=BatchState.READY, lease_until=None)
    high = submit(names(20, "high"), batch_size=1, priority=90)

    dispatcher.wake_and_run()

    leased = Batch.objects.filter(state=BatchState.LEASED)
    # After its head start high leaves one of eight to low: the probe that its window lets through.
    assert leased.filter(workflow=high).count() == 7
    assert leased.filter(workflow=low).count() == 1


def test_batches_that_a_shrunk_window_cannot_take_are_left_alone() -> None:
    """Claiming and putting them back would write hundreds of rows a pass, and call for the next."""
    boot(slots=100)
    high = submit(names(2, "high"), batch_size=1, priority=90)
    low = submit(names(20, "low"), batch_size=1, priority=10)
    dispatcher = queue(external())
    dispatcher.memory.windows.open["ext"] = replace(
        traffic.open_window(8), limits=(8.0, 8.0, 1.0, 1.0)
    )

    first = dispatcher.run()
    second = dispatcher.run()

    assert [b.state for b in batches(high)] == [BatchState.LEASED] * 2
    assert (first.sent, second) == (3, claim.Pass())
    assert [b.fence for b in batches(low)] == [1] + [0] * 19


def test_a_pass_that_filled_the_windows_asks_for_no_other_one() -> None:
    """A batch put back because higher ones took its room waits for the next finish."""
    boot(slots=100)
    high = submit(names(6, "high"), batch_size=1, priority=90)
    low = submit(names(10, "low"), batch_size=1, priority=10)
    dispatcher = queue(external())
    dispatcher.memory.windows.open["ext"] = replace(
        traffic.open_window(8), limits=(8.0, 8.0, 4.0, 4.0)
    )

    done = dispatcher.run()

    assert {b.state for b in batches(high)} == {BatchState.LEASED}
    assert [b.state for b in batches(low)].count(BatchState.LEASED) == 1
    assert not done.full
    rows_are_sound()


def test_changing_the_limit_of_an_external_model_opens_its_window() -> None:
    boot(slots=100)
    submit(names(30), batch_size=1)
    dispatcher = queue(external(4))
    dispatcher.run()

    dispatcher.fleet.live = [external(9)]
    dispatcher.run()

    assert held_by("ext") == 9


# Messages


def test_a_backlog_leaves_with_several_batches_a_message() -> None:
    boot(slots=100)
    submit(names(40), batch_size=1)
    dispatcher = queue(Replica(key="r1", window=16), Replica(key="r2", window=16))

    dispatcher.run()

    # Two places of each window are kept for urgent work.
    assert [len(m.batches) for m in dispatcher.sent] == [8, 8, 8, 4]
    assert {r for m in dispatcher.sent for _, _, r in m.batches} == {"r1", "r2"}


def end(ends: Iterable[Batch]) -> None:
    """Finish batches that are out."""
    taken = leases.take_over(
        [(batch.pk, batch.fence) for batch in ends],
        boot_id=boot(slots=0),
        task_id=uuid4(),
        call_limit=timedelta(seconds=60),
    )
    leases.finish([rated(each) for each in taken])


def crowded() -> tuple[Queue, Sequence[Batch]]:
    """Return a dispatcher with a message in each thread but the one that is kept, and its batches.

    They are two a message, fourteen of a window of sixteen.
    """
    boot(slots=8 * BATCHES_A_THREAD)
    dispatcher = queue()
    for number in range(7):
        submit(names(2, f"{number} "), batch_size=1)
        dispatcher.wake_and_run()
    out = list(Batch.objects.filter(state=BatchState.LEASED).order_by("pk"))
    assert [len(message.batches) for message in dispatcher.take_sent()] == [2] * 7
    return dispatcher, out


def test_what_is_not_urgent_waits_for_a_thread_and_leaves_in_one_message() -> None:
    dispatcher, out = crowded()
    submit(names(9), batch_size=1)

    end(out[:8:2])
    assert dispatcher.wake_and_run().sent == 0
    end([out[1]])
    assert dispatcher.wake_and_run().sent == 5
    assert [len(message.batches) for message in dispatcher.take_sent()] == [5]


def full_of_a_backlog(of: int = 30) -> tuple[Queue, Sequence[Batch]]:
    """Return a dispatcher that has sent fourteen batches of so many, and those."""
    boot(slots=16 * BATCHES_A_THREAD)
    submit(names(of), batch_size=1)
    dispatcher = queue()
    assert dispatcher.run().sent == 14
    dispatcher.take_sent()
    return dispatcher, list(Batch.objects.filter(state=BatchState.LEASED).order_by("pk"))


def test_a_backlog_waits_until_a_quarter_of_the_window_is_free_and_leaves_in_one_message() -> None:
    dispatcher, out = full_of_a_backlog()

    end(out[:3])
    assert dispatcher.wake_and_run().sent == 0
    end(out[3:4])
    assert dispatcher.wake_and_run().sent == 4
    assert [len(message.batches) for message in dispatcher.take_sent()] == [4]


def test_the_end_of_a_backlog_waits_for_nothing() -> None:
    dispatcher, out = full_of_a_backlog(of=16)

    end(out[:1])
    assert dispatcher.wake_and_run().sent == 0
    end(out[1:2])
    assert dispatcher.wake_and_run().sent == 2


def test_urgent_work_waits_for_no_quarter_of_the_window() -> None:
    dispatcher, out = full_of_a_backlog()
    submit(names(5, "high"), batch_size=1, priority=90)

    assert dispatcher.wake_and_run().sent == 2, "the places that are kept for it"
    end(out[:1])
    assert dispatcher.wake_and_run().sent == 1


def test_urgent_work_waits_for_no_thread() -> None:
    dispatcher, _ = crowded()
    submit(names(3, "high"), batch_size=1, priority=90)

    assert dispatcher.wake_and_run().sent == 2, "the places that are kept for it"
    end(Batch.objects.filter(workflow__priority=50, state=BatchState.LEASED)[:1])
    assert dispatcher.wake_and_run().sent == 1, "though some of it is out already"


def test_what_is_more_urgent_than_all_that_is_out_waits_for_no_thread() -> None:
    dispatcher, out = crowded()
    end(out[:1])
    Workflow.objects.update(priority=10)
    dispatcher.memory.held.forget()
    middle = submit(names(1, "middle"), batch_size=1)

    assert dispatcher.wake_and_run().sent == 1
    assert batches(middle)[0].state == BatchState.LEASED


def test_a_replica_with_little_work_waits_for_no_thread() -> None:
    dispatcher, out = crowded()
    submit(names(9), batch_size=1)

    end(out[::2])

    assert dispatcher.wake_and_run().sent == 7


def test_whoever_shares_a_model_with_urgent_work_keeps_its_turns_without_a_thread() -> None:
    boot(slots=8 * BATCHES_A_THREAD)
    urgent, other = rater("urgent"), rater("other")
    submit(names(60, "high"), of=urgent, batch_size=1, priority=90)
    workflow = submit(names(20, "middle"), of=other, batch_size=1)
    dispatcher = queue()
    dispatcher.wake_and_run()
    started = {batch.pk for batch in batches(workflow) if batch.state == BatchState.LEASED}

    for _ in range(20):
        ended = Batch.objects.filter(state=BatchState.LEASED, workflow__rater="urgent")
        end(list(ended.order_by("pk")[:1]))
        dispatcher.memory.held.forget()
        dispatcher.wake_and_run()

    out = {batch.pk for batch in batches(workflow) if batch.state == BatchState.LEASED}
    assert len(out - started) >= 4


def test_what_leaves_for_its_share_is_one_message_with_those_above_it() -> None:
    boot(slots=100)
    submit(names(40), batch_size=1)
    submit(names(40, "low"), batch_size=1, priority=10)
    dispatcher = queue()

    dispatcher.run()

    assert {message.priority for message in dispatcher.sent} == {3}


def test_urgent_batches_leave_one_a_message() -> None:
    boot(slots=100)
    submit(names(3), batch_size=1, priority=90)
    dispatcher = queue(Replica(window=64))

    dispatcher.run()

    assert [len(m.batches) for m in dispatcher.sent] == [1, 1, 1]


@pytest.mark.parametrize(
    ("priority", "best_effort", "step"),
    [(100, False, 0), (67, False, 3), (50, False, 5), (33, False, 6), (0, False, 9), (90, True, 9)],
)
def test_a_message_carries_the_priority_of_its_workflow(
    priority: int, best_effort: bool, step: int
) -> None:
    boot()
    submit(["a"], priority=priority, best_effort=best_effort)
    dispatcher = queue()

    dispatcher.run()

    assert [m.priority for m in dispatcher.sent] == [step]


def test_messages_hold_batches_of_one_priority() -> None:
    boot()
    high, low = submit(["a"], priority=90), submit(["b"], priority=5)
    dispatcher = queue()

    dispatcher.run()

    assert [(m.priority, m.ids) for m in dispatcher.sent] == [
        (1, [b.pk for b in batches(high)]),
        (9, [b.pk for b in batches(low)]),
    ]


def test_a_batch_whose_class_is_served_for_its_share_goes_with_those_above() -> None:
    # Behind a stream of urgent messages it would wait in the broker until its lease ends.
    boot()
    submit(names(40, "high"), batch_size=1, priority=70)
    low = submit(names(40, "low"), batch_size=1, priority=10)
    dispatcher = queue(Replica(window=20))

    dispatcher.run()

    of_low = {b.pk for b in batches(low)}
    steps = {m.priority for m in dispatcher.sent if of_low & set(m.ids)}
    assert steps == {0}
    assert {m.priority for m in dispatcher.sent if not of_low & set(m.ids)} == {3}


def test_places_are_kept_for_urgent_batches() -> None:
    boot()
    submit(names(40, "low"), batch_size=1, priority=10)
    dispatcher = queue(Replica(window=16))
    dispatcher.run()
    assert sum(len(m.batches) for m in dispatcher.take_sent()) == 14
    submit(names(5, "high"), batch_size=1, priority=90)

    dispatcher.run()

    assert sum(len(m.batches) for m in dispatcher.take_sent()) == 2


def test_an_urgent_workflow_takes_the_next_room() -> None:
    boot()
    submit(names(6, "low"), batch_size=1, priority=5)
    dispatcher = queue(Replica(window=2))
    dispatcher.run()
    urgent = submit(["urgent"], priority=90)
    sent = dispatcher.take_sent()

    leases.finish([rated(t) for t in take(sent[0], by=boot(slots=0))])
    dispatcher.run()

    assert [b.state for b in batches(urgent)] == [BatchState.LEASED]


# Single flight


def test_equal_work_of_two_workflows_is_computed_once() -> None:
    executor = boot()
    one = submit(["a", "b"])
    two = submit(["a", "b"])
    dispatcher = queue()

    first = dispatcher.run()

    assert (first.sent, first.waiting) == (1, 1)
    assert [b.state for b in batches(two)] == [BatchState.WAITING]
    assert set(BatchWait.objects.values_list("batch_id", flat=True)) == {batches(two)[0].pk}
    leases.finish([rated(t) for t in take(dispatcher.take_sent()[0], by=executor)])
    second = dispatcher.wake_and_run()
    assert (second.sent, second.ended) == (0, 2)
    assert not dispatcher.sent
    assert [r.source for r in requests(one)] == [Source.MODEL] * 2
    assert [r.source for r in requests(two)] == [Source.COALESCED] * 2
    assert {r.score for r in requests(two)} == {SCORE}
    assert Rating.objects.count() == 2
    assert not BatchWait.objects.exists()
    assert not flights()
    check_all()
    assert [finished(w) for w in (one, two)] == ["COMPLETED", "COMPLETED"]
    assert counts_add_up(two)["model_calls"] == 0


def test_a_batch_waits_only_for_its_items_that_are_in_flight() -> None:
    executor = boot()
    submit(["a"])
    dispatcher = queue()
    dispatcher.run()
    mixed = submit(["b", "a", "c"])

    dispatcher.run()

    (batch,) = batches(mixed)
    assert (batch.state, batch.open_mask, batch.sent_mask) == (BatchState.LEASED, 0b111, 0b101)
    first, second = dispatcher.take_sent()
    leases.finish([rated(t) for t in take(second, by=executor)])
    (batch,) = batches(mixed)
    assert (batch.state, batch.open_mask) == (BatchState.WAITING, 0b010)
    assert leases.wake(now=database_now()) == 0
    leases.finish([rated(t) for t in take(first, by=executor)])
    dispatcher.wake_and_run()
    assert [r.source for r in requests(mixed)] == [Source.MODEL, Source.COALESCED, Source.MODEL]
    counts_add_up(mixed)


def test_of_two_equal_batches_in_one_claim_one_is_sent() -> None:
    boot()
    one, two = submit(["a"]), submit(["a"], owner="bob")
    dispatcher = queue()

    done = dispatcher.run()

    assert (done.sent, done.waiting) == (1, 1)
    assert {b.state for w in (one, two) for b in batches(w)} == {
        BatchState.LEASED,
        BatchState.WAITING,
    }
    rows_are_sound()


def test_a_follower_computes_itself_what_the_leader_gave_up() -> None:
    executor = boot()
    one, two = submit(["a"]), submit(["a"])
    dispatcher = queue()
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    leases.finish([leases.Finish(taken=taken, failed={0: "attempts_exhausted"})])

    done = dispatcher.wake_and_run()

    assert done.sent == 1
    leases.finish([rated(t) for t in take(dispatcher.take_sent()[0], by=executor)])
    assert (states(one), states(two)) == (["FAILED"], ["COMPLETED"])


def test_a_follower_of_a_private_rating_computes_its_own() -> None:
    executor = boot()
    private, other = submit(["a"], no_store=True), submit(["a"])
    dispatcher = queue()

    computed = rate_all(dispatcher, executor)

    assert computed == 2
    assert [r.source for w in (private, other) for r in requests(w)] == [Source.MODEL] * 2
    assert sorted(Rating.objects.values_list("reusable", flat=True)) == [False, True]


def test_what_the_archive_got_since_intake_is_not_sent() -> None:
    boot()
    workflow = submit(["a", "b"])
    rating = archived("a", age=timedelta(minutes=5), score=3.5)
    dispatcher = queue()

    done = dispatcher.run()

    assert (done.sent, done.ended) == (1, 1)
    first, second = requests(workflow)
    assert (first.state, first.source) == (RequestState.COMPLETED, Source.ARCHIVE)
    assert (first.score, first.rating_id) == (3.5, rating)
    assert second.state == RequestState.PENDING
    (batch,) = batches(workflow)
    assert (batch.open_mask, batch.sent_mask) == (0b10, 0b10)
    assert list(flights()) == [key("b")]
    counts_add_up(workflow)


def test_a_batch_that_the_archive_answers_whole_is_done_without_lease_or_flight() -> None:
    boot()
    workflow = submit(["a", "b", "a"])
    archived("a")
    archived("b")
    dispatcher = queue()

    done = dispatcher.run()

    assert (done.sent, done.ended, done.full) == (0, 2, True)
    (batch,) = batches(workflow)
    assert (batch.state, batch.open_mask, batch.lease_until) == (BatchState.DONE, 0, None)
    assert not flights()
    check_all()
    assert finished(workflow) == "COMPLETED"
    workflow.refresh_from_db()
    assert workflow.started_at is None


def test_bypass_takes_only_what_was_rated_after_it_was_accepted() -> None:
    executor = boot()
    archived("a", age=timedelta(minutes=1))
    workflow = submit(["a"], bypass=True)
    dispatcher = queue()

    assert dispatcher.run().sent == 1

    follower = submit(["a"], bypass=True)
    dispatcher.run()
    leases.finish([rated(t) for t in take(dispatcher.take_sent()[0], by=executor)])
    assert dispatcher.wake_and_run().sent == 0
    assert [r.source for r in requests(workflow)] == [Source.MODEL]
    assert [r.source for r in requests(follower)] == [Source.COALESCED]


@pytest.mark.parametrize(("age_s", "sent"), [(50, 0), (70, 1)], ids=["younger", "older"])
def test_max_age_bounds_what_is_taken(age_s: int, sent: int) -> None:
    boot()
    archived("a", age=timedelta(seconds=age_s))
    submit(["a"], max_age_s=60)

    assert queue().run().sent == sent


def test_workflows_with_different_limits_in_one_claim_each_keep_their_own() -> None:
    boot()
    archived("a", age=timedelta(days=2))
    strict, lax, fresh = submit(["a"], max_age_s=60), submit(["a"]), submit(["a"], bypass=True)

    queue().run()

    assert states(lax) == ["COMPLETED"]
    assert states(strict) == states(fresh) == ["PENDING"]
    assert {b.state for w in (strict, fresh) for b in batches(w)} == {
        BatchState.LEASED,
        BatchState.WAITING,
    }


def test_a_private_or_stale_rating_is_no_archive_entry() -> None:
    boot()
    archived("private", reusable=False)
    archived("stale", age=timedelta(days=91))
    workflow = submit(["private", "stale"])

    queue().run()

    assert batches(workflow)[0].sent_mask == 0b11


def test_a_permanent_failure_fails_those_accepted_before_it_and_no_others() -> None:
    executor = boot()
    one, two = submit(["a"]), submit(["a", "b", "a"])
    dispatcher = queue()
    dispatcher.run()
    bad, good = sorted(
        (t for m in dispatcher.take_sent() for t in take(m, by=executor)),
        key=lambda t: t.workflow_id,
    )

    leases.finish(
        [leases.Finish(taken=bad, failed={0: "invalid_request"}, for_good=frozenset({0}), calls=1)]
    )
    later = submit(["a"])
    leases.finish([rated(good)])
    for _ in range(2):
        dispatcher.wake_and_run()

    assert [r.error for r in requests(one)] == ["invalid_request"]
    assert [r.error for r in requests(two)] == ["invalid_request", None, "invalid_request"]
    assert states(two) == ["FAILED", "COMPLETED", "FAILED"]
    assert [b.state for b in batches(later)] == [BatchState.LEASED]
    assert list(flights()) == [key("a")]
    for workflow in (one, two, later):
        counts_add_up(workflow)


def test_an_archive_entry_wins_over_a_failure() -> None:
    boot()
    workflow = submit(["a"])
    archived("a", age=timedelta(seconds=30))
    FailedFlight.objects.create(
        fingerprint=key("a"), code="invalid_request", failed_at=database_now()
    )

    queue().run()

    assert states(workflow) == ["COMPLETED"]


# Beside others


@with_commits
def test_a_claim_passes_by_what_another_session_holds() -> None:
    boot()
    workflow = submit(names(3), batch_size=1)
    first = batches(workflow)[0]
    dispatcher = queue()

    with threads(1) as pool, transaction.atomic():
        Batch.objects.select_for_update().get(pk=first.pk)
        pool.submit(dispatcher.run).result(10)

    assert [b.state for b in batches(workflow)] == [
        BatchState.READY, BatchState.LEASED, BatchState.LEASED,
    ]  # fmt: skip
    dispatcher.run()
    assert [b.state for b in batches(workflow)] == [BatchState.LEASED] * 3


@with_commits
def test_a_claim_that_meets_a_lock_gives_up_soon_and_leaves_all_for_the_next_pass() -> None:
    boot()
    workflow = submit(["a", "b"])
    dispatcher = queue()

    with threads(1) as pool, transaction.atomic():
        Flight.objects.create(fingerprint=key("b"), batch_id=1, fence=1)
        done = pool.submit(dispatcher.run).result(10)

        assert done == claim.Pass()
        assert not dispatcher.sent
        transaction.set_rollback(True)

    (batch,) = batches(workflow)
    assert (batch.state, batch.fence) == (BatchState.READY, 0)
    assert dispatcher.run().sent == 1


@with_commits
def test_an_item_whose_flight_ends_during_the_claim_is_found_in_the_archive() -> None:
    """The claim waits for the finisher's deletion, then looks: it never computes it again."""
    executor = boot()
    one = submit(["a"])
    dispatcher = queue()
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    two = submit(["a"])

    with threads(1) as pool:
        with transaction.atomic():
            leases.finish([rated(taken)])
            claiming = pool.submit(dispatcher.run)
            until_blocked(claiming)
        done = claiming.result(10)

    assert (done.sent, done.ended) == (0, 1)
    assert [r.source for w in (one, two) for r in requests(w)] == [Source.MODEL, Source.COALESCED]


@with_commits
def test_a_workflow_that_is_cancelled_during_the_claim_sends_nothing_that_is_started() -> None:
    executor = boot()
    workflow = submit(["a"])
    dispatcher = queue()
    with threads(1) as pool:
        with transaction.atomic():
            dispatcher.run()
            cancel = pool.submit(control.cancel, workflow_id=workflow.pk)
            until_blocked(cancel)
        cancel.result(10)

    assert take(dispatcher.take_sent()[0], by=executor) == []
    assert finished(workflow) == "CANCELLED"
    dispatcher.wake_and_run()
    assert not flights()


@with_commits
def test_one_session_leads_until_it_ends() -> None:
    from django.db import connection as here

    assert dispatch.lead("one")
    with threads(1) as pool:
        assert not pool.submit(dispatch.lead, "two").result(10)
        here.close()
        # Its backend takes a moment to end.
        until(lambda: pool.submit(dispatch.lead, "two").result(10), what="another one leads")
    assert dispatch.lead("one")
    here.close()


# What it costs


def backlog(workflow: Workflow, count: int) -> None:
    """Store many batches of one row each, by SQL."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH rows AS (
                SELECT p, gen_random_uuid() AS f FROM generate_series(0, %(count)s - 1) AS p
            ), made AS (
                INSERT INTO fulfillment_ratingrequest
                    (id, workflow_id, request_id, request_digest, fingerprint)
                SELECT (%(workflow)s::bigint << 31) | p, %(workflow)s, p::text, gen_random_uuid(), f
                FROM rows
            ), batch AS (
                INSERT INTO fulfillment_batch
                    (workflow_id, position, positions, item_of, fingerprints, open_mask)
                SELECT %(workflow)s, p, ARRAY[p], ARRAY[0], ARRAY[f], 1 FROM rows
                RETURNING id, workflow_id
            )
            INSERT INTO fulfillment_batchpayload (batch_id, workflow_id, data)
            SELECT id, workflow_id, '[[{"query_text":"q"},null]]'::bytea FROM batch
            """,
            {"workflow": workflow.pk, "count": count},
        )


@pytest.mark.parametrize("analyzed", [True, False], ids=["with statistics", "fresh tables"])
def test_the_statements_of_a_pass_use_their_indexes(analyzed: bool) -> None:
    of = rater()
    for _ in range(3):
        workflow = submit([], of=of)
        backlog(workflow, 5_000)
    ended = Batch.objects.filter(workflow=workflow)
    ended.filter(position__lt=4_980).update(state=BatchState.DONE, open_mask=0)
    ended.filter(position__range=(4_980, 4_990)).update(
        state=BatchState.DELAYED, not_before=database_now() + timedelta(hours=1)
    )
    if analyzed:
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE fulfillment_batch, fulfillment_ratingrequest")
    executor = boot(slots=100)
    dispatcher = queue()

    with Plans() as plans:
        dispatcher.run()
        leases.finish([rated(t) for t in take(dispatcher.take_sent()[0], by=executor)])
        leases.wake(now=database_now())
        leases.expire(now=database_now(), trust_heartbeats=True)
        dispatcher.run()
        progress.read(workflow)
        control.cancel(workflow_id=workflow.pk)
        completion.run_once(database_now())

    assert plans.count > 30
    assert plans.scans == []


def test_a_retry_that_is_due_goes_again() -> None:
    executor = boot()
    workflow = submit(["a", "b"])
    dispatcher = queue()
    dispatcher.run()
    (taken,) = take(dispatcher.take_sent()[0], by=executor)
    leases.finish([rated(taken, 0, not_before=database_now() + timedelta(hours=1))])
    dispatcher.wake_and_run()
    assert not dispatcher.sent

    end_pauses()
    dispatcher.wake_and_run()

    (again,) = take(dispatcher.take_sent()[0], by=executor)
    assert (again.sent, again.attempts) == (0b10, 1)
    leases.finish([rated(again)])
    assert [r.attempts for r in requests(workflow)] == [1, 2]


@with_commits
def test_two_claimers_at_once_never_lease_a_batch_twice() -> None:
    boot(slots=1_000)
    workflow = submit(names(120), batch_size=1)
    dispatchers = [queue(Replica(window=400)) for _ in range(3)]
    start = threading.Barrier(3)

    def claim(number: int) -> None:
        start.wait(10)
        for _ in range(5):
            dispatchers[number].run()

    with threads(3) as pool:
        for future in [pool.submit(claim, number) for number in range(3)]:
            future.result(20)

    sent = [pair for d in dispatchers for m in d.sent for pair in m.leases]
    assert sorted(sent) == sorted((b.pk, b.fence) for b in batches(workflow))
    rows_are_sound()
