import pytest

from workers.model_server.meter import WINDOW_S, Meter, Waits


def test_overlapping_lanes_count_once() -> None:
    meter = Meter(started_at=100.0)

    meter.begin(101.0)
    meter.begin(102.0)
    meter.end(104.0, sequences=3)
    meter.end(105.0, sequences=4)

    assert meter.busy_seconds(110.0) == 4.0
    assert meter.uptime_seconds(110.0) == 10.0
    assert meter.duty_cycle(110.0) == pytest.approx(0.4)
    assert (meter.sequences, meter.batches) == (7, 2)


def test_a_running_batch_counts_already() -> None:
    meter = Meter(started_at=0.0)

    meter.begin(2.0)

    assert meter.busy_seconds(5.0) == 3.0
    assert meter.duty_cycle(5.0) == pytest.approx(0.6)


def test_the_duty_cycle_looks_back_one_window() -> None:
    meter = Meter(started_at=0.0)
    meter.begin(0.0)
    meter.end(WINDOW_S, sequences=1)

    meter.begin(2 * WINDOW_S)
    meter.end(2.5 * WINDOW_S, sequences=1)

    assert meter.duty_cycle(2.5 * WINDOW_S) == pytest.approx(0.5)
    assert meter.duty_cycle(10 * WINDOW_S) == 0.0


def test_a_busy_device_stays_at_one_however_many_batches() -> None:
    meter = Meter(started_at=0.0)

    for n in range(1000):
        meter.begin(n * 0.25)
        meter.end((n + 1) * 0.25, sequences=2)

    assert meter.duty_cycle(250.0) == pytest.approx(1.0)
    assert meter.sequences_per_s() == pytest.approx(8.0)


def test_the_rate_is_that_of_busy_time() -> None:
    meter = Meter(started_at=0.0)
    unknown = meter.sequences_per_s()

    for at in (10.0, 20.0, 30.0):
        meter.begin(at)
        meter.end(at + 2.0, sequences=8)

    assert unknown is None
    assert meter.sequences_per_s() == pytest.approx(4.0)


def test_nothing_has_passed_at_the_start() -> None:
    assert Meter(started_at=7.0).duty_cycle(7.0) == 0.0


def test_lanes_are_counted_each() -> None:
    meter = Meter(started_at=100.0)

    meter.begin(101.0)
    meter.begin(102.0)
    meter.end(104.0, sequences=1)
    running = meter.lane_seconds(104.5)
    meter.end(105.0, sequences=1)

    assert running == 5.5
    assert meter.lane_seconds(110.0) == 6.0
    assert meter.busy_seconds(110.0) == 4.0


def test_what_batches_cost_together_is_the_busy_time() -> None:
    meter = Meter(started_at=0.0)

    first = meter.begin(1.0)
    second = meter.begin(2.0)
    first_cost = meter.end(4.0, sequences=1) - first
    second_cost = meter.end(5.0, sequences=1) - second
    third = meter.begin(7.0)
    third_cost = meter.end(9.0, sequences=1) - third

    assert (first_cost, second_cost, third_cost) == (2.0, 2.0, 2.0)
    assert first_cost + second_cost + third_cost == meter.busy_seconds(10.0)


def test_waits_are_counted_up_to_their_bound() -> None:
    waits = Waits()

    waits.add([0.0, 0.001, 0.002, 61.0])
    waits.add([2.0])

    assert waits.counts == [2, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert waits.count == 5
    assert waits.total_s == pytest.approx(63.003)
