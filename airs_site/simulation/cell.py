"""One cell of a simulation: a policy over a workload, and its figures."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from airs_site.simulation import disturbances
from airs_site.simulation.engine import Options, simulate
from airs_site.simulation.metrics import Figures, measure
from airs_site.simulation.policies.airs import Airs
from airs_site.simulation.policies.registry import make
from airs_site.simulation.trace import Progress, Workload, expand
from airs_site.simulation.workload import Evaluation

DISTURBANCES: Final = ("pool_loss", "flood", "wrong_costs")


def _silent(_: float) -> None:
    """Tell nobody."""


def figures_of(
    workload: Workload, policy: str, options: Options, progress: Progress = _silent
) -> Figures:
    """Run the policy of that name and measure it."""
    made = make(policy)
    world = simulate(workload, made, options, progress=progress)
    return measure(world, made.expected if isinstance(made, Airs) else None)


def disturbed(
    name: str,
    workload: Workload,
    policies: Sequence[str],
    options: Options,
    progress: Progress = _silent,
) -> dict[str, dict[str, Any]]:
    """Run policies through one of the DISTURBANCES; return their figures, by policy."""
    params = workload.params
    if name == "pool_loss":
        options = replace(options, losses=(disturbances.pool_loss(params),))
    elif name == "flood":
        workload = _again(workload, disturbances.flood(params, workload.evaluations))
    else:
        workload = _again(workload, disturbances.wrong_costs(workload.evaluations))
    found: dict[str, dict[str, Any]] = {}
    for policy in policies:
        if name == "flood":
            world = simulate(workload, make(policy), options, progress=progress)
            found[policy] = asdict(disturbances.others(world))
        else:
            found[policy] = asdict(figures_of(workload, policy, options, progress))
    return found


def _again(workload: Workload, evaluations: Sequence[Evaluation]) -> Workload:
    return expand(workload.params, evaluations, scale=workload.scale)
