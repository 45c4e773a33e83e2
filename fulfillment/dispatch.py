"""The dispatcher: decides which batch leaves now, claims it, and hands it to Celery.

Work is sent when there is room and not before: a pass reads what may be sent and what is out from
PostgreSQL, asks the policies, claims in one transaction, and publishes after COMMIT. If it dies
in between, the pick-up lease ends and the batches go again.

One dispatcher leads: it holds an advisory lock on the very connection it claims with, so that a
lost lock cannot claim. A frozen leader loses that connection to `idle_session_timeout`.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db import OperationalError, connection

from fulfillment import common_room, executors, prepared, regulation
from fulfillment.claim import Pass, claim
from fulfillment.executors import Publish
from fulfillment.fleet import Fleet
from fulfillment.held import Held
from fulfillment.model_directory import ModelDirectory
from fulfillment.policy import fairness, lines, messages, ordering, places, quota, traffic
from fulfillment.policy.fairness import OverShare
from fulfillment.policy.priority import PriorityClass
from fulfillment.ready import Sight, VersionLoad
from fulfillment.windows import Room, Windows

logger = logging.getLogger(__name__)

LEADER_LOCK = 0x41495253  # "AIRS"
FROZEN_S = 10
"""Idle time after which PostgreSQL takes the connection of a leader that stands still."""
REST = timedelta(seconds=2)
"""How long nothing is sent to a replica that refused a connection or is warming up."""
MOST_CLAIMS = 20
"""Of a rater in one pass, which claims again while what it claims is not there."""


@dataclass(kw_only=True, slots=True)
class Memory:
    """What the leader remembers between passes; losing it costs a little order, no work."""

    sight: Sight = field(default_factory=Sight)
    orders: dict[int, ordering.Memory] = field(default_factory=dict)
    over: dict[int, Mapping[str, OverShare]] = field(default_factory=dict)
    """Owners over their share, by rater version, as they were when it was last served."""
    credits: dict[str, places.Credits] = field(default_factory=dict)
    """Of classes, by model that several rater versions share."""
    servings: dict[int, int] = field(default_factory=dict)
    """The number of the serving in which something of a rater version was sent last."""
    serving: int = 0
    held: Held = field(default_factory=Held)
    slots: int = 0
    """Of all executors, as the last pass found them."""
    windows: Windows = field(default_factory=Windows)
    buckets: dict[str, quota.Bucket] = field(default_factory=dict)
    """Of raters with a `max_qps`. Executors pace the calls of a batch; those that they could not
    foresee (bisecting, asking once more) are charged when they tell, and sent later for it."""
    resting: dict[str, datetime] = field(default_factory=dict)
    """Until when a replica that was not there is left alone."""


def lead(name: str) -> bool:
    """Try to become the leader on this connection, which pg_stat_activity then shows as `name`."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('application_name', %s, false)", [name])
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK])
        (leads,) = cursor.fetchone()
        if leads:
            cursor.execute(f"SET idle_session_timeout = '{FROZEN_S}s'")
            # All that a pass reads has an index; the planner, whose statistics of tables that
            # fill and empty within seconds are always old, would scan the archive at times: this
            # also turns scans off.
            prepared.allow(connection)
    return bool(leads)


def observe(memory: Memory, signals: Sequence[Mapping[str, Any]], now: datetime) -> None:
    """Learn from what executors met: windows of external models adapt, silent replicas rest."""
    # Whoever brings or changes work says nothing else.
    if not all(signals):
        memory.sight.ring()
    memory.held.ring(s["replica"] for s in signals if "replica" in s)
    for replica in {s["replica"] for s in signals if s.get("away")}:
        memory.resting[replica] = now + REST
    # A clock that was set back must not let them rest until it catches up.
    memory.resting = {r: t for r, t in memory.resting.items() if now < t <= now + REST}
    met: dict[str, list[traffic.Signal]] = defaultdict(list)
    for signal in signals:
        if "replica" in signal:
            met[signal["replica"]].append(
                traffic.Signal(
                    priority_class=PriorityClass(signal["cls"]),
                    succeeded=signal["succeeded"],
                    overloaded=signal["overloaded"],
                    refused_at=now - timedelta(seconds=signal.get("refused_ago_s", 0.0)),
                )
            )
    for replica, of_replica in met.items():
        if replica in memory.windows.open:
            memory.windows.open[replica] = traffic.adapt(
                memory.windows.open[replica], of_replica, now
            )
    for signal in signals:
        bucket = memory.buckets.get(signal.get("rater", ""))
        if bucket is not None:
            memory.buckets[signal["rater"]] = quota.spend(bucket, signal["further"])


def run_once(now: datetime, *, memory: Memory, directory: ModelDirectory, publish: Publish) -> Pass:
    """Fill all free room of all raters; return what was done."""
    total_slots, plugins = executors.live(now)
    if not total_slots:
        return Pass()
    usages = {version_id: order.usage for version_id, order in memory.orders.items()}
    sight = memory.sight
    rules = regulation.rules(directory, now)
    sight.regulate(rules)
    memory.held.regulate(rules)
    versions = sight.look(now, usages)
    if not versions:
        return Pass()
    memory.held.look(now)
    fleet = Fleet(directory, resting=memory.resting, held=memory.held, now=now)
    # Of many raters most are full at any time: a few hundred nanoseconds each.
    served = [
        version
        for version in versions
        if fleet.may_take(version) and version.plugin_version in plugins.get(version.autorater, ())
    ]
    # Where there is not enough for all, whoever waits longest comes first among equals.
    served.sort(key=lambda version: memory.servings.get(version.version_id, 0))
    rooms = {version.version_id: fleet.room(version, memory.windows) for version in served}
    lined_up = partial(_line_up, rooms=rooms, fleet=fleet, sight=sight)
    ready = partial(_ready_of, lined_up=lined_up, rooms=rooms, memory=memory)
    memory.slots = total_slots
    no_thread = messages.threads_left(memory.held.messages, total_slots) == 0
    # By model: whoever shares one with what leaves would lose its turns in it.
    leaving = {
        version.model_id
        for version in served
        if not executors.can_wait(ready(version), rooms[version.version_id], no_thread=no_thread)
    }
    served = [version for version in served if version.model_id in leaving]
    wanted = {
        version.version_id: min(
            rooms[version.version_id].most,
            _may_leave(version, rooms[version.version_id], memory),
            _batches_allowed(version, rooms[version.version_id], memory, now),
        )
        for version in served
    }
    slots = quota.slots_for(
        wanted,
        total_slots - memory.held.total,
        {version.version_id: memory.held.of(version.version_id) for version in served},
        total_slots,
    )
    able = [version for version in served if slots[version.version_id] > 0]
    shares = common_room.share(
        able,
        slots,
        rooms,
        ready=ready,
        held=memory.held,
        credits=memory.credits,
    )
    left = dict(slots)
    done = Pass()
    for version, share in common_room.turns(able, shares, left):
        room = rooms[version.version_id]
        passed = _serve(version, lined_up(version), room, share, now, memory, publish)
        left[version.version_id] -= passed.sent
        done += passed
    if total_slots > memory.held.total and any(
        version.version_id in sight.short
        and not _may_leave(version, rooms[version.version_id], memory)
        and rooms[version.version_id].batches(PriorityClass.HIGH)
        for version in served
    ):
        # There is room, and what was READY for it is used up: soon there is another reading.
        sight.ring()
        done = replace(done, full=True)
    if done.sent and total_slots > memory.held.total and any(v.kind_of for v in served):
        # What rules would let leave was reckoned beforehand: there may be room for more.
        done = replace(done, full=True)
    return done


def _may_leave(version: VersionLoad, room: Room, memory: Memory) -> int:
    """Return how many READY batches of a version are left, of those that rules let leave."""
    if not version.kind_of:
        return memory.sight.wanted(version)
    taken = memory.sight.taken_of(version)
    return sum(regulation.may_leave(version, room, memory.held, taken).values())


def _ready_of(
    version: VersionLoad,
    *,
    lined_up: Callable[[VersionLoad], lines.Order],
    rooms: Mapping[int, Room],
    memory: Memory,
) -> Mapping[PriorityClass, int]:
    return _ready(version, lined_up(version), rooms[version.version_id], memory)


def _ready(
    version: VersionLoad, order: lines.Order, room: Room, memory: Memory
) -> Mapping[PriorityClass, int]:
    """Return the same by class."""
    taken = memory.sight.taken_of(version)
    if not version.kind_of:
        return lines.left(order, taken)
    return regulation.may_leave(version, room, memory.held, taken)


def _line_up(
    version: VersionLoad, *, rooms: Mapping[int, Room], fleet: Fleet, sight: Sight
) -> lines.Order:
    return sight.line_up(version, fleet.requests_per_s(version, rooms[version.version_id]))


def _serve(
    version: VersionLoad,
    order: lines.Order,
    room: Room,
    share: int,
    now: datetime,
    memory: Memory,
    publish: Publish,
) -> Pass:
    """Fill the rater's share of the slots; for what is not there any more the next is sent.

    So it is for what found no place, which other classes may have.
    """
    done = Pass()
    for _ in range(MOST_CLAIMS):
        passed = _send(version, order, room, share - done.sent, now, memory, publish)
        done += passed
        if not passed.gone and not passed.put_back:
            break
    else:
        # Too much of what was read is not so any more.
        memory.sight.ring()
        done = replace(done, full=True)
    if done.sent:
        memory.serving += 1
        memory.servings[version.version_id] = memory.serving
    return done


def _send(
    version: VersionLoad,
    order: lines.Order,
    room: Room,
    share: int,
    now: datetime,
    memory: Memory,
    publish: Publish,
) -> Pass:
    sight = memory.sight
    remembered = memory.orders.get(version.version_id, ordering.Memory())
    free = {cls: room.batches(cls) for cls in order}
    if not any(free.values()):
        return Pass()
    decision = regulation.fill(
        version,
        {cls: line for cls, line in order.items() if free[cls]},
        regulation.gate(room, memory.held) if version.kind_of else None,
        room=min(share, max(free.values()), _batches_allowed(version, room, memory, now)),
        memory=replace(remembered, usage=fairness.aged(remembered.usage, now)),
        taken=sight.taken_of(version),
    )
    picks = _fitting(decision.picks, order, free)
    if not picks:
        return Pass()
    try:
        claims, passed = claim(picks, room=room, now=now)
    except OperationalError as error:
        if "lock timeout" not in str(error):
            raise
        # Somebody holds what we wanted; the next pass finds it. What the claim counted as out
        # is not.
        memory.held.forget()
        logger.info("claim met a lock", extra={"rater": version.rater_id})
        return Pass()
    if passed.missing < sum(pick.batches for pick in picks):
        memory.orders[version.version_id] = (
            ordering.refunded(decision.memory, order, passed.gone)
            if passed.gone
            else decision.memory
        )
    memory.over[version.version_id] = {
        owner: why for line in order.values() for owner, why in line.over.items()
    }
    sight.take(version, picks)
    # Of a class that has places still it is not: it was given up since it was read.
    elsewhere = {
        workflow_id
        for workflow_id in passed.put_back
        if any(workflow_id in line.ready and room.batches(cls) for cls, line in order.items())
    }
    sight.use_up(version, passed.gone.keys() | elsewhere)
    # Whatever was READY when this pass read it has been tried; of what was READY before, more may
    # be by now.
    if passed.full or ((passed.gone or elsewhere) and sight.read_at != now):
        sight.short.add(version.version_id)
    if version.max_qps is not None:
        bucket = memory.buckets[version.rater_id]
        memory.buckets[version.rater_id] = quota.spend(bucket, passed.calls)
    ready = _ready(version, order, room, memory)
    sight.give_back(version, {w: n for w, n in passed.put_back.items() if w not in elsewhere})
    executors.send(claims, ready, room=room, held=memory.held, slots=memory.slots, publish=publish)
    asked = sum(pick.batches for pick in picks)
    # The room was made for whole batches; where these were what is left of some, more may go.
    more = passed.sent == asked and passed.calls < asked * room.calls_a_batch
    return replace(passed, full=passed.full or more)


def _batches_allowed(version: VersionLoad, room: Room, memory: Memory, now: datetime) -> int:
    """Return how many batches the rater's `max_qps` lets start now.

    A batch of many calls starts when one is allowed and is paid for as a whole: its executor makes
    the calls at the rater's pace, and the next batch waits until they are paid.
    """
    if version.max_qps is None:
        return ordering.MAX_CLAIMS
    bucket = quota.fill(memory.buckets.get(version.rater_id), version.max_qps, now)
    memory.buckets[version.rater_id] = bucket
    if bucket.calls < 1:
        return 0
    return max(1, int(bucket.calls) // room.calls_a_batch)


def _fitting(
    picks: Sequence[ordering.Pick],
    order: lines.Order,
    free: Mapping[PriorityClass, int],
) -> list[ordering.Pick]:
    """Cut picks to the windows of their classes, which may be smaller than the room as a whole.

    Claiming more would write batches only to put them back. The order remembers them as served.
    """
    left = dict(free)
    fitting = []
    for pick in picks:
        cls = next(cls for cls, line in order.items() if pick.workflow_id in line.ready)
        if batches := min(pick.batches, left[cls]):
            fitting.append(ordering.Pick(workflow_id=pick.workflow_id, batches=batches))
            left[cls] -= batches
    return fitting
