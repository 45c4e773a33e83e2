"""Tables of Rating Fulfillment: the state of every workflow, request and batch, and the archive.

PostgreSQL is the truth. Hot tables carry no database foreign key (a key check would lock the
workflow row, and no lock may stop the dispatcher); bulk paths write them by COPY and set-based
SQL in intake, dispatch, finish and completion. The invariants I1-I13 are those of
docs/architecture.md.
"""

import uuid
from typing import Any

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from fulfillment.policy.lifecycle import (
    BatchState,
    EndingReason,
    RequestState,
    Source,
    WorkflowState,
)

POSITION_BITS = 31
"""A request's id is `workflow_id << POSITION_BITS | position`: one narrow key, in input order."""


def request_key(workflow_id: int, position: int) -> int:
    """Return the primary key of the request at `position` of a workflow."""
    return workflow_id << POSITION_BITS | position


def new_workflow_id() -> str:
    """Return a fresh public id of a workflow."""
    return f"wf_{uuid.uuid4().hex}"


def new_event_id() -> str:
    """Return a fresh public id of an event."""
    return f"evt_{uuid.uuid4().hex}"


def _choices(enum: type[Any]) -> list[tuple[Any, str]]:
    return [(member.value, member.name) for member in enum]


class Role(models.TextChoices):
    """What a token may do; each role includes those before it."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"


class ApiToken(models.Model):
    """A bearer token; only its SHA-256 is kept."""

    user = models.CharField(max_length=150)
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.SUBMITTER)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    hint = models.CharField(
        max_length=8, editable=False, help_text="Last characters, to tell apart"
    )
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.user} ({self.role}) …{self.hint}"


class Mode(models.TextChoices):
    """Whether model management tells a rater's window, or the rater finds it by itself."""

    INTEGRATED = "integrated"
    ISOLATED = "isolated"


class KeyLevel(models.TextChoices):
    """How much of a request decides its score."""

    RESULT = "result"
    QUERY = "query"
    PROMPT = "prompt"


class Rater(models.Model):
    """An autorater bound to a model: what workflows name as `rater`."""

    id = models.SlugField(primary_key=True, max_length=64)
    autorater = models.CharField(max_length=64, help_text="Name of the installed plug-in")
    model_id = models.CharField(max_length=64)
    mode = models.CharField(max_length=16, choices=Mode.choices, default=Mode.INTEGRATED)
    key_level = models.CharField(max_length=8, choices=KeyLevel.choices, default=KeyLevel.RESULT)
    freshness_s = models.PositiveIntegerField(default=90 * 86_400)
    deadline_s = models.PositiveIntegerField(default=7_200)
    max_qps = models.FloatField(null=True, blank=True)
    batch_size = models.PositiveSmallIntegerField(default=12)
    max_attempts = models.PositiveSmallIntegerField(default=8)
    score_min = models.FloatField(default=0.0)
    score_max = models.FloatField(default=4.0)
    integer_scores = models.BooleanField(default=False)
    prompt_template = models.TextField(blank=True, default="")
    config = models.JSONField(default=dict, blank=True)
    current_version = models.ForeignKey(
        "RaterVersion", null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    paused_code = models.CharField(max_length=64, blank=True, default="")
    paused_detail = models.TextField(blank=True, default="")
    paused_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(score_min__lt=models.F("score_max")), name="rater_score_range"
            ),
            models.CheckConstraint(
                condition=Q(batch_size__gte=1, batch_size__lte=60), name="rater_batch_size"
            ),
            models.CheckConstraint(condition=Q(max_attempts__gte=1), name="rater_max_attempts"),
        ]

    def __str__(self) -> str:
        return self.id


class RaterVersion(models.Model):
    """Everything that decides a score, frozen; a workflow keeps the version it was made with."""

    rater = models.ForeignKey(Rater, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField()
    digest = models.UUIDField()
    spec = models.JSONField(help_text="The fields of workers.autoraters.RaterSpec")
    created_at = models.DateTimeField()
    retired_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rater", "digest"], name="rater_version_digest"),
            models.UniqueConstraint(fields=["rater", "number"], name="rater_version_number"),
        ]

    def __str__(self) -> str:
        return f"{self.rater_id}@{self.number}"


class Trigger(models.TextChoices):
    """Who started a workflow."""

    HUMAN = "human"
    AUTOMATIC = "automatic"


class Purpose(models.TextChoices):
    """What a workflow's numbers are for."""

    TUNING = "tuning"
    LAUNCH = "launch"
    GUARDRAIL = "guardrail"


class Workflow(models.Model):
    """One evaluation: a set of rating requests for one rater version.

    Priority and deadline live here only, so that changing them is one row. No counter: progress
    is WorkflowStats plus the deltas not yet folded into it.
    """

    public_id = models.CharField(max_length=40, unique=True, default=new_workflow_id)
    name = models.CharField(max_length=256, blank=True, default="")
    owner = models.CharField(max_length=150)
    rater = models.ForeignKey(Rater, on_delete=models.PROTECT)
    rater_version = models.ForeignKey(RaterVersion, on_delete=models.PROTECT)
    priority = models.PositiveSmallIntegerField(default=50)
    best_effort = models.BooleanField(default=False)
    trigger = models.CharField(max_length=16, choices=Trigger.choices, default=Trigger.HUMAN)
    purpose = models.CharField(max_length=16, choices=Purpose.choices, default=Purpose.TUNING)
    batch_size = models.PositiveSmallIntegerField(default=12)
    deadline_at = models.DateTimeField()
    ends_at = models.DateTimeField(help_text="Max duration: the workflow ends at the latest then")
    complete_when = models.FloatField(default=1.0)
    max_age_s = models.PositiveIntegerField(null=True, blank=True)
    bypass = models.BooleanField(default=False)
    no_store = models.BooleanField(default=False)
    state = models.PositiveSmallIntegerField(
        choices=_choices(WorkflowState), default=WorkflowState.RECEIVING
    )
    ending_reason = models.CharField(
        max_length=16, choices=_choices(EndingReason), blank=True, default=""
    )
    round = models.PositiveSmallIntegerField(default=1)
    next_position = models.BigIntegerField(default=0)
    created_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=[s.value for s in WorkflowState]), name="workflow_state"
            ),
            models.CheckConstraint(condition=Q(priority__lte=100), name="workflow_priority"),
            models.CheckConstraint(
                condition=Q(batch_size__gte=1, batch_size__lte=60), name="workflow_batch_size"
            ),
            models.CheckConstraint(
                condition=~Q(state=WorkflowState.ENDING) | ~Q(ending_reason=""),
                name="workflow_ending_has_reason",
            ),
            models.CheckConstraint(
                condition=Q(
                    state__in=[
                        WorkflowState.RECEIVING,
                        WorkflowState.OPEN,
                        WorkflowState.RUNNING,
                        WorkflowState.PAUSED,
                        WorkflowState.ENDING,
                    ],
                    finished_at__isnull=True,
                )
                | Q(
                    state__in=[
                        WorkflowState.COMPLETED,
                        WorkflowState.PARTIAL,
                        WorkflowState.FAILED,
                        WorkflowState.CANCELLED,
                    ],
                    finished_at__isnull=False,
                ),
                name="workflow_finished_has_time",
            ),
        ]
        indexes = [
            models.Index(
                fields=["state"],
                condition=Q(finished_at__isnull=True),
                name="workflow_unfinished",
            ),
            models.Index(fields=["owner", "-id"], name="workflow_owner"),
            models.Index(fields=["rater", "-id"], name="workflow_rater"),
        ]

    def __str__(self) -> str:
        return self.public_id


class Progress(models.Model):
    """Counts of one workflow, as totals (WorkflowStats) or as additions (StatsDelta)."""

    received = models.BigIntegerField(default=0, db_default=0)
    completed = models.BigIntegerField(default=0, db_default=0)
    failed = models.BigIntegerField(default=0, db_default=0)
    timed_out = models.BigIntegerField(default=0, db_default=0)
    cancelled = models.BigIntegerField(default=0, db_default=0)
    from_archive = models.BigIntegerField(default=0, db_default=0)
    coalesced = models.BigIntegerField(default=0, db_default=0)
    from_model = models.BigIntegerField(default=0, db_default=0)
    score_sum = models.FloatField(default=0.0, db_default=0.0)
    model_calls = models.BigIntegerField(default=0, db_default=0)
    attempts = models.BigIntegerField(
        default=0, db_default=0, help_text="Tries of batches, started ones only"
    )
    accelerator_seconds = models.FloatField(default=0.0, db_default=0.0)

    class Meta:
        abstract = True


PROGRESS_FIELDS = tuple(field.name for field in Progress._meta.local_fields)


class WorkflowStats(Progress):
    """Folded progress of a workflow."""

    workflow = models.OneToOneField(
        Workflow, primary_key=True, on_delete=models.DO_NOTHING, db_constraint=False
    )

    def __str__(self) -> str:
        return f"stats of {self.workflow_id}"


class StatsDelta(Progress):
    """What one message added; folded into WorkflowStats by the completion checker."""

    workflow = models.ForeignKey(
        Workflow, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+"
    )

    def __str__(self) -> str:
        return f"delta of {self.workflow_id}"


class Upload(models.Model):
    """One body being taken into a workflow: how far it is, and the record of its idempotency key.

    `chunks` and the rows they brought are committed together, so that the same key resumes after
    a crash. An upload without heartbeat for 60 s may be taken over, or removed by the janitor.
    """

    owner = models.CharField(max_length=150)
    key = models.CharField(max_length=255, null=True, blank=True)  # noqa: DJ001
    """Idempotency-Key of the client, NULL when it sent none (many NULLs are distinct)."""
    body_digest = models.UUIDField()
    workflow = models.ForeignKey(
        Workflow, on_delete=models.DO_NOTHING, db_constraint=False, related_name="uploads"
    )
    creates = models.BooleanField(help_text="Whether it made its workflow, rather than append")
    closes = models.BooleanField(help_text="Whether the workflow is closed after the last chunk")
    first_position = models.BigIntegerField()
    rows = models.BigIntegerField()
    chunks = models.PositiveIntegerField(default=0)
    holder = models.UUIDField(help_text="The request that ingests it; another one may take over")
    answer = models.JSONField(default=dict)
    heartbeat_at = models.DateTimeField()
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "key"], name="upload_idempotency_key"),
        ]
        indexes = [
            models.Index(
                fields=["heartbeat_at"],
                condition=Q(finished_at__isnull=True),
                name="upload_unfinished",
            ),
        ]

    def __str__(self) -> str:
        return f"upload {self.pk} into {self.workflow_id}"


class Side(models.IntegerChoices):
    """Which arm of an experiment a result belongs to."""

    TEST = 1, "test"
    BASE = 2, "base"


class RatingRequest(models.Model):
    """The state table: one narrow row a request. What a finished one says never changes (I13)."""

    id = models.BigIntegerField(primary_key=True)
    workflow = models.ForeignKey(
        Workflow, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    request_id = models.TextField()
    request_digest = models.UUIDField()
    query_id = models.TextField(null=True)  # noqa: DJ001
    result_id = models.TextField(null=True)  # noqa: DJ001
    side = models.PositiveSmallIntegerField(choices=Side.choices, null=True)
    result_weight = models.FloatField(null=True)
    query_weight = models.FloatField(null=True)
    fingerprint = models.UUIDField()
    state = models.PositiveSmallIntegerField(
        choices=_choices(RequestState),
        default=RequestState.PENDING,
        db_default=RequestState.PENDING,
    )
    source = models.PositiveSmallIntegerField(choices=_choices(Source), null=True)
    score = models.FloatField(null=True)
    label = models.TextField(null=True)  # noqa: DJ001
    output = models.JSONField(null=True)
    rating_id = models.BigIntegerField(null=True)
    rated_at = models.DateTimeField(null=True)
    error = models.TextField(null=True)  # noqa: DJ001
    attempts = models.PositiveSmallIntegerField(default=0, db_default=0)
    warnings = ArrayField(models.TextField(), null=True)
    extra = models.JSONField(null=True, help_text="Fields of the row that are not ours")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["workflow", "request_digest"], name="request_id_once_a_workflow"
            ),
            models.CheckConstraint(
                condition=Q(state__in=[s.value for s in RequestState]), name="request_state"
            ),
            models.CheckConstraint(
                condition=Q(state=RequestState.COMPLETED, score__isnull=False, source__isnull=False)
                | (~Q(state=RequestState.COMPLETED) & Q(score__isnull=True)),
                name="request_score_iff_completed",
            ),
            models.CheckConstraint(
                condition=~Q(state=RequestState.FAILED) | Q(error__isnull=False),
                name="request_failed_has_code",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.workflow_id}/{self.request_id}"


class Batch(models.Model):
    """A container of items with outcomes of their own.

    An item is all positions of the chunk whose rows are equal. `positions` and `item_of` run in
    parallel (item_of[i] is the item of positions[i]); bit i of the masks is item i.
    """

    workflow = models.ForeignKey(
        Workflow, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    position = models.BigIntegerField(help_text="First position, orders batches in a workflow")
    round = models.PositiveSmallIntegerField(default=1, db_default=1)
    positions = ArrayField(models.IntegerField())
    item_of = ArrayField(models.SmallIntegerField())
    fingerprints = ArrayField(models.UUIDField())
    open_mask = models.BigIntegerField()
    sent_mask = models.BigIntegerField(default=0, db_default=0)
    state = models.PositiveSmallIntegerField(
        choices=_choices(BatchState), default=BatchState.READY, db_default=BatchState.READY
    )
    not_before = models.DateTimeField(null=True)
    attempts = models.PositiveSmallIntegerField(default=0, db_default=0)
    lost = models.PositiveSmallIntegerField(
        default=0, db_default=0, help_text="Started tries whose worker died"
    )
    probing = models.SmallIntegerField(null=True, help_text="The item a single call is made for")
    fence = models.BigIntegerField(default=0, db_default=0)
    replica = models.CharField(max_length=64, blank=True, default="", db_default="")
    boot_id = models.UUIDField(null=True)
    task_id = models.UUIDField(null=True)
    started_at = models.DateTimeField(null=True)
    lease_until = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=[s.value for s in BatchState]), name="batch_state"
            ),
            models.CheckConstraint(
                # A LEASED one may have no open item: its workflow ended while it was computed.
                condition=Q(state=BatchState.LEASED)
                | Q(state=BatchState.DONE, open_mask=0)
                | (~Q(state=BatchState.DONE) & ~Q(open_mask=0)),
                name="batch_done_iff_nothing_open",
            ),
            models.CheckConstraint(
                condition=Q(state=BatchState.LEASED, lease_until__isnull=False)
                | (~Q(state=BatchState.LEASED) & Q(lease_until__isnull=True)),
                name="batch_lease_iff_leased",
            ),
            models.CheckConstraint(
                condition=~Q(state=BatchState.DELAYED) | Q(not_before__isnull=False),
                name="batch_delayed_has_time",
            ),
        ]
        indexes = [
            models.Index(
                fields=["workflow", "position"],
                condition=Q(state=BatchState.READY),
                name="batch_ready",
            ),
            models.Index(
                fields=["lease_until"], condition=Q(state=BatchState.LEASED), name="batch_leased"
            ),
            models.Index(
                fields=["not_before"], condition=Q(state=BatchState.DELAYED), name="batch_delayed"
            ),
            models.Index(
                fields=["id"], condition=Q(state=BatchState.WAITING), name="batch_waiting"
            ),
            models.Index(
                fields=["workflow", "id"],
                condition=~Q(state=BatchState.DONE),
                name="batch_open",
            ),
        ]

    def __str__(self) -> str:
        return f"batch {self.pk} of {self.workflow_id}"


class BatchPayload(models.Model):
    """Key fields of a batch's items, as `documents.pack` made them; erased when not needed."""

    batch = models.OneToOneField(
        Batch, primary_key=True, on_delete=models.DO_NOTHING, db_constraint=False
    )
    workflow = models.ForeignKey(
        Workflow, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+"
    )
    data = models.BinaryField()

    def __str__(self) -> str:
        return f"payload of batch {self.batch_id}"


class Flight(models.Model):
    """A fingerprint that is being computed: at most one batch computes it at a time (I4)."""

    fingerprint = models.UUIDField(primary_key=True)
    batch_id = models.BigIntegerField(db_index=True)
    fence = models.BigIntegerField()

    def __str__(self) -> str:
        return f"flight of {self.fingerprint}"


class BatchWait(models.Model):
    """A batch waits for another batch's flight."""

    batch_id = models.BigIntegerField()
    fingerprint = models.UUIDField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["batch_id", "fingerprint"], name="batch_wait_once"),
        ]

    def __str__(self) -> str:
        return f"{self.batch_id} waits for {self.fingerprint}"


class FailedFlight(models.Model):
    """A fingerprint that failed for good a moment ago; kept ten minutes for its followers."""

    fingerprint = models.UUIDField(primary_key=True)
    code = models.TextField()
    failed_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.fingerprint}: {self.code}"


class Rating(models.Model):
    """The archive: append-only; the newest reusable and fresh one of a fingerprint is the entry."""

    fingerprint = models.UUIDField()
    rater_version = models.ForeignKey(
        RaterVersion,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
    )
    workflow_id = models.BigIntegerField(help_text="The workflow that had it computed")
    score = models.FloatField()
    label = models.TextField(null=True)  # noqa: DJ001
    output = models.JSONField(null=True)
    url_digest = models.UUIDField(null=True)
    produced_at = models.DateTimeField()
    reusable = models.BooleanField(default=True, db_default=True)

    class Meta:
        indexes = [
            models.Index(fields=["fingerprint"], name="rating_fingerprint"),
            models.Index(
                fields=["url_digest"],
                condition=Q(url_digest__isnull=False),
                name="rating_url",
            ),
        ]

    def __str__(self) -> str:
        return f"rating {self.pk}"


class Event(models.Model):
    """Outbox: exactly one completion event a workflow and round (I5)."""

    public_id = models.CharField(max_length=40, unique=True, default=new_event_id)
    workflow = models.ForeignKey(Workflow, on_delete=models.CASCADE, related_name="events")
    round = models.PositiveSmallIntegerField()
    kind = models.CharField(max_length=64)
    data = models.JSONField()
    created_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["workflow", "round"], name="one_event_a_round"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.workflow_id}"


class ExecutorBoot(models.Model):
    """One run of an executor process: leases belong to a boot, not to a host name."""

    boot_id = models.UUIDField(primary_key=True)
    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    slots = models.PositiveIntegerField(help_text="Batches it may hold")
    plugins = models.JSONField(default=dict, help_text="Version by plug-in name")
    started_at = models.DateTimeField()
    heartbeat_at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class ServiceRun(models.Model):
    """When a recovery service last ran, be it by beat or by the dispatcher when beat is late."""

    name = models.CharField(primary_key=True, max_length=32)
    ran_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.name
