"""How values are spread: quantiles by nearest rank, and small histograms."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Values above the bound of the bucket before, up to `up_to`; None is without bound."""

    up_to: float | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A set of values; a quantile is one of them, the least that has its share at or below it."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    histogram: tuple[Bucket, ...]


def summary(values: Sequence[float], *, bounds: Sequence[float]) -> Summary | None:
    """Return how values are spread, with buckets up to each of the bounds; None without values."""
    if not values:
        return None
    p50, p90, p99 = quantiles(Counter(values))
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return Summary(
        n=len(values),
        mean=fsum(values) / len(values),
        p50=p50,
        p90=p90,
        p99=p99,
        max=max(values),
        histogram=tuple(
            Bucket(up_to=up_to, count=count)
            for up_to, count in zip((*bounds, None), counts, strict=True)
        ),
    )


def quantiles(weights: Mapping[float, int]) -> tuple[float, float, float]:
    """Return the values at 50, 90 and 99 % of the weight; at least one weight is above 0."""
    ordered = sorted((value, weight) for value, weight in weights.items() if weight > 0)
    total = sum(weight for _, weight in ordered)
    found: list[float] = []
    passed = 0
    for value, weight in ordered:
        passed += weight
        while len(found) < len(SHARES) and passed >= SHARES[len(found)] * total - 1e-9:
            found.append(value)
    p50, p90, p99 = found
    return p50, p90, p99
