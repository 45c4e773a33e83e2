"""What work takes, from call seconds that are mostly waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.costs import (
    LEAST_S,
    MEAN_WEIGHT,
    OWN_WEIGHT,
    Cost,
    Span,
    learn,
    of_one,
    paced,
    worked,
)

spans = st.builds(
    Span,
    requests=st.integers(0, 100_000),
    call_seconds=st.floats(0, 1e6),
    is_full=st.booleans(),
)


def learned(span: Span, *, servers: float = 1, period_s: float = 30) -> Cost:
    share = worked(servers=servers, period_s=period_s, call_seconds=span.call_seconds)
    cost = learn(None, span, worked=share, batch_size=12)
    assert cost is not None
    return cost


@pytest.mark.parametrize("window", [1, 4, 16])
def test_a_busy_replica_is_measured_by_the_clock_whatever_window_it_holds(window: int) -> None:
    # Two replicas do a batch of 12 in 0.5 s each: 120 batches in 30 s, each call held for
    # 0.5 s a batch in front of it.
    busy = Span(requests=120 * 12, call_seconds=120 * 0.5 * window, is_full=True)

    cost = learned(busy, servers=2)

    assert 12 * cost.seconds == pytest.approx(0.5)
    assert 12 * cost.call_seconds == pytest.approx(0.5 * window)


def test_an_idle_replica_is_measured_by_its_calls() -> None:
    one_call = Span(requests=12, call_seconds=0.5, is_full=False)

    assert 12 * learned(one_call, servers=4).seconds == pytest.approx(0.5)


def test_an_external_model_is_measured_by_its_calls_also_when_it_is_full() -> None:
    # 64 calls of a second at a time, an item each.
    chat = Span(requests=64 * 30, call_seconds=64 * 30, is_full=True)

    assert learned(chat, servers=64).seconds == pytest.approx(1.0)


def test_raters_that_share_replicas_share_their_work() -> None:
    # One replica, busy for 30 s: a third of the call seconds are of the first rater.
    calls = [160.0, 320.0]
    share = worked(servers=1, period_s=30, call_seconds=sum(calls))

    costs = [
        learn(None, Span(requests=100, call_seconds=c, is_full=True), worked=share, batch_size=12)
        for c in calls
    ]

    assert [cost.seconds * 100 for cost in costs if cost] == pytest.approx([10, 20])


def test_a_bound_gives_way_to_the_first_exact_measure() -> None:
    bound = Cost(seconds=1.0, call_seconds=1.0, requests=12, is_exact=False)

    cost = learn(bound, Span(requests=12, call_seconds=1.2, is_full=True), worked=1, batch_size=12)

    assert cost is not None
    assert cost.seconds == pytest.approx(0.1)
    assert cost.is_exact


def test_a_bound_moves_an_exact_measure_down_only() -> None:
    exact = Cost(seconds=0.1, call_seconds=0.1, requests=12, is_exact=True)

    higher = learn(exact, Span(requests=12, call_seconds=12, is_full=False), worked=1, batch_size=1)
    lower = learn(exact, Span(requests=12, call_seconds=0.6, is_full=False), worked=1, batch_size=1)

    assert higher is not None
    assert lower is not None
    assert higher.seconds == 0.1
    assert 0.05 < lower.seconds < 0.1
    assert higher.is_exact
    assert lower.is_exact


def test_a_batch_weighs_as_in_the_simulator_in_however_many_spans() -> None:
    before = Cost(seconds=0.0, call_seconds=1.0, requests=0, is_exact=True)
    batch = Span(requests=12, call_seconds=12, is_full=True)

    once = learn(before, batch, worked=1, batch_size=12)
    at_once = learn(
        before, Span(requests=36, call_seconds=36, is_full=True), worked=1, batch_size=12
    )
    one_by_one: Cost | None = before
    for _ in range(3):
        one_by_one = learn(one_by_one, batch, worked=1, batch_size=12)

    assert once is not None
    assert at_once is not None
    assert one_by_one is not None
    assert once.seconds == pytest.approx(MEAN_WEIGHT)
    assert at_once.seconds == pytest.approx(one_by_one.seconds)


def test_what_ended_without_work_teaches_nothing() -> None:
    nothing = Span(requests=0, call_seconds=50, is_full=True)

    assert learn(None, nothing, worked=1, batch_size=12) is None


@given(st.lists(spans, min_size=1), st.floats(0, 1))
def test_a_cost_is_a_positive_number(found: list[Span], share: float) -> None:
    cost = None
    for span in found:
        cost = learn(cost, span, worked=share, batch_size=12)

    assert cost is None or min(cost.seconds, cost.call_seconds) > LEAST_S / 2


def test_a_workflow_is_known_by_its_own_batches_once_it_has_had_some() -> None:
    def times(batches: int, seconds: float) -> float:
        return of_one(seconds, 12 * batches, mean=1 / 12, batch_size=12)

    assert times(0, 0.0) == pytest.approx(1.0)
    assert times(OWN_WEIGHT, 3.0 * OWN_WEIGHT) == pytest.approx(2.0)
    assert times(990, 2_970.0) == pytest.approx(2.98)
    # A retry takes back more than ended: nothing is known of it.
    assert times(-5, 0.0) == pytest.approx(1.0)


def test_a_limit_of_calls_a_second_sets_the_pace_where_it_is_slower() -> None:
    by_limit = paced(0.01, servers=4, calls_a_request=1 / 12, max_qps=2)

    # Two calls of twelve a second: 24 requests a second, whatever the replicas could do.
    assert 4 / by_limit == pytest.approx(24)
    assert paced(1.0, servers=4, calls_a_request=1, max_qps=1_000) == 1.0
    assert paced(0.01, servers=4, calls_a_request=1, max_qps=None) == 0.01


def test_what_devices_take_is_learned_beside_what_calls_do() -> None:
    first = learn(
        None,
        Span(requests=12, call_seconds=12.0, device_seconds=1.2, is_full=True),
        worked=0.1,
        batch_size=12,
    )
    assert first is not None
    assert first.device_seconds == pytest.approx(0.1)

    second = learn(
        first,
        Span(requests=12, call_seconds=12.0, device_seconds=2.4, is_full=True),
        worked=0.1,
        batch_size=12,
    )

    assert second is not None
    assert second.device_seconds == pytest.approx(0.1 + 0.02 * 0.1)
    assert (second.call_seconds, second.seconds) == (first.call_seconds, first.seconds)


def test_the_first_measure_of_devices_counts_for_a_rater_that_had_none() -> None:
    before = Cost(seconds=1.0, call_seconds=1.0, requests=1_200, is_exact=True)
    untold = Span(requests=12, call_seconds=12.0, is_full=True)

    cost = learn(
        learn(before, untold, worked=1.0, batch_size=12),
        Span(requests=12, call_seconds=12.0, device_seconds=6.0, is_full=True),
        worked=1.0,
        batch_size=12,
    )

    assert cost is not None
    assert cost.device_seconds == 0.5
    later = learn(cost, untold, worked=1.0, batch_size=12)
    assert later is not None
    assert later.device_seconds == 0.5
