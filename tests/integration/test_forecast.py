"""The ETA of a workflow, from what ended of late and what else waits for its rater."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from fulfillment import progress, queue_history
from fulfillment.board import PACE_WINDOW
from fulfillment.forecast import LOOK_EVERY, Forecaster
from fulfillment.models import Flow, QueueSample, Rater, Workflow
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from fulfillment.policy.priority import PriorityClass
from tests import builders
from tests.builders import NOW, RATER
from tests.rating_queue import give_up

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(seconds=60)
DAY = timedelta(days=1)


def workflow(open_requests: int, *, worked: int = 0, at: datetime = LATER, **changes: Any) -> Any:
    """Store a workflow that was dispatched at NOW; `worked` of it ended by `at`."""
    made = builders.workflow(
        stats={"received": open_requests + worked, "completed": worked, "from_model": worked},
        **{"started_at": NOW, **changes},
    )
    if worked:
        flow(made, worked, at=at)
    return made


def flow(of: Workflow, worked: int, *, at: datetime = LATER) -> None:
    Flow.objects.create(
        workflow_id=of.pk, at=at, ended=worked, worked=worked, model_calls=1, accelerator_seconds=1
    )


def eta(
    of: Workflow,
    *,
    now: datetime = LATER,
    by: Forecaster | None = None,
    is_cut: bool | None = None,
) -> Any:
    return (by or Forecaster()).eta(of, progress.read(of), now=now, is_cut=is_cut)


def test_a_workflow_alone_ends_by_the_pace_of_its_rater() -> None:
    found = eta(workflow(1_200, worked=600))

    assert found["seconds"] == 120
    assert 80 < found["low"] < 120 < found["high"] < 180


def test_what_waits_for_the_same_rater_makes_it_later_and_what_waits_for_another_does_not() -> None:
    alone = eta(first := workflow(1_200, worked=600))
    other = builders.version(builders.rater("other"))
    builders.workflow(other, stats={"received": 10**6})

    assert eta(first) == alone
    workflow(1_200, owner="bob")
    assert eta(first)["seconds"] > alone["seconds"]


def test_a_workflow_not_yet_dispatched_has_the_pace_of_its_rater() -> None:
    workflow(1, worked=600)
    waiting = workflow(600, started_at=None, owner="bob")

    assert eta(waiting)["seconds"] == 61


def test_before_anything_ended_nothing_is_known() -> None:
    assert eta(workflow(600)) is None


def test_an_idle_rater_is_known_by_its_past() -> None:
    for minute in range(3):
        QueueSample.objects.create(
            at=NOW - timedelta(days=1, minutes=minute), rater_id=RATER,
            priority_class=PriorityClass.MIDDLE, ready=5, leased=1, delayed=0, waiting=0,
            workflows=1, open_requests=72, paused_requests=0, period_s=30, ended=300, worked=300,
            model_calls=25, accelerator_seconds=1.0,
        )  # fmt: skip

    assert eta(workflow(600, started_at=None))["seconds"] == 60


@pytest.mark.parametrize(
    "state", [WorkflowState.PAUSED, WorkflowState.ENDING, WorkflowState.COMPLETED]
)
def test_what_is_not_sent_has_no_end_in_sight(state: WorkflowState) -> None:
    changes: dict[str, Any] = (
        {"ending_reason": "cancelled"} if state == WorkflowState.ENDING else {}
    )

    assert eta(workflow(600, worked=600, state=state, **changes)) is None


def test_a_paused_rater_has_no_end_in_sight() -> None:
    of = workflow(600, worked=600)
    Rater.objects.filter(pk=RATER).update(paused_at=NOW, paused_code="unauthorized")

    assert eta(of) is None


def test_paused_workflows_of_others_do_not_count() -> None:
    of = workflow(600, worked=600)
    before = eta(of)
    workflow(10**6, owner="bob", state=WorkflowState.PAUSED)

    assert eta(of) == before


def test_old_work_tells_nothing_of_the_pace() -> None:
    of = workflow(600, worked=600)
    later = LATER + PACE_WINDOW + timedelta(seconds=1)

    assert eta(of, now=later) is None
    flow(of, 90, at=later)
    assert eta(of, now=later)["seconds"] == 600 * PACE_WINDOW.total_seconds() / 90


def test_work_of_finished_workflows_counts_for_the_rater() -> None:
    flow(workflow(0, state=WorkflowState.COMPLETED), 540)
    of = workflow(600, worked=60)

    # 10 a second by the rater's pace, 1 by its own, of which a tenth as much was seen.
    assert 60 < eta(of)["seconds"] < 90


def test_a_planned_retry_is_waited_for_and_the_end_is_never_passed() -> None:
    of = workflow(2, worked=600)
    builders.batch(of, [0, 1], state=BatchState.DELAYED, not_before=LATER + timedelta(minutes=20))

    assert eta(of)["seconds"] == 1_200
    Workflow.objects.filter(pk=of.pk).update(ends_at=LATER + timedelta(minutes=5))
    of.refresh_from_db()
    assert eta(of) == {"seconds": 300, "low": 300, "high": 300, "in_time": False}


def test_an_end_after_the_deadline_or_the_max_duration_is_not_in_time() -> None:
    of = workflow(1_200, worked=600)
    said = []
    for deadline_s, ends_s in ((121, 121), (119, 240), (240, 119)):
        of.deadline_at = LATER + timedelta(seconds=deadline_s)
        of.ends_at = LATER + timedelta(seconds=ends_s)
        said.append(eta(of))

    assert [(found["seconds"], found["in_time"]) for found in said] == [
        (120, True),
        (120, False),
        (119, False),
    ]


def test_what_was_given_up_ends_as_best_effort_and_others_end_without_it() -> None:
    workflow(1, worked=600, owner="eve")
    times: dict[str, Any] = {
        "started_at": None,
        "deadline_at": LATER + timedelta(seconds=200),
        "ends_at": LATER + DAY,
    }
    high = workflow(1_200, priority=90, **times)
    middle = workflow(1_200, owner="bob", **times)
    assert (eta(high)["in_time"], eta(middle)["in_time"]) == (True, False)

    give_up(high, made_at=NOW)

    assert (eta(high)["in_time"], eta(middle)["in_time"]) == (False, True)
    told: dict[int, Any] = {each.workflow_id: end for each, end in Forecaster().outlook(LATER)}
    assert told[high.pk].seconds > 200 > told[middle.pk].seconds
    # What has just been decided counts before the next look at the queue.
    assert eta(high, is_cut=False)["in_time"]
    assert not eta(middle, is_cut=True)["in_time"]


def test_many_questions_are_one_look_at_the_queue(django_assert_num_queries: Any) -> None:
    of, forecaster = workflow(600, worked=600), Forecaster()
    counted = progress.read(of)
    before = forecaster.eta(of, counted, now=LATER)
    flow(of, 6_000)

    with django_assert_num_queries(0):
        assert forecaster.eta(of, counted, now=LATER + LOOK_EVERY / 2) == before
    assert forecaster.eta(of, counted, now=LATER + 2 * LOOK_EVERY) != before


def test_samples_are_taken_while_flows_still_serve_the_pace() -> None:
    of = workflow(600, worked=600)
    before = eta(of)

    queue_history.run_once(LATER)

    assert eta(of) == before
