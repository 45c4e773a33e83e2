"""How a run went, in the figures that the paper and the goals are stated in.

Shares of an evaluation are of its requests, hits included. *Capacity failure* is what was neither
computed nor started by the deadline; *failure* adds what failed for good, a floor that is the same
for every policy. An evaluation without capacity failure is *whole in time*; requests are in time
that are no capacity failure. What is late counts with a latency of its deadline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from airs_site.simulation.engine import HOUR_S, World
from airs_site.simulation.work import Job
from airs_site.simulation.workload import DAY_S

Numbers = NDArray[np.float64]

FAILURE_QUANTILES: Final = {"p50": 0.5, "p80": 0.8, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LATENCY_QUANTILES: Final = {"p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
SHORTEST_S: Final = 600.0
"""What an evaluation alone takes, at least, when its slowdown is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of one run, as they are reported; shares and ratios are numbers from 0 to 1."""

    duty: Mapping[str, float]
    hit_rate: float
    funnel: Mapping[str, int]
    failure: Mapping[str, float]
    capacity_failure: Mapping[str, float]
    whole_in_time: float
    requests_in_time: float
    latency_s: Mapping[str, Mapping[str, Mapping[str, float]]]
    low_whole: float | None
    """None where a run has no such evaluations; so for all that may be None."""
    small_raters_whole: float | None
    amplification: float
    jain: float
    forecast_kept: float | None


def measure(world: World, expected: Mapping[int, bool] | None = None) -> Figures:
    """Return the figures of a run that has ended.

    `expected` says of jobs, by their place, whether all of them was forecast to be in time.
    """
    jobs = world.jobs
    requests = _of(jobs, lambda job: job.requests)
    late = _of(jobs, lambda job: job.late)
    failed = _of(jobs, lambda job: job.failed)
    whole = late == 0
    low = np.array([job.evaluation.low for job in jobs], dtype=bool)
    small = _small(world)
    return Figures(
        duty=_duty(world),
        hit_rate=float(_of(jobs, lambda job: job.hits + job.free).sum() / requests.sum()),
        funnel=_funnel(world),
        failure=_quantiles((late + failed) / requests, FAILURE_QUANTILES),
        capacity_failure=_quantiles(late / requests, FAILURE_QUANTILES),
        whole_in_time=float(whole.mean()),
        requests_in_time=float(1 - late.sum() / requests.sum()),
        latency_s=_latencies(world, low),
        low_whole=_share(whole[low]),
        small_raters_whole=_share(whole[small]),
        amplification=world.counts.attempts / max(1, world.counts.calls),
        jain=jain(world),
        forecast_kept=_kept(jobs, expected or {}),
    )


def latency_s(job: Job) -> float:
    """Return the seconds until the last rating came; of a late job, until its deadline."""
    return (job.deadline_s if job.late else job.last_s) - job.submitted_s


def jain(world: World) -> float:
    """Return Jain's index of the slowdown over owners: 1 where all are slowed down alike.

    An evaluation's slowdown is its latency over what it would take alone, on all replicas that its
    rater has by default, but over SHORTEST_S at least: a wait of minutes is no worse for seconds of
    work. An owner's is the mean over its evaluations that had something to compute.
    """
    slowdowns: dict[str, list[float]] = {}
    for job in world.jobs:
        missing = job.requests - job.hits
        if missing:
            batches = -(-missing // world.batch)
            replicas = max(1, min(batches, world.raters[job.rater].default_replicas))
            alone_s = batches * world.service_s(job, min(missing, world.batch)) / replicas
            slowdown = max(1.0, latency_s(job) / max(alone_s, SHORTEST_S))
            slowdowns.setdefault(job.evaluation.owner, []).append(slowdown)
    if not slowdowns:
        return 1.0
    means = np.array([np.mean(slowdowns[owner]) for owner in sorted(slowdowns)])
    return float(means.sum() ** 2 / (len(means) * (means**2).sum()))


def _of(jobs: Sequence[Job], number: Any) -> Numbers:
    return np.array([number(job) for job in jobs], dtype=np.float64)


def _quantiles(values: Numbers, quantiles: Mapping[str, float]) -> dict[str, float]:
    return {name: float(np.quantile(values, share)) for name, share in quantiles.items()}


def _share(values: NDArray[np.bool_]) -> float | None:
    return float(values.mean()) if len(values) else None


def _small(world: World) -> NDArray[np.bool_]:
    """Say of which jobs the rater is not one of the two with most replicas."""
    by_size = sorted(range(len(world.raters)), key=lambda n: -world.raters[n].default_replicas)
    large = set(by_size[:2])
    return np.array([job.rater not in large for job in world.jobs], dtype=bool)


def _duty(world: World) -> dict[str, float]:
    days = min(world.options.days or world.workload.params.days, world.workload.params.days)
    hours = int(days * DAY_S // HOUR_S)
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


def _latencies(world: World, low: NDArray[np.bool_]) -> dict[str, dict[str, Mapping[str, float]]]:
    took = _of(world.jobs, latency_s)
    raters = np.array([job.rater for job in world.jobs])
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for number, rater in enumerate(world.raters):
        for name, of_class in (("high", ~low), ("low", low)):
            chosen = took[(raters == number) & of_class]
            if len(chosen):
                found.setdefault(rater.id, {})[name] = _quantiles(chosen, LATENCY_QUANTILES)
    return found


def _kept(jobs: Sequence[Job], expected: Mapping[int, bool]) -> float | None:
    said = [job for job in jobs if expected.get(job.place)]
    return sum(not job.late for job in said) / len(said) if said else None
