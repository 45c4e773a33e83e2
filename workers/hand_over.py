"""From the event loop, where batches are rated, to the thread of the task, which writes them.

A message's batches end one after the other within milliseconds. What ends together is handed over
together: it shares a transaction, and the thread wakes once.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

LINGER_S = 0.004
"""Wait for more batches of the message to end."""

T = TypeVar("T")


class HandOver(Generic[T]):
    """What a thread wants done on an event loop, and takes back as it ends."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, steps: Sequence[Coroutine[Any, Any, T]]
    ) -> None:
        self._loop = loop
        # The loop's own references to tasks are weak.
        self._running: set[asyncio.Task[T]] = set()
        self._ended: list[asyncio.Task[T]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._handed: SimpleQueue[list[asyncio.Task[T]]] = SimpleQueue()
        loop.call_soon_threadsafe(self._begin, steps)

    def take(self) -> list[T]:
        """Wait until something has ended; return all that has. Raises what one of them raised."""
        ended = self._handed.get()
        with suppress(Empty):
            while True:
                ended += self._handed.get_nowait()
        return [task.result() for task in ended]

    # What the event loop does

    def _begin(self, steps: Sequence[Coroutine[Any, Any, T]]) -> None:
        for step in steps:
            task = self._loop.create_task(step)
            self._running.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        self._ended.append(task)
        if not self._running:
            self._hand_over()
        elif self._timer is None:
            self._timer = self._loop.call_later(LINGER_S, self._hand_over)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._handed.put(self._ended)
        self._ended = []
