"""Taking a checked body into its workflow, chunk by chunk, one transaction each.

A chunk writes its requests (COMPLETED where the archive has the rating), batches, payloads and
progress, and counts itself in the upload's record: killed anywhere, whoever comes next goes on at
the first missing chunk. Which upload that is, and what is said of it, is decided in intake.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.backends.utils import CursorWrapper
from psycopg2.errors import DeadlockDetected, UniqueViolation

from fulfillment import archive, copying, documents, sampling
from fulfillment.errors import Conflict
from fulfillment.models import StatsDelta, Upload, Workflow, request_key
from fulfillment.policy.batching import cut, merge_equal
from fulfillment.policy.fingerprint import request_digest
from fulfillment.policy.freshness import Look, fresh_after
from fulfillment.policy.lifecycle import RequestState, Source, WorkflowState
from fulfillment.spool import MOST_LISTED, Record, Spool

_APPEND_TRIES = 50
"""A failure means that another append has committed rows: of eight at once, a chunk met four."""

_REQUEST_COLUMNS = (
    "id", "workflow_id", "request_digest", "fingerprint", "state", "source", "score", "label",
    "output", "rating_id", "rated_at", "attempts", "look", "rated_by_id", "request_id", "query_id",
    "result_id", "side", "result_weight", "query_weight", "url_digest", "warnings", "extra",
)  # fmt: skip
# One call packs several fields with their lengths: a row is made for every request.
_request_head = struct.Struct("!iqiqi16si16s").pack
_hit_tail = struct.Struct("!iqiqihihiq").pack
_BATCH_COLUMNS = (
    "id", "workflow_id", "position", "round", "positions", "item_of", "fingerprints", "open_mask",
    "sent_mask", "state", "attempts", "lost", "fence", "replica",
)  # fmt: skip
_PENDING = {
    look: b"".join(
        (
            copying.int2(RequestState.PENDING),
            copying.NULL * 6,  # source, score, label, output, rating, rated_at
            copying.int2(0),
            copying.int2(look),
            copying.NULL,  # rated_by
        )
    )
    for look in Look
}
_HIT_HEAD = copying.int2(RequestState.COMPLETED) + copying.int2(Source.ARCHIVE)
_NO_JUDGEMENT = copying.NULL * 3
_NO_REMARKS = copying.NULL * 2
_FRESH_BATCH = b"".join(
    (
        copying.int8(0),  # sent_mask
        copying.int2(0),  # READY
        copying.int2(0),
        copying.int2(0),
        copying.int8(0),
        copying.text(""),
    )
)


def ingest(upload: Upload, spool: Spool) -> None:
    """Write the chunks that the upload's record lacks; raise Conflict where it lost its right."""
    if not upload.answer:
        upload.answer = {
            "accepted": 0,
            "hits": 0,
            "coalesced": 0,
            "pending": 0,
            "rejected": [refused.as_json() for refused in spool.refused],
            "rejected_count": spool.refused_count,
            "warnings": [],
        }
    position = upload.first_position + upload.rows_done
    for records in spool.chunks(skip=upload.rows_done):
        _ingest_chunk_surely(upload, records, position)
        position += len(records)


def superseded() -> Conflict:
    """Return the refusal of a request that no longer holds its upload."""
    return Conflict(
        "another request took this upload over, or it stood still too long and was removed; send "
        "it again",
        code="upload_superseded",
    )


def is_open(workflow: Workflow) -> bool:
    """Say whether a workflow takes more rows."""
    return workflow.closed_at is None and workflow.state in {
        WorkflowState.OPEN,
        WorkflowState.PAUSED,
    }


def not_open(workflow: Workflow) -> Conflict:
    """Return the refusal of rows for a workflow that takes none."""
    return Conflict(
        f"workflow {workflow.public_id} takes no more rows: it is "
        f"{WorkflowState(workflow.state).name}" + (" and closed" if workflow.closed_at else ""),
        code="workflow_not_open",
    )


@dataclass(slots=True)
class _Chunk:
    """What one chunk adds to the answer."""

    hits: int = 0
    coalesced: int = 0
    pending: int = 0
    score_sum: float = 0.0
    rejected: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)


def _ingest_chunk_surely(upload: Upload, records: Sequence[Record], position: int) -> None:
    for attempt in range(_APPEND_TRIES):
        try:
            return _ingest_chunk(upload, records, position)
        except (IntegrityError, OperationalError) as error:
            # Another append committed one of our ids between our look and our COPY, or has two of
            # ours in another order: look again.
            met = isinstance(error.__cause__, UniqueViolation | DeadlockDetected)
            if upload.creates or not met or attempt == _APPEND_TRIES - 1:
                raise
    return None


def _ingest_chunk(upload: Upload, records: Sequence[Record], position: int) -> None:
    """Write one chunk: requests, batches, payloads, progress and the upload's record."""
    workflow = upload.workflow
    with transaction.atomic(), connection.cursor() as cursor:
        _lock(cursor, upload)
        chunk = _Chunk()
        numbered = _without_known_ids(cursor, upload, list(enumerate(records, position)), chunk)
        now = _now(cursor)
        hits, looks = _look_up(cursor, workflow, [record for _, record in numbered], now)
        looked = Look.BYPASSED if workflow.bypass else Look.MISS
        open_rows = [(p, r) for p, r in numbered if r.fingerprint not in hits]
        items = [
            [open_rows[i] for i in group]
            for group in merge_equal([r.fingerprint for _, r in open_rows])
        ]
        workflow_id = workflow.pk
        stored = copying.copy(
            cursor,
            "fulfillment_ratingrequest",
            _REQUEST_COLUMNS,
            (
                _request(
                    workflow_id,
                    p,
                    r,
                    bytes.fromhex(r.fingerprint),
                    hits.get(r.fingerprint),
                    looks.get(r.fingerprint, looked),
                )
                for p, r in numbered
            ),
        )
        stored += _copy_batches(cursor, workflow, items)
        sampling.draw(cursor, workflow, [record for _, record in numbered], hits, now)
        chunk.hits = len(numbered) - len(open_rows)
        chunk.pending = len(items)
        chunk.coalesced = len(open_rows) - len(items)
        chunk.score_sum = sum(
            entry.score for _, r in numbered if (entry := hits.get(r.fingerprint))
        )
        chunk.warnings += (
            {"line": record.line, "request_id": record.name(p), "code": code}
            for p, record in numbered
            for code in record.warnings
        )
        StatsDelta.objects.create(
            workflow=workflow,
            received=len(numbered),
            completed=chunk.hits,
            from_archive=chunk.hits,
            score_sum=chunk.score_sum,
            stored_bytes=stored if open_rows else 0,
        )
        answer = _added(upload.answer, chunk)
        rows_done = upload.rows_done + len(records)
        Upload.objects.filter(pk=upload.pk).update(
            rows_done=rows_done, heartbeat_at=now, answer=answer
        )
    upload.rows_done, upload.answer = rows_done, answer


def _lock(cursor: CursorWrapper, upload: Upload) -> None:
    # All that a chunk reads has an index; the statistics of an archive that grows by thousands a
    # second are always old, and a scan of it costs fifty times the chunk.
    # Nobody is told of a chunk before the upload's last step, whose COMMIT waits for the disk.
    cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL synchronous_commit = off")
    cursor.execute(
        "SELECT holder, rows_done FROM fulfillment_upload WHERE id = %s FOR UPDATE", [upload.pk]
    )
    if cursor.fetchone() != (upload.holder, upload.rows_done):
        raise superseded()
    # Blocks close, cancel and completion (FOR NO KEY UPDATE) for this transaction, nobody else.
    cursor.execute(
        "SELECT state, closed_at FROM fulfillment_workflow WHERE id = %s FOR SHARE",
        [upload.workflow_id],
    )
    workflow = upload.workflow
    workflow.state, workflow.closed_at = cursor.fetchone()
    if not (workflow.state == WorkflowState.RECEIVING if upload.creates else is_open(workflow)):
        raise not_open(workflow)


def _now(cursor: CursorWrapper) -> datetime:
    cursor.execute("SELECT clock_timestamp()")
    (now,) = cursor.fetchone()
    assert isinstance(now, datetime)
    return now


def _without_known_ids(
    cursor: CursorWrapper, upload: Upload, numbered: list[tuple[int, Record]], chunk: _Chunk
) -> list[tuple[int, Record]]:
    """Leave out, and refuse alone, rows whose request id the workflow has already.

    An earlier upload had it; or one row's id is the one that another gets by its position, which
    only an upload that makes its workflow knows before it begins.
    """
    if upload.creates:
        return numbered
    digests = [
        record.request_digest or request_digest(record.name(position)).hex()
        for position, record in numbered
    ]
    cursor.execute(
        """
        SELECT replace(request_digest::text, '-', '') FROM fulfillment_ratingrequest
        WHERE workflow_id = %s AND request_digest = ANY(%s::uuid[])
        """,
        [upload.workflow_id, digests],
    )
    known = {digest for (digest,) in cursor.fetchall()}
    fresh = []
    for (position, record), digest in zip(numbered, digests, strict=True):
        if digest in known:
            chunk.rejected.append(
                {
                    "line": record.line,
                    "code": "duplicate_request_id",
                    "detail": f"the workflow has a row {record.name(position)!r} already",
                }
            )
        else:
            known.add(digest)
            fresh.append((position, record))
    return fresh


def _look_up(
    cursor: CursorWrapper, workflow: Workflow, records: Sequence[Record], now: datetime
) -> tuple[dict[str, archive.Entry], Mapping[str, Look]]:
    """Return the entries that are taken, and what the archive said of those it has."""
    if workflow.bypass:
        return {}, {}
    entries = archive.look_up(
        cursor, list({record.fingerprint for record in records}), produced_after=None, now=now
    )
    oldest = fresh_after(
        now=now,
        freshness_s=workflow.rater.freshness_s,
        max_age_s=workflow.max_age_s,
        accepted_at=workflow.created_at,
        bypass=False,
    )
    looks: dict[str, Look] = {}
    hits = {}
    for fingerprint, entry in entries.items():
        fresh = entry.produced_at > oldest
        looks[fingerprint] = Look.HIT if fresh else Look.STALE
        if fresh:
            hits[fingerprint] = entry
    return hits, looks


def _request(
    workflow_id: int,
    position: int,
    record: Record,
    fingerprint: bytes,
    entry: archive.Entry | None,
    look: Look,
) -> bytes:
    request_id = record.name(position)
    digest = record.request_digest
    url_digest = record.url_digest
    return b"".join(
        (
            _request_head(
                8, request_key(workflow_id, position), 8, workflow_id,
                16, request_digest(request_id) if digest is None else bytes.fromhex(digest),
                16, fingerprint,
            ),
            _PENDING[look] if entry is None else _completed(entry),
            copying.text(request_id),
            copying.text(record.query_id),
            copying.text(record.result_id),
            _judgement(record),
            copying.NULL if url_digest is None else copying.uuid(bytes.fromhex(url_digest)),
            _remarks(record),
        )
    )  # fmt: skip


def _judgement(record: Record) -> bytes:
    side, result_weight, query_weight = record.side, record.result_weight, record.query_weight
    if side is None and result_weight is None and query_weight is None:
        return _NO_JUDGEMENT
    return copying.int2(side) + copying.float8(result_weight) + copying.float8(query_weight)


def _remarks(record: Record) -> bytes:
    if not record.warnings and record.extra is None:
        return _NO_REMARKS
    extra = None if record.extra is None else documents.dump(record.extra)
    return copying.text_array(record.warnings or None) + copying.jsonb(extra)


def _completed(entry: archive.Entry) -> bytes:
    return b"".join(
        (
            _HIT_HEAD,
            copying.float8(entry.score),
            copying.text(entry.label),
            copying.jsonb(None if entry.output is None else entry.output.encode()),
            _hit_tail(
                8, entry.rating_id, 8, copying.microseconds(entry.produced_at), 2, 0, 2, Look.HIT,
                8, entry.workflow_id,
            ),
        )
    )  # fmt: skip


def _copy_batches(
    cursor: CursorWrapper, workflow: Workflow, items: Sequence[list[tuple[int, Record]]]
) -> int:
    """Write the batches of items that are to be rated, and return their bytes."""
    batches = cut(items, workflow.batch_size)
    if not batches:
        return 0
    cursor.execute(
        "SELECT nextval('fulfillment_batch_id_seq') FROM generate_series(1, %s)", [len(batches)]
    )
    ids = [row[0] for row in cursor.fetchall()]
    stored = copying.copy(
        cursor,
        "fulfillment_batch",
        _BATCH_COLUMNS,
        (_batch(i, workflow, batch) for i, batch in zip(ids, batches, strict=True)),
    )
    return stored + copying.copy(
        cursor,
        "fulfillment_batchpayload",
        ("batch_id", "workflow_id", "data"),
        (
            copying.int8(i) + copying.int8(workflow.pk) + copying.binary(_payload(batch))
            for i, batch in zip(ids, batches, strict=True)
        ),
    )


def _batch(batch_id: int, workflow: Workflow, items: Sequence[list[tuple[int, Record]]]) -> bytes:
    return b"".join(
        (
            copying.int8(batch_id),
            copying.int8(workflow.pk),
            copying.int8(items[0][0][0]),
            copying.int2(workflow.round),
            copying.int4_array([position for rows in items for position, _ in rows]),
            copying.int2_array([number for number, rows in enumerate(items) for _ in rows]),
            copying.uuid_array([bytes.fromhex(rows[0][1].fingerprint) for rows in items]),
            copying.int8((1 << len(items)) - 1),
            _FRESH_BATCH,
        )
    )


def _payload(items: Sequence[list[tuple[int, Record]]]) -> bytes:
    """Pack [key fields, url digest] of each item."""
    firsts = [rows[0][1] for rows in items]
    return documents.compressed(documents.pairs([(r.item, r.url_digest) for r in firsts]))


def _added(answer: dict[str, Any], chunk: _Chunk) -> dict[str, Any]:
    room = MOST_LISTED - len(answer["rejected"])
    return {
        "accepted": answer["accepted"] + chunk.hits + chunk.coalesced + chunk.pending,
        "hits": answer["hits"] + chunk.hits,
        "coalesced": answer["coalesced"] + chunk.coalesced,
        "pending": answer["pending"] + chunk.pending,
        "rejected": answer["rejected"] + chunk.rejected[:room],
        "rejected_count": answer["rejected_count"] + len(chunk.rejected),
        "warnings": (answer["warnings"] + chunk.warnings)[:MOST_LISTED],
    }
