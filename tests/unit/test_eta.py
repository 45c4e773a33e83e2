"""When a workflow will end: laws of the forecast, and the cases behind it."""

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fulfillment.policy.eta import (
    AHEAD_MAY_SHRINK,
    MAY_PASS,
    Forecast,
    Job,
    Pace,
    arrange,
    forecast,
    rounded,
    work_until,
)
from fulfillment.policy.ordering import DEFAULT_SHARES, TURN_EVERY
from fulfillment.policy.priority import PriorityClass

NOBODY = arrange([])
HIGH, MIDDLE, LOW = PriorityClass.HIGH, PriorityClass.MIDDLE, PriorityClass.LOW

amounts = st.integers(0, 10_000_000)
jobs = st.builds(
    Job,
    owner=st.sampled_from("abc"),
    priority_class=st.sampled_from(PriorityClass),
    open_requests=amounts,
)
paces = st.none() | st.builds(
    Pace,
    per_s=st.floats(0, 1e6, allow_nan=False),
    seen=st.integers(0, 1_000_000),
    lumps=st.floats(0, 1e5),
)
spans = st.floats(0, 1e7)


def job(open_requests: int, *, owner: str = "a", cls: PriorityClass = MIDDLE) -> Job:
    return Job(owner=owner, priority_class=cls, open_requests=open_requests)


def pace(per_s: float, *, seen: int = 10_000) -> Pace:
    return Pace(per_s=per_s, seen=seen, lumps=seen / 12)


def seconds(own: Job, others: list[Job] | None = None, **known: Any) -> float:
    given = {"own_pace": None, "rater_pace": pace(10.0), **known}
    found = forecast(own, arrange(others or []), **given)
    assert found is not None
    return found.seconds


@given(jobs, st.lists(jobs, max_size=8), paces, paces, spans, spans)
def test_a_forecast_is_a_range_around_its_middle_and_never_past_the_end(
    own: Job,
    others: list[Job],
    own_pace: Pace | None,
    rater_pace: Pace | None,
    retry_in_s: float,
    most_s: float,
) -> None:
    found = forecast(
        own,
        arrange(others),
        own_pace=own_pace,
        rater_pace=rater_pace,
        retry_in_s=retry_in_s,
        most_s=most_s,
    )

    if found is not None:
        assert 0 <= found.low <= found.seconds <= found.high <= most_s
        assert all(math.isfinite(x) for x in (found.low, found.seconds, found.high))
        whole = rounded(found, due_s=most_s)
        assert 0 <= whole["low"] <= whole["seconds"] <= whole["high"]
        assert whole["in_time"] == (found.seconds < most_s)


@given(jobs, st.integers(1, 10_000), st.lists(jobs, max_size=8), paces, paces)
def test_more_work_of_its_own_never_ends_sooner(
    own: Job, more: int, others: list[Job], own_pace: Pace | None, rater_pace: Pace | None
) -> None:
    known: dict[str, Any] = {"own_pace": own_pace, "rater_pace": rater_pace}
    assume(own.open_requests > 0)
    field = arrange(others)
    larger = job(own.open_requests + more, owner=own.owner, cls=own.priority_class)

    before, after = forecast(own, field, **known), forecast(larger, field, **known)

    assert (before is None) == (after is None)
    if before is not None and after is not None:
        for name in ("low", "seconds", "high"):
            assert getattr(after, name) >= getattr(before, name) * (1 - 1e-9)


@given(jobs, st.lists(jobs, max_size=6), amounts)
def test_work_of_a_higher_class_never_helps(own: Job, others: list[Job], amount: int) -> None:
    assume(own.open_requests > 0 and own.priority_class > HIGH)

    assert (
        seconds(own, [*others, job(amount, owner="z", cls=HIGH)])
        >= seconds(own, others) * (1 - 1e-9)
    )  # fmt: skip


@given(jobs, st.lists(jobs, max_size=6), st.floats(0.001, 1e5), st.floats(1, 100))
def test_a_faster_rater_ends_sooner(
    own: Job, others: list[Job], per_s: float, factor: float
) -> None:
    assume(own.open_requests > 0)

    slow = seconds(own, others, rater_pace=pace(per_s))
    fast = seconds(own, others, rater_pace=pace(per_s * factor))

    assert fast <= slow * (1 + 1e-9)


@given(jobs, st.lists(jobs, max_size=6), amounts)
def test_what_the_field_holds_of_itself_does_not_count(
    own: Job, others: list[Job], before: int
) -> None:
    listed = job(before, owner=own.owner, cls=own.priority_class)

    found = work_until(own, arrange([*others, listed]), listed=listed)

    assert found == work_until(own, arrange(others))


def test_nothing_known_gives_no_forecast() -> None:
    assert forecast(job(10), NOBODY, own_pace=None, rater_pace=None) is None
    assert forecast(job(10), NOBODY, own_pace=pace(0.0), rater_pace=None) is None
    assert forecast(job(10), NOBODY, own_pace=pace(5.0, seen=9), rater_pace=None) is None


def test_nothing_open_ends_now() -> None:
    assert forecast(job(0), NOBODY, own_pace=None, rater_pace=None) == Forecast(
        seconds=0.0, low=0.0, high=0.0, reason="nothing is open"
    )


def test_alone_it_is_work_by_pace() -> None:
    assert seconds(job(600)) == 60.0
    assert seconds(job(600), own_pace=pace(5.0), rater_pace=None) == 120.0


def test_lower_classes_take_their_floors_and_no_more() -> None:
    low = job(10**9, owner="b", cls=LOW)

    assert seconds(job(600), [low]) == pytest.approx(60 / (1 - DEFAULT_SHARES[LOW]))


def test_a_higher_class_goes_first_but_leaves_the_floor() -> None:
    assert seconds(job(600), [job(300, owner="b", cls=HIGH)]) == 90.0
    assert seconds(job(600), [job(10**9, owner="b", cls=HIGH)]) == pytest.approx(
        60 / DEFAULT_SHARES[MIDDLE]
    )


def test_its_owner_has_shorter_work_done_first_and_longer_work_later() -> None:
    own = job(600)

    assert work_until(own, arrange([job(100), job(5_000)])).middle == 700


def test_another_owner_gets_its_turns() -> None:
    work = work_until(job(600), arrange([job(5_000, owner="b"), job(100, owner="c")]))

    # What is shorter goes first; of b's as much as its turns are, in the worst case more of it.
    turns = 700 / (TURN_EVERY - 1)
    assert work.middle == pytest.approx(600 + 100 + turns)
    assert work.least == pytest.approx(600 + AHEAD_MAY_SHRINK * (100 + turns))
    assert work.most == 600 + 100 + MAY_PASS * 600


def test_its_own_pace_weighs_as_much_as_was_seen_of_it() -> None:
    own, rater = pace(1.0, seen=500), pace(10.0, seen=500)

    assert seconds(job(1_000), own_pace=own, rater_pace=rater) == pytest.approx(
        math.sqrt(100 * 1_000)
    )
    assert seconds(
        job(1_000), own_pace=pace(1.0, seen=20), rater_pace=pace(10.0, seen=10_000)
    ) == pytest.approx(100, rel=0.01)


def test_a_retry_that_is_planned_is_waited_for() -> None:
    found = forecast(job(10), NOBODY, own_pace=None, rater_pace=pace(10.0), retry_in_s=600)

    assert found is not None
    assert (found.low, found.seconds, found.high) == (600, 600, 1_200)
    assert "retry" in found.reason


def test_few_results_make_a_wide_range() -> None:
    few = forecast(job(600), NOBODY, own_pace=None, rater_pace=pace(10.0, seen=12))
    many = forecast(job(600), NOBODY, own_pace=None, rater_pace=pace(10.0, seen=12_000))

    assert few is not None
    assert many is not None
    assert few.high / few.low > 2 * many.high / many.low
