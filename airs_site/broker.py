"""Celery's broker connection: kombu's for Redis, with a client that stays.

kombu makes a Redis client for each message that it sends, takes or acknowledges, which costs more
than the commands do: 70 µs, and three times that where caches are cold.
"""

from typing import Any

from kombu.transport import redis


class Channel(redis.Channel):
    """A channel that keeps its client for as long as its connections."""

    _kept: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:  # made once a channel, by kombu itself
            return super()._create_client(asynchronous=True)  # type: ignore[misc]
        if self._kept is None or self._kept.connection_pool is not self.pool:
            self._kept = super()._create_client()  # type: ignore[misc]
        return self._kept


class Transport(redis.Transport):
    """The transport of `redis://` and `rediss://`."""

    Channel = Channel
