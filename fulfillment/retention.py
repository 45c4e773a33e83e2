"""What is kept for how long (I11); erasing does the work, in chunks that hold no lock for long.

Each span is a setting, `AIRS_KEEP_…`: finished workflows with their requests and events; payloads
and batches, which go a day after a workflow COMPLETED and later where a retry may need them;
idempotency records; deliveries; marks of failed items; rows of executors and services that are
gone. Ratings go as the archive says, samples of the queue as its history does; accounts of
accelerators are kept for as long as those.
"""

from datetime import datetime

from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import connection, transaction

from fulfillment import expiry
from fulfillment.erasing import (
    Budget,
    begin_erasure,
    erase_batches,
    erase_rows,
    go_on,
)
from fulfillment.janitor import remove_dead_uploads
from fulfillment.models import Delivery, Workflow, WorkflowStats
from fulfillment.policy.lifecycle import WorkflowState

MOST_ROWS = 2_000_000
"""Rows that one run erases at most; the rest is left to the next run, a minute later."""
_WORKFLOWS = 1_000
"""Workflows looked at in one statement."""


def run_once(now: datetime) -> int:
    """Erase what is due; return how many rows."""
    budget = Budget(MOST_ROWS)
    remove_dead_uploads(budget, now, keep_keys=settings.AIRS_KEEP_IDEMPOTENCY_KEYS)
    _small_things(budget, now)
    _deliveries(budget, now)
    _workflows(budget, now)
    go_on(budget)
    _payloads(budget, now)
    return budget.erased + expiry.retain(now=now)


def _small_things(budget: Budget, now: datetime) -> None:
    gone = now - settings.AIRS_KEEP_BOOTS
    for table, condition, at in (
        ("fulfillment_failedflight", "failed_at < %s", now - settings.AIRS_KEEP_FAILURES),
        ("fulfillment_upload", "finished_at < %s", now - settings.AIRS_KEEP_IDEMPOTENCY_KEYS),
        ("fulfillment_executorboot", "heartbeat_at < %s", gone),
        ("fulfillment_servicerun", "ran_at < %s", gone),
        ("fulfillment_acceleratoruse", "hour < %s", now - settings.AIRS_KEEP_QUEUE_SAMPLES),
        (Session._meta.db_table, "expire_date < %s", now),
    ):
        erase_rows(budget, table, condition, [at])


def _deliveries(budget: Budget, now: datetime) -> None:
    """Erase deliveries that were over long ago; a replay makes one young again."""
    before = now - settings.AIRS_KEEP_DELIVERIES
    while limit := budget.chunk:
        with transaction.atomic():
            over = Delivery.objects.filter(finished_at__lt=before)
            ids = list(
                over.select_for_update(skip_locked=True).values_list("pk", flat=True)[:limit]
            )
            budget.erased += Delivery.objects.filter(pk__in=ids).delete()[0]
        if len(ids) < limit:
            return


def _workflows(budget: Budget, now: datetime) -> None:
    """Let workflows be gone that ended long ago."""
    ended_before = now - settings.AIRS_KEEP_WORKFLOWS
    while budget.chunk:
        ids = Workflow.objects.filter(finished_at__lt=ended_before).order_by("finished_at")
        due = list(ids.values_list("pk", flat=True)[:_WORKFLOWS])
        for workflow_id in due:
            budget.erased += begin_erasure(workflow_id, now, ended_before=ended_before)
        if len(due) < _WORKFLOWS:
            return


def _payloads(budget: Budget, now: datetime) -> None:
    """Erase payloads and batches of workflows that ended long enough ago."""
    completed_before = now - settings.AIRS_KEEP_DONE_PAYLOADS
    ended_before = now - settings.AIRS_KEEP_PAYLOADS
    with connection.cursor() as cursor:
        # Steps through the index of payloads from workflow to workflow: finished ones, of which
        # there is no end, would have to be looked at one by one.
        cursor.execute(
            """
            WITH RECURSIVE holding(id) AS (
                SELECT min(workflow_id) FROM fulfillment_batchpayload
                UNION ALL
                SELECT (SELECT min(p.workflow_id) FROM fulfillment_batchpayload p
                        WHERE p.workflow_id > h.id)
                FROM holding h WHERE h.id IS NOT NULL
            )
            SELECT w.id, CASE WHEN w.state = %s THEN %s ELSE %s END
            FROM holding h JOIN fulfillment_workflow w ON w.id = h.id
            WHERE w.finished_at < CASE WHEN w.state = %s THEN %s ELSE %s END
            ORDER BY w.finished_at
            """,
            [WorkflowState.COMPLETED, completed_before, ended_before] * 2,
        )
        due = cursor.fetchall()
    for workflow_id, before in due:
        # First, as what is left is found by its payloads.
        WorkflowStats.objects.filter(pk=workflow_id, workflow__finished_at__lt=before).update(
            stored_bytes=0
        )
        if not erase_batches(budget, workflow_id, ended_before=before):
            return
