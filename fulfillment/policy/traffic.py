"""Traffic to models: when to try again, and how much may be out.

A replica of our own has a fixed window of batches, which the server orders by priority. An
external model has an adaptive one (`Window`): it grows with what succeeds and drops with overload.
Through whom it goes is decided in `quota`, which workflow fills the room in `ordering`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import sqrt
from typing import Final

from fulfillment.policy.priority import PriorityClass

BACKOFF_BASE_S: Final = 1
BACKOFF_CAP_S: Final = 1800

RETRY_AFTER_SPREAD: Final = 0.2
"""What is refused together must not come back together: it wakes over a fifth of the floor."""

DROP_FACTOR: Final = 0.7
DROP_INTERVAL: Final = timedelta(seconds=1)
COOLING: Final = timedelta(seconds=1)
"""How long a refused call keeps its room: refusals come back at once, and a window alone would let
as many calls go again in the next instant."""
GROWTH_SHARE: Final = 1 / 32
"""Of the ceiling, a full window of successes: a large window recovers in as many round trips as a
small one, which one call a round trip would take hours for where calls take seconds."""


def backoff(*, attempt: int, chance: float, retry_after_s: float | None) -> timedelta:
    """Return the wait after the failed try `attempt` (from 1): full jitter, 1 s to 30 min.

    `chance` is the caller's random number in [0, 1). Retry-After is a floor, itself capped, from
    which waits spread upwards by up to a fifth; one that is not a positive number is ignored.
    """
    # 2**11 is past the cap: a larger exponent only risks an overflow.
    most_s = min(BACKOFF_CAP_S, BACKOFF_BASE_S << min(attempt - 1, 11))
    floor_s = _floor_s(retry_after_s) * (1 + RETRY_AFTER_SPREAD * chance)
    return timedelta(seconds=min(max(chance * most_s, floor_s), BACKOFF_CAP_S))


def _floor_s(retry_after_s: float | None) -> float:
    # The comparison is false for NaN.
    if retry_after_s is not None and retry_after_s > 0:
        return min(retry_after_s, BACKOFF_CAP_S)
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryDecision:
    """Whether an item is tried again, and if not, with which code it ends."""

    retry: bool
    not_before: datetime | None
    code: str
    """Empty for a retry, else `attempts_exhausted` (FAILED) or `deadline` (TIMED_OUT)."""
    reason: str


def decide_retry(
    *,
    now: datetime,
    attempt: int,
    max_attempts: int,
    chance: float,
    retry_after_s: float | None,
    deadline_at: datetime,
    call_limit: timedelta,
    costs_attempt: bool,
) -> RetryDecision:
    """Decide what follows a failed try; `attempt` counts the tries that cost one, this included.

    No retry starts that cannot end before the deadline. Luck decides the wait only: a jitter that
    would pass the last possible start is cut to it, so whether an item gets another try does not
    depend on `chance`. A try that costs no attempt (warming up, another version) may go on until
    the deadline.
    """
    if costs_attempt and attempt >= max_attempts:
        return RetryDecision(
            retry=False,
            not_before=None,
            code="attempts_exhausted",
            reason=f"try {attempt} of {max_attempts} failed",
        )
    latest = deadline_at - call_limit
    if now + timedelta(seconds=_floor_s(retry_after_s)) > latest:
        return RetryDecision(
            retry=False,
            not_before=None,
            code="deadline",
            reason=f"a call of up to {call_limit} could not end by {deadline_at:%H:%M:%S}",
        )
    wait = backoff(attempt=max(1, attempt), chance=chance, retry_after_s=retry_after_s)
    not_before = min(now + wait, latest)
    return RetryDecision(
        retry=True,
        not_before=not_before,
        code="",
        reason=f"try {attempt} of {max_attempts} failed, next in {not_before - now}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """How many calls to one external model may be in flight, by class.

    A class may be sent while the calls of *all* classes in flight are fewer than its limit. Limits
    never rise from a class to the one below it.
    """

    ceiling: int
    limits: tuple[float, ...]
    """One a class, in class order, each within [1, ceiling]."""
    dropped_at: tuple[datetime | None, ...]
    """When the limit of each class last dropped."""
    cooling: tuple[tuple[datetime, PriorityClass, int], ...] = ()
    """Until when how many calls of a class keep their room though they were refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """What became of the calls of one class since the last look."""

    priority_class: PriorityClass
    succeeded: int = 0
    overloaded: int = 0
    """Refused for overload or timed out; no other failure belongs here."""
    refused_at: datetime | None = None
    """When the last of the overloaded calls had been sent; None for just now."""


def open_window(ceiling: int) -> Window:
    """Return a full window: the operator's limit is trusted until the model refuses."""
    if ceiling < 1:
        raise ValueError(f"a window of {ceiling} calls would never send")
    classes = len(PriorityClass)
    return Window(ceiling=ceiling, limits=(float(ceiling),) * classes, dropped_at=(None,) * classes)


def adapt(window: Window, signals: Sequence[Signal], now: datetime) -> Window:
    """Return the window after these signals: it creeps up on success and drops on overload.

    A success says that its class and every class above it would have been accepted, a refusal
    that its class and every class below would have been refused; so a refusal never shrinks a
    higher class. A class that met overload does not grow; it drops by 0.7, at most once a second
    and once a congestion: the refusal of a call sent before the last drop says nothing of what the
    smaller window does.
    Growth is a call, or 1/32 of the ceiling, a full window of successes, as a square root, so that
    it does not matter in how many parts the successes are reported.
    """
    step = max(1.0, window.ceiling * GROWTH_SHARE)
    limits: list[float] = []
    dropped_at: list[datetime | None] = []
    for cls, limit, dropped in zip(PriorityClass, window.limits, window.dropped_at, strict=True):
        refused = [s for s in signals if s.overloaded > 0 and s.priority_class <= cls]
        if not refused:
            succeeded = sum(s.succeeded for s in signals if s.priority_class >= cls)
            limit = min(sqrt(limit * limit + 2 * step * succeeded), float(window.ceiling))
        elif _is_news(refused, dropped, now):
            limit = max(1.0, limit * DROP_FACTOR)
            dropped = now
        limits.append(min(limit, limits[-1]) if limits else limit)
        dropped_at.append(dropped)
    cooling = [cooled for cooled in window.cooling if cooled[0] > now]
    refused_now = [(now + COOLING, s.priority_class, s.overloaded) for s in signals if s.overloaded]
    return replace(
        window,
        limits=tuple(limits),
        dropped_at=tuple(dropped_at),
        cooling=tuple(sorted([*cooling, *refused_now])),
    )


def _is_news(refused: Sequence[Signal], dropped: datetime | None, now: datetime) -> bool:
    """Say whether refusals tell of another congestion than that of the last drop."""
    # A clock that was set back must not hold the drop off until it catches up.
    if dropped is None or now < dropped:
        return True
    sent_at = max(s.refused_at or now for s in refused)
    return now - dropped >= DROP_INTERVAL and sent_at > dropped


def room(
    window: Window,
    in_flight_by_class: Mapping[PriorityClass, int],
    cls: PriorityClass,
    *,
    now: datetime,
) -> int:
    """Return how many more calls of the class may go out.

    A class with none in flight keeps a probe of one while the window as a whole has room: without
    it, a class shrunk below what higher classes keep in flight would starve and never recover.
    """
    total = sum(in_flight_by_class.values())
    # Those that ended further ahead than they last belong to a clock that was set back.
    cooled = sum(
        calls
        for until, refused, calls in window.cooling
        if timedelta(0) < until - now <= COOLING and refused <= cls
    )
    free = int(window.limits[cls]) - total - cooled
    if free > 0:
        return free
    widest = int(window.limits[PriorityClass.HIGH])
    probes = total < widest and not in_flight_by_class.get(cls, 0) and not cooled
    return 1 if probes else 0
