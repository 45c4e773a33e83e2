"""The order of service: which workflows' batches leave when a rater has room.

Three rules, one inside the other:

1. *Class.* The highest class with READY batches is served. But each class below it that has some
   gains its share as credit with every dispatch, up to a little over 1; the highest class with a
   full credit is served instead. Whoever is served pays 1, so that nobody saves up for when
   something urgent comes but who had to wait. HIGH has a head start: of the dispatches that it
   left to others for want of work it gets up to four back, one before each full credit.
2. *Workflow.* Of a class, the workflow with the smallest score is served: requests of its owner,
   those open up to and including it and those served within minutes, over the owner's weight,
   times the share of its time that is left; it grows with each batch of its owner's
   that leaves in the class. While a deadline presses (`pressure`), three dispatches
   in four go to what is due by it. Owners over their share (`fairness`) stand behind all others.
3. *Owner.* One dispatch in twenty of a class is a turn: it goes to the owner served longest ago.

What follows, counted in dispatches of one rater:

- A class with READY batches waits at most `longest_wait` dispatches (middle 8, low 10, best
  effort 63 with the default shares), whatever is above it; `longest_wait_s` says it in seconds. No
  score, age or deadline moves a workflow out of its class.
- An owner with READY batches waits at most 20 x (owners before it in the queue + 1) dispatches of
  its class, as later ones queue behind it.
- Of a job that was split into many, the last part is served no sooner than the job would be.

Weakness: shortest first means that large workflows of a class end late when more comes than can be
done; commitments decide which of them are given up, so that not all are late.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import ceil, floor
from types import MappingProxyType
from typing import Final

from fulfillment.policy import fairness
from fulfillment.policy.fairness import Usage
from fulfillment.policy.lines import EQUAL, Line, Load, Order, Scored, line_up
from fulfillment.policy.priority import PriorityClass

MAX_CLAIMS: Final = 500
"""Most batches that one pass of a rater claims."""

DEFAULT_SHARES: Final[Mapping[PriorityClass, float]] = MappingProxyType(
    {PriorityClass.MIDDLE: 0.27, PriorityClass.LOW: 0.27, PriorityClass.BEST_EFFORT: 0.02}
)
"""Credit a dispatch; a class is sure of one dispatch in `longest_wait`. No class has a larger share
than one above it, or less priority would be served more."""

HEAD_START: Final = 4.0
"""Dispatches that HIGH goes before full credits when it comes: a small workflow waits for none."""

TURN_EVERY: Final = 20
"""One dispatch of a class in so many is an owner's turn."""
FREE_EVERY: Final = 4
"""One in so many goes by score even while a deadline presses."""

# Ten times a share of 0.1 must count as a full credit.
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What a rater's order remembers from pass to pass; empty at start, lost without harm."""

    credits: Mapping[PriorityClass, float] = field(default_factory=dict)
    queues: Mapping[PriorityClass, tuple[str, ...]] = field(default_factory=dict)
    """Owners that wait in a class, the one served longest ago first."""
    counts: Mapping[PriorityClass, int] = field(default_factory=dict)
    """Dispatches of a class since its last turn."""
    usage: Usage = field(default_factory=Usage)


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


def next_batches(
    loads: Sequence[Load],
    *,
    room: int,
    now: datetime,
    memory: Memory,
    shares: Mapping[PriorityClass, float] = DEFAULT_SHARES,
    requests_per_s: float | None = None,
    weights: Mapping[str, float] = EQUAL,
) -> Decision:
    """Fill the room of a rater: min(room, 500, all that is READY) batches.

    The order of `loads` does not matter. Loads without READY batches count as work of their owner.
    """
    memory = replace(memory, usage=fairness.aged(memory.usage, now))
    order = line_up(loads, now, usage=memory.usage, requests_per_s=requests_per_s, weights=weights)
    return fill(order, room=room, memory=memory, shares=shares)


def fill(
    order: Order,
    *,
    room: int,
    memory: Memory,
    taken: Mapping[int, int] = MappingProxyType({}),
    shares: Mapping[PriorityClass, float] = DEFAULT_SHARES,
    stop: Callable[[int], bool] | None = None,
) -> Decision:
    """Fill the room of a rater by an order made before; `taken` is what left since, by workflow.

    `stop` is told each workflow that is served, and ends it there where it says so.
    """
    served_lines = {
        cls: _Served(line, memory.queues.get(cls, ()), memory.counts.get(cls, 0), taken)
        for cls, line in order.items()
    }
    lines = {cls: line for cls, line in served_lines.items() if line.ready}
    dispatches = min(room, MAX_CLAIMS, sum(line.ready for line in lines.values()))
    credits = dict(memory.credits)
    picked: dict[int, int] = {}
    served = dict.fromkeys(lines, 0)
    by_credit = dict.fromkeys(lines, 0)
    for _ in range(dispatches):
        waiting = [cls for cls, line in lines.items() if line.ready]
        cls, is_floor = next_class(waiting, credits, shares)
        workflow_id = lines[cls].serve()
        picked[workflow_id] = picked.get(workflow_id, 0) + 1
        served[cls] += 1
        by_credit[cls] += is_floor
        if stop is not None and stop(workflow_id):
            break
    return Decision(
        picks=tuple(Pick(workflow_id=w, batches=n) for w, n in picked.items()),
        memory=_remember(memory, credits, lines, contended=_is_contended(order.values())),
        reason=_reason(served, by_credit, room),
    )


def refunded(memory: Memory, order: Order, gone: Mapping[int, int]) -> Memory:
    """Take back what owners were charged for picks that were not there, batches by workflow."""
    charges: dict[str, float] = {}
    for line in order.values():
        for workflow_id in gone.keys() & line.ready.keys():
            owner = line.owners[workflow_id]
            taken_back = gone[workflow_id] * line.charges[workflow_id]
            charges[owner] = charges.get(owner, 0.0) - taken_back
    contended = _is_contended(order.values())
    return replace(memory, usage=fairness.charged(memory.usage, charges, contended=contended))


def longest_wait(cls: PriorityClass, shares: Mapping[PriorityClass, float] = DEFAULT_SHARES) -> int:
    """Return the dispatch of a rater, from 1, by which a class with READY batches is served.

    Its credit is full after 1/share dispatches. Then HIGH may have its head start, which does not
    grow meanwhile, and classes between HIGH and it may go first: each has a credit of 1 + its share
    at most, and gains its share with each further dispatch.
    """
    before = [share for c, share in shares.items() if c < cls]
    first = (HEAD_START + len(before)) / (1 - sum(before))
    return ceil(1 / shares[cls] - _EPSILON) + floor(first + _EPSILON)


class _Served:
    """A line while it is served: what is left of it, without a copy of thousands of workflows."""

    def __init__(
        self, line: Line, queue: Sequence[str], count: int, taken: Mapping[int, int]
    ) -> None:
        self._line = line
        self._taken = {w: min(n, line.ready[w]) for w, n in taken.items() if w in line.ready}
        self._passed: dict[str | None, int] = {}
        """Entries that are used up, at the head of an owner's workflows, or (None) of all, where
        those of owners that were served are passed, too."""
        self._pressed = 0
        """Entries that are used up at the head of those that press."""
        self._owner_taken: dict[str, int] = {}
        self._served: dict[str, float] = {}
        """What each owner was served since the line was made, in requests."""
        for workflow_id, n in self._taken.items():
            owner = line.owners[workflow_id]
            self._owner_taken[owner] = self._owner_taken.get(owner, 0) + n
            self._serve(owner, n * line.charges[workflow_id])
        self.ready = line.total - sum(self._taken.values())
        self.queue = OrderedDict.fromkeys(queue)
        self.count = count
        self.charges: dict[str, float] = {}
        """The same, of what this decision serves."""
        self._risen: list[tuple[Scored, float]] = []
        """Heap of the smallest of each owner that was served, risen by what it was served then."""
        self._is_lined_up = False

    def serve(self) -> int:
        """Take one batch off the line and return its workflow."""
        if not self._is_lined_up:
            self._line_up()
        _, _, workflow_id, owner = self._next()
        self.count = (self.count + 1) % TURN_EVERY
        self.ready -= 1
        self._taken[workflow_id] = self._taken.get(workflow_id, 0) + 1
        self._owner_taken[owner] = self._owner_taken.get(owner, 0) + 1
        self.charges[owner] = self.charges.get(owner, 0.0) + self._line.charges[workflow_id]
        self._serve(owner, self._line.charges[workflow_id])
        if self._owner_left(owner):
            self.queue.move_to_end(owner)
            self._rise(owner)
        else:
            del self.queue[owner]
        return workflow_id

    def _next(self) -> Scored:
        if self.count == TURN_EVERY - 1:
            owner = next(iter(self.queue))
            return self._smallest(owner, self._line.by_owner[owner])
        if self.count % FREE_EVERY != FREE_EVERY - 1:
            pressed = self._line.pressed
            while self._pressed < len(pressed) and not self._left(pressed[self._pressed][2]):
                self._pressed += 1
            if self._pressed < len(pressed):
                return pressed[self._pressed]
        return self._smallest_of_all()

    def _smallest_of_all(self) -> Scored:
        """Return the smallest as scores are now: those who were served stand further behind."""
        while self._risen:
            (_, _, workflow_id, owner), charge = self._risen[0]
            if charge == self._served[owner] and self._left(workflow_id):
                break
            # It was served since; as it stands now it is in the heap, too.
            heapq.heappop(self._risen)
        scored = self._line.by_score
        place = self._passed.get(None, 0)
        while place < len(scored) and (
            scored[place][3] in self._served or not self._left(scored[place][2])
        ):
            place += 1
        self._passed[None] = place
        risen = [entry for entry, _ in self._risen[:1]]
        return min([*risen, *scored[place : place + 1]])

    def _rise(self, owner: str) -> None:
        over, score, workflow_id, _ = self._smallest(owner, self._line.by_owner[owner])
        served = self._served[owner]
        score += fairness.RECENT_WEIGHT * served * self._line.scales[workflow_id]
        heapq.heappush(self._risen, ((over, score, workflow_id, owner), served))

    def _serve(self, owner: str, requests: float) -> None:
        self._served[owner] = self._served.get(owner, 0.0) + requests

    def _line_up(self) -> None:
        # Only for a class that is served: the others keep their queue.
        self.queue = OrderedDict.fromkeys(
            owner for owner in (*self.queue, *self._line.newcomers) if self._owner_left(owner)
        )
        for owner in self._served:
            if self._owner_left(owner):
                self._rise(owner)
        self._is_lined_up = True

    def _owner_left(self, owner: str) -> int:
        return self._line.owner_ready.get(owner, 0) - self._owner_taken.get(owner, 0)

    def _left(self, workflow_id: int) -> bool:
        return self._taken.get(workflow_id, 0) < self._line.ready[workflow_id]

    def _smallest(self, owner: str, scored: Sequence[Scored]) -> Scored:
        place = self._passed.get(owner, 0)
        while not self._left(scored[place][2]):
            place += 1
        self._passed[owner] = place
        return scored[place]


def longest_wait_s(
    cls: PriorityClass,
    batches_per_s: float,
    shares: Mapping[PriorityClass, float] = DEFAULT_SHARES,
) -> float:
    """Return the seconds a class with READY batches waits at most, at a rater's pace."""
    return longest_wait(cls, shares) / batches_per_s


def _is_contended(lines: Iterable[Line]) -> bool:
    """Say whether more than one owner waits."""
    return len({owner for line in lines for owner in line.owner_ready}) > 1


def next_class(
    waiting: Sequence[PriorityClass],
    credits: dict[PriorityClass, float],
    shares: Mapping[PriorityClass, float] = DEFAULT_SHARES,
) -> tuple[PriorityClass, bool]:
    """Return which of the classes that wait, the highest first, is served, and if for its credit.

    Changes the credits.
    """
    top, *below = waiting
    for cls in below:
        share = shares.get(cls, 0.0)
        # What is over a full credit is kept, or a share of 0.27 would be one of 0.25.
        credits[cls] = min(1.0 + share, credits.get(cls, 0.0) + share)
    due = next((cls for cls in below if credits[cls] >= 1 - _EPSILON), None)
    ahead = credits.get(PriorityClass.HIGH, 0.0)
    if top is PriorityClass.HIGH:
        if due is not None and ahead >= 1.0:
            credits[top] = ahead - 1.0
            return top, False
    elif due is None:
        # Not while a credit is full, or what goes before it could go before it for ever.
        credits[PriorityClass.HIGH] = min(HEAD_START, ahead + 1.0)
    chosen = top if due is None else due
    if chosen is not PriorityClass.HIGH and (credit := credits.get(chosen)):
        credits[chosen] = max(0.0, credit - 1.0)
    return chosen, chosen is not top


def _remember(
    memory: Memory,
    credits: Mapping[PriorityClass, float],
    lines: Mapping[PriorityClass, _Served],
    *,
    contended: bool,
) -> Memory:
    charges: dict[str, float] = {}
    for line in lines.values():
        for owner, requests in line.charges.items():
            charges[owner] = charges.get(owner, 0.0) + requests
    if charges:
        memory = replace(memory, usage=fairness.charged(memory.usage, charges, contended=contended))
    counts = {**memory.counts, **{cls: line.count for cls, line in lines.items()}}
    # A class that was not served keeps its queue: those who came since still stand behind it.
    return replace(
        memory,
        credits=credits,
        queues={cls: tuple(line.queue) for cls, line in lines.items() if line.queue},
        counts={cls: count for cls, count in counts.items() if count},
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
