"""Plots of a simulation's document, each a function of it; they need matplotlib.

`style` has what all share, `days` a week hour by hour, `spreads` distributions, `what_if` bad days,
layers and pools. `PLOTS` lists them in the order of the page.
"""

from airs_site.simulation.plots.days import DAYS
from airs_site.simulation.plots.spreads import SPREADS
from airs_site.simulation.plots.style import Plot
from airs_site.simulation.plots.what_if import WHAT_IF

PLOTS: tuple[Plot, ...] = (*DAYS, *SPREADS, *WHAT_IF)

__all__ = ["PLOTS", "Plot"]
