"""The parameters beside an exported trace: what serves it, and the shape of what was asked.

What a batch takes is measured: busy seconds of a hosted model's replicas over its calls, of others
the seconds of their calls. An external model counts as a pool of its own slots, each a replica.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import log
from statistics import fmean, median, pstdev
from typing import Any, Final

from airs_site.simulation.measures import large
from airs_site.simulation.workload import DAY_S
from fulfillment.models import Trigger
from fulfillment.policy.priority import PriorityClass, priority_class
from fulfillment.request_history import AskedWorkflow
from models_admin.models import ModelConfig, ModelKind, Protocol
from models_admin.utilisation import Use

UNMEASURED_S: Final = 1.0
FIXED_SHARE: Final = 0.25
"""Of what a full batch takes: what any batch takes, as the simulator has it."""
LEAST_SIGMA: Final = 0.01
_WEEK = 7
_HOURS = 24
# What a generator of workloads needs besides, and history does not tell.
_GENERIC: Final[Mapping[str, Any]] = {
    "bursts": [],
    "session": {"mean": 1.0, "gap_s": 60, "same_exp": 0.0},
    "query": {
        "set_max": 1_000_000_000,
        "human_mode": {"private": 1.0},
        "auto_mode": {"private": 1.0},
        "human_diff": [1.0, 9.0],
        "auto_diff": [1.0, 9.0],
    },
    "churn": {"life_s": [30 * DAY_S], "life_p": [1.0], "bumps": []},
    "cost_sigma": 0.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What serves a model."""

    hosted: bool
    slots: int
    """Replicas by default; of an external model, calls that it may hold."""
    least: int
    """Replicas that it keeps."""
    call_is_item: bool
    """Whether each item of a batch is a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What history says of a span."""

    start: datetime
    """Midnight of day 0."""
    days: int
    sample: int
    workflows: Mapping[str, Sequence[AskedWorkflow]]
    """By rater of the trace."""
    models: Mapping[str, str]
    """By rater of the trace."""
    served: Mapping[str, Served]
    """By model."""
    use: Sequence[Use]


def served() -> dict[str, Served]:
    """Return what serves each registered model."""
    return {
        model.pk: Served(
            hosted=model.kind == ModelKind.HOSTED,
            slots=max(
                1,
                model.replicas_default if model.kind == ModelKind.HOSTED else model.max_concurrency,
            ),
            least=model.replicas_min if model.kind == ModelKind.HOSTED else 0,
            call_is_item=model.rater_protocol == Protocol.OPENAI,
        )
        for model in ModelConfig.objects.all()
    }


def described(measured: Measured, *, batch_s: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return `params.json` of an exported trace, and notes on what had to be assumed.

    `batch_s` is what a full batch takes where nothing was measured.
    """
    notes: list[str] = []
    every = [workflow for of in measured.workflows.values() for workflow in of]
    size = Counter(workflow.batch_size for workflow in every).most_common(1)[0][0]
    replicas = {name: _replicas(measured, name, size, notes) for name in measured.workflows}
    full_s = _batch_seconds(measured, size, batch_s or UNMEASURED_S, notes)
    first = sorted(large(replicas), key=lambda name: (-replicas[name], name))[0]
    people = [w for w in every if w.trigger == Trigger.HUMAN]
    timers = [w for w in every if w.trigger != Trigger.HUMAN]
    failing = [w.failed / w.computed for w in every if w.failed]
    return {
        "name": f"history of {measured.days} days from {measured.start:%Y-%m-%d}",
        "notes": notes,
        "sample": measured.sample,
        "seed": 1,
        "days": measured.days,
        "warm_days": 0,
        "first_weekday": measured.start.weekday(),
        "weekday_mult": _weekdays(people, measured),
        "weekday_mult_auto": _weekdays(timers, measured),
        "hour_human": _hours(people),
        "hour_auto": _hours(timers),
        "owners": {"human": max(1, len({w.owner for w in people})), "zipf": 0.8},
        "priority": {"human_high": _high(people), "auto_high": _high(timers)},
        "permanent_error": {
            "median": round(median(failing), 5) if failing else 1e-6,
            "sigma": 0.8,
            "max": 0.2,
        },
        **_GENERIC,
        "batch": size,
        "batch_service_s_full_scale": full_s[first],
        "pool_replicas": sum(replicas.values()),
        "raters": [
            _rater(measured, name, replicas[name], full_s[name] / full_s[first])
            for name in sorted(replicas, key=lambda name: (-replicas[name], name))
        ],
    }, notes


def _replicas(measured: Measured, name: str, size: int, notes: list[str]) -> int:
    served = measured.served.get(measured.models[name])
    if served is None:
        notes.append(f"{name}: its model is no longer registered; taken as one replica")
        return 1
    if served.hosted:
        return served.slots
    count = max(1, served.slots // size) if served.call_is_item else served.slots
    notes.append(f"{name}: an external model, taken as {count} replicas that others could use, too")
    return count


def _batch_seconds(
    measured: Measured, size: int, otherwise_s: float, notes: list[str]
) -> dict[str, float]:
    """Return what a full batch of each rater takes on one replica."""
    busy_s: dict[str, float] = defaultdict(float)
    for of_hour in measured.use:
        busy_s[of_hour.model_id] += of_hour.busy_s
    found = {}
    for name, workflows in measured.workflows.items():
        calls = sum(w.model_calls for w in workflows)
        # Busy seconds are the model's, with what other raters of it computed.
        spent_s = busy_s[measured.models[name]] or sum(w.call_s for w in workflows)
        if not calls or not spent_s:
            found[name] = otherwise_s
            notes.append(f"{name}: nobody knows what a batch takes; taken as {otherwise_s:g} s")
            continue
        served = measured.served.get(measured.models[name])
        if served is not None and served.call_is_item:
            found[name] = spent_s / calls
            continue
        fill = min(1.0, sum(w.computed for w in workflows) / calls / size)
        found[name] = spent_s / calls / (FIXED_SHARE + (1 - FIXED_SHARE) * fill)
    return found


def _rater(measured: Measured, name: str, replicas: int, cost_mult: float) -> dict[str, Any]:
    workflows = measured.workflows[name]
    people = [w for w in workflows if w.trigger == Trigger.HUMAN]
    timers = [w for w in workflows if w.trigger != Trigger.HUMAN]
    sizes = [w.requests for w in workflows]
    served = measured.served.get(measured.models[name])
    return {
        "id": name,
        "default_replicas": replicas,
        "min_replicas": min(replicas, served.least) if served is not None else 0,
        "deadline_s": max(1.0, round(median(w.allowed_s for w in workflows))),
        "cost_mult": round(cost_mult, 4),
        "size": {
            "human_median": median(w.requests for w in people or workflows),
            "auto_median": median(w.requests for w in timers or workflows),
            "sigma": round(max(LEAST_SIGMA, pstdev(log(size) for size in sizes)), 3),
            "min": min(sizes),
            "max": max(sizes),
        },
        "results": [1],
        "results_p": [1.0],
        "arrivals": {
            "human_per_day": round(len(people) / measured.days, 3),
            "auto_per_day": round(len(timers) / measured.days, 3),
            "auto_owners": max(1, len({w.owner for w in timers})),
        },
        "qsets": {"n": 1, "size_median": max(sizes), "size_sigma": 0.0, "zipf": 1.0},
    }


def _weekdays(workflows: Sequence[AskedWorkflow], measured: Measured) -> list[float]:
    """Return how many times the mean of all days each weekday had; 1 where none was seen."""
    days = [measured.start + timedelta(days=day) for day in range(measured.days)]
    seen = Counter(day.weekday() for day in days)
    counts = Counter(workflow.created_at.weekday() for workflow in workflows)
    mean = fmean([counts[day.weekday()] / seen[day.weekday()] for day in days])
    return [
        round(counts[day] / seen[day] / mean, 3) if seen[day] and mean else 1.0
        for day in range(_WEEK)
    ]


def _hours(workflows: Sequence[AskedWorkflow]) -> list[float]:
    counts = Counter(workflow.created_at.hour for workflow in workflows)
    mean = len(workflows) / _HOURS
    return [round(counts[hour] / mean, 3) if mean else 1.0 for hour in range(_HOURS)]


def _high(workflows: Sequence[AskedWorkflow]) -> float:
    """Return the share of high priority, middle included."""
    classes = [priority_class(w.priority, best_effort=w.best_effort) for w in workflows]
    high = sum(cls in {PriorityClass.HIGH, PriorityClass.MIDDLE} for cls in classes)
    return round(high / len(classes), 4) if classes else 1.0
