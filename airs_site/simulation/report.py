"""What a simulation says: the document that is written, and the table that is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from airs_site.simulation.bound import Bound
from airs_site.simulation.metrics import Figures
from airs_site.simulation.published import ROWS, Row, in_words, published, value_at


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Figures of every policy on one workload."""

    seed: int | None
    """Of the generator; None for a trace."""
    figures: Mapping[str, Figures]
    bound: Bound
    disturbances: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Figures by disturbance and policy."""


def document(*, trace: str, scale: int, results: Sequence[Result]) -> dict[str, Any]:
    """Return `simulation.json`; of several workloads `policies` and `bound` have the medians."""
    names = list(results[0].figures)
    by_policy = {name: [asdict(result.figures[name]) for result in results] for name in names}
    written: dict[str, Any] = {
        "trace": trace,
        "scale": scale,
        "seeds": [result.seed for result in results if result.seed is not None],
        "policies": {name: _merged(figures, median) for name, figures in by_policy.items()},
        "bound": _merged([asdict(result.bound) for result in results], median),
        "published": published(),
        "disturbances": _merged([result.disturbances for result in results], median),
        "ablation": {},
    }
    if len(results) > 1:
        written["spread"] = {
            name: {"min": _merged(figures, min), "max": _merged(figures, max)}
            for name, figures in by_policy.items()
        }
    return written


def table(written: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of a document: a heading, then a line a figure."""
    policies = written["policies"]
    lines = [["figure", *policies, "published", "goal", "bound"]]
    for row in ROWS:
        figures = [in_words(value_at(policies[name], row.path), row.unit) for name in policies]
        limit = value_at(written["bound"], row.path)
        lines.append(
            [
                row.label,
                *figures,
                in_words(row.published, row.unit),
                _goal(row),
                in_words(limit, row.unit),
            ]
        )
    return lines


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


def _goal(row: Row) -> str:
    if row.goal is None:
        return "-"
    return f"{'≤' if row.at_most else '≥'} {in_words(row.goal, row.unit)}"


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
