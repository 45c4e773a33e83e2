"""Tables of a simulation: policies, ranges, bad days, layers, pools, one hour of the week."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from airs_site.simulation.published import (
    DISTURBANCE_ROWS,
    GAIN_ROWS,
    POOL_ROWS,
    Row,
    in_words,
    value_at,
)
from airs_site.simulation.report import SERVICE, goal_of, marked, rows_of, table
from airs_site.simulation.scenes import DISTURBANCES, ONLY

WEEKDAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_H: Final = 24

Lines = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a heading of its own; the first line names the columns."""

    title: str
    lines: Lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Hour:
    """An hour of the week."""

    weekday: int
    """Monday is 0."""
    hour: int

    def __str__(self) -> str:
        return f"{WEEKDAYS[self.weekday].capitalize()} {self.hour}:00"


def tables(written: Mapping[str, Any], hour: Hour | None = None) -> list[Table]:
    """Return all tables of a document that it has something for."""
    seeds = written["seeds"]
    over = f"medians over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else "one workload"
    found = [Table(title=f"Policies, {over}, scale 1:{written['scale']}", lines=table(written))]
    if "spread" in written:
        found.append(_spread(written))
    if hour is not None:
        found.append(_hour(written, hour))
    if written["pool_scale"]:
        found.append(_pools(written))
    found += [_disturbance(written, name) for name in written["disturbances"]]
    if written["ablation"]:
        found.append(_ablation(written))
    return found


def enough(written: Mapping[str, Any], policy: str) -> int | None:
    """Return the fewest replicas with which a policy meets the goals; None if none does."""
    goals = [row for row in POOL_ROWS if row.goal is not None]
    found = [
        int(figures["replicas"])
        for figures in written["pool_scale"].get(policy, {}).values()
        if all((value_at(figures, row.path) or 0.0) >= (row.goal or 0.0) for row in goals)
    ]
    return min(found, default=None)


def _spread(written: Mapping[str, Any]) -> Table:
    policies = list(written["spread"])
    lines = [["figure", *policies]]
    for row in rows_of(written):
        lines.append([row.label, *(_range(written["spread"][name], row) for name in policies)])
    return Table(title="Least to most over the seeds", lines=lines)


def _range(spread: Mapping[str, Any], row: Row) -> str:
    least, most = (value_at(spread[end], row.path) for end in ("min", "max"))
    if least is None or most is None:
        return "-"
    return f"{in_words(least, row.unit).split()[0]} - {in_words(most, row.unit)}"


def _hour(written: Mapping[str, Any], at: Hour) -> Table:
    policies = list(written["series"])
    first = written["first_weekday"]
    lines = [["figure", *policies]]
    for label, unit, path in _hour_rows(written):
        cells = []
        for name in policies:
            values = _at(written["series"][name], path)
            chosen = [
                value
                for number, value in enumerate(values)
                if (first + number // _DAY_H) % 7 == at.weekday
                and number % _DAY_H == at.hour
                and value is not None
            ]
            cells.append(in_words(fmean(chosen) if chosen else None, unit))
        lines.append([label, *cells])
    return Table(
        title=f"{at}, the hour from then (latencies of what is submitted in it)", lines=lines
    )


def _hour_rows(written: Mapping[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    groups = list(next(iter(written["series"].values()))["replicas"])
    return [
        ("evaluations submitted", "n", ("evaluations",)),
        ("batches received, 1/s", "", ("received_per_s",)),
        ("batches after the archive, 1/s", "", ("after_archive_per_s",)),
        ("model calls, 1/s", "", ("calls_per_s",)),
        ("archive hits", "%", ("hit_rate",)),
        ("duty", "%", ("duty",)),
        ("whole in time", "%", ("whole",)),
        *((f"{name}: replicas at its start", "n", ("replicas", name)) for name in groups),
        *((f"{name}: batches waiting then", "n", ("waiting", name)) for name in groups),
        *((f"{name}: latency p50", "min", ("latency_s", name, "p50")) for name in groups),
        *((f"{name}: latency p95", "min", ("latency_s", name, "p95")) for name in groups),
    ]


def _at(series: Mapping[str, Any], path: Sequence[str]) -> Sequence[float | None]:
    place: Any = series
    for name in path:
        place = place[name]
    values: Sequence[float | None] = place
    return values


def _pools(written: Mapping[str, Any]) -> Table:
    rows = rows_of(written, POOL_ROWS)
    lines = [["replicas", "policy", *(row.label for row in rows)]]
    of = written["pool_scale"]
    for factor in next(iter(of.values())):
        for policy in of:
            figures = of[policy][factor]
            cells = (marked(row, figures, written) for row in rows)
            lines.append([f"{figures['replicas']:.0f} (x{factor})", policy, *cells])
    return Table(title="Larger and smaller pools", lines=lines)


def _disturbance(written: Mapping[str, Any], name: str) -> Table:
    of = written["disturbances"][name]
    lines = [["figure", *of, "goal"]]
    variants = list(DISTURBANCES[name].variants)
    for variant in variants:
        beside = {policy: of[policy][variant] if variant != ONLY else of[policy] for policy in of}
        for row in rows_of(written, DISTURBANCE_ROWS[name]):
            label = row.label if variant == ONLY else f"{variant}: {row.label}"
            cells = (marked(row, beside[policy], written, beside) for policy in of)
            lines.append([label, *cells, goal_of(row)])
    return Table(title=f"{name}: {DISTURBANCES[name].title}", lines=lines)


def _ablation(written: Mapping[str, Any]) -> Table:
    rows = rows_of(written, GAIN_ROWS)
    full = written["undisturbed"][SERVICE]
    lines = [["without", *(row.label for row in rows), "model calls"]]
    for layer, figures in [("(nothing)", full), *written["ablation"].items()]:
        cells = (in_words(value_at(figures, row.path), row.unit) for row in rows)
        calls = figures["funnel"]["model_calls"] / full["funnel"]["model_calls"]
        lines.append([layer, *cells, f"x {calls:.2f}"])
    return Table(title=f"Each layer of {SERVICE} switched off", lines=lines)
