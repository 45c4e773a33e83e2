"""Windows of hosted models, as they were tuned."""

from django.db import models
from django.db.models import Q

from models_admin.models.configs import ModelConfig
from models_admin.models.lengths import VERSION_LENGTH


class TunedWindow(models.Model):
    """The window that replicas of a model have, and what is known of others.

    Written by `window_tuning` only. It holds for the version and the operator's figure that it was
    found for (`window_of`).
    """

    model = models.OneToOneField(
        ModelConfig, primary_key=True, on_delete=models.CASCADE, related_name="tuned_window"
    )
    window = models.PositiveSmallIntegerField(help_text="Batches that a replica may hold now")
    reason = models.TextField(help_text="Why it is so many")
    start = models.PositiveSmallIntegerField(help_text="The operator's figure that it began with")
    version = models.CharField(max_length=VERSION_LENGTH, blank=True, default="")
    measures = models.JSONField(
        default=dict,
        help_text="By window: busy share, tokens a busy second, time of measuring",
    )
    seen = models.JSONField(
        default=dict,
        help_text="Seconds busy, tokens and time by replica, while all had their windows full",
    )
    at = models.DateTimeField(help_text="When it was last looked at")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(window__gte=1, start__gte=1), name="tuned_window"),
        ]

    def __str__(self) -> str:
        return f"window of {self.model_id}"


def window_of(model: ModelConfig) -> int:
    """Return how many batches a replica may hold now; select `tuned_window` with it."""
    found = tuned_window(model)
    return model.window if found is None else found.window


def tuned_window(model: ModelConfig) -> TunedWindow | None:
    """Return what was tuned for the model as it is now."""
    found: TunedWindow | None = getattr(model, "tuned_window", None)
    if found is None or not model.tunes_window:
        return None
    return found if (found.start, found.version) == (model.window, model.version) else None
