"""The days hour by hour: how busy, how much, how full, how long."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from airs_site.simulation.plots.style import (
    Document,
    Plot,
    colours,
    days_axis,
    figure,
    gaps,
    hours_of,
    main_policies,
    minutes,
    minutes_axis,
    name_of,
    shares_axis,
)

_PANEL: Final = 1.7
"""Inches a panel of one policy is high."""
_MANY: Final = 1.1
"""Attempts a call from which on they are shown."""
_LEAST_RATE: Final = 1.0
"""Batches a second below which an hour is not looked at."""
_FEW: Final = 3
"""Policies where lines cross much."""
_FUNNEL: Final[Mapping[str, tuple[str, str, str]]] = {
    "attempts": ("attempts_per_s", "attempts", "#D62728"),
    "received_batches": ("received_per_s", "received", "#7F7F7F"),
    "after_archive": ("after_archive_per_s", "after the archive", "#E6A817"),
    "model_calls": ("calls_per_s", "model calls", "#1F77B4"),
}


def _duty(document: Document) -> Figure | None:
    policies = main_policies(document)
    drawn, panels = figure(
        len(policies), 1, height=_PANEL * len(policies) + 0.8, sharex=True, sharey=True
    )
    for name, axes in zip(policies, panels, strict=True):
        duty, series = document["policies"][name]["duty"], document["series"][name]
        axes.fill_between(
            _hours(document), series["duty"], step="post", color=colours(policies)[name], alpha=0.8
        )
        axes.axhline(duty["mean"], color="black", linewidth=0.8, linestyle="--")
        axes.set_title(
            f"{name}: mean {100 * duty['mean']:.0f} %, busiest hour "
            f"{100 * duty['peak_hour']:.0f} %",
            fontsize=10,
            loc="left",
        )
        axes.set_ylim(0, 1)
        axes.set_ylabel("computing")
        shares_axis(axes)
        days_axis(axes, document, label=axes is panels[-1])
    return drawn


def _funnel(document: Document) -> Figure | None:
    policies = main_policies(document)
    drawn, panels = figure(
        len(policies), 1, height=(_PANEL + 0.4) * len(policies) + 0.8, sharex=True, sharey=True
    )
    for name, axes in zip(policies, panels, strict=True):
        series, ratios = document["series"][name], document["policies"][name]["peak_to_mean"]
        for step, (key, label, colour) in _FUNNEL.items():
            if step == "attempts" and document["policies"][name]["amplification"] < _MANY:
                continue
            ratio = f", peak {ratios[step]:.1f} x mean" if step in ratios else ""
            axes.plot(
                _hours(document),
                # A rate of nothing has no place on a logarithmic axis.
                gaps([value or None for value in series[key]]),
                color=colour,
                label=f"{label}{ratio}",
                linewidth=1.3,
            )
        axes.set_yscale("log")
        axes.set_ylabel("batches / s")
        axes.set_title(name, fontsize=10, loc="left")
        axes.legend(
            fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 0.98), frameon=False
        )
        days_axis(axes, document, label=axes is panels[-1])
    # All panels share it: it must have seen all of them.
    panels[0].set_ylim(bottom=_LEAST_RATE)
    return drawn


def _hits(document: Document) -> Figure | None:
    policies = main_policies(document)
    drawn, panels = figure(2, 1, height=5.4, sharex=True, height_ratios=[2, 1])
    for name in policies:
        panels[0].plot(
            _hours(document),
            gaps(document["series"][name]["hit_rate"]),
            color=colours(policies)[name],
            label=f"{name}: {100 * document['policies'][name]['hit_rate']:.1f} % of all",
            linewidth=1.3,
        )
    published = document["published"].get("hit_rate")
    if published is not None:
        panels[0].axhline(published, color="black", linestyle=":", linewidth=1)
        panels[0].annotate(
            f"published: {100 * published:.0f} %",
            (hours_of(document), published),
            textcoords="offset points",
            xytext=(-4, 0),
            fontsize=8,
            ha="right",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    panels[0].set_ylabel("archive hits")
    panels[0].set_ylim(0, 1)
    shares_axis(panels[0])
    panels[0].legend(fontsize=8, ncols=2, loc="upper right")
    days_axis(panels[0], document, label=False)
    received = document["series"][policies[0]]["received_per_s"]
    panels[1].fill_between(_hours(document), received, step="post", color="#7F7F7F")
    panels[1].set_ylabel("received,\nbatches / s")
    days_axis(panels[1], document)
    return drawn


def _by_hour(document: Document) -> Figure | None:
    policies = main_policies(document)[:_FEW]
    groups = [name_of(document, 0), name_of(document, 1)]
    drawn, panels = figure(2, 2, height=6.4, sharex=True, height_ratios=[3, 2])
    for column, group in enumerate(groups):
        above, below = panels[column], panels[2 + column]
        for name in policies:
            series, colour = document["series"][name], colours(policies)[name]
            took = minutes(series["latency_s"][group]["p75"])
            # Hours without a submission are passed over, so that a line does not fall apart.
            there = [hour for hour, value in enumerate(took) if value is not None]
            above.plot(
                there,
                [took[hour] or 0.0 for hour in there],
                color=colour,
                label=name,
                linewidth=1.2,
                marker=".",
                markersize=3,
            )
            below.step(
                _hours(document),
                series["replicas"][group],
                where="post",
                color=colour,
                linewidth=1.2,
            )
        deadline = document["series"][policies[0]]["deadline_s"][group] / 60
        above.axhline(deadline, color="black", linestyle=":", linewidth=1)
        above.annotate(
            "deadline",
            (0.2, deadline),
            textcoords="offset points",
            xytext=(2, -10),
            fontsize=8,
        )
        minutes_axis(above)
        above.set_title(f"{group}: p75 of what is submitted in the hour", fontsize=10, loc="left")
        below.set_title(f"{group}: replicas that serve", fontsize=10, loc="left")
        days_axis(above, document, label=False)
        days_axis(below, document)
    panels[0].set_ylabel("latency")
    panels[2].set_ylabel("replicas")
    drawn.legend(
        *panels[0].get_legend_handles_labels(), fontsize=9, ncols=_FEW, loc="outside upper right"
    )
    return drawn


def _queue(document: Document) -> Figure | None:
    policies = main_policies(document)
    drawn, panels = figure(1, 1, height=4.2)
    (axes,) = panels
    for name in policies:
        waiting = document["series"][name]["waiting"].values()
        axes.plot(
            _hours(document),
            np.sum([list(values) for values in waiting], axis=0),
            color=colours(policies)[name],
            label=name,
            linewidth=1.3,
        )
    axes.set_yscale("symlog", linthresh=10_000)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("batches that wait at the hour")
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    days_axis(axes, document)
    return drawn


def _hours(document: Document) -> Sequence[int]:
    return range(hours_of(document))


DAYS: Final = (
    Plot(
        name="duty",
        title="Duty cycle over the days: how much of the pool computes",
        text="Share of the pool that computes, hour by hour. Dashed: the mean.",
        draw=_duty,
    ),
    Plot(
        name="funnel",
        title="The funnel: batches received, left by the archive, sent to models",
        text="Batches a second at full size, hour by hour, on a logarithmic axis. What is received "
        "peaks with people; what is computed follows the pool. Attempts are shown where a batch "
        "asks more than once.",
        draw=_funnel,
    ),
    Plot(
        name="hits",
        title="Archive hits by the hour of submission",
        text="Share of requests answered without a call of their own, by the hour in which they "
        "were submitted, and how much was submitted.",
        draw=_hits,
    ),
    Plot(
        name="by_hour",
        title="Latency and replicas of the two largest raters by hour",
        text="75th percentile of the evaluations submitted in an hour; a late one counts with its "
        "deadline. Below: replicas that serve the rater at the start of the hour.",
        draw=_by_hour,
    ),
    Plot(
        name="queue",
        title="Queue depth over time, all raters",
        text="Batches of all raters that wait to be sent, at full size; linear up to 10,000, "
        "logarithmic above.",
        draw=_queue,
    ),
)
