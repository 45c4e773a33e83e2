"""Which ratings an evaluation asks for: one 64-bit key a request, a pure function of its row.

Two requests are equal where their keys are. The hash is splitmix64, chained over the parts; it is
that of the published trace, so that any program derives the same keys from a row.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from airs_site.simulation.workload import Churn, Evaluation

Keys = NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_WORD: Final = (1 << 64) - 1

# What a hash is for: its first part. Those of bumps follow on _BUMP.
_LIFE, _PHASE, _BUMP, _KEY, _ARM, _PERMANENT, _LISTED = 1, 2, 3, 7, 99, 1009, 1013
_PRIVATE_SETS: Final = 10**6
_ARMS: Final = 1 << 40
_LONG_AGO_S: Final = 1e8
_BUMP_STEP: Final = np.uint64(1000003)
_RANKS: Final = 64


def hashed(*parts: int | Keys) -> Keys:
    """Return the hash of the parts, elementwise where they are arrays."""
    state: Keys = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = part if isinstance(part, np.ndarray) else np.uint64(part & _WORD)
        state = _mix(state ^ word)
    return state


def uniform(words: Keys) -> NDArray[np.float64]:
    """Return numbers in [0, 1) from hashes."""
    return (words >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def request_keys(evaluation: Evaluation, *, rater_no: int, churn: Churn, scale: int) -> Keys:
    """Return the key of each request in the order of submission: query by query."""
    queries = np.arange(max(1, evaluation.queries // scale), dtype=np.uint64)
    if evaluation.mode == "private":
        query_set = _PRIVATE_SETS + evaluation.experiment
    else:
        query_set = evaluation.query_set
        set_size = np.uint64(max(1, evaluation.set_size // scale))
        queries = (queries + np.uint64(evaluation.offset // scale)) % set_size
    ranks = np.arange(evaluation.results, dtype=np.uint64)
    places = (queries[:, None] * np.uint64(_RANKS) + ranks[None, :]).ravel()
    slots = hashed(rater_no, query_set, places)
    own = uniform(hashed(_ARM, evaluation.experiment, slots)) < evaluation.delta
    shown = np.where(
        own, np.uint64(evaluation.experiment + _ARMS), _versions(slots, evaluation.at_s, churn)
    )
    return hashed(_KEY, slots, shown)


def listed_keys(evaluation: Evaluation, *, one_in: int) -> Keys:
    """Return the keys of ratings that are listed: one in so many of them, but the first of all."""
    runs = [np.arange(first, first + count, dtype=np.uint64) for first, count in evaluation.ids]
    keys = hashed(_LISTED, np.concatenate(runs))
    chosen = np.flatnonzero(keys % np.uint64(one_in) == 0)
    found: Keys = keys[chosen] if len(chosen) else keys[:1]
    return found


def fails_for_good(ids: NDArray[np.int32], evaluation: Evaluation) -> NDArray[np.bool_]:
    """Say which of the ratings fail for good if this evaluation computes them."""
    return uniform(hashed(_PERMANENT, evaluation.id, ids.astype(np.uint64))) < evaluation.permanent


def _versions(slots: Keys, at_s: float, churn: Churn) -> Keys:
    """Return the number of the result that each slot shows at that time."""
    luck = uniform(hashed(_LIFE, slots))
    bounds = np.cumsum([0.0, *churn.life_p])
    # A sum of probabilities that rounds below 1 leaves the last life to the rest.
    life_no = np.minimum(np.searchsorted(bounds, luck, side="right") - 1, len(churn.lives_s) - 1)
    lives = np.asarray(churn.lives_s)[life_no]
    versions = np.floor((at_s + _LONG_AGO_S + uniform(hashed(_PHASE, slots)) * lives) / lives)
    shown: NDArray[np.uint64] = versions.astype(np.uint64)
    for number, bump in enumerate(churn.bumps):
        if at_s >= bump.at_s:
            changed = uniform(hashed(_BUMP + number, slots)) < bump.share
            shown = shown + _BUMP_STEP * changed.astype(np.uint64)
    return shown


def _mix(words: Keys) -> Keys:
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
