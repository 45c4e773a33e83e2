"""What models have to do, as told by whoever sends work to them.

Model management knows replicas, not queues. The callable named by the setting AIRS_DEMAND takes
`now` and returns a `Demand`; where none is named (model management alone) nothing is known. What is
missing, too old or cannot be is a `Silence`, with its reason: then nobody's replicas are moved.

The callable named by AIRS_BACKLOG says what versions are not done with, down to batches that are
being computed and to work that nobody may do just now: while it names one, that keeps a replica.
The one named by AIRS_HELD says how many batches are out through each replica.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isfinite
from typing import Final, Protocol

from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.utils.module_loading import import_string

from models_admin.models import Outcome

logger = logging.getLogger(__name__)

STALE_AFTER: Final = timedelta(seconds=120)
MOST_WORK_S: Final = 1e12
"""Of one deadline: thousands of replicas for years. More is a mistake, and adds up to infinity."""


class Due(Protocol):
    """Committed work that is due at one instant."""

    @property
    def deadline_at(self) -> datetime: ...
    @property
    def work_s(self) -> float:
        """Replica-seconds."""


class VersionDemand(Protocol):
    """What one version of a model has to do."""

    @property
    def model_id(self) -> str: ...
    @property
    def version(self) -> str:
        """As in the directory; "" is any."""

    @property
    def dues(self) -> Sequence[Due]: ...
    @property
    def other_s(self) -> float:
        """Work that is not committed, or of which nobody knows how long it takes (then little)."""


class Demand(Protocol):
    """What all models have to do; those that are not named have nothing."""

    @property
    def measured_at(self) -> datetime | None:
        """When that was last looked at as a whole; None if never."""

    @property
    def versions(self) -> Sequence[VersionDemand]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """A demand that can be gone by."""

    age: timedelta
    of_models: Mapping[str, Sequence[VersionDemand]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """Why there is none."""

    outcome: Outcome
    reason: str
    age: timedelta | None = None


def ask(now: datetime) -> Signal | Silence:
    """Return what models have to do now; the database being away is not caught."""
    if not settings.AIRS_DEMAND:
        return Silence(
            outcome=Outcome.NO_SIGNAL,
            reason="nobody says what there is to do: AIRS_DEMAND is empty",
        )
    try:
        source: Callable[[datetime], Demand] = import_string(settings.AIRS_DEMAND)
        return _judged(source(now), now)
    except (OperationalError, InterfaceError):
        raise
    except Exception as error:  # somebody else's code, perhaps over a network
        logger.warning("no demand", exc_info=error)
        return Silence(
            outcome=Outcome.NO_SIGNAL,
            reason=f"{settings.AIRS_DEMAND} fails with {type(error).__name__}",
        )


def work_s(of: VersionDemand) -> float:
    """Return all that a version has to do, in replica-seconds."""
    return of.other_s + sum(due.work_s for due in of.dues)


def backlog(now: datetime) -> Mapping[tuple[str, str], int] | None:
    """Return the open requests by model and version; None when nobody can tell."""
    if not settings.AIRS_BACKLOG:
        return {}
    try:
        source: Callable[[datetime], Mapping[tuple[str, str], int]] = import_string(
            settings.AIRS_BACKLOG
        )
        return source(now)
    except (OperationalError, InterfaceError):
        raise
    except Exception as error:  # somebody else's code, perhaps over a network
        logger.warning("no backlog", exc_info=error)
        return None


def held(now: datetime) -> Mapping[str, int] | None:
    """Return the batches that are out by key of the replica; None when nobody can tell."""
    if not settings.AIRS_HELD:
        return None
    try:
        source: Callable[[datetime], Mapping[str, int]] = import_string(settings.AIRS_HELD)
        return source(now)
    except (OperationalError, InterfaceError):
        raise
    except Exception as error:  # somebody else's code, perhaps over a network
        logger.warning("nobody says what is out", exc_info=error)
        return None


def _judged(demand: Demand, now: datetime) -> Signal | Silence:
    if demand.measured_at is None:
        return Silence(
            outcome=Outcome.NO_SIGNAL, reason="what there is to do was not looked at yet"
        )
    age = now - demand.measured_at
    # In the future it was measured before the clock was set back, who knows when.
    if abs(age) > STALE_AFTER:
        return Silence(
            outcome=Outcome.STALE_SIGNAL,
            reason=f"what there is to do was looked at {age.total_seconds():.0f} s ago; "
            f"{STALE_AFTER.total_seconds():.0f} s is the limit",
            age=age,
        )
    of_models: dict[str, list[VersionDemand]] = {}
    for each in demand.versions:
        wrong = next(
            (
                work_s
                for work_s in (each.other_s, *(due.work_s for due in each.dues))
                if not (isfinite(work_s) and 0 <= work_s <= MOST_WORK_S)
            ),
            None,
        )
        if wrong is not None:
            return Silence(
                outcome=Outcome.WRONG_SIGNAL,
                reason=f"{each.model_id} cannot have work of {wrong:g} s",
                age=age,
            )
        of_models.setdefault(each.model_id, []).append(each)
    return Signal(age=age, of_models=of_models)
