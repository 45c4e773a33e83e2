"""What all plots share: a colour a policy, axes of days, and how a figure becomes a PNG."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator
from numpy.typing import NDArray

from airs_site.simulation.published import LARGEST
from airs_site.simulation.tables import WEEKDAYS

Document = Mapping[str, Any]

# Colours that people who see few of them tell apart (Okabe and Ito).
COLOURS: Final[Mapping[str, str]] = {
    "airs": "#0072B2",
    "paper": "#D55E00",
    "paper-tuned-1": "#E69F00",
    "paper-tuned-2": "#A6761D",
    "fifo": "#009E73",
    "isolated": "#CC79A7",
}
MAIN: Final = ("airs", "paper", "fifo", "isolated")
"""Of which time is shown: more lines than these hide each other."""
_OTHER_COLOURS: Final = ("#444444", "#888888", "#BBBBBB")
_DAY_H: Final = 24
_DPI: Final = 120
_TICKS: Final = (0.1, 1, 4, 10, 30, 60, 120, 360, 720, 1440, 2880, 4320)
"""Minutes."""
_FEW_TICKS: Final = (0.1, 1, 10, 60, 360, 1440, 4320)
WIDTH: Final = 11.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A plot and what it shows; `draw` returns None where a document has nothing for it."""

    name: str
    title: str
    text: str
    draw: Callable[[Document], Figure | None]


def colours(policies: Sequence[str]) -> dict[str, str]:
    """Return a colour a policy, always the same for those there are."""
    others = cycle(_OTHER_COLOURS)
    return {name: COLOURS.get(name) or next(others) for name in policies}


def main_policies(document: Document) -> list[str]:
    """Return the policies that are shown over time, at most four."""
    there = list(document["series"])
    return ([name for name in MAIN if name in there] or there)[: len(MAIN)]


def figure(rows: int, columns: int, *, height: float, **how: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many panels, row by row."""
    made = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = made.subplots(rows, columns, squeeze=False, **how)
    flat = list(panels.ravel())
    for axes in flat:
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return made, flat


def png(drawn: Figure, title: str) -> bytes:
    """Return a figure as a picture under a title; the same figure gives the same bytes."""
    raw = io.BytesIO()
    drawn.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    drawn.savefig(raw, format="png", dpi=_DPI, metadata={"Software": None})
    return raw.getvalue()


def days_axis(axes: Axes, document: Document, *, label: bool = True) -> None:
    """Let the horizontal axis be hours, named by their day of the week."""
    first = document["first_weekday"]

    def name(hour: float, _: int) -> str:
        return WEEKDAYS[(first + int(hour // _DAY_H)) % 7].capitalize()

    axes.xaxis.set_major_locator(MultipleLocator(_DAY_H))
    axes.xaxis.set_minor_locator(MultipleLocator(_DAY_H / 4))
    axes.xaxis.set_major_formatter(FuncFormatter(name))
    axes.set_xlim(0, hours_of(document))
    if label:
        axes.set_xlabel("day, each from midnight (small ticks: 6 h)")


def hours_of(document: Document) -> int:
    """Return how many hours were measured."""
    return len(next(iter(document["series"].values()))["duty"])


def minutes_axis(axes: Axes, which: str = "y") -> None:
    """Let an axis be minutes, logarithmic, in words of minutes, hours and days."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    axis.set_major_locator(FixedLocator(_TICKS if which == "y" else _FEW_TICKS))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter(FuncFormatter(_duration))


def shares_axis(axes: Axes) -> None:
    """Let the vertical axis be shares, shown in per cent."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def minutes(values: Sequence[float | None]) -> list[float | None]:
    """Return seconds as minutes; what took no time at all counts as six seconds."""
    return [None if value is None else max(value / 60, 0.1) for value in values]


def gaps(values: Sequence[float | None]) -> NDArray[np.float64]:
    """Return values to draw: a line has a gap where there is none."""
    return np.array([np.nan if value is None else value for value in values])


def name_of(document: Document, large: int) -> str:
    """Return the name of the largest rater or of the second."""
    raters = document.get("raters") or [LARGEST]
    return str(raters[min(large, len(raters) - 1)])


def _duration(value: float, _: int) -> str:
    if value >= 1440:
        return f"{value / 1440:g} d"
    if value >= 60:
        return f"{value / 60:g} h"
    return f"{value:g} min" if value >= 1 else f"{value * 60:g} s"
