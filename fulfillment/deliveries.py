"""Sends what is due to webhook endpoints, signed, and writes down how it went.

One attempt, step by step:

1. Claim: a lease in the database, at most PER_RECEIVER at a time for one host and port, so that a
   slow one holds up nobody else.
2. Send (outgoing): the stored bytes, signed with a fresh time over exactly them.
3. Record: the attempt, and what becomes of the delivery (policy/delivery), in one transaction.

Killed between 2 and 3, the lease ends and the same id and bytes go out again: at least once, and
receivers tell repeats by `webhook-id`. Nothing here changes a workflow.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db import connection, transaction
from standardwebhooks import Webhook

from fulfillment import outgoing, webhooks
from fulfillment.clock import database_now
from fulfillment.models import Delivery, DeliveryAttempt, WebhookEndpoint
from fulfillment.outgoing import LookUp, Sending
from fulfillment.policy.delivery import (
    GONE,
    RETRY_FOR,
    Answer,
    Decision,
    DeliveryState,
    decide,
)
from fulfillment.policy.webhook_body import CONTENT_TYPES, WebhookFormat
from fulfillment.retry_after import parse_retry_after

logger = logging.getLogger(__name__)

AT_A_TIME: Final = 64
PER_RECEIVER: Final = 4
LEASE: Final = timedelta(seconds=outgoing.LIMIT_S + 20)
"""An attempt's limit, and time to record it beside all others."""
RUN: Final = timedelta(seconds=20)
"""A run claims no more after it, and ends when the attempts that it has begun do."""
_LOOK_AGAIN_S = 0.25

_CLAIM = """
WITH RECURSIVE receivers(name) AS (
    (SELECT min(receiver) FROM fulfillment_delivery WHERE state = 0)
    UNION ALL
    SELECT (SELECT min(d.receiver) FROM fulfillment_delivery d
            WHERE d.state = 0 AND d.receiver > r.name)
    FROM receivers r WHERE r.name IS NOT NULL
), due AS (
    SELECT c.id, c.due_at, row_number() OVER (PARTITION BY r.name ORDER BY c.due_at, c.id) AS place
    FROM receivers r CROSS JOIN LATERAL (
        SELECT d.id, d.due_at FROM fulfillment_delivery d
        WHERE d.receiver = r.name AND d.state = 0 AND d.due_at <= %(now)s
          AND (d.lease_until IS NULL OR d.lease_until <= %(now)s)
        ORDER BY d.due_at, d.id
        LIMIT greatest(0, %(per_receiver)s - (
            SELECT count(*) FROM fulfillment_delivery l
            WHERE l.receiver = r.name AND l.state = 0 AND l.lease_until > %(now)s))
        FOR UPDATE SKIP LOCKED
    ) c WHERE r.name IS NOT NULL
), chosen AS (SELECT id FROM due ORDER BY place, due_at LIMIT %(room)s)
UPDATE fulfillment_delivery d SET lease_until = %(lease_until)s, fence = fence + 1
FROM chosen, fulfillment_event v WHERE d.id = chosen.id AND v.id = d.event_id
RETURNING d.id, d.fence, d.endpoint_id, v.public_id, d.body, d.attempts + 1
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """A delivery in the hands of this process, until its lease ends."""

    delivery_id: int
    fence: int
    endpoint_id: int
    event_id: str
    body: bytes
    number: int
    claimed_at: datetime


def run_once(now: datetime, *, look_up: LookUp | None = None) -> int:
    """Send what is due, and what becomes due meanwhile; return how many attempts were made."""
    claimed = claim(now, room=AT_A_TIME)
    if not claimed:
        return 0
    attempts, began_at = 0, now
    with Sending[Claimed](capacity=AT_A_TIME, look_up=look_up) as sending:
        while claimed or sending.in_flight:
            for one in claimed:
                attempts += 1
                _send(sending, one)
            for attempt in sending.ended(timeout_s=_LOOK_AGAIN_S):
                record(
                    attempt.token,
                    attempt.answer,
                    duration_s=attempt.duration_s,
                    retry_after=attempt.retry_after,
                )
            now = database_now()
            room = AT_A_TIME - sending.in_flight
            claimed = claim(now, room=room) if room and now - began_at < RUN else []
    return attempts


def claim(now: datetime, *, room: int) -> Sequence[Claimed]:
    """Lease at most `room` due deliveries, first one of each receiver, then the second ones."""
    with connection.cursor() as cursor:
        cursor.execute(
            _CLAIM,
            {
                "now": now,
                "room": room,
                "per_receiver": PER_RECEIVER,
                "lease_until": now + LEASE,
            },
        )
        return [
            Claimed(
                delivery_id=delivery_id,
                fence=fence,
                endpoint_id=endpoint_id,
                event_id=event_id,
                body=bytes(body),
                number=number,
                claimed_at=now,
            )
            for delivery_id, fence, endpoint_id, event_id, body, number in cursor.fetchall()
        ]


def _send(sending: Sending[Claimed], claimed: Claimed) -> None:
    endpoint = WebhookEndpoint.objects.filter(pk=claimed.endpoint_id).first()
    if endpoint is None:  # deleted, and its delivery with it
        return
    key = webhooks.signing_key(endpoint)
    if key is None:
        logger.error("the secret of a webhook endpoint cannot be read: SECRET_KEY was changed")
        record(claimed, Answer(code="secret_unreadable"), duration_s=0.0)
        return
    sending.post(
        claimed,
        url=endpoint.url,
        body=claimed.body,
        headers={
            "Content-Type": CONTENT_TYPES[WebhookFormat(endpoint.format)],
            "AIRS-Attempt": str(claimed.number),
            **signature(key, event_id=claimed.event_id, at=claimed.claimed_at, body=claimed.body),
        },
    )


def signature(key: bytes, *, event_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Return the headers of Standard Webhooks for these bytes, sent at this time."""
    at = at.replace(microsecond=0)
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": Webhook(key).sign(event_id, at, body.decode()),
    }


def record(
    claimed: Claimed, answer: Answer, *, duration_s: float, retry_after: str | None = None
) -> DeliveryState | None:
    """Write an attempt down and decide what becomes of its delivery.

    Return its state, None if the lease was lost or the delivery deleted: an attempt whose lease
    was lost is only written down.
    """
    with transaction.atomic():
        # Always before the delivery: 410 changes other deliveries of the endpoint as well.
        endpoint = (
            WebhookEndpoint.objects.select_for_update(no_key=True)
            .filter(pk=claimed.endpoint_id)
            .first()
        )
        delivery = Delivery.objects.select_for_update().filter(pk=claimed.delivery_id).first()
        if endpoint is None or delivery is None:
            return None
        now = database_now()
        decision = decide(
            answer,
            tries=delivery.tries + 1,
            began_at=delivery.began_at,
            now=now,
            draw=random.random(),
            asked_s=parse_retry_after(retry_after, now, longest_s=RETRY_FOR.total_seconds()),
        )
        delivery.attempts += 1
        DeliveryAttempt.objects.create(
            delivery=delivery,
            number=delivery.attempts,
            started_at=claimed.claimed_at,
            duration_s=round(duration_s, 3),
            status=answer.status,
            code=decision.code,
        )
        if delivery.fence != claimed.fence or delivery.state != DeliveryState.PENDING:
            delivery.save(update_fields=["attempts"])
            return None
        _apply(decision, delivery, endpoint, now=now)
    extra = {"delivery": delivery.public_id, "reason": decision.reason}
    if decision.state in {DeliveryState.GIVEN_UP, DeliveryState.DISABLED}:
        logger.warning("webhook given up: %s", decision.reason, extra=extra)
    else:
        logger.debug("webhook sent: %s", decision.reason, extra=extra)
    return decision.state


def _apply(
    decision: Decision, delivery: Delivery, endpoint: WebhookEndpoint, *, now: datetime
) -> None:
    delivery.state, delivery.code = decision.state, decision.code
    delivery.tries += 1
    delivery.lease_until = None
    if decision.retry_at is not None:
        delivery.due_at = decision.retry_at
    else:
        delivery.finished_at = now
    delivery.save()
    if decision.state is DeliveryState.DISABLED:
        endpoint.disabled_at, endpoint.disabled_reason = now, GONE
        endpoint.save(update_fields=["disabled_at", "disabled_reason"])
        endpoint.deliveries.filter(state=DeliveryState.PENDING).update(
            state=DeliveryState.DISABLED, code=GONE, lease_until=None, finished_at=now
        )
    elif decision.state is DeliveryState.DELIVERED and endpoint.disabled_at is not None:
        # A person had it replayed, and the receiver takes events again.
        endpoint.disabled_at, endpoint.disabled_reason = None, ""
        endpoint.save(update_fields=["disabled_at", "disabled_reason"])


def replay(delivery_id: int, *, now: datetime) -> Delivery:
    """Send a delivery again, the same id and bytes, whatever became of it before.

    It is tried for another day. An attempt that is on its way is not waited for: it is only
    written down. A disabled endpoint is sent to as well, and enabled if it takes it.
    """
    with transaction.atomic():
        delivery = Delivery.objects.select_for_update().get(pk=delivery_id)
        delivery.state = DeliveryState.PENDING
        delivery.tries = 0
        delivery.began_at = delivery.due_at = now
        delivery.lease_until, delivery.finished_at = None, None
        delivery.fence += 1
        delivery.save()
    return delivery
