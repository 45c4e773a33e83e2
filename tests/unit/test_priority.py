from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.priority import (
    CELERY_STEPS,
    DEFAULT_SCORE,
    PriorityClass,
    celery_priority,
    least_score,
    oip_priority,
    priority_class,
    travel_step,
    vllm_priority,
)

scores = st.integers(0, 100)
upstreams = pytest.mark.parametrize("number", [celery_priority, oip_priority, vllm_priority])


@pytest.mark.parametrize(
    ("score", "cls"),
    [
        (100, PriorityClass.HIGH),
        (67, PriorityClass.HIGH),
        (66, PriorityClass.MIDDLE),
        (DEFAULT_SCORE, PriorityClass.MIDDLE),
        (34, PriorityClass.MIDDLE),
        (33, PriorityClass.LOW),
        (0, PriorityClass.LOW),
    ],
)
def test_class_of_a_score(score: int, cls: PriorityClass) -> None:
    assert priority_class(score) is cls


@given(score=scores)
def test_best_effort_is_a_class_of_its_own_at_any_score(score: int) -> None:
    assert priority_class(score, best_effort=True) is PriorityClass.BEST_EFFORT


@pytest.mark.parametrize(
    ("score", "celery", "oip", "vllm"),
    [
        (100, 0, 1, 0),
        (91, 0, 10, 9),
        (90, 1, 11, 10),
        (50, 5, 51, 50),
        (10, 9, 91, 90),
        (0, 9, 101, 100),
    ],
)
def test_what_each_upstream_is_told(score: int, celery: int, oip: int, vllm: int) -> None:
    assert celery_priority(score) == celery
    assert oip_priority(score) == oip
    assert vllm_priority(score) == vllm


@given(more=scores, less=scores)
@upstreams
def test_a_more_urgent_score_is_never_served_later_upstream(
    number: Callable[[int], int], more: int, less: int
) -> None:
    more, less = max(more, less), min(more, less)

    assert number(more) <= number(less)


@given(more=scores, less=scores)
def test_a_more_urgent_score_is_never_in_a_later_class(more: int, less: int) -> None:
    more, less = max(more, less), min(more, less)

    assert priority_class(more) <= priority_class(less)


def test_all_celery_steps_are_used_and_no_other() -> None:
    assert {celery_priority(score) for score in range(101)} == set(CELERY_STEPS) == set(range(10))


@pytest.mark.parametrize("number", [oip_priority, vllm_priority])
def test_model_servers_can_tell_all_scores_apart(number: Callable[[int], int]) -> None:
    assert len({number(score) for score in range(101)}) == 101


@pytest.mark.parametrize("score", [-1, 101])
@pytest.mark.parametrize("number", [priority_class, celery_priority, oip_priority, vllm_priority])
def test_a_score_outside_the_scale_is_refused(number: Callable[[int], int], score: int) -> None:
    with pytest.raises(ValueError, match=f"priority {score} is outside"):
        number(score)


@pytest.mark.parametrize("step", CELERY_STEPS)
def test_the_least_score_of_a_step_has_that_step_and_none_below_it(step: int) -> None:
    least = least_score(step)

    assert celery_priority(least) == step
    assert least == 0 or celery_priority(least - 1) == step + 1


@pytest.mark.parametrize(
    ("above", "step"), [(PriorityClass.HIGH, 0), (PriorityClass.MIDDLE, 3), (PriorityClass.LOW, 6)]
)
def test_what_leaves_before_a_class_above_travels_at_the_first_step_of_that_class(
    above: PriorityClass, step: int
) -> None:
    waiting = [above, PriorityClass.BEST_EFFORT]

    assert travel_step(9, PriorityClass.BEST_EFFORT, waiting) == step
    assert priority_class(least_score(step)) <= above


def test_what_leaves_while_a_class_below_waits_travels_at_the_first_step_of_its_own() -> None:
    assert travel_step(5, PriorityClass.MIDDLE, [PriorityClass.LOW]) == 3
    assert travel_step(5, PriorityClass.MIDDLE, [PriorityClass.MIDDLE, PriorityClass.LOW]) == 3


@pytest.mark.parametrize("waiting", [[], [PriorityClass.MIDDLE]])
def test_while_no_other_class_waits_each_goes_by_its_own_score(
    waiting: list[PriorityClass],
) -> None:
    assert travel_step(5, PriorityClass.MIDDLE, waiting) == 5


def test_what_is_urgent_goes_by_its_own_score() -> None:
    assert travel_step(2, PriorityClass.HIGH, list(PriorityClass)) == 2
