"""Figures of a run: one JSON file each, and one table for people."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured number; `ratio` is value over what `ratio_to` names, larger is better."""

    name: str
    value: float
    unit: str
    ratio_to: str | None = None
    ratio: float | None = None
    n: int
    note: str = ""


def directory() -> Path:
    """Return where the JSON files go."""
    home = Path(os.environ.get("AIRS_HOME") or REPOSITORY / ".airs")
    return home / "bench"


def write(figures: Sequence[Figure]) -> None:
    """Write each figure to a file of its name."""
    place = directory()
    place.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        text = json.dumps(asdict(figure), ensure_ascii=False, indent=1)
        (place / f"{figure.name}.json").write_text(text + "\n")


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    table = Table("benchmark", "value", "unit", "ratio", "to", "n", "note")
    for figure in figures:
        table.add_row(
            figure.name,
            number(figure.value),
            figure.unit,
            "" if figure.ratio is None else number(figure.ratio),
            figure.ratio_to or "",
            f"{figure.n:,}",
            figure.note,
        )
    Console(width=200, highlight=False).print(table)


def number(value: float) -> str:
    """Return three significant digits or more."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def median(values: Sequence[float]) -> float:
    """Return the median; the machine's mood is in the outer ones."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Return lowest to highest, for a note."""
    return f"{number(min(values))}-{number(max(values))}" if len(values) > 1 else "one run"


def parts(costs: Mapping[str, float]) -> str:
    """Return `name value` of each part, the dearest first, without those below 0.5."""
    ordered = sorted(costs.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {value:.0f}" for name, value in ordered if value >= 0.5)
