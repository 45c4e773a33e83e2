"""One model call of a batch, within all its limits: lease, deadline, the rater's pace.

The first call of a try starts at once. Before each further one (bisecting, asking once more, items
one by one, the next of a chat batch) the lease is extended, or the work stops.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from fulfillment.leases import Taken
from workers.autoraters import Autorater, ChatCall, OipCall, Unusable
from workers.model_client import CallResult, Endpoint, ModelClient, pairs
from workers.settling import expected_version
from workers.work import CALL_LIMIT, SHORTEST_CALL_S, EndpointData, Trouble, Work, scored

logger = logging.getLogger(__name__)

FRESH_S = 1.0
"""A lease extended so short a while ago does for the next item of a chat batch, too."""
STALE_S = 5.0
"""A lease older than this is extended before any call: of its margin enough must be left to write
what comes back."""

Extend = Callable[[Taken, int | None], Awaitable[bool]]
"""Extends a lease for a call that probes an item alone, if any; False means stop."""


class Caller:
    """The calls for one batch; nothing a server or a plug-in does raises."""

    def __init__(
        self,
        *,
        work: Work,
        endpoint: EndpointData,
        plugin: Autorater,
        rows: Sequence[Any],
        client: ModelClient,
        extend: Extend,
    ) -> None:
        self.work = work
        self.rows = rows
        self._endpoint = endpoint
        self._plugin = plugin
        self._client = client
        self._extend = extend
        self._probing: int | None = None
        self._extended_at = work.began_at
        self._turn_at = work.began_at

    def prepare(self, items: Sequence[int]) -> Any:
        """Return the plug-in's call for these items, None if it cannot make one."""
        try:
            return self._plugin.prepare([self.rows[i][0] for i in items], self.work.spec)
        except Exception:  # a plug-in is somebody else's code: one bad item must stay alone
            logger.exception("plug-in failed", extra={"autorater": self.work.spec.autorater})
            return None

    def parse(self, items: Sequence[int], answer: Any) -> list[Any] | None:
        """Return a Scored or Unusable for each item, None if the plug-in does not manage them."""
        rows = [self.rows[i] for i in items]
        try:
            parsed = self._plugin.parse([row[0] for row in rows], answer, self.work.spec)
            return [
                outcome if isinstance(outcome, Unusable) else scored(outcome, url_digest=row[1])
                for row, outcome in zip(rows, parsed, strict=True)
            ]
        except Exception:  # as in prepare
            logger.exception("plug-in failed", extra={"autorater": self.work.spec.autorater})
            return None

    async def send(
        self, call: Any, items: Sequence[int], *, further: bool = False, later: bool = False
    ) -> CallResult[Any] | None:
        """Send a call; None where it may not be made, with what then becomes of its items noted.

        `further`: it is one that the dispatcher could not foresee. `later`: it had to wait for
        another one of its batch.
        """
        work = self.work
        requests = _requests_in(call, self._endpoint)
        if work.taken.max_qps is not None:
            await self._wait_for_turn(work.taken.max_qps, requests)
        if further or self._lease_age_s() > (FRESH_S if later else STALE_S):
            await self.extend()
        limit_s = self._limit_s(items, further=further)
        if self.over(items):
            return None
        if limit_s is None:
            work.troubles |= dict.fromkeys(items, Trouble(code="deadline", costs_attempt=False))
            return None
        # The dispatcher reckons with one request a call.
        work.further += further + requests - 1
        result: CallResult[Any] = await self._call(call, rows=len(items), limit_s=limit_s)
        work.count(result, cut=limit_s < self._longest_s)
        version = result.answer.model_version if result.answer is not None else ""
        if version and not self._endpoint.managed and version != self._endpoint.version:
            work.reported = version
        return result

    async def probe(self, item: int | None) -> None:
        """Name the item in the row that the next calls are made for alone; None for no item."""
        self._probing = item
        await self.extend()

    async def extend(self) -> None:
        """Extend the lease; note where that is refused."""
        if not self.work.stopped:
            self.work.stopped = not await self._extend(self.work.taken, self._probing)
            self._extended_at = time.monotonic()

    def over(self, items: Sequence[int]) -> bool:
        """Say whether no further call may be made; items that wait for a halt are noted."""
        work = self.work
        if work.halted is not None and not work.stopped:
            work.troubles |= dict.fromkeys(items, work.halted)
        return work.stopped or work.halted is not None

    @property
    def _longest_s(self) -> float:
        return min(self._endpoint.timeout_s, CALL_LIMIT.total_seconds())

    def _limit_s(self, items: Sequence[int], *, further: bool) -> float | None:
        """Return how long a call may take, None where it may not start.

        A first try that starts before the deadline may end within its call limit; a retry must end
        before the deadline.
        """
        left_s = self.work.left_s()
        taken = self.work.taken
        retried = taken.attempts and any(taken.tries_of(item) for item in items)
        if further or retried:
            return min(self._longest_s, left_s) if left_s >= SHORTEST_CALL_S else None
        return self._longest_s if left_s > 0 else None

    async def _wait_for_turn(self, max_qps: float, requests: int) -> None:
        """Keep the rater's `max_qps` within the batch, after so many requests at once."""
        starts_at = max(time.monotonic(), self._turn_at)
        self._turn_at = starts_at + requests / max_qps
        while (wait_s := starts_at - time.monotonic()) > 0 and not self.work.stopped:
            await asyncio.sleep(min(wait_s, STALE_S))
            if self._lease_age_s() > STALE_S:
                await self.extend()

    def _lease_age_s(self) -> float:
        return time.monotonic() - self._extended_at

    async def _call(self, call: Any, *, rows: int, limit_s: float) -> CallResult[Any]:
        taken, data = self.work.taken, self._endpoint
        endpoint = Endpoint(
            url=data.url,
            model_name=data.model_name,
            headers=data.headers,
            timeout_s=data.timeout_s,
            sends_priority=data.sends_priority,
            priority_style=data.priority_style,
            scoring=data.scoring,
        )
        expected = expected_version(data, self.work.spec.model_version)
        own = 0 if taken.best_effort else taken.priority
        priority = max(own, self.work.least_priority)
        if isinstance(call, ChatCall):
            return await self._client.chat(
                endpoint, call, expected_version=expected, priority=priority, timeout_s=limit_s
            )
        return await self._client.infer(
            endpoint,
            call,
            rows=rows,
            expected_version=expected,
            priority=priority,
            timeout_s=limit_s,
        )


def _requests_in(call: Any, endpoint: EndpointData) -> int:
    if not isinstance(call, OipCall):
        return 1
    return pairs.requests_in(call, endpoint=endpoint.scoring)


def call_limit(endpoint: EndpointData | None) -> timedelta:
    """Return the longest that a call to an endpoint may take."""
    return min(timedelta(seconds=endpoint.timeout_s if endpoint else 0.0), CALL_LIMIT)
