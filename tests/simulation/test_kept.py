"""Batches that stay as intake cut them. That they are what production does, parity tests show."""

from collections.abc import Sequence

import pytest

from airs_site.simulation.cuts import CutJob, State
from airs_site.simulation.engine import Loss, Options, Policy
from airs_site.simulation.generator import generate
from airs_site.simulation.kept import KeptWorld
from airs_site.simulation.policies.fifo import Fifo
from airs_site.simulation.policies.kept import KeptAirs
from airs_site.simulation.policies.polling import Polling
from airs_site.simulation.trace import Workload, expand
from airs_site.simulation.workload import Evaluation
from tests.simulation.small import ended_s, evaluation, params, workload


@pytest.fixture(scope="module")
def generated() -> Workload:
    described = params((3, 1, 2))
    return expand(described, generate(described, 3), scale=4)


def run(policy: Policy, of: Workload, **options: object) -> KeptWorld:
    world = KeptWorld(of, policy, Options(**options))  # type: ignore[arg-type]
    world.run(lambda share: None)
    return world


def fifo(
    *evaluations: Evaluation, replicas: Sequence[int] = (3, 1), **options: object
) -> KeptWorld:
    return run(Fifo(), workload(*evaluations, replicas=replicas), **options)


def test_a_batch_that_was_answered_in_part_is_not_filled_up() -> None:
    # Six ratings of the second's first batch were computed meanwhile: 7.5 s for six, 12 for twelve.
    first = evaluation(1, 18, mode="listed", ids=((0, 18),))
    second = evaluation(2, 24, mode="listed", ids=((12, 24),))

    world = fifo(first, second)

    assert world.counts.calls == 4
    assert ended_s(world) == [19.5, 39.0]
    assert [job.free for job in world.jobs] == [0, 6]


def test_what_is_in_flight_is_looked_for_when_it_has_landed() -> None:
    # The first takes 12 s. The second computes its own six in 7.5 s, then waits for the others.
    first = evaluation(1, 12, rater="big", mode="listed", ids=((0, 12),))
    second = evaluation(2, 12, rater="big", mode="listed", ids=((6, 12),))

    world = fifo(first, second)

    assert ended_s(world) == [12.0, 12.0]
    assert [(job.computed, job.free) for job in world.jobs] == [(12, 0), (6, 6)]


def test_what_waits_needs_a_place_to_be_looked_for() -> None:
    # Two replicas are taken when the rating that the third waits for is there.
    jobs = [
        evaluation(1, 12, mode="listed", ids=((0, 12),)),
        evaluation(2, 24, mode="listed", ids=((100, 24),)),
        evaluation(3, 12, mode="listed", ids=((0, 12),)),
    ]

    world = fifo(*jobs, window=2)

    assert ended_s(world) == [12.0, 36.0, 24.0]
    assert world.jobs[2].free == 12


def test_what_a_batch_under_way_waits_for_ends_with_it_after_the_deadline() -> None:
    first = evaluation(1, 12, rater="big", cost=3.0, mode="listed", ids=((0, 12),))
    second = evaluation(2, 12, rater="big", mode="listed", ids=((6, 12),), deadline_s=5.0)

    world = fifo(first, second)

    late = world.jobs[1]
    assert (late.computed, late.late, late.last_s) == (6, 6, 7.5)


def test_what_failed_for_good_a_moment_ago_is_not_computed_again() -> None:
    jobs = (
        evaluation(1, 12, permanent=1.0),
        evaluation(2, 12, experiment=1),
        evaluation(3, 12, experiment=1, at_s=800.0),
    )

    world = fifo(*jobs)

    assert [(job.failed, job.computed) for job in world.jobs] == [(12, 0), (12, 0), (0, 12)]


@pytest.mark.parametrize("losses", [(), (Loss(at_s=40_000.0, until_s=60_000.0, share=0.5),)])
@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("policy", [Fifo, KeptAirs, Polling])
def test_every_request_ends_once(
    policy: type[Policy], window: int, losses: Sequence[Loss], generated: Workload
) -> None:
    world = run(policy(), generated, window=window, losses=losses)

    assert len(world.jobs) == sum(e.at_s >= 0 for e in generated.evaluations)
    for job in world.jobs:
        ends = job.hits + job.free + job.computed + job.failed + job.late
        assert (job.has_ended, job.open, ends) == (True, 0, job.requests)
        assert isinstance(job, CutJob)
        assert {each.state for each in job.cuts} <= {State.DONE}
    assert sum(world.pool.held) == sum(world.unsent) == 0
    assert world.pool.room == [world.pool.window * ready for ready in world.pool.ready]
