from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.commitments import (
    NEW_MARGIN,
    OLD_MARGIN,
    Capacity,
    Demand,
    admit,
    renew,
)
from fulfillment.policy.priority import PriorityClass

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HIGH, LOW = PriorityClass.HIGH, PriorityClass.LOW
ONE = Capacity(replicas=1, seconds_a_batch=10)


def demand(
    number: int,
    wanted: float,
    *,
    left_s: float = 1000,
    cls: PriorityClass = HIGH,
    cut: float = 0,
    in_flight: float = 0,
) -> Demand:
    return Demand(
        workflow_id=number,
        priority_class=cls,
        deadline_at=NOW + timedelta(seconds=left_s),
        wanted=wanted,
        cut=cut,
        in_flight=in_flight,
    )


demands = st.lists(
    st.builds(
        demand,
        st.integers(0, 1000),
        st.integers(0, 200),
        left_s=st.integers(1, 5000),
        cls=st.sampled_from(PriorityClass),
        cut=st.integers(0, 50),
        in_flight=st.integers(0, 4),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.workflow_id,
)


def due(found: Sequence[Demand], cut: dict[int, float], until: datetime) -> float:
    """Return the batches committed until then."""
    return sum(
        each.wanted + each.cut - cut.get(each.workflow_id, 0) + each.in_flight / 2
        for each in found
        if each.deadline_at <= until
    )


def test_what_fits_is_committed() -> None:
    commitment = admit([demand(1, 90)], 1, ONE, NOW)

    assert commitment.cut == {}
    assert commitment.reason == "all is expected in time"


def test_what_does_not_fit_is_cut_from_the_newcomer() -> None:
    commitment = admit([demand(1, 100)], 1, ONE, NOW)

    assert commitment.cut == {1: pytest.approx(10)}
    assert "10.0 batches of 1 workflows" in commitment.reason


def test_low_priority_is_cut_first_then_the_largest() -> None:
    found = [demand(1, 60), demand(2, 40), demand(3, 10, cls=LOW)]

    assert admit(found, 1, ONE, NOW).cut == {3: pytest.approx(10), 1: pytest.approx(10)}


def test_a_deadline_before_the_newcomers_keeps_its_margin() -> None:
    found = [demand(1, 95, left_s=1000), demand(2, 1, left_s=2000)]

    assert admit(found, 2, ONE, NOW).cut == {}
    assert admit(found, 1, ONE, NOW).cut == {1: pytest.approx(5)}


def test_what_is_in_flight_counts_half() -> None:
    assert admit([demand(1, 90, in_flight=4)], 1, ONE, NOW).cut == {1: pytest.approx(2)}


def test_what_is_past_its_deadline_is_not_committed() -> None:
    assert renew([demand(1, 5, left_s=-1)], ONE, NOW).cut == {1: pytest.approx(5)}


def test_slack_goes_back_to_the_smallest_first() -> None:
    found = [demand(1, 50, cut=30), demand(2, 10, cut=20)]

    # 90 may be committed, 60 are.
    assert renew(found, ONE, NOW).cut == {1: pytest.approx(20)}


def test_slack_of_a_later_deadline_does_not_help_an_earlier_one() -> None:
    found = [demand(1, 90, cut=10, left_s=1000), demand(2, 0, cut=5, left_s=9000)]

    assert renew(found, ONE, NOW).cut == {1: pytest.approx(10)}


@given(found=demands)
def test_renewed_commitments_fit_before_every_deadline(found: list[Demand]) -> None:
    cut = dict(renew(found, ONE, NOW).cut)

    for each in found:
        room = OLD_MARGIN * max(0.0, (each.deadline_at - NOW).total_seconds()) / 10
        flying = sum(e.in_flight / 2 for e in found if e.deadline_at <= each.deadline_at)
        assert due(found, cut, each.deadline_at) <= max(room, flying) + 1e-3


@given(found=demands)
def test_a_cut_is_never_more_than_a_workflow_has(found: list[Demand]) -> None:
    for cut in (renew(found, ONE, NOW).cut, admit(found, found[0].workflow_id, ONE, NOW).cut):
        for each in found:
            assert 0 <= cut.get(each.workflow_id, 0) <= each.wanted + each.cut + 1e-9


@given(found=demands)
def test_admitting_gives_nothing_back(found: list[Demand]) -> None:
    cut = admit(found, found[0].workflow_id, ONE, NOW).cut

    assert all(cut.get(each.workflow_id, 0) >= each.cut - 1e-5 for each in found)


def test_the_margin_of_new_promises_is_the_smaller() -> None:
    assert NEW_MARGIN < OLD_MARGIN < 1
