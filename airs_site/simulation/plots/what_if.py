"""What if: bad days, layers that are off, other pools, other shares of hits."""

from collections.abc import Iterator, Mapping, Sequence
from math import nan
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from airs_site.simulation.plots.style import (
    Document,
    Plot,
    colours,
    figure,
    gaps,
    minutes,
    minutes_axis,
    name_of,
    shares_axis,
)
from airs_site.simulation.published import value_at
from airs_site.simulation.report import SERVICE
from airs_site.simulation.scenes import DISTURBANCES, ONLY

_SWEEPS: Final = frozenset({"hit_rate"})
# Where a disturbance says how many evaluations were whole.
_WHOLE: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "pool_loss": (("day", "whole_in_time"), "a third of the pool lost (that day)"),
    "flood": (("others_whole",), "flood (the others)"),
    "overload": (("during", "whole_in_time"), "overload (meanwhile)"),
    "management_away": (("hour", "whole_in_time"), "management away (that hour)"),
}


def _bad_days(document: Document) -> Figure | None:
    rows = [("undisturbed", {p: f["whole_in_time"] for p, f in document["undisturbed"].items()})]
    rows += list(_wholes(document))
    policies = [name for name in document["policies"] if any(of.get(name) for _, of in rows[1:])]
    # With a tiny trace nobody may have been there to be late.
    if not policies:
        return None
    drawn, panels = figure(1, 1, height=0.34 * len(rows) + 1.3)
    (axes,) = panels
    for name in policies:
        there = [(n, of[name]) for n, (_, of) in enumerate(rows) if of.get(name) is not None]
        axes.plot(
            [value for _, value in there],
            [number for number, _ in there],
            "o",
            color=colours(policies)[name],
            label=name,
            markersize=7,
            alpha=0.85,
        )
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_xlabel("evaluations whole in time")
    axes.legend(fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    return drawn


def _wholes(document: Document) -> Iterator[tuple[str, dict[str, float | None]]]:
    for name, of in document["disturbances"].items():
        if name in _SWEEPS:
            continue
        path, label = _WHOLE.get(name, (("whole_in_time",), name.replace("_", " ")))
        for variant in DISTURBANCES[name].variants:
            chosen = {p: f if variant == ONLY else f[variant] for p, f in of.items()}
            yield (
                label if variant == ONLY else f"{label} {variant}",
                {policy: value_at(figures, path) for policy, figures in chosen.items()},
            )


def _layers(document: Document) -> Figure | None:
    layers = list(document["ablation"])
    if not layers:
        return None
    large = name_of(document, 0)
    full = document["undisturbed"][SERVICE]
    drawn, panels = figure(1, 3, height=0.32 * len(layers) + 1.5, sharey=True)
    shown = (
        ("points of evaluations whole in time", [_points(document, layer) for layer in layers]),
        (
            f"{large}: latency p75, times as long",
            [
                _ratio(document["ablation"][layer], full, ("latency_s", large, "all", "p75"))
                for layer in layers
            ],
        ),
        (
            "model calls, times as many",
            [
                _ratio(document["ablation"][layer], full, ("funnel", "model_calls"))
                for layer in layers
            ],
        ),
    )
    for axes, (label, values) in zip(panels, shown, strict=True):
        axes.barh(layers, values, color=colours([SERVICE])[SERVICE])
        axes.bar_label(axes.containers[0], fmt="%.2g", padding=3, fontsize=8)  # type: ignore[arg-type]
        axes.set_xlabel(label, fontsize=9)
        axes.margins(x=0.15)
    for axes in panels[1:]:
        axes.axvline(1, color="black", linewidth=0.8)
    panels[0].axvline(0, color="black", linewidth=0.8)
    panels[0].invert_yaxis()
    return drawn


def _points(document: Document, layer: str) -> float:
    without = document["ablation"][layer]["whole_in_time"]
    return -100 * float(document["undisturbed"][SERVICE]["whole_in_time"] - without)


def _pools(document: Document) -> Figure | None:
    of = document["pool_scale"]
    if not of:
        return None
    large = name_of(document, 0)
    drawn, panels = figure(1, 2, height=4.0, sharex=True)
    for name, by_factor in of.items():
        figures = sorted(by_factor.values(), key=lambda f: f["replicas"])
        replicas = [f["replicas"] for f in figures]
        how: dict[str, Any] = {"color": colours(list(of))[name], "marker": "o", "label": name}
        panels[0].plot(replicas, [f["whole_in_time"] for f in figures], **how)
        panels[1].plot(replicas, _p75(figures, large), **how)
    for axes in panels:
        axes.set_xlabel("replicas of the pool")
        axes.axvline(document["replicas"], color="black", linestyle=":", linewidth=1)
    panels[0].set_ylabel("evaluations whole in time")
    shares_axis(panels[0])
    panels[1].set_ylabel(f"{large} latency p75, high priority")
    minutes_axis(panels[1])
    panels[0].legend(fontsize=8, loc="lower right")
    return drawn


def _hit_rates(document: Document) -> Figure | None:
    of = document["disturbances"].get("hit_rate")
    if not of:
        return None
    large = name_of(document, 0)
    variants = list(DISTURBANCES["hit_rate"].variants)
    drawn, panels = figure(1, 2, height=3.8)
    for name, by_variant in of.items():
        hits = [by_variant[variant]["hit_rate"] for variant in variants]
        how: dict[str, Any] = {"color": colours(list(of))[name], "marker": "o", "label": name}
        panels[0].plot(hits, [by_variant[v]["whole_in_time"] for v in variants], **how)
        panels[1].plot(hits, _p75([by_variant[variant] for variant in variants], large), **how)
    for axes in panels:
        axes.set_xlabel("requests answered without a call of their own")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    panels[0].set_ylabel("evaluations whole in time")
    shares_axis(panels[0])
    panels[1].set_ylabel(f"{large} latency p75, high priority")
    minutes_axis(panels[1])
    panels[0].legend(fontsize=8, loc="lower right")
    return drawn


def _p75(figures: Sequence[Mapping[str, Any]], rater: str) -> NDArray[np.float64]:
    """Return a rater's latency in minutes, for high priority."""
    return gaps(minutes([value_at(of, ("latency_s", rater, "all", "p75")) for of in figures]))


def _ratio(figures: Mapping[str, Any], full: Mapping[str, Any], path: tuple[str, ...]) -> float:
    part, whole = value_at(figures, path), value_at(full, path)
    return part / whole if part is not None and whole else nan


WHAT_IF: Final = (
    Plot(
        name="bad_days",
        title="Bad days: evaluations whole in time, by policy",
        text="Share of evaluations that are whole in time while something is wrong, beside that of "
        "the undisturbed run.",
        draw=_bad_days,
    ),
    Plot(
        name="layers",
        title=f"Each layer of {SERVICE} switched off: what is lost",
        text="What is lost without it: points of evaluations that are whole in time, latency, and "
        "model calls, each beside the full service (0, 1 and 1).",
        draw=_layers,
    ),
    Plot(
        name="pools",
        title="How many replicas: the same work on larger and smaller pools",
        text="Each rater keeps its share of the pool. Dotted: the pool as it is.",
        draw=_pools,
    ),
    Plot(
        name="hit_rates",
        title="What archive hits are worth: the same work with other shares of hits",
        text="Some hits became ratings that nobody else asks for, or some were always there.",
        draw=_hit_rates,
    ),
)
