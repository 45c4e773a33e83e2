import pytest

from airs_site.simulation import disturbances
from airs_site.simulation.disturbances import (
    FLOODER,
    backlogs_s,
    busiest_s,
    flood,
    others,
    part,
    pool_loss,
    recovery,
    twice,
)
from airs_site.simulation.engine import Loss
from airs_site.simulation.trace import expand
from airs_site.simulation.workload import DAY_S
from tests.simulation.small import evaluation, params, run


def test_the_busiest_hour_is_that_of_the_weekday_and_hour_with_most() -> None:
    described = params(
        days=3, weekday_mult=[9, 1, 1, 1, 1, 1, 1], hour_human=[1] * 10 + [5] + [1] * 13
    )

    # Day 0 is a Saturday, so that Monday is day 2.
    assert busiest_s(described) == 2 * DAY_S + 9 * 3600
    assert pool_loss(described) == Loss(
        at_s=busiest_s(described), until_s=busiest_s(described) + 3 * 3600, share=1 / 3
    )
    assert disturbances.management_away(described) == (
        2 * DAY_S + 10 * 3600,
        2 * DAY_S + 11 * 3600,
    )


def test_a_flood_is_one_owners_and_nobody_had_its_requests() -> None:
    described = params((127, 1))
    one = evaluation(1, 12, at_s=5.0)

    rows = flood(described, [one])

    flooding = [row for row in rows if row.owner == FLOODER]
    assert len(flooding) == len(rows) - 1 == 300
    assert sum(row.queries * row.results for row in flooding) == 18_000_000
    assert {row.rater for row in flooding} == {"big"}
    assert expand(described, rows, scale=1000).distinct == 1 + 300 * 60
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)


def test_a_flood_is_as_large_as_the_pool() -> None:
    rows = flood(params((31, 1)), [evaluation(1, 12)])

    assert sum(row.queries * row.results for row in rows[1:]) == 18_000_000 / 4


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


def test_what_comes_twice_is_of_another_experiment() -> None:
    rows = twice([evaluation(1, 1), evaluation(2, 1, at_s=5000.0)], 0.0, 6000.0)

    assert [(row.id, row.at_s, row.experiment) for row in rows] == [
        (1, 0.0, 1),
        (3, 1800.0, 3),
        (2, 5000.0, 2),
    ]


@pytest.mark.parametrize(("days", "overload"), [(8, (2, 5)), (4, (1, 4)), (2, (0, 2)), (1, (0, 1))])
def test_an_overload_leaves_days_to_recover_where_there_are_any(
    days: int, overload: tuple[int, int]
) -> None:
    assert disturbances.overload_s(days) == tuple(day * DAY_S for day in overload)


def test_a_part_is_what_was_submitted_in_it() -> None:
    world = run(
        "fifo",
        evaluation(1, 12),
        evaluation(2, 24, at_s=5.0, deadline_s=15.0),
        evaluation(3, 12, at_s=9.0, low=True),
    )

    of_all = part(world, 0.0, 100.0)

    assert (of_all.whole_in_time, of_all.high_whole, of_all.low_whole) == (2 / 3, 0.5, 1.0)
    assert of_all.requests_in_time == pytest.approx(36 / 48)
    assert part(world, 1.0, 9.0).whole_in_time == 0.0
    assert part(world, 50.0, 99.0).whole_in_time is None


def test_a_backlog_is_told_in_seconds_of_the_pool_and_how_long_it_lasts() -> None:
    # 1200 batches of 12 s on one of four replicas; 300 an hour leave.
    world = run(
        "fifo",
        evaluation(1, 14_400, deadline_s=2 * DAY_S),
        management_away=(0.0, 2 * DAY_S),
        days=1,
    )

    assert backlogs_s(world)[:3] == pytest.approx([0.0, 899 * 3.0, 599 * 3.0], abs=3.0)
    assert recovery(world)["most_backlog_s"] == pytest.approx(899 * 3.0, abs=3.0)
    assert (recovery(world)["end_backlog_s"], recovery(world)["recovered_s"]) == (0.0, 0.0)
