"""The way to the executors: who lives and has what, and the messages that batches leave in.

A message has a thread of an executor until its last batch has ended. A few threads are kept for
what is urgent (`policy.messages`), so that what is not may have to wait for one.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import orjson
from django.db import connection

from fulfillment import leases, prepared
from fulfillment.held import Held
from fulfillment.policy import messages
from fulfillment.policy.priority import PriorityClass, travel_step
from fulfillment.windows import Room

Sent = tuple[int, int, str]
"""A batch as executors are told of it: its id, its fence, the replica."""
Publish = Callable[[Sequence[Sent], int], None]
"""Sends a message at a Celery priority."""


def live(now: datetime) -> tuple[int, dict[str, set[str]]]:
    """Return the slots of live executors, and the plug-in versions that they have."""
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            "SELECT slots, plugins FROM fulfillment_executorboot"
            " WHERE heartbeat_at > %s::timestamptz",
            [now - leases.SILENCE],
        )
        rows = cursor.fetchall()
    plugins: dict[str, set[str]] = defaultdict(set)
    for _, names in rows:
        for name, version in orjson.loads(names).items():
            plugins[name].add(version)
    return sum(slots for slots, _ in rows), plugins


def can_wait(ready: Mapping[PriorityClass, int], room: Room, *, no_thread: bool) -> bool:
    """Say whether what is READY of a rater version may wait, batches by class."""
    highest = messages.highest_of(ready)
    return (
        highest is not None
        and room.can_wait
        and messages.can_wait(
            ready,
            most_urgent_out=room.most_urgent,
            free=room.batches(highest),
            window=room.window,
            no_thread=no_thread,
        )
    )


def send(
    claims: Mapping[tuple[int, PriorityClass], Sequence[Sent]],
    left: Mapping[PriorityClass, int],
    *,
    room: Room,
    held: Held,
    slots: int,
    publish: Publish,
) -> None:
    """Send what was claimed of a rater version, by step and class, in as few messages as is good.

    `left` is what is READY still, batches by class; `slots` are those of all executors.
    """
    threads = messages.threads_left(held.messages, slots)
    for (step, urgent), sent in _by_step(claims, _waiting(left)).items():
        size = messages.batches_a_message(
            # Where replicas have work enough, what has waited for a quarter leaves as one.
            room=room.window if room.can_wait else room.most,
            batches=len(sent),
            urgent=urgent and len(sent) < 4,
            threads=threads,
        )
        for start in range(0, len(sent), size):
            message = sent[start : start + size]
            held.send([batch_id for batch_id, _, _ in message])
            publish(message, step)


def _by_step(
    claims: Mapping[tuple[int, PriorityClass], Sequence[Sent]], waiting: Sequence[PriorityClass]
) -> Mapping[tuple[int, bool], Sequence[Sent]]:
    """Return what was claimed by the step that it travels at, and whether it is of HIGH."""
    by_step: dict[tuple[int, bool], list[Sent]] = defaultdict(list)
    for (step, cls), sent in claims.items():
        by_step[travel_step(step, cls, waiting), cls is PriorityClass.HIGH] += sent
    return by_step


def _waiting(ready: Mapping[PriorityClass, int]) -> list[PriorityClass]:
    """Return the classes that wait for room, the highest first: not what a rule holds back."""
    return sorted(cls for cls, batches in ready.items() if batches)
