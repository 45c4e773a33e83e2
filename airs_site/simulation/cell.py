"""One cell of a simulation: a policy over a workload, as it is or disturbed, and its figures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from airs_site.simulation.engine import Options, Policy, World, simulate
from airs_site.simulation.metrics import Figures, measure
from airs_site.simulation.policies.airs import Airs
from airs_site.simulation.policies.registry import make
from airs_site.simulation.scenes import ABLATIONS, DISTURBANCES, ONLY, Scene, pool_of
from airs_site.simulation.series import Series, series_of
from airs_site.simulation.trace import Progress, Workload

Kind = Literal["policy", "disturbance", "ablation", "pool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What is run."""

    policy: str
    kind: Kind = "policy"
    name: str = ""
    """Of the disturbance or of the layer that is switched off."""
    variant: str = ONLY
    """Of the disturbance, or the factor of a pool."""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.variant, self.policy)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out."""

    figures: Mapping[str, Any]
    """Those of `Figures` and of the disturbance."""
    series: Series | None = None
    """Of a workload as it is."""


def _silent(_: float) -> None:
    """Tell nobody."""


def figures_of(
    workload: Workload, policy: str, options: Options, progress: Progress = _silent
) -> Figures:
    """Run the policy of that name and measure it."""
    made = make(policy)
    return _figures(simulate(workload, made, options, progress=progress), made)


def run_cell(
    cell: Cell, workload: Workload, options: Options, progress: Progress = _silent
) -> Outcome:
    """Run one cell and measure it."""
    scene = _scene(cell, workload, options)
    policy = scene.policy() if scene.policy else make(cell.policy, scene.setup)
    world = simulate(scene.workload, policy, scene.options, progress=progress)
    usual = asdict(_figures(world, policy)) if scene.usual_figures else {}
    return Outcome(
        figures={**usual, **scene.look(world)},
        series=series_of(world) if cell.kind == "policy" else None,
    )


def _scene(cell: Cell, workload: Workload, options: Options) -> Scene:
    if cell.kind == "disturbance":
        return DISTURBANCES[cell.name].variants[cell.variant](workload, options)
    if cell.kind == "ablation":
        return ABLATIONS[cell.name](workload, options)
    if cell.kind == "pool":
        return pool_of(float(cell.variant))(workload, options)
    return Scene(workload=workload, options=options)


def _figures(world: World, policy: Policy) -> Figures:
    return measure(world, policy.expected if isinstance(policy, Airs) else None)
