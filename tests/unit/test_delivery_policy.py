"""What becomes of a delivery after each kind of answer, and how long the waits are."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.delivery import (
    JITTER,
    LONGEST_WAIT,
    RETRY_FOR,
    Answer,
    DeliveryState,
    code_of,
    decide,
    wait,
)
from tests.builders import NOW

draws = st.floats(min_value=0, max_value=1, exclude_max=True)
failures = st.one_of(
    st.integers(300, 599).filter(lambda s: s != 410).map(lambda s: Answer(status=s)),
    st.sampled_from(["timeout", "connection_refused"]).map(lambda c: Answer(code=c)),
)


@pytest.mark.parametrize(
    ("answer", "code", "state"),
    [
        (Answer(status=200), "", DeliveryState.DELIVERED),
        (Answer(status=204), "", DeliveryState.DELIVERED),
        (Answer(status=301), "redirect_not_followed", DeliveryState.PENDING),
        (Answer(status=304), "redirect_not_followed", DeliveryState.PENDING),
        (Answer(status=400), "http_error", DeliveryState.PENDING),
        (Answer(status=404), "http_error", DeliveryState.PENDING),
        (Answer(status=410), "gone", DeliveryState.DISABLED),
        (Answer(status=429), "http_error", DeliveryState.PENDING),
        (Answer(status=500), "http_error", DeliveryState.PENDING),
        (Answer(code="timeout"), "timeout", DeliveryState.PENDING),
        (Answer(code="url_not_allowed"), "url_not_allowed", DeliveryState.GIVEN_UP),
    ],
)
def test_each_answer_has_one_meaning(answer: Answer, code: str, state: DeliveryState) -> None:
    decision = decide(answer, tries=1, began_at=NOW, now=NOW, draw=0.5)

    assert (code_of(answer), decision.code, decision.state) == (code, code, state)
    assert (decision.retry_at is not None) == (state is DeliveryState.PENDING)


@given(answer=failures, draw=draws, tries=st.integers(1, 10_000), age_s=st.floats(0, 86_399))
def test_a_failure_is_tried_again_for_a_day(
    answer: Answer, draw: float, tries: int, age_s: float
) -> None:
    now = NOW + timedelta(seconds=age_s)

    decision = decide(answer, tries=tries, began_at=NOW, now=now, draw=draw)

    assert decision.state is DeliveryState.PENDING
    assert decision.retry_at is not None
    assert now < decision.retry_at <= now + LONGEST_WAIT * (1 + JITTER)


@given(answer=failures, draw=draws, late_s=st.floats(0, 1e6))
def test_after_a_day_it_is_given_up(answer: Answer, draw: float, late_s: float) -> None:
    now = NOW + RETRY_FOR + timedelta(seconds=late_s)

    decision = decide(answer, tries=20, began_at=NOW, now=now, draw=draw)

    assert (decision.state, decision.retry_at) == (DeliveryState.GIVEN_UP, None)


@given(draw_list=st.lists(draws, min_size=40, max_size=40))
def test_the_last_try_is_a_day_after_the_first_and_tries_are_few(draw_list: list[float]) -> None:
    now, tries = NOW, 1
    for draw in draw_list:
        decision = decide(Answer(status=500), tries=tries, began_at=NOW, now=now, draw=draw)
        if decision.retry_at is None:
            break
        now, tries = decision.retry_at, tries + 1

    assert decision.state is DeliveryState.GIVEN_UP
    assert RETRY_FOR <= now - NOW <= RETRY_FOR + LONGEST_WAIT * (1 + JITTER)
    assert 15 <= tries <= 25


@given(tries=st.integers(1, 10), first=draws, second=draws)
def test_waits_grow_whatever_the_jitter(tries: int, first: float, second: float) -> None:
    assert wait(tries, draw=first) < wait(tries + 1, draw=second)


@given(tries=st.integers(1, 10**9), draw=draws)
def test_a_wait_is_never_beyond_its_limits(tries: int, draw: float) -> None:
    assert timedelta(seconds=4) <= wait(tries, draw=draw) <= LONGEST_WAIT * (1 + JITTER)


@pytest.mark.parametrize(
    ("asked_s", "least_s", "most_s"),
    [(30, 30, 30), (7_200, 7_200, 7_200), (1e9, 86_400, 86_400), (0, 4, 6), (None, 4, 6)],
)
def test_what_the_receiver_asks_for_is_a_floor(
    asked_s: float | None, least_s: int, most_s: int
) -> None:
    answer = Answer(status=429)

    decision = decide(answer, tries=1, began_at=NOW, now=NOW, draw=0.5, asked_s=asked_s)

    assert decision.retry_at is not None
    assert least_s <= (decision.retry_at - NOW).total_seconds() <= most_s
