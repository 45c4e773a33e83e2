import pytest

from airs_site.simulation.errors import UnknownPolicy
from airs_site.simulation.policies.airs import Airs, Setup
from airs_site.simulation.policies.paper import Paper, Tuning
from airs_site.simulation.policies.registry import make
from fulfillment.policy.priority import PriorityClass
from tests.simulation.small import ended_s, evaluation, run


def test_an_unknown_policy_is_named_beside_those_there_are() -> None:
    with pytest.raises(UnknownPolicy, match=r"no policy 'lifo'; there are paper, .*airs"):
        make("lifo")


def test_fifo_serves_high_priority_first_and_each_in_its_order() -> None:
    jobs = (evaluation(1, 24), evaluation(2, 12, low=True), evaluation(3, 12))

    assert ended_s(run("fifo", *jobs)) == [24.0, 48.0, 36.0]


def test_short_work_of_others_is_served_before_a_backlog() -> None:
    jobs = (evaluation(1, 240, owner="ann"), evaluation(2, 12, owner="bob", at_s=1.0))

    # After the batch that is computed when it comes.
    assert ended_s(run("airs", *jobs))[1] == 24.0


def test_low_priority_gets_its_floor_beside_a_backlog() -> None:
    jobs = (evaluation(1, 1200), evaluation(2, 24, owner="bob", low=True))

    low = run("airs", *jobs).jobs[1]

    # The first dispatch finds no low priority. A credit of 0.25 a dispatch is full at the 4th.
    assert low.last_s == (1 + 2 * 4) * 12.0


def test_what_does_not_fit_is_best_effort_and_no_forecast_is_given_for_it() -> None:
    policy = Airs(Setup(rebalances=False))
    jobs = (evaluation(1, 6000, deadline_s=600.0), evaluation(2, 120, at_s=1.0, deadline_s=600.0))

    world = run(policy, *jobs)

    assert policy.expected == {0: False, 1: True}
    assert [job.late > 0 for job in world.jobs] == [True, False]


def test_replicas_follow_the_pressure_of_deadlines() -> None:
    # Three times what one replica can do in its time.
    tight = evaluation(1, 3 * 300 * 12, deadline_s=3600.0)

    alone = run(Airs(Setup(rebalances=False)), tight)
    moved = run("airs", tight)

    assert alone.jobs[0].late > 0
    assert (moved.jobs[0].late, moved.counts.moves) == (0, 3)


def test_replicas_stay_at_the_minimum_unless_they_may_go_to_zero() -> None:
    tight = evaluation(1, 3 * 300 * 12, deadline_s=3600.0)

    world = run(Airs(Setup(to_zero=False)), tight)

    assert world.counts.moves == 2


def test_a_planner_that_is_off_asks_for_too_few() -> None:
    tight = evaluation(1, 2 * 300 * 12, deadline_s=3600.0)

    assert run(Airs(Setup(cost_error=0.1)), tight).counts.moves < run("airs", tight).counts.moves


def test_a_client_of_the_paper_asks_for_a_rater_that_begins_without_a_replica() -> None:
    world = run("paper", evaluation(1, 12), replicas=(3, 0))

    assert world.counts.attempts > 1


def test_a_client_of_the_paper_asks_again_after_its_back_off() -> None:
    polling = Tuning(name="polling", backoff_s=120, owner_cap=1, low_gate=1, race=0)

    world = run(Paper(polling), evaluation(1, 12), evaluation(2, 12))

    assert 60.0 <= world.jobs[1].last_s - 12.0 <= 180.0
    assert (world.counts.calls, world.counts.attempts) == (2, 3)


def test_a_client_whom_the_server_refused_waits_the_longer_the_more_refusals_it_had() -> None:
    racing = Tuning(name="racing", backoff_s=120, owner_cap=1, low_gate=1, race=1)

    world = run(Paper(racing), evaluation(1, 12), evaluation(2, 12, cost=1), evaluation(3, 1200))

    # Refused at 0, it asks after 30, 60, 120 ... seconds.
    assert (world.jobs[1].last_s - 12.0) in {30.0, 90.0, 210.0, 450.0, 930.0, 1890.0}


def test_low_priority_of_the_paper_is_refused_where_it_would_fill_the_slots() -> None:
    gated = Tuning(name="gated", backoff_s=10, owner_cap=1, low_gate=0.3, race=0)
    jobs = (evaluation(1, 24, rater="big", low=True),)

    world = run(Paper(gated), *jobs)

    # One of three slots is more than 0.3 of them: the second batch waits for the first.
    assert world.jobs[0].last_s > 24.0


def test_an_owner_of_the_paper_is_capped_where_it_is_crowded() -> None:
    capped = Tuning(name="capped", backoff_s=1000, owner_cap=0.15, low_gate=1, race=0)
    jobs = (
        evaluation(1, 12 * 9, rater="big", owner="ann"),
        evaluation(2, 12, rater="big", owner="bob", at_s=100.0),
    )

    world = run(Paper(capped), *jobs, replicas=(10, 1))

    assert world.jobs[1].last_s == 112.0


def test_an_adaptive_window_drops_when_the_model_refuses() -> None:
    world = run("isolated", evaluation(1, 1200))

    # The ceiling is two calls, the model takes one: refusals are rare but happen.
    assert world.jobs[0].computed == 1200
    assert 1.0 < world.counts.attempts / world.counts.calls < 2.0


def test_best_effort_yields_to_what_is_committed() -> None:
    shares = {PriorityClass.LOW: 0.08, PriorityClass.BEST_EFFORT: 0.0}
    policy = Airs(Setup(rebalances=False, shares=shares))
    jobs = (
        evaluation(1, 12_000, deadline_s=3600.0, owner="ann"),
        evaluation(2, 600, deadline_s=3600.0, owner="ann", at_s=1.0),
    )

    world = run(policy, *jobs)

    assert world.jobs[1].late == 0
