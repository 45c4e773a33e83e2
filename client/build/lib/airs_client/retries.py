"""Whether and when a failed call is made again. Pure: the caller brings the time and the chance.

Only calls that do no harm twice are repeated: reads, calls that the API calls idempotent, and calls
with an Idempotency-Key. Waits double from `base_s` to `cap_s`, the upper half of each by chance so
that clients that failed together do not come back together. Retry-After is a floor.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from airs_client.errors import AirsError, ApiError, Unreachable

_STATUSES = frozenset({429, 502, 503, 504})
_CODES = frozenset({"upload_in_progress"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How patient a client is. A server that asks for more than `longest_wait_s` is an error."""

    max_retries: int = 4
    base_s: float = 0.5
    cap_s: float = 10.0
    longest_wait_s: float = 120.0

    def delay_s(
        self, failure: AirsError, *, repeatable: bool, attempt: int, chance: float
    ) -> float | None:
        """Seconds to wait before the call is repeated; None to give up.

        `attempt` is 0 after the first failure, `chance` a number from 0 to 1.
        """
        if not repeatable or attempt >= self.max_retries or not _passing(failure):
            return None
        backoff_s = min(self.cap_s, self.base_s * 2.0 ** min(attempt, 30))
        wait_s = backoff_s * (0.5 + chance / 2)
        if isinstance(failure, ApiError) and failure.retry_after_s is not None:
            if failure.retry_after_s > self.longest_wait_s:
                return None
            wait_s = max(wait_s, failure.retry_after_s)
        return wait_s


def retry_after_s(value: str | None, *, now: datetime) -> float | None:
    """Seconds from a Retry-After header, given as seconds or as a date; None for rubbish."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _seconds_until(value, now=now)
    return seconds if 0 <= seconds < math.inf else None


def _seconds_until(value: str, *, now: datetime) -> float | None:
    try:
        until = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - now).total_seconds())


def _passing(failure: AirsError) -> bool:
    if isinstance(failure, ApiError):
        return failure.status in _STATUSES or failure.code in _CODES
    return isinstance(failure, Unreachable)
