"""Celery tasks of the control queue: each reads the clock and calls one service."""

from celery import shared_task
from django.db import close_old_connections

from models_admin import external, rebalancer, services, window_tuning
from models_admin.clock import database_now


@shared_task(name="models_admin.rebalance")
def rebalance() -> None:
    """Move replicas to where the work is, in pools that ask for it."""
    close_old_connections()
    rebalancer.run_once(database_now())


@shared_task(name="models_admin.tune_windows")
def tune_windows() -> None:
    """Find the smallest window that keeps each hosted model busy."""
    close_old_connections()
    window_tuning.run_once(database_now())


@shared_task(name="models_admin.erase_expired")
def erase_expired() -> None:
    """Erase what was kept long enough: entries of the audit."""
    close_old_connections()
    services.erase_old(database_now())


@shared_task(name="models_admin.check_externals")
def check_externals() -> None:
    """Ask external models how they are."""
    close_old_connections()
    external.run_once(database_now())
