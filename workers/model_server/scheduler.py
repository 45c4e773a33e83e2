"""Pure policy of the model server: who may enter the queue, and what the device computes next.

The server asks `next_batch` at the moment a device lane becomes free, never before, so that work
which arrived meanwhile is in it. Sequences wait by (priority, arrival); the first of them leads the
batch and decides its length step; others of that step fill it. A lead is never passed over, so a
sequence with k others before it is computed within k + 1 batches, whatever lengths arrive.

Strict priority alone would undo the floors that the dispatcher gives to lower classes: a batch sent
under a floor would wait here for as long as more urgent work keeps coming. Hence whoever waited
longest is passed over for `floor_every` - 1 batches in a row at most, and leads the next one. A
short burst of urgent work is over by then and waits for none of it.

All instants are seconds of one monotonic clock, handed in. Weakness: `next_batch` looks at every
waiting sequence (about 0.3 µs each), so its cost grows with the queue, which admission bounds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

MOST_URGENT, LEAST_URGENT = 1, 101
"""Triton's direction. Larger numbers are legal and count as the least urgent at admission."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """How the device likes its work; one value per kind of device."""

    steps: tuple[int, ...]
    """Padded lengths, ascending; the last one is the longest sequence."""

    batch_tokens: int
    """Padded tokens of a batch on each device at most (one sequence always fits)."""

    fill_tokens: int
    """Less urgent sequences join only up to here (on each device), where the rate stops growing:
    beyond, each would delay the urgent work behind this batch and gain nothing."""

    floor_every: int = 10
    """The n-th batch in a row is led by the longest-waiting sequence; 0 means never."""

    devices: int = 1
    """They share the rows of a batch, all the same number: a row of padding costs like a real one.
    """

    def rows(self, step: int) -> int:
        """Sequences of one step in a full batch."""
        return self.devices * max(1, self.batch_tokens // step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """One sequence of tokens that waits for the device."""

    key: int
    """Unique, ascending by arrival."""

    priority: int
    step: int
    deadline_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What to compute now and what to drop; both are keys. No rows: nothing waits."""

    rows: tuple[int, ...]
    step: int
    expired: tuple[int, ...]
    passed: int
    """Batches in a row that passed over whoever waited longest, this one included."""
    reason: str


def step_for(tokens: int, steps: Sequence[int]) -> int:
    """The shortest padded length that holds `tokens`, which must not exceed the last step."""
    for step in steps:
        if tokens <= step:
            return step
    raise ValueError(f"{tokens} tokens exceed the longest step {steps[-1]}")


def next_batch(waiting: Iterable[Waiting], *, now: float, passed: int, shaping: Shaping) -> Batch:
    """Form the batch for a lane that is free now; `passed` is that of the batch before, 0 at first.

    A batch without rows passes nobody over: it leaves `passed` as it is.
    """
    live, expired = [], []
    for row in waiting:
        if row.deadline_at is not None and row.deadline_at <= now:
            expired.append(row.key)
        else:
            live.append(row)
    if not live:
        return Batch(rows=(), step=0, expired=tuple(expired), passed=passed, reason="nothing waits")
    lead, reason = min(live, key=_order), ""
    oldest = min(live, key=_arrival)
    if shaping.floor_every and passed >= shaping.floor_every - 1 and oldest is not lead:
        lead = oldest
        reason = f"floor: {oldest.key} waited longest (priority {oldest.priority})"
    rows = _fill(lead, live, shaping)
    return Batch(
        rows=rows,
        step=lead.step,
        expired=tuple(expired),
        passed=0 if oldest.key in rows else passed + 1,
        reason=reason or f"{lead.key} is first of priority {lead.priority}",
    )


def _fill(lead: Waiting, live: Sequence[Waiting], shaping: Shaping) -> tuple[int, ...]:
    """The lead, then others of its step in order, up to the batch's limit in tokens."""
    others = sorted((row for row in live if row.step == lead.step and row is not lead), key=_order)
    full = shaping.rows(lead.step)
    willing = shaping.devices * shaping.fill_tokens // lead.step
    rows = [lead.key]
    for row in others[: full - 1]:
        if row.priority > lead.priority and len(rows) >= willing:
            break
        rows.append(row.key)
    return tuple(rows)


def _order(row: Waiting) -> tuple[int, int]:
    return row.priority, row.key


def _arrival(row: Waiting) -> int:
    return row.key


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The bound of the queue, in rows accepted and not yet answered."""

    rows: int
    headroom: int
    """Rows that only urgent calls may use; less urgent calls lose them step by step."""

    def limit(self, priority: int) -> int:
        """Rows that may be open once a call of this priority is in."""
        urgency = min(max(priority, MOST_URGENT), LEAST_URGENT) - MOST_URGENT
        return self.rows - self.headroom * urgency // (LEAST_URGENT - MOST_URGENT)

    @property
    def largest_call(self) -> int:
        """Rows of a call that fits an empty queue at every priority."""
        return self.limit(LEAST_URGENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Whether a call may enter; `retry_after_s` is 0 for one that may."""

    admitted: bool
    retry_after_s: int
    reason: str


LONGEST_RETRY_AFTER_S = 60


def admit(
    *, rows: int, priority: int, open_rows: int, room: Room, rows_per_s: float | None
) -> Admission:
    """Judge a call of `rows`; the wait is how long the excess takes at the measured rate."""
    excess = open_rows + rows - room.limit(priority)
    if excess <= 0:
        return Admission(admitted=True, retry_after_s=0, reason="room")
    wait_s = math.ceil(excess / rows_per_s) if rows_per_s else 1
    return Admission(
        admitted=False,
        retry_after_s=min(max(wait_s, 1), LONGEST_RETRY_AFTER_S),
        reason=f"{open_rows} rows are open, {room.limit(priority)} allowed at priority {priority}",
    )


@cache
def cover(rows: int, *, counts: tuple[int, ...], step: int, call_tokens: int) -> tuple[int, ...]:
    """Split a batch into device calls of the compiled row counts, at the least cost.

    A call costs `call_tokens` (reading the weights once) plus its padded tokens, so that at long
    steps two small calls beat one padded call, and at short ones not.
    """
    cost = [0] + [0] * rows
    last = [0] + [0] * rows
    for n in range(1, rows + 1):
        cost[n], last[n] = min(
            (call_tokens + count * step + cost[max(0, n - count)], count) for count in counts
        )
    calls = []
    while rows > 0:
        calls.append(last[rows])
        rows -= last[rows]
    return tuple(sorted(calls, reverse=True))
