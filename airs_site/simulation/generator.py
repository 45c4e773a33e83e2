"""Workloads of the same description from any seed: evaluations drawn from the parameters.

People submit in sessions of several evaluations, some of one experiment, by hour and weekday and
more in bursts; timers submit at all hours. Which results an experiment shows, what a query set
holds and how results change is not drawn here but hashed from what a row says (`keys`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from airs_site.simulation.workload import DAY_S, Evaluation, Mode, Params, QuerySets, Rater

HOUR_S: Final = 3600.0
FULL_SETS: Final = 12
"""One query set in so many has the largest size there is: those that are used most."""
_EXPERIMENTS_A_RATER: Final = 100_000


def generate(params: Params, seed: int) -> Sequence[Evaluation]:
    """Return the evaluations of all days, warm-up days first, in the order of submission."""
    drawn = [
        evaluation
        # Each rater has its own generator: changing one leaves the others as they were.
        for number, rater in enumerate(params.raters)
        for evaluation in _Source(params, rater, number, seed).evaluations()
    ]
    drawn.sort(key=lambda evaluation: (evaluation.at_s, evaluation.rater, evaluation.experiment))
    return [replace(evaluation, id=number) for number, evaluation in enumerate(drawn)]


class _Source:
    """All that one rater is asked."""

    def __init__(self, params: Params, rater: Rater, number: int, seed: int) -> None:
        self._params = params
        self._rater = rater
        self._chance = np.random.default_rng([seed, number])
        self._experiments = count(number * _EXPERIMENTS_A_RATER + 1)
        self._set_sizes = self._drawn_set_sizes(rater.query_sets)
        self._set_p = _zipf(rater.query_sets.count, rater.query_sets.zipf)
        self._owner_p = _zipf(params.human_owners, params.owner_zipf)

    def evaluations(self) -> Iterator[Evaluation]:
        """Yield them day by day."""
        params, arrivals = self._params, self._rater.arrivals
        for day in range(-params.warm_days, params.days):
            weekday = (params.first_weekday + day) % 7
            hours = self._human_hours(weekday)
            people = arrivals.human_per_day * params.weekday_mult[weekday]
            # A burst comes on top of the day's other hours.
            people *= arrivals.day_mult.get(day, 1.0) * hours.sum() / sum(params.hour_human)
            sessions = self._chance.poisson(people / params.sessions.mean)
            for at_s in self._instants(day, sessions, hours):
                yield from self._session(at_s)
            timed = arrivals.auto_per_day * params.weekday_mult_auto[weekday]
            timers = self._chance.poisson(timed)
            for at_s in self._instants(day, timers, np.asarray(params.hour_auto)):
                owner = f"auto{self._rater.id}{self._chance.integers(arrivals.auto_owners)}"
                yield self._evaluation(at_s, owner, next(self._experiments), automatic=True)

    def _session(self, at_s: float) -> Iterator[Evaluation]:
        sessions = self._params.sessions
        owner = f"u{self._chance.choice(len(self._owner_p), p=self._owner_p)}"
        experiment = next(self._experiments)
        for turn in range(self._chance.geometric(1 / sessions.mean)):
            if turn:
                at_s += self._chance.exponential(sessions.gap_s)
                if self._chance.random() >= sessions.same_experiment:
                    experiment = next(self._experiments)
            if at_s < self._params.days * DAY_S:
                yield self._evaluation(at_s, owner, experiment, automatic=False)

    def _evaluation(
        self, at_s: float, owner: str, experiment: int, *, automatic: bool
    ) -> Evaluation:
        params, rater, chance = self._params, self._rater, self._chance
        mode = self._mode(params.auto_mode if automatic else params.human_mode)
        queries = self._queries(automatic=automatic)
        query_set, set_size = self._set_for(queries)
        high = params.auto_high if automatic else params.human_high
        errors = params.errors
        permanent = chance.lognormal(np.log(errors.median), errors.sigma)
        # Half the variance off the logarithm makes the mean 1.
        cost = chance.lognormal(-(params.cost_sigma**2) / 2, params.cost_sigma)
        return Evaluation(
            id=0,
            at_s=round(float(at_s), 1),
            rater=rater.id,
            owner=owner,
            low=bool(chance.random() >= high),
            deadline_s=rater.deadline_s,
            query_set=query_set,
            set_size=set_size,
            mode=mode,
            offset=int(chance.integers(set_size)) if mode == "window" else 0,
            queries=min(queries, set_size),
            results=int(chance.choice(rater.results, p=rater.results_p)),
            experiment=experiment,
            delta=round(chance.beta(*(params.auto_delta if automatic else params.human_delta)), 4),
            permanent=round(min(permanent, errors.most), 5),
            cost=round(cost, 3),
            automatic=automatic,
        )

    def _mode(self, chances: Mapping[Mode, float]) -> Mode:
        modes = sorted(chances)
        shares = np.array([chances[mode] for mode in modes])
        return modes[self._chance.choice(len(modes), p=shares / shares.sum())]

    def _queries(self, *, automatic: bool) -> int:
        sizes = self._rater.sizes
        median = sizes.auto_median if automatic else sizes.human_median
        drawn = self._chance.lognormal(np.log(median), sizes.sigma)
        return int(min(max(drawn, sizes.least), sizes.most))

    def _set_for(self, queries: int) -> tuple[int, int]:
        """Choose a query set that has so many; the largest if none has."""
        enough = self._set_sizes >= min(queries, self._set_sizes.max())
        chances = self._set_p * enough
        number = int(self._chance.choice(len(chances), p=chances / chances.sum()))
        return number, int(self._set_sizes[number])

    def _drawn_set_sizes(self, sets: QuerySets) -> NDArray[np.int64]:
        drawn = self._chance.lognormal(np.log(sets.size_median), sets.size_sigma, sets.count)
        sizes = np.clip(drawn, 1, self._params.largest_set).astype(np.int64)
        sizes[: max(1, sets.count // FULL_SETS)] = self._params.largest_set
        return sizes

    def _human_hours(self, weekday: int) -> NDArray[np.float64]:
        hours = np.array(self._params.hour_human)
        for burst in self._params.bursts:
            if burst.weekday == weekday:
                hours[burst.hour] *= burst.mult
        return hours

    def _instants(self, day: int, how_many: int, hours: NDArray[np.float64]) -> list[float]:
        hour = self._chance.choice(24, size=how_many, p=hours / hours.sum())
        seconds = self._chance.random(how_many) * HOUR_S
        return sorted((day * DAY_S + hour * HOUR_S + seconds).tolist())


def _zipf(how_many: int, exponent: float) -> NDArray[np.float64]:
    weights = np.arange(1, how_many + 1, dtype=np.float64) ** -exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares
