"""Intake: from a request body to request rows and batches.

1. The body goes to a spool file: checked row by row, hashed, fingerprinted (spool).
2. Only a good body makes a workflow, in state RECEIVING: nothing of it is dispatched.
3. Chunk by chunk, one transaction each: rows whose fingerprint the archive has are COMPLETED; equal
   rows become one item; items go into batches with their payload; the upload's record counts the
   chunk. Killed anywhere, the same Idempotency-Key goes on at the first missing chunk.
4. The last step opens the workflow (or closes it) and answers.

An append does the same to an OPEN workflow: its chunks count at once, and the same key resumes it.
"""

import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any
from uuid import UUID

import orjson
from django.conf import settings
from django.db import IntegrityError, transaction

from fulfillment import backlog, bell, completion, priority_rules, webhooks
from fulfillment.clock import database_now
from fulfillment.errors import Conflict, InvalidFields
from fulfillment.formats import Format
from fulfillment.ingest import ingest, is_open, not_open, superseded
from fulfillment.keys import keying
from fulfillment.models import (
    Rater,
    RaterVersion,
    Role,
    Upload,
    Workflow,
    WorkflowStats,
)
from fulfillment.policy.batching import MAX_BATCH_SIZE
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.policy.priority import DEFAULT_SCORE
from fulfillment.policy.priority_rules import Decision
from fulfillment.raters import coming_version, current_version
from fulfillment.spool import Record, Spool, take_in

CALL_LIMIT_MARGIN = timedelta(seconds=120)
"""What the default max duration adds to the deadline: a try started before it may end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowForm:
    """What a client says of a workflow, as checked values; None means the rater's default.

    A priority is a wish, and None no wish: the rules for priorities say what is given.
    """

    rater: str
    name: str = ""
    priority: int | None = None
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
    webhook: webhooks.WebhookForm | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A stream of rows in one of the formats; it is read once, in constant memory."""

    chunks: Iterable[bytes]
    format: Format = Format.NDJSON


@dataclass(kw_only=True, slots=True)
class Submission:
    """The workflow and what became of the rows; `replayed` if the same key had done it before."""

    workflow: Workflow
    answer: dict[str, Any]
    replayed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A submission that was checked and not made; without a spool if it brings no rows."""

    rater: Rater
    version: RaterVersion
    batch_size: int
    deadline_s: int
    priority: Decision
    spool: Spool | None


def submit(
    *,
    form: WorkflowForm,
    body: Body,
    owner: str,
    role: Role = Role.SUBMITTER,
    idempotency_key: str | None,
    close: bool,
) -> Submission:
    """Make a workflow of a body, whole or not at all; closed afterwards unless `close` is false.

    `role` is the owner's, which rules for priorities may ask for.
    Raises BadUpload, InvalidFields, BacklogFull, Conflict; then nothing was stored.
    """
    rater = _rater(form.rater)
    earlier = _earlier(owner, idempotency_key)
    version = earlier.workflow.rater_version if earlier else current_version(rater, database_now())
    with _spooled(body, version, seed=_seed(form, close), first_position=0) as spool:
        upload = _taken_over(earlier, spool) or _create(
            form=form, rater=rater, version=version, owner=owner, role=role,
            key=idempotency_key, digest=spool.digest, rows=spool.rows, close=close,
        )  # fmt: skip
        return _take(upload, spool)


def create_empty(
    *,
    form: WorkflowForm,
    owner: str,
    role: Role = Role.SUBMITTER,
    idempotency_key: str | None,
) -> Submission:
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
            role=role, key=idempotency_key, digest=digest, rows=0, close=False,
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


def submit_own(
    *, form: WorkflowForm, version: RaterVersion, records: Sequence[Record], owner: str
) -> Workflow | None:
    """Make a closed workflow of rows that an earlier one brought, checked and keyed then.

    None if the rater has another version by now: their fingerprints are not those of that one.
    """
    rater = _rater(form.rater)
    if current_version(rater, database_now()).pk != version.pk:
        return None
    backlog.refuse_if_full()
    with Spool(file=tempfile.TemporaryFile(dir=settings.AIRS_SPOOL), rows=len(records)) as spool:
        for record in records:
            spool.write(record)
        upload = _create(
            form=form, rater=rater, version=version, owner=owner, role=Role.SUBMITTER, key=None,
            digest=bytes(16), rows=spool.rows, close=True,
        )  # fmt: skip
        return _take(upload, spool).workflow


@contextmanager
def drafted(
    *, form: WorkflowForm, body: Body | None, owner: str, role: Role = Role.SUBMITTER
) -> Iterator[Draft]:
    """Check a submission as `submit` does, with the same refusals, and store nothing of it.

    Its rows, if any, are spooled for the length of the block.
    """
    rater = _rater(form.rater)
    backlog.refuse_if_full()
    now = database_now()
    version = coming_version(rater, now)
    batch_size = _batch_size(form, rater)
    priority = priority_rules.decide(
        asked=form.priority, trigger=form.trigger, purpose=form.purpose, role=role, owner=owner,
        version=version, now=now,
    )  # fmt: skip
    spool = None if body is None else _spooled(body, version, seed=b"", first_position=0)
    with spool or nullcontext():
        yield Draft(
            rater=rater,
            version=version,
            batch_size=batch_size,
            deadline_s=form.deadline_s or rater.deadline_s,
            priority=priority,
            spool=spool,
        )


def _take(upload: Upload, spool: Spool) -> Submission:
    if upload.finished_at is not None:
        return Submission(workflow=upload.workflow, answer=upload.answer, replayed=True)
    ingest(upload, spool)
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
        backlog.refuse_if_full()
    return earlier


def _seed(form: WorkflowForm, close: bool) -> bytes:
    """Return what a form adds to the digest of its upload.

    Fields at their default do not count, so that a release may add one between a kill and its
    resume. To ask for the default priority counts as asking for none, as it did before rules.
    """
    default = asdict(type(form)(rater=form.rater))
    said = {name: value for name, value in asdict(form).items() if value != default[name]}
    if form.priority == DEFAULT_SCORE:
        del said["priority"]
    return orjson.dumps([form.rater, said, close])


def _spooled(
    body: Body, version: RaterVersion, *, seed: bytes, first_position: int | None = None
) -> Spool:
    key = keying(version)
    return take_in(
        body.chunks,
        directory=settings.AIRS_SPOOL,
        fingerprint=key.fingerprint,
        key_fields=key.fields,
        format=body.format,
        limit=settings.AIRS_MAX_UPLOAD_BYTES,
        seed=seed + body.format.encode(),
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
        earlier.refresh_from_db(fields=["rows_done", "answer", "finished_at"])
    except Upload.DoesNotExist:
        return None
    return earlier


def _create(
    *,
    form: WorkflowForm,
    rater: Rater,
    version: RaterVersion,
    owner: str,
    role: Role,
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
    batch_size = _batch_size(form, rater)
    priority = priority_rules.decide(
        asked=form.priority, trigger=form.trigger, purpose=form.purpose, role=role, owner=owner,
        version=version, now=now,
    )  # fmt: skip
    try:
        with transaction.atomic():
            workflow = Workflow.objects.create(
                name=form.name,
                owner=owner,
                rater=rater,
                rater_version=version,
                priority=priority.score,
                priority_asked=priority.asked,
                priority_reason=priority.reason,
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
            if form.webhook is not None:
                webhooks.attach(workflow, form.webhook, now=now)
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


def _batch_size(form: WorkflowForm, rater: Rater) -> int:
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
    return batch_size


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
            if not is_open(locked):
                raise not_open(locked)
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


def _finish(upload: Upload) -> None:
    """Open or close the workflow, record the answer, and wake who goes on from here."""
    with transaction.atomic():
        workflow = _locked(upload)
        now = database_now()
        done = Upload.objects.filter(pk=upload.pk).update(finished_at=now, answer=upload.answer)
        if workflow is None or not done:
            raise superseded()
        if upload.creates and workflow.state == WorkflowState.RECEIVING:
            workflow.state = WorkflowState.RUNNING if upload.closes else WorkflowState.OPEN
            workflow.closed_at = now if upload.closes else None
            workflow.save(update_fields=["state", "closed_at"])
    upload.workflow = workflow
    bell.ring()
    # Until now nothing was dispatched: with an item pending it cannot be complete.
    if upload.closes and not upload.answer["pending"]:
        completion.check(workflow.pk)
        workflow.refresh_from_db()


def _locked(upload: Upload) -> Workflow | None:
    """Lock the workflow and return it as it is now, None if it is gone."""
    workflows = Workflow.objects.select_for_update(no_key=True, of=("self",))
    workflow = upload.workflow
    if upload.creates and workflow.state == WorkflowState.RECEIVING:
        # Nobody else knows it yet but the janitor: what we wrote is what is there.
        state = workflows.filter(pk=workflow.pk).values_list("state", flat=True).first()
        if state == WorkflowState.RECEIVING:
            return workflow
    return workflows.select_related("rater", "rater_version").filter(pk=workflow.pk).first()
