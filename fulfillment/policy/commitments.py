"""Commitments: which workflows of a rater are expected to be finished in time.

Demands are looked at by deadline. What is due by a deadline, in replica-seconds, must fit into what
the reachable replicas can do until then. Where it doesn't, workflows are given up, one by one and
as a whole: a workflow of which a part is late is late, and two that are both given up by half are
two that are late where one could have been. Given up first is, of an owner with more than its share
of what is due by then, the lowest class and then the largest demand; where no owner has more, the
lowest class and the largest demand of all.

What is given up is not refused: it is served as best effort, and committed to again when there is
room for it as a whole, the smallest first.

The answer is a forecast, not a guarantee: it knows neither who comes tomorrow nor which batches
take longer than the mean. That is what the margins are for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Final

from fulfillment.policy.priority import PriorityClass

NEW_MARGIN: Final = 0.6
"""Share of the capacity until a deadline that may be promised by what is new, or again."""
OLD_MARGIN: Final = 0.95
"""The same for what was promised before: a promise is not taken back for a small error."""
OWNER_SHARE: Final = 0.3
"""Of the capacity until a deadline, above which an owner's demands are given up first."""

_NEGLIGIBLE: Final = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Open work of one workflow, in batches."""

    workflow_id: int
    owner: str = ""
    priority_class: PriorityClass
    deadline_at: datetime
    wanted: float
    """Committed and not sent yet."""
    cut: float = 0.0
    """Given up and not sent yet."""
    in_flight: float = 0.0
    cost: float = 1.0
    """What its batches take, in times of the rater's mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What serves a rater."""

    replicas: float
    """That it can reach by the deadlines, not only those that it has now."""
    seconds_a_batch: float
    """Measured, as a moving average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commitment:
    """Which workflows are given up."""

    cut: Mapping[int, float]
    """All batches of such a workflow that are not sent yet, by workflow."""
    reason: str


def admit(
    demands: Sequence[Demand], newcomer: int, capacity: Capacity, now: datetime
) -> Commitment:
    """Give up until all commitments fit, now that `newcomer` has come; it is among the demands."""
    new = next(demand for demand in demands if demand.workflow_id == newcomer)
    margins = [
        NEW_MARGIN if demand.deadline_at >= new.deadline_at else OLD_MARGIN
        for demand in _by_deadline(demands)
    ]
    return _commitment(_Plan(demands, capacity, now).fit(margins))


def renew(demands: Sequence[Demand], capacity: Capacity, now: datetime) -> Commitment:
    """Give up what fits no more, and commit again to what fits as a whole."""
    plan = _Plan(demands, capacity, now).fit([OLD_MARGIN] * len(demands))
    return _commitment(plan.give_back(NEW_MARGIN))


def _by_deadline(demands: Sequence[Demand]) -> list[Demand]:
    return sorted(demands, key=lambda demand: (demand.deadline_at, demand.workflow_id))


def _commitment(plan: "_Plan") -> Commitment:
    cut = {
        demand.workflow_id: demand.wanted + demand.cut
        for demand, is_cut in zip(plan.demands, plan.is_cut, strict=True)
        if is_cut and demand.wanted + demand.cut > _NEGLIGIBLE
    }
    if not cut:
        return Commitment(cut=cut, reason="all is expected in time")
    return Commitment(
        cut=cut,
        reason=f"{sum(cut.values()):.1f} batches of {len(cut)} workflows do not fit before their "
        "deadlines",
    )


class _Plan:
    """Commitments while they are made: demands by deadline, and which of them are given up."""

    def __init__(self, demands: Sequence[Demand], capacity: Capacity, now: datetime) -> None:
        self.demands = _by_deadline(demands)
        self.is_cut = [demand.cut > _NEGLIGIBLE for demand in self.demands]
        batches_s = max(capacity.seconds_a_batch, _NEGLIGIBLE)
        self._work = [(demand.wanted + demand.cut) * demand.cost for demand in self.demands]
        """Batches of ordinary cost that are not sent yet."""
        self._flying = [demand.in_flight / 2 * demand.cost for demand in self.demands]
        self._room = [
            capacity.replicas * max(0.0, (demand.deadline_at - now).total_seconds()) / batches_s
            for demand in self.demands
        ]
        """Batches until each deadline."""

    def fit(self, margins: Sequence[float]) -> "_Plan":
        """Give up demands of the prefix of each deadline by which too much is due."""
        due = 0.0
        for place in range(len(self.demands)):
            due += self._flying[place] + (0.0 if self.is_cut[place] else self._work[place])
            while due - margins[place] * self._room[place] > _NEGLIGIBLE:
                victim = self._victim(place)
                if victim is None:
                    break
                self.is_cut[victim] = True
                due -= self._work[victim]
        return self

    def give_back(self, margin: float) -> "_Plan":
        """Commit again where there is slack by the deadline and all later ones."""
        dues = accumulate(
            flying + (0.0 if is_cut else work)
            for work, flying, is_cut in zip(self._work, self._flying, self.is_cut, strict=True)
        )
        slack = [margin * room - due for room, due in zip(self._room, dues, strict=True)]
        places = [place for place, is_cut in enumerate(self.is_cut) if is_cut]
        for place in sorted(places, key=lambda p: (self._work[p], p)):
            # What was given before takes from every deadline from its own on.
            if self._work[place] <= min(slack[place:]):
                self.is_cut[place] = False
                slack[place:] = [batches - self._work[place] for batches in slack[place:]]
        return self

    def _victim(self, last: int) -> int | None:
        """Return which demand of those up to `last` to give up; None if nothing is left."""
        standing = [
            place
            for place in range(last + 1)
            if not self.is_cut[place] and self._work[place] > _NEGLIGIBLE
        ]
        if not standing:
            return None
        owned: dict[str, float] = {}
        for place in standing:
            owner = self.demands[place].owner
            owned[owner] = owned.get(owner, 0.0) + self._work[place]
        largest = max(owned, key=lambda owner: (owned[owner], owner))
        if owned[largest] > OWNER_SHARE * self._room[last]:
            standing = [place for place in standing if self.demands[place].owner == largest]
        return max(
            standing,
            key=lambda place: (self.demands[place].priority_class, self._work[place], place),
        )
