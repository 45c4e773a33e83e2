"""Rating a batch by calls that take many items: one, and more where that one tells to split.

A call that fails as a whole for the sake of one item is bisected until that item stands alone.
"""

import time
from collections.abc import Sequence

from fulfillment.policy.batching import halves
from workers.autoraters import OipCall
from workers.caller import Caller
from workers.model_client import CallOutcome

SPLIT_FROM_TRY = 3
"""A batch that failed whole twice (a 500, say) is bisected: one item may be what kills it."""
REMEMBERED_S = 600.0


class BodySizes:
    """What servers (or the proxies before them) refused as too large, so that it is not repeated.

    Kept in characters, not items: one huge row must not make small ones go alone.
    """

    def __init__(self) -> None:
        self._refused: dict[str, tuple[int, float]] = {}

    def refused(self, url: str, call: OipCall) -> None:
        """Note that a call of several items was too large."""
        if len(self._refused) > 1_000:  # addresses come and go
            self._refused.clear()
        self._refused[url] = (_size(call), time.monotonic())

    def too_large(self, url: str, call: OipCall) -> bool:
        """Say whether as much or less was refused within the last ten minutes."""
        if url not in self._refused:
            return False
        refused, at = self._refused[url]
        return time.monotonic() - at < REMEMBERED_S and _size(call) >= refused


async def rate(
    caller: Caller, items: Sequence[int], *, sizes: BodySizes, url: str, further: bool = False
) -> None:
    """Rate items, as many a call as the server takes; `further` where it is not the first call."""
    await _Bisector(caller, sizes, url, asked=further).ask(items)


class _Bisector:
    def __init__(self, caller: Caller, sizes: BodySizes, url: str, *, asked: bool) -> None:
        self._caller = caller
        self._sizes = sizes
        self._url = url
        self._asked = asked

    async def ask(self, items: Sequence[int]) -> None:
        caller, work = self._caller, self._caller.work
        if self._asked and caller.over(items):
            return
        call = caller.prepare(items)
        if call is None:
            await self._split(items, "plugin_error")
            return
        if len(items) > 1 and self._sizes.too_large(self._url, call):
            await self._halve(items)
            return
        further, self._asked = self._asked, True
        result = await caller.send(call, items, further=further)
        if result is None:
            return
        match result.outcome:
            case CallOutcome.SUCCESS:
                outcomes = caller.parse(items, result.answer)
                if outcomes is None:
                    await self._split(items, "plugin_error")
                else:
                    work.settle(items, outcomes)
            case CallOutcome.PERMANENT:
                for item in items:
                    work.fail(item, result.code, output={"detail": result.detail})
            case CallOutcome.SPLIT:
                if result.code == "payload_too_large":
                    self._sizes.refused(self._url, call)
                await self._halve(items)
            case CallOutcome.INCOMPLETE if len(items) > 1:
                await self._halve(items)
            case CallOutcome.TRANSIENT if len(items) > 1 and self._failed_twice(items):
                await self._halve(items)
            case _:
                work.postpone(items, result)

    def _failed_twice(self, items: Sequence[int]) -> bool:
        taken = self._caller.work.taken
        return min(taken.tries_of(item) for item in items) + 1 >= SPLIT_FROM_TRY

    async def _split(self, items: Sequence[int], code: str) -> None:
        if len(items) == 1:
            self._caller.work.fail(items[0], code)
        else:
            await self._halve(items)

    async def _halve(self, items: Sequence[int]) -> None:
        for half in halves(items):
            await self.ask(half)


def _size(call: OipCall) -> int:
    return sum(len(cell) for column in call.inputs.values() for cell in column)
