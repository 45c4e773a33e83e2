"""Celery tasks of the control queue: each reads the clock and calls one service."""

import logging

import redis
from celery import shared_task
from django.db import close_old_connections
from kombu.exceptions import OperationalError as BrokerError

from fulfillment import completion, recovery
from fulfillment.clock import database_now

logger = logging.getLogger(__name__)


@shared_task(name="fulfillment.check_completion")
def check_completion(workflow_ids: list[int] | None = None) -> None:
    """Check the workflows that rang, or (by beat) all that is due."""
    close_old_connections()
    if workflow_ids is not None:
        if sum(completion.check(workflow_id) for workflow_id in workflow_ids):
            _ring_outbox()
        return
    now = database_now()
    recovery.mark("beat", now)
    recovery.run("completion", now)


def _ring_outbox() -> None:
    try:
        publish_events.apply_async(priority=0, retry=False)
    except (BrokerError, OSError, redis.RedisError) as error:
        # beat has it run every few seconds anyway.
        logger.debug("outbox not rung", extra={"error": str(error)})


@shared_task(name="fulfillment.publish_events")
def publish_events() -> None:
    """Publish the events that wait, and send the webhooks that are due."""
    close_old_connections()
    recovery.run("events", database_now())
    recovery.run("deliveries", database_now())


@shared_task(name="fulfillment.erase_expired")
def erase_expired() -> None:
    """Erase what is no longer needed."""
    close_old_connections()
    recovery.run("retention", database_now())


@shared_task(name="fulfillment.sample_queue")
def sample_queue() -> None:
    """Sample the queue's depth and age."""
    close_old_connections()
    recovery.run("queue", database_now())


@shared_task(name="fulfillment.renew_forecasts")
def renew_forecasts() -> None:
    """Forecast anew how much of each open workflow is expected in time."""
    close_old_connections()
    recovery.run("commitments", database_now())


@shared_task(name="fulfillment.go_on_purging")
def go_on_purging() -> None:
    """Go on with purges that were too large for the call that ordered them."""
    close_old_connections()
    recovery.run("purges", database_now())


@shared_task(name="fulfillment.refresh_shadows")
def refresh_shadows() -> None:
    """Record what shadow refresh has computed, and give idle models more."""
    close_old_connections()
    recovery.run("shadow", database_now())
