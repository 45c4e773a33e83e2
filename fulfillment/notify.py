"""The outbox: makes of each event a delivery an endpoint, and sends its signal.

The event was written in the transaction that finished its workflow, so none is lost and there is
one a round; here each is published at least once. Killed at any line, the next run goes on: a
delivery is unique to its event and endpoint, and only what is marked as published is left alone.
"""

import logging
from datetime import datetime

from django.db import DatabaseError, InterfaceError, transaction
from django.db.models import Q

from fulfillment import signals
from fulfillment.models import Delivery, Event, WebhookEndpoint
from fulfillment.policy.addresses import receiver_of
from fulfillment.policy.webhook_body import Fact, WebhookFormat, body_of

logger = logging.getLogger(__name__)

_EVENTS = 1_000
"""Published in a run."""


def run_once(now: datetime) -> int:
    """Publish the events that wait; return how many."""
    waiting = Event.objects.filter(published_at=None).order_by("pk").values_list("pk", flat=True)
    return sum(_published(event_id, now) for event_id in waiting[:_EVENTS])


def _published(event_id: int, now: datetime) -> bool:
    try:
        return publish(event_id, now=now)
    except (DatabaseError, InterfaceError):
        raise
    except Exception:  # one event must not hold up the others; it is tried again
        logger.exception("an event was not published", extra={"event": event_id})
        return False


def publish(event_id: int, *, now: datetime) -> bool:
    """Make the deliveries of an event and send its signal; say whether it was this call."""
    event = make_deliveries(event_id, now=now)
    if event is None:
        return False
    _send_signal(event)
    return bool(Event.objects.filter(pk=event_id, published_at=None).update(published_at=now))


def make_deliveries(event_id: int, *, now: datetime) -> Event | None:
    """Store a delivery for each endpoint that is to hear of an event; None if it is published."""
    with transaction.atomic():
        event = (
            Event.objects.select_for_update(of=("self",), skip_locked=True)
            .select_related("workflow")
            .filter(pk=event_id, published_at=None)
            .first()
        )
        if event is not None:
            Delivery.objects.bulk_create(
                [_delivery(event, endpoint, now) for endpoint in _endpoints(event)],
                ignore_conflicts=True,
            )
    return event


def _endpoints(event: Event) -> list[WebhookEndpoint]:
    """Return who is to hear of an event, one an address: the workflow's own comes first."""
    found = (
        # Locked, so that none is deleted before its delivery is stored.
        WebhookEndpoint.objects.select_for_update(no_key=True)
        .filter(
            Q(workflow_id=event.workflow_id)
            | Q(workflow=None, owner=event.workflow.owner, created_at__lte=event.created_at),
            disabled_at=None,
        )
        .order_by("pk")
    )
    by_address: dict[str, WebhookEndpoint] = {}
    for endpoint in sorted(found, key=lambda e: e.workflow_id is None):
        by_address.setdefault(endpoint.url, endpoint)
    return list(by_address.values())


def _delivery(event: Event, endpoint: WebhookEndpoint, now: datetime) -> Delivery:
    fact = Fact(
        id=event.public_id,
        kind=event.kind,
        workflow=event.workflow.public_id,
        occurred_at=event.created_at,
        data=event.data,
    )
    return Delivery(
        event=event,
        endpoint=endpoint,
        receiver=receiver_of(endpoint.url),
        body=body_of(fact, WebhookFormat(endpoint.format)),
        began_at=now,
        due_at=now,
        created_at=now,
    )


def _send_signal(event: Event) -> None:
    called = signals.workflow_finished.send_robust(
        sender=Event,
        event_id=event.public_id,
        workflow_id=event.workflow.public_id,
        round=event.round,
        state=event.data["state"],
        data=event.data,
    )
    for receiver, problem in called:
        if isinstance(problem, Exception):
            logger.error(
                "a receiver of workflow_finished failed",
                extra={"receiver": repr(receiver), "event": event.public_id},
                exc_info=problem,
            )
