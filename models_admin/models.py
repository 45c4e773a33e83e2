"""Tables of model management: what may serve, what is wanted, and which servers live.

Configuration is written by services (for admin and API), `ModelServer` rows by the host agent
only, `ModelVersion` by whoever sees a version first.
"""

from datetime import datetime

from django.db import models
from django.db.models import F, Q

from models_admin.policy.reconcile import ServerState

ID_LENGTH = 64
VERSION_LENGTH = 128


class PoolKind(models.TextChoices):
    """What the devices of a pool are."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class Rebalancing(models.TextChoices):
    """What the rebalancer does with a pool."""

    OFF = "off"
    DRY_RUN = "dry_run", "dry run: it says what it would move"
    ON = "on"


class AcceleratorPool(models.Model):
    """Devices that replicas of hosted models share; a CPU pool's devices are a number of shares."""

    id = models.SlugField(primary_key=True, max_length=ID_LENGTH)
    kind = models.CharField(max_length=8, choices=PoolKind.choices, default=PoolKind.CPU)
    devices = models.PositiveIntegerField(default=1)
    agent = models.SlugField(
        max_length=ID_LENGTH,
        default="local",
        help_text="Name of the host agent (`host_models --agent`) that runs servers of this pool",
    )
    rebalancing = models.CharField(
        max_length=8,
        choices=Rebalancing.choices,
        default=Rebalancing.OFF,
        help_text="Whether replicas move between its models, to where the work is",
    )
    notes = models.TextField(blank=True, default="")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(devices__gte=1), name="pool_devices"),
            models.CheckConstraint(condition=Q(kind__in=PoolKind.values), name="pool_kind"),
            models.CheckConstraint(
                condition=Q(rebalancing__in=Rebalancing.values), name="pool_rebalancing"
            ),
        ]

    def __str__(self) -> str:
        return self.id


class ModelKind(models.TextChoices):
    """Who runs the model's servers."""

    HOSTED = "hosted"
    EXTERNAL = "external"


class Protocol(models.TextChoices):
    """How a model is called."""

    OIP = "oip"
    OPENAI = "openai"


class ModelConfig(models.Model):
    """A model that raters are bound to: hosted from a checkpoint, or external at a URL."""

    id = models.SlugField(primary_key=True, max_length=ID_LENGTH)
    kind = models.CharField(max_length=8, choices=ModelKind.choices)
    protocol = models.CharField(max_length=8, choices=Protocol.choices, default=Protocol.OIP)
    model_name = models.CharField(max_length=256, help_text="Name that its server knows it by")
    version = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        help_text="What it serves: the checkpoint's version, or what an external server reported",
    )
    version_label = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        help_text="The operator's name for what an external server serves: it stands for the first "
        "version known under it, and another name is another archive key",
    )
    first_version = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        editable=False,
        help_text="What the label of an external model stands for",
    )
    reported = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        editable=False,
        help_text="Another version that an external server reported since, to be accepted",
    )
    timeout_s = models.FloatField(default=60.0, help_text="Total time of one call")
    sends_priority = models.BooleanField(default=False, help_text="Its server knows priorities")

    # External
    url = models.CharField(max_length=2048, blank=True, default="")
    api_key = models.TextField(blank=True, default="", editable=False, help_text="Sealed")
    headers = models.JSONField(
        default=dict, blank=True, editable=False, help_text="Sealed value by name"
    )
    max_concurrency = models.PositiveIntegerField(
        default=16, help_text="Calls an external server may hold; an OIP batch is one"
    )

    # Hosted
    pool = models.ForeignKey(
        AcceleratorPool, null=True, blank=True, on_delete=models.PROTECT, related_name="models"
    )
    loader = models.CharField(max_length=32, blank=True, default="")
    checkpoint = models.CharField(
        max_length=1024,
        blank=True,
        default="",
        help_text="pkg:PACKAGE/PATH, or a path under AIRS_CHECKPOINT_ROOT",
    )
    serving = models.JSONField(default=dict, blank=True, help_text="Options of the model server")
    devices_per_replica = models.PositiveSmallIntegerField(default=1)
    replicas_min = models.PositiveSmallIntegerField(default=0)
    replicas_default = models.PositiveSmallIntegerField(default=1)
    replicas_max = models.PositiveSmallIntegerField(default=1)
    window = models.PositiveSmallIntegerField(
        default=16, help_text="Batches that a replica may hold, computing and queued"
    )

    pinned = models.BooleanField(
        default=False, help_text="The rebalancer leaves its replicas as they are"
    )
    pinned_until = models.DateTimeField(
        null=True, editable=False, help_text="The same for a while, as somebody resized it"
    )
    start_up_s = models.FloatField(
        null=True, editable=False, help_text="From start to ready, as its replicas last took"
    )

    # Desired state
    started = models.BooleanField(default=False, editable=False)
    wanted_replicas = models.PositiveSmallIntegerField(default=1, editable=False)
    restart_generation = models.PositiveIntegerField(default=0, editable=False)

    created_at = models.DateTimeField(editable=False)
    updated_at = models.DateTimeField(editable=False)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(kind__in=ModelKind.values), name="model_kind"),
            models.CheckConstraint(
                condition=Q(protocol__in=Protocol.values), name="model_protocol"
            ),
            models.CheckConstraint(
                condition=Q(kind=ModelKind.HOSTED, url="", protocol=Protocol.OIP)
                & ~Q(checkpoint="")
                & ~Q(loader="")
                | Q(kind=ModelKind.EXTERNAL, checkpoint="", loader="", pool=None, started=False)
                & ~Q(url=""),
                name="model_hosted_or_external",
            ),
            models.CheckConstraint(
                condition=Q(first_version="", reported="")
                | Q(kind=ModelKind.EXTERNAL) & ~Q(version=""),
                name="model_reports",
            ),
            models.CheckConstraint(condition=Q(timeout_s__gt=0), name="model_timeout"),
            models.CheckConstraint(
                condition=Q(max_concurrency__gte=1, window__gte=1, devices_per_replica__gte=1),
                name="model_room",
            ),
            models.CheckConstraint(
                condition=Q(
                    replicas_min__lte=F("replicas_default"),
                    replicas_default__lte=F("replicas_max"),
                    replicas_max__gte=1,
                    wanted_replicas__lte=F("replicas_max"),
                ),
                name="model_replicas",
            ),
        ]

    def __str__(self) -> str:
        return self.id

    @property
    def target_replicas(self) -> int:
        """How many replicas should live now."""
        return self.wanted_replicas if self.started else 0

    def is_pinned(self, now: datetime) -> bool:
        """Whether the rebalancer leaves its replicas as they are."""
        return self.pinned or (self.pinned_until is not None and now < self.pinned_until)

    @property
    def agent(self) -> str:
        """Name of the host agent that runs it; it needs `pool`."""
        return self.pool.agent if self.pool else "local"

    @property
    def served_version(self) -> str:
        """What people are shown: what is served, or its label while a server reported nothing."""
        return self.version or self.version_label

    @property
    def key_version(self) -> str:
        """What raters are pinned to and the archive goes by.

        Of an external model it is the label alone, before and after the server first reports: when
        it does must not matter. Any other version is added to it (no label holds a tab).
        """
        if self.kind == ModelKind.HOSTED:
            return self.version
        if self.version == self.first_version:
            return self.version_label
        return f"{self.version_label}\t{self.version}"


class ModelVersion(models.Model):
    """A version of a model that was seen: computed from its checkpoint, or reported."""

    model = models.ForeignKey(ModelConfig, on_delete=models.CASCADE, related_name="versions")
    version = models.CharField(max_length=VERSION_LENGTH)
    checkpoint = models.CharField(max_length=1024, blank=True, default="")
    first_seen_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["model", "version"], name="model_version_once"),
        ]

    def __str__(self) -> str:
        return f"{self.model_id}: {self.version}"


class ModelLabel(models.Model):
    """What a label of an external model stands for: the first version known under it.

    Never changed, and kept when its model is removed: the archive's keys are, too.
    """

    model_id = models.CharField(max_length=ID_LENGTH)
    label = models.CharField(max_length=VERSION_LENGTH, blank=True)
    version = models.CharField(max_length=VERSION_LENGTH)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["model_id", "label"], name="model_label_once"),
        ]

    def __str__(self) -> str:
        return f"{self.model_id} {self.label!r}: {self.version}"


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
    version = models.CharField(max_length=VERSION_LENGTH, blank=True, default="")
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

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["at", "model_id", "agent", "pool_id"], name="utilization_sample_once"
            ),
            models.CheckConstraint(
                condition=Q(busy_s__gte=0, replica_s__gte=0), name="utilization_sample_seconds"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model_id} at {self.at}"


class Outcome(models.TextChoices):
    """What a round of the rebalancer came to."""

    MOVES = "moves"
    STEADY = "steady", "nothing is worth a move"
    NO_SIGNAL = "no_signal", "nobody says what there is to do"
    STALE_SIGNAL = "stale_signal", "what is said is too old"
    WRONG_SIGNAL = "wrong_signal", "what is said cannot be"


class PoolOutlook(models.Model):
    """What the rebalancer last found of a pool; written each round."""

    pool = models.OneToOneField(
        AcceleratorPool, primary_key=True, on_delete=models.CASCADE, related_name="outlook"
    )
    at = models.DateTimeField()
    needs = models.JSONField(help_text="Replicas that each model needs; empty while unknown")
    reason = models.TextField()
    signal_age_s = models.FloatField(null=True)

    def __str__(self) -> str:
        return f"outlook of {self.pool_id}"


class RebalanceDecision(models.Model):
    """A round of the rebalancer, kept as history; rounds that bring no news are left out.

    No foreign keys: what was decided outlives model and pool.
    """

    pool_id = models.CharField(max_length=ID_LENGTH)
    at = models.DateTimeField(db_index=True)
    mode = models.CharField(max_length=8, choices=Rebalancing.choices)
    outcome = models.CharField(max_length=16, choices=Outcome.choices)
    applied = models.BooleanField(help_text="Whether the moves were made")
    moves = models.JSONField(help_text="[{model, before, after}], in replicas")
    needs = models.JSONField(help_text="Replicas by model")
    targets = models.JSONField(help_text="Replicas by model")
    reason = models.TextField()
    signal_age_s = models.FloatField(null=True)

    class Meta:
        indexes = [models.Index(fields=["pool_id", "id"], name="decision_of_pool")]
        constraints = [
            models.CheckConstraint(
                condition=Q(applied=False) | Q(mode=Rebalancing.ON, outcome=Outcome.MOVES),
                name="decision_applied",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at}"
