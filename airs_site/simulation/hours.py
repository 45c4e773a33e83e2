"""What a run looked like at the start of each hour: the memory of its plots.

Kept for the measured days only, whatever a run lasts, so that it is as large as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

HOUR_S: Final = 3600


@dataclass(kw_only=True, slots=True)
class Hours:
    """Samples at hours 0 to `hours`, both included; counters are those since the beginning."""

    hours: int
    due_s: float = 0.0
    """When the next sample is to be taken."""
    calls: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    unsent: list[Sequence[int]] = field(default_factory=list)
    """Ratings that wait to be sent, by rater."""
    replicas: list[Sequence[int]] = field(default_factory=list)
    """That serve, by rater."""

    def look(
        self,
        now: float,
        *,
        calls: int,
        attempts: int,
        unsent: Sequence[int],
        replicas: Sequence[int],
    ) -> None:
        """Take the samples that are due by now: nothing has changed since the last event."""
        while self.due_s <= min(now, self.hours * HOUR_S):
            self.calls.append(calls)
            self.attempts.append(attempts)
            self.unsent.append(tuple(unsent))
            self.replicas.append(tuple(replicas))
            self.due_s += HOUR_S
        if self.due_s > self.hours * HOUR_S:
            self.due_s = inf
