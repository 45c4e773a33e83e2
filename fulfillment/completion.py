"""The completion checker: ends workflows, exactly once, and says so.

A workflow is complete when it is closed and no batch of it has an open item. Its final state and
its event are written in one transaction under the workflow's lock. It is rung by the last batch,
by beat every few seconds, and by the dispatcher's loop when beat is late; each run may meet
another one and both are harmless.

Ending early (cancel, max duration, `complete_when`) sets ENDING with its reason, from where no
claim, take-over or append goes on; a sweep then ends the open items in chunks under each batch's
row lock. A LEASED batch keeps its lease: what comes back enters the archive only.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import archive, outcomes
from fulfillment.clock import database_now
from fulfillment.errors import Conflict, NotFound
from fulfillment.models import PROGRESS_FIELDS, Event, Upload, Workflow
from fulfillment.outcomes import Outcome
from fulfillment.policy.lifecycle import (
    ENDINGS,
    FINISHED,
    EndingReason,
    RequestState,
    Source,
    Tally,
    WorkflowState,
    outcome,
)

SWEPT_IN_CALL = 5_000
"""Open items that cancel ends within the call; the checker ends the rest."""
UPLOAD_SILENCE = timedelta(seconds=60)
_BATCHES = 400
_FOLDED = 20_000


def close(*, workflow_id: int) -> Workflow:
    """Take no more rows; complete at once if nothing is open. Closing twice is harmless."""
    with transaction.atomic():
        workflow = _locked(workflow_id)
        if workflow.closed_at is None:
            now = database_now()
            if _has_upload(workflow, now):
                raise Conflict(
                    "rows are being taken in; close it when that upload has ended",
                    code="upload_in_progress",
                )
            workflow.closed_at = now
            if workflow.state == WorkflowState.OPEN:
                workflow.state = WorkflowState.RUNNING
            workflow.save(update_fields=["closed_at", "state"])
    check(workflow_id)
    return Workflow.objects.select_related("rater", "rater_version").get(pk=workflow_id)


def cancel(*, workflow_id: int) -> Workflow:
    """End a workflow now; finished work is kept. Cancelling twice is harmless.

    Raises Conflict `already_finished` when it had ended by itself.
    """
    with transaction.atomic():
        workflow = _locked(workflow_id)
        if workflow.state in FINISHED - {WorkflowState.CANCELLED}:
            raise Conflict(
                f"workflow {workflow.public_id} has ended as {WorkflowState(workflow.state).name}",
                code="already_finished",
            )
        if workflow.state not in {WorkflowState.ENDING, WorkflowState.CANCELLED}:
            _end(workflow, EndingReason.CANCELLED, database_now())
    sweep(workflow_id, most_items=SWEPT_IN_CALL)
    check(workflow_id)
    return Workflow.objects.select_related("rater", "rater_version").get(pk=workflow_id)


def _locked(workflow_id: int) -> Workflow:
    """Lock a workflow against intake (FOR SHARE) but not against foreign-key checks."""
    workflow = (
        Workflow.objects.select_for_update(no_key=True)
        .exclude(state=WorkflowState.RECEIVING)
        .filter(pk=workflow_id)
        .first()
    )
    if workflow is None:
        raise NotFound("there is no such workflow")
    return workflow


def _has_upload(workflow: Workflow, now: datetime) -> bool:
    return Upload.objects.filter(
        workflow=workflow,
        finished_at=None,
        heartbeat_at__gt=now - UPLOAD_SILENCE,
    ).exists()


def _end(workflow: Workflow, reason: EndingReason, now: datetime) -> None:
    workflow.state = WorkflowState.ENDING
    workflow.ending_reason = reason
    workflow.closed_at = workflow.closed_at or now
    workflow.save(update_fields=["state", "ending_reason", "closed_at"])


def check(workflow_id: int) -> bool:
    """Complete a workflow if it is closed and nothing is open; say whether it was this call."""
    with transaction.atomic(), connection.cursor() as cursor:
        workflow = (
            Workflow.objects.select_for_update(no_key=True)
            .filter(
                pk=workflow_id,
                state__in=[WorkflowState.RUNNING, WorkflowState.ENDING],
                closed_at__isnull=False,
            )
            .first()
        )
        if workflow is None or _has_open_items(cursor, workflow_id):
            return False
        tally = _fold_one(cursor, workflow_id)
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


def _fold_one(cursor: CursorWrapper, workflow_id: int) -> Tally:
    sums = ", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in PROGRESS_FIELDS)
    adds = ", ".join(f"{name} = s.{name} + a.{name}" for name in PROGRESS_FIELDS)
    cursor.execute(
        f"""
        WITH gone AS (
            DELETE FROM fulfillment_statsdelta WHERE workflow_id = %s RETURNING *
        ), a AS (SELECT {sums} FROM gone)
        UPDATE fulfillment_workflowstats s SET {adds} FROM a WHERE s.workflow_id = %s
        RETURNING s.received, s.completed, s.failed, s.timed_out, s.cancelled
        """,
        [workflow_id, workflow_id],
    )
    received, completed, failed, timed_out, cancelled = cursor.fetchone()
    return Tally(
        total=received,
        completed=completed,
        failed=failed,
        timed_out=timed_out,
        cancelled=cancelled,
    )


def fold() -> int:
    """Add deltas to the stats of their workflows; return how many deltas."""
    sums = ", ".join(f"sum({name}) AS {name}" for name in PROGRESS_FIELDS)
    adds = ", ".join(f"{name} = s.{name} + a.{name}" for name in PROGRESS_FIELDS)
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH due AS (
                SELECT id FROM fulfillment_statsdelta ORDER BY id LIMIT {_FOLDED}
                FOR UPDATE SKIP LOCKED
            ), gone AS (
                DELETE FROM fulfillment_statsdelta d USING due WHERE d.id = due.id RETURNING d.*
            ), a AS (SELECT workflow_id, count(*) AS deltas, {sums} FROM gone GROUP BY workflow_id),
            folded AS (
                UPDATE fulfillment_workflowstats s SET {adds} FROM a
                WHERE s.workflow_id = a.workflow_id
            )
            SELECT coalesce(sum(deltas), 0) FROM a
            """
        )
        (count,) = cursor.fetchone()
    return int(count)


def sweep(workflow_id: int, *, most_items: int) -> int:
    """End open items of an ENDING workflow, in chunks; return how many."""
    swept = 0
    while swept < most_items:
        count = _sweep_chunk(workflow_id)
        if not count:
            break
        swept += count
    return swept


def _sweep_chunk(workflow_id: int) -> int:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT ending_reason FROM fulfillment_workflow WHERE id = %s AND state = %s",
            [workflow_id, WorkflowState.ENDING],
        )
        row = cursor.fetchone()
        if row is None:
            return 0
        ending = ENDINGS[EndingReason(row[0])]
        batches = _open_batches(cursor, workflow_id, started_too=True)
        return _end_items(
            cursor,
            [
                (batch, item, Outcome(
                    workflow_id=workflow_id,
                    positions=positions,
                    state=ending.state,
                    error=ending.code,
                    attempts=batch.attempts,
                ))
                for batch in batches
                for item, positions in batch.open_items()
            ],
            batches,
        )  # fmt: skip


class _OpenBatch:
    """A locked batch with open items."""

    def __init__(self, row: Sequence[Any]) -> None:
        self.id, self.positions, self.item_of, self.fingerprints = row[:4]
        self.open_mask, self.attempts = row[4:]

    def open_items(self) -> list[tuple[int, list[int]]]:
        items = outcomes.positions_by_item(self.positions, self.item_of)
        return [(i, positions) for i, positions in items.items() if self.open_mask >> i & 1]


def _open_batches(
    cursor: CursorWrapper, workflow_id: int, *, started_too: bool
) -> list[_OpenBatch]:
    cursor.execute(
        """
        SELECT id, positions, item_of, fingerprints::text[], open_mask, attempts
        FROM fulfillment_batch
        WHERE workflow_id = %s AND state <> 4 AND open_mask <> 0
          AND (%s OR state <> 1 OR boot_id IS NULL)
        ORDER BY id LIMIT %s FOR UPDATE
        """,
        [workflow_id, started_too, _BATCHES],
    )
    return [_OpenBatch(row) for row in cursor.fetchall()]


def _end_items(
    cursor: CursorWrapper,
    ended: Sequence[tuple[_OpenBatch, int, Outcome]],
    batches: Sequence[_OpenBatch],
) -> int:
    """Write terminal states of all open items of the batches and clear their open masks."""
    if not batches:
        return 0
    progress = outcomes.end_requests(cursor, [o for _, _, o in ended])
    outcomes.add_progress(cursor, progress)
    ids = [batch.id for batch in batches]
    # A started batch keeps fence, lease and flights until its finish or expiry; one whose message
    # is still on its way loses them, so that nobody starts it.
    cursor.execute(
        """
        UPDATE fulfillment_batch
        SET open_mask = 0, not_before = NULL,
            state = CASE WHEN boot_id IS NOT NULL THEN 1 ELSE 4 END,
            lease_until = CASE WHEN boot_id IS NOT NULL THEN lease_until END,
            fence = CASE WHEN boot_id IS NOT NULL THEN fence ELSE fence + 1 END
        WHERE id = ANY(%s)
        """,
        [ids],
    )
    cursor.execute("DELETE FROM fulfillment_batchwait WHERE batch_id = ANY(%s)", [ids])
    return len(ended)


def pass_deadline(workflow_id: int, *, now: datetime) -> int:
    """End what has not been started by the deadline, after a last look into the archive."""
    swept = 0
    while True:
        with transaction.atomic(), connection.cursor() as cursor:
            workflow = Workflow.objects.select_related("rater").get(pk=workflow_id)
            batches = _open_batches(cursor, workflow_id, started_too=False)
            if not batches:
                return swept
            entries = archive.look_up(
                cursor,
                [f for batch in batches for f in batch.fingerprints],
                produced_after=archive.fresh_after(
                    now=now,
                    freshness_s=workflow.rater.freshness_s,
                    max_age_s=workflow.max_age_s,
                    accepted_at=workflow.created_at,
                    bypass=workflow.bypass,
                ),
                now=now,
            )
            swept += _end_items(
                cursor,
                [
                    (batch, item, _late(workflow, batch, item, positions, entries))
                    for batch in batches
                    for item, positions in batch.open_items()
                ],
                batches,
            )


def _late(
    workflow: Workflow,
    batch: _OpenBatch,
    item: int,
    positions: Sequence[int],
    entries: dict[str, archive.Entry],
) -> Outcome:
    entry = entries.get(batch.fingerprints[item].replace("-", ""))
    if entry is None:
        return Outcome(
            workflow_id=workflow.pk,
            positions=positions,
            state=RequestState.TIMED_OUT,
            error="deadline",
            attempts=batch.attempts,
        )
    return copied(workflow.pk, workflow.created_at, positions, entry, attempts=batch.attempts)


def copied(
    workflow_id: int,
    accepted_at: datetime,
    positions: Sequence[int],
    entry: archive.Entry,
    *,
    attempts: int,
) -> Outcome:
    """Return the outcome of an item that the archive answers after it was accepted."""
    return Outcome(
        workflow_id=workflow_id,
        positions=positions,
        state=RequestState.COMPLETED,
        source=Source.COALESCED if entry.produced_at > accepted_at else Source.ARCHIVE,
        score=entry.score,
        label=entry.label,
        output=entry.output,
        rating_id=entry.rating_id,
        rated_at=entry.produced_at,
        attempts=attempts,
    )


def run_once(now: datetime) -> int:
    """Do all that is due: fold, deadlines, max duration, early completion, sweeps, completion."""
    while fold() >= _FOLDED:
        pass
    for workflow_id in _ids("deadline_at <= %s AND state IN (1, 2, 3)", now):
        pass_deadline(workflow_id, now=now)
    for workflow_id in _ids("ends_at <= %s AND state IN (1, 2, 3)", now):
        _begin_ending(workflow_id, EndingReason.MAX_DURATION, now)
    for workflow_id in _ids(
        """
        complete_when < 1 AND closed_at IS NOT NULL AND state = 2 AND EXISTS (
            SELECT FROM fulfillment_workflowstats s
            WHERE s.workflow_id = w.id AND s.received > 0
              AND s.completed + s.failed + s.timed_out >= w.complete_when * s.received)
        """
    ):
        _begin_ending(workflow_id, EndingReason.COMPLETE_WHEN, now)
    for workflow_id in _ids("state = 4"):
        sweep(workflow_id, most_items=1_000_000)
    return sum(
        check(workflow_id)
        for workflow_id in _ids(
            """
            state IN (2, 4) AND closed_at IS NOT NULL AND NOT EXISTS (
                SELECT FROM fulfillment_batch b
                WHERE b.workflow_id = w.id AND b.state <> 4 AND b.open_mask <> 0)
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


def _begin_ending(workflow_id: int, reason: EndingReason, now: datetime) -> None:
    with transaction.atomic():
        workflow = _locked(workflow_id)
        if workflow.state in {WorkflowState.OPEN, WorkflowState.RUNNING, WorkflowState.PAUSED}:
            _end(workflow, reason, now)
