"""The examination: all checks in order, each on its own feet."""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial

import redis
from django.db import DatabaseError, InterfaceError, connection
from kombu.exceptions import OperationalError as BrokerError

from airs_site.doctor import broker, database, host
from fulfillment import doctor
from fulfillment.clock import database_now
from fulfillment.doctor import Finding, Level

Check = Callable[[], Iterable[Finding]]

_DATABASE_REMEDY = "start PostgreSQL, or mend DATABASE_URL (make up runs the embedded one)"
_BROKER_REMEDY = "start Redis or Valkey, or mend REDIS_URL (make up runs the embedded one)"


def examine(*, here: Callable[[], datetime], wait: Callable[[float], object]) -> Iterator[Finding]:
    """Run all checks; what is away fails its own checks only. `here` is this host's clock.

    `wait(seconds)` pauses between two looks, where something might stand still.
    """
    for check in (host.python, host.packages, host.disks, host.secret_files):
        yield from check()
    yield from _broker(here)
    yield from _database(here, wait)


def _broker(here: Callable[[], datetime]) -> Iterator[Finding]:
    try:
        yield from broker.server(here)
        yield from broker.listeners()
    except (redis.RedisError, BrokerError, OSError, ValueError) as error:
        yield _away("broker", error, _BROKER_REMEDY)


def _database(here: Callable[[], datetime], wait: Callable[[float], object]) -> Iterator[Finding]:
    try:
        yield from database.version()
        now = database_now()
    except (DatabaseError, InterfaceError) as error:
        yield _away("postgres", error, _DATABASE_REMEDY)
        return
    checks: dict[str, Check] = {
        "postgres settings": database.server_settings,
        "migrations": database.migrations,
        "clock of PostgreSQL": partial(database.clock, here),
        "connections": database.connections,
        "tables": database.tables,
        "transactions": database.transactions,
        "services": partial(doctor.services, now),
        "dispatchers": partial(doctor.dispatchers, now),
        "executors": partial(doctor.executors, now),
        "queue": partial(doctor.queue, now),
        "raters": partial(doctor.raters, now),
        "orphans": partial(_orphans, now, wait),
    }
    for name, check in checks.items():
        try:
            # All of a check or none of it: it may fail after its first finding.
            yield from list(check())
        except (DatabaseError, InterfaceError) as error:
            # Tables that are not there yet, or a server that went away meanwhile.
            connection.close()
            yield _away(name, error, f"manage.py migrate; else {_DATABASE_REMEDY}")


def _orphans(now: datetime, wait: Callable[[float], object]) -> Iterator[Finding]:
    first = second = doctor.suspects(now)
    if any(first.values()):
        wait(doctor.LOOK_AGAIN.total_seconds())
        second = doctor.suspects(database_now())
    yield from doctor.orphans(first, second, now)


def _away(check: str, error: Exception, remedy: str) -> Finding:
    lines = str(error).strip().splitlines()
    detail = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return Finding(check=check, level=Level.FAIL, detail=detail, remedy=remedy)
