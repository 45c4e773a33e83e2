"""Workloads small enough to be worked out by hand.

A full batch of 12 takes 12 s, a batch of n takes 3 + 0.75 n. Rater `big` has three replicas, `tiny`
one; evaluations are of one private query set each, so that only those of one experiment share
ratings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airs_site.simulation.engine import Options, Policy, World, simulate
from airs_site.simulation.policies.registry import make
from airs_site.simulation.trace import Workload, expand
from airs_site.simulation.workload import Evaluation, Params, read_params

SHIPPED = Path(__file__).resolve().parents[3] / "shared" / "trace"


def document(replicas: Sequence[int] = (3, 1), **changed: Any) -> dict[str, Any]:
    """Return a `params.json` of raters with so many replicas each."""
    names = ("big", "tiny", "third")
    return {
        "name": "small",
        "seed": 1,
        "days": 2,
        "warm_days": 1,
        "first_weekday": 5,
        "weekday_mult": [1, 1, 1, 1, 1, 0.5, 0.5],
        "weekday_mult_auto": [1, 1, 1, 1, 1, 1, 1],
        "hour_human": [1] * 24,
        "hour_auto": [1] * 24,
        "bursts": [{"weekday": 6, "hour": 14, "mult": 3}],
        "session": {"mean": 2.0, "gap_s": 300, "same_exp": 0.35},
        "owners": {"human": 5, "zipf": 0.8},
        "priority": {"human_high": 0.9, "auto_high": 0.2},
        "query": {
            "set_max": 5000,
            "human_mode": {"prefix": 0.7, "window": 0.2, "private": 0.1},
            "auto_mode": {"prefix": 0.9, "window": 0.05, "private": 0.05},
            "human_diff": [1.3, 4.9],
            "auto_diff": [1.0, 9.0],
        },
        "churn": {
            "life_s": [43200, 259200],
            "life_p": [0.5, 0.5],
            "bumps": [{"t": 100000, "frac": 0.5}],
        },
        "permanent_error": {"median": 0.01, "sigma": 0.8, "max": 0.2},
        "cost_sigma": 0.3,
        "batch": 12,
        "batch_service_s_full_scale": 12.0,
        "pool_replicas": sum(replicas),
        "raters": [
            {
                "id": name,
                "default_replicas": count,
                "min_replicas": 1,
                "deadline_s": 7200,
                "cost_mult": 1.0,
                "size": {
                    "human_median": 40,
                    "auto_median": 40,
                    "sigma": 1.0,
                    "min": 5,
                    "max": 2000,
                },
                "results": [5, 10],
                "results_p": [0.5, 0.5],
                "arrivals": {"human_per_day": 60, "auto_per_day": 20, "auto_owners": 2},
                "qsets": {"n": 6, "size_median": 400, "size_sigma": 1.0, "zipf": 1.0},
            }
            for name, count in zip(names, replicas, strict=False)
        ],
        **changed,
    }


def params(replicas: Sequence[int] = (3, 1), **changed: Any) -> Params:
    return read_params(document(replicas, **changed))


def evaluation(number: int, requests: int, **changed: Any) -> Evaluation:
    fields: dict[str, Any] = {
        "id": number,
        "at_s": 0.0,
        "rater": "tiny",
        "owner": "ann",
        "low": False,
        "deadline_s": 7200.0,
        "query_set": 0,
        "set_size": 5000,
        "mode": "private",
        "offset": 0,
        "queries": requests,
        "results": 1,
        "experiment": number,
        "delta": 0.0,
        "permanent": 0.0,
        "cost": 1.0,
        "automatic": False,
    }
    return Evaluation(**fields | changed)


def workload(*evaluations: Evaluation, replicas: Sequence[int] = (3, 1)) -> Workload:
    return expand(params(replicas), evaluations, scale=1)


def run(
    policy: str | Policy, *evaluations: Evaluation, replicas: Sequence[int] = (3, 1), **options: Any
) -> World:
    """Run a policy over evaluations given in the order of their time."""
    made = make(policy) if isinstance(policy, str) else policy
    return simulate(workload(*evaluations, replicas=replicas), made, Options(**options))


def ended_s(world: World) -> list[float]:
    """Return when the last rating of each job came."""
    return [job.last_s for job in world.jobs]
