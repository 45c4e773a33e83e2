"""What is told to the outside."""

import uuid

from django.db import models

from fulfillment.models.workflows import Workflow


def new_event_id() -> str:
    """Return a fresh public id of an event."""
    return f"evt_{uuid.uuid4().hex}"


class Event(models.Model):
    """Outbox: exactly one completion event a workflow and round (I5)."""

    public_id = models.CharField(max_length=40, unique=True, default=new_event_id)
    workflow = models.ForeignKey(Workflow, on_delete=models.CASCADE, related_name="events")
    round = models.PositiveSmallIntegerField()
    kind = models.CharField(max_length=64)
    data = models.JSONField()
    created_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["workflow", "round"], name="one_event_a_round"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.workflow_id}"
