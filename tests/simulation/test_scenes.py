from collections.abc import Callable

import numpy as np
import pytest

from airs_site.simulation import pools
from airs_site.simulation.cell import Cell, run_cell
from airs_site.simulation.engine import SIGNAL_PERIOD_S, Move, Options, World, simulate
from airs_site.simulation.generator import generate
from airs_site.simulation.policies.fifo import Fifo
from airs_site.simulation.policies.registry import make
from airs_site.simulation.rewriting import asked_before, measured, with_hits, with_repeats
from airs_site.simulation.scenes import ABLATIONS, DISTURBANCES, Scene, pool_of
from airs_site.simulation.trace import Workload, expand
from fulfillment.policy.priority import PriorityClass
from tests.simulation.small import evaluation, params, run, workload


@pytest.fixture(scope="module")
def few() -> Workload:
    """Some hours of a few evaluations, of all raters and both priorities."""
    rows = [
        evaluation(
            n, 300 * n, rater=("big", "tiny", "third")[n % 3], at_s=600.0 * n, low=n % 4 == 0
        )
        for n in range(12)
    ]
    return expand(params((3, 1, 2)), rows, scale=100)


@pytest.fixture(scope="module")
def generated() -> Workload:
    described = params((3, 1, 2))
    return expand(described, generate(described, 3), scale=8)


def run_scene(scene: Scene, policy: str = "airs") -> World:
    made = scene.policy() if scene.policy else make(policy, scene.setup)
    return simulate(scene.workload, made, scene.options)


@pytest.mark.parametrize(
    ("name", "variant"), [(name, v) for name, of in DISTURBANCES.items() for v in of.variants]
)
def test_each_disturbance_runs_and_is_looked_at(name: str, variant: str, few: Workload) -> None:
    cell = Cell(policy="airs", kind="disturbance", name=name, variant=variant)

    outcome = run_cell(cell, few, Options(days=1))

    assert any("whole" in key for key in outcome.figures)
    assert outcome.series is None


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_layer_can_be_switched_off(name: str, few: Workload) -> None:
    cell = Cell(policy="airs", kind="ablation", name=name)

    figures = run_cell(cell, few, Options(days=1)).figures

    assert figures["funnel"]["received_batches"] > 0
    assert 0 < figures["whole_in_time"] <= 1


def test_what_concerns_our_own_policies_is_not_asked_of_others() -> None:
    assert DISTURBANCES["planner_off"].policies(["paper", "fifo", "airs"]) == ["airs"]
    assert DISTURBANCES["window"].policies(["paper", "airs"]) == ["paper", "airs"]
    assert DISTURBANCES["window"].policies(["paper", "airs"], briefly=True) == ["airs"]
    assert DISTURBANCES["flood"].policies(["paper", "airs"], briefly=True) == ["paper", "airs"]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7])
def test_a_share_of_hits_is_set_and_nothing_else(share: float, generated: Workload) -> None:
    changed = with_hits(generated, share)

    within = measured(changed)
    assert asked_before(changed)[within].mean() == pytest.approx(share, abs=0.02)
    assert (changed.evaluations, len(changed.ids)) == (generated.evaluations, len(generated.ids))


def test_hits_are_set_within_a_time_only(generated: Workload) -> None:
    changed = with_hits(generated, 0.0, start_s=86_400.0)

    first_day = measured(generated, 0.0, 86_400.0)
    assert not asked_before(changed)[measured(changed, 86_400.0)].any()
    assert (asked_before(changed) == asked_before(generated))[first_day].all()


def test_ratings_that_were_always_stored_are_hits() -> None:
    everything = with_hits(workload(evaluation(1, 12)), 1.0)

    world = simulate(everything, make("fifo"), Options())

    assert (world.jobs[0].hits, world.counts.calls) == (12, 0)


def test_repeats_are_of_the_same_evaluation(generated: Workload) -> None:
    repeated = with_repeats(generated, 0.05)

    place = int(np.argmax(np.diff(generated.starts)))
    before, after = set(generated.requests(place).tolist()), repeated.requests(place).tolist()
    assert set(after) < before
    assert 1 - len(set(after)) / len(after) == pytest.approx(0.05, abs=0.03)


def test_a_scaled_pool_keeps_the_shares_of_raters() -> None:
    doubled, halved = (pools.scaled(params((8, 4, 2)), factor) for factor in (2, 0.5))

    assert [rater.default_replicas for rater in doubled.raters] == [16, 8, 4]
    assert [rater.default_replicas for rater in halved.raters] == [4, 2, 1]
    assert (doubled.replicas, halved.replicas) == (28, 7)
    assert [rater.min_replicas for rater in halved.raters] == [0, 0, 0]


def test_no_rater_is_without_a_replica_in_a_pool_that_is_scaled_down() -> None:
    tiny = pools.scaled(params((8, 1, 1)), 0.1)

    assert [rater.default_replicas for rater in tiny.raters] == [1, 1, 1]


def test_more_replicas_serve_sooner() -> None:
    one = workload(evaluation(1, 1200, rater="big"))

    worlds = [run_scene(pool_of(factor)(one, Options())) for factor in (1.0, 2.0)]

    assert worlds[1].jobs[0].last_s < worlds[0].jobs[0].last_s


def test_many_small_raters_share_the_replicas_of_the_few() -> None:
    described = params((5, 4, 3))
    rows = [evaluation(n, 12, rater="third", owner=f"u{n}") for n in range(50)]

    split, moved = pools.with_small_raters(described, rows, 10)

    small = [rater for rater in split.raters if rater.id.startswith("third.")]
    assert len(small) == 10
    assert sum(rater.default_replicas for rater in small) == 3
    assert {row.rater for row in moved} <= {rater.id for rater in small}
    assert len({row.rater for row in moved}) > 5


def test_raters_without_a_replica_get_one_when_they_are_asked() -> None:
    described = params((8, 4, 3))
    rows = [evaluation(n, 12, rater="third", owner=f"u{n}", at_s=4000.0 * n) for n in range(1, 5)]
    split, moved = pools.with_small_raters(described, rows, 4)

    world = simulate(expand(split, moved, scale=1), make("airs"), Options())

    assert all(not job.late for job in world.jobs)


def test_without_priorities_all_are_high_for_the_policy_but_not_for_the_figures() -> None:
    world = run("fifo", evaluation(1, 24), evaluation(2, 12, low=True), priorities=False)

    assert world.jobs[1].priority_class is PriorityClass.HIGH
    assert world.jobs[1].evaluation.low


class Mover(Fifo):
    """Moves a replica each minute."""

    def begin(self, world: World) -> None:
        super().begin(world)
        world.call_at(60.0, self._move)

    def _move(self) -> None:
        self.world.move([Move(donor=0, receiver=1)])
        self.world.call_at(self.world.now + 60.0, self._move)


def test_no_replica_moves_while_management_is_away() -> None:
    world = run(
        Mover(), evaluation(1, 12 * 200, rater="tiny"), management_away=(0.0, 200.0), days=1
    )

    # Two of three are moved after 200 s, the last one a minute later.
    assert world.counts.moves == 3
    assert run(Mover(), evaluation(1, 12), management_away=(0.0, 200.0)).counts.moves == 0


def first_move_s(signal_age_s: float) -> float:
    moves: list[float] = []

    class Watched(World):
        def move(self, moves_: object) -> None:
            if moves_:
                moves.append(self.now)

    # Far more than one replica does in its time.
    one = workload(evaluation(1, 3 * 300 * 12, at_s=50.0, deadline_s=3600.0))
    Watched(one, make("airs"), Options(signal_age_s=signal_age_s)).run(lambda share: None)
    return moves[0]


def test_rebalancing_learns_of_work_as_late_as_its_signal() -> None:
    assert first_move_s(0.0) == 60.0
    assert first_move_s(120.0) == 180.0
    assert first_move_s(300.0) == 360.0


@pytest.mark.parametrize("age_s", [30.0, 120.0])
def test_utilisation_is_known_as_late_as_its_signal(age_s: float) -> None:
    known: list[tuple[float, float]] = []

    class Watching(Fifo):
        def finished(self, batch: object) -> None:
            known.append((self.world.now, self.world.busy_until_now(1)))

    run(Watching(), evaluation(1, 12 * 40), signal_age_s=age_s)

    for now, busy_s in known[20:]:
        assert age_s <= now - busy_s <= age_s + SIGNAL_PERIOD_S


def test_a_wrong_signal_is_too_much_for_one_rater_and_too_little_for_the_next() -> None:
    world = run("fifo", evaluation(1, 12 * 10), signal_error=2.0)

    assert (world.signal_factor(0), world.signal_factor(1)) == (2.0, 0.5)
    assert world.busy_until_now(1) == pytest.approx(60.0)


def test_batches_that_poll_ask_more_than_once() -> None:
    off: Callable[[Workload, Options], Scene] = ABLATIONS["quota"]

    world = run_scene(off(workload(evaluation(1, 120)), Options()))

    assert world.jobs[0].computed == 120
    assert world.counts.attempts > 2 * world.counts.calls
    assert world.jobs[0].last_s > 120.0
