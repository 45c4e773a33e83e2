"""Allotting a pool of devices: what `rebalancing` decides, in whole replicas of models of any size.

The policy takes all replicas for alike. Here a replica holds one device or several, devices may be
free, and models may be pinned. So the policy is asked in the largest unit of devices that every
model's replica is a multiple of; what is free takes part as a model that wants nothing; what it
moves is rounded down to whole replicas, or up where somebody has none. A model that would give or
get less than one replica stays as it is, and the policy is asked again without it: what it cannot
use is not kept from others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import gcd
from typing import Final

from models_admin.policy.rebalancing import MOST_MOVES, Due, Model, Rebalance, rebalance

_FREE: Final = ""
"""Stands for free devices; no model is called so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A model of a pool: what it has, and what it must do. Work counts in replica-seconds."""

    model_id: str
    replicas: int
    """That are wanted of it now."""
    least: int
    default: int
    most: int
    devices: int
    """Of a replica."""
    dues: Sequence[Due] = ()
    """Committed work."""
    other_s: float = 0.0
    """Work that is not committed."""
    start_up: timedelta | None = None
    """Until a moved replica serves, where that was measured."""
    is_pinned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Another number of replicas for a model."""

    model_id: str
    before: int
    after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """One round: whose number of replicas changes, and what each model needs and should have."""

    changes: tuple[Change, ...]
    needs: Mapping[str, float]
    """Replicas."""
    targets: Mapping[str, float]
    """Replicas."""
    reason: str


def allot(members: Sequence[Member], devices: int, now: datetime) -> Allotment:
    """Decide one round for the models of a pool of so many devices."""
    free = max(0, devices - sum(each.replicas * each.devices for each in members))
    moving = [each for each in members if not each.is_pinned]
    first = decision = _ask(moving, free, now)
    whole = _whole(moving, decision, free)
    waiting: set[str] = set()
    while whole.stuck:
        waiting |= whole.stuck & whole.receivers
        moving = [each for each in moving if each.model_id not in whole.stuck]
        decision = _ask(moving, free, now)
        whole = _whole(moving, decision, free)
    changes = tuple(
        Change(model_id=each.model_id, before=each.replicas, after=each.replicas + change)
        for each in members
        if (change := whole.changes.get(each.model_id, 0))
    )
    held = {each.model_id: float(each.replicas) for each in members}
    needs = {**held, **first.needs}
    return Allotment(
        changes=changes,
        needs=needs,
        targets={**held, **first.targets},
        reason=_reason(members, devices, needs, first.shared, changes, waiting),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What the policy said: needs and targets in replicas, moves in units of devices."""

    needs: Mapping[str, float]
    targets: Mapping[str, float]
    shared: str
    gets: Mapping[str, int]
    """By receiver, who lacks most first."""
    gives: Mapping[str, int]
    unit: int


def _ask(members: Sequence[Member], free: int, now: datetime) -> _Asked:
    unit = gcd(*(each.devices for each in members)) or 1
    sizes = {each.model_id: each.devices // unit for each in members}
    spare = Model(model_id=_FREE, default=0, least=0, replicas=free // unit, dues=())
    decision = rebalance(
        [*(_in_units(each, sizes[each.model_id]) for each in members), spare],
        now,
        most_moves=MOST_MOVES * max(sizes.values(), default=1),
    )
    gets, gives = _sums(decision)
    return _Asked(
        needs={model_id: decision.needs[model_id] / size for model_id, size in sizes.items()},
        targets={model_id: decision.targets[model_id] / size for model_id, size in sizes.items()},
        shared=decision.shared,
        gets=gets,
        gives=gives,
        unit=unit,
    )


def _in_units(member: Member, size: int) -> Model:
    return Model(
        model_id=member.model_id,
        default=member.default * size,
        least=member.least * size,
        most=member.most * size,
        replicas=member.replicas * size,
        dues=[Due(deadline_at=due.deadline_at, work_s=due.work_s * size) for due in member.dues],
        other_s=member.other_s * size,
        start_up=member.start_up,
        lot=size,
    )


def _can_give(donor: Member, asked: _Asked) -> int:
    """Return the replicas that it can do without: the last one only if it has no right to one."""
    has_work = donor.other_s > 0 or any(due.work_s > 0 for due in donor.dues)
    keeps_one = has_work and asked.targets[donor.model_id] >= 1
    return donor.replicas - max(donor.least, 1 if keeps_one else 0)


def _sums(decision: Rebalance) -> tuple[dict[str, int], dict[str, int]]:
    gets: dict[str, int] = {}
    gives: dict[str, int] = {}
    for move in decision.moves:
        gets[move.receiver] = gets.get(move.receiver, 0) + move.replicas
        if move.donor != _FREE:
            gives[move.donor] = gives.get(move.donor, 0) + move.replicas
    return gets, gives


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    """Moves in whole replicas, by model; who cannot take part in any."""

    changes: Mapping[str, int]
    stuck: frozenset[str]
    receivers: frozenset[str]


def _whole(members: Sequence[Member], asked: _Asked, free: int) -> _Whole:
    sizes = {each.model_id: each.devices // asked.unit for each in members}
    given = {donor: units // sizes[donor] for donor, units in asked.gives.items()}
    member_of = {each.model_id: each for each in members}
    if not all(member_of[receiver].replicas for receiver in asked.gets):
        # Where somebody has none, a part of a replica is given as a whole one.
        given = {
            donor: min(-(-units // sizes[donor]), _can_give(member_of[donor], asked))
            for donor, units in asked.gives.items()
        }
    stuck = {model_id for model_id, units in asked.gets.items() if units < sizes[model_id]}
    stuck |= {donor for donor, replicas in given.items() if not replicas}
    idle = free // asked.unit
    room = idle + sum(replicas * sizes[donor] for donor, replicas in given.items())
    changes: dict[str, int] = {}
    starts = MOST_MOVES
    used = 0
    for receiver, units in asked.gets.items():
        size = sizes[receiver]
        count = min(units // size, (room - used) // size, starts)
        if count:
            changes[receiver] = count
            starts -= count
            used += count * size
    # Nobody drains for what free devices do, or for nobody.
    surplus = room - used
    for donor in sorted(given, key=lambda donor: -sizes[donor]):
        kept = min(given[donor], surplus // sizes[donor])
        surplus -= kept * sizes[donor]
        if given[donor] > kept:
            changes[donor] = kept - given[donor]
    return _Whole(changes=changes, stuck=frozenset(stuck), receivers=frozenset(asked.gets))


def _reason(
    members: Sequence[Member],
    devices: int,
    needs: Mapping[str, float],
    shared: str,
    changes: Sequence[Change],
    waiting: set[str],
) -> str:
    needed = sum(needs[each.model_id] * each.devices for each in members)
    moves = ", ".join(f"{each.model_id} {each.before} → {each.after}" for each in changes)
    return "; ".join(
        [
            f"{needed:.1f} of {devices} devices are needed: {shared}",
            moves or "nothing is worth a move",
            *(
                f"{each.model_id} waits for {each.devices} devices at once"
                for each in members
                if each.model_id in waiting
            ),
            *(f"{each.model_id} is pinned" for each in members if each.is_pinned),
        ]
    )
