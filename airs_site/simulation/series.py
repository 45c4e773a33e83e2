"""A run hour by hour and as distributions: what plots show and what an hour of the week was like.

Rates are those of the full size, whatever the scale of the run. Raters are the two largest by their
default replicas, and all others together as `others`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from airs_site.simulation.engine import World
from airs_site.simulation.hours import HOUR_S
from airs_site.simulation.measures import large
from airs_site.simulation.metrics import latency_s
from airs_site.simulation.work import Job
from airs_site.simulation.workload import Rater

OTHERS: Final = "others"
DISTRIBUTION: Final = 101
"""Points of a distribution: its quantiles at 0, 0.01 … 1."""
_DIGITS: Final = 5

Values = Sequence[float | None]
"""None where an hour has nothing to measure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """By hour of the measured days, latencies and shares by the hour of submission."""

    evaluations: Sequence[int]
    duty: Values
    received_per_s: Values
    """Batches, as all rates here."""
    after_archive_per_s: Values
    calls_per_s: Values
    attempts_per_s: Values
    hit_rate: Values
    whole: Values
    waiting: Mapping[str, Values]
    """Batches that waited to be sent at the start of the hour, by rater."""
    replicas: Mapping[str, Values]
    latency_s: Mapping[str, Mapping[str, Values]]
    """By rater and quantile."""
    latency_quantiles_s: Mapping[str, Mapping[str, Values]]
    """Distribution by rater and class."""
    deadline_s: Mapping[str, float]
    """The shortest by rater."""
    failure_quantiles: Values
    capacity_failure_quantiles: Values


def series_of(world: World) -> Series:
    """Return the series of a run that has ended."""
    jobs, hours = world.jobs, world.hours.hours
    full = world.workload.scale / world.batch / HOUR_S
    groups = rater_groups(world.raters)
    hour_of = np.array([int(job.submitted_s // HOUR_S) for job in jobs], dtype=np.int64)
    requests = _by_hour(jobs, hour_of, hours, lambda job: job.requests)
    missing = _by_hour(jobs, hour_of, hours, lambda job: job.requests - job.hits)
    free = _by_hour(jobs, hour_of, hours, lambda job: job.hits + job.free)
    count = _by_hour(jobs, hour_of, hours, lambda job: 1)
    whole = _by_hour(jobs, hour_of, hours, lambda job: not job.late)
    busy = np.array([*world.counts.busy_s, *[0.0] * hours][:hours])
    calls_s = world.workload.scale / HOUR_S
    return Series(
        evaluations=[int(n) for n in count],
        duty=_plain(busy / (HOUR_S * len(world.pool.replicas))),
        received_per_s=_plain(requests * full),
        after_archive_per_s=_plain(missing * full),
        calls_per_s=_plain(np.diff(np.array(world.hours.calls)) * calls_s),
        attempts_per_s=_plain(np.diff(np.array(world.hours.attempts)) * calls_s),
        hit_rate=_ratio(free, requests),
        whole=_ratio(whole, count),
        waiting={
            name: _plain(_of_raters(world.hours.unsent, raters) * full * HOUR_S)
            for name, raters in groups.items()
        },
        replicas={
            name: _plain(_of_raters(world.hours.replicas, raters))
            for name, raters in groups.items()
        },
        latency_s={
            name: _latencies(jobs, hour_of, hours, raters) for name, raters in groups.items()
        },
        latency_quantiles_s={
            name: {
                priority: _distribution(
                    [
                        latency_s(job)
                        for job in jobs
                        if job.rater in raters and job.evaluation.low == low
                    ]
                )
                for priority, low in (("high", False), ("low", True))
            }
            for name, raters in groups.items()
        },
        deadline_s={
            name: min((world.raters[r].deadline_s for r in raters), default=0.0)
            for name, raters in groups.items()
        },
        failure_quantiles=_distribution([(job.late + job.failed) / job.requests for job in jobs]),
        capacity_failure_quantiles=_distribution([job.late / job.requests for job in jobs]),
    )


def rater_groups(raters: Sequence[Rater]) -> dict[str, set[int]]:
    """Return the raters that are shown on their own, and the others, by name."""
    shown = large({rater.id: rater.default_replicas for rater in raters})
    alone = {rater.id: {number} for number, rater in enumerate(raters) if rater.id in shown}
    return {**alone, OTHERS: set(range(len(raters))) - set().union(*alone.values())}


def _by_hour(
    jobs: Sequence[Job],
    hour_of: NDArray[np.int64],
    hours: int,
    number: Callable[[Job], float],
) -> NDArray[np.float64]:
    weights = np.array([number(job) for job in jobs], dtype=np.float64)
    return np.bincount(hour_of, weights=weights, minlength=hours)[:hours].astype(np.float64)


def _of_raters(samples: Sequence[Sequence[int]], raters: set[int]) -> NDArray[np.float64]:
    """Return the sums over these raters at the start of each hour."""
    return np.array([sum(sample[r] for r in raters) for sample in samples[:-1]], dtype=np.float64)


def _latencies(
    jobs: Sequence[Job], hour_of: NDArray[np.int64], hours: int, raters: set[int]
) -> dict[str, Values]:
    found: list[list[float]] = [[] for _ in range(hours)]
    for job, hour in zip(jobs, hour_of.tolist(), strict=True):
        if job.rater in raters:
            found[hour].append(latency_s(job))
    return {
        name: [_short(float(np.quantile(took, share))) if took else None for took in found]
        for name, share in (("p50", 0.5), ("p75", 0.75), ("p95", 0.95))
    }


def _distribution(values: Sequence[float]) -> Values:
    if not values:
        return []
    return _plain(np.quantile(np.array(values), np.linspace(0, 1, DISTRIBUTION)))


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> Values:
    return [
        _short(p / w) if w else None for p, w in zip(part.tolist(), whole.tolist(), strict=True)
    ]


def _plain(values: NDArray[np.float64]) -> Values:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float:
    """Return a number to so many digits as a plot can show."""
    return float(f"{value:.{_DIGITS}g}")
