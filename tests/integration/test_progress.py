"""Progress: counts that add up in one snapshot, whatever is folded meanwhile."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from fulfillment import control, leases, progress
from fulfillment.clock import database_now
from fulfillment.folding import fold
from fulfillment.leases import Finish
from fulfillment.models import StatsDelta, Workflow
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


def counts(workflow: Workflow) -> dict[str, int]:
    workflow.refresh_from_db()
    found: dict[str, int] = progress.read(workflow)["counts"]
    assert sum(n for name, n in found.items() if name != "total") == found["total"]
    return {name: n for name, n in found.items() if n}


def test_progress_follows_a_workflow_from_pending_to_its_end() -> None:
    executor = boot()
    workflow = submit(["a", "b", "a", "c", "d", "e"], batch_size=2)
    archived("e")
    assert counts(workflow) == {"total": 6, "pending": 6}
    dispatcher = queue()
    dispatcher.run()
    assert counts(workflow) == {"total": 6, "pending": 5, "completed": 1}
    ab, cd = (t for m in dispatcher.take_sent() for t in take(m, by=executor))
    assert counts(workflow) == {"total": 6, "running": 5, "completed": 1}

    leases.finish([rated(ab, 1, not_before=database_now() + timedelta(hours=1))])

    assert counts(workflow) == {"total": 6, "running": 2, "retrying": 2, "completed": 2}
    leases.finish([Finish(taken=cd, failed={0: "x"}, timed_out={1: "deadline"}, calls=2)])
    control.cancel(workflow_id=workflow.pk)
    assert counts(workflow) == {
        "total": 6, "completed": 2, "failed": 1, "timed_out": 1, "cancelled": 2,
    }  # fmt: skip
    found = progress.read(workflow)
    assert found["sources"] == {"archive": 1, "coalesced": 0, "model": 1}
    assert (found["scored"], found["mean_score"]) == (2, 2.0)
    assert (found["model_calls"], found["attempts"]) == (3, 2)
    assert found["accelerator_seconds"] == 0.125
    counts_add_up(workflow)


def test_items_that_were_swept_are_not_running() -> None:
    executor = boot()
    workflow = submit(["a", "b"])
    dispatcher = queue()
    dispatcher.run()
    take(dispatcher.take_sent()[0], by=executor)

    control.cancel(workflow_id=workflow.pk)

    assert counts(workflow) == {"total": 2, "cancelled": 2}


def test_a_batch_on_its_way_is_still_pending() -> None:
    boot()
    workflow = submit(["a"])
    queue().run()

    assert counts(workflow) == {"total": 1, "pending": 1}


def test_a_workflow_without_a_score_has_no_mean() -> None:
    workflow = submit(["a"])

    found = progress.read(workflow)

    assert (found["mean_score"], found["scored"]) == (None, 0)


def test_folding_changes_nothing_that_is_read() -> None:
    executor = boot()
    workflow = submit(["a", "b", "c"], batch_size=1)
    dispatcher = queue()
    dispatcher.run()
    for message in dispatcher.take_sent():
        leases.finish([rated(t) for t in take(message, by=executor)])
    before = progress.read(workflow)

    assert fold() > 0

    assert progress.read(workflow) == before
    assert not StatsDelta.objects.exists()


def test_a_list_reads_each_workflows_own_counts() -> None:
    executor = boot()
    workflows = [submit([f"{n}-{i}" for i in range(n + 1)]) for n in range(3)]
    dispatcher = queue()
    dispatcher.run()
    for message in dispatcher.take_sent():
        leases.finish([rated(t, 0) for t in take(message, by=executor)])
    check_all()
    for workflow in workflows:
        workflow.refresh_from_db()

    listed = progress.read_many(workflows)

    assert [d["counts"]["total"] for d in listed] == [1, 2, 3]
    assert [d["counts"]["completed"] for d in listed] == [1, 1, 1]
    assert [d["counts"]["pending"] for d in listed] == [0, 1, 2]
    assert progress.read_many([]) == []


@pytest.mark.django_db(transaction=True)
def test_counts_never_jump_while_deltas_are_folded() -> None:
    """A reader between the deletion of a delta and the sum would see the total go back."""
    workflow = submit([])
    done = threading.Event()

    def write() -> None:
        for _ in range(100):
            StatsDelta.objects.create(workflow=workflow, received=1, completed=1)
        done.set()

    def fold_on() -> None:
        while not done.is_set():
            fold()

    seen: list[Any] = []
    with threads(2) as pool:
        running = [pool.submit(write), pool.submit(fold_on)]
        while not done.is_set():
            found = progress.read(workflow)["counts"]
            seen.append((found["total"], found["completed"]))
        for future in running:
            future.result(10)
    fold()

    assert seen == sorted(seen)
    assert all(total == completed for total, completed in seen)
    assert progress.read(workflow)["counts"]["completed"] == 100
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM fulfillment_statsdelta")
        assert cursor.fetchone() == (0,)
