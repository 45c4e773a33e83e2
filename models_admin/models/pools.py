"""Pools of devices, and what the rebalancer found and decided of them."""

from django.db import models
from django.db.models import Q

from models_admin.models.lengths import ID_LENGTH


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
