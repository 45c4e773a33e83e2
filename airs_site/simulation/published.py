"""What figures are held against: the paper's, the goals, and how the table names them.

Published values are those of the paper's section 7, as read for the calibrated workload.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    label: str
    path: tuple[str, ...]
    """Where the figure stands in a policy's figures."""
    unit: str = ""
    """"%" for shares, "min" or "h" for latencies, "" for plain numbers."""
    published: float | None = None
    goal: float | None = None
    at_most: bool = True
    """Whether the goal is a ceiling; else it is a floor."""


MINUTE, HOUR = 60.0, 3600.0

ROWS: Final[Sequence[Row]] = (
    Row(label="capacity failure p90", path=("capacity_failure", "p90"), unit="%", goal=0.005),
    Row(label="capacity failure p95", path=("capacity_failure", "p95"), unit="%", goal=0.01),
    Row(label="capacity failure p99", path=("capacity_failure", "p99"), unit="%", goal=0.05),
    Row(label="total failure p50", path=("failure", "p50"), unit="%", published=0.008),
    Row(label="total failure p80", path=("failure", "p80"), unit="%", published=0.027),
    Row(label="total failure p90", path=("failure", "p90"), unit="%", published=0.23, goal=0.03),
    Row(label="whole in time", path=("whole_in_time",), unit="%", goal=0.995, at_most=False),
    Row(label="requests in time", path=("requests_in_time",), unit="%", at_most=False),
    Row(
        label="AR_1 latency p75",
        path=("latency_s", "AR_1", "high", "p75"),
        unit="min",
        published=30 * MINUTE,
        goal=4 * MINUTE,
    ),
    Row(
        label="AR_1 latency p95",
        path=("latency_s", "AR_1", "high", "p95"),
        unit="min",
        goal=30 * MINUTE,
    ),
    Row(
        label="AR_2 latency p75",
        path=("latency_s", "AR_2", "high", "p75"),
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
    Row(label="Jain index (slowdown)", path=("jain",), goal=0.95, at_most=False),
    Row(label="attempts a model call", path=("amplification",), published=10.0, goal=1.05),
    Row(label="forecast kept", path=("forecast_kept",), unit="%", goal=0.99, at_most=False),
    Row(label="archive hits", path=("hit_rate",), unit="%", published=0.39),
    Row(label="duty, mean", path=("duty", "mean"), unit="%"),
    Row(label="duty, peak hour", path=("duty", "peak_hour"), unit="%"),
)


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
        return f"{100 * value:.1f} %"
    if unit == "min":
        return f"{value / MINUTE:.1f} min"
    if unit == "h":
        return f"{value / HOUR:.1f} h"
    return f"{value:.2f}"
