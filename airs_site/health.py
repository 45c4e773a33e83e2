"""`/healthz` (this process answers) and `/readyz` (the parts behind it do).

Open to anyone, so that load balancers and supervisors need no token: names of parts, ages and
kinds of errors, nothing else. Liveness never asks the database, or a database that is away would
have every web process restarted.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import orjson
import redis
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection
from django.http import HttpRequest, HttpResponse

from fulfillment import windows
from fulfillment.clock import database_now
from fulfillment.models import ExecutorBoot, SendWindow, ServiceRun

TICK_LIMIT = timedelta(seconds=30)
"""Dispatcher and beat are taken for dead when they last ran longer ago."""
HEARTBEAT_LIMIT = timedelta(seconds=15)
_BROKER_TIMEOUT_S = 1

Check = dict[str, Any]


def live(request: HttpRequest) -> HttpResponse:
    """Answer that this process serves requests."""
    return _answer(200, {"status": "ok"})


def ready(request: HttpRequest) -> HttpResponse:
    """Answer 200 if work that is accepted now will be done, else 503 and what is missing."""
    checks = {"database": _checked(_database), "broker": _checked(_broker)}
    if checks["database"]["ok"]:
        now = database_now()
        checks["dispatcher"] = _checked(lambda: _service("dispatcher", now))
        checks["beat"] = _checked(lambda: _service("beat", now))
        checks["executors"] = _checked(lambda: _executors(now))
        checks["models"] = _checked(lambda: _models(now))
    all_ok = all(check["ok"] for check in checks.values()) and "executors" in checks
    return _answer(
        200 if all_ok else 503, {"status": "ok" if all_ok else "unavailable", "checks": checks}
    )


def _checked(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (DatabaseError, InterfaceError, redis.RedisError, OSError) as error:
        # The kind only: the text may hold an address.
        return {"ok": False, "detail": type(error).__name__}


def _database() -> Check:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return {"ok": True}


def _broker() -> Check:
    with redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=_BROKER_TIMEOUT_S,
        socket_connect_timeout=_BROKER_TIMEOUT_S,
    ) as client:
        client.ping()
    return {"ok": True}


def _service(name: str, now: datetime) -> Check:
    ran_at = ServiceRun.objects.filter(pk=name).values_list("ran_at", flat=True).first()
    return _by_age(ran_at, now, TICK_LIMIT)


def _executors(now: datetime) -> Check:
    """Say whether any executor lives, and how many."""
    living = ExecutorBoot.objects.filter(heartbeat_at__gte=now - HEARTBEAT_LIMIT)
    newest = living.order_by("-heartbeat_at").values_list("heartbeat_at", flat=True).first()
    return {**_by_age(newest, now, HEARTBEAT_LIMIT), "living": living.count()}


def _models(now: datetime) -> Check:
    """Say whether replicas are sent to at a guess, as model management is silent.

    That is no reason to refuse work: it goes on within adaptive windows.
    """
    written_at = now - windows.RECALLED
    silent = SendWindow.objects.filter(reason=windows.SILENT, written_at__gte=written_at).count()
    if not silent:
        return {"ok": True}
    return {"ok": True, "detail": f"{windows.SILENT}: {silent} replicas have an adaptive window"}


def _by_age(at: datetime | None, now: datetime, limit: timedelta) -> Check:
    if at is None:
        return {"ok": False, "detail": "not seen"}
    age = max(now - at, timedelta())
    return {"ok": age <= limit, "age_s": round(age.total_seconds(), 1)}


def _answer(status: int, data: Check) -> HttpResponse:
    return HttpResponse(
        orjson.dumps(data),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
