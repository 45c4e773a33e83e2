"""The report of shadow refresh from its sums."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.staleness import Sums, drift, wilson

differences = st.lists(st.floats(min_value=-4, max_value=4), min_size=1, max_size=60)
SCALE = 4.0


def sums(of: list[float]) -> Sums:
    return Sums(
        n=len(of),
        total=sum(of),
        total_absolute=sum(map(abs, of)),
        total_squared=sum(d * d for d in of),
        over_1_percent=sum(abs(d) > 0.01 * SCALE for d in of),
        over_10_percent=sum(abs(d) > 0.1 * SCALE for d in of),
    )


@given(differences)
def test_means_and_shares_are_those_of_the_differences(of: list[float]) -> None:
    found = drift(sums(of))

    assert found.mean_difference == pytest.approx(statistics.fmean(of), abs=1e-9)
    assert found.mean_absolute_difference >= abs(found.mean_difference) - 1e-9
    assert 0 <= found.changed_10_percent <= found.changed_1_percent <= 1
    if found.mean_difference_interval is not None:
        interval = found.mean_difference_interval
        assert interval.low <= found.mean_difference <= interval.high
        if len(of) > 2:
            reach = 1.96 * statistics.stdev(of) / len(of) ** 0.5
            assert interval.high - found.mean_difference == pytest.approx(reach, rel=0.01, abs=1e-6)
    share = found.changed_10_percent_interval
    assert 0 <= share.low <= found.changed_10_percent + 1e-9
    assert found.changed_10_percent - 1e-9 <= share.high <= 1


def test_one_difference_has_no_spread() -> None:
    assert drift(sums([1.0])).mean_difference_interval is None


def test_the_interval_of_a_share_is_wilsons() -> None:
    found = wilson(10, 100)

    assert (found.low, found.high) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson(0, 10).low == pytest.approx(0.0, abs=1e-9)
    assert wilson(0, 10).high > 0.2
    assert wilson(10, 10).high == pytest.approx(1.0)
