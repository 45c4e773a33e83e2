"""Evaluations under way, the archive, and how batches are formed and ended.

A batch is formed when it leaves, as the claim of production does it: ratings that the archive got
meanwhile are done for free, those in flight elsewhere wait for that flight, the rest is sent.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from airs_site.simulation.keys import fails_for_good
from airs_site.simulation.workload import Evaluation
from fulfillment.policy.priority import PriorityClass

NEW, IN_FLIGHT, STORED = 0, 1, 2

_NOTHING: Final = frozenset[int]()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """What stands between requests and the model; each can be switched off to see its worth."""

    archive: bool = True
    second_look: bool = True
    """The archive is asked again when a batch leaves."""
    single_flight: bool = True


@dataclass(slots=True, eq=False)
class Job:
    """One evaluation and how far it is."""

    place: int
    """In the workload."""
    evaluation: Evaluation
    rater: int
    priority_class: PriorityClass
    submitted_s: float
    deadline_s: float
    """The instant, unlike the evaluation's."""
    submitted_at: datetime
    deadline_at: datetime
    requests: int
    hits: int
    """Found in the archive at submit."""
    pending: list[int]
    """Ratings that were not sent yet, in their order from `head` on."""
    failing: frozenset[int]
    """Ratings that fail for good if this job computes them."""
    head: int = 0
    in_flight: int = 0
    waiting: int = 0
    """Ratings that wait for another job's flight."""
    batches_out: int = 0
    computed: int = 0
    free: int = 0
    """Done without a call after submit."""
    failed: int = 0
    """For good."""
    late: int = 0
    """Neither computed nor started by the deadline."""
    last_s: float = 0.0
    """When the last rating came."""
    is_expired: bool = False
    has_ended: bool = False

    @property
    def unsent(self) -> int:
        """Ratings that may still be sent."""
        return len(self.pending) - self.head

    @property
    def open(self) -> int:
        """Ratings without an outcome."""
        return len(self.pending) - self.head + self.in_flight + self.waiting


@dataclass(slots=True, eq=False)
class Batch:
    """Ratings on one replica, computing or queued there."""

    job: Job
    ids: list[int]
    service_s: float
    number: int
    priority_class: PriorityClass
    started_s: float = -1.0

    @property
    def rank(self) -> int:
        """By which a replica takes the smallest first."""
        return self.priority_class


@dataclass(slots=True, eq=False)
class Archive:
    """Which ratings there are and which are in flight, and who waits for those."""

    states: bytearray
    layers: Layers
    waiters: dict[int, list[Job]] = field(default_factory=dict)

    @classmethod
    def of(cls, distinct: int, layers: Layers) -> "Archive":
        """Return an empty archive for that many different ratings."""
        return cls(states=bytearray(distinct), layers=layers)

    def warm(self, ids: NDArray[np.int32]) -> None:
        """Take in ratings that were there before the first day."""
        if self.layers.archive:
            np.frombuffer(self.states, dtype=np.uint8)[ids] = STORED

    def missing(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return those that the archive does not have."""
        missing: NDArray[np.int32] = ids[np.frombuffer(self.states, dtype=np.uint8)[ids] != STORED]
        return missing

    def form(self, job: Job, size: int, now: float) -> list[int]:
        """Take a batch of up to `size` ratings off the job; none if nothing is left to compute."""
        taken: list[int] = []
        states, pending, head = self.states, job.pending, job.head
        looks, coalesces = self.layers.second_look, self.layers.single_flight
        while head < len(pending) and len(taken) < size:
            rating = pending[head]
            head += 1
            if looks and states[rating] == STORED:
                job.free += 1
                job.last_s = now
            elif coalesces and states[rating] == IN_FLIGHT:
                self.waiters.setdefault(rating, []).append(job)
                job.waiting += 1
            else:
                if states[rating] == NEW:
                    states[rating] = IN_FLIGHT
                taken.append(rating)
        job.head = head
        job.in_flight += len(taken)
        return taken

    def finish(self, batch: Batch, now: float) -> list[Job]:
        """Store what a batch computed; return all jobs that got something by it."""
        job, ids = batch.job, batch.ids
        failed = len(job.failing.intersection(ids)) if job.failing else 0
        job.in_flight -= len(ids)
        job.computed += len(ids) - failed
        job.failed += failed
        job.last_s = now
        met = [job]
        for rating in ids:
            fails = failed and rating in job.failing
            if self.states[rating] != STORED:
                self.states[rating] = NEW if fails or not self.layers.archive else STORED
            for waiter in self.waiters.pop(rating, ()):
                if waiter.waiting and not waiter.is_expired:
                    waiter.waiting -= 1
                    waiter.failed += bool(fails)
                    waiter.free += not fails
                    waiter.last_s = now
                    met.append(waiter)
        return met

    def lose(self, batch: Batch) -> list[Job]:
        """Undo a batch whose replica is gone; return all jobs that have something to send again."""
        job = batch.job
        job.in_flight -= len(batch.ids)
        for rating in batch.ids:
            if self.states[rating] == IN_FLIGHT:
                self.states[rating] = NEW
        met = [job]
        _send_again(job, batch.ids)
        for rating in batch.ids:
            for waiter in self.waiters.pop(rating, ()):
                if waiter.waiting and not waiter.is_expired:
                    waiter.waiting -= 1
                    _send_again(waiter, [rating])
                    met.append(waiter)
        return met

    def expire(self, job: Job, now: float) -> None:
        """End what the job did not start by its deadline, after a last look into the archive."""
        rest = job.pending[job.head :]
        looks = self.layers.archive and self.layers.second_look
        found = sum(self.states[rating] == STORED for rating in rest) if looks else 0
        if found:
            job.free += found
            job.last_s = now
        job.late += len(rest) - found + job.waiting
        job.waiting = 0
        job.pending = []
        job.head = 0
        job.is_expired = True


def failing(ids: NDArray[np.int32], evaluation: Evaluation) -> frozenset[int]:
    """Return the ratings that fail for good where this evaluation computes them."""
    if not evaluation.permanent:
        return _NOTHING
    return frozenset(ids[fails_for_good(ids, evaluation)].tolist())


def _send_again(job: Job, ids: list[int]) -> None:
    if job.is_expired:
        job.late += len(ids)
    else:
        job.pending = ids + job.pending[job.head :]
        job.head = 0
