"""Fair sharing between owners: what each was served of late, and who has had more than its share.

Two memories fade at different speeds. What an owner was served within minutes counts as work of
its workflows, so that one who keeps sending small ones does not stay the smallest. What it was
served *while others waited* counts over an hour: an owner that took more than its share of the
service then, and still has more open than the rater could do by itself until the last of its
deadlines, is *over its share* and stands behind all others of its class. That is what a flood
meets; a large workflow, or much work on a quiet day, does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final

RECENT: Final = timedelta(minutes=10)
"""Half-life of what counts as work of an owner's workflows."""
RECENT_WEIGHT: Final = 1.5
"""Of a request served just now, beside one that is open. More than 1: of owners with equal work the
one that was served less is next, so that they take turns. At w, an owner that was served a request
more in another class gets w / (w - 1) fewer in this one: a weight near 1 punishes it tenfold."""
LONG: Final = timedelta(hours=1)
"""Half-life of what an owner was served while others waited."""
OWNER_SHARE: Final = 0.2
"""Of what was served in that time; times the owner's weight."""
LEAST_SEEN: Final = timedelta(minutes=1)
"""Less than a rater does in so long counts as so much: it takes twelve seconds to be over."""
MOMENT: Final = timedelta(seconds=1)
SHORTEST: Final = timedelta(seconds=60)
"""A last deadline that is nearer, or past, counts as this far."""

# What has faded to less than a request is forgotten.
_FORGOTTEN: Final = 0.5
_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Requests served by a rater, by owner, as of an instant; dear ones count for more."""

    at: datetime | None = None
    recent: Mapping[str, float] = field(default_factory=dict)
    contended: Mapping[str, float] = field(default_factory=dict)
    """Only what was served while another owner waited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """Open work of one owner, in requests, and the last of its deadlines."""

    requests: float
    last_deadline_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class OverShare:
    """Why an owner stands behind the others."""

    used: float
    """Share of what was served of late while others waited."""
    allowed: float

    @property
    def reason(self) -> str:
        """Say it to the owner."""
        return (
            f"over its share: took {self.used:.0%} of the rater of late while others waited, "
            f"where {self.allowed:.0%} is fair, and has more open than the rater could do in time; "
            "it is served after the other owners of its class"
        )


def aged(usage: Usage, now: datetime) -> Usage:
    """Let usage fade until `now`; a clock that was set back fades nothing.

    Less than a second fades nothing either: callers may age as often as they like.
    """
    if usage.at is None:
        return Usage(at=now, recent=usage.recent, contended=usage.contended)
    passed = now - usage.at
    if timedelta(0) <= passed < MOMENT:
        return usage
    passed = max(timedelta(0), passed)
    return Usage(
        at=now,
        recent=_faded(usage.recent, passed / RECENT),
        contended=_faded(usage.contended, passed / LONG),
    )


def charged(usage: Usage, served: Mapping[str, float], *, contended: bool) -> Usage:
    """Add the requests that were just served."""
    return Usage(
        at=usage.at,
        recent=_added(usage.recent, served),
        contended=_added(usage.contended, served) if contended else usage.contended,
    )


def over_share(
    usage: Usage,
    owned: Mapping[str, Owned],
    *,
    requests_per_s: float,
    now: datetime,
    weights: Mapping[str, float] = _NOTHING,
) -> Mapping[str, OverShare]:
    """Return the owners that are over their share of a rater, which can do so much a second.

    `usage` must be aged to `now`. One owner alone is never over: nobody waits for it.
    """
    if len(owned) < 2 or requests_per_s <= 0:
        return {}
    # Of little that was served a share says little.
    served = max(sum(usage.contended.values()), requests_per_s * LEAST_SEEN.total_seconds())
    over = {}
    for owner, work in owned.items():
        used = usage.contended.get(owner, 0.0) / served
        allowed = min(1.0, OWNER_SHARE * weights.get(owner, 1.0))
        left_s = max(SHORTEST, work.last_deadline_at - now).total_seconds()
        if used > allowed and work.requests > requests_per_s * left_s:
            over[owner] = OverShare(used=min(1.0, used), allowed=allowed)
    return over


def _faded(amounts: Mapping[str, float], half_lives: float) -> Mapping[str, float]:
    share = 0.5**half_lives
    return {
        owner: amount * share for owner, amount in amounts.items() if amount * share > _FORGOTTEN
    }


def _added(amounts: Mapping[str, float], served: Mapping[str, float]) -> Mapping[str, float]:
    added = dict(amounts)
    for owner, requests in served.items():
        added[owner] = added.get(owner, 0.0) + requests
    return added
