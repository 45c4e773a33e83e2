"""Scenarios, and the events that they are told as."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fulfillment.policy.priority import PriorityClass

BATCH = 12
BATCH_S = 12.0
"""Of a full one; one of n takes 3 + 0.75 n, times the cost of its workflow."""
RATERS = ("big", "tiny", "third")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A workflow, and the ratings it asks for: runs of numbers, (first, how many)."""

    at_s: float
    owner: str
    ratings: Sequence[tuple[int, int]]
    rater: int = 0
    priority_class: PriorityClass = PriorityClass.HIGH
    deadline_s: float = 7200.3
    """After `at_s`."""
    cost: float = 1.0

    @property
    def numbers(self) -> list[int]:
        """The numbers of its ratings."""
        return [n for first, many in self.ratings for n in range(first, first + many)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What happens to whom."""

    works: Sequence[Work]
    """In the order of their time."""
    replicas: Sequence[int] = (3, 1)
    """By rater."""
    window: int = 2
    late_s: float | None = None
    """When the first replica comes, where it is not there from the start."""
    stored: Sequence[tuple[int, int]] = ()
    """Ratings that the archive has from the start."""
    bad: frozenset[int] = frozenset()
    """Ratings that fail for good, whoever asks for them."""


class Event(NamedTuple):
    """Something that happened; `work` is the place of the workflow in the scenario."""

    at_s: float
    rater: int
    what: str
    work: int
    detail: tuple[Any, ...] = ()


def in_order(events: Sequence[Event]) -> list[Event]:
    """Return the events by time; at one instant raters do not depend on each other."""
    return sorted(events, key=lambda event: (event.at_s, event.rater, event.what, event.work))
