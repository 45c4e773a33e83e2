"""Bad days: what is done to a workload or to the pool, and what is then looked at.

Each is a function of the workload's parameters, so that it may be done to any trace: the busiest
hour is that of the weekday and hour in which people submit most.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Final

import numpy as np

from airs_site.simulation.engine import Loss, World
from airs_site.simulation.hours import HOUR_S
from airs_site.simulation.metrics import latency_s
from airs_site.simulation.work import Job
from airs_site.simulation.workload import DAY_S, Evaluation, Params

FLOODER: Final = "flood"
FLOOD_EVALUATIONS: Final = 300
FLOOD_REQUESTS: Final = 18_000_000
"""Beside FLOOD_POOL replicas; as many for each replica of another pool."""
FLOOD_POOL: Final = 128
FLOOD_LASTS_S: Final = HOUR_S
LOST_SHARE: Final = 1 / 3
LOST_FOR_S: Final = 3 * HOUR_S
OFF_BY: Final = (0.4, 1.6)
OVERLOAD_DAYS: Final = 3
OVERLOAD_HITS: Final = 0.1
TWIN_AFTER_S: Final = 1800.0
AWAY_FOR_S: Final = HOUR_S
RECOVERED_S: Final = HOUR_S
"""A backlog has been worked off when the whole pool needs less than this for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """What a flood leaves to all other owners."""

    others_whole: float
    others_requests: float
    """Share of theirs in time."""
    others_p75_s: float
    """Latency of theirs on the flooded rater, those that came between the flood and the end of
    its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """How the evaluations of some time fared; None where there are none."""

    whole_in_time: float | None
    high_whole: float | None
    low_whole: float | None
    requests_in_time: float | None


def busiest_s(params: Params) -> float:
    """Return when the hour before the busiest one of the busiest day starts."""
    day = max(
        range(params.days), key=lambda d: (params.weekday_mult[(params.first_weekday + d) % 7], -d)
    )
    hour = max(range(24), key=lambda h: (params.hour_human[h], -h))
    return day * DAY_S + max(0, hour - 1) * HOUR_S


def pool_loss(params: Params) -> Loss:
    """A third of the pool is gone for three hours of the busiest day."""
    start_s = busiest_s(params)
    return Loss(at_s=start_s, until_s=start_s + LOST_FOR_S, share=LOST_SHARE)


def that_day(world: World) -> dict[str, Any]:
    """Return how the evaluations fared that came on the day of the loss."""
    start_s = world.options.losses[0].at_s // DAY_S * DAY_S
    return {"day": asdict(part(world, start_s, start_s + DAY_S))}


def flood(params: Params, evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """One owner submits 300 evaluations within an hour, of millions of requests nobody had."""
    top = max(params.raters, key=lambda rater: rater.default_replicas)
    results = max(top.results)
    requests = FLOOD_REQUESTS * params.replicas // FLOOD_POOL
    queries = max(1, requests // FLOOD_EVALUATIONS // results)
    first_id, first_experiment = _free_numbers(evaluations)
    flooding = [
        Evaluation(
            id=first_id + number,
            at_s=busiest_s(params) + number * FLOOD_LASTS_S / FLOOD_EVALUATIONS,
            rater=top.id,
            owner=FLOODER,
            low=False,
            deadline_s=top.deadline_s,
            query_set=0,
            set_size=queries,
            mode="private",
            offset=0,
            queries=queries,
            results=results,
            experiment=first_experiment + number,
            delta=0.0,
            permanent=params.errors.median,
            cost=1.0,
            automatic=False,
        )
        for number in range(FLOOD_EVALUATIONS)
    ]
    return in_order([*evaluations, *flooding])


def wrong_costs(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """Every evaluation costs far less or far more than its rater's, by turns."""
    return [
        replace(evaluation, cost=evaluation.cost * OFF_BY[number % 2])
        for number, evaluation in enumerate(evaluations)
    ]


def overload_s(days: int) -> tuple[float, float]:
    """Return from when until when there is an overload: three days, the rest for recovery."""
    first = min(2, days // 4)
    return first * DAY_S, min(days, first + OVERLOAD_DAYS) * DAY_S


def twice(evaluations: Sequence[Evaluation], start_s: float, end_s: float) -> Sequence[Evaluation]:
    """Everything that comes in that time comes a second time, half an hour later."""
    first_id, first_experiment = _free_numbers(evaluations)
    twins = [
        replace(
            evaluation,
            id=first_id + number,
            experiment=first_experiment + number,
            at_s=evaluation.at_s + TWIN_AFTER_S,
        )
        for number, evaluation in enumerate(evaluations)
        if start_s <= evaluation.at_s < end_s - TWIN_AFTER_S
    ]
    return in_order([*evaluations, *twins])


def recovery(world: World) -> dict[str, Any]:
    """Return who was served in an overload, and how long its backlog lasted."""
    start_s, end_s = overload_s(world.days)
    backlogs = backlogs_s(world)
    end_hour = min(int(end_s // HOUR_S), len(backlogs) - 1)
    recovered = next(
        (hour for hour in range(end_hour, len(backlogs)) if backlogs[hour] < RECOVERED_S), None
    )
    return {
        "during": asdict(part(world, start_s, end_s)),
        "after": asdict(part(world, end_s, inf)),
        "most_backlog_s": max(backlogs),
        "end_backlog_s": backlogs[end_hour],
        "recovered_s": None if recovered is None else (recovered - end_hour) * HOUR_S,
    }


def management_away(params: Params) -> tuple[float, float]:
    """Return the busiest hour, in which nobody moves a replica."""
    start_s = busiest_s(params) + HOUR_S
    return start_s, start_s + AWAY_FOR_S


def while_away(world: World) -> dict[str, Any]:
    """Return how the evaluations fared that came while model management was away."""
    start_s, end_s = world.options.management_away or (0.0, 0.0)
    return {"hour": asdict(part(world, start_s, end_s))}


def others(world: World) -> Others:
    """Return what a flood left to others."""
    jobs = [job for job in world.jobs if job.evaluation.owner != FLOODER]
    flooded = [job for job in world.jobs if job.evaluation.owner == FLOODER]
    start_s = min((job.submitted_s for job in flooded), default=0.0)
    end_s = max((job.deadline_s for job in flooded), default=0.0)
    beside = [
        latency_s(job)
        for job in jobs
        if flooded and job.rater == flooded[0].rater and start_s <= job.submitted_s <= end_s
    ]
    requests = sum(job.requests for job in jobs)
    return Others(
        others_whole=sum(not job.late for job in jobs) / len(jobs),
        others_requests=1 - sum(job.late for job in jobs) / requests,
        others_p75_s=float(np.quantile(beside, 0.75)) if beside else 0.0,
    )


def part(world: World, start_s: float, end_s: float) -> Part:
    """Return how the evaluations fared that were submitted in that time."""
    jobs = [job for job in world.jobs if start_s <= job.submitted_s < end_s]
    requests = sum(job.requests for job in jobs)
    return Part(
        whole_in_time=_whole(jobs),
        high_whole=_whole([job for job in jobs if not job.evaluation.low]),
        low_whole=_whole([job for job in jobs if job.evaluation.low]),
        requests_in_time=1 - sum(job.late for job in jobs) / requests if requests else None,
    )


def backlogs_s(world: World) -> list[float]:
    """Return the work that waited at each hour, in seconds of the whole pool."""
    rating_s = [
        world.batch_s(rater, world.batch) / world.batch for rater in range(len(world.raters))
    ]
    replicas = len(world.pool.replicas)
    return [
        sum(count * each_s for count, each_s in zip(unsent, rating_s, strict=True)) / replicas
        for unsent in world.hours.unsent
    ]


def in_order(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """Return evaluations in the order of their time."""
    return sorted(evaluations, key=lambda evaluation: (evaluation.at_s, evaluation.id))


def _whole(jobs: Sequence[Job]) -> float | None:
    return sum(not job.late for job in jobs) / len(jobs) if jobs else None


def _free_numbers(evaluations: Sequence[Evaluation]) -> tuple[int, int]:
    """Return the first id and the first experiment that nobody has."""
    return (
        max(evaluation.id for evaluation in evaluations) + 1,
        max(evaluation.experiment for evaluation in evaluations) + 1,
    )
