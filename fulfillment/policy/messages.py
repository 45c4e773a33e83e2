"""Messages to executors: how many there may be, and how many batches each carries.

The message, not the rating, is what costs, and each has a thread of an executor until its last
batch has ended. Sent one by one as places come free, the batches of slow models would have all
threads, and an urgent message would wait in the broker for one of them. So a few are kept for it.
"""

from collections.abc import Mapping
from math import ceil
from typing import Final

from fulfillment.policy.priority import PriorityClass

BATCHES_A_THREAD: Final = 16
"""The most of a message; executors have so many slots for each of their threads."""
KEPT_THREADS: Final = 2
"""Of sixteen and more, for HIGH; one of eight, none of fewer."""


def threads_left(messages: int, slots: int) -> int | None:
    """Return how many more messages may leave that are not of HIGH, None while any number may.

    `messages` are out; `slots` are those of all executors.
    """
    threads = slots // BATCHES_A_THREAD
    kept = min(KEPT_THREADS, threads // 8)
    return max(0, threads - kept - messages) if kept else None


def can_wait(
    ready: Mapping[PriorityClass, int],
    *,
    most_urgent_out: PriorityClass | None,
    free: int,
    window: int,
    no_thread: bool,
) -> bool:
    """Say whether what is READY may wait though there is room, where replicas have work enough.

    Filled one by one as they come free, places would each cost a claim and a message. So a quarter
    of the window is waited for, unless what is READY ends before that; and where `no_thread` is
    left, for a thread. Not with what is urgent, or more urgent than all that is out: that would be
    served first. All counts are in batches; `free` are the places of the highest class READY.
    """
    highest = highest_of(ready)
    if highest is None or highest is PriorityClass.HIGH:
        return False
    if most_urgent_out is None or highest < most_urgent_out:
        return False
    return no_thread or free < min(sum(ready.values()), window // 4)


def highest_of(ready: Mapping[PriorityClass, int]) -> PriorityClass | None:
    """Return the highest class of which anything is READY."""
    return min((cls for cls, batches in ready.items() if batches), default=None)


def batches_a_message(*, room: int, batches: int, urgent: bool, threads: int | None) -> int:
    """Return how many of these batches one message carries, of a rater with so much room.

    What leaves now takes no more than half of the `threads` that are left for it.
    """
    if urgent:
        return 1
    least = 1 if threads is None else ceil(batches / max(1, threads // 2))
    return min(max(room // 4, least, 1), BATCHES_A_THREAD)
