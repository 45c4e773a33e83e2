"""When a workflow will end: from the pace of work, and from what is served before it.

The order of a rater is that of `ordering`: classes in their order save for the floors of lower
ones; inside a class the owner with the least work first, save for the turns of owners. What is
ahead of a workflow follows from that; divided by the rater's pace it is one opinion of the time
left. The workflow's own pace is another, worth as much as was seen of it. Nobody knows who comes
tomorrow: the range covers errors of the pace and of what is ahead, not later arrivals.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, exp, floor, inf, log, sqrt

from fulfillment.policy.ordering import DEFAULT_SHARES, TURN_EVERY
from fulfillment.policy.priority import PriorityClass

LEAST_SEEN = 10
"""Requests that must have ended before their pace says anything."""
SLOWEST = 1e-6
"""Requests a second below which there is no pace: one in eleven days."""
Z_80 = 1.2816
"""Four fifths of a normal distribution lie within so many standard deviations."""
MODEL_ERROR = 0.12
"""Standard deviation, as a share, of what is not the pace's own noise; from the benchmark `eta`."""
AHEAD_MAY_SHRINK = 0.75
"""Share of the work ahead that is there in the best case: archive hits, cancels, finer order."""
MAY_PASS = 0.5
"""Share of others' longer work, up to what is needed itself, that goes first in the worst case: it
is due sooner, or its owner was served less of late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Open work of one workflow."""

    owner: str
    priority_class: PriorityClass
    open_requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Requests a second that ended by work; `seen` is how many, `lumps` in how many calls."""

    per_s: float
    seen: int
    lumps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Seconds to the end: the middle of what is expected, and the range of four cases in five."""

    seconds: float
    low: float
    high: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Requests that end until the workflow has ended, its own among them."""

    least: float
    middle: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Works:
    """Jobs of an owner in one class, short ones first, and how much they add up to."""

    works: Sequence[int]
    sums: Sequence[int]

    def upto(self, longest: int) -> int:
        """Return the work of jobs that are not longer."""
        return self.sums[bisect_right(self.works, longest)]

    def within(self, needed: float) -> int:
        """Return the work of the first jobs that do not add up to more."""
        return self.sums[bisect_right(self.sums, needed) - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """All open work of a rater, so arranged that thousands may ask what is ahead of them."""

    totals: Mapping[PriorityClass, int]
    owners: Mapping[PriorityClass, Mapping[str, _Works]]


def arrange(jobs: Iterable[Job]) -> Field:
    """Arrange the open work of one rater."""
    found: dict[PriorityClass, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for job in jobs:
        if job.open_requests:
            found[job.priority_class][job.owner].append(job.open_requests)
    return Field(
        totals={cls: sum(map(sum, owners.values())) for cls, owners in found.items()},
        owners={
            cls: {
                owner: _Works(works=(ordered := sorted(works)), sums=[0, *accumulate(ordered)])
                for owner, works in owners.items()
            }
            for cls, owners in found.items()
        },
    )


def forecast(
    own: Job,
    field: Field,
    *,
    listed: Job | None = None,
    own_pace: Pace | None,
    rater_pace: Pace | None,
    retry_in_s: float = 0.0,
    most_s: float = inf,
) -> Forecast | None:
    """Return when `own` ends. None: nothing is known.

    `listed` is what the field holds of it, if it is in there: the field may be a little older.
    `retry_in_s`: until the latest retry that is planned. `most_s`: when it ends at the latest.
    """
    most_s = max(0.0, most_s)
    if not own.open_requests:
        return Forecast(seconds=0.0, low=0.0, high=0.0, reason="nothing is open")
    own_pace, rater_pace = _telling(own_pace), _telling(rater_pace)
    by_queue = _by_queue(own, field, listed, rater_pace) if rater_pace else None
    by_own = (own.open_requests / own_pace.per_s,) * 3 if own_pace else None
    if by_queue and by_own and own_pace and rater_pace:
        weight = own_pace.seen / (own_pace.seen + max(own_pace.seen, rater_pace.seen))
        times = [_between(q, o, weight) for q, o in zip(by_queue, by_own, strict=True)]
        lumps, reason = rater_pace.lumps, "by the rater's pace and its own"
    elif by_queue and rater_pace:
        times, lumps, reason = list(by_queue), rater_pace.lumps, "by the rater's pace"
    elif by_own and own_pace:
        times, lumps, reason = list(by_own), own_pace.lumps, "by its own pace"
    else:
        return None
    least, middle, most = times
    factor = exp(Z_80 * sqrt(MODEL_ERROR**2 + 1 / max(1.0, lumps)))
    retry_in_s = max(0.0, retry_in_s)
    if retry_in_s > middle:
        reason += ", then a retry"
    return Forecast(
        seconds=min(most_s, max(middle, retry_in_s)),
        low=min(most_s, max(least / factor, retry_in_s)),
        # A retry that fails is followed by a longer pause.
        high=min(most_s, max(most * factor, 2 * retry_in_s)),
        reason=reason,
    )


def work_until(own: Job, field: Field, *, listed: Job | None = None, above: bool = True) -> Work:
    """Return the work of its class, and of those `above`, until `own` has ended.

    What lower classes get by their floors is not in it: it is taken off the pace.
    """
    higher = sum(total for cls, total in field.totals.items() if cls < own.priority_class)
    owners = field.owners.get(own.priority_class, {})
    mine = owners.get(own.owner)
    before = mine.upto(own.open_requests) if mine else 0
    if listed and listed.priority_class < own.priority_class:
        higher -= listed.open_requests
    elif listed and listed.priority_class == own.priority_class:
        before -= listed.open_requests if listed.open_requests <= own.open_requests else 0
    needed = own.open_requests + before
    others = [works for owner, works in owners.items() if owner != own.owner]
    in_turn = sum(min(works.sums[-1], needed) for works in others)
    shorter = sum(works.within(needed) for works in others)
    first = before + (higher if above else 0)
    # The rest are turns, of which others have no more than they can use.
    longer = in_turn - shorter
    ahead = first + shorter + min(longer, (needed + shorter) / (TURN_EVERY - 1))
    passed = first + shorter + MAY_PASS * longer
    return Work(
        least=own.open_requests + AHEAD_MAY_SHRINK * ahead,
        middle=own.open_requests + ahead,
        most=own.open_requests + max(ahead, passed),
    )


def _by_queue(own: Job, field: Field, listed: Job | None, pace: Pace) -> tuple[float, float, float]:
    work = work_until(own, field, listed=listed)
    # A class is never without its floor, however much stands above it.
    alone = work_until(own, field, listed=listed, above=False)
    lower = sum(DEFAULT_SHARES[cls] for cls in field.totals if cls > own.priority_class)
    first = pace.per_s * (1 - lower)
    sure = pace.per_s * DEFAULT_SHARES.get(own.priority_class, 1.0)
    return (
        min(work.least / first, alone.least / sure),
        min(work.middle / first, alone.middle / sure),
        min(work.most / first, alone.most / sure),
    )


def _telling(pace: Pace | None) -> Pace | None:
    return pace if pace and pace.seen >= LEAST_SEEN and pace.per_s >= SLOWEST else None


def _between(one: float, other: float, weight: float) -> float:
    """Return the geometric mean: an opinion ten times too long weighs as one ten times short."""
    return exp((1 - weight) * log(one) + weight * log(other))


def rounded(of: Forecast, *, due_s: float) -> Mapping[str, int]:
    """Return whole seconds, the range outward, and whether that is in time.

    `due_s`: until what is open then times out. A forecast that had to end there is not in time.
    """
    return {
        "seconds": ceil(of.seconds),
        "low": floor(of.low),
        "high": ceil(of.high),
        "in_time": of.seconds < due_s,
    }
