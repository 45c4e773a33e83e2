"""Accounts for the device: busy time, duty cycle, rate. All instants are handed in.

Busy means that at least one lane computes: overlapping batches count once, so that busy seconds
over wall seconds is the duty cycle of the device, whatever its number of lanes. Lane seconds count
them each: over wall seconds times lanes they are the occupancy of the slots.

What a batch cost is its share of the busy time: while two lanes compute, each gets half of it
(`spent`), so that all batches' costs together are the busy seconds.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 60.0
"""What `duty_cycle` and `sequences_per_s` look back on."""

SAMPLE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The account at one instant."""

    at: float
    busy_s: float
    sequences: int


class Waits:
    """How long sequences waited for the device: a histogram, cheap enough for each of them."""

    BOUNDS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, waits_s: Sequence[float]) -> None:
        """Take note of a batch's sequences."""
        for wait_s in waits_s:
            self.counts[bisect_left(self.BOUNDS_S, wait_s)] += 1
        self.total_s += sum(waits_s)

    @property
    def count(self) -> int:
        """Sequences so far."""
        return sum(self.counts)


class Meter:
    """One device's account since `started_at`."""

    def __init__(self, *, started_at: float) -> None:
        self.started_at = started_at
        self.predictions = 0  # scores answered
        self.sequences = 0  # computed: below two a prediction, as query embeddings are reused
        self.batches = 0
        self.full_rows = 0  # sequences that the batches could have had
        self.real_tokens = 0
        self.padded_tokens = 0  # computed for them, padding included
        self.waits = Waits()
        self._lanes = 0
        self._at = started_at
        self._busy_s = 0.0
        self._lane_s = 0.0
        self._spent_s = 0.0
        self._past = deque([Sample(at=started_at, busy_s=0.0, sequences=0)])

    def begin(self, now: float) -> float:
        """A lane starts a batch; returns `spent` for what the batch will have cost."""
        if self._lanes == 0:
            self._sample(now)
        self._advance(now)
        self._lanes += 1
        return self._spent_s

    def end(self, now: float, *, sequences: int) -> float:
        """A lane is done with a batch; returns `spent`: the increase since `begin` is its cost."""
        self._advance(now)
        self._lanes -= 1
        self.batches += 1
        self.sequences += sequences
        self._sample(now)
        return self._spent_s

    def busy_seconds(self, now: float) -> float:
        """Seconds in which the device computed, the running batch included."""
        return self._busy_s + (now - self._at if self._lanes else 0.0)

    def lane_seconds(self, now: float) -> float:
        """Seconds in which lanes computed, summed over the lanes."""
        return self._lane_s + self._lanes * (now - self._at)

    def uptime_seconds(self, now: float) -> float:
        """Wall seconds that `busy_seconds` is a part of."""
        return now - self.started_at

    def duty_cycle(self, now: float) -> float:
        """Share of the last minute (of all time, when shorter) in which the device computed."""
        since = max(self.started_at, now - WINDOW_S)
        if now <= since:
            return 0.0
        return (self.busy_seconds(now) - self._busy_seconds_at(since, now)) / (now - since)

    def sequences_per_s(self) -> float | None:
        """What the device does in a busy second; None before it has done anything."""
        first, last = self._past[0], self._past[-1]
        busy_s = last.busy_s - first.busy_s
        return (last.sequences - first.sequences) / busy_s if busy_s > 0 else None

    def _advance(self, now: float) -> None:
        passed_s, self._at = now - self._at, now
        if self._lanes:
            self._busy_s += passed_s
            self._lane_s += self._lanes * passed_s
            self._spent_s += passed_s / self._lanes

    def _busy_seconds_at(self, instant: float, now: float) -> float:
        """Read off between the two samples around a past instant."""
        before = Sample(at=self.started_at, busy_s=0.0, sequences=0)
        for sample in (*self._past, Sample(at=now, busy_s=self.busy_seconds(now), sequences=0)):
            if sample.at > instant:
                part = (instant - before.at) / (sample.at - before.at)
                return before.busy_s + part * (sample.busy_s - before.busy_s)
            before = sample
        return before.busy_s

    def _sample(self, now: float) -> None:
        sample = Sample(at=now, busy_s=self.busy_seconds(now), sequences=self.sequences)
        if len(self._past) > 2 and now - self._past[-2].at < SAMPLE_S:
            self._past[-1] = sample
        else:
            self._past.append(sample)
        while len(self._past) > 2 and self._past[1].at <= now - WINDOW_S:
            self._past.popleft()
