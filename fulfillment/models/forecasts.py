"""What is forecast of workflows, and what the forecasts are made from."""

from django.db import models
from django.db.models import Q

from fulfillment.models.choices import choices_of
from fulfillment.models.raters import Rater
from fulfillment.models.workflows import Workflow
from fulfillment.policy.priority import PriorityClass


class RaterCost(models.Model):
    """What requests of a rater take, as moving averages; there is none before any was rated."""

    rater = models.OneToOneField(Rater, primary_key=True, on_delete=models.CASCADE)
    seconds_a_request = models.FloatField(help_text="Of a replica, or of a call of an external one")
    call_seconds_a_request = models.FloatField(help_text="Of calls, waits in a replica included")
    device_seconds_a_request = models.FloatField(
        default=0.0, db_default=0.0, help_text="Of accelerators; 0 while nobody has told"
    )
    requests = models.BigIntegerField(help_text="That these are measured on")
    exact = models.BooleanField(help_text="Whether it was measured while batches waited")
    measured_at = models.DateTimeField()
    read_to = models.DateTimeField(help_text="The last queue sample that was looked at")
    servers = models.FloatField(help_text="That can be reached by its current version")
    looked_at = models.DateTimeField(help_text="When these were counted")

    def __str__(self) -> str:
        return f"cost of {self.rater_id}"


class WorkflowForecast(models.Model):
    """How much of a workflow is expected in time; written when it comes and then each minute.

    What was said first is kept until its end, when it turns out whether it was true; another
    deadline, class or round is another promise.
    """

    workflow = models.OneToOneField(
        Workflow, primary_key=True, on_delete=models.DO_NOTHING, db_constraint=False
    )
    served_by = models.CharField(
        max_length=400, help_text="Model and version that serve it: all these share replicas"
    )
    round = models.PositiveSmallIntegerField()
    priority_class = models.PositiveSmallIntegerField(choices=choices_of(PriorityClass))
    deadline_at = models.DateTimeField()
    seconds_a_batch = models.FloatField(help_text="Of a replica, for a batch of this workflow")
    received = models.BigIntegerField(help_text="All its requests")
    unsent_batches = models.FloatField(help_text="Those cut included")
    in_flight_batches = models.FloatField()
    cut_batches = models.FloatField(help_text="Not committed: served as best effort")
    share = models.FloatField(help_text="Of all its requests, expected in time")
    eta_s = models.FloatField(null=True)
    eta_low_s = models.FloatField(null=True)
    eta_high_s = models.FloatField(null=True)
    reason = models.TextField()
    made_at = models.DateTimeField()
    first_at = models.DateTimeField(
        null=True, help_text="When all its rows were known and a share was said"
    )
    first_share = models.FloatField(null=True)
    settled_at = models.DateTimeField(null=True, help_text="When its end was noticed")
    kept = models.BooleanField(
        null=True, help_text="Whether no request timed out; unknown if the client ended it"
    )

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(share__gte=0, share__lte=1, cut_batches__gte=0), name="forecast_share"
            ),
        ]
        indexes = [
            models.Index(
                fields=["served_by"],
                condition=Q(settled_at__isnull=True),
                name="forecast_open",
            ),
            models.Index(
                fields=["workflow"],
                condition=Q(settled_at__isnull=True, cut_batches__gt=0),
                name="forecast_cut",
            ),
            models.Index(
                fields=["settled_at"],
                condition=Q(settled_at__isnull=False),
                name="forecast_settled",
            ),
        ]

    def __str__(self) -> str:
        return f"forecast of {self.workflow_id}"
