"""Retry rounds: what did not complete is opened again, chunk by chunk.

`begin` decides under the workflow's lock whether there can be a new round, and makes it: REOPENING.
From then on the call, and the checker where that died, open the batches that are still of an older
round, a few hundred a transaction; the last one sets RUNNING. Nothing is sent before, so that no
request of the new round can end while others still stand as the last one left them.

A batch that is still computed for nobody (its workflow ended meanwhile) keeps its lease and its
flights, but a copy takes its rows over: their items wait for these flights as those of any other
batch do, until the lease ends.
"""

from collections.abc import Sequence
from datetime import datetime

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import arrays, outcomes
from fulfillment.errors import Conflict
from fulfillment.models import Workflow, request_key
from fulfillment.policy.lifecycle import BatchState, WorkflowState

MOST_ROWS = 250_000
"""Rows of one workflow that a tick of the checker looks at: others must not wait for it."""
_BATCHES = 400
_LISTED = 50_000


def begin(workflow: Workflow, *, now: datetime, key: str) -> None:
    """Begin a new round of a finished workflow that the caller has locked.

    Raises Conflict `version_retired` or `payload_gone`; then nothing is changed.
    """
    if workflow.rater_version.retired_at is not None:
        raise Conflict(
            f"rater version {workflow.rater_version} is retired; submit the rows as a new workflow",
            code="version_retired",
        )
    gone = _without_payload(workflow)
    if gone:
        raise Conflict(
            f"the texts of {gone} requests were erased, so that they cannot be rated again; submit "
            "them as a new workflow",
            code="payload_gone",
        )
    may_wait = workflow.deadline_at - workflow.accepted_at
    may_last = workflow.ends_at - workflow.accepted_at
    workflow.state = WorkflowState.REOPENING
    workflow.round += 1
    workflow.round_at = now
    workflow.retry_key = key
    workflow.deadline_at = now + may_wait
    workflow.ends_at = now + may_last
    workflow.ending_reason = ""
    workflow.finished_at = None
    workflow.save(
        update_fields=[
            *("state", "round", "round_at", "retry_key", "deadline_at", "ends_at"),
            *("ending_reason", "finished_at"),
        ]
    )


def _without_payload(workflow: Workflow) -> int:
    """Count requests that did not complete and whose text is gone.

    Their batch was erased with its payload, or a purge by url blanked the item. Reads all requests
    of the workflow, a second or two for a million.
    """
    first, end = request_key(workflow.pk, 0), request_key(workflow.pk + 1, 0)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH kept AS MATERIALIZED (
                SELECT %s + unnest(b.positions) AS id
                FROM fulfillment_batchpayload p JOIN fulfillment_batch b ON b.id = p.batch_id
                WHERE p.workflow_id = %s
            ), purged AS MATERIALIZED (
                SELECT DISTINCT r.fingerprint
                FROM fulfillment_purge p JOIN fulfillment_ratingrequest r
                  ON r.url_digest = p.url_digest AND r.id <= p.last_request_id
                WHERE r.id >= %s AND r.id < %s AND NOT p.dry_run
                  AND (p.version_ids IS NULL OR %s = ANY(p.version_ids))
                  AND (p.before IS NULL OR p.before > %s)
            )
            -- Not as (NOT) EXISTS: below an OR it would run through them once for every row.
            SELECT count(*) FROM fulfillment_ratingrequest r
            LEFT JOIN kept ON kept.id = r.id
            LEFT JOIN purged ON purged.fingerprint = r.fingerprint
            WHERE r.id >= %s AND r.id < %s AND r.state <> 1
              AND (kept.id IS NULL OR purged.fingerprint IS NOT NULL)
            """,
            [
                *(first, workflow.pk),
                *(first, end, workflow.rater_version_id, workflow.created_at),
                *(first, end),
            ],
        )
        (count,) = cursor.fetchone()
    return int(count)


def reopen(workflow_id: int, *, most_rows: int = MOST_ROWS) -> int:
    """Open batches of a REOPENING workflow, and set it RUNNING when all are; return the rows seen.

    Two at once do the work once: each chunk holds the workflow's lock.
    """
    seen = 0
    while seen < most_rows:
        listed = _older_batches(workflow_id)
        if not listed:
            _run(workflow_id)
            break
        for start in range(0, len(listed), _BATCHES):
            seen += _reopen_chunk(workflow_id, listed[start : start + _BATCHES])
            if seen >= most_rows:
                break
    return seen


def _reopening(workflow_id: int) -> Workflow | None:
    found = Workflow.objects.select_for_update(no_key=True)
    return found.filter(pk=workflow_id, state=WorkflowState.REOPENING).first()


def _older_batches(workflow_id: int) -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT b.id
            FROM fulfillment_workflow w
            JOIN fulfillment_batchpayload p ON p.workflow_id = w.id
            JOIN fulfillment_batch b ON b.id = p.batch_id AND b.round < w.round
            WHERE w.id = %s AND w.state = %s
            ORDER BY b.id LIMIT %s
            """,
            [workflow_id, WorkflowState.REOPENING, _LISTED],
        )
        return [row[0] for row in cursor.fetchall()]


def _run(workflow_id: int) -> None:
    with transaction.atomic():
        workflow = _reopening(workflow_id)
        if workflow is not None:
            workflow.state = WorkflowState.RUNNING
            workflow.save(update_fields=["state"])


def _reopen_chunk(workflow_id: int, ids: Sequence[int]) -> int:
    """Open the batches among these that are still of an older round; return the rows seen."""
    with transaction.atomic(), connection.cursor() as cursor:
        workflow = _reopening(workflow_id)
        if workflow is None:
            return 0
        cursor.execute("SET LOCAL enable_seqscan = off")  # as in ending: all of it has an index
        cursor.execute(
            """
            SELECT id, state, cardinality(positions) FROM fulfillment_batch
            WHERE id = ANY(%s::bigint[]) AND round < %s ORDER BY id FOR UPDATE
            """,
            [arrays.integers(ids), workflow.round],
        )
        rows = cursor.fetchall()
        masks = _reopen_requests(cursor, workflow, [batch_id for batch_id, _, _ in rows])
        leased = [i for i, state, _ in rows if state == BatchState.LEASED and i in masks]
        for batch_id in leased:
            _copy(cursor, workflow, batch_id, masks.pop(batch_id))
        cursor.execute(
            """
            UPDATE fulfillment_batch b SET round = %s
            FROM unnest(%s::bigint[]) AS u(id) WHERE b.id = u.id
            """,
            [workflow.round, arrays.integers(i for i, _, _ in rows if i not in masks)],
        )
        cursor.execute(
            """
            UPDATE fulfillment_batch b
            SET round = %s, accepted_at = %s, state = 0, open_mask = u.mask, sent_mask = 0,
                fence = fence + 1, attempts = 0, tries = NULL, lost = 0
            FROM unnest(%s::bigint[], %s::bigint[]) AS u(id, mask) WHERE b.id = u.id
            """,
            [
                workflow.round,
                workflow.round_at,
                arrays.integers(masks),
                arrays.integers(masks.values()),
            ],
        )
    return sum(count for _, _, count in rows)


def _reopen_requests(
    cursor: CursorWrapper, workflow: Workflow, ids: Sequence[int]
) -> dict[int, int]:
    """Set PENDING what did not complete; return the items to open by batch, as masks.

    A purge by url that came after the round began may have blanked items that were not open yet:
    these stay as they are.
    """
    cursor.execute(
        """
        WITH old AS (
            SELECT b.id AS batch_id, u.item, r.id, r.state
            FROM fulfillment_batch b
            CROSS JOIN LATERAL unnest(b.positions, b.item_of) AS u(position, item)
            JOIN fulfillment_ratingrequest r ON r.id = %s + u.position
            WHERE b.id = ANY(%s::bigint[]) AND r.state > 1 AND NOT EXISTS (
                SELECT FROM fulfillment_purge p
                WHERE p.url_digest = r.url_digest AND NOT p.dry_run AND p.created_at >= %s)
        ), opened AS (
            UPDATE fulfillment_ratingrequest r
            SET state = 0, source = NULL, label = NULL, output = NULL, rated_at = NULL,
                error = NULL, attempts = 0
            FROM old WHERE r.id = old.id
        )
        SELECT batch_id, bit_or(1::bigint << item::int), count(*) FILTER (WHERE state = 2),
               count(*) FILTER (WHERE state = 3), count(*) FILTER (WHERE state = 4)
        FROM old GROUP BY batch_id
        """,
        [request_key(workflow.pk, 0), arrays.integers(ids), workflow.round_at],
    )
    rows = cursor.fetchall()
    if rows:
        failed, timed_out, cancelled = (-sum(row[n] for row in rows) for n in (2, 3, 4))
        taken_back = {"failed": failed, "timed_out": timed_out, "cancelled": cancelled}
        outcomes.add_progress(cursor, {workflow.pk: taken_back})
    return {row[0]: row[1] for row in rows}


def _copy(cursor: CursorWrapper, workflow: Workflow, batch_id: int, mask: int) -> None:
    """Move the rows of a batch whose lease goes on to a new one; the old one covers none."""
    cursor.execute(
        """
        INSERT INTO fulfillment_batch (workflow_id, position, round, accepted_at, positions,
                                       item_of, fingerprints, open_mask)
        SELECT workflow_id, position, %s, %s, positions, item_of, fingerprints, %s
        FROM fulfillment_batch WHERE id = %s RETURNING id
        """,
        [workflow.round, workflow.round_at, mask, batch_id],
    )
    (copy_id,) = cursor.fetchone()
    cursor.execute(
        """
        INSERT INTO fulfillment_batchpayload (batch_id, workflow_id, data)
        SELECT %s, workflow_id, data FROM fulfillment_batchpayload WHERE batch_id = %s
        """,
        [copy_id, batch_id],
    )
    cursor.execute(
        """
        UPDATE fulfillment_batch SET positions = '{}', item_of = '{}', fingerprints = '{}'
        WHERE id = %s
        """,
        [batch_id],
    )
