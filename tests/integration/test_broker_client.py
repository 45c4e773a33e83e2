"""The broker's clients: made once, and anew where their connections are gone."""

import threading
from typing import Any

import pytest
import redis
from celery import current_app

from airs_site import broker
from fulfillment import bell


def test_a_channel_keeps_its_client_for_as_long_as_its_connections() -> None:
    with current_app.connection_for_write() as connection, connection.channel() as opened:
        assert isinstance(opened, broker.Channel)
        channel: Any = opened
        with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
            assert first is second

        channel._disconnect_pools()

        with channel.conn_or_acquire() as third:
            assert third is not first
            assert third.connection_pool is channel.pool
            assert third.ping()


def test_the_bell_keeps_the_last_thousand_rings() -> None:
    bell.listen(timeout_s=0.01)

    for number in range(1_010):
        bell.ring(number=number)

    assert [s["number"] for s in bell.listen(timeout_s=1)] == list(range(10, 1_010))


def test_who_cannot_wait_hears_what_has_been_rung() -> None:
    bell.listen(timeout_s=0.01)
    assert bell.listen(timeout_s=0) == []
    bell.ring(said="first")
    bell.ring(said="second")

    assert [s["said"] for s in bell.listen(timeout_s=0)] == ["first", "second"]


def test_threads_ring_beside_one_that_listens() -> None:
    """A client that all shared would be held by whoever listens."""
    bell.listen(timeout_s=0.01)
    heard: list[Any] = []
    listener = threading.Thread(target=lambda: heard.extend(bell.listen(timeout_s=10)))

    listener.start()
    bell.ring(said="now")
    listener.join(10)

    assert heard == [{"said": "now"}]


def test_a_bell_that_cannot_be_reached_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> redis.Redis:
        raise redis.ConnectionError("nobody listens")

    monkeypatch.setattr(bell, "_client", unreachable)

    bell.ring()
