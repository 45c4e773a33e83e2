from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

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
    owner: str | None = None,
    cost: float = 1.0,
) -> Demand:
    return Demand(
        workflow_id=number,
        owner=f"owner {number}" if owner is None else owner,
        cost=cost,
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
        in_flight=st.integers(0, 4),
        owner=st.sampled_from("abc"),
        cost=st.floats(0.3, 3),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.workflow_id,
)


given_up = st.booleans()


@st.composite
def mixed(draw: st.DrawFn) -> list[Demand]:
    """Return demands some of which are given up."""
    found = draw(demands)
    return [
        replace(each, wanted=0.0, cut=each.wanted) if draw(given_up) else each for each in found
    ]


def due(found: Sequence[Demand], cut: Mapping[int, float], until: datetime) -> float:
    """Return the batches of ordinary cost that are committed until then, and those in flight."""
    return sum(
        (each.wanted + each.cut - cut.get(each.workflow_id, 0) + each.in_flight / 2) * each.cost
        for each in found
        if each.deadline_at <= until
    )


def test_what_fits_is_committed() -> None:
    commitment = admit([demand(1, 60)], 1, ONE, NOW)

    assert commitment.cut == {}
    assert commitment.reason == "all is expected in time"


def test_what_does_not_fit_is_given_up_as_a_whole() -> None:
    commitment = admit([demand(1, 61)], 1, ONE, NOW)

    assert commitment.cut == {1: 61}
    assert "61.0 batches of 1 workflows" in commitment.reason


def test_low_priority_is_given_up_first_then_the_largest() -> None:
    found = [demand(1, 29), demand(2, 28), demand(3, 10, cls=LOW), demand(4, 29.5)]

    assert admit(found, 1, ONE, NOW).cut == {3: 10, 4: 29.5}


def test_an_owner_with_more_than_its_share_gives_up_first() -> None:
    # 30 of the hundred that can be done are a share.
    flood = [demand(n, 8, owner="flood") for n in range(1, 10)]
    large = demand(99, 20)

    assert set(admit([*flood, large], 99, ONE, NOW).cut) == {6, 7, 8, 9}


def test_a_deadline_before_the_newcomers_keeps_its_margin() -> None:
    found = [demand(1, 89, left_s=1000), demand(2, 1, left_s=2000)]

    assert admit(found, 2, ONE, NOW).cut == {}
    assert admit(found, 1, ONE, NOW).cut == {1: 89}


def test_what_is_in_flight_counts_half() -> None:
    assert admit([demand(1, 58, in_flight=4)], 1, ONE, NOW).cut == {}
    assert admit([demand(1, 58, in_flight=5)], 1, ONE, NOW).cut == {1: 58}


def test_a_dear_workflow_needs_more() -> None:
    assert admit([demand(1, 30, cost=2)], 1, ONE, NOW).cut == {}
    assert admit([demand(1, 30, cost=2.1)], 1, ONE, NOW).cut == {1: 30}


def test_what_is_past_its_deadline_is_not_committed() -> None:
    assert renew([demand(1, 5, left_s=-1)], ONE, NOW).cut == {1: 5}


def test_what_fits_as_a_whole_comes_back_the_smallest_first() -> None:
    found = [demand(1, 20), demand(2, 0, cut=20), demand(3, 0, cut=40)]

    # 60 may be committed, 20 are: there is room for the smaller one.
    assert renew(found, ONE, NOW).cut == {3: 40}


def test_slack_of_a_later_deadline_does_not_help_an_earlier_one() -> None:
    found = [demand(1, 60, left_s=1000), demand(2, 0, cut=11, left_s=1000), demand(3, 0, cut=5)]
    later = replace(found[2], deadline_at=NOW + timedelta(seconds=9000))

    assert renew([*found[:2], later], ONE, NOW).cut == {2: 11}


@given(found=mixed())
def test_renewed_commitments_fit_before_every_deadline(found: list[Demand]) -> None:
    cut = renew(found, ONE, NOW).cut

    for each in found:
        room = OLD_MARGIN * max(0.0, (each.deadline_at - NOW).total_seconds()) / 10
        flying = sum(e.in_flight / 2 * e.cost for e in found if e.deadline_at <= each.deadline_at)
        assert due(found, cut, each.deadline_at) <= max(room, flying) + 1e-3


@given(found=mixed())
def test_a_workflow_is_given_up_as_a_whole_or_not_at_all(found: list[Demand]) -> None:
    for cut in (renew(found, ONE, NOW).cut, admit(found, found[0].workflow_id, ONE, NOW).cut):
        for each in found:
            assert cut.get(each.workflow_id, 0) in (0, each.wanted + each.cut)


@given(found=mixed())
def test_admitting_gives_nothing_back(found: list[Demand]) -> None:
    cut = admit(found, found[0].workflow_id, ONE, NOW).cut

    assert all(cut.get(each.workflow_id, 0) >= each.cut for each in found)


@given(found=mixed(), more=st.floats(1, 3))
def test_with_more_replicas_nobody_is_given_up_who_was_alone_in_fitting(
    found: list[Demand], more: float
) -> None:
    # With room for all, all are committed.
    work = sum((each.wanted + each.cut + each.in_flight) * each.cost for each in found)
    soonest = min((each.deadline_at - NOW).total_seconds() for each in found)
    enough = Capacity(replicas=more * 10 * work / soonest / NEW_MARGIN + 1, seconds_a_batch=10)

    assert renew(found, enough, NOW).cut == {}


def test_the_margin_of_new_promises_is_the_smaller() -> None:
    assert NEW_MARGIN < OLD_MARGIN < 1
