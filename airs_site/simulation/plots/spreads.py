"""Distributions over evaluations: how long they take, and how much of them fails."""

from typing import Final

import numpy as np
from matplotlib.figure import Figure

from airs_site.simulation.plots.style import (
    Document,
    Plot,
    colours,
    figure,
    gaps,
    minutes,
    minutes_axis,
    shares_axis,
)

_CLASSES: Final = ("high", "low")
_SHORTEST_MIN: Final = 0.5


def _latency(document: Document) -> Figure | None:
    policies = list(document["series"])
    first = document["series"][policies[0]]
    groups = [name for name, of in first["latency_quantiles_s"].items() if any(of.values())]
    drawn, panels = figure(len(groups), 2, height=2.7 * len(groups) + 0.6, sharey=True, sharex=True)
    for row, group in enumerate(groups):
        for column, priority in enumerate(_CLASSES):
            axes = panels[2 * row + column]
            for name in policies:
                took = document["series"][name]["latency_quantiles_s"][group][priority]
                if took:
                    axes.plot(
                        gaps(minutes(took)),
                        np.linspace(0, 1, len(took)),
                        color=colours(policies)[name],
                        label=name,
                        linewidth=1.5,
                    )
            deadline = first["deadline_s"][group] / 60
            axes.axvline(deadline, color="black", linestyle=":", linewidth=1)
            axes.text(deadline, 0.02, " deadline", fontsize=8, ha="right", rotation=90)
            minutes_axis(axes, "x")
            shares_axis(axes)
            axes.set_title(f"{group}, {priority} priority", fontsize=10, loc="left")
            axes.tick_params(axis="x", labelsize=8)
    # All panels share it: it must have seen all of them.
    panels[0].set_xlim(left=_SHORTEST_MIN)
    for axes in panels[-2:]:
        axes.set_xlabel("latency, from submission to the last rating")
    for axes in panels[::2]:
        axes.set_ylabel("evaluations done")
    panels[0].legend(fontsize=8, loc="upper left")
    return drawn


def _failures(document: Document) -> Figure | None:
    policies = list(document["series"])
    drawn, panels = figure(1, 2, height=4.4, sharey=True, sharex=True)
    for axes, key, title in zip(
        panels,
        ("failure_quantiles", "capacity_failure_quantiles"),
        ("all failures", "failures of capacity"),
        strict=True,
    ):
        for name in policies:
            failed = document["series"][name][key]
            axes.plot(
                np.linspace(0, 100, len(failed)),
                failed,
                color=colours(policies)[name],
                label=name,
                linewidth=1.5,
            )
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("percentile of evaluations, the worst to the right")
        axes.set_xlim(48, 100)
    published = document["published"].get("failure", {})
    panels[0].plot(
        [float(name.removeprefix("p")) for name in published],
        list(published.values()),
        "kx",
        label="published",
    )
    panels[0].set_ylabel("requests without a rating in time")
    panels[0].set_yscale("symlog", linthresh=0.01)
    panels[0].set_yticks([0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1])
    panels[0].set_ylim(0, 1.05)
    shares_axis(panels[0])
    panels[0].legend(fontsize=8, loc="upper left")
    return drawn


SPREADS: Final = (
    Plot(
        name="latency",
        title="Latency of evaluations by rater and class",
        text="Share of evaluations that were done within a time (a late one counts with its "
        "deadline). Dotted: the shortest deadline of these raters.",
        draw=_latency,
    ),
    Plot(
        name="failures",
        title="Failure quantiles over evaluations",
        text="Share of an evaluation's requests that got no rating in time, over evaluations from "
        "the median to the worst; linear up to 1 %, logarithmic above. Left with what fails for "
        "good under any policy, right without. Crosses: published.",
        draw=_failures,
    ),
)
