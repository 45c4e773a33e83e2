"""Celery's side of the executors: the task, and the heartbeat of this boot.

`workers.rate_batches` takes `[[batch id, fence, replica], …]`. Running it twice is harmless: the
second run finds nothing to take over. It must not use Celery's retries or ETAs.
"""

import gc
import logging
import os
import socket
import threading
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import UUID

import redis
from celery import current_app, shared_task
from celery.signals import worker_ready, worker_shutting_down
from django.db import DatabaseError, InterfaceError, connection
from kombu.exceptions import OperationalError as BrokerError

from fulfillment import prepared
from fulfillment.clock import database_now
from fulfillment.models import ExecutorBoot
from fulfillment.policy.messages import BATCHES_A_THREAD
from fulfillment.policy.priority import CELERY_STEPS
from models_admin.directory import directory
from workers.autoraters import available
from workers.rating_generator import RatingGenerator

logger = logging.getLogger(__name__)

BOOT_ID = uuid.uuid4()
"""Leases belong to this run of this process."""
HEARTBEAT_S = 3.0
QUEUE = "ratings"

_leaving = threading.Event()
_at_work: set[UUID] = set()
_lock = threading.Lock()


@shared_task(name="workers.rate_batches", bind=True)
def rate_batches(self: Any, batches: Sequence[tuple[int, int, str]]) -> None:
    """Rate the batches of one message.

    One that is delivered again while it is worked on, as the broker does after a lost connection,
    is dropped: of this boot and task, it would take its batches over once more.
    """
    task_id = UUID(self.request.id)
    with _lock:
        if task_id in _at_work:
            return
        _at_work.add(task_id)
    try:
        _generator().rate(batches, task_id=task_id, step=_step(self.request))
    finally:
        with _lock:
            _at_work.discard(task_id)


def _step(request: Any) -> int:
    """Return the Celery priority that the message came with; the last where it says none."""
    step = (request.delivery_info or {}).get("priority")
    return step if isinstance(step, int) and step in CELERY_STEPS else CELERY_STEPS[-1]


@cache
def _generator() -> RatingGenerator:
    return RatingGenerator(
        boot_id=BOOT_ID,
        directory=directory,
        utc_now=lambda: datetime.now(UTC),
        ring_completion=_ring_completion,
    )


def _ring_completion(workflow_ids: Sequence[int]) -> None:
    try:
        current_app.send_task(
            "fulfillment.check_completion",
            args=[list(workflow_ids)],
            queue="control",
            priority=0,
            retry=False,
        )
    except (BrokerError, OSError, redis.RedisError) as error:
        # The checker looks every few seconds by itself.
        logger.debug("completion not rung", extra={"error": str(error)})


@worker_ready.connect
def start_heartbeat(sender: Any, **_: Any) -> None:
    """Say that this boot lives and how much it can hold, if it takes ratings at all."""
    if QUEUE not in sender.app.amqp.queues.consume_from:
        return
    # What was imported lives as long as the process: looking through it for garbage again and
    # again took a seventh of the executors' time.
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    prepared.allow_everywhere()
    _generator()
    heartbeat = _Heartbeat(slots=sender.controller.concurrency * BATCHES_A_THREAD)
    # Before the first message is looked at: a boot that nobody knows is taken for dead.
    heartbeat.beat()
    connection.close()
    threading.Thread(target=heartbeat.go_on, daemon=True).start()


@worker_shutting_down.connect
def leave(**_: Any) -> None:
    """Plan nothing more for this boot; it goes on beating while its last batches end."""
    _leaving.set()


class _Heartbeat:
    """The row of this boot."""

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._plugins = {name: plugin.version for name, plugin in available().items()}
        self._started_at: datetime | None = None

    def go_on(self) -> None:
        pause = threading.Event()
        while True:
            if _leaving.is_set():
                pause.wait(HEARTBEAT_S)
            else:
                _leaving.wait(HEARTBEAT_S)
            self.beat()

    def beat(self) -> None:
        try:
            now = database_now()
            self._started_at = self._started_at or now
            ExecutorBoot.objects.update_or_create(
                boot_id=BOOT_ID,
                defaults={
                    "host": socket.gethostname()[:255],
                    "pid": os.getpid(),
                    "slots": 0 if _leaving.is_set() else self._slots,
                    "plugins": self._plugins,
                    "started_at": self._started_at,
                    "heartbeat_at": now,
                },
            )
        except (DatabaseError, InterfaceError) as error:
            logger.warning("no heartbeat: %s", error)
            connection.close()
