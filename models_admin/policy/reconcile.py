"""Desired against actual model servers of one model, as pure functions.

Level-triggered: a pass looks at what is wanted, what the rows remember and which processes live,
and says one step for each replica. Nothing is remembered between passes but the records, so that
a missed pass, a repeated one or a new agent come to the same end.

    STOPPED ─► STARTING ─► WARMING ─► READY ─► DRAINING ─► STOPPED
                   └──────────┴─────────┴─► BACKOFF ─► STARTING        (died, hung, never ready)
    STARTING ─► FAILED ─► STARTING                   (could not be launched, or refused to load)

Which versions have how many replicas is `rollout`'s business: a wish arrives as slots, one a
replica, and `assign` says which replica has which.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import count

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


class ServerState(StrEnum):
    """Where a replica stands, and who moves it on (always the host agent)."""

    STOPPED = "STOPPED"
    """No process; started by the next pass if it is wanted."""
    STARTING = "STARTING"
    """Process started, it does not answer yet."""
    WARMING = "WARMING"
    """Answers, but compiles its shapes."""
    READY = "READY"
    """Serves; the only state that is sent to."""
    DRAINING = "DRAINING"
    """Gets nothing new; told to end when it has nothing left, or after the drain limit."""
    BACKOFF = "BACKOFF"
    """Died or hung; starts again at `next_start_at`."""
    FAILED = "FAILED"
    """Could not be launched or loaded (bad checkpoint …); tried again at `next_start_at`."""


LIVE = frozenset(
    {ServerState.STARTING, ServerState.WARMING, ServerState.READY, ServerState.DRAINING}
)
"""States that claim a process."""


_OVER = frozenset({ServerState.STOPPED, ServerState.DRAINING})
"""States of a replica without a process that nothing comes back from by itself."""


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
    """What is wanted of a model: the slots of its replicas by ordinal (see `assign`)."""

    slots: Mapping[int, Slot]
    drain_limit: timedelta = LONGEST_CALL
    """How long a replica that leaves may take for what it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A living process of a replica, as the hosting backend sees it."""

    answers: bool = False
    ready: bool = False
    silent: timedelta = timedelta(0)
    """Since it last answered (or was started)."""
    idle: bool = False
    """Has nothing to compute, and got nothing for a while."""
    stopping: bool = False
    """Was told to end, by us."""
    draining: bool = False
    """Says that it takes nothing new any more: it was told to end."""
    slot: Slot | None = None
    """What it was launched for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is remembered of a replica from pass to pass."""

    state: ServerState = ServerState.STOPPED
    slot: Slot | None = None
    """What it was last launched for."""
    failures: int = 0
    """Deaths in a row."""
    started_at: datetime | None = None
    ready_at: datetime | None = None
    draining_at: datetime | None = None
    next_start_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One replica: its record, its process if one lives, and how the last one ended."""

    ordinal: int
    record: Record = Record()
    seen: Seen | None = None
    ended: str = ""
    refused: bool = False
    """It said that it cannot load what it was given."""
    ended_well: bool = False
    """It ended because it was told to (whoever did), with nothing left to do."""
    inherited: bool = False
    """The record was written by an agent that is gone, and its servers with it."""

    @property
    def slot(self) -> Slot | None:
        """What it runs, or last ran."""
        return self.record.slot if self.seen is None else self.seen.slot or self.record.slot


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


def assign(
    wanted: Mapping[Slot, int],
    replicas: Iterable[Replica],
    counted: Mapping[int, Slot | None] | None = None,
) -> Mapping[int, Slot]:
    """Return which replica has which slot: those that run it already keep it, the first ones first.

    A new run takes the first ordinal without a process, so that the replica it follows can go on
    meanwhile. `counted` says what replicas count as, where that is not what they were launched for.
    """
    known = sorted(replicas, key=lambda replica: replica.ordinal)
    slots = {replica.ordinal: replica.slot for replica in known} if counted is None else counted
    found: dict[int, Slot] = {}
    left = dict(wanted)
    # What runs or pauses before what is stopped.
    for stopped in (False, True):
        for replica in known:
            slot = slots.get(replica.ordinal)
            is_stopped = replica.seen is None and replica.record.state in _OVER
            if slot is None or is_stopped is not stopped or _is_leaving(replica):
                continue
            if left.get(slot, 0) > 0:
                found[replica.ordinal] = slot if replica.seen is None else replica.slot or slot
                left[slot] -= 1
    taken = found.keys() | {replica.ordinal for replica in known if replica.seen is not None}
    free = (ordinal for ordinal in count() if ordinal not in taken)
    for slot in sorted(left):
        for _ in range(left[slot]):
            found[next(free)] = slot
    return found


def _is_leaving(replica: Replica) -> bool:
    return replica.seen is not None and replica.record.state is ServerState.DRAINING


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


def summary(states: Sequence[ServerState]) -> str:
    """Return a model's replicas in one line: `2 READY, 1 BACKOFF`."""
    counts = {state: states.count(state) for state in ServerState}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
