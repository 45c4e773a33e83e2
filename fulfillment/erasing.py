"""Erasing many rows: in chunks, each a statement and a transaction of its own.

No statement waits for a row that somebody else holds, none holds many locks for long, and being
killed between two chunks (or inside one) only leaves more for the next run. A run has a budget of
rows, so that it ends: what is over waits for the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection, transaction

from fulfillment.models import (
    POSITION_BITS,
    Erasure,
    StatsDelta,
    Upload,
    Workflow,
    WorkflowForecast,
    WorkflowStats,
)

CHUNK = 2_000


@dataclass(slots=True)
class Budget:
    """Rows that a run may still erase."""

    rows: int
    erased: int = 0

    @property
    def chunk(self) -> int:
        """Return how many rows the next statement may erase; 0 when the budget is spent."""
        return min(CHUNK, self.rows - self.erased)


def erase_rows(budget: Budget, table: str, condition: str, values: Sequence[Any]) -> bool:
    """Erase the rows of a table that meet a condition; say whether none is left for us.

    Rows that somebody else has locked at this moment are left to the next run.
    """
    while limit := budget.chunk:
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                DELETE FROM {table} WHERE ctid = ANY(ARRAY(
                    SELECT ctid FROM {table} WHERE {condition} LIMIT {limit}
                    FOR UPDATE SKIP LOCKED))
                """,
                values,
            )
            budget.erased += cursor.rowcount
            if cursor.rowcount < limit:
                return True
    return False


def erase_batches(budget: Budget, workflow_id: int, *, ended_before: datetime | None) -> bool:
    """Erase batches and payloads of a workflow; say whether none is left.

    With `ended_before`, only while it has ended before that: the workflow is locked against a retry
    for the length of each chunk. None is for workflows that are gone.
    """
    gone = ended_before is None
    while limit := budget.chunk:
        with connection.cursor() as cursor:
            # By payload: batches that are done have no index of their workflow.
            cursor.execute(
                f"""
                WITH ended AS (
                    SELECT id FROM fulfillment_workflow
                    WHERE id = %s AND finished_at < %s FOR SHARE
                ), due AS (
                    SELECT batch_id FROM fulfillment_batchpayload
                    WHERE workflow_id = %s AND (%s OR EXISTS (SELECT FROM ended)) LIMIT {limit}
                ), batches AS (
                    DELETE FROM fulfillment_batch b USING due WHERE b.id = due.batch_id
                ), payloads AS (
                    DELETE FROM fulfillment_batchpayload p USING due WHERE p.batch_id = due.batch_id
                )
                SELECT count(*) FROM due
                """,
                [workflow_id, ended_before, workflow_id, gone],
            )
            (count,) = cursor.fetchone()
            budget.erased += count
            if count < limit:
                return True
    return False


def begin_erasure(workflow_id: int, now: datetime, *, ended_before: datetime | None = None) -> bool:
    """Let a workflow be gone for everybody, with its events; say whether it was there.

    With `ended_before`, only if it ended before that. Its other rows are found through Erasure.
    """
    with transaction.atomic():
        due = Workflow.objects.select_for_update().filter(pk=workflow_id)
        if ended_before is not None:
            due = due.filter(finished_at__lt=ended_before)
        workflow = due.first()
        if workflow is None:
            return False
        Erasure.objects.create(workflow_id=workflow_id, began_at=now)
        Upload.objects.filter(workflow_id=workflow_id).delete()
        workflow.delete()
    return True


def go_on(budget: Budget) -> None:
    """Erase what is left of workflows that are gone."""
    for workflow_id in Erasure.objects.order_by("pk").values_list("pk", flat=True):
        if not (
            erase_batches(budget, workflow_id, ended_before=None)
            and _erase_requests(budget, workflow_id)
        ):
            return
        # Waits for a fold, which would else leave its row behind; the mark that there is more goes
        # last.
        for model in (WorkflowForecast, StatsDelta, WorkflowStats, Erasure):
            budget.erased += model._default_manager.filter(workflow_id=workflow_id).delete()[0]


def _erase_requests(budget: Budget, workflow_id: int) -> bool:
    """Erase the requests of a workflow in their order; say whether none is left.

    Each chunk begins where the last one ended: to look again from the first would read what was
    erased before, over and over.
    """
    last, end = (workflow_id << POSITION_BITS) - 1, (workflow_id + 1) << POSITION_BITS
    while limit := budget.chunk:
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                WITH due AS (
                    SELECT id FROM fulfillment_ratingrequest
                    WHERE id > %s AND id < %s ORDER BY id LIMIT {limit}
                ), gone AS (
                    DELETE FROM fulfillment_ratingrequest r USING due WHERE r.id = due.id
                )
                SELECT count(*), max(id) FROM due
                """,
                [last, end],
            )
            count, last = cursor.fetchone()
            budget.erased += count
            if count < limit:
                return True
    return False
