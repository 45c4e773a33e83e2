"""What fits and what would make all of it fit: laws, and cases worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.commitments import NEW_MARGIN, Capacity, Demand, admit, renew
from fulfillment.policy.feasibility import (
    fits,
    fitting,
    is_promised,
    leftovers,
    remedies,
)
from fulfillment.policy.priority import PriorityClass, priority_class

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HIGH, MIDDLE, LOW = PriorityClass.HIGH, PriorityClass.MIDDLE, PriorityClass.LOW
ONE = Capacity(replicas=1, seconds_a_batch=10)
NEWCOMER = 10_000
LONGEST_S = 30 * 86_400
ROWS = 1_000


def demand(
    wanted: float,
    *,
    number: int = NEWCOMER,
    owner: str = "alice",
    left_s: float = 1000,
    cls: PriorityClass = MIDDLE,
    in_flight: float = 0,
    cost: float = 1.0,
    cut: float = 0.0,
) -> Demand:
    return Demand(
        workflow_id=number,
        owner=owner,
        priority_class=cls,
        deadline_at=NOW + timedelta(seconds=left_s),
        wanted=wanted,
        cut=cut,
        in_flight=in_flight,
        cost=cost,
    )


costs = st.sampled_from([0.5, 1.0, 3.0])
others = st.lists(
    st.builds(
        demand,
        st.integers(0, 200),
        number=st.integers(1, 1000),
        owner=st.sampled_from("abc"),
        left_s=st.integers(1, 5000),
        cls=st.sampled_from(PriorityClass),
        in_flight=st.integers(0, 4),
        cost=costs,
    ),
    max_size=10,
    unique_by=lambda each: each.workflow_id,
)
newcomers = st.builds(
    demand,
    st.integers(1, 300),
    owner=st.sampled_from("abc"),
    left_s=st.integers(1, 5000),
    cls=st.sampled_from(PriorityClass),
    cost=costs,
)
capacities = st.builds(
    Capacity, replicas=st.integers(0, 8), seconds_a_batch=st.sampled_from([0.01, 1, 10])
)


@given(others, newcomers, capacities, st.integers(0, 5000))
def test_a_later_deadline_never_lets_less_fit(
    found: Sequence[Demand], new: Demand, capacity: Capacity, later_s: int
) -> None:
    later = replace(new, deadline_at=new.deadline_at + timedelta(seconds=later_s))

    assert fitting(found, later, capacity, NOW) >= fitting(found, new, capacity, NOW)


@given(others, newcomers, capacities, st.integers(0, 8))
def test_more_replicas_never_let_less_fit(
    found: Sequence[Demand], new: Demand, capacity: Capacity, more: int
) -> None:
    grown = replace(capacity, replicas=capacity.replicas + more)

    assert fitting(found, new, grown, NOW) >= fitting(found, new, capacity, NOW)


@given(others, newcomers, capacities)
def test_what_fits_is_promised_in_full(
    found: Sequence[Demand], new: Demand, capacity: Capacity
) -> None:
    # A hair less: sums of floats differ in their last bits.
    part = replace(new, wanted=fitting(found, new, capacity, NOW) * (1 - 1e-9))

    assert is_promised(found, part, capacity, NOW)


@given(others, newcomers, capacities)
def test_each_remedy_alone_is_enough(
    found: Sequence[Demand], new: Demand, capacity: Capacity
) -> None:
    help_ = remedies(found, new, capacity, NOW, rows=ROWS, longest_s=LONGEST_S)

    if help_.deadline_s is not None:
        moved = replace(new, deadline_at=NOW + timedelta(seconds=help_.deadline_s))
        assert is_promised(found, moved, capacity, NOW)
    if help_.servers is not None:
        assert is_promised(found, new, replace(capacity, replicas=help_.servers), NOW)
    if help_.rows is not None:
        part = replace(new, wanted=new.wanted * help_.rows / ROWS * (1 - 1e-9))
        assert is_promised(found, part, capacity, NOW)
    if help_.priority is not None:
        raised = replace(new, priority_class=priority_class(help_.priority))
        assert raised.priority_class < new.priority_class
        assert is_promised(found, raised, capacity, NOW)


@given(others, newcomers, capacities)
def test_what_is_left_fits_beside_what_is_committed(
    found: Sequence[Demand], new: Demand, capacity: Capacity
) -> None:
    demands = [*found, new]
    cut = admit(demands, NEWCOMER, capacity, NOW).cut

    left = leftovers(demands, cut, capacity, NOW)

    assert left.keys() == cut.keys()
    for deadline_at in {each.deadline_at for each in demands}:
        room = NEW_MARGIN * capacity.replicas * (deadline_at - NOW).total_seconds()
        due = [each for each in demands if each.deadline_at <= deadline_at]
        committed = sum(
            each.cost * (each.wanted - cut.get(each.workflow_id, 0) + each.in_flight / 2)
            for each in due
        )
        added = sum(each.cost * left.get(each.workflow_id, 0) for each in due)
        if added > 1e-6:
            assert committed + added <= room / capacity.seconds_a_batch + 1e-6


def test_the_smallest_of_what_is_cut_gets_what_is_left_first() -> None:
    demands = [demand(60, number=1, cut=0), demand(0, number=2, cut=200), demand(0, cut=50)]
    small_first = leftovers(demands, {2: 200.0, NEWCOMER: 50.0}, ONE, NOW)

    room = NEW_MARGIN * 100 - 60
    assert small_first == {NEWCOMER: pytest.approx(min(50, room)), 2: pytest.approx(0)}


def test_a_newcomer_alone_gets_what_the_margin_leaves() -> None:
    new = demand(100)

    help_ = remedies([], new, ONE, NOW, rows=ROWS, longest_s=LONGEST_S)

    assert fitting([], new, ONE, NOW) == pytest.approx(100 * NEW_MARGIN)
    assert help_.deadline_s == pytest.approx(1000 / NEW_MARGIN, abs=1)
    assert help_.servers == 2
    assert help_.rows == pytest.approx(ROWS * NEW_MARGIN, abs=1)
    assert help_.priority is None


def test_a_batch_of_twice_the_cost_is_two() -> None:
    assert fitting([], demand(100, cost=2), ONE, NOW) == pytest.approx(50 * NEW_MARGIN)
    heavy = [demand(10, number=1, cost=2)]
    assert fitting(heavy, demand(100), ONE, NOW) == pytest.approx(100 * NEW_MARGIN - 20)


def test_what_is_due_later_keeps_its_room() -> None:
    found = [demand(60, number=1, left_s=1100)]

    assert fitting(found, demand(50), ONE, NOW) == pytest.approx(110 * NEW_MARGIN - 60)
    assert fitting(found, demand(50, left_s=1200), ONE, NOW) == pytest.approx(120 * NEW_MARGIN - 60)


def test_a_higher_class_that_is_enough_is_named() -> None:
    found = renewed([demand(40, number=1, cls=LOW)])
    new = demand(60, cls=LOW)
    assert not is_promised(found, new, ONE, NOW)

    assert remedies(found, new, ONE, NOW, rows=ROWS, longest_s=1).priority == 34


def renewed(found: Sequence[Demand]) -> Sequence[Demand]:
    """Return demands that are all promised."""
    assert not renew(found, ONE, NOW).cut
    return found


def test_a_limit_of_calls_a_second_is_not_mended_by_replicas() -> None:
    new = demand(100)

    assert remedies([], new, ONE, NOW, rows=ROWS, longest_s=9, can_grow=False).servers is None


def test_nothing_is_named_where_nothing_helps() -> None:
    nobody = Capacity(replicas=0, seconds_a_batch=10)

    help_ = remedies([], demand(100, left_s=0), nobody, NOW, rows=ROWS, longest_s=LONGEST_S)

    assert (help_.deadline_s, help_.servers, help_.rows, help_.priority) == (None,) * 4


def test_beside_very_many_the_safe_side_may_decide() -> None:
    found = renewed([demand(40, number=1, cls=LOW)])

    help_ = remedies(found, demand(50), ONE, NOW, rows=100, longest_s=LONGEST_S, promised=fits)

    fit = 100 * NEW_MARGIN - 40
    assert help_.rows == pytest.approx(2 * fit, abs=1)
    assert help_.priority is None
