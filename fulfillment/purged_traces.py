"""What a url has left outside the archive: blanked in requests and payloads, open items ended.

Requests have no index of the digest of their url (it would cost every ingest; a privacy purge is
rare), so they are walked by key, a chunk a step. States, scores and labels stay (I13); output,
extra fields and the page text in payloads go. An item has the text of all its rows: it goes if one
of them has the url. An open one becomes FAILED `purged`; an executor that holds it loses its lease,
so that nothing of it comes back.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from django.db.backends.utils import CursorWrapper

from fulfillment import arrays, documents, outcomes
from fulfillment.models import POSITION_BITS, BatchPayload, Purge, RatingRequest, request_key
from fulfillment.outcomes import Outcome
from fulfillment.policy.batching import indices_of, mask_of
from fulfillment.policy.lifecycle import RequestState

PURGED = "purged"


class _Trace(NamedTuple):
    """A locked batch with items of the url."""

    batch_id: int
    workflow_id: int
    positions: Sequence[int]
    item_of: Sequence[int]
    open_mask: int
    sent_mask: int
    attempts: int
    meant: int
    """Mask of the items that have the url."""

    def rows(self, mask: int) -> dict[int, list[int]]:
        """Return the positions of each item in a mask."""
        items = outcomes.positions_by_item(self.positions, self.item_of)
        return {item: items[item] for item in indices_of(mask)}


def newest_request_id() -> int:
    """Return the largest key there is now."""
    newest = RatingRequest.objects.order_by("-pk").values_list("pk", flat=True).first()
    return 0 if newest is None else newest


def step(cursor: CursorWrapper, purge: Purge, *, chunk: int) -> tuple[Iterable[int], bool]:
    """Look at the next requests; return workflows left with nothing open, and if there are more.

    Moves the purge's position and counts; the caller holds its lock and saves it.
    """
    cursor.execute(
        f"""
        WITH looked AS MATERIALIZED (
            SELECT id, url_digest FROM fulfillment_ratingrequest
            WHERE id > %s AND id <= %s ORDER BY id LIMIT {chunk}
        )
        SELECT max(id), array_agg(id ORDER BY id) FILTER (WHERE url_digest = %s) FROM looked
        """,
        [purge.position, purge.last_request_id, purge.url_digest],
    )
    last, found = cursor.fetchone()
    if last is None:
        return (), False
    purge.position = last
    requests = _meant(cursor, purge, found or [])
    if not requests:
        return (), True
    purge.requests += len(requests)
    batches = _batches(cursor, requests)
    if purge.dry_run:
        purge.payloads += len(batches)
        _count(cursor, purge, requests)
        return (), True
    return _blank(cursor, purge, requests, batches), True


def _meant(cursor: CursorWrapper, purge: Purge, requests: Sequence[int]) -> list[int]:
    """Leave out requests of workflows that other criteria of the purge exclude."""
    if not requests or (purge.version_ids is None and purge.before is None):
        return list(requests)
    cursor.execute(
        """
        SELECT id FROM fulfillment_workflow
        WHERE id = ANY(%s) AND (%s::bigint[] IS NULL OR rater_version_id = ANY(%s::bigint[]))
          AND (%s::timestamptz IS NULL OR created_at < %s)
        """,
        [
            list({key >> POSITION_BITS for key in requests}),
            purge.version_ids, purge.version_ids, purge.before, purge.before,
        ],
    )  # fmt: skip
    meant = {row[0] for row in cursor.fetchall()}
    return [key for key in requests if key >> POSITION_BITS in meant]


def _by_workflow(requests: Iterable[int]) -> Mapping[int, list[int]]:
    """Return the positions of requests by their workflow."""
    positions: dict[int, list[int]] = defaultdict(list)
    for key in requests:
        positions[key >> POSITION_BITS].append(key & (1 << POSITION_BITS) - 1)
    return positions


def _batches(cursor: CursorWrapper, requests: Sequence[int]) -> dict[int, set[int]]:
    """Return the batches that still have a payload, each with the positions that are meant.

    By way of the payloads of their workflow: batches that are done have no index of it.
    """
    batches: dict[int, set[int]] = {}
    for workflow_id, positions in _by_workflow(requests).items():
        cursor.execute(
            """
            SELECT b.id, b.positions FROM fulfillment_batchpayload p
            JOIN fulfillment_batch b ON b.id = p.batch_id
            WHERE p.workflow_id = %s AND b.position <= %s AND b.positions && %s::int[]
            """,
            [workflow_id, max(positions), positions],
        )
        wanted = set(positions)
        for batch_id, held in cursor.fetchall():
            batches[batch_id] = wanted.intersection(held)
    return batches


def _count(cursor: CursorWrapper, purge: Purge, requests: Sequence[int]) -> None:
    cursor.execute(
        """
        SELECT count(*) FILTER (WHERE r.state = %s),
               count(DISTINCT a.id) FILTER (WHERE a.url_digest IS DISTINCT FROM %s::uuid)
        FROM fulfillment_ratingrequest r LEFT JOIN fulfillment_rating a ON a.id = r.rating_id
        WHERE r.id = ANY(%s)
        """,
        [RequestState.PENDING, purge.url_digest, list(requests)],
    )
    failed, ratings = cursor.fetchone()
    purge.failed += failed
    purge.ratings += ratings


def _blank(
    cursor: CursorWrapper, purge: Purge, requests: Sequence[int], batches: Mapping[int, set[int]]
) -> list[int]:
    # Batches first and by id, as everybody locks them who then writes their requests.
    traces = _locked(cursor, batches)
    ended = [
        Outcome(
            workflow_id=trace.workflow_id,
            positions=positions,
            state=RequestState.FAILED,
            error=PURGED,
            attempts=trace.attempts,
        )
        for trace in traces
        for positions in trace.rows(trace.open_mask & trace.meant).values()
    ]
    progress = outcomes.end_requests(cursor, ended)
    outcomes.add_progress(cursor, progress)
    purge.failed += sum(len(outcome.positions) for outcome in ended)
    _release(cursor, [t for t in traces if (t.open_mask | t.sent_mask) & t.meant])
    purge.payloads += sum(map(_blank_payload, traces))
    shared = {
        request_key(trace.workflow_id, position)
        for trace in traces
        for positions in trace.rows(trace.meant).values()
        for position in positions
    }
    cursor.execute(
        """
        UPDATE fulfillment_ratingrequest SET output = NULL, extra = NULL
        WHERE id = ANY(%s) AND (output IS NOT NULL OR extra IS NOT NULL)
        """,
        [sorted(shared.union(requests))],
    )
    cursor.execute(
        """
        DELETE FROM fulfillment_rating WHERE id IN (
            SELECT rating_id FROM fulfillment_ratingrequest
            WHERE id = ANY(%s) AND rating_id IS NOT NULL)
        """,
        [list(requests)],
    )
    purge.ratings += cursor.rowcount
    return outcomes.without_open_items(cursor, progress) if progress else []


def _locked(cursor: CursorWrapper, batches: Mapping[int, set[int]]) -> list[_Trace]:
    if not batches:
        return []
    cursor.execute(
        """
        SELECT id, workflow_id, positions, item_of, open_mask, sent_mask, attempts
        FROM fulfillment_batch WHERE id = ANY(%s) ORDER BY id FOR UPDATE
        """,
        [list(batches)],
    )
    traces = []
    for batch_id, workflow_id, positions, item_of, open_mask, sent, attempts in cursor.fetchall():
        wanted = batches[batch_id]
        items = {i for p, i in zip(positions, item_of, strict=True) if p in wanted}
        traces.append(
            _Trace(
                batch_id, workflow_id, positions, item_of, open_mask, sent, attempts, mask_of(items)
            )
        )
    return traces


def _release(cursor: CursorWrapper, traces: Sequence[_Trace]) -> None:
    """Clear the open bits of what is meant; take back batches that somebody computes it for."""
    if not traces:
        return
    ids = [trace.batch_id for trace in traces]
    cursor.execute(
        """
        UPDATE fulfillment_batch b
        SET open_mask = u.open_mask, sent_mask = 0, fence = fence + 1, probing = NULL,
            boot_id = NULL, task_id = NULL, started_at = NULL, lease_until = NULL,
            not_before = CASE WHEN u.open_mask <> 0 THEN not_before END,
            state = CASE WHEN u.open_mask = 0 THEN 4 WHEN state = 1 THEN 0 ELSE state END
        FROM unnest(%s::bigint[], %s::bigint[]) AS u(id, open_mask) WHERE b.id = u.id
        """,
        [ids, arrays.integers(t.open_mask & ~t.meant for t in traces)],
    )
    cursor.execute("DELETE FROM fulfillment_flight WHERE batch_id = ANY(%s)", [ids])
    cursor.execute(
        "DELETE FROM fulfillment_batchwait WHERE batch_id = ANY(%s)",
        [[t.batch_id for t in traces if not t.open_mask & ~t.meant]],
    )


def _blank_payload(trace: _Trace) -> bool:
    """Take the text of what is meant out of a payload; say whether there was any."""
    payload = BatchPayload.objects.filter(pk=trace.batch_id).first()
    if payload is None:
        return False
    rows = documents.unpack(bytes(payload.data))
    left = [item for item in indices_of(trace.meant) if rows[item][0] is not None]
    for item in left:
        rows[item] = [None, None]
    BatchPayload.objects.filter(pk=trace.batch_id).update(data=documents.pack(rows))
    return bool(left)
