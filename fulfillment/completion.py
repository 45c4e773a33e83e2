"""The completion checker: ends workflows, exactly once, and says so.

A workflow is complete when it is closed and no batch of it has an open item. Its final state and
its event are written in one transaction under the workflow's lock. It is rung by the last batch,
by beat every few seconds, and by the dispatcher's loop when beat is late; each run may meet
another one and both are harmless.
"""

from datetime import datetime
from typing import Any

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import ending, folding, rounds
from fulfillment.clock import database_now
from fulfillment.models import Event, Workflow
from fulfillment.policy.lifecycle import EndingReason, WorkflowState, outcome

CHECKED = (WorkflowState.RUNNING, WorkflowState.PAUSED, WorkflowState.ENDING)
"""States from which a workflow without open items ends, once it is closed."""


def check(workflow_id: int) -> bool:
    """Complete a workflow if it is closed and nothing is open; say whether it was this call."""
    with transaction.atomic(), connection.cursor() as cursor:
        workflow = (
            Workflow.objects.select_for_update(no_key=True)
            .filter(
                pk=workflow_id,
                state__in=CHECKED,
                closed_at__isnull=False,
            )
            .first()
        )
        if workflow is None or _has_open_items(cursor, workflow_id):
            return False
        tally = folding.fold_one(cursor, workflow_id)
        reason = EndingReason(workflow.ending_reason) if workflow.ending_reason else None
        now = database_now()
        workflow.state = outcome(tally, reason)
        workflow.finished_at = now
        workflow.save(update_fields=["state", "finished_at"])
        state = WorkflowState(workflow.state).name
        Event.objects.create(
            workflow=workflow,
            round=workflow.round,
            kind=f"workflow.{state.lower()}",
            data={
                "id": workflow.public_id,
                "name": workflow.name,
                "rater": workflow.rater_id,
                "state": state,
                "round": workflow.round,
                "total": tally.total,
                "completed": tally.completed,
                "failed": tally.failed,
                "timed_out": tally.timed_out,
                "cancelled": tally.cancelled,
            },
            created_at=now,
        )
        return True


def _has_open_items(cursor: CursorWrapper, workflow_id: int) -> bool:
    cursor.execute(
        """
        SELECT w FROM unnest(ARRAY[%s]::bigint[]) w
        WHERE NOT EXISTS (SELECT FROM fulfillment_batch b
                          WHERE b.workflow_id = w AND b.state <> 4 AND b.open_mask <> 0)
        """,
        [workflow_id],
    )
    # As a plain EXISTS it scans the table: the planner hopes to find one soon where there is none.
    return cursor.fetchone() is None


def run_once(now: datetime) -> int:
    """Do all that is due: fold, deadlines, endings, sweeps, retry rounds, completion."""
    while folding.fold() >= folding.FOLDED:
        pass
    for workflow_id in _ids("deadline_at <= %s AND state IN (1, 2, 3)", now):
        ending.pass_deadline(workflow_id, now=now)
    for workflow_id in _ids(
        """
        state IN (1, 2, 3) AND EXISTS (
            SELECT FROM fulfillment_raterversion v
            WHERE v.id = w.rater_version_id AND v.retired_at IS NOT NULL)
        """
    ):
        ending.pass_retirement(workflow_id, now=now)
    for workflow_id in _ids("ends_at <= %s AND state IN (1, 2, 3, 9)", now):
        ending.begin(workflow_id, EndingReason.MAX_DURATION, now)
    for workflow_id in _ids(
        """
        complete_when < 1 AND round = 1 AND closed_at IS NOT NULL AND state IN (2, 3) AND EXISTS (
            SELECT FROM fulfillment_workflowstats s
            WHERE s.workflow_id = w.id AND s.received > 0
              AND s.completed + s.failed + s.timed_out >= w.complete_when * s.received)
        """
    ):
        ending.begin(workflow_id, EndingReason.COMPLETE_WHEN, now)
    for workflow_id in _ids("state = 4"):
        ending.sweep(workflow_id)
    for workflow_id in _ids("state = 9"):
        rounds.reopen(workflow_id)
    return sum(
        check(workflow_id)
        # Not as NOT EXISTS: then statistics that are old may make a scan of all batches of it.
        for workflow_id in _ids(
            """
            state IN (2, 3, 4) AND closed_at IS NOT NULL AND (
                SELECT b.id FROM fulfillment_batch b
                WHERE b.workflow_id = w.id AND b.state <> 4 AND b.open_mask <> 0
                ORDER BY b.id LIMIT 1) IS NULL
            """
        )
    )


def _ids(condition: str, *values: Any) -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT id FROM fulfillment_workflow w WHERE finished_at IS NULL AND {condition}"
            " ORDER BY id",
            values,
        )
        return [row[0] for row in cursor.fetchall()]
