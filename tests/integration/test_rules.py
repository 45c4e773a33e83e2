"""The database's own rules: the tables of policy/lifecycle.py as constraints and triggers (I13)."""

from typing import Any

import pytest
from django.db import IntegrityError, transaction

from fulfillment.clock import database_now
from fulfillment.models import RatingRequest, Workflow
from fulfillment.policy.lifecycle import (
    FINISHED,
    REQUEST_MOVES,
    WORKFLOW_MOVES,
    RequestState,
    Source,
    WorkflowState,
)
from tests import builders
from tests.rating_queue import rater

pytestmark = pytest.mark.django_db


def is_refused(*, row: Any, changes: dict[str, Any], rule: str) -> bool:
    """Try to write a row, and say whether the rule of that name refused it."""
    try:
        with transaction.atomic():
            type(row).objects.filter(pk=row.pk).update(**changes)
    except IntegrityError as error:
        if rule not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize("before", WorkflowState)
def test_workflows_move_as_the_table_says(before: WorkflowState) -> None:
    version = rater()

    allowed = {
        after
        for after in WorkflowState
        if not is_refused(
            row=builders.workflow(version, state=before, ending_reason="forced"),
            changes={
                "state": after,
                "finished_at": database_now() if after in FINISHED else None,
                "round": 2 if after is WorkflowState.REOPENING is not before else 1,
            },
            rule="may not go from state",
        )
    }

    assert allowed - {before} == WORKFLOW_MOVES[before]


@pytest.mark.parametrize(
    ("state", "round_"),
    [(WorkflowState.REOPENING, 1), (WorkflowState.REOPENING, 3), (WorkflowState.PARTIAL, 2)],
)
def test_a_round_begins_with_a_retry_and_is_the_next_one(state: WorkflowState, round_: int) -> None:
    workflow = builders.workflow(rater(), state=WorkflowState.PARTIAL)
    finished_at = workflow.finished_at if state is WorkflowState.PARTIAL else None

    assert is_refused(
        row=workflow,
        changes={"state": state, "round": round_, "finished_at": finished_at},
        rule="may not go from round",
    )


@pytest.mark.parametrize("before", RequestState)
def test_requests_move_as_the_table_says(before: RequestState) -> None:
    workflow = builders.workflow(rater())

    allowed = set()
    for position, after in enumerate(RequestState):
        row = builders.request(workflow, position, state=before)
        is_completed = after is RequestState.COMPLETED
        changes = {
            "state": after,
            "error": "x",
            "score": (row.score or 1.0) if is_completed else None,
            "source": Source.MODEL if is_completed else None,
        }
        if not is_refused(row=row, changes=changes, rule="may not go to"):
            allowed.add(after)

    assert allowed - {before} == REQUEST_MOVES[before]


@pytest.mark.parametrize("change", [{"score": 3.0}, {"label": "other"}])
def test_what_completed_keeps_its_score_and_label(change: dict[str, Any]) -> None:
    workflow = builders.workflow(rater())
    row = builders.request(workflow, 0, state=RequestState.COMPLETED, label="good")

    assert is_refused(row=row, changes=change, rule="may not go to")


def test_the_output_of_what_completed_may_be_erased() -> None:
    workflow = builders.workflow(rater())
    row = builders.request(workflow, 0, state=RequestState.COMPLETED, output={"raw": "text"})

    assert not is_refused(row=row, changes={"output": None}, rule="may not go to")
    assert RatingRequest.objects.get().output is None
    assert Workflow.objects.count() == 1
