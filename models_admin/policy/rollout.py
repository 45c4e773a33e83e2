"""Rolling out a version of a hosted model, as a pure function: who gets how many replicas, and why.

Level-triggered like `reconcile`: each pass looks at which version is asked for, what runs and what
is left to do, and says how many replicas each version should have now. A restart is the same thing
with another run of one version.

    candidate ─► serving ─► retiring ─► retired
        └──► failed ─► candidate              (asked for again: a restart, or changed settings)

The new one is ready before an old one drains, where a device is free for it. Where none is, it is
checked first and then takes over in place, one replica at a time. An old version keeps a replica
while there is work that only it may do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class VersionState(StrEnum):
    """Where a version of a hosted model stands."""

    CANDIDATE = "candidate"
    """Asked for; nothing has served it yet."""
    SERVING = "serving"
    """What new work is pinned to."""
    RETIRING = "retiring"
    """Replaced, but there is work that only it may do, or its replicas still serve."""
    RETIRED = "retired"
    FAILED = "failed"
    """Cannot be loaded; tried again when somebody restarts the model or changes its settings."""


class Check(StrEnum):
    """What a check run, which loads a version and serves nothing, has come to."""

    NONE = "none"
    """Not begun, or not ended."""
    PASSED = "passed"
    FAILED = "failed"


class Slot(NamedTuple):
    """What a replica is a run of: a version, in a generation that a restart raises."""

    version: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A version in one generation, and what of it runs."""

    slot: Slot
    name: str
    """What its answers call themselves; "" while nobody knows."""
    state: VersionState
    has: int = 0
    """Replicas that serve, start, or pause before they start; those that drain left out."""
    ready: int = 0
    failing: str = ""
    """Why its replicas do not start, if they have given up."""
    backlog: int | None = 0
    """Open work that is pinned to its name; None while nobody can tell."""
    check: Check = Check.NONE
    check_text: str = ""
    is_withdrawn: bool = False
    """An operator retired it: what waits for it does so in vain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A hosted model: what is asked for, what runs, and how much room there is."""

    wanted: int
    """Replicas of all versions together."""
    asked: Slot
    """What the model's settings say; one of `runs`."""
    runs: Sequence[Run]
    spare: int
    """Further replicas that the pool has devices for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a run should have now, what becomes of its version, and why."""

    slot: Slot
    replicas: int
    state: VersionState
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One decision: a wish for each run, and what to check."""

    wishes: tuple[Wish, ...]
    check: Slot | None = None
    """Is to be checked before anything gives way to it."""


_OVER: Final = frozenset({VersionState.RETIRED, VersionState.FAILED})


def rollout(fleet: Fleet) -> Rollout:
    """Return how many replicas each run of a model should have now."""
    new = next(run for run in fleet.runs if run.slot == fleet.asked)
    olds = [run for run in fleet.runs if run is not new]
    if fleet.wanted == 0:
        return Rollout(wishes=tuple(_nothing(run) for run in fleet.runs))
    others = sorted((run for run in olds if _is_other(run, new)), key=_serves, reverse=True)
    before = next((run for run in others if _serves(run)), None)
    if new.ready == 0 and new.state in {VersionState.CANDIDATE, VersionState.FAILED}:
        failure = new.failing or (new.check_text if new.check is Check.FAILED else "")
        if before is not None:
            return _before_the_first(fleet, new, before, olds, failure)
        state = VersionState.FAILED if failure else new.state
        return _rolling(fleet, new, olds, state, failure or "starts; nothing else is to serve")
    reason = "serves" if new.ready else "starts"
    return _rolling(fleet, new, olds, VersionState.SERVING, reason)


def _nothing(run: Run) -> Wish:
    return Wish(slot=run.slot, replicas=0, state=run.state, reason="no replica is wanted")


def _is_other(run: Run, new: Run) -> bool:
    return run.slot.version != new.slot.version


def _serves(run: Run) -> int:
    """Say whether new work is pinned to a version, or would be as soon as anybody looks."""
    if run.state is VersionState.SERVING:
        return 2
    return 1 if run.state is VersionState.CANDIDATE and run.ready else 0


def _needs_one(run: Run, new: Run) -> bool:
    """Say whether there is work that only this run may do."""
    if run.is_withdrawn or run.state is VersionState.FAILED or run.name in ("", new.name):
        return False
    if run.backlog is None:
        return run.state is not VersionState.RETIRED
    return run.backlog > 0


def _kept(fleet: Fleet, new: Run, olds: Sequence[Run]) -> list[Run]:
    """Return the old runs that keep a replica, no more than there is room for, the oldest first.

    One that does not start any more keeps none where another needs its place.
    """
    names: set[str] = set()
    kept = []
    for run in sorted(olds, key=lambda run: (bool(run.failing), -run.ready, run.slot)):
        if _needs_one(run, new) and run.name not in names:
            names.add(run.name)
            kept.append(run)
    room = fleet.wanted + fleet.spare
    sound = [run for run in kept if not run.failing][:room]
    failing = [run for run in kept if run.failing][: max(0, fleet.spare - len(sound))]
    return sound + failing


def _before_the_first(
    fleet: Fleet, new: Run, before: Run, olds: Sequence[Run], failure: str
) -> Rollout:
    """Decide while the version before serves and the one that is asked for has yet to load."""
    others = [run for run in _kept(fleet, new, olds) if run is not before]
    counts = {run.slot: 1 for run in others}
    room = fleet.wanted + fleet.spare
    counts[before.slot] = max(0, min(fleet.wanted, room) - len(others))
    if new.state is VersionState.FAILED or failure:
        wishes = _wishes(new, olds, counts, VersionState.FAILED, failure, still=before)
        return Rollout(wishes=wishes)
    check = None
    if sum(counts.values()) < room:
        counts[new.slot] = 1
        reason = "its first replica starts beside those of the version before"
    elif new.check is not Check.PASSED:
        check = new.slot
        reason = "no device is free: it is checked before another version gives way"
    elif counts[before.slot] > 1 or (counts[before.slot] and not _needs_one(before, new)):
        counts[before.slot] -= 1
        counts[new.slot] = 1
        reason = "no device is free: it loads (checked) and takes over in place, one by one"
    else:
        # New work must be pinned to it, or the backlog of the one before never ends.
        reason = (
            "no device is free: it loads (checked) and waits until the backlog of "
            f"{before.name} is empty, or an operator retires that"
        )
        return Rollout(wishes=_wishes(new, olds, counts, VersionState.SERVING, reason))
    wishes = _wishes(new, olds, counts, VersionState.CANDIDATE, reason, still=before)
    return Rollout(wishes=wishes, check=check)


def _rolling(
    fleet: Fleet, new: Run, olds: Sequence[Run], state: VersionState, reason: str
) -> Rollout:
    """Decide where nothing has to serve but what is asked for, and what old versions are owed."""
    kept = _kept(fleet, new, olds)
    least = len(kept)
    room = fleet.wanted + fleet.spare
    goal = min(max(fleet.wanted - least, 1), max(room - least, 0))
    # Beyond what is owed, an old run has what it serves with and the new one does not yet.
    owed = {run.slot for run in kept}
    others = sum(max(0, run.ready - (run.slot in owed)) for run in olds)
    lacking = fleet.wanted - new.ready - sum(min(1, run.ready) for run in kept)
    old = min(room, least + min(max(0, lacking), others))
    one_more = max(new.ready + 1, new.has) if old > least else goal
    count = min(goal, room - old, one_more)
    if count <= new.ready < goal and old > least:
        old -= 1
        count = min(goal, room - old, new.ready + 1)
        reason = f"{reason}; no device is free: it takes over in place, one replica at a time"
    elif not goal:
        reason = f"{reason}; it waits for a device: old versions have work to end"
    counts = _shared(old, kept, olds, new) | {new.slot: count}
    return Rollout(wishes=_wishes(new, olds, counts, state, reason))


def _shared(total: int, kept: Sequence[Run], olds: Sequence[Run], new: Run) -> dict[Slot, int]:
    """Share out what old runs still have: what is owed first, then to those that serve."""
    counts = {run.slot: 1 for run in kept}
    left = total - len(kept)
    # Another version goes before an earlier run of the same one.
    for run in sorted(olds, key=lambda run: (_is_other(run, new), -run.slot.version)):
        more = min(left, max(0, run.ready - counts.get(run.slot, 0)))
        if more:
            counts[run.slot] = counts.get(run.slot, 0) + more
            left -= more
    return counts


def _wishes(
    new: Run,
    olds: Sequence[Run],
    counts: dict[Slot, int],
    state: VersionState,
    reason: str,
    *,
    still: Run | None = None,
) -> tuple[Wish, ...]:
    found = [Wish(slot=new.slot, replicas=counts.get(new.slot, 0), state=state, reason=reason)]
    for run in olds:
        count = counts.get(run.slot, 0)
        if not _is_other(run, new):
            found.append(Wish(slot=run.slot, replicas=count, state=state, reason=reason))
        elif run is still:
            why = "serves"
            if state is VersionState.FAILED:
                why = f"serves: {new.name or 'the version asked for'} cannot be loaded"
            found.append(
                Wish(slot=run.slot, replicas=count, state=VersionState.SERVING, reason=why)
            )
        else:
            found.append(_old(run, new, count))
    return tuple(found)


def _old(run: Run, new: Run, count: int) -> Wish:
    """Say what becomes of a version that was replaced."""
    owed = _needs_one(run, new)
    state = VersionState.RETIRING
    if run.state is VersionState.FAILED:
        state, reason = VersionState.FAILED, ""
    elif owed and run.failing and not count:
        reason = f"has work, but does not start ({run.failing}): retire it, or mend it"
    elif owed:
        what = "nobody can tell" if run.backlog is None else f"{run.backlog} requests are open"
        reason = f"keeps a replica until its backlog is empty: {what}"
        if not count:
            reason = f"has work and waits for a device: {what}"
    elif count or run.has:
        reason = "gives way replica by replica"
    else:
        state = VersionState.RETIRED
        reason = "an operator retired it" if run.is_withdrawn else "replaced; it has no work left"
    return Wish(slot=run.slot, replicas=count, state=state, reason=reason)
