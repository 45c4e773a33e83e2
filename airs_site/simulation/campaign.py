"""A whole simulation: every policy over every workload, then what else was asked of them."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final

from airs_site.simulation.bound import Bound, bound
from airs_site.simulation.cell import Cell, Outcome
from airs_site.simulation.cells import Cells
from airs_site.simulation.engine import Options
from airs_site.simulation.report import SERVICE, Result
from airs_site.simulation.scenes import DISTURBANCES, ONLY
from airs_site.simulation.trace import Workload

COMPARED: Final = ("paper", "fifo", "airs")
"""Policies that go through everything where only some do: the others say little more."""
LONG: Final = ("paper-tuned-1", "paper-tuned-2")
"""Policies that poll so often that they take several times as long as all others."""
AS_IT_IS: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is run on a workload."""

    policies: Sequence[str]
    disturbances: Sequence[str] = ()
    ablations: Sequence[str] = ()
    factors: Sequence[float] = ()
    """Of the pool's replicas."""
    briefly: bool = False
    """Only some policies go beyond the workload as it is, and those not of our own only through
    what all are compared by."""

    def cells(self) -> list[Cell]:
        """Return the cells, those that take longest rather early."""
        found = [Cell(policy=policy) for policy in self.policies]
        chosen = [p for p in self.policies if p in COMPARED or not self.briefly]
        found += [Cell(policy=SERVICE, kind="ablation", name=layer) for layer in self.ablations]
        found += [
            Cell(policy=policy, kind="disturbance", name=name, variant=variant)
            for name in self.disturbances
            for variant in DISTURBANCES[name].variants
            for policy in DISTURBANCES[name].policies(chosen, briefly=self.briefly)
        ]
        found += [
            Cell(policy=policy, kind="pool", variant=f"{factor:g}")
            for factor in self.factors
            # The pool as it is was looked at already.
            if factor != AS_IT_IS
            for policy in chosen
        ]
        return found


def plain(plan: Plan) -> Plan:
    """Return the plan for further workloads: as they are, and not under what runs for minutes."""
    return replace(
        plan,
        policies=[policy for policy in plan.policies if policy not in LONG],
        disturbances=(),
        ablations=(),
        factors=(),
    )


@dataclass(kw_only=True, slots=True)
class _Run:
    """What runs on one workload."""

    seed: int | None
    factors: Sequence[float]
    replicas: int
    limit: Bound
    futures: Mapping[Cell, "Future[Outcome]"] = field(default_factory=dict)


def simulate_all(
    workloads: Iterable[tuple[int | None, Workload]],
    plans: Sequence[Plan],
    options: Options,
    cells: Cells,
) -> list[Result]:
    """Run a plan on each workload, which are made one by one; the last plan is that of the rest."""
    runs = []
    for number, (seed, workload) in enumerate(workloads):
        plan = plans[min(number, len(plans) - 1)]
        seeded = replace(options, seed=seed or 0)
        futures = {cell: cells.take(cell, workload, seeded) for cell in plan.cells()}
        runs.append(
            _Run(
                seed=seed,
                factors=plan.factors,
                replicas=workload.params.replicas,
                limit=bound(workload, options.days),
                futures=futures,
            )
        )
    cells.finish()
    return [_result(run) for run in runs]


def _result(run: _Run) -> Result:
    outcomes = {cell: future.result() for cell, future in run.futures.items()}
    plain_ones = {cell.policy: of for cell, of in outcomes.items() if cell.kind == "policy"}
    disturbances: dict[str, dict[str, Any]] = {}
    for cell, outcome in outcomes.items():
        if cell.kind == "disturbance" and cell.variant == ONLY:
            disturbances.setdefault(cell.name, {})[cell.policy] = outcome.figures
        elif cell.kind == "disturbance":
            of = disturbances.setdefault(cell.name, {}).setdefault(cell.policy, {})
            of[cell.variant] = outcome.figures
    return Result(
        seed=run.seed,
        figures={policy: of.figures for policy, of in plain_ones.items()},
        bound=run.limit,
        series={policy: of.series for policy, of in plain_ones.items() if of.series is not None},
        disturbances=disturbances,
        ablation={
            cell.name: of.figures for cell, of in outcomes.items() if cell.kind == "ablation"
        },
        pool_scale=_pools(run, outcomes),
    )


def _pools(run: _Run, outcomes: Mapping[Cell, Outcome]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for policy in {cell.policy: None for cell in outcomes if cell.kind == "pool"}:
        of = found[policy] = {}
        for factor in run.factors:
            if factor == AS_IT_IS:
                as_it_is = outcomes[Cell(policy=policy)].figures
                of[f"{factor:g}"] = {**as_it_is, "replicas": run.replicas}
            else:
                cell = Cell(policy=policy, kind="pool", variant=f"{factor:g}")
                of[f"{factor:g}"] = outcomes[cell].figures
    return found
