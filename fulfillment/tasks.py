"""Celery tasks of the control queue: each reads the clock and calls one service."""

from celery import shared_task
from django.db import close_old_connections

from fulfillment import completion, recovery
from fulfillment.clock import database_now


@shared_task(name="fulfillment.check_completion")
def check_completion(workflow_ids: list[int] | None = None) -> None:
    """Check the workflows that rang, or (by beat) all that is due."""
    close_old_connections()
    if workflow_ids is not None:
        for workflow_id in workflow_ids:
            completion.check(workflow_id)
        return
    now = database_now()
    recovery.mark("beat", now)
    recovery.run("completion", now)


@shared_task(name="fulfillment.erase_expired")
def erase_expired() -> None:
    """Erase what is no longer needed."""
    close_old_connections()
    recovery.run("retention", database_now())
