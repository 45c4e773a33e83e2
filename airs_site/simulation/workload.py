"""What comes: evaluations, the raters they ask, and the parameters both were drawn from.

The shapes are those of a trace's rows and of its `params.json`.
Times are seconds, those of rows after the start of day 0; earlier rows only fill the archive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from airs_site.simulation.errors import BadWorkload

DAY_S = 86400.0

Mode = Literal["prefix", "window", "private", "listed"]
"""Where an evaluation's queries come from: the first of a query set, a stretch of it, a set of its
own; or its ratings are listed by number, as in a trace of a system's own history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One row of a trace: a workflow as it is submitted."""

    id: int
    at_s: float
    rater: str
    owner: str
    low: bool
    """Low priority; all others are high."""
    deadline_s: float
    """After `at_s`."""
    query_set: int
    set_size: int
    mode: Mode
    offset: int
    queries: int
    results: int
    """A query."""
    experiment: int
    delta: float
    """Share of results that only this experiment shows."""
    permanent: float
    """Share of computed ratings that fail for good."""
    cost: float
    """True cost of a batch over the rater's; the scheduler does not know it."""
    automatic: bool
    ids: Sequence[tuple[int, int]] = ()
    """Of the ratings where they are listed: the first number of a run and how many it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Queries of an evaluation: log-normal, clipped."""

    human_median: float
    auto_median: float
    sigma: float
    least: int
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuerySets:
    """Shared query sets of a rater: sizes log-normal, choice by Zipf's law."""

    count: int
    size_median: float
    size_sigma: float
    zipf: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Evaluations a day of one rater."""

    human_per_day: float
    auto_per_day: float
    auto_owners: int
    day_mult: Mapping[int, float]
    """For people's on some days, by the day's number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rater:
    """A rater, its replicas, and what it is asked for."""

    id: str
    default_replicas: int
    min_replicas: int
    deadline_s: float
    cost_mult: float
    sizes: Sizes
    results: Sequence[int]
    results_p: Sequence[float]
    arrivals: Arrivals
    query_sets: QuerySets


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """An hour of a weekday in which people submit more."""

    weekday: int
    hour: int
    mult: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bump:
    """An index roll-out: a share of all result slots shows something new from then on."""

    at_s: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Churn:
    """How long a result slot shows the same result: `lives_s`, with probabilities."""

    lives_s: Sequence[float]
    life_p: Sequence[float]
    bumps: Sequence[Bump]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sessions:
    """People submit several evaluations in a row, some of the same experiment."""

    mean: float
    gap_s: float
    same_experiment: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Share of computed ratings that fail for good: log-normal over evaluations."""

    median: float
    sigma: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """Everything a workload was drawn from, and what serves it."""

    name: str
    seed: int
    days: int
    warm_days: int
    first_weekday: int
    """Of day 0; Monday is 0."""
    weekday_mult: Sequence[float]
    weekday_mult_auto: Sequence[float]
    hour_human: Sequence[float]
    hour_auto: Sequence[float]
    bursts: Sequence[Burst]
    sessions: Sessions
    human_owners: int
    owner_zipf: float
    human_high: float
    auto_high: float
    largest_set: int
    human_mode: Mapping[Mode, float]
    auto_mode: Mapping[Mode, float]
    human_delta: tuple[float, float]
    """Parameters of a beta distribution."""
    auto_delta: tuple[float, float]
    churn: Churn
    errors: Errors
    cost_sigma: float
    batch: int
    batch_service_s: float
    """Of a full batch at scale 1."""
    replicas: int
    raters: Sequence[Rater]
    sample: int | None = None
    """One in so many requests of evaluations whose ratings are listed is in the trace; None where
    none are."""


def read_params(document: Mapping[str, Any]) -> Params:
    """Return the parameters of a `params.json`; raises BadWorkload naming what is wrong."""
    try:
        return _params(document)
    except KeyError as error:
        raise BadWorkload(f"the parameters lack {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise BadWorkload(f"the parameters do not read: {error}") from error


def read_evaluation(row: Mapping[str, Any], raters: Mapping[str, int]) -> Evaluation:
    """Return a row of a trace; raises BadWorkload naming the field that is wrong."""
    try:
        evaluation = Evaluation(
            id=int(row["id"]),
            at_s=float(row["t"]),
            rater=str(row["rater"]),
            owner=str(row["owner"]),
            low=bool(int(row["prio"])),
            deadline_s=float(row["deadline"]),
            query_set=int(row["qset"]),
            set_size=int(row["qset_size"]),
            mode=row["mode"],
            offset=int(row["off"]),
            queries=int(row["nq"]),
            results=int(row["R"]),
            experiment=int(row["exp"]),
            delta=float(row["delta"]),
            permanent=float(row["perm"]),
            cost=float(row["cost"]),
            automatic=bool(int(row["auto"])),
            ids=tuple((int(first), int(count)) for first, count in row.get("ids", ())),
        )
    except KeyError as error:
        raise BadWorkload(f"lacks the field {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise BadWorkload(f"does not read: {error}") from error
    if evaluation.rater not in raters:
        raise BadWorkload(f"asks rater {evaluation.rater!r}, which the parameters do not have")
    if evaluation.mode not in get_args(Mode):
        raise BadWorkload(f"has the mode {evaluation.mode!r}; there are {get_args(Mode)}")
    if evaluation.queries < 1 or not 1 <= evaluation.results <= 64 or evaluation.set_size < 1:
        raise BadWorkload("needs nq and qset_size of at least 1, and R of 1 to 64")
    if (evaluation.mode == "listed") != bool(evaluation.ids) or any(
        first < 0 or count < 1 for first, count in evaluation.ids
    ):
        raise BadWorkload('needs ids in the mode "listed" and in no other, each [first, count]')
    if evaluation.deadline_s <= 0 or evaluation.cost <= 0:
        raise BadWorkload("needs a positive deadline and cost")
    return evaluation


def row_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return the row of a trace that reads as this evaluation."""
    return {
        "id": evaluation.id,
        "t": evaluation.at_s,
        "rater": evaluation.rater,
        "owner": evaluation.owner,
        "prio": int(evaluation.low),
        "deadline": evaluation.deadline_s,
        "qset": evaluation.query_set,
        "qset_size": evaluation.set_size,
        "mode": evaluation.mode,
        "off": evaluation.offset,
        "nq": evaluation.queries,
        "R": evaluation.results,
        "exp": evaluation.experiment,
        "delta": evaluation.delta,
        "perm": evaluation.permanent,
        "cost": evaluation.cost,
        "auto": int(evaluation.automatic),
    } | ({"ids": [list(run) for run in evaluation.ids]} if evaluation.ids else {})


def _params(doc: Mapping[str, Any]) -> Params:
    query, churn, errors = doc["query"], doc["churn"], doc["permanent_error"]
    return Params(
        name=str(doc["name"]),
        seed=int(doc["seed"]),
        days=int(doc["days"]),
        warm_days=int(doc["warm_days"]),
        first_weekday=int(doc["first_weekday"]),
        weekday_mult=_numbers(doc["weekday_mult"], 7),
        weekday_mult_auto=_numbers(doc["weekday_mult_auto"], 7),
        hour_human=_numbers(doc["hour_human"], 24),
        hour_auto=_numbers(doc["hour_auto"], 24),
        bursts=tuple(
            Burst(weekday=int(b["weekday"]), hour=int(b["hour"]), mult=float(b["mult"]))
            for b in doc["bursts"]
        ),
        sessions=Sessions(
            mean=float(doc["session"]["mean"]),
            gap_s=float(doc["session"]["gap_s"]),
            same_experiment=float(doc["session"]["same_exp"]),
        ),
        human_owners=int(doc["owners"]["human"]),
        owner_zipf=float(doc["owners"]["zipf"]),
        human_high=float(doc["priority"]["human_high"]),
        auto_high=float(doc["priority"]["auto_high"]),
        largest_set=int(query["set_max"]),
        human_mode={mode: float(p) for mode, p in query["human_mode"].items()},
        auto_mode={mode: float(p) for mode, p in query["auto_mode"].items()},
        human_delta=_pair(query["human_diff"]),
        auto_delta=_pair(query["auto_diff"]),
        churn=Churn(
            lives_s=_numbers(churn["life_s"]),
            life_p=_numbers(churn["life_p"], len(churn["life_s"])),
            bumps=tuple(Bump(at_s=float(b["t"]), share=float(b["frac"])) for b in churn["bumps"]),
        ),
        errors=Errors(
            median=float(errors["median"]), sigma=float(errors["sigma"]), most=float(errors["max"])
        ),
        cost_sigma=float(doc["cost_sigma"]),
        batch=int(doc["batch"]),
        batch_service_s=float(doc["batch_service_s_full_scale"]),
        replicas=int(doc["pool_replicas"]),
        raters=tuple(_rater(rater) for rater in doc["raters"]),
        sample=int(doc["sample"]) if "sample" in doc else None,
    )


def _rater(doc: Mapping[str, Any]) -> Rater:
    size, arrivals, sets = doc["size"], doc["arrivals"], doc["qsets"]
    return Rater(
        id=str(doc["id"]),
        default_replicas=int(doc["default_replicas"]),
        min_replicas=int(doc["min_replicas"]),
        deadline_s=float(doc["deadline_s"]),
        cost_mult=float(doc["cost_mult"]),
        sizes=Sizes(
            human_median=float(size["human_median"]),
            auto_median=float(size["auto_median"]),
            sigma=float(size["sigma"]),
            least=int(size["min"]),
            most=int(size["max"]),
        ),
        results=tuple(int(n) for n in doc["results"]),
        results_p=_numbers(doc["results_p"], len(doc["results"])),
        arrivals=Arrivals(
            human_per_day=float(arrivals["human_per_day"]),
            auto_per_day=float(arrivals["auto_per_day"]),
            auto_owners=int(arrivals["auto_owners"]),
            day_mult={int(day): float(m) for day, m in arrivals.get("day_mult", {}).items()},
        ),
        query_sets=QuerySets(
            count=int(sets["n"]),
            size_median=float(sets["size_median"]),
            size_sigma=float(sets["size_sigma"]),
            zipf=float(sets["zipf"]),
        ),
    )


def _numbers(values: Sequence[Any], count: int | None = None) -> tuple[float, ...]:
    if count is not None and len(values) != count:
        raise ValueError(f"{len(values)} numbers where {count} belong")
    return tuple(float(value) for value in values)


def _pair(values: Sequence[Any]) -> tuple[float, float]:
    first, second = _numbers(values, 2)
    return first, second
