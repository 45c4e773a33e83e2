"""The Rating Generator: an executor's work on the batches of one message.

1. Take the batches over (leases): what is another's by now is dropped.
2. For each, concurrently: the plug-in prepares calls, the model client makes them, the plug-in
   parses the answers. How a batch becomes calls is in `batch_calls` (one call, bisected where it
   fails for the sake of one item) and `item_calls` (a call an item); what a call may cost, in
   `caller`.
3. Whatever has finished is written together: ratings, requests, flights, in one transaction under
   the fence. What is left open goes back with the time of its next try (`settling`). Of a batch
   that makes many calls, what is done for a while is written before the rest.

A batch that two executors died on runs item by item, each named in its row before its call, so
that the next death shows the culprit; never two of them at once in a process, or the neighbour of
a culprit would be taken for one. Nothing here keeps state that matters: killed anywhere, the lease
ends and the batch goes again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from django.db import DatabaseError, InterfaceError, OperationalError

from fulfillment import documents, leases, parts, raters
from fulfillment.clock import database_now
from fulfillment.leases import Finish, Taken
from fulfillment.models import RaterVersion
from fulfillment.policy.batching import indices_of
from fulfillment.policy.priority import CELERY_STEPS, least_score
from fulfillment.purged_traces import PURGED
from workers import batch_calls, item_calls, settling
from workers.autoraters import Autorater, AutoraterError, RaterSpec, load
from workers.batch_calls import BodySizes
from workers.caller import Caller, call_limit
from workers.hand_over import HandOver
from workers.model_client import ModelClient
from workers.patience import surely
from workers.work import EndpointData, Trouble, Work

logger = logging.getLogger(__name__)

PART_S = 5.0
"""What a batch has finished for so long is written, though its other items are still computed."""
ENDPOINT_MEMORY_S = 3.0
SOON = timedelta(seconds=1)
LAST_STEP = CELERY_STEPS[-1]


class Directory(Protocol):
    """What the generator asks of model management."""

    def endpoint(self, replica_key: str) -> Any: ...
    def report_version(self, model_id: str, version: str, now: datetime) -> Any: ...


class RatingGenerator:
    """One a process: an event loop for model calls, shared by the threads that run tasks."""

    def __init__(
        self,
        *,
        boot_id: UUID,
        directory: Directory,
        utc_now: Callable[[], datetime],
        ring_completion: Callable[[Sequence[int]], None],
        part_s: float = PART_S,
    ) -> None:
        self._boot_id = boot_id
        self._directory = directory
        self._ring_completion = ring_completion
        self._part_s = part_s
        self._loop = asyncio.new_event_loop()
        self._client: ModelClient | None = None
        self._utc_now = utc_now
        self._specs: dict[int, RaterSpec] = {}
        self._endpoints: dict[str, tuple[float, EndpointData | None]] = {}
        self._sizes = BodySizes()
        self._suspect = asyncio.Lock()
        self._database = ThreadPoolExecutor(2, thread_name_prefix="leases")
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="model-calls", daemon=True
        )
        self._thread.start()

    def rate(
        self, batches: Sequence[tuple[int, int, str]], *, task_id: UUID, step: int = LAST_STEP
    ) -> None:
        """Work on the batches of a message until each is written or lost.

        Models are called with the priority of the message's Celery step where that is higher than
        the workflow's own: the dispatcher has raised it.
        """
        endpoints = {key: self._endpoint(key) for key in {replica for _, _, replica in batches}}
        limit = max(call_limit(endpoint) for endpoint in endpoints.values())
        taken = surely(
            lambda: leases.take_over(
                [(batch_id, fence) for batch_id, fence, _ in batches],
                boot_id=self._boot_id,
                task_id=task_id,
                call_limit=limit,
            )
        )
        try:
            self._rate(taken, endpoints, least_score(step))
        except BaseException:
            # Nobody works on them any more: give back what is still ours, for a little later.
            surely(lambda: _give_back(taken), for_s=leases.MARGIN.total_seconds())
            raise

    def close(self) -> None:
        """End the loop and its threads; what is still being worked on is left to its lease."""
        if self._client is not None:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._database.shutdown()

    # What the threads of tasks do

    def _rate(
        self,
        taken: Sequence[Taken],
        endpoints: Mapping[str, EndpointData | None],
        least_priority: int,
    ) -> None:
        running: list[tuple[Work, EndpointData]] = []
        finished: list[Work] = []
        for batch in taken:
            work = Work(
                taken=batch,
                spec=self._spec(batch.rater_version_id),
                least_priority=least_priority,
            )
            endpoint = endpoints[batch.replica]
            if endpoint is not None and settling.serves(endpoint, work.spec.model_version):
                running.append((work, endpoint))
                continue
            # It ended, or an operator accepted another version, since the batch was sent; or what
            # is remembered of it is too old.
            self._endpoints.pop(batch.replica, None)
            code = "replica_gone" if endpoint is None else "wrong_version"
            trouble = Trouble(code=code, costs_attempt=False)
            work.troubles = dict.fromkeys(indices_of(batch.sent), trouble)
            finished.append(work)
        rated = HandOver(self._loop, [self._work(*of_batch) for of_batch in running])
        left = len(running)
        while left or finished:
            if left:
                ended = rated.take()
                left -= len(ended)
                finished += ended
            self._write(finished)
            finished = []

    def _spec(self, version_id: int) -> RaterSpec:
        spec = self._specs.get(version_id)
        if spec is None:
            stored = surely(lambda: RaterVersion.objects.get(pk=version_id).spec)
            spec = self._specs[version_id] = RaterSpec(**stored)
        return spec

    def _endpoint(self, replica: str) -> EndpointData | None:
        """Return how to call a replica; where nobody can tell, what was last known of it."""
        read_at, endpoint = self._endpoints.get(replica, (-ENDPOINT_MEMORY_S, None))
        if endpoint is None or time.monotonic() - read_at > ENDPOINT_MEMORY_S:
            try:
                endpoint = surely(lambda: self._directory.endpoint(replica))
            except (DatabaseError, InterfaceError):
                raise
            except Exception as error:  # somebody else's code, perhaps over a network
                logger.warning("model management is away", extra={"error": repr(error)})
            if len(self._endpoints) > 1_000:  # replicas come and go
                self._endpoints.clear()
            self._endpoints[replica] = (time.monotonic(), endpoint)
        return endpoint

    def _write(self, works: Sequence[Work]) -> None:
        """Write works together; one that cannot be written does not hold up the others."""
        try:
            self._write_together(works)
        except (OperationalError, InterfaceError):
            raise  # the database is away for longer than a lease lasts
        except Exception:
            if len(works) > 1:
                for work in works:
                    self._write([work])
            elif works and works[0].scored:
                (work,) = works
                logger.exception("ratings refused", extra={"batch": work.taken.batch_id})
                work.troubles |= dict.fromkeys(work.scored, Trouble(code="internal_error"))
                work.scored = {}
                self._write([work])
            else:
                raise

    def _write_together(self, works: Sequence[Work]) -> None:
        if not works:
            return
        for work in works:
            if work.reported:
                report = self._report_version(work)
                if report.changed or report.key_version != work.spec.model_version:
                    settling.distrust(work, version=report.version, pauses=report.changed)
        now = surely(database_now) if any(work.troubles for work in works) else None
        for work in works:
            if pause := settling.pause_of(work):
                assert now is not None
                _pause(work.taken.rater_id, pause, now)
        finishes = [settling.finish_of(work, now=now) for work in works]
        empty = surely(lambda: leases.finish(finishes))
        settling.ring(works)
        if empty:
            self._ring_completion(empty)

    def _report_version(self, work: Work) -> Any:
        """Let the first version that an external server reports count; another one pauses.

        One that counts by now may be another than the batch was sent for.
        """
        return surely(
            lambda: self._directory.report_version(
                work.spec.model_id, work.reported, database_now()
            )
        )

    # What the event loop does

    async def _work(self, work: Work, endpoint: EndpointData) -> Work:
        """Rate the sent items of one batch; never raises."""
        try:
            plugin = _plugin(work.spec)
            caller = Caller(
                work=work,
                endpoint=endpoint,
                plugin=plugin,
                rows=documents.unpack(work.taken.payload),
                client=self._model_client(),
                extend=lambda taken, probing: self._extend(taken, probing, endpoint),
            )
            await self._ask(caller, plugin, endpoint)
        except AutoraterError as error:
            trouble = Trouble(code="plugin_unavailable", detail=str(error), costs_attempt=False)
            work.troubles |= dict.fromkeys(work.unsettled(), trouble)
        except Exception as error:  # the outermost step: record it, keep the neighbours going
            logger.exception("batch failed", extra={"batch": work.taken.batch_id})
            trouble = Trouble(code="internal_error", detail=repr(error))
            work.troubles |= dict.fromkeys(work.unsettled(), trouble)
        return work

    async def _ask(self, caller: Caller, plugin: Autorater, endpoint: EndpointData) -> None:
        async def rate(items: Sequence[int], *, further: bool = False) -> None:
            if plugin.protocol == "openai":
                await self._in_parts(caller.work, item_calls.rate(caller, items))
            else:
                await batch_calls.rate(
                    caller, items, sizes=self._sizes, url=endpoint.url, further=further
                )

        taken = caller.work.taken
        sent = indices_of(taken.sent)
        purged = [item for item in sent if caller.rows[item][0] is None]
        caller.work.failed |= dict.fromkeys(purged, PURGED)
        items = [item for item in sent if item not in purged]
        if not items:
            return
        if taken.lost < leases.LOST_BEFORE_SINGLES:
            await rate(items)
            return
        for item in items:
            async with self._suspect:
                await caller.probe(item)
                if caller.over([item]):
                    continue
                await rate([item], further=item != items[0])
                await caller.probe(None)

    async def _in_parts(self, work: Work, calls: Coroutine[Any, Any, None]) -> None:
        """Make the calls of a batch, and write what they finish meanwhile."""
        ended = asyncio.Event()
        writing = asyncio.create_task(self._write_parts(work, ended))
        try:
            await calls
        finally:
            ended.set()
            await writing

    async def _write_parts(self, work: Work, ended: asyncio.Event) -> None:
        """Write what is done every few seconds, until the batch has ended."""
        while not await _within(ended, self._part_s):
            part = settling.part_of(work)
            if part is None or work.reported:
                continue
            try:
                kept = await self._in_thread(partial(parts.write, part))
            except Exception:  # the finish finds out which item it is
                logger.exception("part refused", extra={"batch": work.taken.batch_id})
                continue
            if kept:
                settling.written(work, part)
            else:
                work.stopped = True

    async def _extend(self, taken: Taken, probing: int | None, endpoint: EndpointData) -> bool:
        """Extend the lease before a further call, off the event loop."""
        return await self._in_thread(
            lambda: leases.extend(
                taken.batch_id, taken.fence, call_limit=call_limit(endpoint), probing=probing
            )
        )

    async def _in_thread(self, step: Callable[[], bool]) -> bool:
        return await self._loop.run_in_executor(self._database, lambda: surely(step))

    def _model_client(self) -> ModelClient:
        """Return the model client; made on the loop it lives on."""
        if self._client is None:
            self._client = ModelClient(clock=self._utc_now)
        return self._client


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Say whether the event happened within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _pause(rater_id: str, trouble: Trouble, now: datetime) -> None:
    surely(
        lambda: raters.pause(rater_id=rater_id, code=trouble.code, detail=trouble.detail, now=now)
    )


def _give_back(taken: Sequence[Taken]) -> None:
    not_before = database_now() + SOON
    leases.finish([Finish(taken=t, cost_attempt=False, not_before=not_before) for t in taken])


def _plugin(spec: RaterSpec) -> Autorater:
    """Return the plug-in in the version that the workflow was made with.

    The dispatcher sends what some executor has; during an upgrade that may be another one.
    """
    plugin = load(spec.autorater)
    if plugin.version != spec.plugin_version:
        raise AutoraterError(
            f"{spec.autorater} is installed in version {plugin.version}, not {spec.plugin_version}"
        )
    return plugin
