"""Places of a model, shared by its raters."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.ordering import DEFAULT_SHARES
from fulfillment.policy.places import Contender, share
from fulfillment.policy.priority import PriorityClass

HIGH, MIDDLE, LOW, BEST_EFFORT = PriorityClass
PLENTY = 1_000


def contender(
    ready: Mapping[PriorityClass, int], *, held: int = 0, most: int = PLENTY
) -> Contender:
    return Contender(ready=ready, most=most, held=held)


def room(places: int, kept: int = 0) -> dict[PriorityClass, int]:
    return {cls: places if cls is HIGH else places - kept for cls in PriorityClass}


@pytest.mark.parametrize(
    ("held", "places", "expected"),
    [
        ((0, 0), 8, (4, 4)),
        ((0, 0), 3, (2, 1)),
        ((6, 0), 4, (0, 4)),
        ((6, 0), 8, (1, 7)),
    ],
)
def test_a_place_goes_to_whoever_holds_fewest(
    held: tuple[int, int], places: int, expected: tuple[int, int]
) -> None:
    contenders = {n: contender({MIDDLE: PLENTY}, held=h) for n, h in enumerate(held)}

    given_, _ = share(contenders, room(places), {})

    assert tuple(given_.values()) == expected


def test_the_highest_class_goes_first_whoever_holds_more() -> None:
    contenders = {1: contender({LOW: PLENTY}), 2: contender({HIGH: 3, LOW: 5}, held=9)}

    given_, credits = share(contenders, room(3), {})

    assert given_ == {1: 0, 2: 3}
    assert credits == {LOW: pytest.approx(3 * DEFAULT_SHARES[LOW])}


def test_a_class_below_has_its_share_from_pass_to_pass() -> None:
    contenders = {1: contender({LOW: PLENTY}), 2: contender({HIGH: PLENTY})}
    credits: Mapping[PriorityClass, float] = {}
    got = []

    for _ in range(12):
        given_, credits = share(contenders, room(1), credits)
        got += [rater for rater, places in given_.items() if places]

    assert got == [2, 2, 2, 1] * 3


def test_places_that_are_kept_go_to_the_highest_class_only() -> None:
    contenders = {1: contender({LOW: PLENTY}), 2: contender({HIGH: 1})}

    assert share(contenders, room(8, kept=2), {})[0] == {1: 5, 2: 1}


@given(
    contenders=st.dictionaries(
        st.integers(0, 5),
        st.builds(
            Contender,
            ready=st.dictionaries(st.sampled_from(PriorityClass), st.integers(0, 9)),
            most=st.integers(0, 20),
            held=st.integers(0, 9),
        ),
    ),
    places=st.integers(0, 30),
)
def test_no_place_stays_free_while_one_may_take_it(
    contenders: dict[int, Contender], places: int
) -> None:
    given_, _ = share(contenders, room(places), {})

    may = {n: min(each.most, sum(each.ready.values())) for n, each in contenders.items()}
    assert sum(given_.values()) == min(places, sum(may.values()))
    assert all(given_[n] <= may[n] for n in contenders)
