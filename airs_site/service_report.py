"""The report of a running system from its own history, in the form of a simulation's."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from airs_site.service_figures import History, duty_by_model, figures_of, largest_raters
from airs_site.simulation.published import HOUR, MINUTE, in_words, published
from airs_site.simulation.report import as_text, table
from fulfillment import accelerator_use, promises, service_history, shadow
from models_admin import utilisation

NAME: Final = "service"
"""Where the name of a policy stands in a simulation."""
_MOST_NAMED: Final = 20
"""Raters and owners whose accelerator-seconds are told."""
_INTERNAL: Final = (shadow.OWNER,)


def document(since: datetime, until: datetime) -> dict[str, Any]:
    """Return what `simulation.json` has, of workflows that ended in the span, and notes on it."""
    ended = service_history.ended(since, until, without=_INTERNAL)
    history = History(
        until=until,
        workflows=[workflow for workflow in ended if workflow.requests],
        work=service_history.work(since, until),
        calls_by_hour=service_history.calls_by_hour(since, until),
        models=service_history.models(),
        use=utilisation.hours(since, until),
        slots=utilisation.slots(),
        forecast_kept=promises.kept_rate(since, until).rate,
    )
    left_out = service_history.left_out(since, until, without=_INTERNAL)
    found = figures_of(history)
    return {
        "trace": NAME,
        "scale": 1,
        "seeds": [],
        "policies": {NAME: found.figures},
        "bound": {},
        "published": published(),
        "disturbances": {},
        "ablation": {},
        "raters": largest_raters(history),
        "since": since.isoformat(timespec="seconds"),
        "until": until.isoformat(timespec="seconds"),
        "workflows": {
            "ended": len(history.workflows),
            "cancelled": left_out.cancelled,
            "open": left_out.open,
        },
        "duty_by_model": duty_by_model(history.use),
        "accelerator_seconds": _accelerators(since, until),
        "notes": found.notes,
    }


def text(written: Mapping[str, Any]) -> str:
    """Return a document for people: the simulator's table, then what a simulation does not have."""
    figures, counts = written["policies"][NAME], written["workflows"]
    parts = [
        f"{written['since']} to {written['until']}: {counts['ended']:,} workflows ended, "
        f"{counts['cancelled']:,} were cancelled and {counts['open']:,} are open (left out)",
        as_text(table(written)),
    ]
    if figures["funnel"]:
        funnel = " → ".join(f"{count:,}" for count in figures["funnel"].values())
        parts.append(f"batches received → after the archive → model calls: {funnel}")
    if figures["latency_s"]:
        parts += [as_text(_latencies(figures["latency_s"])), as_text(_classes(figures))]
    if written["duty_by_model"]:
        duties = (f"{model} {duty:.3f}" for model, duty in written["duty_by_model"].items())
        parts.append(f"duty by model: {', '.join(duties)}")
    for by, seconds in written["accelerator_seconds"].items():
        if seconds:
            said = ", ".join(f"{name} {of:,.1f}" for name, of in seconds.items())
            parts.append(f"accelerator-seconds by {by}: {said}")
    parts += [f"{name}: {reason}" for name, reason in written["notes"].items()]
    return "\n\n".join(parts)


def _accelerators(since: datetime, until: datetime) -> dict[str, dict[str, float]]:
    """Return the accelerator-seconds of the hours of a span, the largest first."""
    by_rater = accelerator_use.read(since, until, by="rater", limit=_MOST_NAMED)
    by_owner = accelerator_use.read(since, until, by="owner", limit=_MOST_NAMED)
    return {
        "rater": {str(use.rater): use.device_s for use in by_rater.items},
        "owner": {str(use.owner): use.device_s for use in by_owner.items},
    }


def _latencies(latency_s: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    return [
        ["latency", "class", "p50", "p75", "p95", "p99"],
        *(
            [rater, priority, *(_took(seconds) for seconds in quantiles.values())]
            for rater, by_class in latency_s.items()
            for priority, quantiles in by_class.items()
        ),
    ]


def _classes(figures: Mapping[str, Any]) -> list[list[str]]:
    return [
        ["class", "workflows", "requests", "model calls", "whole in time", "latency p50"],
        *(
            [
                name,
                *(f"{of_class[count]:,}" for count in ("workflows", "requests", "model_calls")),
                in_words(of_class["whole_in_time"], "%"),
                _took(of_class["latency_p50_s"]),
            ]
            for name, of_class in figures["priorities"].items()
        ),
    ]


def _took(seconds: float) -> str:
    """Return a duration in a unit that leaves two digits of it."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.1f} s"
    return in_words(seconds, "min" if seconds < 2 * HOUR else "h")
