"""Bad days: what is done to a workload or to the pool, and what is then looked at.

Each is a function of the workload's parameters, so that it may be done to any trace: the busiest
hour is that of the weekday and hour in which people submit most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from airs_site.simulation.engine import Loss, World
from airs_site.simulation.metrics import latency_s
from airs_site.simulation.workload import DAY_S, Evaluation, Params

HOUR_S: Final = 3600.0
FLOODER: Final = "flood"
FLOOD_EVALUATIONS: Final = 300
FLOOD_REQUESTS: Final = 18_000_000
FLOOD_LASTS_S: Final = HOUR_S
LOST_SHARE: Final = 1 / 3
LOST_FOR_S: Final = 3 * HOUR_S
OFF_BY: Final = (0.4, 1.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """What a flood leaves to all other owners."""

    others_whole: float
    others_requests: float
    """Share of theirs in time."""
    others_p75_s: float
    """Latency of theirs on the flooded rater, those that came between the flood and the end of
    its deadline."""


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


def flood(params: Params, evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """One owner submits 300 evaluations within an hour, of 18 million requests nobody had."""
    top = max(params.raters, key=lambda rater: rater.default_replicas)
    results = max(top.results)
    queries = FLOOD_REQUESTS // FLOOD_EVALUATIONS // results
    first_id = max(evaluation.id for evaluation in evaluations) + 1
    first_experiment = max(evaluation.experiment for evaluation in evaluations) + 1
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
    return sorted(
        [*evaluations, *flooding], key=lambda evaluation: (evaluation.at_s, evaluation.id)
    )


def wrong_costs(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """Every evaluation costs far less or far more than its rater's, by turns."""
    return [
        replace(evaluation, cost=evaluation.cost * OFF_BY[number % 2])
        for number, evaluation in enumerate(evaluations)
    ]


def others(world: World) -> Others:
    """Return what a flood left to others."""
    jobs = [job for job in world.jobs if job.evaluation.owner != FLOODER]
    flooded = [job for job in world.jobs if job.evaluation.owner == FLOODER]
    start_s = min(job.submitted_s for job in flooded)
    end_s = max(job.deadline_s for job in flooded)
    beside = [
        latency_s(job)
        for job in jobs
        if job.rater == flooded[0].rater and start_s <= job.submitted_s <= end_s
    ]
    requests = sum(job.requests for job in jobs)
    return Others(
        others_whole=sum(not job.late for job in jobs) / len(jobs),
        others_requests=1 - sum(job.late for job in jobs) / requests,
        others_p75_s=float(np.quantile(beside, 0.75)) if beside else 0.0,
    )
