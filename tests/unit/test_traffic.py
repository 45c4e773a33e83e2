from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.priority import PriorityClass
from fulfillment.policy.traffic import (
    BACKOFF_CAP_S,
    RetryDecision,
    Signal,
    Window,
    adapt,
    backoff,
    decide_retry,
    open_window,
    room,
)

HIGH, MIDDLE, LOW, BEST_EFFORT = PriorityClass
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
CAP = timedelta(seconds=BACKOFF_CAP_S)
LATER = NOW + timedelta(seconds=2)
attempts = st.integers(1, 10**9)
chances = st.floats(0, 1, exclude_max=True)
classes = st.sampled_from(PriorityClass)
retry_afters = st.none() | st.floats(0, 1e9)
rubbish = st.sampled_from([None, nan, -inf, -1.0, 0.0])
ceilings = st.integers(1, 64)
signals = st.builds(
    Signal, priority_class=classes, succeeded=st.integers(0, 50), overloaded=st.integers(0, 3)
)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """A window that has seen a few rounds of anything."""
    window = open_window(draw(ceilings))
    rounds = draw(st.lists(st.tuples(st.lists(signals, max_size=4), st.floats(0, 5)), max_size=6))
    now = NOW - timedelta(seconds=60)
    for seen, pause_s in rounds:
        now += timedelta(seconds=pause_s)
        window = adapt(window, seen, now)
    return window


@pytest.mark.parametrize(
    ("attempt", "most_s"), [(1, 1), (2, 2), (3, 4), (11, 1024), (12, 1800), (1000, 1800)]
)
def test_backoff_doubles_up_to_the_cap(attempt: int, most_s: int) -> None:
    halfway = backoff(attempt=attempt, chance=0.5, retry_after_s=None)

    assert halfway == timedelta(seconds=most_s / 2)


@given(attempt=attempts, chance=chances, retry_after_s=retry_afters)
def test_backoff_stays_within_the_cap(
    attempt: int, chance: float, retry_after_s: float | None
) -> None:
    wait = backoff(attempt=attempt, chance=chance, retry_after_s=retry_after_s)

    assert timedelta(0) <= wait <= CAP


@given(attempt=attempts, chance=chances, retry_after_s=st.floats(0, BACKOFF_CAP_S))
def test_backoff_is_never_shorter_than_retry_after(
    attempt: int, chance: float, retry_after_s: float
) -> None:
    wait = backoff(attempt=attempt, chance=chance, retry_after_s=retry_after_s)

    assert wait >= timedelta(seconds=retry_after_s)


@pytest.mark.parametrize("retry_after_s", [1801.0, 1e300, inf])
def test_a_retry_after_beyond_the_cap_counts_as_the_cap(retry_after_s: float) -> None:
    assert backoff(attempt=1, chance=0.0, retry_after_s=retry_after_s) == CAP


@given(attempt=attempts, chance=chances, retry_after_s=rubbish)
def test_a_senseless_retry_after_is_ignored(
    attempt: int, chance: float, retry_after_s: float | None
) -> None:
    assert backoff(attempt=attempt, chance=chance, retry_after_s=retry_after_s) == backoff(
        attempt=attempt, chance=chance, retry_after_s=None
    )


@given(attempt=attempts, less=chances, more=chances)
def test_backoff_spreads_over_the_whole_range(attempt: int, less: float, more: float) -> None:
    less, more = min(less, more), max(less, more)

    assert backoff(attempt=attempt, chance=0.0, retry_after_s=None) == timedelta(0)
    assert backoff(attempt=attempt, chance=less, retry_after_s=None) <= backoff(
        attempt=attempt, chance=more, retry_after_s=None
    )


@given(chance=chances, floor_s=st.floats(1, 1500))
def test_waits_that_a_server_named_spread_over_a_fifth_of_them(
    chance: float, floor_s: float
) -> None:
    wait = backoff(attempt=1, chance=chance, retry_after_s=floor_s).total_seconds()

    assert wait == pytest.approx(floor_s * (1 + 0.2 * chance), rel=1e-6)


def retry_of(
    *,
    attempt: int = 1,
    max_attempts: int = 5,
    chance: float = 0.5,
    retry_after_s: float | None = None,
    left_s: float = 3600,
    call_limit_s: float = 60,
    costs_attempt: bool = True,
) -> RetryDecision:
    return decide_retry(
        now=NOW,
        attempt=attempt,
        max_attempts=max_attempts,
        chance=chance,
        retry_after_s=retry_after_s,
        deadline_at=NOW + timedelta(seconds=left_s),
        call_limit=timedelta(seconds=call_limit_s),
        costs_attempt=costs_attempt,
    )


def test_a_failed_try_is_repeated_after_its_backoff() -> None:
    decision = retry_of(attempt=3, chance=0.5)

    assert decision.retry
    assert decision.not_before == NOW + timedelta(seconds=2)
    assert decision.code == ""
    assert decision.reason == "try 3 of 5 failed, next in 0:00:02"


@pytest.mark.parametrize("attempt", [5, 6])
def test_no_retry_after_the_last_attempt(attempt: int) -> None:
    decision = retry_of(attempt=attempt, max_attempts=5)

    assert not decision.retry
    assert decision.not_before is None
    assert decision.code == "attempts_exhausted"


@pytest.mark.parametrize("attempt", [0, 5, 500])
def test_a_try_that_costs_no_attempt_exhausts_nothing(attempt: int) -> None:
    assert retry_of(attempt=attempt, max_attempts=5, costs_attempt=False).retry


def test_exhausted_attempts_are_named_even_at_the_deadline() -> None:
    assert retry_of(attempt=5, max_attempts=5, left_s=0).code == "attempts_exhausted"


@pytest.mark.parametrize(("left_s", "code"), [(60, ""), (59.9, "deadline"), (-5, "deadline")])
def test_no_retry_that_cannot_end_before_the_deadline(left_s: float, code: str) -> None:
    assert retry_of(left_s=left_s, call_limit_s=60, chance=0.0).code == code


@pytest.mark.parametrize(("retry_after_s", "code"), [(40, ""), (40.1, "deadline")])
def test_a_retry_after_past_the_last_start_is_the_deadline(retry_after_s: float, code: str) -> None:
    assert retry_of(left_s=100, call_limit_s=60, retry_after_s=retry_after_s).code == code


@given(retry_after_s=rubbish, left_s=st.sampled_from([59.9, 60, 3600]))
def test_a_senseless_retry_after_does_not_decide_on_a_retry(
    retry_after_s: float | None, left_s: float
) -> None:
    assert retry_of(retry_after_s=retry_after_s, left_s=left_s) == retry_of(left_s=left_s)


@given(
    attempt=st.integers(1, 30),
    chance=chances,
    retry_after_s=retry_afters,
    left_s=st.floats(-100, 10_000),
    call_limit_s=st.floats(0, 1000),
    costs_attempt=st.booleans(),
)
def test_a_retry_can_end_before_the_deadline_and_respects_retry_after(
    attempt: int,
    chance: float,
    retry_after_s: float | None,
    left_s: float,
    call_limit_s: float,
    costs_attempt: bool,
) -> None:
    decision = retry_of(
        attempt=attempt,
        chance=chance,
        retry_after_s=retry_after_s,
        left_s=left_s,
        call_limit_s=call_limit_s,
        costs_attempt=costs_attempt,
    )

    assert decision.retry == (decision.not_before is not None) == (decision.code == "")
    if decision.not_before is not None:
        ends_at = decision.not_before + timedelta(seconds=call_limit_s)
        assert ends_at <= NOW + timedelta(seconds=left_s)
        assert decision.not_before >= NOW + timedelta(seconds=min(retry_after_s or 0, 1800))


@given(attempt=st.integers(1, 30), one=chances, other=chances, left_s=st.floats(-100, 10_000))
def test_whether_to_retry_is_not_a_matter_of_luck(
    attempt: int, one: float, other: float, left_s: float
) -> None:
    assert (
        retry_of(attempt=attempt, chance=one, left_s=left_s).code
        == retry_of(attempt=attempt, chance=other, left_s=left_s).code
    )


def test_a_window_opens_full() -> None:
    assert open_window(16).limits == (16.0, 16.0, 16.0, 16.0)


def test_a_window_that_would_never_send_is_refused() -> None:
    with pytest.raises(ValueError, match="window of 0"):
        open_window(0)


@given(window=windows(), seen=st.lists(signals, max_size=5))
def test_limits_stay_between_one_and_the_ceiling(window: Window, seen: list[Signal]) -> None:
    adapted = adapt(window, seen, NOW)

    assert all(1 <= limit <= window.ceiling for limit in adapted.limits)
    assert adapted.ceiling == window.ceiling


@given(window=windows(), seen=st.lists(signals, max_size=5))
def test_a_class_never_has_more_than_the_one_above(window: Window, seen: list[Signal]) -> None:
    limits = adapt(window, seen, NOW).limits

    assert list(limits) == sorted(limits, reverse=True)


@given(window=windows(), cls=classes, overloaded=st.integers(1, 100))
def test_a_refused_class_shrinks_none_above_it(
    window: Window, cls: PriorityClass, overloaded: int
) -> None:
    adapted = adapt(window, [Signal(priority_class=cls, overloaded=overloaded)], NOW)

    assert adapted.limits[:cls] == window.limits[:cls]


@pytest.mark.parametrize("cls", PriorityClass)
def test_a_refused_class_shrinks_with_all_below_it(cls: PriorityClass) -> None:
    adapted = adapt(open_window(10), [Signal(priority_class=cls, overloaded=1)], NOW)

    assert adapted.limits == (10.0,) * cls + (7.0,) * (4 - cls)


def test_a_class_that_was_smaller_already_shrinks_with_the_one_above() -> None:
    window = adapt(open_window(10), [Signal(priority_class=LOW, overloaded=1)], NOW)

    window = adapt(window, [Signal(priority_class=HIGH, overloaded=1)], NOW + timedelta(seconds=2))

    assert window.limits == pytest.approx((7, 7, 4.9, 4.9))


def test_a_class_that_dropped_just_now_still_follows_the_one_above() -> None:
    window = adapt(open_window(10), [Signal(priority_class=LOW, overloaded=1)], NOW)
    window = adapt(window, [Signal(priority_class=BEST_EFFORT, succeeded=20)], NOW)
    assert window.limits[LOW] > 9

    window = adapt(window, [Signal(priority_class=HIGH, overloaded=1)], NOW)

    assert window.limits == (7, 7, 7, 7)


@given(window=windows(), seen=st.lists(signals, max_size=5))
def test_only_overload_shrinks_a_window(window: Window, seen: list[Signal]) -> None:
    seen = [replace(signal, overloaded=0) for signal in seen]

    adapted = adapt(window, seen, NOW)

    assert all(a >= b for a, b in zip(adapted.limits, window.limits, strict=True))


def test_one_congestion_drops_a_window_once() -> None:
    refused = [Signal(priority_class=HIGH, overloaded=5)]

    window = adapt(open_window(10), refused, NOW)
    window = adapt(window, refused, NOW + timedelta(milliseconds=999))

    assert window.limits[HIGH] == 7


def test_a_congestion_that_lasts_drops_a_window_each_second() -> None:
    refused = [Signal(priority_class=HIGH, overloaded=5)]

    window = adapt(open_window(10), refused, NOW)
    window = adapt(window, refused, NOW + timedelta(seconds=1))

    assert window.limits[HIGH] == pytest.approx(4.9)


def test_a_refusal_of_a_call_sent_before_the_drop_is_no_news() -> None:
    def refused(sent_at: datetime) -> list[Signal]:
        return [Signal(priority_class=HIGH, overloaded=5, refused_at=sent_at)]

    window = adapt(open_window(10), refused(NOW), NOW)
    window = adapt(window, refused(NOW - timedelta(seconds=1)), NOW + timedelta(seconds=19))
    assert window.limits[HIGH] == 7
    window = adapt(window, refused(NOW + timedelta(seconds=1)), NOW + timedelta(seconds=20))

    assert window.limits[HIGH] == pytest.approx(4.9)


def test_a_clock_that_was_set_back_does_not_hold_a_drop_off() -> None:
    refused = [Signal(priority_class=HIGH, overloaded=1)]

    window = adapt(open_window(10), refused, NOW)
    window = adapt(window, refused, NOW - timedelta(hours=1))

    assert window.limits[HIGH] == pytest.approx(4.9)


def test_a_full_window_of_successes_grows_it_by_about_one() -> None:
    window = adapt(open_window(10), [Signal(priority_class=HIGH, overloaded=1)], NOW)

    window = adapt(window, [Signal(priority_class=HIGH, succeeded=7)], NOW)

    assert window.limits[HIGH] == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize("ceiling", [8, 64, 1_000])
def test_any_window_recovers_within_as_many_round_trips(ceiling: int) -> None:
    window = replace(open_window(ceiling), limits=(1.0,) * 4)

    for _ in range(36):
        full = int(window.limits[HIGH])
        window = adapt(window, [Signal(priority_class=HIGH, succeeded=full)], NOW)

    assert window.limits[HIGH] == ceiling


@given(window=windows(), cls=classes)
def test_successes_of_a_class_recover_it_and_those_above_to_full(
    window: Window, cls: PriorityClass
) -> None:
    enough = (window.ceiling**2 + 1) // 2

    adapted = adapt(window, [Signal(priority_class=cls, succeeded=enough)], NOW)

    assert adapted.limits[: cls + 1] == (window.ceiling,) * (cls + 1)


@given(window=windows(), cls=classes, counts=st.lists(st.integers(0, 20), max_size=8))
def test_it_does_not_matter_in_how_many_parts_successes_are_told(
    window: Window, cls: PriorityClass, counts: list[int]
) -> None:
    parts = [Signal(priority_class=cls, succeeded=count) for count in counts]
    whole = [Signal(priority_class=cls, succeeded=sum(counts))]

    one_by_one = window
    for part in parts:
        one_by_one = adapt(one_by_one, [part], NOW)

    assert one_by_one.limits == pytest.approx(adapt(window, whole, NOW).limits)
    assert adapt(window, parts, NOW).limits == adapt(window, whole, NOW).limits


@given(window=windows(), seen=st.permutations([HIGH, MIDDLE, LOW, BEST_EFFORT]))
def test_the_order_of_signals_does_not_matter(
    window: Window, seen: Sequence[PriorityClass]
) -> None:
    told = [Signal(priority_class=c, succeeded=c * 3, overloaded=c % 2) for c in seen]

    assert adapt(window, told, NOW) == adapt(window, sorted(told, key=str), NOW)


@given(window=windows(), wishes=st.lists(classes, max_size=200))
def test_no_model_ever_has_more_calls_than_its_window(
    window: Window, wishes: list[PriorityClass]
) -> None:
    in_flight = dict.fromkeys(PriorityClass, 0)

    for cls in wishes:
        in_flight[cls] += room(window, in_flight, cls, now=LATER)

    assert sum(in_flight.values()) <= int(window.limits[HIGH]) <= window.ceiling


@given(window=windows(), busy=st.dictionaries(classes, st.integers(0, 20)))
def test_a_class_has_at_least_the_room_of_a_lower_one_or_it_has_calls_out(
    window: Window, busy: Mapping[PriorityClass, int]
) -> None:
    for higher, lower in [(HIGH, MIDDLE), (MIDDLE, LOW), (LOW, BEST_EFFORT)]:
        assert room(window, busy, higher, now=LATER) >= room(
            window, busy, lower, now=LATER
        ) or busy.get(higher, 0)


@pytest.mark.parametrize(
    ("in_flight", "cls", "expected"),
    [
        ({}, HIGH, 10),
        ({HIGH: 4, LOW: 1}, HIGH, 5),
        ({HIGH: 4, LOW: 1}, LOW, 2),
        ({HIGH: 9}, LOW, 1),
        ({HIGH: 8, LOW: 1}, LOW, 0),
        ({HIGH: 10}, LOW, 0),
        ({HIGH: 10}, HIGH, 0),
    ],
    ids=["idle", "room", "less room below", "probe", "probing", "full below", "full"],
)
def test_room_counts_all_calls_in_flight_and_leaves_a_probe(
    in_flight: Mapping[PriorityClass, int], cls: PriorityClass, expected: int
) -> None:
    window = adapt(open_window(10), [Signal(priority_class=LOW, overloaded=1)], NOW)

    assert room(window, in_flight, cls, now=LATER) == expected


def test_a_refused_call_keeps_its_room_for_a_second() -> None:
    window = adapt(open_window(10), [Signal(priority_class=LOW, overloaded=3)], NOW)

    assert room(window, {}, LOW, now=NOW) == 7 - 3
    assert room(window, {}, HIGH, now=NOW) == 10, "of its own class, and those below"
    assert room(window, {}, BEST_EFFORT, now=NOW + timedelta(seconds=0.9)) == 7 - 3
    assert room(window, {}, LOW, now=NOW + timedelta(seconds=1)) == 7
    assert room(window, {}, LOW, now=NOW - timedelta(hours=1)) == 7, "the clock was set back"


def test_a_model_that_refuses_everything_is_asked_once_a_second() -> None:
    window = replace(open_window(10), limits=(1.0,) * 4)

    window = adapt(window, [Signal(priority_class=HIGH, overloaded=1)], NOW)

    assert [room(window, {}, cls, now=NOW) for cls in PriorityClass] == [0] * 4
    assert room(window, {}, HIGH, now=NOW + timedelta(seconds=1)) == 1


def test_what_cools_is_forgotten() -> None:
    window = open_window(10)

    for second in range(100):
        refused = [Signal(priority_class=HIGH, overloaded=1)]
        window = adapt(window, refused, NOW + timedelta(seconds=second))

    assert len(window.cooling) == 1
