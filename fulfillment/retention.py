"""Erasing what is no longer needed, in chunks that hold no lock for long (I11).

Payloads and batches go 24 h after their workflow COMPLETED (with it, if some item did not); marks
of failed fingerprints after ten minutes; uploads that died half-way after a minute; idempotency
records after two days; ratings as the archive says.
"""

from datetime import datetime, timedelta

from django.db import connection, transaction

from fulfillment import archive
from fulfillment.completion import UPLOAD_SILENCE
from fulfillment.models import (
    ExecutorBoot,
    FailedFlight,
    Upload,
    Workflow,
)
from fulfillment.policy.lifecycle import WorkflowState

PAYLOADS = timedelta(hours=24)
FAILURES = timedelta(minutes=10)
UPLOADS = timedelta(hours=48)
BOOTS = timedelta(days=1)
_CHUNK = 2_000
_WORKFLOWS = 50


def run_once(now: datetime) -> int:
    """Erase what is due; return how many rows."""
    return (
        _dead_uploads(now)
        + _batches(now)
        + FailedFlight.objects.filter(failed_at__lt=now - FAILURES).delete()[0]
        + Upload.objects.filter(finished_at__lt=now - UPLOADS).delete()[0]
        + ExecutorBoot.objects.filter(heartbeat_at__lt=now - BOOTS).delete()[0]
        + archive.retain(now=now)
    )


def _dead_uploads(now: datetime) -> int:
    """Remove RECEIVING workflows whose upload stands still; the client's retry starts afresh."""
    dead = list(
        Upload.objects.filter(
            finished_at=None,
            creates=True,
            heartbeat_at__lt=now - UPLOAD_SILENCE,
            workflow__state=WorkflowState.RECEIVING,
        ).values_list("id", "workflow_id", "holder")
    )
    erased = 0
    for upload_id, workflow_id, holder in dead:
        with transaction.atomic():
            # Whoever takes it over changes the holder: then it lives, and is left alone. Without
            # its record nobody can go on; what is left below is only erased.
            gone, _ = Upload.objects.filter(pk=upload_id, holder=holder, finished_at=None).delete()
        if gone:
            erased += 1 + _erase_workflow(workflow_id)
    return erased


def _erase_workflow(workflow_id: int) -> int:
    erased = 0
    for table in (
        "fulfillment_batchpayload",
        "fulfillment_batch",
        "fulfillment_ratingrequest",
        "fulfillment_statsdelta",
        "fulfillment_workflowstats",
    ):
        erased += _erase_rows(table, workflow_id)
    return erased + Workflow.objects.filter(pk=workflow_id).delete()[0]


def _erase_rows(table: str, workflow_id: int) -> int:
    erased = 0
    while True:
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                DELETE FROM {table} WHERE ctid = ANY(ARRAY(
                    SELECT ctid FROM {table} WHERE workflow_id = %s LIMIT {_CHUNK}))
                """,
                [workflow_id],
            )
            erased += cursor.rowcount
            if cursor.rowcount < _CHUNK:
                return erased


def _batches(now: datetime) -> int:
    """Erase batches and payloads of workflows that COMPLETED a day ago."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT w.id FROM fulfillment_workflow w
            WHERE w.state = %s AND w.finished_at < %s
              AND EXISTS (SELECT FROM fulfillment_batchpayload p WHERE p.workflow_id = w.id)
            ORDER BY w.id LIMIT %s
            """,
            [WorkflowState.COMPLETED, now - PAYLOADS, _WORKFLOWS],
        )
        ids = [row[0] for row in cursor.fetchall()]
    erased = 0
    for workflow_id in ids:
        while True:
            with connection.cursor() as cursor:
                cursor.execute(
                    f"""
                    WITH due AS (
                        SELECT batch_id FROM fulfillment_batchpayload
                        WHERE workflow_id = %s LIMIT {_CHUNK}
                    ), gone AS (
                        DELETE FROM fulfillment_batch b USING due WHERE b.id = due.batch_id
                    )
                    DELETE FROM fulfillment_batchpayload p USING due
                    WHERE p.batch_id = due.batch_id
                    """,
                    [workflow_id],
                )
                erased += cursor.rowcount
                if cursor.rowcount < _CHUNK:
                    break
    return erased
