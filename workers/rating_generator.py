"""The Rating Generator: an executor's work on the batches of one message.

1. Take the batches over (leases): what is another's by now is dropped.
2. For each, concurrently: the plug-in prepares one call, the model client makes it, the plug-in
   parses the answer. A call that fails as a whole for the sake of one item is bisected until that
   item stands alone; before each further call the lease is extended, or the work stops.
3. Whatever has finished is written together: ratings, requests, flights, in one transaction under
   the fence. What is left open goes back with the time of its next try.

A batch that three executors died on runs item by item, each named in its row before its call, so
that the next death shows the culprit. Nothing here keeps state that matters: killed anywhere, the
lease ends and the batch goes again.
"""

import asyncio
import logging
import math
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar
from uuid import UUID

import orjson
from django.db import DatabaseError, InterfaceError, OperationalError, connection

from fulfillment import bell, documents, leases, raters
from fulfillment.clock import database_now
from fulfillment.leases import Finish, Scored, Taken
from fulfillment.models import RaterVersion
from fulfillment.policy.batching import halves, indices_of
from fulfillment.policy.priority import priority_class
from fulfillment.policy.traffic import decide_retry
from workers.autoraters import Autorater, AutoraterError, Rated, RaterSpec, Unusable, load
from workers.model_client import CallOutcome, CallResult, Endpoint, ModelClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALL_LIMIT = timedelta(seconds=120)
"""The longest call: endpoints with a longer time limit are cut to it."""
LINGER_S = 0.004
"""Wait for more batches of the message to finish, so that they share a transaction."""
ENDPOINT_MEMORY_S = 3.0
SPLIT_FROM_TRY = 3
"""A batch that failed whole twice (a 500, say) is bisected: one item may be what kills it."""
KEPT = timedelta(seconds=30)
"""When the items of a rater that was paused may be looked at again."""
SOON = timedelta(seconds=1)
_DATABASE_PAUSE_S = 0.5
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in JSON text, behind an even number of backslashes."""
DATABASE_AWAY_S = 60.0
"""How long a step is repeated while the database is away; then the lease brings the work back."""


class EndpointData(Protocol):
    """How to call a replica, as model management says."""

    url: str
    model_name: str
    headers: Mapping[str, str]
    timeout_s: float
    sends_priority: bool
    version: str


class Directory(Protocol):
    """What the generator asks of model management."""

    def endpoint(self, replica_key: str) -> Any: ...
    def report_version(self, model_id: str, version: str, now: datetime) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trouble:
    """Why sent items of a batch are to be tried again."""

    code: str
    detail: str = ""
    retry_after_s: float | None = None
    costs_attempt: bool = True
    pauses: bool = False


@dataclass(kw_only=True, slots=True)
class _Work:
    """What has become of a batch so far."""

    taken: Taken
    spec: RaterSpec
    scored: dict[int, Scored] = field(default_factory=dict)
    answered_at: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    for_good: set[int] = field(default_factory=set)
    troubles: dict[int, _Trouble] = field(default_factory=dict)
    reported: str = ""
    """The version an external server named while none was expected."""
    calls: int = 0
    seconds: float = 0.0
    succeeded: int = 0
    overloaded: int = 0
    away: int = 0
    """Calls that found nobody, or a server that is warming up."""
    stopped: bool = False
    """The lease could not be extended: no further call. What is there is written if the fence still
    holds, which it does where only the workflow was paused or ended."""


class RatingGenerator:
    """One a process: an event loop for model calls, shared by the threads that run tasks."""

    def __init__(
        self,
        *,
        boot_id: UUID,
        directory: Directory,
        utc_now: Callable[[], datetime],
        ring_completion: Callable[[Sequence[int]], None],
    ) -> None:
        self._boot_id = boot_id
        self._directory = directory
        self._ring_completion = ring_completion
        self._loop = asyncio.new_event_loop()
        self._client: ModelClient | None = None
        self._utc_now = utc_now
        self._specs: dict[int, RaterSpec] = {}
        self._endpoints: dict[str, tuple[float, EndpointData | None]] = {}
        self._database = ThreadPoolExecutor(2, thread_name_prefix="leases")
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="model-calls", daemon=True
        )
        self._thread.start()

    def rate(self, batches: Sequence[tuple[int, int, str]], *, task_id: UUID) -> None:
        """Work on the batches of a message until each is written or lost."""
        endpoints = {replica: self._endpoint(replica) for _, _, replica in batches}
        limit = _limit(endpoints.values())
        taken = _surely(
            lambda: leases.take_over(
                [(batch_id, fence) for batch_id, fence, _ in batches],
                boot_id=self._boot_id,
                task_id=task_id,
                call_limit=limit,
            )
        )
        try:
            self._rate(taken, endpoints)
        except BaseException:
            # Nobody works on them any more: give back what is still ours, for a little later.
            _surely(lambda: _give_back(taken), for_s=leases.MARGIN.total_seconds())
            raise

    def _rate(self, taken: Sequence[Taken], endpoints: Mapping[str, EndpointData | None]) -> None:
        running: set[Future[_Work]] = set()
        finished: list[_Work] = []
        for batch in taken:
            work = _Work(taken=batch, spec=self._spec(batch.rater_version_id))
            endpoint = endpoints[batch.replica]
            if endpoint is None:
                work.troubles = dict.fromkeys(
                    indices_of(batch.sent), _Trouble(code="replica_gone", costs_attempt=False)
                )
                finished.append(work)
            else:
                running.add(
                    asyncio.run_coroutine_threadsafe(self._work(work, endpoint), self._loop)
                )
        while running or finished:
            if running:
                done, running = wait_for(running, return_when=FIRST_COMPLETED)
                if running:
                    more, running = wait_for(running, timeout=LINGER_S)
                    done |= more
                finished += (future.result() for future in done)
            self._write(finished)
            finished = []

    def _spec(self, version_id: int) -> RaterSpec:
        spec = self._specs.get(version_id)
        if spec is None:
            stored = _surely(lambda: RaterVersion.objects.get(pk=version_id).spec)
            spec = self._specs[version_id] = RaterSpec(**stored)
        return spec

    def _endpoint(self, replica: str) -> EndpointData | None:
        read_at, endpoint = self._endpoints.get(replica, (-ENDPOINT_MEMORY_S, None))
        if endpoint is None or time.monotonic() - read_at > ENDPOINT_MEMORY_S:
            endpoint = _surely(lambda: self._directory.endpoint(replica))
            if len(self._endpoints) > 1_000:  # replicas come and go
                self._endpoints.clear()
            self._endpoints[replica] = (time.monotonic(), endpoint)
        return endpoint

    async def _work(self, work: _Work, endpoint: EndpointData) -> _Work:
        """Rate the sent items of one batch; never raises."""
        batch = work.taken
        items = indices_of(batch.sent)
        try:
            rows = documents.unpack(batch.payload)
            plugin = _plugin(work.spec)
            asker = _Asker(generator=self, work=work, endpoint=endpoint, plugin=plugin, rows=rows)
            if batch.lost >= leases.LOST_BEFORE_SINGLES:
                await asker.ask_singly(items)
            else:
                await asker.ask(items)
        except AutoraterError as error:
            work.troubles |= dict.fromkeys(
                set(items) - {*work.scored, *work.failed},
                _Trouble(code="plugin_unavailable", detail=str(error), costs_attempt=False),
            )
        except Exception as error:  # the outermost step: record it, keep the neighbours going
            logger.exception("batch failed", extra={"batch": batch.batch_id})
            work.troubles |= dict.fromkeys(
                set(items) - {*work.scored, *work.failed},
                _Trouble(code="internal_error", detail=repr(error)),
            )
        return work

    def close(self) -> None:
        """End the loop and its threads; what is still being worked on is left to its lease."""
        if self._client is not None:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._database.shutdown()

    async def extend(self, batch: Taken, probing: int | None, *, limit: timedelta) -> bool:
        """Extend the lease before a further call, off the event loop."""
        return await self._loop.run_in_executor(
            self._database,
            lambda: _surely(
                lambda: leases.extend(
                    batch.batch_id, batch.fence, call_limit=limit, probing=probing
                )
            ),
        )

    @property
    def client(self) -> ModelClient:
        """The model client; made on the loop it lives on."""
        if self._client is None:
            self._client = ModelClient(clock=self._utc_now)
        return self._client

    def _write(self, works: Sequence[_Work]) -> None:
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
                work.troubles |= dict.fromkeys(work.scored, _Trouble(code="internal_error"))
                work.scored = {}
                self._write([work])
            else:
                raise

    def _write_together(self, works: Sequence[_Work]) -> None:
        if not works:
            return
        for work in works:
            self._check_version(work)
        finishes = [_finish(work) for work in works]
        empty = _surely(lambda: leases.finish(finishes))
        _ring(works)
        if empty:
            self._ring_completion(empty)

    def _check_version(self, work: _Work) -> None:
        """Let the first version that an external server reports count; another one pauses."""
        if not work.reported:
            return
        report = _surely(
            lambda: self._directory.report_version(
                work.spec.model_id, work.reported, database_now()
            )
        )
        if report.changed:
            trouble = _Trouble(
                code="model_version_changed",
                detail=f"the model now calls itself {work.reported}; it was {report.version}",
                costs_attempt=False,
                pauses=True,
            )
            # What it answered without a score is no verdict either.
            work.troubles |= dict.fromkeys(work.answered_at, trouble)
            work.scored = {}
            work.failed = {i: c for i, c in work.failed.items() if i not in work.answered_at}
            work.for_good -= work.answered_at.keys()


@dataclass(kw_only=True, slots=True)
class _Asker:
    """The calls for one batch."""

    generator: RatingGenerator
    work: _Work
    endpoint: EndpointData
    plugin: Autorater
    rows: Sequence[Any]
    asked: bool = False

    async def ask_singly(self, items: Sequence[int]) -> None:
        """One call an item, named in the row before it."""
        for item in items:
            await self.ask([item], probing=item)

    async def ask(self, items: Sequence[int], *, probing: int | None = None) -> None:
        """Rate items by one call, and by more where that one tells to split."""
        if (self.asked or probing is not None) and not await self._may_call(probing):
            return
        self.asked = True
        result = await self._call(items)
        if result is None:
            await self._split(items, "plugin_error")
            return
        work = self.work
        work.seconds += result.seconds
        match result.outcome:
            case CallOutcome.SUCCESS:
                work.succeeded += 1
                if not self._parse(items, result):
                    await self._split(items, "plugin_error")
            case CallOutcome.PERMANENT | CallOutcome.SPLIT:
                work.succeeded += 1  # it was served: the server is not overloaded
                await self._split(items, result.code)
            case CallOutcome.INCOMPLETE if len(items) > 1:
                await self._halve(items)
            case CallOutcome.TRANSIENT if (
                len(items) > 1 and work.taken.attempts + 1 >= SPLIT_FROM_TRY
            ):
                await self._halve(items)
            case _:
                work.overloaded += result.outcome is CallOutcome.OVERLOAD
                self._postpone(items, result)

    async def _may_call(self, probing: int | None) -> bool:
        if self.work.stopped:
            return False
        if not await self.generator.extend(self.work.taken, probing, limit=_limit([self.endpoint])):
            self.work.stopped = True
        return not self.work.stopped

    async def _call(self, items: Sequence[int]) -> CallResult | None:
        """Return what the call came to, None if the plug-in could not prepare it."""
        try:
            call = self.plugin.prepare([self.rows[i][0] for i in items], self.work.spec)
        except Exception:  # a plug-in is somebody else's code: one bad item must stay alone
            logger.exception("plug-in failed", extra={"autorater": self.work.spec.autorater})
            return None
        result = await self.generator.client.infer(
            Endpoint(
                url=self.endpoint.url,
                model_name=self.endpoint.model_name,
                headers=self.endpoint.headers,
                timeout_s=self.endpoint.timeout_s,
                sends_priority=self.endpoint.sends_priority,
            ),
            call,
            rows=len(items),
            expected_version=self.endpoint.version,
            priority=0 if self.work.taken.best_effort else self.work.taken.priority,
            timeout_s=min(self.endpoint.timeout_s, CALL_LIMIT.total_seconds()),
        )
        # Nobody computed anything where nobody was, or where one only warms up.
        away = result.outcome is CallOutcome.WARMING
        self.work.away += away
        self.work.calls += not away
        return result

    async def _split(self, items: Sequence[int], code: str) -> None:
        if len(items) == 1:
            self.work.failed[items[0]] = code
            self.work.for_good.add(items[0])
        else:
            await self._halve(items)

    async def _halve(self, items: Sequence[int]) -> None:
        for half in halves(items):
            await self.ask(half)

    def _parse(self, items: Sequence[int], result: CallResult) -> bool:
        """Take the outcomes of a call's items, all or none; False if the plug-in has none."""
        assert result.answer is not None
        work = self.work
        if not self.endpoint.version:
            work.reported = result.answer.model_version
        rows = [self.rows[i] for i in items]
        answered_at = time.monotonic()
        try:
            parsed = self.plugin.parse([row[0] for row in rows], result.answer, work.spec)
            outcomes = [
                outcome if isinstance(outcome, Unusable) else _scored(outcome, url_digest=row[1])
                for row, outcome in zip(rows, parsed, strict=True)
            ]
        except Exception:  # as in _call
            logger.exception("plug-in failed", extra={"autorater": work.spec.autorater})
            return False
        for item, outcome in zip(items, outcomes, strict=True):
            work.answered_at[item] = answered_at
            if isinstance(outcome, Unusable):
                work.failed[item] = outcome.code
                work.for_good.add(item)
            else:
                work.scored[item] = outcome
        return True

    def _postpone(self, items: Iterable[int], result: CallResult) -> None:
        free = {CallOutcome.WARMING, CallOutcome.WRONG_VERSION, CallOutcome.PAUSE}
        trouble = _Trouble(
            code=result.code,
            detail=result.detail,
            retry_after_s=result.retry_after_s,
            costs_attempt=result.outcome not in free,
            pauses=result.outcome is CallOutcome.PAUSE,
        )
        self.work.troubles |= dict.fromkeys(items, trouble)


def _pause(rater_id: str, trouble: _Trouble, now: datetime) -> None:
    raters.pause(rater_id=rater_id, code=trouble.code, detail=trouble.detail, now=now)


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


def _scored(rated: Rated, *, url_digest: str | None) -> Scored | Unusable:
    """Turn what a plug-in says into what is stored; raise ValueError for text that cannot be."""
    if not math.isfinite(rated.score):
        return Unusable(code="not_finite", detail=f"the plug-in answered {rated.score}")
    output = None if rated.output is None else orjson.dumps(rated.output).decode()
    text = "".join((rated.label, *rated.warnings))
    text.encode()  # no lone surrogates either
    if "\0" in text or _NUL.search(output or ""):
        raise ValueError("PostgreSQL keeps no NUL")
    return Scored(
        score=rated.score,
        label=rated.label or None,
        output=output,
        warnings=rated.warnings,
        url_digest=url_digest,
    )


def _limit(endpoints: Iterable[EndpointData | None]) -> timedelta:
    """Return the longest that a call to any of these may take."""
    longest = max((e.timeout_s for e in endpoints if e is not None), default=0.0)
    return min(timedelta(seconds=longest), CALL_LIMIT)


def _finish(work: _Work) -> Finish:
    """Turn work into what is written, deciding what is tried again and when."""
    taken = work.taken
    monotonic = time.monotonic()
    finish = Finish(
        taken=taken,
        scored={
            item: scored._replace(age_s=monotonic - work.answered_at[item])
            for item, scored in work.scored.items()
        },
        failed=work.failed,
        for_good=frozenset(work.for_good),
        calls=work.calls,
        accelerator_seconds=work.seconds,
    )
    if not work.troubles:
        return finish
    worst = max(
        work.troubles.values(), key=lambda t: (t.pauses, t.costs_attempt, t.retry_after_s or 0.0)
    )
    now = _surely(database_now)
    finish.cost_attempt = worst.costs_attempt and not worst.pauses
    if worst.pauses:
        _surely(lambda: _pause(taken.rater_id, worst, now))
        finish.not_before = now + KEPT
        return finish
    decision = decide_retry(
        now=now,
        attempt=taken.attempts + 1,
        max_attempts=taken.max_attempts,
        chance=random.random(),
        retry_after_s=worst.retry_after_s,
        deadline_at=taken.deadline_at,
        call_limit=SOON,
        costs_attempt=worst.costs_attempt,
    )
    if decision.retry:
        finish.not_before = decision.not_before
    elif decision.code == "deadline":
        finish.timed_out = dict.fromkeys(work.troubles, "deadline")
    else:
        finish.failed = {**work.failed, **{i: t.code for i, t in work.troubles.items()}}
    return finish


def _ring(works: Sequence[_Work]) -> None:
    """Wake the dispatcher and tell it what the calls met."""
    met: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for work in works:
        cls = priority_class(work.taken.priority, best_effort=work.taken.best_effort)
        counts = met[work.taken.replica, int(cls)]
        counts[0] += work.succeeded
        counts[1] += work.overloaded
        counts[2] += work.away
    for (replica, cls_number), (succeeded, overloaded, away) in met.items():
        bell.ring(
            replica=replica,
            cls=cls_number,
            succeeded=succeeded,
            overloaded=overloaded,
            away=away,
        )


def _surely(step: Callable[[], T], *, for_s: float = DATABASE_AWAY_S) -> T:
    """Do a database step, again while the database is away, for as long as a lease may last.

    Each step is safe to do twice: it counts only under its fence.
    """
    deadline = time.monotonic() + for_s
    pause = threading.Event()
    while True:
        try:
            return step()
        except (DatabaseError, InterfaceError) as error:
            # psycopg2 says a plain DatabaseError when the server dies in the middle of a statement.
            lost = connection.connection is None or connection.connection.closed
            away = lost or isinstance(error, OperationalError | InterfaceError)
            connection.close()
            if not away or time.monotonic() > deadline:
                raise
            logger.warning("database is away: %s", error)
            pause.wait(_DATABASE_PAUSE_S)
