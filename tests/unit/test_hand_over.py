import asyncio
import threading
from collections.abc import Iterator

import pytest

from workers.hand_over import HandOver


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


async def at_once(name: str) -> str:
    return name


async def after(event: asyncio.Event, name: str) -> str:
    await event.wait()
    return name


def test_what_ends_together_is_taken_together(loop: asyncio.AbstractEventLoop) -> None:
    names = [str(number) for number in range(16)]

    rated = HandOver(loop, [at_once(name) for name in names])

    assert rated.take() == names


def test_what_lasts_holds_up_nothing(loop: asyncio.AbstractEventLoop) -> None:
    event = asyncio.Event()

    rated = HandOver(loop, [at_once("a"), after(event, "c"), at_once("b")])

    assert rated.take() == ["a", "b"]
    loop.call_soon_threadsafe(event.set)
    assert rated.take() == ["c"]


def test_all_that_ended_while_nobody_looked_is_taken_at_once(
    loop: asyncio.AbstractEventLoop,
) -> None:
    ended = threading.Event()
    event = asyncio.Event()

    async def last() -> str:
        await event.wait()
        loop.call_soon(ended.set)
        return "b"

    rated = HandOver(loop, [at_once("a"), last()])
    # The timer has handed over what ended first, if it was not the last one that did.
    loop.call_soon_threadsafe(loop.call_later, 0.02, event.set)
    assert ended.wait(10)
    flushed = threading.Event()
    loop.call_soon_threadsafe(flushed.set)
    assert flushed.wait(10)

    assert rated.take() == ["a", "b"]


def test_what_one_raised_is_raised_in_the_thread(loop: asyncio.AbstractEventLoop) -> None:
    class Died(BaseException):
        pass

    async def die() -> str:
        raise Died

    rated = HandOver(loop, [at_once("a"), die()])

    with pytest.raises(Died):
        rated.take()
