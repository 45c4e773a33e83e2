"""What policies are run through besides the workload as it is, by name.

A scene is a workload, options, and what is looked at besides the usual figures. Disturbances and
sweeps have one or several variants; ablations switch off one layer of the service's own policy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from airs_site.simulation import disturbances, pools
from airs_site.simulation.engine import Options, Policy, World
from airs_site.simulation.policies.polling import Polling
from airs_site.simulation.policies.registry import OWN
from airs_site.simulation.rewriting import with_hits, with_repeats
from airs_site.simulation.trace import Workload, expand
from airs_site.simulation.work import Layers
from airs_site.simulation.workload import Evaluation, Params

HITS: Final = (0.0, 0.2, 0.4, 0.6)
REPEATS: Final = 0.05
SMALL_RATERS: Final = 300
WINDOWS: Final = (4, 16)
SIGNAL_AGES_S: Final = (30, 120, 300)
SIGNAL_ERROR: Final = 2.0
ONLY: Final = ""
"""The name of the variant where there is only one."""


def _nothing(_: World) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a policy is run on, and what is then looked at."""

    workload: Workload
    options: Options
    setup: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the setup of our own policies."""
    policy: Callable[[], Policy] | None = None
    """Instead of the one that is asked for."""
    look: Callable[[World], Mapping[str, Any]] = _nothing
    usual_figures: bool = True
    """Whether the usual figures say anything about it."""


Make = Callable[[Workload, Options], Scene]


@dataclass(frozen=True, kw_only=True, slots=True)
class Set:
    """A disturbance or a sweep, as it is named and shown."""

    title: str
    variants: Mapping[str, Make]
    own_only: bool = False
    """Whether it is one of our own policies' parts that is disturbed."""
    compared: bool = False
    """Whether it is a test that policies are compared by, rather than one of our own."""

    def policies(self, names: Sequence[str], *, briefly: bool = False) -> list[str]:
        """Return those of the policies that it concerns; briefly, only where they are compared."""
        own = self.own_only or (briefly and not self.compared)
        return [name for name in names if name in OWN or not own]


def _with_options(look: Callable[[World], Mapping[str, Any]] = _nothing, **changes: Any) -> Make:
    return lambda workload, options: Scene(
        workload=workload, options=replace(options, **changes), look=look
    )


def _with_setup(**changes: Any) -> Make:
    return lambda workload, options: Scene(workload=workload, options=options, setup=changes)


def _pool_loss(workload: Workload, options: Options) -> Scene:
    losses = (disturbances.pool_loss(workload.params),)
    return Scene(
        workload=workload,
        options=replace(options, losses=losses),
        look=disturbances.that_day,
    )


def _flood(workload: Workload, options: Options) -> Scene:
    return Scene(
        workload=_of(workload, disturbances.flood(workload.params, workload.evaluations)),
        options=options,
        look=lambda world: asdict(disturbances.others(world)),
        usual_figures=False,
    )


def _wrong_costs(workload: Workload, options: Options) -> Scene:
    return Scene(
        workload=_of(workload, disturbances.wrong_costs(workload.evaluations)), options=options
    )


def _overload(workload: Workload, options: Options) -> Scene:
    days = min(options.days or workload.params.days, workload.params.days)
    start_s, end_s = disturbances.overload_s(days)
    doubled = _of(workload, disturbances.twice(workload.evaluations, start_s, end_s))
    return Scene(
        workload=with_hits(doubled, disturbances.OVERLOAD_HITS, start_s=start_s, end_s=end_s),
        options=options,
        look=disturbances.recovery,
    )


def _management_away(workload: Workload, options: Options) -> Scene:
    away = disturbances.management_away(workload.params)
    return Scene(
        workload=workload,
        options=replace(options, management_away=away),
        look=disturbances.while_away,
    )


def _hits(share: float) -> Make:
    return lambda workload, options: Scene(workload=with_hits(workload, share), options=options)


def _repeats(workload: Workload, options: Options) -> Scene:
    return Scene(workload=with_repeats(workload, REPEATS), options=options)


def _small_raters(workload: Workload, options: Options) -> Scene:
    params, rows = pools.with_small_raters(workload.params, workload.evaluations, SMALL_RATERS)
    return Scene(workload=_of(workload, rows, params), options=options)


def pool_of(factor: float) -> Make:
    """Return the scene of a pool with so many times the replicas."""
    return lambda workload, options: Scene(
        workload=replace(workload, params=pools.scaled(workload.params, factor)),
        options=options,
        look=lambda world: {"replicas": len(world.pool.replicas)},
    )


def _of(workload: Workload, rows: Sequence[Evaluation], params: Params | None = None) -> Workload:
    return expand(params or workload.params, rows, scale=workload.scale)


DISTURBANCES: Final[Mapping[str, Set]] = {
    "pool_loss": Set(
        title="a third of the pool is lost for three hours",
        variants={ONLY: _pool_loss},
        compared=True,
    ),
    "flood": Set(title="one owner floods a rater", variants={ONLY: _flood}, compared=True),
    "overload": Set(
        title="twice the load at 10 % hits for three days",
        variants={ONLY: _overload},
        compared=True,
    ),
    "wrong_costs": Set(
        title="evaluations cost 0.4 or 1.6 times their rater's",
        variants={ONLY: _wrong_costs},
        compared=True,
    ),
    "planner_off": Set(
        title="the planner is wrong about what a batch takes",
        variants={f"x{error:g}": _with_setup(cost_error=error) for error in (0.5, 2.0)},
        own_only=True,
    ),
    "stale_signal": Set(
        title="rebalancing knows late, or wrongly, what raters do",
        variants={
            **{f"{age} s": _with_options(signal_age_s=float(age)) for age in SIGNAL_AGES_S},
            "wrong": _with_options(signal_error=SIGNAL_ERROR),
        },
    ),
    "management_away": Set(
        title="model management is away for the busiest hour", variants={ONLY: _management_away}
    ),
    "hit_rate": Set(
        title="another share of archive hits",
        variants={f"{100 * share:.0f} %": _hits(share) for share in HITS},
        compared=True,
    ),
    "repeats": Set(
        title="5 % of requests repeat one of their evaluation", variants={ONLY: _repeats}
    ),
    "small_raters": Set(
        title="300 small raters instead of those there are",
        variants={ONLY: _small_raters},
        own_only=True,
    ),
    "window": Set(
        title="replicas hold more batches than one",
        variants={str(held): _with_options(window=held) for held in WINDOWS},
    ),
}

ABLATIONS: Final[Mapping[str, Make]] = {
    "archive": _with_options(layers=Layers(archive=False)),
    "second look": _with_options(layers=Layers(second_look=False)),
    "coalescing": _with_options(layers=Layers(single_flight=False)),
    "batching": _with_options(batch=1),
    "quota": lambda workload, options: Scene(workload=workload, options=options, policy=Polling),
    "priorities": _with_options(priorities=False),
    "pressing deadlines": _with_setup(presses=False),
    "fair shares": _with_setup(fair=False),
    "commitments": _with_setup(commits=False),
    "rebalancing": _with_setup(rebalances=False),
    "scale to zero": _with_setup(to_zero=False),
}
"""Parts of the service, each switched off."""
