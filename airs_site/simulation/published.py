"""What figures are held against: the paper's, the goals, and how the table names them.

Published values are those of the paper's section 7, as read for the calibrated workload.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    label: str
    path: tuple[str, ...]
    """Where the figure stands in a policy's figures."""
    unit: str = ""
    """"%" for shares, "min" or "h" for times in seconds, "n" for counts, "" for other numbers."""
    published: float | None = None
    goal: float | None = None
    at_most: bool = True
    """Whether the goal is a ceiling; else it is a floor."""
    of_bound: bool = False
    """Whether the goal is a share of the bound, and at least what FIFO has."""
    least_is_fifo: bool = False
    """Whether the goal is what FIFO has."""


MINUTE, HOUR = 60.0, 3600.0

ROWS: Final[Sequence[Row]] = (
    Row(label="capacity failure p90", path=("capacity_failure", "p90"), unit="%", goal=0.005),
    Row(label="capacity failure p95", path=("capacity_failure", "p95"), unit="%", goal=0.01),
    Row(label="capacity failure p99", path=("capacity_failure", "p99"), unit="%", goal=0.05),
    Row(label="total failure p50", path=("failure", "p50"), unit="%", published=0.008),
    Row(label="total failure p80", path=("failure", "p80"), unit="%", published=0.027),
    Row(label="total failure p90", path=("failure", "p90"), unit="%", published=0.23, goal=0.03),
    Row(label="whole in time", path=("whole_in_time",), unit="%", goal=0.995, at_most=False),
    Row(
        label="requests in time",
        path=("requests_in_time",),
        unit="%",
        goal=0.95,
        at_most=False,
        of_bound=True,
        least_is_fifo=True,
    ),
    Row(
        label="AR_1 latency p75",
        path=("latency_s", "AR_1", "all", "p75"),
        unit="min",
        published=30 * MINUTE,
        goal=4 * MINUTE,
    ),
    Row(
        label="AR_1 latency p95",
        path=("latency_s", "AR_1", "all", "p95"),
        unit="min",
        goal=30 * MINUTE,
    ),
    Row(
        label="AR_2 latency p75",
        path=("latency_s", "AR_2", "all", "p75"),
        unit="h",
        published=33 * HOUR,
        goal=2 * HOUR,
    ),
    Row(label="low priority whole", path=("low_whole",), unit="%", goal=0.99, at_most=False),
    Row(
        label="small raters whole",
        path=("small_raters_whole",),
        unit="%",
        goal=0.985,
        at_most=False,
    ),
    Row(label="low : high latency, p50", path=("low_to_high",), published=5.0, goal=1.5),
    Row(label="Jain index (slowdown)", path=("jain",), goal=0.95, at_most=False),
    Row(label="attempts a model call", path=("amplification",), published=10.0, goal=1.05),
    Row(label="forecast kept", path=("forecast_kept",), unit="%", goal=0.99, at_most=False),
    Row(label="archive hits", path=("hit_rate",), unit="%", published=0.39),
    Row(label="duty, mean", path=("duty", "mean"), unit="%"),
    Row(label="duty, peak hour", path=("duty", "peak_hour"), unit="%"),
)


LARGEST, SECOND = "AR_1", "AR_2"

# The usual figures that a disturbance shows, if it shows them.
_WHOLE = Row(label="whole in time", path=("whole_in_time",), unit="%", at_most=False)
_LOST = Row(label="whole lost by it", path=("whole_lost",), unit="%", goal=0.01)
_REQUESTS = Row(label="requests in time", path=("requests_in_time",), unit="%", at_most=False)
_P75 = Row(label="AR_1 latency p75", path=("latency_s", LARGEST, "all", "p75"), unit="min")
_SMALL = Row(label="small raters whole", path=("small_raters_whole",), unit="%", at_most=False)
_USUAL = (_WHOLE, _REQUESTS, _P75)

DISTURBANCE_ROWS: Final[Mapping[str, Sequence[Row]]] = {
    "pool_loss": (
        Row(
            label="whole that day",
            path=("day", "whole_in_time"),
            unit="%",
            goal=0.97,
            at_most=False,
        ),
        Row(label="requests that day", path=("day", "requests_in_time"), unit="%"),
        _WHOLE,
    ),
    "flood": (
        Row(label="others whole", path=("others_whole",), unit="%", goal=0.97, at_most=False),
        Row(
            label="others' requests",
            path=("others_requests",),
            unit="%",
            at_most=False,
            least_is_fifo=True,
        ),
        Row(label="others' p75", path=("others_p75_s",), unit="min", goal=10 * MINUTE),
    ),
    "overload": (
        Row(label="whole meanwhile", path=("during", "whole_in_time"), unit="%"),
        Row(label="high priority meanwhile", path=("during", "high_whole"), unit="%"),
        Row(label="low priority meanwhile", path=("during", "low_whole"), unit="%"),
        Row(label="requests meanwhile", path=("during", "requests_in_time"), unit="%"),
        Row(label="whole afterwards", path=("after", "whole_in_time"), unit="%"),
        Row(label="backlog at its end", path=("end_backlog_s",), unit="h"),
        Row(label="worked off after", path=("recovered_s",), unit="h"),
    ),
    "wrong_costs": _USUAL,
    "planner_off": _USUAL,
    "stale_signal": (_WHOLE, _LOST, _P75),
    "management_away": (
        Row(label="whole of that hour", path=("hour", "whole_in_time"), unit="%"),
        _WHOLE,
        _LOST,
    ),
    "hit_rate": (_WHOLE, _REQUESTS, _P75),
    "repeats": _USUAL,
    "small_raters": (_WHOLE, _SMALL),
    "window": _USUAL,
}

GAIN_ROWS: Final[Sequence[Row]] = (
    _WHOLE,
    _REQUESTS,
    Row(label="low priority whole", path=("low_whole",), unit="%"),
    _SMALL,
    _P75,
    Row(label="Jain index", path=("jain",)),
    Row(label="attempts a call", path=("amplification",)),
)

POOL_ROWS: Final[Sequence[Row]] = (
    Row(label="whole in time", path=("whole_in_time",), unit="%", goal=0.995, at_most=False),
    _REQUESTS,
    _P75,
    Row(label="AR_2 latency p75", path=("latency_s", SECOND, "all", "p75"), unit="h"),
    Row(label="duty, mean", path=("duty", "mean"), unit="%"),
    Row(label="duty, peak hour", path=("duty", "peak_hour"), unit="%"),
)


def for_raters(rows: Sequence[Row], raters: Sequence[str]) -> list[Row]:
    """Return the rows for a workload whose largest raters have these names.

    What is published of the paper's two says nothing about others, nor do goals for them.
    """
    names = dict(zip((LARGEST, SECOND), raters, strict=False))
    found = []
    for row in rows:
        own = [name for name in row.path if name in names and names[name] != name]
        for name in own:
            row = replace(
                row,
                label=row.label.replace(name, names[name]),
                path=tuple(names[part] if part == name else part for part in row.path),
                published=None,
                goal=None,
            )
        found.append(row)
    return found


def published() -> dict[str, Any]:
    """Return the paper's figures in the shape of a policy's."""
    found: dict[str, Any] = {}
    for row in ROWS:
        if row.published is not None:
            place = found
            for name in row.path[:-1]:
                place = place.setdefault(name, {})
            place[row.path[-1]] = row.published
    return found


def value_at(figures: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """Return the figure at a path; None where a run has none."""
    place: Any = figures
    for name in path:
        place = place.get(name) if isinstance(place, Mapping) else None
    return None if place is None else float(place)


def in_words(value: float | None, unit: str) -> str:
    """Return a figure in its unit."""
    if value is None:
        return "-"
    if unit == "%":
        # The sum makes a zero of what rounds to minus zero.
        return f"{round(100 * value, 1) + 0.0:.1f} %"
    if unit == "min":
        return f"{value / MINUTE:.1f} min"
    if unit == "h":
        return f"{value / HOUR:.1f} h"
    return f"{value:,.0f}" if unit == "n" else f"{value:.2f}"
