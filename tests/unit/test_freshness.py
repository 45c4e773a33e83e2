"""Which rating is fresh enough, and why another is not."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.freshness import BUFFER, FUTURE, due_before, fresh_after, judge

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
ages = st.timedeltas(min_value=timedelta(days=-2), max_value=timedelta(days=200))
freshness = st.integers(min_value=1, max_value=120 * 86_400)


def judged(
    age: timedelta,
    *,
    freshness_s: int = 100,
    max_age_s: int | None = None,
    reusable: bool = True,
    bypass: bool = False,
) -> str | None:
    return judge(
        produced_at=NOW - age,
        reusable=reusable,
        produced_after=fresh_after(
            now=NOW,
            freshness_s=freshness_s,
            max_age_s=max_age_s,
            accepted_at=NOW,
            bypass=bypass,
        ),
        freshness_s=freshness_s,
        now=NOW,
    )


@pytest.mark.parametrize(
    ("age", "reason"),
    [
        (timedelta(0), None),
        (timedelta(seconds=100) - MICROSECOND, None),
        (timedelta(seconds=100), "stale"),
        (timedelta(seconds=101), "stale"),
        (-FUTURE, None),
        (-FUTURE - MICROSECOND, "in_the_future"),
    ],
)
def test_fresh_is_younger_than_the_freshness(age: timedelta, reason: str | None) -> None:
    assert judged(age) == reason


def test_what_is_fresh_may_be_too_old_for_a_request() -> None:
    assert judged(timedelta(seconds=50), max_age_s=60) is None
    assert judged(timedelta(seconds=60), max_age_s=60) == "too_old"
    assert judged(timedelta(seconds=200), max_age_s=60) == "stale"
    assert judged(timedelta(seconds=1), bypass=True) == "too_old"
    assert judged(timedelta(seconds=1), max_age_s=0) == "too_old"


def test_a_request_cannot_ask_for_older_than_the_raters_freshness() -> None:
    assert judged(timedelta(seconds=150), max_age_s=1_000) == "stale"


def test_what_may_not_be_reused_is_not_taken_however_fresh() -> None:
    assert judged(timedelta(0), reusable=False) == "not_reusable"


@given(ages, freshness, st.none() | st.integers(min_value=0, max_value=200 * 86_400))
def test_what_is_taken_is_never_due_to_be_erased(
    age: timedelta, freshness_s: int, max_age_s: int | None
) -> None:
    taken = judged(age, freshness_s=freshness_s, max_age_s=max_age_s) is None
    due = NOW - age < due_before(now=NOW, freshness_s=freshness_s)

    assert not (taken and due)


@given(ages, freshness, st.integers(min_value=0, max_value=200 * 86_400))
def test_a_stricter_request_takes_no_more(age: timedelta, freshness_s: int, max_age_s: int) -> None:
    if judged(age, freshness_s=freshness_s, max_age_s=max_age_s) is None:
        assert judged(age, freshness_s=freshness_s) is None
    assert judged(max(age, MICROSECOND), freshness_s=freshness_s, bypass=True) is not None


def test_a_rating_is_kept_for_the_buffer_after_it_was_fresh() -> None:
    assert due_before(now=NOW, freshness_s=60) == NOW - timedelta(seconds=60) - BUFFER
