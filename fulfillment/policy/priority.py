"""The one table of priorities: API score, class, Celery step, and what each upstream calls it.

In our API a larger score is more urgent. kombu's Redis transport serves step 0 first, Triton and
OIP serve 1 first, vLLM serves the lowest number first and SGLang the highest: the directions are
hidden here.
"""

from collections.abc import Collection
from enum import IntEnum

DEFAULT_SCORE = 50
CELERY_STEPS = tuple(range(10))
"""`priority_steps` of every producer and worker; kombu's default folds ten levels into four."""


class PriorityClass(IntEnum):
    """Classes in the order in which they are served."""

    HIGH = 0
    MIDDLE = 1
    LOW = 2
    BEST_EFFORT = 3


_HIGHEST = {
    PriorityClass.HIGH: 100,
    PriorityClass.MIDDLE: 66,
    PriorityClass.LOW: 33,
    PriorityClass.BEST_EFFORT: 0,
}
"""API score, by class."""


def check_score(score: int) -> None:
    """Raise ValueError unless `score` is an API priority."""
    if not 0 <= score <= 100:
        raise ValueError(f"priority {score} is outside 0-100")


def priority_class(score: int, *, best_effort: bool = False) -> PriorityClass:
    """Return the class of an API score (0-100)."""
    check_score(score)
    if best_effort:
        return PriorityClass.BEST_EFFORT
    if score >= 67:
        return PriorityClass.HIGH
    return PriorityClass.MIDDLE if score >= 34 else PriorityClass.LOW


def celery_priority(score: int) -> int:
    """Return the Celery step, 0 (served first) to 9."""
    check_score(score)
    return 9 - score * 10 // 101


def least_score(step: int) -> int:
    """Return the lowest API score whose Celery step is `step`."""
    return -(-(9 - step) * 101 // 10)


def travel_step(step: int, cls: PriorityClass, waiting: Collection[PriorityClass]) -> int:
    """Return the step at which a batch travels that leaves while these classes still wait.

    It is its own while no other class waits. Else the dispatcher has put classes in order, which
    Celery and the model server would undo: what was served for its share would wait behind all
    that comes. So all that is below HIGH travels at the first step of the highest class that waits,
    or of its own if that is higher. What is urgent goes by its own score.
    """
    if cls is PriorityClass.HIGH or not set(waiting) - {cls}:
        return step
    return celery_priority(_HIGHEST[min(cls, *waiting)])


def oip_priority(score: int) -> int:
    """Return the Triton/OIP `priority` parameter, 1 (served first) to 101."""
    check_score(score)
    return 101 - score


def vllm_priority(score: int) -> int:
    """Return vLLM's `priority`, 0 (served first) to 100."""
    check_score(score)
    return 100 - score


def sglang_priority(score: int) -> int:
    """Return SGLang's `priority`, 100 (served first) to 0."""
    check_score(score)
    return score
