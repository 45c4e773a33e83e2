"""Charts of duty cycles as SVG text."""

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest

from models_admin.charts import Chart, Row, described, svg

SINCE = datetime(2026, 1, 1, 22, tzinfo=UTC)
HOUR = timedelta(hours=1)
SVG = "{http://www.w3.org/2000/svg}"


def row(name: str, *shares: float | None) -> Row:
    """Return a row of steps of an hour; None is a gap."""
    known = {SINCE + n * HOUR: share for n, share in enumerate(shares) if share is not None}
    return Row(name=name, shares=known, mean=sum(known.values()) / len(known) if known else None)


def chart(whole: Row, *parts: Row, hours: float = 4) -> Chart:
    return Chart(
        title="Duty cycle of m", since=SINCE, until=SINCE + hours * HOUR, step=HOUR, whole=whole,
        parts=parts,
    )  # fmt: skip


def bars(root: ElementTree.Element) -> list[list[tuple[float, float, float]]]:
    """Return the bars of each row that has some: left, right and height."""
    bar = re.compile(r"M([\d.]+) ([\d.]+)V([\d.]+)H([\d.]+)V([\d.]+)Z")
    return [
        [
            (float(left), float(right), round(float(bottom) - float(top), 1))
            for left, bottom, top, right, _ in bar.findall(path.get("d", ""))
        ]
        for path in root.iter(f"{SVG}path")
    ]


def test_each_step_has_a_bar_one_at_rest_a_thin_one_and_a_gap_none() -> None:
    root = ElementTree.fromstring(svg(chart(row("m", 1.0, 0.0, None, 0.5), row("replica 0", 0.5))))

    whole, part = bars(root)
    assert [height for *_, height in whole] == [90.0, 2.0, 45.0]
    assert [height for *_, height in part] == [9.0]
    (first, second, fourth) = ((left, right) for left, right, _ in whole)
    width = first[1] - first[0]
    assert second[0] == first[1]
    assert fourth[0] - second[1] == width, "the gap is as wide as a step"
    assert part[0][:2] == first


def test_a_step_that_is_not_over_ends_now() -> None:
    (whole,) = bars(ElementTree.fromstring(svg(chart(row("m", 1.0, 1.0), hours=1.5))))

    first, second = (right - left for left, right, _ in whole)
    assert second == pytest.approx(first / 2, abs=0.1)


def test_nothing_in_it_needs_a_style_or_a_script_and_names_are_only_text() -> None:
    text = svg(chart(row("<script>x</script>", 0.5), row('" onload="x', 0.5)))

    root = ElementTree.fromstring(text)
    assert "<script" not in text
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in {"svg", "title", "desc", "line", "path", "text"}
        assert not {name for name in element.attrib if name == "style" or name.startswith("on")}
    names = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "name"]
    assert names == ["<script>x</script>", '" onload="x']


def test_who_does_not_see_it_is_told() -> None:
    shown = chart(row("m", 1.0, 0.0), row("replica 0"))
    root = ElementTree.fromstring(svg(shown))

    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Duty cycle of m"
    said = root.findtext(f"{SVG}desc")
    assert said == described(shown) == "m: 50%, from 0% to 100% a step; replica 0: not sampled"


def test_time_is_told_in_hours_or_days_as_the_span_is_long() -> None:
    def ticks(hours: float) -> list[str | None]:
        root = ElementTree.fromstring(svg(chart(row("m", 1.0), hours=hours)))
        return [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "tick"]

    assert ticks(6) == ["00:00", "03:00"]
    assert ticks(72) == ["01-02", "01-03", "01-04"]
    assert len(ticks(24 * 60)) <= 10
