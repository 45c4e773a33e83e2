"""How far archived scores have moved, from sums: the report of shadow refresh."""

import math
from dataclasses import dataclass

DAY_S = 86_400
AGE_BOUNDS_S = (3_600, DAY_S, 7 * DAY_S, 30 * DAY_S, 60 * DAY_S, 90 * DAY_S)
"""Where one age bucket ends and the next begins; the first begins at 0, the last has no end."""
_Z = 1.959963984540054
"""Standard deviations to either side of the mean that hold 95 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Of the differences new - old in one age bucket, in units of the score."""

    n: int
    total: float
    total_absolute: float
    total_squared: float
    over_1_percent: int
    """Differences of more than 1 % of the scale."""
    over_10_percent: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """What the sums say."""

    n: int
    mean_difference: float
    mean_difference_interval: Interval | None
    """None for one sample: it has no spread."""
    mean_absolute_difference: float
    changed_1_percent: float
    """Share of scores."""
    changed_10_percent: float
    changed_10_percent_interval: Interval


def drift(sums: Sums) -> Drift:
    """Return the report of one bucket with at least one sample.

    The interval of the mean is the normal one (too narrow below some thirty samples), that of the
    share is Wilson's, which also holds where nothing, or everything, has changed.
    """
    n = sums.n
    mean = sums.total / n
    interval = None
    if n > 1:
        variance = max(0.0, (sums.total_squared - n * mean * mean) / (n - 1))
        reach = _Z * math.sqrt(variance / n)
        interval = Interval(low=mean - reach, high=mean + reach)
    return Drift(
        n=n,
        mean_difference=mean,
        mean_difference_interval=interval,
        mean_absolute_difference=sums.total_absolute / n,
        changed_1_percent=sums.over_1_percent / n,
        changed_10_percent=sums.over_10_percent / n,
        changed_10_percent_interval=wilson(sums.over_10_percent, n),
    )


def wilson(count: int, n: int) -> Interval:
    """Return the interval of a share of `count` in `n`."""
    share, square = count / n, _Z * _Z
    centre = (share + square / (2 * n)) / (1 + square / n)
    reach = _Z * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    # Rounding must not carry a share over its ends.
    return Interval(low=max(0.0, centre - reach), high=min(1.0, centre + reach))
