import pytest

from airs_site.simulation import disturbances
from airs_site.simulation.cell import DISTURBANCES, disturbed
from airs_site.simulation.disturbances import FLOODER, busiest_s, flood, others, pool_loss
from airs_site.simulation.engine import Loss, Options
from airs_site.simulation.trace import expand
from airs_site.simulation.workload import DAY_S
from tests.simulation.small import evaluation, params, run, workload


def test_the_busiest_hour_is_that_of_the_weekday_and_hour_with_most() -> None:
    described = params(
        days=3, weekday_mult=[9, 1, 1, 1, 1, 1, 1], hour_human=[1] * 10 + [5] + [1] * 13
    )

    # Day 0 is a Saturday, so that Monday is day 2.
    assert busiest_s(described) == 2 * DAY_S + 9 * 3600
    assert pool_loss(described) == Loss(
        at_s=busiest_s(described), until_s=busiest_s(described) + 3 * 3600, share=1 / 3
    )


def test_a_flood_is_one_owners_and_nobody_had_its_requests() -> None:
    described = params()
    one = evaluation(1, 12, at_s=5.0)

    rows = flood(described, [one])

    flooding = [row for row in rows if row.owner == FLOODER]
    assert len(flooding) == len(rows) - 1 == 300
    assert sum(row.queries * row.results for row in flooding) == 18_000_000
    assert {row.rater for row in flooding} == {"big"}
    assert expand(described, rows, scale=1000).distinct == 1 + 300 * 60
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)


def test_others_are_all_but_the_flooder() -> None:
    world = run(
        "fifo",
        evaluation(1, 12, owner=FLOODER, deadline_s=5.0),
        evaluation(2, 12, owner="bob", at_s=1.0),
        evaluation(3, 24, owner="cid", at_s=2.0, deadline_s=30.0),
    )

    left = others(world)

    # One batch each at 12, 24 and 36 s; that of the flooder was sent, the last of cid was not.
    assert left.others_whole == 0.5
    assert left.others_requests == pytest.approx(24 / 36)
    assert left.others_p75_s == pytest.approx(23 + 0.75 * (30 - 23))


def test_wrong_costs_are_far_less_or_far_more_by_turns() -> None:
    rows = disturbances.wrong_costs([evaluation(1, 1), evaluation(2, 1, cost=2.0)])

    assert [row.cost for row in rows] == [0.4, 3.2]


@pytest.mark.parametrize("name", DISTURBANCES)
def test_each_disturbance_has_figures_of_each_policy(name: str) -> None:
    one = expand(params(), [evaluation(1, 3000, at_s=1.0)], scale=3000)

    assert set(disturbed(name, one, ["fifo", "airs"], Options())) == {"fifo", "airs"}


def test_a_lost_pool_does_not_touch_the_workload_itself() -> None:
    one = workload(evaluation(1, 12))

    (figures,) = disturbed("pool_loss", one, ["fifo"], Options()).values()

    assert figures["whole_in_time"] == 1.0
