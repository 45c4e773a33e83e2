"""The time line of a workflow and how its waits and tries are spread."""

import threading
from datetime import timedelta
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment import completion, control, leases, progress, timeline
from fulfillment.clock import database_now
from fulfillment.folding import fold
from fulfillment.leases import Finish
from fulfillment.models import StatsDelta, Upload, Workflow
from fulfillment.policy.lifecycle import RequestState, Source, WorkflowState
from tests import builders
from tests.builders import NOW, Api
from tests.rating_queue import (
    archived,
    boot,
    check_all,
    counts_add_up,
    queue,
    rated,
    submit,
    take,
    threads,
)

pytestmark = pytest.mark.django_db


def line(of: Workflow) -> dict[str, Any]:
    of.refresh_from_db()
    found: dict[str, Any] = progress.read(of)["timeline"]
    return found


def test_a_time_line_runs_from_acceptance_to_the_end() -> None:
    executor = boot()
    workflow = submit(["a", "b"], batch_size=1)
    assert [name for name, at in line(workflow).items() if at is None] == [
        "first_dispatch_at", "first_result_at", "last_result_at", "finished_at", "queued_s",
        "working_s", "total_s",
    ]  # fmt: skip
    dispatcher = queue()
    dispatcher.run()
    a, b = (t for m in dispatcher.take_sent() for t in take(m, by=executor))
    leases.finish([rated(a)])
    first = line(workflow)["first_result_at"]
    assert first == line(workflow)["last_result_at"]
    fold()
    assert line(workflow)["first_result_at"] == first

    leases.finish([rated(b)])
    check_all()

    found = line(workflow)
    assert found["first_result_at"] == first < found["last_result_at"]
    instants = [
        found[name]
        for name in (
            "accepted_at", "first_dispatch_at", "first_result_at", "last_result_at", "finished_at",
        )
    ]  # fmt: skip
    assert instants == sorted(instants)
    assert found["total_s"] >= found["queued_s"] + found["working_s"] - 0.002


def test_rows_that_come_in_are_no_results_but_those_the_archive_answers_are() -> None:
    workflow = submit([])
    StatsDelta.objects.create(workflow=workflow, received=5)
    fold()
    assert line(workflow)["first_result_at"] is None

    StatsDelta.objects.create(workflow=workflow, received=5, completed=2, from_archive=2)

    assert line(workflow)["first_result_at"] is not None


def test_lists_have_the_time_line_too() -> None:
    workflow = submit(["a"])
    StatsDelta.objects.create(workflow=workflow, completed=1)

    (listed,) = progress.read_many([workflow])

    assert listed["timeline"] == line(workflow)


# Distributions


def test_waits_count_from_the_upload_of_a_row() -> None:
    workflow = builders.workflow()
    for position, wait_s in enumerate((10, 20, 30)):
        builders.request(
            workflow,
            position,
            state=RequestState.COMPLETED,
            rated_at=NOW + timedelta(seconds=wait_s),
            attempts=position + 1,
        )
    Upload.objects.create(
        owner="alice", body_digest="0" * 32, workflow=workflow, creates=False, closes=False,
        first_position=2, rows=1, holder="0" * 32, heartbeat_at=NOW,
        created_at=NOW + timedelta(seconds=25),
    )  # fmt: skip

    found = timeline.spread(workflow, now=NOW)

    waited = found["waited_s"]
    assert (found["requests"], found["looked_at"], found["exact"]) == (3, 3, True)
    assert (waited["n"], waited["p50"], waited["max"], waited["mean"]) == (3, 10, 20, 11.667)
    assert [b["count"] for b in waited["histogram"]] == [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert (found["attempts"]["p50"], found["attempts"]["max"]) == (2, 3)
    assert found["open_s"] is None


def test_hits_wait_for_nothing_and_what_is_open_still_waits() -> None:
    workflow = builders.workflow()
    builders.request(
        workflow, 0, state=RequestState.COMPLETED, source=Source.ARCHIVE, attempts=0,
        rated_at=NOW - timedelta(days=3),
    )  # fmt: skip
    builders.request(workflow, 1)
    builders.request(workflow, 2, state=RequestState.FAILED, attempts=8)

    found = timeline.spread(workflow, now=NOW + timedelta(seconds=90))

    assert found["waited_s"] is None
    assert (found["open_s"]["n"], found["open_s"]["p50"]) == (1, 90)
    assert (found["attempts"]["n"], found["attempts"]["p50"]) == (1, 8)


def test_a_workflow_without_requests_has_nothing_to_spread() -> None:
    found = timeline.spread(builders.workflow(), now=NOW)

    assert found == {
        "requests": 0, "looked_at": 0, "exact": True, "waited_s": None, "open_s": None,
        "attempts": None,
    }  # fmt: skip


def test_a_large_workflow_is_sampled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SAMPLE", 4)
    workflow = builders.workflow()
    for position in range(12):
        builders.request(workflow, position, state=RequestState.COMPLETED)

    found = timeline.spread(workflow, now=NOW)

    assert (found["requests"], found["looked_at"], found["exact"]) == (12, 4, False)
    assert found["waited_s"]["n"] == 4
    assert timeline.spread(workflow, now=NOW) == found


@given(st.integers(0, 1 << 31))
def test_a_sample_has_one_position_of_each_stretch(positions: int) -> None:
    found = list(timeline.sample(positions))

    assert found == sorted(set(found))
    assert all(0 <= position < positions for position in found)
    if positions <= timeline.SAMPLE:
        assert len(found) == positions
    if positions >= 2 * timeline.SAMPLE:
        stretch = positions / timeline.SAMPLE
        assert len(found) == timeline.SAMPLE
        assert all(i * stretch - 1 < p < (i + 1) * stretch for i, p in enumerate(found))


def test_distributions_are_served_to_those_who_may_see_the_workflow() -> None:
    workflow = builders.workflow(owner="alice")
    builders.request(workflow, 0, state=RequestState.COMPLETED)
    path = f"/workflows/{workflow.public_id}/distributions"

    document = orjson.loads(Api("alice").get(path).content)

    assert (document["requests"], document["waited_s"]["n"]) == (1, 1)
    assert Api("mallory").get(path).status_code == 404


# Counts


@pytest.mark.django_db(transaction=True)
def test_counts_add_up_at_every_poll_beside_finishes_folds_sweeps_and_completion() -> None:
    executor = boot()
    names = [f"x{i % 300}" for i in range(360)]
    workflow = submit(names, batch_size=3)
    for name in names[:30]:
        archived(name)
    done = threading.Event()
    dispatcher = queue()

    def work() -> None:
        for n in range(60):
            dispatcher.wake_and_run()
            for message in dispatcher.take_sent():
                for taken in take(message, by=executor):
                    if n % 5 == 4:
                        again = database_now() + timedelta(milliseconds=1)
                        leases.finish([Finish(taken=taken, not_before=again, calls=1)])
                    else:
                        leases.finish([rated(taken)])
            if n == 6:
                control.cancel(workflow_id=workflow.pk)
                break
        done.set()

    def fold_on() -> None:
        while not done.is_set():
            fold()
            completion.run_once(database_now())

    seen = []
    with threads(2) as pool:
        running = [pool.submit(work), pool.submit(fold_on)]
        while not done.is_set():
            found = progress.read(Workflow.objects.get(pk=workflow.pk))["counts"]
            seen.append(found)
        for future in running:
            future.result(20)
    check_all()

    for found in seen:
        assert sum(n for name, n in found.items() if name != "total") == found["total"] == 360
        assert min(found.values()) >= 0
    completed = [found["completed"] for found in seen]
    assert completed == sorted(completed)
    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.CANCELLED
    counts_add_up(workflow)
