"""Quota: what each gets of what all share.

Of a replica's window: whatever class wants it, but for what is kept for the highest. Of the
executors' slots: no rater more than half while another waits. Of the calls a second that a rater is
limited to: what time has let through. Raters' windows themselves are in `traffic`.
"""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeVar

KEPT_FOR_HIGH: Final = 2
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Calls that a rater with a limit a second may start at once; it fills with time."""

    calls: float
    filled_at: datetime


def fill(bucket: Bucket | None, max_qps: float, now: datetime) -> Bucket:
    """Return the bucket as of `now`: it holds at most one second's worth, and at least one call.

    So no second starts more than twice the limit, and the mean never passes it.
    """
    most = max(max_qps, 1.0)
    if bucket is None:
        return Bucket(calls=most, filled_at=now)
    # A clock that was set back must not drain the bucket.
    passed_s = max(0.0, (now - bucket.filled_at).total_seconds())
    return Bucket(calls=min(most, bucket.calls + passed_s * max_qps), filled_at=now)


def spend(bucket: Bucket, calls: int) -> Bucket:
    """Return the bucket after that many calls were started."""
    return replace(bucket, calls=bucket.calls - calls)


def kept_for_high(window: int, held: int) -> int:
    """Return how many free places of a replica's window only HIGH may take, which holds so many.

    Full of lower classes, a window would let an urgent batch wait for a place, and then for the
    call that is being computed; so it waits for the call alone. Those that HIGH has already need
    not be kept for it: else, where it fills a window, nobody below would ever get a place.
    """
    return max(0, min(KEPT_FOR_HIGH, window // 8) - held)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoad:
    """One live replica: its window, and how much of it is held (computing and queued).

    Of our own servers a window counts batches, of external ones calls: an OIP batch is one call.
    """

    key: str
    version: str
    window: int
    held: int


def can_wait(replicas: Sequence[ReplicaLoad]) -> bool:
    """Say whether all have work enough for now: half of their windows, and more than one batch."""
    return all(r.held >= max(2, r.window // 2) for r in replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Through which replica a batch goes, and how many calls it may make at once."""

    replica: str
    calls: int


def grant(replicas: Sequence[ReplicaLoad], wanted: Sequence[int]) -> list[Grant]:
    """Name a replica for each batch, which wants that many calls at once, in their order.

    Each goes to the replica with most room and gets all of its calls, or what room there is: a
    batch that is begun ends soon, and the next one needs no more than what then is free. Fewer
    grants than batches mean that every window is full. The caller passes replicas of the version
    it needs; ties go by key.
    """
    heap = [(r.held - r.window, r.key) for r in replicas if r.held < r.window]
    heapq.heapify(heap)
    granted: list[Grant] = []
    for calls in wanted:
        if not heap:
            break
        less_room, key = heap[0]
        calls = min(max(calls, 1), -less_room)
        granted.append(Grant(replica=key, calls=calls))
        if less_room + calls == 0:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (less_room + calls, key))
    return granted


def slots_for(
    raters: Mapping[Key, int], free_slots: int, held: Mapping[Key, int], total_slots: int
) -> Mapping[Key, int]:
    """Share the free executor slots: how many more each rater gets of those it wants.

    Each slot goes to the rater that holds fewest and wants more. So none holds more than half of
    the slots (rounded up) by what it is given while another waits, and no slot stays free while
    one wants it. What a rater holds already is not taken back. Among equals the first is served.
    """
    given = dict.fromkeys(raters, 0)
    heap = [
        (held.get(rater, 0), place, rater)
        for place, (rater, wanted) in enumerate(raters.items())
        if wanted > 0
    ]
    heapq.heapify(heap)
    free = min(free_slots, total_slots - sum(held.values()))
    while heap and free > 0:
        holds, place, rater = heapq.heappop(heap)
        given[rater] += 1
        free -= 1
        if given[rater] < raters[rater]:
            heapq.heappush(heap, (holds + 1, place, rater))
    return given
