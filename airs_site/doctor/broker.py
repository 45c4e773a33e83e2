"""Redis or Valkey, and who listens to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import redis
from celery import current_app
from django.conf import settings

from airs_site.doctor.database import by_skew
from fulfillment.doctor import Finding, Level

OLDEST_REDIS = (6, 2)
_TIMEOUT_S = 3
_LISTENERS_S = 2.0


def server(here: Callable[[], datetime]) -> Iterator[Finding]:
    """Examine the server; raises what redis-py raises."""
    with redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
    ) as client:
        before = here()
        seconds, microseconds = client.time()
        after = here()
        info: Mapping[str, Any] = client.info("everything")
    yield from judge(info)
    there = datetime.fromtimestamp(seconds + microseconds / 1e6, UTC)
    yield by_skew("clock of the broker", before, there, after)


def judge(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge what the server says of itself (INFO)."""
    yield _version(info)
    yield _policy(info)
    yield _persistence(info)
    yield _memory(info)


def _version(info: Mapping[str, Any]) -> Finding:
    # Valkey says 7.2 as its Redis version, whatever its own is.
    shown = info["redis_version"]
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {shown}"
    if tuple(map(int, shown.split(".")[:2])) < OLDEST_REDIS:
        return Finding(
            check="broker",
            level=Level.FAIL,
            detail=name,
            remedy="upgrade it: Redis 6.2 or later, or Valkey",
        )
    return Finding(check="broker", level=Level.OK, detail=name)


def _policy(info: Mapping[str, Any]) -> Finding:
    policy = info["maxmemory_policy"]
    if policy != "noeviction":
        return Finding(
            check="broker eviction",
            level=Level.FAIL,
            detail=f"maxmemory-policy is {policy}: messages may vanish when memory is short",
            remedy="set maxmemory-policy to noeviction",
        )
    return Finding(check="broker eviction", level=Level.OK, detail=policy)


def _persistence(info: Mapping[str, Any]) -> Finding:
    if info["aof_enabled"]:
        return Finding(check="broker persistence", level=Level.OK, detail="append-only file")
    return Finding(
        check="broker persistence",
        level=Level.WARN,
        detail="no append-only file: a restart loses messages, which are sent again after 15 s",
        remedy="set appendonly yes",
    )


def _memory(info: Mapping[str, Any]) -> Finding:
    used, most = info["used_memory"], info["maxmemory"]
    detail = f"{used >> 20} MiB of {most >> 20 if most else 'unlimited'}"
    if most and used > 0.8 * most:
        return Finding(
            check="broker memory",
            level=Level.WARN,
            detail=detail,
            remedy="find what fills it (redis-cli --bigkeys): AIRS needs a few MiB; or raise"
            " maxmemory",
        )
    return Finding(check="broker memory", level=Level.OK, detail=detail)


def listeners() -> Iterator[Finding]:
    """Ask Celery's workers which queues they take from."""
    inspect = current_app.control.inspect(timeout=_LISTENERS_S)
    yield from judge_listeners(inspect.active_queues() or {})


def judge_listeners(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """Judge the queues that workers, by name, take from."""
    for queue, why in (
        ("control", "completion, retention and webhooks run late, by the dispatcher"),
        ("ratings", "nothing is rated"),
    ):
        names = sorted(
            name for name, queues in answers.items() if any(q["name"] == queue for q in queues)
        )
        if names:
            detail = f"{len(names)} of the queue {queue}"
            yield Finding(check="workers", level=Level.OK, detail=detail)
        else:
            yield Finding(
                check="workers",
                level=Level.FAIL,
                detail=f"none takes from the queue {queue}: {why}",
                remedy=f"start `celery -A airs_site.celery worker -Q {queue} -P threads`",
            )
