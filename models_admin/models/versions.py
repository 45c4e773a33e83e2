"""Versions of models that were seen, and what labels stand for."""

from django.db import models
from django.db.models import Q

from models_admin.models.configs import ModelConfig
from models_admin.models.lengths import ID_LENGTH, VERSION_LENGTH
from models_admin.policy.rollout import VersionState


class ModelVersion(models.Model):
    """A version of a model: computed from its checkpoint, or reported by an external server.

    Of a hosted model it holds all that its servers are launched with, and so two rows may bear one
    name: the same weights served with other options.
    """

    model = models.ForeignKey(ModelConfig, on_delete=models.CASCADE, related_name="versions")
    version = models.CharField(
        max_length=VERSION_LENGTH, blank=True, help_text="What its answers call themselves"
    )
    checkpoint = models.CharField(max_length=1024, blank=True, default="")
    loader = models.CharField(max_length=32, blank=True, default="")
    serving = models.JSONField(default=dict, blank=True, help_text="Options of the model server")
    state = models.CharField(
        max_length=9,
        choices=[(state.value, state.value) for state in VersionState],
        blank=True,
        default="",
        help_text="Where its rollout stands; empty for an external model",
    )
    reason = models.TextField(blank=True, default="", help_text="Why it is in this state")
    changed_at = models.DateTimeField(null=True, help_text="Since when it is in this state")
    replicas = models.PositiveSmallIntegerField(default=0, help_text="That it should have now")
    generation = models.PositiveIntegerField(
        default=0, help_text="The model's restarts when it was last asked for"
    )
    is_withdrawn = models.BooleanField(
        default=False, help_text="An operator retired it, whatever waits for it"
    )
    first_seen_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=["", *(state.value for state in VersionState)]),
                name="model_version_state",
            ),
        ]
        indexes = [models.Index(fields=["model", "version"], name="model_version_named")]

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
