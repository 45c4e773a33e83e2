"""Freshness: which rating of the archive may answer a request, and which is due to be erased.

A rating is fresh while its age is below the rater's freshness (or the request's `max_age_s`), from
the moment the model answered; reads and copies do not renew it. A clock that was set back may leave
ratings of the future: up to five minutes count as fresh.
"""

from datetime import datetime, timedelta
from enum import IntEnum

FUTURE = timedelta(minutes=5)
"""Ratings from further ahead are not taken: a clock was wrong."""
BUFFER = timedelta(days=10)
"""How long a rating is kept after it has ceased to be fresh."""


class Look(IntEnum):
    """What the archive said when a request was accepted; the numbers are stored."""

    HIT = 0
    """It had a rating that was taken."""
    MISS = 1
    """It had none."""
    STALE = 2
    """It had one that was too old."""
    BYPASSED = 3
    """The workflow asked not to look."""


def fresh_after(
    *, now: datetime, freshness_s: int, max_age_s: int | None, accepted_at: datetime, bypass: bool
) -> datetime:
    """Return the instant after which a rating must have been produced to be taken.

    `bypass` takes only what was produced after the workflow was accepted: it still coalesces.
    """
    age_s = freshness_s if max_age_s is None else min(freshness_s, max_age_s)
    oldest = now - timedelta(seconds=age_s)
    return max(oldest, accepted_at) if bypass else oldest


def due_before(*, now: datetime, freshness_s: int) -> datetime:
    """Return the instant before which the ratings of a rater are to be erased."""
    return now - timedelta(seconds=freshness_s) - BUFFER


def judge(
    *,
    produced_at: datetime,
    reusable: bool,
    produced_after: datetime,
    freshness_s: int,
    now: datetime,
) -> str | None:
    """Return why a rating is not taken, None if it may be.

    `not_reusable`, `in_the_future`, `stale` (past the rater's freshness) or `too_old` (fresh, but
    older than this request wants it).
    """
    if not reusable:
        return "not_reusable"
    if produced_at > now + FUTURE:
        return "in_the_future"
    if produced_at > produced_after:
        return None
    return "stale" if now - produced_at >= timedelta(seconds=freshness_s) else "too_old"
