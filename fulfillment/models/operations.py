"""What is measured of the service while it runs: how fast work ends, how deep the queue is."""

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from fulfillment.models.choices import choices_of
from fulfillment.policy.priority import PriorityClass


class Flow(models.Model):
    """What ended of a workflow between two folds; kept for some minutes, for its pace.

    Only inserted, like the deltas it is made of: a counter a rater would be a row that all wait
    for.
    """

    workflow_id = models.BigIntegerField(db_index=True)
    at = models.DateTimeField(db_default=Now())
    ended = models.BigIntegerField()
    worked = models.BigIntegerField(help_text="Of them rated or failed, archive hits apart")
    model_calls = models.BigIntegerField()
    accelerator_seconds = models.FloatField(help_text="Of calls, waits included")
    device_seconds = models.FloatField(default=0.0, db_default=0.0, help_text="Of accelerators")
    sampled = models.BooleanField(default=False, db_default=False)

    def __str__(self) -> str:
        return f"{self.ended} ended of {self.workflow_id}"


class AcceleratorUse(models.Model):
    """What a workflow had of accelerators in an hour of the clock; its rater and owner outlive it.

    A row a workflow, not a rater or owner: those would be rows that all folds wait for, and sums by
    rater, by owner and by workflow are the same for any span.
    """

    hour = models.DateTimeField()
    workflow_id = models.BigIntegerField()
    rater_id = models.CharField(max_length=64)
    owner = models.CharField(max_length=150)
    device_s = models.FloatField()
    calls = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["hour", "workflow_id"], name="accelerator_use_once"),
        ]

    def __str__(self) -> str:
        return f"{self.device_s:g} s of {self.rater_id} in the hour from {self.hour}"


class QueueSample(models.Model):
    """The queue of one rater and class at a moment, and what ended since the moment before."""

    at = models.DateTimeField()
    rater_id = models.CharField(max_length=64)
    priority_class = models.PositiveSmallIntegerField(choices=choices_of(PriorityClass))
    ready = models.BigIntegerField(help_text="Batches, derived from the open requests")
    leased = models.BigIntegerField()
    delayed = models.BigIntegerField()
    waiting = models.BigIntegerField()
    workflows = models.BigIntegerField(help_text="Unfinished ones with open requests")
    open_requests = models.BigIntegerField()
    paused_requests = models.BigIntegerField(help_text="Open ones of paused workflows, not in it")
    oldest_s = models.FloatField(null=True, help_text="Since its workflow was accepted")
    age_p50_s = models.FloatField(null=True)
    age_p90_s = models.FloatField(null=True)
    age_p99_s = models.FloatField(null=True)
    period_s = models.FloatField(help_text="Over which the rest was counted")
    ended = models.BigIntegerField()
    worked = models.BigIntegerField(help_text="Of them rated or failed, archive hits apart")
    model_calls = models.BigIntegerField()
    accelerator_seconds = models.FloatField(help_text="Of calls, waits included")
    device_seconds = models.FloatField(default=0.0, db_default=0.0, help_text="Of accelerators")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["rater_id", "at", "priority_class"], name="queue_sample_once"
            ),
            models.CheckConstraint(condition=Q(period_s__gte=0), name="queue_sample_period"),
        ]

    def __str__(self) -> str:
        return f"{self.rater_id} {PriorityClass(self.priority_class).name} at {self.at}"
