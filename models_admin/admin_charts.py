"""Charts of duty cycles on the pages of models and pools, each with its numbers in a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from django.utils.safestring import SafeString, mark_safe

from models_admin import charts, duty_history
from models_admin.charts import Chart, Row, percent
from models_admin.duty_history import Line, Span

_SPANS: Final = (
    ("Last 24 hours, by quarters of an hour", timedelta(hours=24), timedelta(minutes=15)),
    ("Last 7 days, by two hours", timedelta(days=7), timedelta(hours=2)),
)
_MOST_PARTS: Final = 16
_AT: Final = "%Y-%m-%d %H:%M"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A chart as a page shows it; without a step there is nothing to draw."""

    title: str
    svg: SafeString
    names: list[str]
    steps: list[tuple[str, list[str]]]
    """Begin of each step, and the duty cycle of each name in it."""
    note: str


def of_model(model_id: str, now: datetime) -> list[Shown]:
    """Return the charts of a model with its replicas, in the order of the page."""
    found = []
    for title, length, step in _SPANS:
        span = Span.ending(now.astimezone(UTC), length, step)
        replicas = duty_history.of_replicas(model_id, span)
        agents = {agent for agent, _ in replicas}
        parts = {
            f"replica {ordinal}" if len(agents) == 1 else f"{agent}, replica {ordinal}": line
            for (agent, ordinal), line in replicas.items()
        }
        found.append(_shown(title, span, model_id, duty_history.of_model(model_id, span), parts))
    return found


def of_pool(pool_id: str, now: datetime) -> list[Shown]:
    """Return the charts of a pool with its models, in the order of the page."""
    found = []
    for title, length, step in _SPANS:
        span = Span.ending(now.astimezone(UTC), length, step)
        models = duty_history.of_models(pool_id, span)
        whole = duty_history.together(models.values())
        found.append(_shown(title, span, f"pool {pool_id}", whole, models))
    return found


def _shown(title: str, span: Span, name: str, whole: Line, parts: Mapping[str, Line]) -> Shown:
    kept = duty_history.longest(parts, _MOST_PARTS)
    left_out = len(parts) - len(kept)
    chart = Chart(
        title=f"Duty cycle of {name}: {title[0].lower()}{title[1:]}",
        since=span.since,
        until=span.until,
        step=span.step,
        whole=_row(name, whole),
        parts=[_row(part, line) for part, line in kept.items()],
    )
    rows = (chart.whole, *chart.parts)
    return Shown(
        title=title,
        # Made by an XML library, which has escaped every name.
        svg=mark_safe(charts.svg(chart) if whole else ""),
        names=[row.name for row in rows],
        steps=[
            (f"{bucket.at:{_AT}}", [percent(row.shares.get(bucket.at)) for row in rows])
            for bucket in whole
        ],
        note=f"{left_out} more that lived shorter are not drawn." if left_out else "",
    )


def _row(name: str, line: Line) -> Row:
    lived = sum(bucket.device_s for bucket in line)
    return Row(
        name=name,
        shares={bucket.at: bucket.duty for bucket in line if bucket.duty is not None},
        mean=min(sum(bucket.busy_device_s for bucket in line) / lived, 1.0) if lived else None,
    )
