"""Desired against actual model servers of one model, as pure functions.

Level-triggered: a pass looks at what is wanted, what the rows remember and which processes live,
and says one step for each replica. Nothing is remembered between passes but the records, so that
a missed pass, a repeated one or a new agent come to the same end.

    STOPPED ─► STARTING ─► WARMING ─► READY ─► DRAINING ─► STOPPED
                   └──────────┴─────────┴─► BACKOFF ─► STARTING        (died, hung, never ready)
    STARTING ─► FAILED ─► STARTING                   (could not be launched, or refused to load)

Which versions have how many replicas is `rollout`'s business: a wish arrives as slots, one a
replica, and `assignment` says which replica has which.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from models_admin.policy.replicas import LIVE, Record, Replica, Seen, ServerState
from models_admin.policy.rollout import Slot

STABLE_AFTER = timedelta(seconds=60)
"""A server that was ready for so long dies with a clean slate."""
LONGEST_BACKOFF = timedelta(seconds=60)
START_LIMIT = timedelta(minutes=15)
"""Compiling all shapes on a busy machine takes minutes; never being ready is a failure."""
SILENCE_LIMIT = timedelta(seconds=20)
"""Twice the age at which a replica leaves the directory: a slow answer costs no restart."""
REFUSED_PAUSE = timedelta(minutes=10)
"""Before a server starts again that said why it cannot load: files do not mend themselves."""
DRAIN_LEAST = timedelta(seconds=2)
"""What was sent before the replica left the directory arrives within this time."""
LONGEST_CALL = timedelta(seconds=120)
"""Executors give up a call then, whatever the model's time limit says."""


_FROM_OUTSIDE = "told to end from outside: drains"


class Act(StrEnum):
    """What the agent does to a replica in this pass (a restart is a stop, then a start)."""

    START = "start"
    STOP = "stop"
    """Tell its process to end; it is killed if it does not."""
    WAIT = "wait"
    """Something is under way, or a time has to come."""
    KEEP = "keep"


@dataclass(frozen=True, kw_only=True, slots=True)
class Desired:
    """What is wanted of a model: the slots of its replicas by ordinal (see `assignment`)."""

    slots: Mapping[int, Slot]
    drain_limit: timedelta = LONGEST_CALL
    """How long a replica that leaves may take for what it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What to do about one replica, what to remember, and why."""

    ordinal: int
    act: Act
    record: Record
    reason: str


def backoff(failures: int) -> timedelta:
    """Return the pause before the next start after so many deaths in a row: 1 s, 2 s, … 60 s."""
    return min(timedelta(seconds=2 ** min(max(failures, 1) - 1, 10)), LONGEST_BACKOFF)


def drain_limit(timeout_s: float) -> timedelta:
    """Return how long a replica of a model may drain: the longest call that it may have."""
    return max(DRAIN_LEAST, min(timedelta(seconds=timeout_s), LONGEST_CALL))


def reconcile(desired: Desired, replicas: Iterable[Replica], now: datetime) -> tuple[Step, ...]:
    """Return one step for each known or wanted replica, in order of ordinals."""
    known = {replica.ordinal: replica for replica in replicas}
    for ordinal in desired.slots:
        known.setdefault(ordinal, Replica(ordinal=ordinal))
    return tuple(
        _step(known[ordinal], desired.slots.get(ordinal), desired.drain_limit, now)
        for ordinal in sorted(known)
    )


def held_back(step: Step, before: Record, why: str) -> Step:
    """Return what to do instead of a start that there are no devices for yet."""
    record = dataclasses.replace(
        before, state=ServerState.STOPPED, ready_at=None, draining_at=None, next_start_at=None
    )
    return dataclasses.replace(step, act=Act.WAIT, record=record, reason=why)


def launch_failed(
    record: Record, detail: str, now: datetime, *, refused: bool = False
) -> tuple[Record, str]:
    """Return what to remember, and why, of a replica that could not even be launched.

    Where what it should load was refused, it is not tried again soon.
    """
    failures = record.failures + 1
    pause = REFUSED_PAUSE if refused else backoff(failures)
    return (
        dataclasses.replace(
            record, state=ServerState.FAILED, failures=failures, next_start_at=now + pause
        ),
        f"could not be launched: {detail}; tried again in {pause.total_seconds():.0f} s",
    )


def _step(replica: Replica, slot: Slot | None, limit: timedelta, now: datetime) -> Step:
    if replica.seen is None:
        return _without_process(replica, slot, now)
    if replica.seen.stopping:
        return _said(replica, Act.WAIT, replica.record, "told to end, its process still lives")
    if replica.record.state is ServerState.DRAINING:
        return _drained(replica, replica.seen, limit, now)
    if slot is None:
        return _leave(replica, "not wanted any more", now)
    if slot != replica.slot:
        return _leave(replica, "another takes its place", now)
    return _living(replica, replica.seen, now)


def _without_process(replica: Replica, slot: Slot | None, now: datetime) -> Step:
    record = replica.record
    if record.state in LIVE:
        was_leaving = record.state is ServerState.DRAINING
        if replica.inherited:
            record = dataclasses.replace(record, state=ServerState.STOPPED)
        elif slot is not None and slot == record.slot and _has_died(replica, was_leaving):
            return _died(replica, replica.ended or "its process is gone", now)
    if slot is None:
        return _said(replica, Act.KEEP, _stopped(record), replica.ended or "not wanted")
    pausing = record.state in {ServerState.BACKOFF, ServerState.FAILED}
    pause = (record.next_start_at or now) - now
    # One longer than any was begun by a clock that was set back since.
    if pausing and slot == record.slot and timedelta(0) < pause <= REFUSED_PAUSE:
        rest = pause.total_seconds()
        # Why it pauses is worth more than how long it still does.
        reason = f"starts again in {rest:.0f} s" if record.state is ServerState.BACKOFF else ""
        return _said(replica, Act.WAIT, record, reason)
    return _start(replica, record, slot, now)


def _has_died(replica: Replica, was_leaving: bool) -> bool:
    """Say whether it ended without being told to: then it has failed.

    A server that ends by itself before it ever served has failed whatever its exit code says.
    """
    if was_leaving:
        return bool(replica.ended) and not replica.ended_well
    return not (replica.ended_well and replica.record.ready_at is not None)


def _start(replica: Replica, record: Record, slot: Slot, now: datetime) -> Step:
    before = record.slot
    if replica.inherited and replica.record.state in LIVE:
        reason = "wanted; the last one ended with its agent"
    elif before is not None and before.version == slot.version and before != slot:
        reason = "restart was asked for"
    elif replica.ended_well and replica.record.state in LIVE:
        reason = "wanted; the last one was told to end from outside"
    else:
        reason = "back-off is over" if before == slot and record.failures else "wanted"
    return _said(
        replica,
        Act.START,
        Record(
            state=ServerState.STARTING,
            slot=slot,
            failures=record.failures if before == slot else 0,
            started_at=now,
        ),
        reason,
    )


def _living(replica: Replica, seen: Seen, now: datetime) -> Step:
    record = replica.record
    if record.state not in LIVE:
        # Its row says otherwise (an agent's write was lost): one that lives is kept, because a
        # second one beside it would hold the device twice.
        record = dataclasses.replace(
            record,
            state=ServerState.STARTING,
            slot=replica.slot,
            started_at=now,
            next_start_at=None,
        )
        return _said(replica, Act.KEEP, record, "adopted: it lives and is wanted")
    if seen.silent > SILENCE_LIMIT and record.ready_at is not None:
        return _failed(replica, f"no answer for {seen.silent.total_seconds():.0f} s", now)
    if seen.draining:
        record = dataclasses.replace(record, state=ServerState.DRAINING, draining_at=now)
        return _said(replica, Act.WAIT, record, _FROM_OUTSIDE)
    if seen.ready:
        return _said(replica, Act.KEEP, _serving(record, now), "serves")
    if record.ready_at is None and now - (record.started_at or now) > START_LIMIT:
        limit = START_LIMIT.total_seconds()
        return _failed(replica, f"not ready {limit:.0f} s after its start", now)
    if seen.answers:
        record = dataclasses.replace(record, state=ServerState.WARMING)
        return _said(replica, Act.WAIT, record, "answers that it is not ready yet")
    if record.state is ServerState.READY:
        # One slow answer is no reason to leave: the directory drops it by its heartbeat's age.
        return _said(replica, Act.WAIT, record, "did not answer the last time")
    return _said(replica, Act.WAIT, record, "starts")


def _serving(record: Record, now: datetime) -> Record:
    ready_at = record.ready_at or now
    stable = now - ready_at >= STABLE_AFTER
    return dataclasses.replace(
        record,
        state=ServerState.READY,
        ready_at=ready_at,
        failures=0 if stable else record.failures,
    )


def _leave(replica: Replica, why: str, now: datetime) -> Step:
    record = dataclasses.replace(replica.record, state=ServerState.DRAINING, draining_at=now)
    if replica.record.state is ServerState.READY:
        return _said(replica, Act.WAIT, record, f"{why}: drains")
    return _said(replica, Act.STOP, record, f"{why}: stops, it served nothing")


def _drained(replica: Replica, seen: Seen, limit: timedelta, now: datetime) -> Step:
    record = replica.record
    # A clock that is set back meanwhile must not keep it.
    since = abs(now - (record.draining_at or now - limit))
    if since >= limit:
        return _said(replica, Act.STOP, record, "drain limit reached")
    if seen.draining:
        # It ends by itself when it has answered what it has.
        return _said(replica, Act.WAIT, record, _FROM_OUTSIDE)
    if since >= DRAIN_LEAST and seen.idle:
        return _said(replica, Act.STOP, record, "drained")
    return _said(replica, Act.WAIT, record, "drains")


def _died(replica: Replica, how: str, now: datetime) -> Step:
    if not replica.refused:
        return _failed(replica, how, now, act=Act.WAIT)
    failures = replica.record.failures + 1
    record = dataclasses.replace(
        replica.record,
        state=ServerState.FAILED,
        failures=failures,
        ready_at=None,
        next_start_at=now + REFUSED_PAUSE,
    )
    minutes = REFUSED_PAUSE.total_seconds() / 60
    return _said(replica, Act.WAIT, record, f"{how}; tried again in {minutes:.0f} min")


def _failed(replica: Replica, how: str, now: datetime, *, act: Act = Act.STOP) -> Step:
    record = replica.record
    stable = record.ready_at is not None and now - record.ready_at >= STABLE_AFTER
    failures = (0 if stable else record.failures) + 1
    pause = backoff(failures)
    return _said(
        replica,
        act,
        dataclasses.replace(
            record,
            state=ServerState.BACKOFF,
            failures=failures,
            ready_at=None,
            next_start_at=now + pause,
        ),
        f"{how}; starts again in {pause.total_seconds():.0f} s",
    )


def _stopped(record: Record) -> Record:
    return dataclasses.replace(
        record,
        state=ServerState.STOPPED,
        failures=0,
        ready_at=None,
        draining_at=None,
        next_start_at=None,
    )


def _said(replica: Replica, act: Act, record: Record, reason: str) -> Step:
    return Step(ordinal=replica.ordinal, act=act, record=record, reason=reason)
