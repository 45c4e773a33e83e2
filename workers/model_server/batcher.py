"""Carries calls through the device: a call's sequences wait, are batched with others', come back.

Everything here runs on the event loop, so there are no locks; only `embed` runs elsewhere, in as
many threads as the device has lanes. When a lane becomes free the scheduler forms its batch; calls
that arrive meanwhile are parsed and tokenised while the lanes compute.

A query comes back with each of its results: equal sequences of a call or a batch are computed once,
and vectors of sequences that are said to come back are kept (bounded). This changes no score beyond
float rounding. What the devices spent on a batch is shared out equally among those who asked for
its sequences: all of a batch are padded to the same length.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from workers.model_server import scheduler
from workers.model_server.meter import Meter
from workers.model_server.reader import Ids, Tokens
from workers.model_server.scheduler import Waiting
from workers.model_server.serving import Serving

logger = logging.getLogger(__name__)


FAILURES_IN_A_ROW = 3
"""After so many the device will not recover by itself (`Batcher.broken`)."""


class Embedder(Protocol):
    """A device: vectors (sequences, width) of sequences no longer than `step`."""

    def embed(self, sequences: Sequence[Ids], step: int) -> np.ndarray: ...


class DeadlinePassed(Exception):
    """The call's time was over before the device came to it."""


class DeviceFailed(Exception):
    """The device raised, or gave a vector that is not finite."""


class Closed(Exception):
    """The batcher was closed before the device came to the call."""


@dataclass(kw_only=True, eq=False, slots=True)
class Call:
    """One call's sequences on their way: `vectors` fills until it holds all of `wanted`."""

    wanted: frozenset[Ids]
    finished: asyncio.Future[None]
    vectors: dict[Ids, np.ndarray] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    compute_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A waiting sequence with what the scheduler need not know."""

    waiting: Waiting
    ids: Ids
    call: Call
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """What a call gets: the vectors of its kept sequences and of the others, (rows, width) each."""

    kept: np.ndarray
    once: np.ndarray
    compute_s: float
    """The call's share of the devices' time, in seconds of one device."""


class QueryCache:
    """The least recently used query embeddings go first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._vectors: OrderedDict[Ids, np.ndarray] = OrderedDict()

    def get(self, ids: Ids) -> np.ndarray | None:
        """The vector, if it is still there."""
        vector = self._vectors.get(ids)
        if vector is not None:
            self._vectors.move_to_end(ids)
        return vector

    def put(self, ids: Ids, vector: np.ndarray) -> None:
        """Keep a vector, and drop the oldest above the size."""
        self._vectors[ids] = vector.copy()  # a view would keep its whole batch alive
        self._vectors.move_to_end(ids)
        if len(self._vectors) > self._size:
            self._vectors.popitem(last=False)


class Batcher:
    """The queue of one device. `observe(sequences)` hears of every batch."""

    def __init__(
        self,
        embedder: Embedder,
        serving: Serving,
        meter: Meter,
        *,
        clock: Callable[[], float],
        observe: Callable[[int], None] = lambda sequences: None,
    ) -> None:
        self._embedder = embedder
        self._serving = serving
        self._shaping = serving.shaping
        self._meter = meter
        self._clock = clock
        self._observe = observe
        self._queries = QueryCache(serving.cached_queries)
        self._entries: dict[int, Entry] = {}
        self._keys = itertools.count()
        self._passed = 0
        self._free = serving.lanes
        self._failures = 0
        self._closed = False
        self.broken = asyncio.Event()
        self._threads = ThreadPoolExecutor(serving.lanes, thread_name_prefix="lane")

    async def embed(
        self,
        kept: Sequence[Tokens],
        once: Sequence[Tokens],
        *,
        priority: int,
        deadline_at: float | None,
    ) -> Vectors:
        """The vectors of sequences that come back in other calls, and of those that do not.

        Raises DeadlinePassed, DeviceFailed or Closed. When the caller is cancelled, what has not
        been computed yet is dropped.
        """
        if self._closed:  # while the call's texts were being read
            raise Closed()
        kept_ids = [tokens.ids for tokens in kept]
        once_ids = [tokens.ids for tokens in once]
        call = Call(
            wanted=frozenset(kept_ids).union(once_ids),
            finished=asyncio.get_running_loop().create_future(),
        )
        comes_back = set(kept_ids)
        self._enqueue(call, comes_back, priority=priority, deadline_at=deadline_at)
        self._fill_lanes()
        try:
            await call.finished
        finally:
            self._drop(call)
        vectors = call.vectors
        for ids in comes_back:
            self._queries.put(ids, vectors[ids])
        return Vectors(
            kept=stacked(vectors, kept_ids),
            once=stacked(vectors, once_ids),
            compute_s=call.compute_s,
        )

    def close(self) -> None:
        """Fail what still waits, and let the lanes' threads end."""
        self._closed = True
        for entry in list(self._entries.values()):
            self._fail(entry.call, Closed())
        self._threads.shutdown(wait=False)

    def _enqueue(
        self, call: Call, kept: set[Ids], *, priority: int, deadline_at: float | None
    ) -> None:
        now = self._clock()
        for ids in call.wanted:
            known = self._queries.get(ids) if ids in kept else None
            if known is not None:
                call.vectors[ids] = known
                continue
            waiting = Waiting(
                key=next(self._keys),
                priority=priority,
                step=scheduler.step_for(len(ids), self._shaping.steps),
                deadline_at=deadline_at,
            )
            self._entries[waiting.key] = Entry(waiting=waiting, ids=ids, call=call, since=now)
            call.keys.append(waiting.key)
        self._settle(call)

    def _fill_lanes(self) -> None:
        """Form a batch for each free lane; this is the one place where the scheduler is asked."""
        while self._free and self._entries:
            now = self._clock()
            batch = scheduler.next_batch(
                (entry.waiting for entry in self._entries.values()),
                now=now,
                passed=self._passed,
                shaping=self._shaping,
            )
            for key in batch.expired:
                if key in self._entries:  # else its call has gone with another of its keys
                    call = self._entries[key].call
                    self._fail(call, DeadlinePassed("its time was over in the queue"))
            if not batch.rows:
                return
            self._passed = batch.passed
            self._start([self._entries.pop(key) for key in batch.rows], batch.step, now)

    def _start(self, entries: Sequence[Entry], step: int, now: float) -> None:
        sequences = list(dict.fromkeys(entry.ids for entry in entries))
        self._free -= 1
        spent_s = self._meter.begin(now)
        running = asyncio.get_running_loop().run_in_executor(
            self._threads, self._embedder.embed, sequences, step
        )
        running.add_done_callback(lambda done: self._finish(entries, sequences, spent_s, done))
        self._take_note(entries, sequences, step, now)  # while the lane computes

    def _take_note(
        self, entries: Sequence[Entry], sequences: Sequence[Ids], step: int, now: float
    ) -> None:
        self._observe(len(sequences))
        self._meter.waits.add([now - entry.since for entry in entries])
        self._meter.full_rows += self._shaping.rows(step)
        self._meter.real_tokens += sum(map(len, sequences))
        self._meter.padded_tokens += self._serving.padded_tokens(len(sequences), step)

    def _finish(
        self,
        entries: Sequence[Entry],
        sequences: Sequence[Ids],
        spent_s: float,
        done: asyncio.Future[np.ndarray],
    ) -> None:
        self._free += 1
        cost_s = self._meter.end(self._clock(), sequences=len(sequences)) - spent_s
        self._fill_lanes()  # first, so that the lane does not wait for the answers
        error = done.exception()
        if error is None and not np.isfinite(done.result()).all():
            error = ArithmeticError("a vector is not finite")
        if error is not None:
            self._give_up(entries, error)
        else:
            share_s = cost_s * self._shaping.devices / len(entries)
            self._deliver(entries, dict(zip(sequences, done.result(), strict=True)), share_s)

    def _give_up(self, entries: Sequence[Entry], error: BaseException) -> None:
        logger.error("device failed", extra={"sequences": len(entries)}, exc_info=error)
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self.broken.set()
        for entry in entries:
            self._fail(entry.call, DeviceFailed(f"{type(error).__name__}: {error}"))

    def _deliver(
        self, entries: Sequence[Entry], vectors: Mapping[Ids, np.ndarray], share_s: float
    ) -> None:
        self._failures = 0
        for entry in entries:
            entry.call.compute_s += share_s
            entry.call.vectors[entry.ids] = vectors[entry.ids]
            self._settle(entry.call)

    def _settle(self, call: Call) -> None:
        if len(call.vectors) == len(call.wanted) and not call.finished.done():
            call.finished.set_result(None)

    def _fail(self, call: Call, error: Exception) -> None:
        self._drop(call)
        if not call.finished.done():
            call.finished.set_exception(error)

    def _drop(self, call: Call) -> None:
        for key in call.keys:
            self._entries.pop(key, None)


def stacked(vectors: Mapping[Ids, np.ndarray], rows: Sequence[Ids]) -> np.ndarray:
    """The vectors of rows, (rows, width); of none, an empty array."""
    return np.stack([vectors[ids] for ids in rows]) if rows else np.empty((0, 0), np.float32)
