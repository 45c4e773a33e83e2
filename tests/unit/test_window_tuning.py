"""A replica's window becomes the smallest that keeps it busy."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_admin.policy.windows import (
    BELIEVED,
    ENOUGH,
    MOST,
    SAME,
    Measure,
    folded,
    tune,
)

NOW = datetime(2026, 12, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def steady(window: int) -> float:
    return 1_000.0


def settle(
    busy_of: Callable[[int], float],
    *,
    start: int,
    rounds: int = 40,
    pace_of: Callable[[int], float] = steady,
) -> list[int]:
    """Tune for so many minutes; return the windows that were had."""
    window, measures, had = start, dict[int, Measure](), []
    for minute in range(rounds):
        now = NOW + minute * MINUTE
        measure = Measure(busy=busy_of(window), pace=pace_of(window), at=now)
        measures[window] = folded(measures.get(window), measure)
        window = tune(window, measures, start=start, now=now).window
        had.append(window)
    return had


def refilled(gap: float) -> Callable[[int], float]:
    """Busy share where a batch takes 1 s and the next one comes `gap` s after one has ended."""
    return lambda window: min(1.0, window / (1 + gap))


@pytest.mark.parametrize(
    ("gap", "expected"), [(0.0, 1), (0.5, 2), (1.9, 3), (4.5, 6), (14, 16), (30, 32), (200, 64)]
)
def test_it_settles_at_the_smallest_window_that_keeps_replicas_busy(
    gap: float, expected: int
) -> None:
    assert settle(refilled(gap), start=16)[-10:] == [expected] * 10


def test_where_more_brings_nothing_as_few_as_bring_the_same_are_had() -> None:
    """Something else holds replicas up: an executor, or a server that computes now and then."""
    had = settle(lambda window: 0.6 if window >= 4 else 0.4, start=16)

    assert had[-10:] == [4] * 10
    assert max(had) == 24, "one larger window was tried"


def test_a_window_that_was_too_small_is_tried_again_after_hours_only() -> None:
    hours = int(BELIEVED / MINUTE)
    had = settle(refilled(1.9), start=16, rounds=hours + 60)

    first = had.index(2)
    assert 2 not in had[first + 1 : hours]
    assert 2 in had[hours:]


def test_a_window_that_leaves_device_batches_half_empty_is_too_small() -> None:
    """An accelerator is busy with one batch, too, and does little with it."""
    had = settle(lambda window: 1.0, start=16, pace_of=lambda window: min(window, 40) * 100.0)

    assert had[-10:] == [48] * 10


def test_other_work_is_answered_within_a_period() -> None:
    measures = {3: measured(0.90), 2: measured(0.6, at=NOW - MINUTE)}
    assert tune(3, measures, start=16, now=NOW).window == 4


def test_what_does_not_fit_is_not_tried_and_what_was_tried_may_stay() -> None:
    measures = {16: measured(0.5), 24: measured(0.9)}
    assert tune(24, measures, start=16, now=NOW, fits=32).window == 32
    assert tune(24, measures, start=16, now=NOW, fits=31).window == 24


def test_where_one_is_busier_and_another_faster_the_one_that_does_most_is_had() -> None:
    measures = {16: measured(0.98, pace=500.0), 12: measured(0.9, pace=1_000.0)}
    measures |= {8: measured(0.5, pace=1_000.0)}
    assert tune(12, measures, start=16, now=NOW).window == 12


def measured(busy: float, *, pace: float = 1_000.0, at: datetime = NOW) -> Measure:
    return Measure(busy=busy, pace=pace, at=at)


def test_a_measure_from_before_the_clock_was_set_back_is_none() -> None:
    later = measured(1.0, at=NOW + MINUTE)
    assert tune(8, {8: later}, start=16, now=NOW).window == 8
    assert folded(later, measured(0.5)).busy == 0.5


def test_two_measurements_of_a_window_are_taken_together() -> None:
    once = folded(None, measured(1.0, pace=100.0))
    twice = folded(once, measured(0.9, pace=200.0, at=NOW + MINUTE))
    assert (twice.busy, twice.pace) == pytest.approx((0.95, 150.0))
    assert folded(once, measured(0.9, at=NOW + BELIEVED)).busy == 0.9


@given(
    told=st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1e9)), min_size=90, max_size=90),
    start=st.integers(1, 1_000),
)
def test_whatever_is_measured_a_window_is_from_one_to_four_times_the_operators(
    told: list[tuple[float, float]], start: int
) -> None:
    window, measures = start, dict[int, Measure]()
    for minute, (busy, pace) in enumerate(told):
        now = NOW + minute * MINUTE
        measures[window] = folded(measures.get(window), measured(busy, pace=pace, at=now))
        window = tune(window, measures, start=start, now=now).window
        assert 1 <= window <= MOST * start


@given(bend=st.integers(1, 100), top=st.floats(0.3, 1.0), start=st.integers(1, 100))
def test_of_what_can_be_had_it_settles_within_a_gain(bend: int, top: float, start: int) -> None:
    def busy_of(window: int) -> float:
        return min(top, top * window / bend)

    had = settle(busy_of, start=start, rounds=60)

    best = busy_of(MOST * start)
    assert len(set(had[-10:])) == 1
    assert busy_of(had[-1]) >= min(ENOUGH, best * SAME) * (1 - 1e-9)
