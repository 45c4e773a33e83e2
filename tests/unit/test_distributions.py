"""Quantiles by nearest rank and histograms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.distributions import Bucket, quantiles, summary

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


def test_a_quantile_is_the_least_value_that_its_share_does_not_pass() -> None:
    found = summary([float(n) for n in range(1, 101)], bounds=(10, 50))

    assert found is not None
    assert (found.n, found.mean, found.p50, found.p90, found.p99, found.max) == (
        100, 50.5, 50, 90, 99, 100,
    )  # fmt: skip
    assert found.histogram == (
        Bucket(up_to=10, count=10),
        Bucket(up_to=50, count=40),
        Bucket(up_to=None, count=50),
    )


def test_without_values_there_is_nothing_to_say() -> None:
    assert summary([], bounds=(1,)) is None


@given(values)
def test_quantiles_are_values_in_order_and_buckets_hold_each_once(found: list[float]) -> None:
    of = summary(found, bounds=(1, 100, 10_000))

    assert of is not None
    assert min(found) <= of.p50 <= of.p90 <= of.p99 <= of.max == max(found)
    assert {of.p50, of.p90, of.p99} <= set(found)
    assert sum(bucket.count for bucket in of.histogram) == of.n == len(found)
    assert sum(v <= of.p50 for v in found) >= len(found) / 2


@given(st.dictionaries(st.floats(0, 1e6), st.integers(1, 50), min_size=1, max_size=30))
def test_a_weight_is_as_many_values(weights: dict[float, int]) -> None:
    one_by_one = summary([v for v, n in weights.items() for _ in range(n)], bounds=())

    assert one_by_one is not None
    assert quantiles(weights) == (one_by_one.p50, one_by_one.p90, one_by_one.p99)


def test_what_weighs_nothing_is_left_out() -> None:
    assert quantiles({1.0: 0, 2.0: 3}) == pytest.approx((2.0, 2.0, 2.0))
