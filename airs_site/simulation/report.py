"""What a simulation says: the document that is written, and the table that is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from airs_site.simulation.bound import Bound
from airs_site.simulation.measures import large
from airs_site.simulation.published import (
    GAIN_ROWS,
    ROWS,
    Row,
    for_raters,
    in_words,
    published,
    value_at,
)
from airs_site.simulation.series import Series
from airs_site.simulation.workload import Params

SERVICE: Final = "airs"
"""The policy whose layers are switched off."""
MET, MISSED = "✓", "✗"

Figures = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Figures of every policy on one workload."""

    seed: int | None
    """Of the generator; None for a trace."""
    figures: Mapping[str, Figures]
    bound: Bound
    series: Mapping[str, Series] = field(default_factory=dict)
    disturbances: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Figures by disturbance and policy, and by variant where there are several."""
    ablation: Mapping[str, Figures] = field(default_factory=dict)
    """Figures of the service's policy by the layer that is off."""
    pool_scale: Mapping[str, Mapping[str, Figures]] = field(default_factory=dict)
    """Figures by policy and factor."""

    @property
    def goes_beyond(self) -> bool:
        """Whether more was run than the policies on the workload as it is."""
        return bool(self.disturbances or self.ablation or self.pool_scale)


def document(
    *, trace: str, scale: int, results: Sequence[Result], params: Params | None = None
) -> dict[str, Any]:
    """Return `simulation.json`; figures of several workloads are medians, series of the first."""
    names = list(results[0].figures)
    raters = _largest(params) if params is not None else []
    by_policy = {
        name: [result.figures[name] for result in results if name in result.figures]
        for name in names
    }
    disturbed = [result for result in results if result.goes_beyond]
    undisturbed = {
        name: [result.figures[name] for result in disturbed if name in result.figures]
        for name in names
        if disturbed
    }
    written: dict[str, Any] = {
        "trace": trace,
        "scale": scale,
        "seeds": [result.seed for result in results if result.seed is not None],
        "policies": {name: _merged(figures, median) for name, figures in by_policy.items()},
        "undisturbed": {name: _merged(of, median) for name, of in undisturbed.items()},
        "bound": _merged([asdict(result.bound) for result in results], median),
        "published": published(),
        "disturbances": _merged([_losses(result) for result in results], median),
        "ablation": _merged([_gains(result, raters) for result in results], median),
        "pool_scale": _merged([result.pool_scale for result in results], median),
        "series": {name: asdict(of) for name, of in results[0].series.items()},
    }
    if params is not None:
        written |= {
            "raters": raters,
            "replicas": params.replicas,
            "first_weekday": params.first_weekday,
        }
    if len(results) > 1:
        written["spread"] = {
            name: {"min": _merged(figures, min), "max": _merged(figures, max)}
            for name, figures in by_policy.items()
            if len(figures) > 1
        }
    return written


def rows_of(written: Mapping[str, Any], rows: Sequence[Row] = ROWS) -> list[Row]:
    """Return the rows of a table for the raters that a document has."""
    return for_raters(rows, written.get("raters", ()))


def table(written: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of a document: a heading, then a line a figure."""
    policies = written["policies"]
    lines = [["figure", *policies, "published", "goal", "bound"]]
    for row in rows_of(written):
        lines.append(
            [
                row.label,
                *(marked(row, policies[name], written) for name in policies),
                in_words(row.published, row.unit),
                goal_of(row),
                in_words(value_at(written["bound"], row.path), row.unit),
            ]
        )
    return lines


def marked(
    row: Row,
    figures: Figures,
    written: Mapping[str, Any],
    beside: Mapping[str, Figures] | None = None,
) -> str:
    """Return a figure in words, and whether it meets its goal.

    `beside` are the figures of all policies, where they are not those of the document.
    """
    value = value_at(figures, row.path)
    words = in_words(value, row.unit)
    goal = _goal_in(row, written, written["policies"] if beside is None else beside)
    if value is None or goal is None:
        return words
    return f"{words} {MET if (value <= goal if row.at_most else value >= goal) else MISSED}"


def goal_of(row: Row) -> str:
    """Return the goal of a row in words."""
    if row.of_bound:
        return f"≥ {in_words(row.goal, row.unit)} of bound, fifo"
    if row.least_is_fifo:
        return "≥ fifo"
    if row.goal is None:
        return "-"
    return f"{'≤' if row.at_most else '≥'} {in_words(row.goal, row.unit)}"


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in columns: the first to the left, all others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _goal_in(row: Row, written: Mapping[str, Any], beside: Mapping[str, Figures]) -> float | None:
    """Return the number that a figure is held to, if there is one."""
    fifo = value_at(beside.get("fifo", {}), row.path)
    if row.of_bound:
        bound = value_at(written["bound"], row.path)
        if bound is None or row.goal is None:
            return None
        return max(row.goal * bound, fifo or 0.0)
    return fifo if row.least_is_fifo else row.goal


def _losses(result: Result) -> dict[str, Any]:
    """Return the disturbances with what each cost, in the share of evaluations that are whole."""
    return {
        name: {
            policy: _with_loss(figures, result.figures[policy]) for policy, figures in of.items()
        }
        for name, of in result.disturbances.items()
    }


def _with_loss(figures: Mapping[str, Any], undisturbed: Figures) -> dict[str, Any]:
    if "whole_in_time" in figures:
        return {
            **figures,
            "whole_lost": undisturbed["whole_in_time"] - figures["whole_in_time"],
        }
    return {
        name: _with_loss(of, undisturbed) if isinstance(of, Mapping) else of
        for name, of in figures.items()
    }


def _gains(result: Result, raters: Sequence[str]) -> dict[str, Any]:
    """Return the ablation with what each layer adds to each figure, latencies as a factor."""
    if not result.ablation:
        return {}
    full = result.figures[SERVICE]
    rows = for_raters(GAIN_ROWS, raters)
    return {
        layer: {**without, "gain": _gain(full, without, rows)}
        for layer, without in result.ablation.items()
    }


def _gain(full: Figures, without: Figures, rows: Sequence[Row]) -> dict[str, float]:
    gain: dict[str, float] = {}
    for row in rows:
        here, there = value_at(full, row.path), value_at(without, row.path)
        if here is None or there is None:
            continue
        if row.unit == "%":
            gain[row.path[-1]] = here - there
        elif here:
            gain[f"{row.path[0]}_factor"] = there / here
    calls = full["funnel"]["model_calls"]
    gain["model_calls_factor"] = without["funnel"]["model_calls"] / max(1, calls)
    return gain


def _largest(params: Params) -> list[str]:
    counts = {rater.id: rater.default_replicas for rater in params.raters}
    return sorted(large(counts), key=lambda rater: (-counts[rater], rater))


def _merged(documents: Sequence[Mapping[str, Any]], how: Any) -> dict[str, Any]:
    """Merge documents of one shape leaf by leaf; a leaf that some lack is that of the others."""
    merged: dict[str, Any] = {}
    for name in {name: None for document in documents for name in document}:
        values = [d[name] for d in documents if d.get(name) is not None]
        if not values:
            merged[name] = None
        elif isinstance(values[0], Mapping):
            merged[name] = _merged(values, how)
        else:
            merged[name] = how(values)
    return merged
