"""One cell of a simulation: a policy over a workload, and its figures."""

from airs_site.simulation.engine import Options, simulate
from airs_site.simulation.metrics import Figures, measure
from airs_site.simulation.policies.airs import Airs
from airs_site.simulation.policies.registry import make
from airs_site.simulation.trace import Progress, Workload


def figures_of(
    workload: Workload, policy: str, options: Options, progress: Progress = lambda share: None
) -> Figures:
    """Run the policy of that name and measure it."""
    made = make(policy)
    world = simulate(workload, made, options, progress=progress)
    return measure(world, made.expected if isinstance(made, Airs) else None)
