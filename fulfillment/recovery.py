"""Recovery services: who runs them, and how a late one is noticed.

beat runs each by a Celery task; the dispatcher's loop runs any whose last run is older than two
periods, so that recovery does not depend on the broker it recovers from. Two runs at a time are
harmless but useless: an advisory lock lets one through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from zlib import crc32

from django.db import connection

from fulfillment import (
    commitments,
    completion,
    deliveries,
    notify,
    purging,
    queue_history,
    retention,
    shadow,
)
from fulfillment.models import ServiceRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A service that does all that is due at `now`, as often as it is called."""

    run_once: Callable[[datetime], int]
    period: timedelta
    waits: bool = False
    """Whether it waits for others than the database, or may run for long; who has to go on runs it
    in a thread."""


SERVICES: Mapping[str, Service] = {
    "completion": Service(run_once=completion.run_once, period=timedelta(seconds=5)),
    "events": Service(run_once=notify.run_once, period=timedelta(seconds=5)),
    # A run may take 30 s and is marked at its end: two periods.
    "deliveries": Service(run_once=deliveries.run_once, period=timedelta(seconds=15), waits=True),
    queue_history.SERVICE: Service(run_once=queue_history.run_once, period=queue_history.PERIOD),
    "retention": Service(run_once=retention.run_once, period=timedelta(seconds=60), waits=True),
    "purges": Service(run_once=purging.run_once, period=timedelta(seconds=5)),
    "shadow": Service(run_once=shadow.run_once, period=timedelta(seconds=60)),
    # Planning thousands of workflows takes seconds.
    commitments.SERVICE: Service(
        run_once=commitments.run_once, period=commitments.PERIOD, waits=True
    ),
}


def run(name: str, now: datetime) -> bool:
    """Run a service unless it is running; say whether it was."""
    key = crc32(f"airs.{name}".encode())
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [key])
        (free,) = cursor.fetchone()
        if not free:
            return False
        try:
            SERVICES[name].run_once(now)
            mark(name, now)
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [key])
    return True


def mark(name: str, now: datetime) -> None:
    """Remember that something ran (services, and the processes that readiness watches)."""
    ServiceRun.objects.bulk_create(
        [ServiceRun(name=name, ran_at=now)],
        update_conflicts=True,
        unique_fields=["name"],
        update_fields=["ran_at"],
    )


def late(now: datetime) -> list[str]:
    """Return the services whose last run is older than two periods.

    One that ran in the future did so before the clock was set back; it does not wait for that time.
    """
    ran = dict(ServiceRun.objects.values_list("name", "ran_at"))
    return [
        name
        for name, service in SERVICES.items()
        if name not in ran or abs(now - ran[name]) > 2 * service.period
    ]
