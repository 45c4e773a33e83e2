"""Reads `Retry-After`: seconds or an HTTP date, as a floor for the next try."""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_S = 1_800.0
"""No model server makes us wait longer: the cap of our own back-off."""

SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def parse_retry_after(
    value: str | None, now: datetime, *, longest_s: float = LONGEST_S
) -> float | None:
    """Return the seconds to wait, 0 to `longest_s`, or None where the header says nothing usable.

    Rubbish, negative numbers and dates gone by say nothing: ordinary back-off applies.
    """
    text = (value or "").strip()
    if SECONDS.fullmatch(text):
        return min(float(text), longest_s)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    if until.tzinfo is None:  # "-0000": a time in UTC from a place that does not say where it is
        until = until.replace(tzinfo=UTC)
    wait_s = (until - now).total_seconds()
    return min(wait_s, longest_s) if wait_s > 0 else None
