"""How many batches a replica may hold: as few as keep it busy and its device batches full
(design, "Dispatch when there is room").

What a window must bridge is the time from the end of a batch to the next one's arrival, and what it
must offer is enough to fill a device batch: both depend on the model, executors and the device. So
it is tried, one window a period in which there was more work than the window let through, and only
neighbours: from where it stands the next smaller, as long as replicas do what they can, and the
next larger, as long as that makes them do more. What was found counts for hours: a window that was
too small is not tried each minute.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

ENOUGH: Final = 0.97
"""Busy share at which a window is large enough."""
SAME: Final = 0.99
"""Of the largest busy share, where none is ENOUGH: as good as that."""
SAME_PACE: Final = 0.95
"""Of the highest pace: as good as that. It depends on who else uses a machine, too."""
BELIEVED: Final = timedelta(hours=6)
"""How long what was measured counts: work and machines change."""
MOST: Final = 4
"""Times the operator's figure that is tried where that is not enough."""
_WEIGHT: Final = 0.5
"""Of a new measurement of a window beside what was known of it."""
_STEPS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """What all replicas did together while each had its window full."""

    busy: float
    """Seconds busy of seconds lived."""
    pace: float
    """Tokens, padding left out, a second busy: more where device batches are fuller."""
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The window to have from now on, and why."""

    window: int
    reason: str


def folded(before: Measure | None, new: Measure) -> Measure:
    """Return what is known of a window after one more measurement."""
    if before is None or not _counts(before, new.at):
        return new
    return Measure(
        busy=_between(before.busy, new.busy), pace=_between(before.pace, new.pace), at=new.at
    )


def tune(
    current: int,
    measures: Mapping[int, Measure],
    *,
    start: int,
    now: datetime,
    fits: int | None = None,
) -> Tuned:
    """Return the window to try or to keep, given what replicas did with each.

    `start` is the operator's figure: it is tried first, and never more than MOST times as many.
    None larger than `fits` is tried: with it servers would refuse some.
    """
    known = {window: each for window, each in measures.items() if _counts(each, now)}
    if current not in known:
        return Tuned(window=current, reason="not measured yet")
    steps = sorted({start, *(step for step in _STEPS if step <= MOST * start), MOST * start})
    larger = _above(max(known), steps)
    if larger is not None and (fits is None or larger <= fits) and _is_worth_more(known):
        return Tuned(window=larger, reason=f"{_words(max(known), known)}; {larger} is tried")
    enough = _smallest(known)
    smaller = _below(enough, steps)
    if smaller is not None and smaller not in known:
        return Tuned(window=smaller, reason=f"{_words(enough, known)}; {smaller} is tried")
    reason = _words(enough, known)
    if smaller is not None:
        reason += f"; {_words(smaller, known)}"
    return Tuned(window=enough, reason=reason)


def _counts(measure: Measure, now: datetime) -> bool:
    # One of the future was made before the clock was set back.
    return timedelta(0) <= now - measure.at < BELIEVED


def _between(before: float, new: float) -> float:
    return (1 - _WEIGHT) * before + _WEIGHT * new


def _smallest(known: Mapping[int, Measure]) -> int:
    """Return the smallest window that is enough, or with which most was done."""
    busy, pace = _best(known.values())
    enough = [
        window
        for window, each in known.items()
        if each.busy >= min(ENOUGH, busy * SAME) and each.pace >= pace * SAME_PACE
    ]
    if enough:
        return min(enough)
    return max(sorted(known), key=lambda window: known[window].busy * known[window].pace)


def _is_worth_more(known: Mapping[int, Measure]) -> bool:
    """Say whether the largest window known may not be enough: it was better than all smaller ones.

    Then a still larger one may be better again.
    """
    largest = max(known)
    of_largest = known[largest]
    smaller = [each for window, each in known.items() if window != largest]
    if not smaller:
        return of_largest.busy < ENOUGH
    busy, pace = _best(smaller)
    is_busier = of_largest.busy < ENOUGH and busy < of_largest.busy * SAME
    return is_busier or pace < of_largest.pace * SAME_PACE


def _best(measures: Iterable[Measure]) -> tuple[float, float]:
    found = list(measures)
    return max(each.busy for each in found), max(each.pace for each in found)


def _words(window: int, known: Mapping[int, Measure]) -> str:
    of_window = known[window]
    return f"with {window} busy {of_window.busy:.0%}, {of_window.pace:,.0f} tokens a busy second"


def _above(window: int, steps: Iterable[int]) -> int | None:
    return min((step for step in steps if step > window), default=None)


def _below(window: int, steps: Iterable[int]) -> int | None:
    return max((step for step in steps if step < window), default=None)
