"""Erasing what is no longer needed, in chunks that hold no lock for long (I11).

Payloads and batches go 24 h after their workflow COMPLETED (with it, if some item did not); marks
of failed fingerprints after ten minutes; uploads that died half-way after a minute (appends, whose
chunks stay, after two days); idempotency records after two days; ratings as the archive says.
"""

from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Exists, OuterRef

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


def run_once(now: datetime) -> int:
    """Erase what is due; return how many rows."""
    return (
        _dead_uploads(now)
        + _batches(now)
        + FailedFlight.objects.filter(failed_at__lt=now - FAILURES).delete()[0]
        + Upload.objects.filter(finished_at__lt=now - UPLOADS).delete()[0]
        + Upload.objects.filter(finished_at=None, heartbeat_at__lt=now - UPLOADS).delete()[0]
        + ExecutorBoot.objects.filter(heartbeat_at__lt=now - BOOTS).delete()[0]
        + archive.retain(now=now)
    )


def _dead_uploads(now: datetime) -> int:
    """Remove RECEIVING workflows whose upload stands still; the client's retry starts afresh."""
    silent = now - UPLOAD_SILENCE
    dead = Upload.objects.filter(
        finished_at=None,
        creates=True,
        heartbeat_at__lt=silent,
        workflow__state=WorkflowState.RECEIVING,
    ).values_list("id", "holder")
    erased = 0
    for upload_id, holder in dead:
        # Whoever takes it over changes the holder, and who goes on with it the heartbeat: then it
        # lives, and is left alone.
        erased += Upload.objects.filter(
            pk=upload_id, holder=holder, heartbeat_at__lt=silent, finished_at=None
        ).delete()[0]
    # Without its record nobody can go on with a workflow: what is left of it is only erased, also
    # when the run that removed the record died before it came here.
    left = Workflow.objects.filter(
        ~Exists(Upload.objects.filter(workflow_id=OuterRef("pk"))),
        state=WorkflowState.RECEIVING,
        finished_at=None,  # as the index of unfinished ones has it
        created_at__lt=silent,
    ).values_list("pk", flat=True)
    return erased + sum(_erase_workflow(workflow_id) for workflow_id in left)


def _erase_workflow(workflow_id: int) -> int:
    erased = _erase_batches(workflow_id)
    for table in (
        "fulfillment_ratingrequest",
        "fulfillment_statsdelta",
        "fulfillment_workflowstats",
    ):
        erased += _erase_rows(table, workflow_id)
    return erased + Workflow.objects.filter(pk=workflow_id).delete()[0]


def _erase_rows(table: str, workflow_id: int) -> int:
    return _in_chunks(
        f"""
        DELETE FROM {table} WHERE ctid = ANY(ARRAY(
            SELECT ctid FROM {table} WHERE workflow_id = %s LIMIT {_CHUNK}))
        """,
        workflow_id,
    )


def _batches(now: datetime) -> int:
    """Erase batches and payloads of workflows that COMPLETED a day ago."""
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
            SELECT w.id FROM holding h JOIN fulfillment_workflow w ON w.id = h.id
            WHERE w.state = %s AND w.finished_at < %s ORDER BY w.id
            """,
            [WorkflowState.COMPLETED, now - PAYLOADS],
        )
        ids = [row[0] for row in cursor.fetchall()]
    return sum(map(_erase_batches, ids))


def _erase_batches(workflow_id: int) -> int:
    # By payload: batches that are done have no index of their workflow.
    return _in_chunks(
        f"""
        WITH due AS (
            SELECT batch_id FROM fulfillment_batchpayload WHERE workflow_id = %s LIMIT {_CHUNK}
        ), gone AS (
            DELETE FROM fulfillment_batch b USING due WHERE b.id = due.batch_id
        )
        DELETE FROM fulfillment_batchpayload p USING due WHERE p.batch_id = due.batch_id
        """,
        workflow_id,
    )


def _in_chunks(statement: str, workflow_id: int) -> int:
    """Run a statement that erases at most _CHUNK rows of a workflow until none is left."""
    erased = 0
    while True:
        with connection.cursor() as cursor:
            cursor.execute(statement, [workflow_id])
            erased += int(cursor.rowcount)
            if cursor.rowcount < _CHUNK:
                return erased
