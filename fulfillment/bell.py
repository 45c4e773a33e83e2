"""The dispatcher's bell: a bounded Redis list that wakes it and carries what calls met.

Lossy by design: PostgreSQL holds the truth and the dispatcher looks each second anyway. A broker
that is away must not fail the caller, whose transaction has committed.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import orjson
import redis
from django.conf import settings

logger = logging.getLogger(__name__)

_KEY = "airs:bell"
_MOST = 1_000


_threads = threading.local()


def _client() -> redis.Redis:
    """Return the thread's own client, which keeps its connection: half the cost of a pool's."""
    client: redis.Redis | None = getattr(_threads, "client", None)
    if client is None:
        # Small time limits: a dead broker costs a ringer little.
        client = _threads.client = redis.Redis.from_url(
            settings.REDIS_URL,
            socket_timeout=2,
            socket_connect_timeout=1,
            health_check_interval=10,
            single_connection_client=True,
        )
    return client


def ring(**signal: Any) -> None:
    """Wake the dispatcher; `signal` tells it what calls met."""
    try:
        client = _client()
        if client.rpush(_KEY, orjson.dumps(signal)) > _MOST:
            client.ltrim(_KEY, -_MOST, -1)
    except redis.RedisError as error:
        logger.debug("bell not rung", extra={"error": str(error)})


def listen(*, timeout_s: float) -> Sequence[dict[str, Any]]:
    """Wait for a ring and return all signals there are; empty after `timeout_s`, which may be 0.

    Raises redis.RedisError when the broker is away: the caller must wait by itself.
    """
    client = _client()
    signals: list[Any] = []
    if timeout_s:  # to Redis, 0 is for ever
        rung: Any = client.blpop([_KEY], timeout=timeout_s)
        if rung is None:
            return []
        signals.append(rung[1])
    more: Any = client.lpop(_KEY, _MOST) or []
    return [orjson.loads(data) for data in (*signals, *more)]
