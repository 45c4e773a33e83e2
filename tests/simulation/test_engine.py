from collections.abc import Callable

import pytest

from airs_site.simulation.engine import Loss, Options, World, simulate
from airs_site.simulation.generator import generate
from airs_site.simulation.policies.fifo import Fifo
from airs_site.simulation.policies.registry import POLICIES, make
from airs_site.simulation.pool import State
from airs_site.simulation.trace import Workload, expand
from airs_site.simulation.work import Layers
from tests.simulation.small import ended_s, evaluation, params, run


@pytest.fixture(scope="module")
def generated() -> Workload:
    described = params((3, 1, 2))
    return expand(described, generate(described, 3), scale=4)


class Watched(Fifo):
    """Checks, whenever something ends, what must hold of the pool at any time."""

    def changed(self, job: object) -> None:
        pool = self.world.pool
        assert pool.size + sum(r.state is State.GONE for r in pool.replicas) == len(pool.replicas)
        for rater in range(len(self.world.raters)):
            mine = [r for r in pool.replicas if r.rater == rater and r.state is not State.GONE]
            ready = [r for r in mine if r.state is State.READY]
            assert pool.ready[rater] == len(ready)
            assert pool.held[rater] == sum(r.held for r in mine)
            assert pool.running[rater] == sum(r.running is not None for r in mine)
            assert pool.room[rater] == sum(pool.window - r.held for r in ready)
            assert all(r.held <= pool.window for r in mine)


def test_batches_of_one_replica_follow_each_other() -> None:
    world = run("fifo", evaluation(1, 24), evaluation(2, 4))

    assert ended_s(world) == [24.0, 30.0]
    assert world.counts.calls == 3


def test_batches_of_several_replicas_run_side_by_side() -> None:
    world = run("fifo", evaluation(1, 36, rater="big"))

    assert ended_s(world) == [12.0]


def test_the_true_cost_of_an_evaluation_stretches_its_batches() -> None:
    world = run("fifo", evaluation(1, 12, cost=1.5))

    assert ended_s(world) == [18.0]


def test_what_was_rated_before_is_a_hit() -> None:
    world = run("fifo", evaluation(1, 12), evaluation(2, 24, experiment=1, at_s=100.0))

    second = world.jobs[1]
    assert (second.hits, second.computed, second.last_s) == (12, 12, 112.0)


def test_rows_before_the_first_day_only_fill_the_archive() -> None:
    world = run("fifo", evaluation(1, 12, at_s=-50.0), evaluation(2, 12, experiment=1))

    assert [(job.hits, job.last_s) for job in world.jobs] == [(12, 0.0)]
    assert world.counts.calls == 0


def test_equal_ratings_are_computed_once_at_a_time() -> None:
    twice = (evaluation(1, 12, rater="big"), evaluation(2, 12, rater="big", experiment=1))

    world = run("fifo", *twice)
    alone = run("fifo", *twice, layers=Layers(single_flight=False))

    assert ended_s(world) == [12.0, 12.0]
    assert [job.free for job in world.jobs] == [0, 12]
    assert (world.counts.calls, alone.counts.calls) == (1, 2)


def test_a_second_look_finds_what_was_rated_while_a_job_waited() -> None:
    jobs = (evaluation(1, 12), evaluation(2, 12, experiment=1))
    layers = Layers(single_flight=False)

    world = run("fifo", *jobs, layers=layers)
    blind = run("fifo", *jobs, layers=Layers(single_flight=False, second_look=False))

    assert [world.jobs[1].free, blind.jobs[1].free] == [12, 0]
    assert [world.counts.calls, blind.counts.calls] == [1, 2]


def test_without_an_archive_everything_is_computed_again() -> None:
    jobs = (evaluation(1, 12), evaluation(2, 12, experiment=1, at_s=100.0))

    world = run("fifo", *jobs, layers=Layers(archive=False))

    assert [job.computed for job in world.jobs] == [12, 12]


def test_what_started_before_the_deadline_may_end_and_the_rest_is_late() -> None:
    world = run("fifo", evaluation(1, 36, deadline_s=20.0))

    (job,) = world.jobs
    assert (job.computed, job.late, job.last_s) == (24, 12, 24.0)


def test_waiting_for_another_flight_does_not_outlast_the_deadline() -> None:
    first = evaluation(1, 12, rater="big")
    waits = evaluation(2, 12, rater="big", experiment=1, deadline_s=5.0)

    world = run("fifo", first, waits)

    assert [(job.computed + job.free, job.late) for job in world.jobs] == [(12, 0), (0, 12)]


def test_what_fails_for_good_fails_for_all_that_wait_and_is_not_archived() -> None:
    jobs = (
        evaluation(1, 12, rater="big", permanent=1.0),
        evaluation(2, 12, rater="big", experiment=1),
        evaluation(3, 12, rater="big", experiment=1, at_s=50.0),
    )

    world = run("fifo", *jobs)

    assert [(job.failed, job.computed) for job in world.jobs] == [(12, 0), (12, 0), (0, 12)]


def test_a_lost_replica_gives_its_batches_back() -> None:
    loss = Loss(at_s=6.0, until_s=100.0, share=1.0)

    world = run("fifo", evaluation(1, 12), losses=(loss,), start_up_s=240.0)

    (job,) = world.jobs
    assert (job.computed, job.last_s, world.counts.lost) == (12, 352.0, 1)


def test_a_replica_computes_one_batch_and_holds_a_window() -> None:
    world = run(Watched(), evaluation(1, 60), evaluation(2, 60, rater="big"), window=4)

    assert [job.last_s for job in world.jobs] == [60.0, 24.0]


@pytest.mark.parametrize("days", [1, 2])
def test_days_after_the_last_are_left_out(days: int) -> None:
    jobs = (evaluation(1, 12), evaluation(2, 12, at_s=90_000.0))

    assert len(run("fifo", *jobs, days=days).jobs) == days


@pytest.mark.parametrize("losses", [(), (Loss(at_s=40_000.0, until_s=60_000.0, share=0.5),)])
@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_once(name: str, losses: tuple[Loss, ...], generated: Workload) -> None:
    world = simulate(generated, make(name), Options(losses=losses))

    assert len(world.jobs) == sum(e.at_s >= 0 for e in generated.evaluations)
    for job in world.jobs:
        ends = job.hits + job.free + job.computed + job.failed + job.late
        assert (job.has_ended, job.open, ends) == (True, 0, job.requests)
    assert sum(world.pool.held) == 0
    assert world.pool.size == len(world.pool.replicas)


@pytest.mark.parametrize("window", [1, 3])
def test_the_pool_counts_what_it_has(window: int, generated: Workload) -> None:
    loss = Loss(at_s=40_000.0, until_s=60_000.0, share=0.5)

    world = simulate(generated, Watched(), Options(window=window, losses=(loss,)))

    assert world.counts.moves > 0


@pytest.mark.parametrize("name", POLICIES)
def test_two_runs_of_one_seed_are_the_same(
    name: str, generated: Workload, outcome: Callable[[World], object]
) -> None:
    first, second = (simulate(generated, make(name), Options(seed=5)) for _ in range(2))

    assert outcome(first) == outcome(second)


@pytest.fixture
def outcome() -> Callable[[World], object]:
    return lambda world: (
        [(j.last_s, j.computed, j.free, j.late) for j in world.jobs]
        + [
            world.counts.attempts,
            world.counts.events,
        ]
    )
