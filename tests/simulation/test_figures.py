import pytest

from airs_site.simulation.bound import Task, bound, fluid, given_up
from airs_site.simulation.cell import figures_of
from airs_site.simulation.engine import Options
from airs_site.simulation.metrics import measure
from airs_site.simulation.policies.airs import Airs
from airs_site.simulation.series import series_of
from tests.simulation.small import evaluation, run, workload

HALF_LATE = (evaluation(1, 12, owner="ann"), evaluation(2, 24, owner="bob", deadline_s=20.0))


def task(at_s: float, deadline_s: float, work_s: float) -> Task:
    return Task(at_s=at_s, deadline_s=deadline_s, work_s=work_s, requests=work_s)


def test_figures_of_a_run_that_can_be_worked_out() -> None:
    figures = measure(run("fifo", *HALF_LATE, days=1))

    # The second evaluation has one of its two batches done by its deadline.
    assert figures.whole_in_time == 0.5
    assert figures.requests_in_time == pytest.approx(24 / 36)
    assert figures.capacity_failure["p50"] == pytest.approx(0.25)
    assert figures.latency_s["tiny"]["high"]["p50"] == pytest.approx((12 + 20) / 2)
    assert figures.funnel == {"received_batches": 3, "after_archive": 3, "model_calls": 2}
    assert (figures.amplification, figures.hit_rate) == (1.0, 0.0)
    assert figures.duty["peak_hour"] == pytest.approx(24 / (4 * 3600))
    assert figures.duty["mean"] == pytest.approx(24 / (4 * 86400))
    assert (figures.low_whole, figures.forecast_kept) == (None, None)


def test_what_fails_for_good_is_failure_but_not_of_capacity() -> None:
    figures = measure(run("fifo", evaluation(1, 12, permanent=1.0)))

    assert (figures.failure["p50"], figures.capacity_failure["p50"]) == (1.0, 0.0)
    assert (figures.whole_in_time, figures.requests_in_time) == (1.0, 1.0)


def test_a_hit_counts_whether_at_submit_or_later() -> None:
    jobs = (
        evaluation(1, 12),
        evaluation(2, 12, experiment=1),
        evaluation(3, 12, experiment=1, at_s=99.0),
    )

    assert measure(run("fifo", *jobs)).hit_rate == pytest.approx(2 / 3)


def test_owners_that_are_slowed_down_alike_have_an_index_of_one() -> None:
    alike = (evaluation(1, 1200, owner="ann"), evaluation(2, 1200, owner="bob", at_s=1200.0))
    unlike = (evaluation(1, 1200, owner="ann"), evaluation(2, 1200, owner="bob"))

    assert measure(run("fifo", *alike, replicas=(1, 1))).jain == pytest.approx(1.0)
    # Slowdowns of 1 and 2.
    assert measure(run("fifo", *unlike, replicas=(1, 1))).jain == pytest.approx(9 / 10)


def test_a_forecast_is_kept_where_all_was_expected_and_came() -> None:
    policy = Airs()
    world = run(policy, evaluation(1, 12), evaluation(2, 12, owner="bob"))

    assert measure(world, policy.expected).forecast_kept == 1.0
    assert measure(world, {0: True, 1: False}).forecast_kept == 1.0
    assert measure(world, {}).forecast_kept is None


def test_a_fluid_is_served_by_deadline_and_dropped_at_it() -> None:
    tasks = [task(0, 100, 60), task(10, 40, 30), task(20, 45, 30)]

    # 10 s of the first, the second until 40, 5 s of the third, the rest of the first.
    assert fluid(tasks, 1) == [0.0, 0.0, 25.0]
    assert fluid(tasks, 3) == [0.0, 0.0, 0.0]


def test_the_largest_in_the_way_is_given_up() -> None:
    tasks = [task(0, 50, 40), task(5, 60, 10), task(6, 60, 15), task(100, 150, 50)]

    assert given_up(tasks, 1) == {0}


def test_the_bound_is_above_any_policy() -> None:
    limit = bound(workload(*HALF_LATE))
    figures = figures_of(workload(*HALF_LATE), "airs", Options())

    assert (limit.whole_in_time, limit.requests_in_time) == (1.0, 1.0)
    assert figures.whole_in_time <= limit.whole_in_time


def test_a_bound_knows_what_must_be_given_up() -> None:
    # Four replicas have 48 s of work until the deadlines: 60 and 12 are asked for.
    jobs = (evaluation(1, 60, deadline_s=12.0), evaluation(2, 12, deadline_s=12.0))

    assert bound(workload(*jobs)).whole_in_time == 0.5
    assert bound(workload(*jobs)).requests_in_time == pytest.approx(48 / 72)


def test_a_funnel_has_peaks_beside_its_mean() -> None:
    world = run("fifo", evaluation(1, 24), evaluation(2, 24, at_s=3600.0), days=1)

    peaks = measure(world).peak_to_mean

    assert peaks["received_batches"] == pytest.approx(12.0)
    assert peaks["model_calls"] == pytest.approx(12.0)


def test_low_priority_is_held_against_high() -> None:
    jobs = (evaluation(1, 12), evaluation(2, 12, low=True))

    assert measure(run("fifo", *jobs)).low_to_high == pytest.approx(2.0)
    assert measure(run("fifo", evaluation(1, 12))).low_to_high is None


def test_series_are_by_hour_and_at_full_size() -> None:
    jobs = (
        evaluation(1, 24, rater="big"),
        evaluation(2, 3600, at_s=3600.0, deadline_s=7200.0),
        evaluation(3, 24, rater="big", experiment=1, at_s=7200.0),
    )

    series = series_of(run("fifo", *jobs, management_away=(0.0, 1e9), days=1))

    assert len(series.duty) == len(series.received_per_s) == 24
    assert series.evaluations[:4] == [1, 1, 1, 0]
    assert series.received_per_s[:3] == pytest.approx([2 / 3600, 300 / 3600, 2 / 3600], rel=1e-4)
    assert series.calls_per_s[:2] == pytest.approx([2 / 3600, 300 / 3600], rel=1e-4)
    # Some results have changed since they were rated.
    assert series.hit_rate[:4] == [0.0, 0.0, pytest.approx(0.9, abs=0.1), None]
    assert series.waiting["tiny"][:3] == [0.0, 0.0, 0.0]
    assert series.replicas == {"big": [3.0] * 24, "tiny": [1.0] * 24, "others": [0.0] * 24}
    assert series.latency_s["tiny"]["p50"][:3] == [None, 3600.0, None]
    assert series.deadline_s == {"big": 7200.0, "tiny": 7200.0, "others": 0.0}
    assert series.latency_quantiles_s["tiny"]["high"][50] == 3600.0
    assert series.latency_quantiles_s["tiny"]["low"] == []


def test_a_series_knows_what_waits_at_the_hour() -> None:
    # One replica takes 300 batches of 12 s an hour; the last one of those has just been sent.
    world = run("fifo", evaluation(1, 12 * 600), management_away=(0.0, 1e9), days=1)

    assert series_of(world).waiting["tiny"][:3] == pytest.approx([0.0, 300.0, 0.0], abs=1.0)
