"""How a run went, in the figures that the paper and the goals are stated in.

What the figures of evaluations mean stands in `measures`, which the report of a running system
calls too. What failed for good is a floor that is the same for every policy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from airs_site.simulation import measures
from airs_site.simulation.engine import World
from airs_site.simulation.hours import HOUR_S
from airs_site.simulation.measures import Ended, Names, Numbers
from airs_site.simulation.work import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of one run, as they are reported; shares and ratios are numbers from 0 to 1."""

    duty: Mapping[str, float]
    hit_rate: float
    funnel: Mapping[str, int]
    peak_to_mean: Mapping[str, float]
    """Of the funnel's batches an hour."""
    failure: Mapping[str, float]
    capacity_failure: Mapping[str, float]
    whole_in_time: float
    requests_in_time: float
    latency_s: Mapping[str, Mapping[str, Mapping[str, float]]]
    low_whole: float | None
    """None where a run has no such evaluations; so for all that may be None."""
    small_raters_whole: float | None
    low_to_high: float | None
    """Median latency of low priority over that of high priority."""
    amplification: float
    jain: float
    forecast_kept: float | None


def measure(world: World, expected: Mapping[int, bool] | None = None) -> Figures:
    """Return the figures of a run that has ended.

    `expected` says of jobs, by their place, whether all of them was forecast to be in time.
    """
    ended = ended_of(world)
    large = measures.large({rater.id: rater.default_replicas for rater in world.raters})
    small = np.array([rater not in large for rater in ended.rater], dtype=bool)
    whole = measures.whole(ended)
    return Figures(
        duty=_duty(world),
        hit_rate=measures.hit_rate(ended),
        funnel=_funnel(world),
        peak_to_mean=_peaks(world),
        failure=measures.failure(ended),
        capacity_failure=measures.capacity_failure(ended),
        whole_in_time=float(whole.mean()),
        requests_in_time=measures.requests_in_time(ended),
        latency_s=measures.latencies_s(ended),
        low_whole=measures.share(whole[ended.priority == "low"]),
        small_raters_whole=measures.share(whole[small]),
        low_to_high=measures.low_to_high(ended),
        amplification=world.counts.attempts / max(1, world.counts.calls),
        jain=measures.jain(ended),
        forecast_kept=_kept(world.jobs, expected or {}),
    )


def latency_s(job: Job) -> float:
    """Return the seconds until the last rating came; of a late job, until its deadline."""
    return (job.deadline_s if job.late else job.last_s) - job.submitted_s


def ended_of(world: World) -> Ended:
    """Return the evaluations of a run that has ended, as figures are made of them."""
    jobs = world.jobs
    return Ended(
        rater=_named(world.raters[job.rater].id for job in jobs),
        priority=_named("low" if job.evaluation.low else "high" for job in jobs),
        owner=_named(job.evaluation.owner for job in jobs),
        requests=_of(jobs, lambda job: job.requests),
        hits=_of(jobs, lambda job: job.hits + job.free),
        late=_of(jobs, lambda job: job.late),
        failed=_of(jobs, lambda job: job.failed),
        latency_s=_of(jobs, latency_s),
        alone_s=_of(jobs, lambda job: _alone_s(world, job)),
    )


def _alone_s(world: World, job: Job) -> float:
    """Return what a job would take alone, on all replicas that its rater has by default."""
    missing = job.requests - job.hits
    if not missing:
        return nan
    batches = -(-missing // world.batch)
    replicas = max(1, min(batches, world.raters[job.rater].default_replicas))
    return batches * world.service_s(job, min(missing, world.batch)) / replicas


def _of(jobs: Sequence[Job], number: Any) -> Numbers:
    return np.array([number(job) for job in jobs], dtype=np.float64)


def _named(names: Iterable[str]) -> Names:
    return np.array(list(names), dtype=np.object_)


def _duty(world: World) -> dict[str, float]:
    hours = world.hours.hours
    busy = [*world.counts.busy_s, *[0.0] * hours][:hours]
    each = np.array(busy) / (HOUR_S * len(world.pool.replicas))
    return {"mean": float(each.mean()), "peak_hour": float(each.max())}


def _funnel(world: World) -> dict[str, int]:
    batch = world.batch
    return {
        "received_batches": sum(-(-job.requests // batch) for job in world.jobs),
        "after_archive": sum(-(-(job.requests - job.hits) // batch) for job in world.jobs),
        "model_calls": world.counts.calls,
    }


def _peaks(world: World) -> dict[str, float]:
    hours = world.hours.hours
    hour_of = np.array([int(job.submitted_s // HOUR_S) for job in world.jobs], dtype=np.int64)
    received = _of(world.jobs, lambda job: job.requests)
    missing = _of(world.jobs, lambda job: job.requests - job.hits)
    by_hour = {
        "received_batches": np.bincount(hour_of, weights=received, minlength=hours),
        "after_archive": np.bincount(hour_of, weights=missing, minlength=hours),
        "model_calls": np.diff(world.hours.calls),
    }
    return {
        name: float(counts.max() / counts.mean()) if counts.any() else 1.0
        for name, counts in by_hour.items()
    }


def _kept(jobs: Sequence[Job], expected: Mapping[int, bool]) -> float | None:
    said = [job for job in jobs if expected.get(job.place)]
    return sum(not job.late for job in said) / len(said) if said else None
