"""The queue: batches, their payloads and leases, what is in flight, and who works."""

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from fulfillment.models.choices import choices_of
from fulfillment.models.workflows import Workflow
from fulfillment.policy.lifecycle import BatchState


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
    accepted_at = models.DateTimeField(
        db_default=Now(), help_text="Of its rows, or of the round that opened it again"
    )
    positions = ArrayField(models.IntegerField())
    item_of = ArrayField(models.SmallIntegerField())
    fingerprints = ArrayField(models.UUIDField())
    open_mask = models.BigIntegerField()
    sent_mask = models.BigIntegerField(default=0, db_default=0)
    state = models.PositiveSmallIntegerField(
        choices=choices_of(BatchState), default=BatchState.READY, db_default=BatchState.READY
    )
    not_before = models.DateTimeField(null=True)
    attempts = models.PositiveSmallIntegerField(default=0, db_default=0)
    lost = models.PositiveSmallIntegerField(
        default=0, db_default=0, help_text="Started tries whose worker died"
    )
    probing = models.SmallIntegerField(null=True, help_text="The item a single call is made for")
    fence = models.BigIntegerField(default=0, db_default=0)
    replica = models.CharField(max_length=64, blank=True, default="", db_default="")
    calls = models.PositiveSmallIntegerField(
        default=1, db_default=1, help_text="Concurrent calls that its lease grants"
    )
    tries = ArrayField(
        models.PositiveSmallIntegerField(),
        null=True,
        help_text="Tries of each item, once they differ from `attempts`",
    )
    boot_id = models.UUIDField(null=True)
    task_id = models.UUIDField(null=True)
    started_at = models.DateTimeField(null=True)
    lease_until = models.DateTimeField(null=True)

    class Meta:
        verbose_name_plural = "batches"
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
            # Not by `lease_until`: a take-over or an extension would have to write all indexes.
            models.Index(fields=["id"], condition=Q(state=BatchState.LEASED), name="batch_leased"),
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
    batch_id = models.BigIntegerField()
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


class SendWindow(models.Model):
    """The adaptive window of a replica as the leading dispatcher last wrote it.

    So that a new leader goes on where the old one was, and that people see what is sent and why.
    """

    replica = models.CharField(primary_key=True, max_length=64)
    model_id = models.CharField(max_length=64, db_index=True)
    ceiling = models.PositiveIntegerField()
    limits = ArrayField(models.FloatField(), help_text="Calls that may be out, a class each")
    dropped_at = ArrayField(models.DateTimeField(null=True))
    reason = models.CharField(max_length=32, help_text="Why it is adapted: external, isolated, …")
    written_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"window of {self.replica}"


class OwnerUsage(models.Model):
    """What an owner was served of a rater version of late, as the leading dispatcher wrote it.

    So that a new leader knows it, and that owners see why they wait.
    """

    rater_version = models.ForeignKey(
        "RaterVersion", on_delete=models.CASCADE, db_constraint=False, db_index=False
    )
    owner = models.CharField(max_length=150)
    recent = models.FloatField(help_text="Requests, halved every ten minutes")
    contended = models.FloatField(
        help_text="Requests served while another owner waited, halved every hour"
    )
    used = models.FloatField(null=True, help_text="Share of the rater; set where it is too much")
    allowed = models.FloatField(null=True)
    written_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["rater_version", "owner"], name="owner_usage_once"),
        ]

    def __str__(self) -> str:
        return f"usage of {self.rater_version_id} by {self.owner}"


class ServiceRun(models.Model):
    """When a recovery service last ran, be it by beat or by the dispatcher when beat is late."""

    name = models.CharField(primary_key=True, max_length=32)
    ran_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.name
