"""Intake: from a request body to request rows and batches.

1. The body goes to a spool file: checked row by row, hashed, fingerprinted (spool).
2. Only a good body makes a workflow, in state RECEIVING: nothing of it is dispatched.
3. Chunk by chunk, one transaction each: rows whose fingerprint the archive has are COMPLETED; equal
   rows become one item; items go into batches with their payload; the upload's record counts the
   chunk. Killed anywhere, the same Idempotency-Key goes on at the first missing chunk.
4. The last step opens the workflow (or closes it) and answers.

An append does the same to an OPEN workflow: its chunks count at once, and the same key resumes it.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any
from uuid import UUID

import orjson
from django.conf import settings
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.backends.utils import CursorWrapper
from django.utils.module_loading import import_string
from psycopg2.errors import DeadlockDetected, UniqueViolation

from fulfillment import archive, bell, completion, copying, documents
from fulfillment.clock import database_now
from fulfillment.errors import BacklogFull, Conflict, InvalidFields
from fulfillment.models import (
    Rater,
    RaterVersion,
    StatsDelta,
    Upload,
    Workflow,
    WorkflowStats,
    request_key,
)
from fulfillment.policy.batching import MAX_BATCH_SIZE, cut, merge_equal
from fulfillment.policy.fingerprint import Fingerprinter, request_digest
from fulfillment.policy.lifecycle import RequestState, Source, WorkflowState
from fulfillment.raters import current_version
from fulfillment.spool import MOST_LISTED, Record, Spool, take_in

CALL_LIMIT_MARGIN = timedelta(seconds=120)
"""What the default max duration adds to the deadline: a try started before it may end."""
_APPEND_TRIES = 3

_REQUEST_COLUMNS = (
    "id", "workflow_id", "request_id", "request_digest", "query_id", "result_id", "side",
    "result_weight", "query_weight", "fingerprint", "state", "source", "score", "label", "output",
    "rating_id", "rated_at", "attempts", "warnings", "extra",
)  # fmt: skip
_BATCH_COLUMNS = (
    "id", "workflow_id", "position", "round", "positions", "item_of", "fingerprints", "open_mask",
    "sent_mask", "state", "attempts", "lost", "fence", "replica",
)  # fmt: skip
_PENDING = b"".join(
    (
        copying.int2(RequestState.PENDING),
        copying.NULL * 6,  # source, score, label, output, rating, rated_at
        copying.int2(0),
    )
)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowForm:
    """What a client says of a workflow, as checked values; None means the rater's default."""

    rater: str
    name: str = ""
    priority: int = 50
    best_effort: bool = False
    trigger: str = "human"
    purpose: str = "tuning"
    batch_size: int | None = None
    deadline_s: int | None = None
    max_duration_s: int | None = None
    complete_when: float = 1.0
    max_age_s: int | None = None
    bypass: bool = False
    no_store: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A stream of NDJSON bytes; it is read once, in constant memory."""

    chunks: Iterable[bytes]


@dataclass(kw_only=True, slots=True)
class Submission:
    """The workflow and what became of the rows; `replayed` if the same key had done it before."""

    workflow: Workflow
    answer: dict[str, Any]
    replayed: bool = False


def submit(
    *, form: WorkflowForm, body: Body, owner: str, idempotency_key: str | None, close: bool
) -> Submission:
    """Make a workflow of a body, whole or not at all; closed afterwards unless `close` is false.

    Raises BadUpload, InvalidFields, BacklogFull, Conflict; then nothing was stored.
    """
    rater = _rater(form.rater)
    earlier = _earlier(owner, idempotency_key)
    version = earlier.workflow.rater_version if earlier else current_version(rater, database_now())
    with _spooled(body, version, seed=_seed(form, close), first_position=0) as spool:
        upload = _taken_over(earlier, spool) or _create(
            form=form, rater=rater, version=version, owner=owner, key=idempotency_key,
            digest=spool.digest, rows=spool.rows, close=close,
        )  # fmt: skip
        return _take(upload, spool)


def create_empty(*, form: WorkflowForm, owner: str, idempotency_key: str | None) -> Submission:
    """Make an OPEN workflow without rows, to be appended to."""
    rater = _rater(form.rater)
    digest = blake2b(_seed(form, False), digest_size=16).digest()
    upload = _earlier(owner, idempotency_key)
    if upload and upload.body_digest.bytes != digest:
        raise _other_body()
    resumed = upload is not None
    if upload is None:
        upload = _create(
            form=form, rater=rater, version=current_version(rater, database_now()), owner=owner,
            key=idempotency_key, digest=digest, rows=0, close=False,
        )  # fmt: skip
    if upload.finished_at is None:
        _finish(upload)
    return Submission(workflow=upload.workflow, answer=upload.answer, replayed=resumed)


def append(
    *, workflow: Workflow, body: Body, owner: str, idempotency_key: str | None
) -> Submission:
    """Add rows to an OPEN workflow. Committed chunks stay, whatever happens; the key resumes.

    A row whose request id an earlier upload had is refused alone.
    """
    earlier = _earlier(owner, idempotency_key)
    seed = orjson.dumps(["append", workflow.public_id])
    with _spooled(body, workflow.rater_version, seed=seed) as spool:
        upload = _taken_over(earlier, spool) or _reserve(workflow, owner, idempotency_key, spool)
        return _take(upload, spool)


def _take(upload: Upload, spool: Spool) -> Submission:
    if upload.finished_at is not None:
        return Submission(workflow=upload.workflow, answer=upload.answer, replayed=True)
    _ingest(upload, spool)
    _finish(upload)
    return Submission(workflow=upload.workflow, answer=upload.answer, replayed=False)


def _rater(rater_id: str) -> Rater:
    rater = Rater.objects.filter(pk=rater_id).first()
    if rater is None:
        raise InvalidFields(
            f"there is no rater {rater_id!r}; GET /api/v1/raters lists them",
            errors=[{"field": "rater", "code": "unknown_rater", "detail": "no such rater"}],
        )
    return rater


def _refuse_full_backlog() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sum(pg_total_relation_size(t)) FROM unnest(%s::regclass[]) t",
            [["fulfillment_batchpayload", "fulfillment_batch", "fulfillment_ratingrequest"]],
        )
        (size,) = cursor.fetchone()
    if size > settings.AIRS_MAX_BACKLOG_BYTES:
        raise BacklogFull(
            f"the backlog has {size} bytes, the limit (AIRS_MAX_BACKLOG_BYTES) is "
            f"{settings.AIRS_MAX_BACKLOG_BYTES}; send it again when some of it is done"
        )


def _earlier(owner: str, key: str | None) -> Upload | None:
    """Return the upload that this key began; new ones are refused when the backlog is full."""
    earlier = (
        Upload.objects.select_related("workflow__rater", "workflow__rater_version")
        .filter(owner=owner, key=key)
        .first()
        if key is not None
        else None
    )
    if earlier is None:
        _refuse_full_backlog()
    return earlier


def _seed(form: WorkflowForm, close: bool) -> bytes:
    return orjson.dumps([asdict(form), close])


def _spooled(
    body: Body, version: RaterVersion, *, seed: bytes, first_position: int | None = None
) -> Spool:
    describe = import_string(settings.AIRS_RATER_PLUGINS)
    key_fields = describe(version.spec["autorater"]).key_fields
    return take_in(
        body.chunks,
        directory=settings.AIRS_SPOOL,
        fingerprint=Fingerprinter(version_digest=version.digest.bytes, key_fields=key_fields),
        key_fields=key_fields,
        seed=seed,
        first_position=first_position,
    )


def _other_body() -> Conflict:
    return Conflict(
        "this Idempotency-Key was used with another body or other fields; use a new one",
        code="idempotency_conflict",
    )


def _taken_over(earlier: Upload | None, spool: Spool) -> Upload | None:
    """Return the upload of the same key and body, ours from now on; None if there is none.

    Whoever ingested it stops at its next chunk. The janitor may have removed it while the body
    came in again: then nothing of it is left, and it starts afresh.
    """
    if earlier is None:
        return None
    if earlier.body_digest.bytes != spool.digest:
        raise _other_body()
    earlier.holder = uuid.uuid4()
    Upload.objects.filter(pk=earlier.pk, finished_at=None).update(
        holder=earlier.holder, heartbeat_at=database_now()
    )
    try:
        earlier.refresh_from_db(fields=["chunks", "answer", "finished_at"])
    except Upload.DoesNotExist:
        return None
    return earlier


def _create(
    *,
    form: WorkflowForm,
    rater: Rater,
    version: RaterVersion,
    owner: str,
    key: str | None,
    digest: bytes,
    rows: int,
    close: bool,
) -> Upload:
    """Write the RECEIVING workflow and the record of its upload, in one transaction."""
    now = database_now()
    deadline_s = form.deadline_s or rater.deadline_s
    ends_after = (
        timedelta(seconds=form.max_duration_s)
        if form.max_duration_s
        else timedelta(seconds=deadline_s) + CALL_LIMIT_MARGIN
    )
    batch_size = form.batch_size or rater.batch_size
    if batch_size > MAX_BATCH_SIZE:
        raise InvalidFields(
            f"batch_size {batch_size} is over {MAX_BATCH_SIZE}",
            errors=[
                {
                    "field": "batch_size",
                    "code": "too_large",
                    "detail": f"at most {MAX_BATCH_SIZE}",
                }
            ],
        )
    try:
        with transaction.atomic():
            workflow = Workflow.objects.create(
                name=form.name,
                owner=owner,
                rater=rater,
                rater_version=version,
                priority=form.priority,
                best_effort=form.best_effort,
                trigger=form.trigger,
                purpose=form.purpose,
                batch_size=batch_size,
                deadline_at=now + timedelta(seconds=deadline_s),
                ends_at=now + ends_after,
                complete_when=form.complete_when,
                max_age_s=form.max_age_s,
                bypass=form.bypass,
                no_store=form.no_store,
                next_position=rows,
                created_at=now,
            )
            WorkflowStats.objects.create(workflow=workflow)
            return Upload.objects.create(
                owner=owner,
                key=key,
                body_digest=UUID(bytes=digest),
                workflow=workflow,
                creates=True,
                closes=close,
                first_position=0,
                rows=rows,
                holder=uuid.uuid4(),
                heartbeat_at=now,
                created_at=now,
            )
    except IntegrityError as error:
        raise _same_key_now() from error


def _reserve(workflow: Workflow, owner: str, key: str | None, spool: Spool) -> Upload:
    """Reserve the positions of an append; raise Conflict unless the workflow is OPEN."""
    now = database_now()
    try:
        with transaction.atomic():
            locked = (
                Workflow.objects.select_for_update(no_key=True)
                .select_related("rater_version")
                .get(pk=workflow.pk)
            )
            if not _is_open(locked):
                raise _not_open(locked)
            upload = Upload.objects.create(
                owner=owner,
                key=key,
                body_digest=UUID(bytes=spool.digest),
                workflow=locked,
                creates=False,
                closes=False,
                first_position=locked.next_position,
                rows=spool.rows,
                holder=uuid.uuid4(),
                heartbeat_at=now,
                created_at=now,
            )
            locked.next_position += spool.rows
            locked.save(update_fields=["next_position"])
            return upload
    except IntegrityError as error:
        raise _same_key_now() from error


def _same_key_now() -> Conflict:
    return Conflict(
        "another request with this Idempotency-Key is being taken in; send it again in a moment",
        code="upload_in_progress",
    )


def _superseded() -> Conflict:
    return Conflict(
        "another request took this upload over, or it stood still too long and was removed; send "
        "it again",
        code="upload_superseded",
    )


def _is_open(workflow: Workflow) -> bool:
    """Say whether a workflow takes more rows."""
    return workflow.closed_at is None and workflow.state in {
        WorkflowState.OPEN,
        WorkflowState.PAUSED,
    }


def _not_open(workflow: Workflow) -> Conflict:
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


def _ingest(upload: Upload, spool: Spool) -> None:
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
    position = upload.first_position
    for number, records in enumerate(spool.chunks()):
        if number >= upload.chunks:
            _ingest_chunk_surely(upload, records, position)
        position += len(records)


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
        hits = _hits(cursor, workflow, [record for _, record in numbered], now)
        open_rows = [(p, r) for p, r in numbered if r.fingerprint not in hits]
        items = [
            [open_rows[i] for i in group]
            for group in merge_equal([bytes.fromhex(r.fingerprint) for _, r in open_rows])
        ]
        workflow_id = workflow.pk
        copying.copy(
            cursor,
            "fulfillment_ratingrequest",
            _REQUEST_COLUMNS,
            (_request(workflow_id, p, r, hits.get(r.fingerprint)) for p, r in numbered),
        )
        _copy_batches(cursor, workflow, items)
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
        )
        answer = _added(upload.answer, chunk)
        Upload.objects.filter(pk=upload.pk).update(
            chunks=upload.chunks + 1, heartbeat_at=now, answer=answer
        )
    upload.chunks, upload.answer = upload.chunks + 1, answer


def _lock(cursor: CursorWrapper, upload: Upload) -> None:
    cursor.execute(
        "SELECT holder, chunks FROM fulfillment_upload WHERE id = %s FOR UPDATE", [upload.pk]
    )
    if cursor.fetchone() != (upload.holder, upload.chunks):
        raise _superseded()
    # Blocks close, cancel and completion (FOR NO KEY UPDATE) for this transaction, nobody else.
    cursor.execute(
        "SELECT state, closed_at FROM fulfillment_workflow WHERE id = %s FOR SHARE",
        [upload.workflow_id],
    )
    workflow = upload.workflow
    workflow.state, workflow.closed_at = cursor.fetchone()
    if not (workflow.state == WorkflowState.RECEIVING if upload.creates else _is_open(workflow)):
        raise _not_open(workflow)


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
    digests = [request_digest(record.name(position)).hex() for position, record in numbered]
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


def _hits(
    cursor: CursorWrapper, workflow: Workflow, records: Sequence[Record], now: datetime
) -> dict[str, archive.Entry]:
    if workflow.bypass:
        return {}
    return archive.look_up(
        cursor,
        list({record.fingerprint for record in records}),
        produced_after=archive.fresh_after(
            now=now,
            freshness_s=workflow.rater.freshness_s,
            max_age_s=workflow.max_age_s,
            accepted_at=workflow.created_at,
            bypass=False,
        ),
        now=now,
    )


def _request(workflow_id: int, position: int, record: Record, entry: archive.Entry | None) -> bytes:
    request_id = record.name(position)
    return b"".join(
        (
            copying.int8(request_key(workflow_id, position)),
            copying.int8(workflow_id),
            copying.text(request_id),
            copying.uuid(request_digest(request_id)),
            copying.text(record.query_id),
            copying.text(record.result_id),
            copying.int2(record.side),
            copying.float8(record.result_weight),
            copying.float8(record.query_weight),
            copying.uuid(bytes.fromhex(record.fingerprint)),
            _PENDING if entry is None else _completed(entry),
            copying.text_array(record.warnings or None),
            copying.jsonb(None if record.extra is None else documents.dump(record.extra)),
        )
    )


def _completed(entry: archive.Entry) -> bytes:
    return b"".join(
        (
            copying.int2(RequestState.COMPLETED),
            copying.int2(Source.ARCHIVE),
            copying.float8(entry.score),
            copying.text(entry.label),
            copying.jsonb(None if entry.output is None else entry.output.encode()),
            copying.int8(entry.rating_id),
            copying.timestamp(entry.produced_at),
            copying.int2(0),
        )
    )


def _copy_batches(
    cursor: CursorWrapper, workflow: Workflow, items: Sequence[list[tuple[int, Record]]]
) -> None:
    batches = cut(items, workflow.batch_size)
    if not batches:
        return
    cursor.execute(
        "SELECT nextval('fulfillment_batch_id_seq') FROM generate_series(1, %s)", [len(batches)]
    )
    ids = [row[0] for row in cursor.fetchall()]
    copying.copy(
        cursor,
        "fulfillment_batch",
        _BATCH_COLUMNS,
        (_batch(i, workflow, batch) for i, batch in zip(ids, batches, strict=True)),
    )
    copying.copy(
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
    return documents.pack([[rows[0][1].item, rows[0][1].url_digest] for rows in items])


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


def _finish(upload: Upload) -> None:
    """Open or close the workflow, record the answer, and wake who goes on from here."""
    with transaction.atomic():
        workflow = (
            Workflow.objects.select_for_update(no_key=True, of=("self",))
            .select_related("rater", "rater_version")
            .filter(pk=upload.workflow_id)
            .first()
        )
        now = database_now()
        done = Upload.objects.filter(pk=upload.pk).update(finished_at=now, answer=upload.answer)
        if workflow is None or not done:
            raise _superseded()
        if upload.creates and workflow.state == WorkflowState.RECEIVING:
            workflow.state = WorkflowState.RUNNING if upload.closes else WorkflowState.OPEN
            workflow.closed_at = now if upload.closes else None
            workflow.save(update_fields=["state", "closed_at"])
    upload.workflow = workflow
    bell.ring()
    if upload.closes:
        completion.check(workflow.pk)
        workflow.refresh_from_db()
