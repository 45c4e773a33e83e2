"""What becomes of a webhook delivery after an attempt: delivered, tried again, or given up.

A failed one is tried again with growing waits for a day, then a last time, and given up. 410 stops
it and disables its endpoint; an address that may not be sent to stops it as well.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Final

RETRY_FOR: Final = timedelta(hours=24)
"""Tries go on for so long after the first one; the last one is at or after its end."""
FIRST_WAIT: Final = timedelta(seconds=5)
LONGEST_WAIT: Final = timedelta(hours=3)
JITTER: Final = 0.2
"""A wait is up to so much shorter or longer: little enough that each is longer than the last."""

REDIRECTED: Final = "redirect_not_followed"
NOT_ALLOWED: Final = "url_not_allowed"
REFUSED: Final = "http_error"
GONE: Final = "gone"


class DeliveryState(IntEnum):
    """Where a delivery stands. The numbers are stored: append, never renumber."""

    PENDING = 0
    """To be sent, now or at its next time."""
    DELIVERED = 1
    """The receiver answered 2xx."""
    GIVEN_UP = 2
    """Not taken within a day, or its address may not be sent to; a person may replay it."""
    DISABLED = 3
    """The receiver answered 410, to it or to another one of its endpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an attempt met: a status, or the code of what kept one from coming."""

    status: int | None = None
    code: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What becomes of a delivery; `code` says what was wrong with the attempt, if anything."""

    state: DeliveryState
    code: str = ""
    retry_at: datetime | None = None
    reason: str = ""


def decide(
    answer: Answer,
    *,
    tries: int,
    began_at: datetime,
    now: datetime,
    draw: float,
    asked_s: float | None = None,
) -> Decision:
    """Decide on a delivery after its `tries`-th attempt since `began_at`.

    `draw` is in [0, 1); `asked_s` is what the receiver asked for by Retry-After.
    """
    code = code_of(answer)
    if not code:
        return Decision(state=DeliveryState.DELIVERED, reason=f"answered {answer.status}")
    if code == GONE:
        return Decision(
            state=DeliveryState.DISABLED, code=code, reason="answered 410: wants no more"
        )
    if code == NOT_ALLOWED:
        return Decision(
            state=DeliveryState.GIVEN_UP, code=code, reason="its address may not be sent to"
        )
    if now - began_at >= RETRY_FOR:
        return Decision(
            state=DeliveryState.GIVEN_UP,
            code=code,
            reason=f"tried {tries} times in {now - began_at}",
        )
    delay = wait(tries, draw=draw)
    if asked_s is not None:
        delay = max(delay, min(timedelta(seconds=asked_s), RETRY_FOR))
    return Decision(
        state=DeliveryState.PENDING,
        code=code,
        retry_at=now + delay,
        reason=f"{code}; again in {delay.total_seconds():.0f} s",
    )


def code_of(answer: Answer) -> str:
    """Return what was wrong with an attempt, "" for nothing."""
    if answer.status is None:
        return answer.code
    if 200 <= answer.status < 300:
        return ""
    if answer.status == 410:
        return GONE
    return REDIRECTED if 300 <= answer.status < 400 else REFUSED


def wait(tries: int, *, draw: float) -> timedelta:
    """Return the wait after the `tries`-th attempt: 5 s, doubled each time up to 3 h, ± 20 %."""
    # The exponent is bounded, so that no number of tries overflows.
    plain = min(FIRST_WAIT * 2.0 ** min(tries - 1, 32), LONGEST_WAIT)
    return plain * (1 - JITTER + 2 * JITTER * draw)
