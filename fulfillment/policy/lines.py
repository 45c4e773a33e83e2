"""A rater's lines: its workflows by class, in the order in which they are served.

A workflow's score is the work of its owner up to and including it, over the owner's weight, times
the share of its time that is left: requests that are open, in the order of their number, and those
that the owner was served within minutes, which count a little more (`fairness`). The smallest is
served first. Making the lines of thousands of workflows costs milliseconds, so that they may serve
several decisions (`ordering`): scores change slowly.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from fulfillment.policy import fairness, pressure
from fulfillment.policy.fairness import OverShare, Owned, Usage
from fulfillment.policy.priority import PriorityClass

LEAST_SLACK: Final = 0.02
"""Late workflows are fifty times as urgent as fresh ones, and no more."""

EQUAL: Final[Mapping[str, float]] = MappingProxyType({})
"""Weights of owners where all weigh 1."""
UNUSED: Final = Usage()

Scored = tuple[bool, float, int, str]
"""Whether its owner is over its share, score, workflow, owner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one workflow waits for; those that are paused or ending are left out by the caller."""

    workflow_id: int
    owner: str
    priority_class: PriorityClass
    ready_batches: int
    open_requests: int
    submitted_at: datetime
    deadline_at: datetime
    batch_size: int = 12
    cost: float = 1.0
    """What its requests take, in times of the rater's mean."""

    @property
    def work(self) -> float:
        """Open requests, dear ones counted for more."""
        return self.open_requests * self.cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The READY batches of one class, in the order in which they are served."""

    by_score: tuple[Scored, ...]
    """Workflows, the smallest score first."""
    by_owner: Mapping[str, tuple[Scored, ...]]
    pressed: tuple[Scored, ...]
    """Those due by a deadline that presses, the smallest score first."""
    over: Mapping[str, OverShare]
    """Owners over their share."""
    charges: Mapping[int, float]
    """What a batch of a workflow counts for, in requests."""
    scales: Mapping[int, float]
    """What a request counts for in a workflow's score."""
    ready: Mapping[int, int]
    """READY batches by workflow."""
    owner_ready: Mapping[str, int]
    owners: Mapping[int, str]
    """Owner by workflow."""
    total: int
    """READY batches of all."""
    newcomers: tuple[str, ...]
    """Owners by their oldest workflow: those that are not in the queue yet join it so."""


Order = Mapping[PriorityClass, Line]
"""The lines of a rater. Made of thousands of workflows it costs milliseconds, so that it may serve
several decisions: scores change slowly."""


def line_up(
    loads: Sequence[Load],
    now: datetime,
    *,
    usage: Usage = UNUSED,
    requests_per_s: float | None = None,
    weights: Mapping[str, float] = EQUAL,
) -> Order:
    """Return the order in which workflows are served, as it is now.

    `usage` must be aged to `now`. Where it is not known how much the rater can do, no deadline
    presses and nobody is over its share.
    """
    by_class: dict[PriorityClass, list[Load]] = {cls: [] for cls in PriorityClass}
    for load in loads:
        by_class[load.priority_class].append(load)
    pace = requests_per_s or 0.0
    over = fairness.over_share(usage, _owned(loads), requests_per_s=pace, now=now, weights=weights)
    order = {}
    above: list[pressure.Due] = []
    for cls, of_class in by_class.items():
        dues = [] if cls is PriorityClass.BEST_EFFORT else _dues(of_class, over)
        if any(load.ready_batches for load in of_class):
            pressed = pressure.pressed(dues, above, requests_per_s=pace, now=now)
            scales = {
                load.workflow_id: slack(load, now) / weights.get(load.owner, 1.0)
                for load in of_class
                if load.ready_batches
            }
            scored = tuple(sorted(_scored(of_class, usage.recent, over, scales)))
            order[cls] = _line(of_class, scored, scales, pressed, over)
        above += dues
    return order


def left(order: Order, taken: Mapping[int, int]) -> dict[PriorityClass, int]:
    """Return the READY batches that are left of each class; `taken` is what left, by workflow."""
    return {
        cls: line.total - sum(n for w, n in taken.items() if w in line.ready)
        for cls, line in order.items()
    }


def without(order: Order, workflow_ids: Collection[int]) -> Order:
    """Return the lines without some workflows, and without classes that then have none."""
    left = {}
    for cls, line in order.items():
        ready = {w: n for w, n in line.ready.items() if w not in workflow_ids}
        if ready:
            left[cls] = line if len(ready) == len(line.ready) else _part(line, ready)
    return left


def _part(line: Line, ready: Mapping[int, int]) -> Line:
    by_owner = {
        owner: kept
        for owner, scored in line.by_owner.items()
        if (kept := tuple(entry for entry in scored if entry[2] in ready))
    }
    owner_ready: dict[str, int] = {}
    for workflow_id, batches in ready.items():
        owner = line.owners[workflow_id]
        owner_ready[owner] = owner_ready.get(owner, 0) + batches
    return replace(
        line,
        by_score=tuple(entry for entry in line.by_score if entry[2] in ready),
        by_owner=by_owner,
        pressed=tuple(entry for entry in line.pressed if entry[2] in ready),
        ready=ready,
        owner_ready=owner_ready,
        total=sum(ready.values()),
        newcomers=tuple(owner for owner in line.newcomers if owner in owner_ready),
    )


def slack(load: Load, now: datetime) -> float:
    """Return the share of a workflow's time that is left, within [0.02, 1]."""
    if load.deadline_at <= load.submitted_at:
        return LEAST_SLACK
    left = (load.deadline_at - now) / (load.deadline_at - load.submitted_at)
    return min(1.0, max(LEAST_SLACK, left))


def _line(
    loads: Sequence[Load],
    scored: tuple[Scored, ...],
    scales: Mapping[int, float],
    pressed: frozenset[int],
    over: Mapping[str, OverShare],
) -> Line:
    by_owner: dict[str, list[Scored]] = {}
    for entry in scored:
        by_owner.setdefault(entry[3], []).append(entry)
    since: dict[str, datetime] = {}
    ready: dict[int, int] = {}
    owner_ready: dict[str, int] = {}
    for load in loads:
        if load.ready_batches:
            ready[load.workflow_id] = load.ready_batches
            owner_ready[load.owner] = owner_ready.get(load.owner, 0) + load.ready_batches
            since[load.owner] = min(load.submitted_at, since.get(load.owner, load.submitted_at))
    return Line(
        by_score=scored,
        by_owner={owner: tuple(entries) for owner, entries in by_owner.items()},
        pressed=tuple(entry for entry in scored if entry[2] in pressed) if pressed else (),
        over={owner: over[owner] for owner in owner_ready if owner in over},
        scales=scales,
        charges={load.workflow_id: load.batch_size * load.cost for load in loads},
        ready=ready,
        owner_ready=owner_ready,
        owners={workflow_id: owner for _, _, workflow_id, owner in scored},
        total=sum(ready.values()),
        newcomers=tuple(sorted(since, key=lambda owner: (since[owner], owner))),
    )


def _scored(
    loads: Sequence[Load],
    recent: Mapping[str, float],
    over: Mapping[str, OverShare],
    scales: Mapping[int, float],
) -> Iterator[Scored]:
    work: dict[str, float] = {}
    for load in sorted(loads, key=attrgetter("open_requests", "workflow_id")):
        owner = load.owner
        if owner not in work:
            work[owner] = fairness.RECENT_WEIGHT * recent.get(owner, 0.0)
        work[owner] += load.open_requests
        if load.ready_batches:
            score = work[owner] * scales[load.workflow_id]
            yield owner in over, score, load.workflow_id, owner


def _owned(loads: Sequence[Load]) -> Mapping[str, Owned]:
    work: dict[str, float] = {}
    last: dict[str, datetime] = {}
    for load in loads:
        work[load.owner] = work.get(load.owner, 0.0) + load.work
        last[load.owner] = max(load.deadline_at, last.get(load.owner, load.deadline_at))
    return {
        owner: Owned(requests=requests, last_deadline_at=last[owner])
        for owner, requests in work.items()
    }


def _dues(loads: Sequence[Load], over: Mapping[str, OverShare]) -> list[pressure.Due]:
    """Return what may press: not what stands behind all others anyway."""
    return [
        pressure.Due(workflow_id=load.workflow_id, requests=load.work, deadline_at=load.deadline_at)
        for load in loads
        if load.owner not in over
    ]
