"""Charts of duty cycles as SVG, from values to text: no script, no style but classes.

A row a line: on top the sum, as high as a chart, below it one low row for each of its parts. A step
has a bar; one at rest has a bar as thin as a line, and one of which nothing is known has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from xml.etree.ElementTree import Element, SubElement, tostring

_WIDTH: Final = 900
_LEFT: Final = 170
_RIGHT: Final = 60
_PLOT: Final = _WIDTH - _LEFT - _RIGHT
_HIGH, _LOW, _GAP = 90, 18, 8
_TOP: Final = 10
_AXIS: Final = 22
_NAMED: Final = 0.5
"""Where the name stands, there is no room for a figure."""
_REST: Final = 2.0
"""Height of the bar of a step at rest."""
_LONGEST_NAME: Final = 26
_TICKS: Final = ((timedelta(hours=3), "%H:%M"), (timedelta(days=1), "%m-%d"))
_MOST_TICKS: Final = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The duty cycle of something: shares from 0 to 1 by the begin of their step."""

    name: str
    shares: Mapping[datetime, float]
    mean: float | None
    """Over the whole span, each step by how long it was lived in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The duty cycle of something and of its parts over a span of equal steps, in UTC."""

    title: str
    since: datetime
    until: datetime
    step: timedelta
    whole: Row
    parts: Sequence[Row] = ()


def svg(chart: Chart) -> str:
    """Return a chart as SVG text, to stand in a page of the admin."""
    heights = [_HIGH, *(_LOW for _ in chart.parts)]
    bottom = _TOP + sum(heights) + _GAP * len(chart.parts)
    root = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_WIDTH} {bottom + _AXIS}",
            "class": "duty-chart",
            "role": "img",
        },
    )
    SubElement(root, "title").text = chart.title
    SubElement(root, "desc").text = described(chart)
    _ticks(root, chart, bottom)
    for share in (0.0, _NAMED, 1.0):
        y = _TOP + _HIGH * (1 - share)
        _line(root, "grid", _LEFT, y, _LEFT + _PLOT, y)
        if share != _NAMED:
            _text(root, "scale", _LEFT - 10, y, percent(share), anchor="end")
    top = _TOP
    for row, height in zip((chart.whole, *chart.parts), heights, strict=True):
        _row(root, chart, row, top, height)
        top += height + _GAP
    return tostring(root, encoding="unicode")


def described(chart: Chart) -> str:
    """Return in words what a chart shows."""
    return "; ".join(_in_words(row) for row in (chart.whole, *chart.parts))


def percent(share: float | None) -> str:
    """Return a share as text; a dash where it is not known."""
    return "\N{EN DASH}" if share is None else f"{share:.0%}"


def _in_words(row: Row) -> str:
    if not row.shares:
        return f"{row.name}: not sampled"
    lowest, highest = min(row.shares.values()), max(row.shares.values())
    return f"{row.name}: {percent(row.mean)}, from {percent(lowest)} to {percent(highest)} a step"


def _row(root: Element, chart: Chart, row: Row, top: float, height: float) -> None:
    middle = top + height / 2
    name = row.name
    if len(name) > _LONGEST_NAME:
        name = name[: _LONGEST_NAME - 1] + "…"
    _text(root, "name", _LEFT - 10, middle, name, anchor="end")
    _text(root, "mean", _WIDTH - _RIGHT + 10, middle, percent(row.mean))
    _line(root, "track", _LEFT, top + height, _LEFT + _PLOT, top + height)
    bars = [
        _bar(chart, at, max(height * share, _REST), top + height)
        for at, share in sorted(row.shares.items())
    ]
    if bars:
        SubElement(root, "path", {"class": "bars", "d": "".join(bars)})


def _bar(chart: Chart, at: datetime, height: float, bottom: float) -> str:
    left = _x(chart, at)
    right = _x(chart, min(at + chart.step, chart.until))
    return f"M{left:.1f} {bottom:.1f}V{bottom - height:.1f}H{right:.1f}V{bottom:.1f}Z"


def _x(chart: Chart, at: datetime) -> float:
    return _LEFT + _PLOT * ((at - chart.since) / (chart.until - chart.since))


def _ticks(root: Element, chart: Chart, bottom: float) -> None:
    span = chart.until - chart.since
    every, form = next(
        (tick for tick in _TICKS if span / tick[0] <= _MOST_TICKS),
        (timedelta(days=-(-span.days // _MOST_TICKS)), "%m-%d"),
    )
    midnight = chart.since.replace(hour=0, minute=0, second=0, microsecond=0)
    at = midnight
    while at <= chart.until:
        if at >= chart.since:
            x = _x(chart, at)
            _line(root, "grid", x, _TOP, x, bottom)
            _text(root, "tick", x, bottom + 13, at.strftime(form), anchor="middle")
        at += every


def _line(root: Element, name: str, x1: float, y1: float, x2: float, y2: float) -> None:
    places = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(root, "line", {"class": name, **{k: f"{v:.1f}" for k, v in places.items()}})


def _text(
    root: Element, name: str, x: float, y: float, text: str, *, anchor: str = "start"
) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    element = SubElement(root, "text", {"class": name, "dominant-baseline": "middle", **place})
    element.text = text
