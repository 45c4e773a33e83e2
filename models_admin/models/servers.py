"""Replicas of hosted models, and how busy they were."""

from django.db import models
from django.db.models import Q

from models_admin.models.configs import ModelConfig
from models_admin.models.lengths import ID_LENGTH, VERSION_LENGTH
from models_admin.models.versions import ModelVersion
from models_admin.policy.replicas import ServerState


class ModelServer(models.Model):
    """One replica of a hosted model. The row outlives its processes; `starts` tells them apart.

    Sent to only while READY with a fresh heartbeat: an agent that is killed takes its servers with
    it, and what it left in the row is out of date within seconds.
    """

    model = models.ForeignKey(ModelConfig, on_delete=models.CASCADE, related_name="servers")
    agent = models.CharField(max_length=ID_LENGTH, help_text="Host agent that runs it")
    ordinal = models.PositiveSmallIntegerField()
    state = models.CharField(
        max_length=8,
        choices=[(state.value, state.value) for state in ServerState],
        default=ServerState.STOPPED,
    )
    reason = models.TextField(blank=True, default="", help_text="Why it is in this state")
    last_error = models.TextField(blank=True, default="", help_text="How it last failed")
    address = models.CharField(max_length=255, blank=True, default="")
    pid = models.IntegerField(null=True)
    host = models.CharField(max_length=255, blank=True, default="", help_text="Where it runs")
    devices = models.JSONField(default=list, help_text="Indices of its devices on that host")
    launched = models.ForeignKey(
        ModelVersion,
        null=True,
        on_delete=models.SET_NULL,
        related_name="servers",
        help_text="What its last run was launched with",
    )
    version = models.CharField(
        max_length=VERSION_LENGTH, blank=True, default="", help_text="What it says it serves"
    )
    log_tail = models.TextField(blank=True, default="", help_text="The last that it wrote")
    boot_id = models.UUIDField(null=True, help_text="Run of the agent that wrote the row")
    starts = models.PositiveIntegerField(default=0)
    generation = models.PositiveIntegerField(default=0)
    failures = models.PositiveIntegerField(default=0, help_text="Deaths in a row")
    started_at = models.DateTimeField(null=True)
    ready_at = models.DateTimeField(null=True)
    draining_at = models.DateTimeField(null=True)
    next_start_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True, help_text="When it last answered")
    busy_seconds = models.FloatField(default=0.0, help_text="Of this run")
    rows_total = models.BigIntegerField(default=0, help_text="Of this run")
    # Rows of an agent that does not know the column count as they did before it.
    tokens_total = models.BigIntegerField(
        default=0, db_default=0, help_text="Of this run, padding left out"
    )
    queue_rows = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["model", "agent", "ordinal"], name="model_server_once"),
            models.CheckConstraint(
                condition=Q(state__in=[state.value for state in ServerState]),
                name="model_server_state",
            ),
            models.CheckConstraint(
                condition=~Q(state=ServerState.READY)
                | (~Q(address="") & Q(ready_at__isnull=False)),
                name="model_server_ready_has_address",
            ),
            models.CheckConstraint(
                condition=~Q(state__in=[ServerState.BACKOFF, ServerState.FAILED])
                | Q(next_start_at__isnull=False),
                name="model_server_pause_has_end",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model_id}/{self.ordinal}"

    @property
    def key(self) -> str:
        """Name of this run of the replica: a message for an earlier run finds nobody."""
        return f"ms-{self.pk}-{self.starts}"


class UtilizationSample(models.Model):
    """How busy the replicas of a model were since the sample before, as their servers said.

    Written by the host agent. No foreign keys: what was measured outlives model and pool.
    """

    at = models.DateTimeField()
    agent = models.CharField(max_length=ID_LENGTH)
    model_id = models.CharField(max_length=ID_LENGTH)
    pool_id = models.CharField(max_length=ID_LENGTH, blank=True, default="")
    replicas = models.PositiveIntegerField(help_text="That lived meanwhile, ended ones included")
    busy_s = models.FloatField(help_text="Seconds in which they computed, of all together")
    replica_s = models.FloatField(help_text="Seconds that they lived, of all together")
    # Rows of a writer that does not know the column count as they did before it.
    devices = models.PositiveIntegerField(
        default=1, db_default=1, help_text="That each of these replicas held"
    )

    class Meta:
        indexes = [
            models.Index(fields=["model_id", "at"], name="utilization_sample_of_model"),
            models.Index(fields=["pool_id", "at"], name="utilization_sample_of_pool"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["at", "model_id", "agent", "pool_id", "devices"],
                name="utilization_sample_once",
            ),
            models.CheckConstraint(
                condition=Q(busy_s__gte=0, replica_s__gte=0), name="utilization_sample_seconds"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model_id} at {self.at}"
