"""Figures of a running system, made of the values that its history gives.

Figures of evaluations are those of `simulation.measures`. What history cannot tell is None, and a
note says why; nothing is guessed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import ceil, nan
from typing import Any, Final

import numpy as np

from airs_site.simulation import measures
from airs_site.simulation.measures import Ended
from fulfillment.policy.priority import PriorityClass, priority_class
from fulfillment.service_history import EndedWorkflow, RaterWork
from models_admin.utilisation import Slots, Use

_BELOW_MIDDLE: Final = ("low", "best_effort")
_OF_EVALUATIONS: Final = (
    *("hit_rate", "funnel", "peak_to_mean", "failure", "capacity_failure", "whole_in_time"),
    *("requests_in_time", "latency_s", "low_whole", "small_raters_whole", "low_to_high"),
    *("amplification", "jain", "forecast_kept", "priorities"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What is known of a span."""

    until: datetime
    workflows: Sequence[EndedWorkflow]
    """That ended, each with at least one request."""
    work: Sequence[RaterWork]
    calls_by_hour: Mapping[datetime, int]
    models: Mapping[str, str]
    """By rater."""
    use: Sequence[Use]
    slots: Mapping[str, Slots]
    """By model."""
    forecast_kept: float | None = None


@dataclass(kw_only=True, slots=True)
class ServiceFigures:
    """Figures by name, as in a simulation's document, and why some of them are None."""

    figures: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def figures_of(history: History) -> ServiceFigures:
    """Return the figures of a span."""
    found = ServiceFigures()
    found.figures["duty"] = _duty(history, found.notes)
    if not history.workflows:
        found.figures |= dict.fromkeys(_OF_EVALUATIONS)
        found.notes |= dict.fromkeys(_OF_EVALUATIONS, "no workflow ended")
        return found
    found.figures |= _of_evaluations(history)
    for name, reason in {
        "low_whole": "no workflow of a class below middle ended",
        "small_raters_whole": "no workflow ended of a rater beside the two with most replicas",
        "low_to_high": "no workflow of low, or of high priority ended",
        "amplification": "nothing was computed",
        "jain": "nothing was computed, or no sample tells what a request takes",
        "forecast_kept": "of no workflow that ended it was said that all of it is in time",
    }.items():
        if found.figures[name] is None:
            found.notes[name] = reason
    return found


def duty_by_model(use: Sequence[Use]) -> dict[str, float]:
    """Return the duty cycle of each hosted model whose replicas lived."""
    lived: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    for of_hour in use:
        lived[of_hour.model_id] += of_hour.replica_s
        busy[of_hour.model_id] += of_hour.busy_s
    return {model: busy[model] / lived[model] for model in sorted(lived) if lived[model]}


def largest_raters(history: History) -> list[str]:
    """Return the two raters, of those whose workflows ended, with most slots by default."""
    raters = {workflow.rater_id for workflow in history.workflows}
    slots = {rater: history.slots.get(history.models[rater]) for rater in sorted(raters)}
    counts = {rater: of.count if of else 0 for rater, of in slots.items()}
    return sorted(measures.large(counts), key=lambda rater: (-counts[rater], rater))


def class_of(workflow: EndedWorkflow) -> str:
    """Return the name of a workflow's class."""
    return priority_class(workflow.priority, best_effort=workflow.best_effort).name.lower()


def _duty(history: History, notes: dict[str, str]) -> dict[str, float | None]:
    """Return the share of their time in which replicas computed, in all and in the busiest hour."""
    sampled = {of_hour.model_id for of_hour in history.use}
    worked = {history.models[of_rater.rater_id] for of_rater in history.work if of_rater.worked}
    if unknown := sorted(worked - sampled):
        notes["duty"] = (
            f"without {', '.join(unknown)}: servers of others do not tell how busy they are, and "
            "of our own nothing is sampled in the span"
        )
    lived: dict[datetime, float] = defaultdict(float)
    busy: dict[datetime, float] = defaultdict(float)
    for of_hour in history.use:
        lived[of_hour.hour_at] += of_hour.replica_s
        busy[of_hour.hour_at] += of_hour.busy_s
    duties = [busy[hour_at] / lived[hour_at] for hour_at in lived if lived[hour_at]]
    if not duties:
        notes.setdefault("duty", "no replica of a hosted model lived")
        return {"mean": None, "peak_hour": None}
    return {"mean": sum(busy.values()) / sum(lived.values()), "peak_hour": max(duties)}


def _of_evaluations(history: History) -> dict[str, Any]:
    ended = _ended(history)
    whole = measures.whole(ended)
    small = ~np.isin(ended.rater, largest_raters(history))
    return {
        "hit_rate": measures.hit_rate(ended),
        "funnel": _funnel(history.workflows),
        "peak_to_mean": _peaks(history),
        "failure": measures.failure(ended),
        "capacity_failure": measures.capacity_failure(ended),
        "whole_in_time": measures.share(whole),
        "requests_in_time": measures.requests_in_time(ended),
        "latency_s": measures.latencies_s(ended),
        "low_whole": measures.share(whole[np.isin(ended.priority, _BELOW_MIDDLE)]),
        "small_raters_whole": measures.share(whole[small]),
        "low_to_high": measures.low_to_high(ended),
        "amplification": _amplification(history.workflows),
        "jain": None if np.isnan(ended.alone_s).all() else measures.jain(ended),
        "forecast_kept": history.forecast_kept,
        "priorities": _priorities(history.workflows, ended),
    }


def _ended(history: History) -> Ended:
    workflows = history.workflows
    alone_s = _AloneTimes(history)
    return Ended(
        rater=np.array([w.rater_id for w in workflows], dtype=np.object_),
        priority=np.array([class_of(w) for w in workflows], dtype=np.object_),
        owner=np.array([w.owner for w in workflows], dtype=np.object_),
        requests=np.array([w.requests for w in workflows], dtype=np.float64),
        hits=np.array([w.from_archive + w.coalesced for w in workflows], dtype=np.float64),
        late=np.array([w.timed_out for w in workflows], dtype=np.float64),
        failed=np.array([w.failed for w in workflows], dtype=np.float64),
        latency_s=np.array(
            [w.allowed_s if w.timed_out else max(0.0, w.latency_s) for w in workflows],
            dtype=np.float64,
        ),
        alone_s=np.array([alone_s.of(w) for w in workflows], dtype=np.float64),
    )


class _AloneTimes:
    """What workflows take alone, on all slots that their rater's model has by default.

    A request takes the busy seconds of the model's replicas over the requests they rated; of a
    model whose busy seconds nobody knows, the seconds of its calls, which its queue is in.
    """

    def __init__(self, history: History) -> None:
        self._slots = history.slots
        self._models = history.models
        busy: dict[str, float] = defaultdict(float)
        for of_hour in history.use:
            busy[of_hour.model_id] += of_hour.busy_s
        worked: dict[str, int] = defaultdict(int)
        called: dict[str, float] = defaultdict(float)
        for of_rater in history.work:
            model_id = history.models[of_rater.rater_id]
            worked[model_id] += of_rater.worked
            called[model_id] += of_rater.call_s
        self._request_s = {
            model_id: (busy.get(model_id) or called[model_id]) / requests
            for model_id, requests in worked.items()
            if requests
        }

    def of(self, workflow: EndedWorkflow) -> float:
        """Return the seconds; NaN of a workflow that the archive answered, or nothing is known."""
        model_id = self._models[workflow.rater_id]
        missing = workflow.requests - workflow.from_archive
        if not missing or model_id not in self._request_s:
            return nan
        batches = -(-missing // workflow.batch_size)
        slots = self._slots[model_id].count if model_id in self._slots else 1
        return missing * self._request_s[model_id] / min(batches, slots)


def _funnel(workflows: Sequence[EndedWorkflow]) -> dict[str, int]:
    return {
        "received_batches": sum(-(-w.requests // w.batch_size) for w in workflows),
        "after_archive": sum(-(-(w.requests - w.from_archive) // w.batch_size) for w in workflows),
        "model_calls": sum(w.model_calls for w in workflows),
    }


def _peaks(history: History) -> dict[str, float]:
    """Return the busiest hour over the mean one: those before the first that had any apart."""
    received: dict[datetime, float] = defaultdict(float)
    missing: dict[datetime, float] = defaultdict(float)
    for workflow in history.workflows:
        hour_at = workflow.accepted_at.replace(minute=0, second=0, microsecond=0)
        received[hour_at] += workflow.requests
        missing[hour_at] += workflow.requests - workflow.from_archive
    by_hour = {
        "received_batches": received,
        "after_archive": missing,
        "model_calls": history.calls_by_hour,
    }
    return {name: _peak_to_mean(counts, history.until) for name, counts in by_hour.items()}


def _peak_to_mean(counts: Mapping[datetime, float], until: datetime) -> float:
    if not any(counts.values()):
        return 1.0
    hours = ceil((until - min(counts)) / timedelta(hours=1))
    return max(counts.values()) * hours / sum(counts.values())


def _amplification(workflows: Sequence[EndedWorkflow]) -> float | None:
    """Return the tries of batches over the fewest calls that what was computed can have needed.

    So it is rather too large: a batch of which the archive or another workflow answered a part is
    counted as the part of a call.
    """
    needed = sum(
        min(w.model_calls, -(-(w.from_model + w.failed) // w.batch_size)) for w in workflows
    )
    return sum(w.attempts for w in workflows) / needed if needed else None


def _priorities(workflows: Sequence[EndedWorkflow], ended: Ended) -> dict[str, dict[str, Any]]:
    calls = np.array([w.model_calls for w in workflows], dtype=np.float64)
    whole = measures.whole(ended)
    found = {}
    for cls in PriorityClass:
        chosen = ended.priority == cls.name.lower()
        if chosen.any():
            found[cls.name.lower()] = {
                "workflows": int(chosen.sum()),
                "requests": int(ended.requests[chosen].sum()),
                "model_calls": int(calls[chosen].sum()),
                "whole_in_time": measures.share(whole[chosen]),
                "latency_p50_s": float(np.median(ended.latency_s[chosen])),
            }
    return found
