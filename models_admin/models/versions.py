"""Versions of models that were seen, and what labels stand for."""

from django.db import models

from models_admin.models.configs import ModelConfig
from models_admin.models.lengths import ID_LENGTH, VERSION_LENGTH


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
