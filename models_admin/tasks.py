"""Celery tasks of the control queue: each reads the clock and calls one service."""

from celery import shared_task
from django.db import close_old_connections

from models_admin import rebalancer
from models_admin.clock import database_now


@shared_task(name="models_admin.rebalance")
def rebalance() -> None:
    """Move replicas to where the work is, in pools that ask for it."""
    close_old_connections()
    rebalancer.run_once(database_now())
