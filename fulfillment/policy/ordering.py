"""The order of service: which workflows' batches leave when a rater has room.

Three rules, one inside the other:

1. *Class.* The highest class with READY batches is served. But each class below HIGH that has some
   gains its share as credit with every dispatch, up to 1; the highest class with a full credit is
   served instead, and pays it.
2. *Owner.* In a class, every second dispatch is a turn: it goes to the owner served longest ago.
3. *Workflow.* Every other dispatch goes to the workflow with the smallest score: open requests of
   its owner up to and including it, times the share of its time that is left. In a turn, to the
   smallest of that owner.

What follows, counted in dispatches of one rater:

- A class with READY batches waits at most `longest_wait` dispatches (middle 7, low 14, best effort
  52 with the default shares), whatever is above it. No score or age moves a workflow out of its
  class.
- While another owner has READY batches in the class, an owner gets at most n/2 + 1 of n dispatches
  of it, in whatever portions the room comes; splitting a job into many does not help.
- An owner with READY batches waits at most 2 x (owners before it in the queue + 1) dispatches of
  its class, as later ones queue behind it.

Weakness: while several owners wait, half of a class is not served shortest first, which costs
short jobs up to twice their time. Shares by use over hours, forecasts and admission are not made
here.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import ceil, floor
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from fulfillment.policy.priority import PriorityClass

MAX_CLAIMS: Final = 500
"""Most batches that one pass of a rater claims."""

DEFAULT_SHARES: Final[Mapping[PriorityClass, float]] = MappingProxyType(
    {PriorityClass.MIDDLE: 0.15, PriorityClass.LOW: 0.08, PriorityClass.BEST_EFFORT: 0.02}
)
"""Credit a dispatch. As it ends at 1, a class is sure of one dispatch in `longest_wait`."""

LEAST_SLACK: Final = 0.1
"""Late workflows are ten times as urgent as fresh ones, and no more."""

# Ten times a share of 0.1 must count as a full credit.
_EPSILON = 1e-9

_Scored = tuple[float, int, str]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What a rater's order remembers from pass to pass; empty at start, lost without harm."""

    credits: Mapping[PriorityClass, float] = field(default_factory=dict)
    queues: Mapping[PriorityClass, tuple[str, ...]] = field(default_factory=dict)
    """Owners that wait in a class, the one served longest ago first."""
    turns: frozenset[PriorityClass] = frozenset()
    """Classes whose next dispatch is an owner's turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """How many batches of a workflow may leave now."""

    workflow_id: int
    batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Picks, one a workflow, in the order of their first dispatch."""

    picks: tuple[Pick, ...]
    memory: Memory
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The READY batches of one class, in the order in which they are served."""

    by_score: tuple[_Scored, ...]
    """Workflows, the smallest score first."""
    by_owner: Mapping[str, tuple[_Scored, ...]]
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


def next_batches(
    loads: Sequence[Load],
    *,
    room: int,
    now: datetime,
    memory: Memory,
    shares: Mapping[PriorityClass, float] = DEFAULT_SHARES,
) -> Decision:
    """Fill the room of a rater: min(room, 500, all that is READY) batches.

    The order of `loads` does not matter. Loads without READY batches count as work of their owner.
    """
    return fill(line_up(loads, now), room=room, memory=memory, shares=shares)


def line_up(loads: Sequence[Load], now: datetime) -> Order:
    """Return the order in which workflows are served, as it is now."""
    by_class: dict[PriorityClass, list[Load]] = {cls: [] for cls in PriorityClass}
    for load in loads:
        by_class[load.priority_class].append(load)
    return {
        cls: _line(of_class, now)
        for cls, of_class in by_class.items()
        if any(load.ready_batches for load in of_class)
    }


def fill(
    order: Order,
    *,
    room: int,
    memory: Memory,
    taken: Mapping[int, int] = MappingProxyType({}),
    shares: Mapping[PriorityClass, float] = DEFAULT_SHARES,
) -> Decision:
    """Fill the room of a rater by an order made before; `taken` is what left since, by workflow."""
    served_lines = {
        cls: _Served(line, memory.queues.get(cls, ()), cls in memory.turns, taken)
        for cls, line in order.items()
    }
    lines = {cls: line for cls, line in served_lines.items() if line.ready}
    dispatches = min(room, MAX_CLAIMS, sum(line.ready for line in lines.values()))
    credits = dict(memory.credits)
    picked: dict[int, int] = {}
    served = dict.fromkeys(lines, 0)
    by_credit = dict.fromkeys(lines, 0)
    for _ in range(dispatches):
        cls, is_floor = _next_class(lines, credits, shares)
        workflow_id = lines[cls].serve()
        picked[workflow_id] = picked.get(workflow_id, 0) + 1
        served[cls] += 1
        by_credit[cls] += is_floor
    return Decision(
        picks=tuple(Pick(workflow_id=w, batches=n) for w, n in picked.items()),
        memory=_remember(memory, credits, lines),
        reason=_reason(served, by_credit, room),
    )


def slack(load: Load, now: datetime) -> float:
    """Return the share of a workflow's time that is left, within [0.1, 1]."""
    if load.deadline_at <= load.submitted_at:
        return LEAST_SLACK
    left = (load.deadline_at - now) / (load.deadline_at - load.submitted_at)
    return min(1.0, max(LEAST_SLACK, left))


def longest_wait(cls: PriorityClass, shares: Mapping[PriorityClass, float] = DEFAULT_SHARES) -> int:
    """Return the dispatch of a rater, from 1, by which a class with READY batches is served.

    Its credit is full after 1/share dispatches. Then classes between HIGH and it may go first:
    each has a full credit at most, and gains its share with each further dispatch.
    """
    before = [share for c, share in shares.items() if c < cls]
    return ceil(1 / shares[cls] - _EPSILON) + floor(
        (len(before) - sum(before)) / (1 - sum(before)) + _EPSILON
    )


def _line(loads: Sequence[Load], now: datetime) -> Line:
    by_score = tuple(sorted(_scored(loads, now)))
    by_owner: dict[str, list[_Scored]] = {}
    for entry in by_score:
        by_owner.setdefault(entry[2], []).append(entry)
    since: dict[str, datetime] = {}
    ready: dict[int, int] = {}
    owner_ready: dict[str, int] = {}
    for load in loads:
        if load.ready_batches:
            ready[load.workflow_id] = load.ready_batches
            owner_ready[load.owner] = owner_ready.get(load.owner, 0) + load.ready_batches
            since[load.owner] = min(load.submitted_at, since.get(load.owner, load.submitted_at))
    return Line(
        by_score=by_score,
        by_owner={owner: tuple(entries) for owner, entries in by_owner.items()},
        ready=ready,
        owner_ready=owner_ready,
        owners={workflow_id: owner for _, workflow_id, owner in by_score},
        total=sum(ready.values()),
        newcomers=tuple(sorted(since, key=lambda owner: (since[owner], owner))),
    )


class _Served:
    """A line while it is served: what is left of it, without a copy of thousands of workflows."""

    def __init__(
        self, line: Line, queue: Sequence[str], turn: bool, taken: Mapping[int, int]
    ) -> None:
        self._line = line
        self._taken = {w: min(n, line.ready[w]) for w, n in taken.items() if w in line.ready}
        self._passed: dict[str | None, int] = {}
        """Entries that are used up, at the head of an owner's workflows, or (None) of all."""
        self._owner_taken: dict[str, int] = {}
        for workflow_id, n in self._taken.items():
            owner = line.owners[workflow_id]
            self._owner_taken[owner] = self._owner_taken.get(owner, 0) + n
        self.ready = line.total - sum(self._taken.values())
        self.queue = OrderedDict.fromkeys(queue)
        self.turn = turn
        self._is_lined_up = False

    def serve(self) -> int:
        """Take one batch off the line and return its workflow."""
        if not self._is_lined_up:
            self._line_up()
        owner = (
            next(iter(self.queue)) if self.turn else self._smallest(None, self._line.by_score)[2]
        )
        workflow_id = self._smallest(owner, self._line.by_owner[owner])[1]
        self.turn = not self.turn
        self.ready -= 1
        self._taken[workflow_id] = self._taken.get(workflow_id, 0) + 1
        self._owner_taken[owner] = self._owner_taken.get(owner, 0) + 1
        if self._owner_left(owner):
            self.queue.move_to_end(owner)
        else:
            del self.queue[owner]
        return workflow_id

    def _line_up(self) -> None:
        # Only for a class that is served: the others keep their queue.
        self.queue = OrderedDict.fromkeys(
            owner for owner in (*self.queue, *self._line.newcomers) if self._owner_left(owner)
        )
        self._is_lined_up = True

    def _owner_left(self, owner: str) -> int:
        return self._line.owner_ready.get(owner, 0) - self._owner_taken.get(owner, 0)

    def _smallest(self, whose: str | None, scored: Sequence[_Scored]) -> _Scored:
        place = self._passed.get(whose, 0)
        while self._taken.get(scored[place][1], 0) >= self._line.ready[scored[place][1]]:
            place += 1
        self._passed[whose] = place
        return scored[place]


def _scored(loads: Sequence[Load], now: datetime) -> Iterator[_Scored]:
    work: dict[str, int] = {}
    for load in sorted(loads, key=attrgetter("open_requests", "workflow_id")):
        work[load.owner] = work.get(load.owner, 0) + load.open_requests
        if load.ready_batches:
            yield work[load.owner] * slack(load, now), load.workflow_id, load.owner


def _next_class(
    lines: Mapping[PriorityClass, _Served],
    credits: dict[PriorityClass, float],
    shares: Mapping[PriorityClass, float],
) -> tuple[PriorityClass, bool]:
    """Return the class to serve, and whether it is served for its credit."""
    waiting = [cls for cls, line in lines.items() if line.ready]
    for cls in waiting:
        if cls in shares:
            credits[cls] = min(1.0, credits.get(cls, 0.0) + shares[cls])
    for cls in waiting:
        if credits.get(cls, 0.0) >= 1 - _EPSILON:
            credits[cls] = 0.0
            return cls, cls != waiting[0]
    return waiting[0], False


def _remember(
    memory: Memory, credits: Mapping[PriorityClass, float], lines: Mapping[PriorityClass, _Served]
) -> Memory:
    # A class that was not served keeps its queue: those who came since still stand behind it.
    return Memory(
        credits=credits,
        queues={cls: tuple(line.queue) for cls, line in lines.items() if line.queue},
        turns=frozenset(cls for cls, line in lines.items() if line.turn)
        | (memory.turns - lines.keys()),
    )


def _reason(
    served: Mapping[PriorityClass, int], by_credit: Mapping[PriorityClass, int], room: int
) -> str:
    if not served:
        return "nothing is ready"
    if room < 1:
        return "no room"
    parts = [
        f"{cls.name.lower()} {count}" + (f" ({by_credit[cls]} by floor)" if by_credit[cls] else "")
        for cls, count in served.items()
    ]
    return f"room {room}: " + ", ".join(parts)
