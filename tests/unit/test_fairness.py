from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.fairness import (
    LONG,
    OWNER_SHARE,
    RECENT,
    OverShare,
    Owned,
    Usage,
    aged,
    charged,
    over_share,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
FULL = 6000.0
"""Requests, of a rater that does one a second: far more than LEAST_SEEN of them."""

amounts = st.dictionaries(st.sampled_from("abc"), st.floats(1, 1e6))


def owned(requests: float, left_s: float = 3600) -> Owned:
    return Owned(requests=requests, last_deadline_at=NOW + timedelta(seconds=left_s))


def over(
    used: Mapping[str, float],
    owners: Mapping[str, Owned],
    weights: Mapping[str, float] | None = None,
) -> Mapping[str, OverShare]:
    usage = Usage(at=NOW, contended=used)
    return over_share(usage, owners, requests_per_s=1.0, now=NOW, weights=weights or {})


@pytest.mark.parametrize(("span", "name"), [(RECENT, "recent"), (LONG, "contended")])
def test_half_is_left_after_a_half_life(span: timedelta, name: str) -> None:
    usage = charged(Usage(at=NOW), {"ann": 1000.0}, contended=True)

    assert getattr(aged(usage, NOW + span), name)["ann"] == pytest.approx(500)


def test_what_was_served_while_nobody_waited_is_held_against_nobody() -> None:
    usage = charged(Usage(at=NOW), {"ann": 1000.0}, contended=False)

    assert usage.recent == {"ann": 1000.0}
    assert usage.contended == {}


def test_what_has_faded_is_forgotten() -> None:
    usage = charged(Usage(at=NOW), {"ann": 1000.0}, contended=True)

    assert aged(usage, NOW + timedelta(days=1)) == Usage(at=NOW + timedelta(days=1))


def test_a_clock_that_was_set_back_fades_nothing() -> None:
    usage = charged(Usage(at=NOW), {"ann": 1000.0}, contended=True)
    back = NOW - timedelta(hours=1)

    assert aged(usage, back) == Usage(at=back, recent=usage.recent, contended=usage.contended)


@given(recent=amounts, contended=amounts, one=st.floats(1, 1e4), two=st.floats(1, 1e4))
def test_ageing_in_two_steps_is_ageing_at_once(
    recent: dict[str, float], contended: dict[str, float], one: float, two: float
) -> None:
    usage = Usage(at=NOW, recent=recent, contended=contended)
    first, last = NOW + timedelta(seconds=one), NOW + timedelta(seconds=one + two)

    stepped, whole = aged(aged(usage, first), last), aged(usage, last)

    for name in ("recent", "contended"):
        for owner, amount in getattr(whole, name).items():
            assert getattr(stepped, name).get(owner, amount) == pytest.approx(amount, rel=1e-3)


def test_a_flood_is_over_its_share() -> None:
    used = {"flood": 0.3 * FULL, "ann": 0.1 * FULL, "gone": 0.6 * FULL}
    found = over(used, {"flood": owned(10_000), "ann": owned(10)})

    assert set(found) == {"flood"}
    assert found["flood"].used == pytest.approx(0.3, rel=0.01)
    assert "took 30% of the rater of late" in found["flood"].reason
    assert f"where {OWNER_SHARE:.0%} is fair" in found["flood"].reason


def test_one_large_job_that_can_be_done_in_time_is_not() -> None:
    assert over({"ann": FULL}, {"ann": owned(3599), "bob": owned(10)}) == {}


def test_much_open_without_much_use_is_not() -> None:
    used = {"ann": 0.19 * FULL, "bob": 0.81 * FULL}

    assert over(used, {"ann": owned(1e9), "bob": owned(10)}) == {}


@pytest.mark.parametrize(("used", "is_over"), [(11, False), (13, True)])
def test_it_takes_a_fifth_of_a_minute_of_a_rater_to_be_over(used: float, is_over: bool) -> None:
    found = over({"flood": used}, {"flood": owned(1e9), "ann": owned(10)})

    assert bool(found) is is_over


def test_an_owner_alone_is_never_over() -> None:
    assert over({"ann": FULL}, {"ann": owned(1e9)}) == {}


def test_twice_the_weight_allows_twice_the_share() -> None:
    used = {"ann": 0.3 * FULL, "bob": 0.3 * FULL, "cem": 0.4 * FULL}
    owners = {"ann": owned(1e9), "bob": owned(1e9)}

    assert set(over(used, owners, {"ann": 2.0})) == {"bob"}


@given(used=amounts, more=st.floats(0, 1e6), data=st.data())
def test_whoever_is_over_stays_so_with_more_use(
    used: dict[str, float], more: float, data: st.DataObject
) -> None:
    owners = {owner: owned(1e9) for owner in "abcz"}
    for owner in over(used, owners):
        assert owner in over({**used, owner: used[owner] + more}, owners)


@given(used=amounts)
def test_no_more_owners_are_over_than_shares_fit(used: dict[str, float]) -> None:
    assert len(over(used, {owner: owned(1e9) for owner in "abcz"})) <= 1 / OWNER_SHARE
