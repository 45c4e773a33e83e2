"""Whether external models are up, as was found when they were last checked."""

from django.db import models
from django.db.models import Q

from models_admin.models.configs import ModelConfig
from models_admin.policy.health import Health


class ExternalHealth(models.Model):
    """What checks found of an external model; written by `external` only.

    It is of the model as it was then: what is older than the model's last change counts for nothing
    (`health_of`).
    """

    model = models.OneToOneField(
        ModelConfig, primary_key=True, on_delete=models.CASCADE, related_name="health"
    )
    up = models.BooleanField(null=True, help_text="Empty while that is not known")
    checked_at = models.DateTimeField()
    changed_at = models.DateTimeField(help_text="When it came up, went down or became unknown")
    failures = models.PositiveIntegerField(default=0, help_text="Checks in a row that were bad")
    successes = models.PositiveIntegerField(default=0, help_text="Checks in a row that were good")
    latency_s = models.FloatField(help_text="Of the last check")
    detail = models.TextField(help_text="What the last check found")

    class Meta:
        verbose_name_plural = "health of external models"
        constraints = [
            models.CheckConstraint(
                condition=Q(failures=0) | Q(successes=0), name="external_health_in_a_row"
            ),
        ]

    def __str__(self) -> str:
        return f"health of {self.model_id}"


def health_of(model: ModelConfig) -> Health | None:
    """Return what is known of a model as it is configured now; select `health` with it."""
    found: ExternalHealth | None = getattr(model, "health", None)
    if found is None or found.checked_at < model.updated_at:
        return None
    return Health(
        up=found.up,
        checked_at=found.checked_at,
        changed_at=found.changed_at,
        failures=found.failures,
        successes=found.successes,
        latency_s=found.latency_s,
        detail=found.detail,
    )
