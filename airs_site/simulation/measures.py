"""What the figures of evaluations mean, however they were run: simulated, or served.

Shares of an evaluation are of its requests, hits included. *Capacity failure* is what was neither
computed nor started by the deadline; *failure* adds what failed for good. An evaluation without
capacity failure is *whole in time*. What is late counts with a latency of its deadline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Names = NDArray[np.object_]

FAILURE_QUANTILES: Final = {"p50": 0.5, "p80": 0.8, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LATENCY_QUANTILES: Final = {"p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
SHORTEST_S: Final = 600.0
"""What an evaluation alone takes, at least, when its slowdown is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Evaluations that have ended: columns of one length, at least 1."""

    rater: Names
    priority: Names
    """Name of the class."""
    owner: Names
    requests: Numbers
    hits: Numbers
    """Requests answered without a call of their own, at submit or later."""
    late: Numbers
    """Requests that are capacity failure."""
    failed: Numbers
    """For good."""
    latency_s: Numbers
    """Until the last rating came; of a late one, until its deadline."""
    alone_s: Numbers
    """What it takes alone on what its rater has by default; NaN where nothing was computed."""


def hit_rate(ended: Ended) -> float:
    """Return the share of requests that cost no call of their own."""
    return float(ended.hits.sum() / ended.requests.sum())


def failure(ended: Ended) -> dict[str, float]:
    """Return quantiles over evaluations of the share that has no rating."""
    return quantiles((ended.late + ended.failed) / ended.requests, FAILURE_QUANTILES)


def capacity_failure(ended: Ended) -> dict[str, float]:
    """Return quantiles over evaluations of the share that came too late."""
    return quantiles(ended.late / ended.requests, FAILURE_QUANTILES)


def whole(ended: Ended) -> NDArray[np.bool_]:
    """Say which evaluations are without capacity failure."""
    found: NDArray[np.bool_] = ended.late == 0
    return found


def share(of: NDArray[np.bool_]) -> float | None:
    """Return the share of those that are so; None where there are none."""
    return float(of.mean()) if len(of) else None


def requests_in_time(ended: Ended) -> float:
    """Return the share of requests that are no capacity failure."""
    return float(1 - ended.late.sum() / ended.requests.sum())


def latencies_s(ended: Ended) -> dict[str, dict[str, dict[str, float]]]:
    """Return quantiles of the latency by rater and class, and of "all" classes together."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    raters, rater_no = np.unique(ended.rater, return_inverse=True)
    classes, class_no = np.unique(ended.priority, return_inverse=True)
    for number, rater in enumerate(raters):
        found[rater] = {"all": quantiles(ended.latency_s[rater_no == number], LATENCY_QUANTILES)}
        for place, priority in enumerate(classes):
            chosen = ended.latency_s[(rater_no == number) & (class_no == place)]
            if len(chosen):
                found[rater][priority] = quantiles(chosen, LATENCY_QUANTILES)
    return found


def jain(ended: Ended) -> float:
    """Return Jain's index of the slowdown over owners: 1 where all are slowed down alike.

    An evaluation's slowdown is its latency over what it would take alone, but over SHORTEST_S at
    least: a wait of minutes is no worse for seconds of work. An owner's is the mean over its
    evaluations that had something to compute.
    """
    computed = ~np.isnan(ended.alone_s)
    if not computed.any():
        return 1.0
    alone_s = np.maximum(ended.alone_s[computed], SHORTEST_S)
    slowdown = np.maximum(1.0, ended.latency_s[computed] / alone_s)
    _, owner_no = np.unique(ended.owner[computed], return_inverse=True)
    means = np.bincount(owner_no, weights=slowdown) / np.bincount(owner_no)
    return float(means.sum() ** 2 / (len(means) * (means**2).sum()))


def low_to_high(ended: Ended) -> float | None:
    """Return how many times longer low priority takes at the median; None without either."""
    low = ended.latency_s[ended.priority == "low"]
    high = ended.latency_s[ended.priority == "high"]
    if not len(low) or not len(high) or not np.median(high):
        return None
    return float(np.median(low) / np.median(high))


def quantiles(values: Numbers, at: Mapping[str, float]) -> dict[str, float]:
    """Return quantiles by name, interpolated between neighbours."""
    return {name: float(np.quantile(values, share)) for name, share in at.items()}


def large(replicas: Mapping[str, float]) -> frozenset[str]:
    """Return the two raters with most replicas by default; all others are small."""
    return frozenset(sorted(replicas, key=lambda rater: -replicas[rater])[:2])
