"""Rating a batch by a call an item, as chat models want it, several at once.

How many at once is granted by the dispatcher with the lease; the model's window counts them. An
answer that is no clear score is asked for once more, unless the item's tries are over.
"""

import asyncio
from collections.abc import Sequence

from workers.autoraters import Unusable
from workers.caller import Caller
from workers.model_client import CallOutcome
from workers.work import SHORTEST_CALL_S


async def rate(caller: Caller, items: Sequence[int]) -> None:
    """Rate items, each by a call of its own."""
    granted = max(1, caller.work.taken.calls)
    free = asyncio.Semaphore(granted)

    async def rate_one(place: int, item: int) -> None:
        async with free:
            if not caller.over([item]):
                await _ask(caller, item, later=place >= granted)

    async with asyncio.TaskGroup() as group:
        for place, item in enumerate(items):
            group.create_task(rate_one(place, item))


async def _ask(caller: Caller, item: int, *, later: bool) -> None:
    work = caller.work
    for again in (False, True):
        call = caller.prepare([item])
        if call is None:
            work.fail(item, "plugin_error")
            return
        result = await caller.send(call, [item], further=again, later=later)
        if result is None:
            return
        if result.outcome is CallOutcome.PERMANENT:
            work.fail(item, result.code, output={"detail": result.detail})
            return
        if result.outcome is not CallOutcome.SUCCESS:
            work.postpone([item], result)
            return
        outcomes = caller.parse([item], result.answer)
        if outcomes is None:
            work.fail(item, "plugin_error")
            return
        (outcome,) = outcomes
        unclear = isinstance(outcome, Unusable) and outcome.ask_again
        if again or not unclear or not _may_ask_again(caller, item):
            work.settle([item], [outcome])
            return


def _may_ask_again(caller: Caller, item: int) -> bool:
    taken = caller.work.taken
    tries_left = taken.max_attempts - taken.tries_of(item) - 1
    return tries_left > 0 and caller.work.left_s() >= SHORTEST_CALL_S
