import pytest

from fulfillment.policy.messages import BATCHES_A_THREAD, batches_a_message, threads_left


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
