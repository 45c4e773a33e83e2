"""What is told to the outside: events, who wants to hear of them, and how telling them went."""

import uuid

from django.db import models
from django.db.models import Q

from fulfillment.models.choices import choices_of
from fulfillment.models.workflows import Workflow
from fulfillment.policy.addresses import MAX_URL_CHARACTERS
from fulfillment.policy.delivery import DeliveryState
from fulfillment.policy.webhook_body import WebhookFormat


def new_event_id() -> str:
    """Return a fresh public id of an event."""
    return f"evt_{uuid.uuid4().hex}"


def new_endpoint_id() -> str:
    """Return a fresh public id of a webhook endpoint."""
    return f"we_{uuid.uuid4().hex}"


def new_delivery_id() -> str:
    """Return a fresh public id of a delivery."""
    return f"dlv_{uuid.uuid4().hex}"


class Event(models.Model):
    """Outbox: exactly one completion event a workflow and round (I5)."""

    public_id = models.CharField(max_length=40, unique=True, default=new_event_id)
    workflow = models.ForeignKey(Workflow, on_delete=models.CASCADE, related_name="events")
    round = models.PositiveSmallIntegerField()
    kind = models.CharField(max_length=64)
    data = models.JSONField()
    created_at = models.DateTimeField()
    published_at = models.DateTimeField(
        null=True, help_text="When its deliveries were made and its signal was sent"
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["workflow", "round"], name="one_event_a_round"),
        ]
        indexes = [
            models.Index(
                fields=["id"], condition=Q(published_at__isnull=True), name="event_unpublished"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.workflow_id}"


class WebhookEndpoint(models.Model):
    """An address that is told of events: of all workflows of its owner, or of one workflow."""

    public_id = models.CharField(max_length=40, unique=True, default=new_endpoint_id)
    owner = models.CharField(max_length=150)
    workflow = models.OneToOneField(
        Workflow, null=True, on_delete=models.CASCADE, related_name="webhook"
    )
    url = models.CharField(max_length=MAX_URL_CHARACTERS)
    format = models.CharField(
        max_length=16, choices=choices_of(WebhookFormat), default=WebhookFormat.STANDARD
    )
    secret = models.TextField(editable=False, help_text="Sealed; what signs is never shown")
    generated = models.BooleanField(help_text="Whether AIRS made the secret")
    created_at = models.DateTimeField()
    disabled_at = models.DateTimeField(null=True)
    disabled_reason = models.CharField(max_length=64, blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "url"],
                condition=Q(workflow__isnull=True),
                name="standing_endpoint_once",
            ),
        ]

    def __str__(self) -> str:
        return self.public_id


class Delivery(models.Model):
    """One event for one endpoint: the bytes, and what became of them.

    A sender holds it by a lease; a sender that is killed between the answer and its record leaves
    it to the next one, which sends the same id and bytes again: at least once.
    """

    public_id = models.CharField(max_length=40, unique=True, default=new_delivery_id)
    event = models.ForeignKey(Event, on_delete=models.CASCADE, related_name="deliveries")
    endpoint = models.ForeignKey(
        WebhookEndpoint, on_delete=models.CASCADE, related_name="deliveries"
    )
    receiver = models.CharField(max_length=264, help_text="Host and port: limited together")
    body = models.BinaryField(help_text="Made once: every attempt sends these bytes")
    state = models.PositiveSmallIntegerField(
        choices=choices_of(DeliveryState),
        default=DeliveryState.PENDING,
        db_default=DeliveryState.PENDING,
    )
    code = models.CharField(
        max_length=32, blank=True, default="", help_text="What was wrong with the last attempt"
    )
    attempts = models.PositiveIntegerField(default=0, db_default=0)
    tries = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Attempts since it was made or replayed"
    )
    began_at = models.DateTimeField(help_text="When it was made or replayed")
    due_at = models.DateTimeField()
    lease_until = models.DateTimeField(null=True)
    fence = models.BigIntegerField(default=0, db_default=0)
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name_plural = "deliveries"
        constraints = [
            models.UniqueConstraint(fields=["event", "endpoint"], name="delivery_once"),
            models.CheckConstraint(
                condition=Q(state__in=[s.value for s in DeliveryState]), name="delivery_state"
            ),
            models.CheckConstraint(
                condition=Q(state=DeliveryState.PENDING, finished_at__isnull=True)
                | (
                    ~Q(state=DeliveryState.PENDING)
                    & Q(finished_at__isnull=False, lease_until__isnull=True)
                ),
                name="delivery_finished_has_time",
            ),
        ]
        indexes = [
            models.Index(
                fields=["receiver", "due_at"],
                condition=Q(state=DeliveryState.PENDING),
                name="delivery_due",
            ),
            models.Index(
                fields=["finished_at"],
                condition=Q(finished_at__isnull=False),
                name="delivery_finished",
            ),
        ]

    def __str__(self) -> str:
        return self.public_id


class DeliveryAttempt(models.Model):
    """One attempt: when, how long, and the status or what kept one from coming; never an answer."""

    delivery = models.ForeignKey(Delivery, on_delete=models.CASCADE, related_name="log")
    number = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    duration_s = models.FloatField()
    status = models.PositiveSmallIntegerField(null=True)
    code = models.CharField(max_length=32, blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["delivery", "number"], name="delivery_attempt_once"),
        ]

    def __str__(self) -> str:
        return f"attempt {self.number}: {self.status or self.code}"
