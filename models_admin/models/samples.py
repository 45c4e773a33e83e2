"""How busy each replica was over time."""

from django.db import models
from django.db.models import Q

from models_admin.models.lengths import ID_LENGTH, VERSION_LENGTH


class ReplicaSample(models.Model):
    """How busy a run of a replica was since the sample before, as its server said.

    Written by the host agent together with `UtilizationSample`, which has the sums. A replica that
    was started again meanwhile has a row for each run.
    """

    at = models.DateTimeField()
    agent = models.CharField(max_length=ID_LENGTH)
    model_id = models.CharField(max_length=ID_LENGTH)
    pool_id = models.CharField(max_length=ID_LENGTH, blank=True, default="")
    ordinal = models.PositiveSmallIntegerField()
    host = models.CharField(max_length=255, blank=True, default="")
    version = models.CharField(max_length=VERSION_LENGTH, blank=True, default="")
    devices = models.PositiveIntegerField(default=1, help_text="That it held")
    busy_s = models.FloatField(help_text="Seconds in which it computed")
    lived_s = models.FloatField(help_text="Seconds that it lived")

    class Meta:
        indexes = [
            models.Index(fields=["model_id", "at"], name="replica_sample_of_model"),
            models.Index(fields=["agent", "at"], name="replica_sample_of_agent"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(busy_s__gte=0, lived_s__gte=0, devices__gte=1),
                name="replica_sample_amounts",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model_id}/{self.ordinal} at {self.at}"
