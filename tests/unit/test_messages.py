from functools import partial

import pytest

from fulfillment.policy.messages import (
    BATCHES_A_THREAD,
    batches_a_message,
    can_wait,
    threads_left,
)
from fulfillment.policy.priority import PriorityClass

HIGH, MIDDLE, LOW, _ = PriorityClass


@pytest.mark.parametrize(
    ("threads", "messages", "left"),
    [(7, 9, None), (8, 0, 7), (8, 7, 0), (15, 3, 11), (16, 3, 11), (16, 14, 0), (16, 20, 0)],
)
def test_two_threads_of_sixteen_are_kept_for_urgent_messages(
    threads: int, messages: int, left: int | None
) -> None:
    assert threads_left(messages, threads * BATCHES_A_THREAD) == left


@pytest.mark.parametrize(
    ("free", "urgent", "size"),
    [
        (0, False, 1),
        (7, False, 1),
        (8, False, 2),
        (31, False, 7),
        (32, False, 8),
        (64, False, 16),
        (500, False, 16),
        (500, True, 1),
    ],
)
def test_messages_grow_with_the_room_unless_urgent(free: int, urgent: bool, size: int) -> None:
    assert batches_a_message(room=free, batches=free, urgent=urgent, threads=None) == size


@pytest.mark.parametrize(("threads", "size"), [(0, 8), (1, 8), (3, 8), (4, 4), (9, 2), (100, 2)])
def test_messages_grow_where_few_threads_are_left(threads: int, size: int) -> None:
    assert batches_a_message(room=8, batches=8, urgent=False, threads=threads) == size
    assert batches_a_message(room=8, batches=2, urgent=True, threads=threads) == 1


@pytest.mark.parametrize(
    ("ready", "free", "window", "waits"),
    [
        (50, 3, 16, True),
        (50, 4, 16, False),
        (50, 1, 7, False),
        (3, 3, 16, False),
        (3, 2, 16, True),
        (50, 7, 32, True),
    ],
)
def test_places_are_filled_by_the_quarter_of_a_window_or_with_all_there_is(
    ready: int, free: int, window: int, waits: bool
) -> None:
    waiting = partial(
        can_wait,
        {MIDDLE: ready - 1, LOW: 1},
        most_urgent_out=MIDDLE,
        free=free,
        window=window,
    )
    assert waiting(no_thread=False) is waits
    assert waiting(no_thread=True), "for a thread it waits anyhow"


@pytest.mark.parametrize(
    ("ready", "out", "waits"),
    [
        (HIGH, HIGH, False),
        (MIDDLE, LOW, False),
        (MIDDLE, MIDDLE, True),
        (LOW, HIGH, True),
        (LOW, None, False),
    ],
)
def test_what_would_be_served_first_waits_for_nothing(
    ready: PriorityClass, out: PriorityClass | None, waits: bool
) -> None:
    for no_thread in (False, True):
        assert (
            can_wait({ready: 9}, most_urgent_out=out, free=1, window=16, no_thread=no_thread)
            is waits
        )
