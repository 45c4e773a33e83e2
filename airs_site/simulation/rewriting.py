"""The same evaluations asking for other ratings: with another share of hits, or with repeats.

What changes is which ratings requests ask for, not how many there are, of whom, or when. All
chance is drawn from a seed of its own.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from airs_site.simulation.trace import Workload

_SEED = 20251018


def asked_before(workload: Workload) -> NDArray[np.bool_]:
    """Say of each request whether an earlier evaluation asked for its rating, or it was stored.

    With an archive that has all that was ever asked for, those are the hits.
    """
    evaluation_of = _evaluation_of(workload)
    found, first = np.unique(workload.ids, return_index=True)
    first_by = np.zeros(workload.distinct, dtype=np.int64)
    first_by[found] = evaluation_of[first]
    stored = np.zeros(workload.distinct, dtype=bool)
    stored[workload.stored] = True
    return (first_by[workload.ids] < evaluation_of) | stored[workload.ids]


def measured(workload: Workload, start_s: float = 0.0, end_s: float = np.inf) -> NDArray[np.bool_]:
    """Say of each request whether its evaluation is submitted in that time."""
    at_s = np.array([evaluation.at_s for evaluation in workload.evaluations])
    return ((at_s >= start_s) & (at_s < end_s))[_evaluation_of(workload)]


def with_hits(
    workload: Workload, share: float, *, start_s: float = 0.0, end_s: float = np.inf
) -> Workload:
    """Return the workload with that share of hits among what is submitted in that time.

    Fewer: some hits ask for ratings nobody else asks for. More: some ratings were always stored.
    """
    chance = np.random.default_rng(_SEED)
    before = asked_before(workload)
    within = measured(workload, start_s, end_s)
    had = float(before[within].mean()) if within.any() else 0.0
    if share <= had:
        gone = within & before & (chance.random(len(before)) < 1 - share / max(had, 1e-9))
        return _asking_anew(workload, gone)
    first = within & ~before
    chosen = first & (chance.random(len(before)) < (share - had) / (1 - had))
    return replace(workload, stored=np.union1d(workload.stored, workload.ids[chosen]))


def with_repeats(workload: Workload, share: float) -> Workload:
    """Return the workload where that share of requests repeats another one of its evaluation."""
    chance = np.random.default_rng(_SEED)
    counts = np.diff(workload.starts)
    starts = np.repeat(workload.starts[:-1], counts)
    other = starts + (chance.random(len(starts)) * np.repeat(counts, counts)).astype(np.int64)
    repeats = chance.random(len(starts)) < share
    return replace(workload, ids=np.where(repeats, workload.ids[other], workload.ids))


def _asking_anew(workload: Workload, chosen: NDArray[np.bool_]) -> Workload:
    ids = workload.ids.copy()
    more = int(chosen.sum())
    ids[chosen] = np.arange(workload.distinct, workload.distinct + more, dtype=np.int32)
    return replace(workload, ids=ids, distinct=workload.distinct + more)


def _evaluation_of(workload: Workload) -> NDArray[np.int64]:
    counts = np.diff(workload.starts)
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)
