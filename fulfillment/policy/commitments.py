"""Commitments: how much of each workflow a rater is expected to finish in time.

Demands are looked at by deadline. What is due by a deadline, in replica-seconds, must fit into what
the reachable replicas can do until then; where it doesn't, batches are cut from the commitment, of
low classes first, then of the largest demand. What is cut is not refused: it is served as best
effort, and slack that shows later is given back, the smallest demand first.

The answer is a forecast, not a guarantee: it knows neither who comes tomorrow nor which batches
take longer than the mean. That is what the margins are for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Final

from fulfillment.policy.priority import PriorityClass

NEW_MARGIN: Final = 0.9
"""Share of the capacity until a deadline that may be promised by what is new."""
OLD_MARGIN: Final = 0.98
"""The same for what was promised before: a promise is not taken back for a small error."""

_NEGLIGIBLE: Final = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Open work of one workflow, in batches."""

    workflow_id: int
    priority_class: PriorityClass
    deadline_at: datetime
    wanted: float
    """Committed and not sent yet."""
    cut: float = 0.0
    """Not committed."""
    in_flight: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What serves a rater."""

    replicas: float
    """That it can reach by the deadlines, not only those that it has now."""
    seconds_a_batch: float
    """Measured, as a moving average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commitment:
    """Batches that are not committed, by workflow; those of whom all is committed are left out."""

    cut: Mapping[int, float]
    reason: str


def admit(
    demands: Sequence[Demand], newcomer: int, capacity: Capacity, now: datetime
) -> Commitment:
    """Cut until all commitments fit, now that `newcomer` has come; it is among the demands."""
    new = next(demand for demand in demands if demand.workflow_id == newcomer)
    margins = [
        NEW_MARGIN if demand.deadline_at >= new.deadline_at else OLD_MARGIN
        for demand in _by_deadline(demands)
    ]
    return _commitment(_Plan(demands, capacity, now).fit(margins))


def renew(demands: Sequence[Demand], capacity: Capacity, now: datetime) -> Commitment:
    """Cut what fits no more, and give slack back to what was cut."""
    plan = _Plan(demands, capacity, now).fit([OLD_MARGIN] * len(demands))
    return _commitment(plan.give_back(NEW_MARGIN))


def _by_deadline(demands: Sequence[Demand]) -> list[Demand]:
    return sorted(demands, key=lambda demand: (demand.deadline_at, demand.workflow_id))


def _commitment(plan: "_Plan") -> Commitment:
    cut = {
        demand.workflow_id: cut
        for demand, cut in zip(plan.demands, plan.cut, strict=True)
        if cut > _NEGLIGIBLE
    }
    if not cut:
        return Commitment(cut=cut, reason="all is expected in time")
    batches = sum(cut.values())
    return Commitment(
        cut=cut,
        reason=f"{batches:.1f} batches of {len(cut)} workflows do not fit before their deadlines",
    )


class _Plan:
    """Commitments while they are made: demands by deadline, with what is wanted and cut of each."""

    def __init__(self, demands: Sequence[Demand], capacity: Capacity, now: datetime) -> None:
        self.demands = _by_deadline(demands)
        self.wanted = [demand.wanted for demand in self.demands]
        self.cut = [demand.cut for demand in self.demands]
        self._batches_s = max(capacity.seconds_a_batch, _NEGLIGIBLE)
        self._room = [
            capacity.replicas * max(0.0, (demand.deadline_at - now).total_seconds())
            for demand in self.demands
        ]
        """Replica-seconds until each deadline."""

    def fit(self, margins: Sequence[float]) -> "_Plan":
        """Cut the prefix of each deadline by which too much is due."""
        due = 0.0
        for place, demand in enumerate(self.demands):
            due += (self.wanted[place] + demand.in_flight / 2) * self._batches_s
            excess = (due - margins[place] * self._room[place]) / self._batches_s
            if excess > _NEGLIGIBLE:
                due -= self._cut(place, excess) * self._batches_s
        return self

    def give_back(self, margin: float) -> "_Plan":
        """Commit again to what was cut where there is slack by its deadline and all later ones."""
        dues = accumulate(
            (wanted + demand.in_flight / 2) * self._batches_s
            for wanted, demand in zip(self.wanted, self.demands, strict=True)
        )
        slack = [
            (margin * room - due) / self._batches_s
            for room, due in zip(self._room, dues, strict=True)
        ]
        places = [place for place, cut in enumerate(self.cut) if cut > _NEGLIGIBLE]
        for place in sorted(places, key=lambda p: (self.wanted[p] + self.cut[p], p)):
            # What was given before takes from every deadline from its own on.
            back = min(self.cut[place], min(slack[place:]))
            if back > _NEGLIGIBLE:
                self.wanted[place] += back
                self.cut[place] -= back
                slack[place:] = [batches - back for batches in slack[place:]]
        return self

    def _cut(self, last: int, excess: float) -> float:
        """Cut so many batches from the demands up to `last`; return how many could be cut."""
        done = 0.0
        while done < excess - _NEGLIGIBLE:
            place = max(
                range(last + 1),
                key=lambda p: (
                    self.wanted[p] > _NEGLIGIBLE,
                    self.demands[p].priority_class,
                    self.wanted[p],
                    p,
                ),
            )
            part = min(self.wanted[place], excess - done)
            if part <= _NEGLIGIBLE:
                break
            self.wanted[place] -= part
            self.cut[place] += part
            done += part
        return done
