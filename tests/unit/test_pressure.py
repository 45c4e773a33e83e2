from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.pressure import PRESSED, Due, pressed

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def due(number: int, requests: float, left_s: float = 1000) -> Due:
    return Due(workflow_id=number, requests=requests, deadline_at=NOW + timedelta(seconds=left_s))


def found(*dues: Due, above: tuple[Due, ...] = (), pace: float = 1.0) -> set[int]:
    return set(pressed(dues, above, requests_per_s=pace, now=NOW))


dues = st.lists(
    st.builds(due, st.integers(0, 99), st.floats(0, 2000), st.floats(-10, 5000)),
    max_size=8,
    unique_by=lambda each: each.workflow_id,
)


def test_a_deadline_presses_once_nearly_all_of_its_time_is_needed() -> None:
    assert found(due(1, 1000 * PRESSED)) == set()
    assert found(due(1, 1000 * PRESSED + 1)) == {1}


def test_what_is_due_before_the_deadline_that_presses_goes_with_it() -> None:
    assert found(due(1, 10, 500), due(2, 950, 1000), due(3, 5, 2000)) == {1, 2}


def test_work_of_higher_classes_takes_its_time_first() -> None:
    assert found(due(1, 500), above=(due(2, 450, 900),)) == {1}
    assert found(due(1, 500), above=(due(2, 450, 1100),)) == set()


def test_a_deadline_of_a_higher_class_that_presses_says_nothing_of_this_one() -> None:
    assert found(due(1, 10, 5000), above=(due(2, 999, 1000),)) == set()


def test_nothing_presses_where_the_pace_is_not_known() -> None:
    assert found(due(1, 1e9), pace=0.0) == set()


@given(own=dues, pace=st.floats(0.1, 10), faster=st.floats(1, 10))
def test_with_a_faster_rater_no_more_deadlines_press(
    own: list[Due], pace: float, faster: float
) -> None:
    if found(*own, pace=pace * faster):
        assert found(*own, pace=pace)
