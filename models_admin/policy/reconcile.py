"""Desired against actual model servers of one model, as pure functions.

Level-triggered: a pass looks at what is wanted, what the rows remember and which processes live,
and says one step for each replica. Nothing is remembered between passes but the records, so that
a missed pass, a repeated one or a new agent come to the same end.

    STOPPED ─► STARTING ─► WARMING ─► READY ─► DRAINING ─► STOPPED
                   └──────────┴─────────┴─► BACKOFF ─► STARTING        (died, hung, never ready)
    STOPPED ─► FAILED ─► STARTING                                      (could not be launched)
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

STABLE_AFTER = timedelta(seconds=60)
"""A server that was ready for so long dies with a clean slate."""
LONGEST_BACKOFF = timedelta(seconds=60)
START_LIMIT = timedelta(minutes=15)
"""Compiling all shapes on a busy machine takes minutes; never being ready is a failure."""
SILENCE_LIMIT = timedelta(seconds=30)
"""Twice the age at which a replica leaves the directory: a slow answer costs no restart."""
DRAIN_LEAST = timedelta(seconds=2)
"""What was sent before the replica left the directory arrives within this time."""
DRAIN_LIMIT = timedelta(seconds=30)


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
    """Could not be launched (bad checkpoint …); tried again at `next_start_at` or on restart."""


LIVE = frozenset(
    {ServerState.STARTING, ServerState.WARMING, ServerState.READY, ServerState.DRAINING}
)
"""States that claim a process."""


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
    """What the operator wants of a model; raising `generation` restarts its replicas."""

    replicas: int
    generation: int


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
    """Was told to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is remembered of a replica from pass to pass."""

    state: ServerState = ServerState.STOPPED
    generation: int = 0
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
    inherited: bool = False
    """The record was written by an agent that is gone, and its servers with it."""


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


def reconcile(desired: Desired, replicas: Iterable[Replica], now: datetime) -> tuple[Step, ...]:
    """Return one step for each known or wanted replica, in order of ordinals."""
    known = {replica.ordinal: replica for replica in replicas}
    for ordinal in range(desired.replicas):
        known.setdefault(ordinal, Replica(ordinal=ordinal))
    may_restart = _may_restart(desired, known)
    return tuple(
        _step(
            known[ordinal],
            wanted=ordinal < desired.replicas,
            generation=desired.generation,
            may_restart=ordinal in may_restart,
            now=now,
        )
        for ordinal in sorted(known)
    )


def held_back(step: Step, before: Record, why: str) -> Step:
    """Return what to do instead of a start that there are no devices for yet."""
    record = dataclasses.replace(
        before, state=ServerState.STOPPED, ready_at=None, draining_at=None, next_start_at=None
    )
    return dataclasses.replace(step, act=Act.WAIT, record=record, reason=why)


def launch_failed(record: Record, detail: str, now: datetime) -> tuple[Record, str]:
    """Return what to remember, and why, of a replica that could not even be launched."""
    failures = record.failures + 1
    pause = backoff(failures)
    return (
        dataclasses.replace(
            record, state=ServerState.FAILED, failures=failures, next_start_at=now + pause
        ),
        f"could not be launched: {detail}; tried again in {pause.total_seconds():.0f} s",
    )


def _may_restart(desired: Desired, known: Mapping[int, Replica]) -> frozenset[int]:
    """Return the living replicas of an older generation that may be replaced in this pass.

    One that serves nobody always may. Of those that serve, one at a time and only while all
    others serve, so that a new configuration that does not start leaves the rest serving.
    """
    wanted = [known[ordinal] for ordinal in range(desired.replicas)]
    serving = [replica for replica in wanted if _serves(replica)]
    old = [
        replica
        for replica in wanted
        if replica.seen is not None and replica.record.generation != desired.generation
    ]
    allowed = {replica.ordinal for replica in old if not _serves(replica)}
    old_serving = [replica for replica in old if _serves(replica)]
    if old_serving and len(serving) == len(wanted):
        allowed.add(old_serving[0].ordinal)
    return frozenset(allowed)


def _serves(replica: Replica) -> bool:
    return (
        replica.seen is not None
        and replica.seen.ready
        and not replica.seen.stopping
        and replica.record.state is ServerState.READY
    )


def _step(
    replica: Replica, *, wanted: bool, generation: int, may_restart: bool, now: datetime
) -> Step:
    if replica.seen is None:
        return _without_process(replica, wanted=wanted, generation=generation, now=now)
    if replica.seen.stopping:
        return _said(replica, Act.WAIT, replica.record, "told to end, its process still lives")
    if replica.record.state is ServerState.DRAINING:
        return _drained(replica, replica.seen, now)
    if not wanted:
        return _leave(replica, "not wanted any more", now)
    if may_restart:
        return _leave(replica, "restart was asked for", now)
    return _living(replica, replica.seen, now)


def _without_process(replica: Replica, *, wanted: bool, generation: int, now: datetime) -> Step:
    record = replica.record
    asked_again = record.generation != generation
    if record.state in LIVE and record.state is not ServerState.DRAINING:
        if replica.inherited:
            record = dataclasses.replace(record, state=ServerState.STOPPED)
        elif wanted and not asked_again:
            return _died(replica, replica.ended or "its process is gone", now)
    pausing = record.state in {ServerState.BACKOFF, ServerState.FAILED}
    if not wanted:
        return _said(replica, Act.KEEP, _stopped(record), replica.ended or "not wanted")
    if pausing and not asked_again and record.next_start_at and now < record.next_start_at:
        rest = (record.next_start_at - now).total_seconds()
        return _said(replica, Act.WAIT, record, f"starts again in {rest:.0f} s")
    return _start(replica, record, generation=generation, now=now)


def _start(replica: Replica, record: Record, *, generation: int, now: datetime) -> Step:
    asked_again = record.generation != generation
    if replica.inherited and replica.record.state in LIVE:
        reason = "wanted; the last one ended with its agent"
    elif asked_again:
        reason = "restart was asked for" if record.started_at else "wanted"
    else:
        reason = "back-off is over" if record.failures else "wanted"
    return _said(
        replica,
        Act.START,
        Record(
            state=ServerState.STARTING,
            generation=generation,
            failures=0 if asked_again else record.failures,
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
            record, state=ServerState.STARTING, started_at=now, next_start_at=None
        )
        return _said(replica, Act.KEEP, record, "adopted: it lives and is wanted")
    if seen.silent > SILENCE_LIMIT and record.ready_at is not None:
        return _failed(replica, f"no answer for {seen.silent.total_seconds():.0f} s", now)
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


def _drained(replica: Replica, seen: Seen, now: datetime) -> Step:
    record = replica.record
    since = now - (record.draining_at or now - DRAIN_LIMIT)
    if since >= DRAIN_LIMIT:
        return _said(replica, Act.STOP, record, "drain limit reached")
    if since >= DRAIN_LEAST and seen.idle:
        return _said(replica, Act.STOP, record, "drained")
    return _said(replica, Act.WAIT, record, "drains")


def _died(replica: Replica, how: str, now: datetime) -> Step:
    return _failed(replica, how, now, act=Act.WAIT)


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
