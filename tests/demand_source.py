"""A demand that tests say; named by AIRS_DEMAND as `tests.demand_source.SOURCE`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

NAME = "tests.demand_source.SOURCE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Committed work."""

    deadline_at: datetime
    work_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a version of a model has to do."""

    model_id: str
    version: str = ""
    dues: Sequence[Due] = ()
    other_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What is answered."""

    measured_at: datetime | None
    versions: Sequence[Work]


@dataclass(kw_only=True, slots=True)
class Source:
    """Answers what it was told, looked at so long ago; fails if it was told to."""

    works: Sequence[Work] = ()
    age: timedelta | None = timedelta(seconds=30)
    failure: Exception | None = None
    asked: list[datetime] = field(default_factory=list)

    def __call__(self, now: datetime) -> Demand:
        self.asked.append(now)
        if self.failure is not None:
            raise self.failure
        return Demand(measured_at=None if self.age is None else now - self.age, versions=self.works)

    def reset(self) -> None:
        """Say that nobody has anything to do."""
        self.works, self.age, self.failure, self.asked = (), timedelta(seconds=30), None, []


SOURCE = Source()
HELD_NAME = "tests.demand_source.held"
HELD: dict[str, int] = {}
"""Batches that are out, by key of the replica."""


def held(now: datetime) -> dict[str, int]:
    """Return what is out."""
    return dict(HELD)
