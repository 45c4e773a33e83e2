"""`manage.py dispatch`: lead, or stand by until the leader is gone."""

import logging
import os
import signal
import threading
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import redis
from celery import current_app
from django.core.management.base import BaseCommand
from django.db import DatabaseError, InterfaceError, connection
from kombu import Producer
from kombu.exceptions import OperationalError as BrokerError

from fulfillment import bell, claim, clock_steps, dispatch, leases, recovery, usage, windows
from fulfillment.clock import database_now
from fulfillment.model_directory import (
    LastKnown,
    ModelDescription,
    Replica,
    model_directory,
)
from fulfillment.policy.limits import Rule

logger = logging.getLogger(__name__)

TASK, QUEUE = "workers.rate_batches", "ratings"
STAND_BY_S = 1.0
LISTEN_S = 1.0
REST_FACTOR = 2.0
"""Rest after a pass, by the CPU time that it took: rings of many messages share a pass, a model of
a small window gets its next batch soon, and this process takes a third of a core at most."""
SHORTEST_REST_S, LONGEST_REST_S = 0.005, 0.05
GLANCE_S = 0.5
"""How long the list of replicas is believed: reading it costs as much as the rest of a pass."""
SECOND = timedelta(seconds=1)
MARK_EVERY = timedelta(seconds=5)
TRUST_AFTER_S = 10.0
"""Once the database was away, heartbeats are believed after executors had time to send one."""
CLOCK_JUMP_S = 30.0


class Publisher:
    """Sends messages as Celery's `send_task` does, for half of its cost: the producer stays."""

    def __init__(self) -> None:
        self._producer: Producer | None = None

    def __call__(self, batches: Sequence[tuple[int, int, str]], priority: int) -> None:
        """Send one message; if the broker is away, the pick-up leases bring the batches back."""
        task_id = str(uuid.uuid4())
        message = current_app.amqp.as_task_v2(
            task_id, TASK, args=(batches,), argsrepr=str(batches), kwargsrepr="{}"
        )
        try:
            if self._producer is None:
                self._producer = current_app.amqp.Producer(current_app.connection_for_write())
            self._producer.publish(
                message.body,
                headers=message.headers,
                serializer="json",
                exchange="",
                routing_key=QUEUE,
                priority=priority,
                **message.properties,
            )
        except (BrokerError, OSError, redis.RedisError) as error:
            logger.warning("broker is away", extra={"error": str(error)})
            self.close()

    def close(self) -> None:
        """Close the connection; the next message opens one."""
        producer, self._producer = self._producer, None
        if producer is not None and producer.connection is not None:
            producer.connection.release()


class Glance:
    """The model directory as it was a moment ago."""

    def __init__(self, directory: LastKnown) -> None:
        self._directory = directory
        self._read_at = -GLANCE_S
        self._replicas: Sequence[Replica] = ()

    def describe(self, model_id: str) -> ModelDescription | None:
        """Ask the directory itself."""
        return self._directory.describe(model_id)

    def replicas(self, now: datetime) -> Sequence[Replica]:
        """Return what could be sent to at most half a second ago."""
        if time.monotonic() - self._read_at >= GLANCE_S:
            self._replicas = self._directory.replicas(now)
            self._read_at = time.monotonic()
        return self._replicas

    def coming(self, now: datetime) -> Sequence[tuple[str, str]]:
        """Return what was on its way then."""
        return self._directory.coming(now)

    def limits(self, now: datetime) -> Sequence[Rule]:
        """Return the traffic rules that hold."""
        return self._directory.limits(now)


class Command(BaseCommand):
    """Runs until SIGTERM or SIGINT."""

    help = "Send batches to executors as models have room; one leads, others stand by."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take no arguments but Django's own."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Lead or stand by until told to stop."""
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        while not stop.is_set():
            try:
                if dispatch.lead(f"airs-dispatch-{os.getpid()}"):
                    logger.info("leading")
                    _Leader().run(stop)
                else:
                    stop.wait(STAND_BY_S)
            except (DatabaseError, InterfaceError) as error:
                logger.warning("database is away: %s", error)
                connection.close()
                stop.wait(STAND_BY_S)
        connection.close()


class _Beside:
    """Runs services that wait for others, one at a time, in a thread with its own connection."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def run(self, name: str, now: datetime) -> None:
        """Begin to run a service, unless the last one still runs."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, args=(name, now), daemon=True)
            self._thread.start()

    @staticmethod
    def _run(name: str, now: datetime) -> None:
        try:
            recovery.run(name, now)
        except Exception:  # the dispatcher goes on whatever is wrong with a service
            logger.exception("a service failed", extra={"service": name})
        finally:
            connection.close()


def _remembered(now: datetime) -> dispatch.Memory:
    """Return what the last leader wrote down."""
    return dispatch.Memory(windows=windows.recall(now), orders=usage.recall(now))


class _Leader:
    """One term of leadership: ends when the database connection does."""

    def __init__(self) -> None:
        self._memory = _remembered(database_now())
        self._directory = Glance(LastKnown(model_directory()))
        self._publish = Publisher()
        self._beside = _Beside()
        self._trust_from = time.monotonic() + TRUST_AFTER_S
        self._hold_until: datetime | None = None
        self._last: tuple[datetime, float] | None = None
        self._looked_at: datetime | None = None
        self._marked_at: datetime | None = None

    def run(self, stop: threading.Event) -> None:
        signals: Sequence[Mapping[str, Any]] = []
        while not stop.is_set():
            began_at = time.thread_time()
            more = self._pass(signals)
            took_s = time.thread_time() - began_at
            stop.wait(min(max(REST_FACTOR * took_s, SHORTEST_REST_S), LONGEST_REST_S))
            signals = _listen(stop, 0.0 if more else LISTEN_S)

    def _pass(self, signals: Sequence[Mapping[str, Any]]) -> bool:
        now = database_now()
        self._watch_clock(now)
        second = self._due(self._looked_at, now, SECOND)
        if second and self._hold_until is None:
            leases.expire(now=now, trust_heartbeats=time.monotonic() > self._trust_from)
            self._memory.held.forget()
        leases.wake(now=now, sweep=second)
        if second:
            claim.look_again(now)
            self._looked_at = now
        dispatch.observe(self._memory, signals, now)
        done = dispatch.run_once(
            now, memory=self._memory, directory=self._directory, publish=self._publish
        )
        if self._due(self._marked_at, now, MARK_EVERY):
            recovery.mark("dispatcher", now)
            windows.remember(self._memory.windows, now)
            usage.remember(self._memory.orders, self._memory.over, now)
            self._marked_at = now
            for name in recovery.late(now):
                logger.info("running a late service", extra={"service": name})
                if recovery.SERVICES[name].waits:
                    self._beside.run(name, now)
                    continue
                try:
                    recovery.run(name, now)
                except (DatabaseError, InterfaceError):
                    raise
                except Exception:  # sending must go on whatever is wrong with a service
                    logger.exception("a service failed", extra={"service": name})
        return done.full

    @staticmethod
    def _due(last: datetime | None, now: datetime, period: timedelta) -> bool:
        return last is None or not timedelta(0) <= now - last < period

    def _watch_clock(self, now: datetime) -> None:
        """Follow the clock when wall and monotonic time part by 30 s.

        Heartbeats are older than they look, or newer: nothing expires until there are fresh ones.
        """
        monotonic = time.monotonic()
        if self._last is not None:
            wall, before = self._last
            drift = (now - wall).total_seconds() - (monotonic - before)
            if abs(drift) > CLOCK_JUMP_S:
                logger.error("the clock jumped by %.0f s; leases are not ended for a while", drift)
                clock_steps.follow(before=now - timedelta(seconds=drift), now=now)
                self._hold_until = now + leases.SILENCE
        self._last = (now, monotonic)
        if self._hold_until is not None and now >= self._hold_until:
            self._hold_until = None


def _listen(stop: threading.Event, timeout_s: float) -> Sequence[Mapping[str, Any]]:
    try:
        return bell.listen(timeout_s=timeout_s)
    except redis.RedisError:
        stop.wait(timeout_s / 4)
        return []
