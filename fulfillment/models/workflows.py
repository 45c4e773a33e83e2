"""Workflows, their requests and their progress."""

import uuid
from datetime import datetime

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from fulfillment.models.choices import choices_of
from fulfillment.models.raters import Rater, RaterVersion
from fulfillment.policy.freshness import Look
from fulfillment.policy.lifecycle import EndingReason, RequestState, Source, WorkflowState

POSITION_BITS = 31
"""A request's id is `workflow_id << POSITION_BITS | position`: one narrow key, in input order."""


def request_key(workflow_id: int, position: int) -> int:
    """Return the primary key of the request at `position` of a workflow."""
    return workflow_id << POSITION_BITS | position


def new_workflow_id() -> str:
    """Return a fresh public id of a workflow."""
    return f"wf_{uuid.uuid4().hex}"


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
    priority_asked = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="What was asked for when it was last set"
    )
    priority_reason = models.TextField(
        blank=True, default="", db_default="", help_text="Why the priority is what it is"
    )
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
        choices=choices_of(WorkflowState), default=WorkflowState.RECEIVING
    )
    ending_reason = models.CharField(
        max_length=16, choices=choices_of(EndingReason), blank=True, default=""
    )
    round = models.PositiveSmallIntegerField(default=1)
    round_at = models.DateTimeField(
        null=True, blank=True, help_text="When `retry` made the current round; none made the first"
    )
    retry_key = models.CharField(
        max_length=255, blank=True, default="", help_text="Idempotency-Key of that retry"
    )
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
                        WorkflowState.REOPENING,
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
            models.Index(
                fields=["finished_at"],
                condition=Q(finished_at__isnull=False),
                name="workflow_finished",
            ),
        ]

    def __str__(self) -> str:
        return self.public_id

    @property
    def due_at(self) -> datetime:
        """When what is open times out: at the deadline, or at a max duration before it."""
        return min(self.deadline_at, self.ends_at)

    @property
    def accepted_at(self) -> datetime:
        """When the current round was accepted: its deadline and max duration count from here."""
        return self.round_at or self.created_at


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
    accelerator_seconds = models.FloatField(
        default=0.0, db_default=0.0, help_text="Of calls, waits in a server's queue included"
    )
    device_seconds = models.FloatField(
        default=0.0, db_default=0.0, help_text="Of accelerators, as servers tell; else as the calls"
    )
    stored_bytes = models.BigIntegerField(
        default=0, db_default=0, help_text="Of batches, payloads and requests; 0 once erased"
    )

    class Meta:
        abstract = True


PROGRESS_FIELDS = tuple(field.name for field in Progress._meta.local_fields)


class WorkflowStats(Progress):
    """Folded progress of a workflow."""

    workflow = models.OneToOneField(
        Workflow, primary_key=True, on_delete=models.DO_NOTHING, db_constraint=False
    )
    first_result_at = models.DateTimeField(null=True, help_text="When its first request ended")
    last_result_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["stored_bytes"], condition=Q(stored_bytes__gt=0), name="stats_stored"
            ),
        ]

    def __str__(self) -> str:
        return f"stats of {self.workflow_id}"


class StatsDelta(Progress):
    """What one message added; folded into WorkflowStats by the completion checker."""

    workflow = models.ForeignKey(
        Workflow, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+"
    )
    added_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"delta of {self.workflow_id}"


class Erasure(models.Model):
    """A workflow that is gone for everybody, while its rows are still being erased."""

    workflow_id = models.BigIntegerField(primary_key=True)
    began_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"erasure of {self.workflow_id}"


class Upload(models.Model):
    """One body being taken into a workflow: how far it is, and the record of its idempotency key.

    `rows_done` and the rows are committed together, chunk by chunk, so that the same key resumes
    after a crash, wherever a later release cuts its chunks. An upload without heartbeat for 60 s
    may be taken over, or removed by the janitor.
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
    rows_done = models.BigIntegerField(default=0)
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
            models.Index(
                fields=["finished_at"],
                condition=Q(finished_at__isnull=False),
                name="upload_finished",
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
        choices=choices_of(RequestState),
        default=RequestState.PENDING,
        db_default=RequestState.PENDING,
    )
    source = models.PositiveSmallIntegerField(choices=choices_of(Source), null=True)
    score = models.FloatField(null=True)
    label = models.TextField(null=True)  # noqa: DJ001
    output = models.JSONField(null=True)
    rating_id = models.BigIntegerField(null=True)
    rated_at = models.DateTimeField(null=True)
    error = models.TextField(null=True)  # noqa: DJ001
    attempts = models.PositiveSmallIntegerField(default=0, db_default=0)
    look = models.PositiveSmallIntegerField(
        choices=choices_of(Look), null=True, help_text="What the archive said to it at intake"
    )
    rated_by_id = models.BigIntegerField(
        null=True, help_text="The other workflow whose model call rated it"
    )
    url_digest = models.UUIDField(null=True)
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
