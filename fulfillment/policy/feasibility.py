"""Whether a workflow would be done in time, how much of it, and what would make it all.

Whether all is promised, `commitments.admit` decides. What is told beside that is counted from the
safe side: what fits beside all that is committed, nobody giving way. As much is always promised.
A later deadline, more replicas or fewer rows never let less fit; of what `admit` promises, which
weighs workflows against each other, that cannot be said in every case. So the changes named here
were each tried: they are enough, and the least that was found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import accumulate
from math import ceil, floor, inf
from typing import Final

from fulfillment.policy.commitments import NEW_MARGIN, Capacity, Demand, admit
from fulfillment.policy.priority import PriorityClass

MOST_SERVERS: Final = 100_000
"""Nobody is told to get more replicas than that."""
LEAST_SCORES: Final = {PriorityClass.HIGH: 67, PriorityClass.MIDDLE: 34, PriorityClass.LOW: 0}
"""The lowest API score of each class."""

_ALMOST: Final = 1e-9

Promised = Callable[[Sequence[Demand], Demand, Capacity, datetime], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """Changes each of which alone has all promised; None where none of its kind was found."""

    deadline_s: int | None
    """From now."""
    servers: int | None
    """Replicas, or calls of an external model at a time, all in all."""
    rows: int | None
    """How many of them."""
    priority: int | None
    """The lowest score of a higher class."""


def fitting(
    demands: Sequence[Demand], newcomer: Demand, capacity: Capacity, now: datetime
) -> float:
    """Return how many batches of the newcomer fit; it is not among the demands."""
    most = inf
    for deadline_at, due in _dues(demands, newcomer):
        most = min(most, _room(capacity, deadline_at, now) - due)
    return max(0.0, most / newcomer.cost)


def fits(demands: Sequence[Demand], newcomer: Demand, capacity: Capacity, now: datetime) -> bool:
    """Say whether all that the newcomer wants fits."""
    return fitting(demands, newcomer, capacity, now) >= newcomer.wanted * (1 - _ALMOST)


def is_promised(
    demands: Sequence[Demand], newcomer: Demand, capacity: Capacity, now: datetime
) -> bool:
    """Say whether all that the newcomer wants would be promised."""
    return (
        newcomer.workflow_id
        not in admit([*demands, newcomer], newcomer.workflow_id, capacity, now).cut
    )


def leftovers(
    demands: Sequence[Demand], cut: Mapping[int, float], capacity: Capacity, now: datetime
) -> Mapping[int, float]:
    """Return how many of the batches that are cut fit all the same, the smallest workflow first."""
    found = sorted(demands, key=lambda demand: (demand.deadline_at, demand.workflow_id))
    dues = accumulate(
        demand.cost
        * (
            max(0.0, demand.wanted + demand.cut - cut.get(demand.workflow_id, 0.0))
            + demand.in_flight / 2
        )
        for demand in found
    )
    slack = [
        _room(capacity, demand.deadline_at, now) - due
        for demand, due in zip(found, dues, strict=True)
    ]
    fit: dict[int, float] = {}
    places = [place for place, demand in enumerate(found) if cut.get(demand.workflow_id)]
    for place in sorted(places, key=lambda p: (cut[found[p].workflow_id], p)):
        demand = found[place]
        part = min(cut[demand.workflow_id], max(0.0, min(slack[place:])) / demand.cost)
        fit[demand.workflow_id] = part
        slack[place:] = [left - part * demand.cost for left in slack[place:]]
    return fit


def remedies(
    demands: Sequence[Demand],
    newcomer: Demand,
    capacity: Capacity,
    now: datetime,
    *,
    rows: int,
    longest_s: int,
    can_grow: bool = True,
    promised: Promised = is_promised,
) -> Remedies:
    """Return what would have the newcomer promised in full, which it is not.

    `rows` is what its wanted batches are of; `longest_s` the longest deadline that may be asked
    for; `can_grow` says whether more replicas would help.
    """

    def is_enough(changed: Demand, of: Capacity = capacity) -> bool:
        return promised(demands, changed, of, now)

    def due_in(deadline_s: int) -> Demand:
        return replace(newcomer, deadline_at=now + timedelta(seconds=deadline_s))

    def part(count: int) -> Demand:
        return replace(newcomer, wanted=newcomer.wanted * count / rows)

    safe_s = _least(0, longest_s, lambda s: fits(demands, due_in(s), capacity, now))
    safe_servers = _safe_servers(demands, newcomer, capacity, now) if can_grow else None
    safe_rows = 0
    if newcomer.wanted > 0:
        share = fitting(demands, newcomer, capacity, now) / newcomer.wanted
        safe_rows = floor(min(1.0, share) * rows + _ALMOST)
    return Remedies(
        deadline_s=_least(0, safe_s or longest_s, lambda s: is_enough(due_in(s))),
        servers=safe_servers
        and _least(0, safe_servers, lambda n: is_enough(newcomer, replace(capacity, replicas=n))),
        rows=_most(safe_rows, rows, lambda count: is_enough(part(count))) or None,
        priority=next(
            (
                LEAST_SCORES[cls]
                for cls in sorted(LEAST_SCORES, reverse=True)
                if cls < newcomer.priority_class
                and is_enough(replace(newcomer, priority_class=cls))
            ),
            None,
        ),
    )


def _safe_servers(
    demands: Sequence[Demand], newcomer: Demand, capacity: Capacity, now: datetime
) -> int | None:
    """Return the replicas with which all fits, None if that is too many."""
    most = 0.0
    for deadline_at, due in _dues(demands, newcomer):
        one = _room(replace(capacity, replicas=1), deadline_at, now)
        if not one:
            return None
        most = max(most, (due + newcomer.wanted * newcomer.cost) / one)
    servers = max(1, ceil(most * (1 - _ALMOST)))
    return servers if servers <= MOST_SERVERS else None


def _least(too_few: int, enough: int, is_enough: Callable[[int], bool]) -> int | None:
    """Return the least number found that is enough; None if the largest is not."""
    if not is_enough(enough):
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
    return enough


def _most(enough: int, too_many: int, is_enough: Callable[[int], bool]) -> int:
    """Return the largest number found that is enough, as `enough` is."""
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        enough, too_many = (middle, too_many) if is_enough(middle) else (enough, middle)
    return enough


def _dues(demands: Sequence[Demand], newcomer: Demand) -> list[tuple[datetime, float]]:
    """Return the deadlines from the newcomer's on, and the work that is committed by each."""
    due = newcomer.in_flight / 2 * newcomer.cost
    found = {newcomer.deadline_at: due}
    for demand in sorted(demands, key=lambda demand: demand.deadline_at):
        due += (demand.wanted + demand.in_flight / 2) * demand.cost
        found[max(demand.deadline_at, newcomer.deadline_at)] = due
    return list(found.items())


def _room(capacity: Capacity, deadline_at: datetime, now: datetime) -> float:
    """Return the batches of ordinary cost that may be promised until a deadline."""
    left_s = max(0.0, (deadline_at - now).total_seconds())
    return NEW_MARGIN * capacity.replicas * left_s / capacity.seconds_a_batch
