"""Batches as intake cut them, the evaluations that they are of, and the archive that they ask.

A cut batch keeps its ratings. What was rated meanwhile is struck out when it is claimed; what is in
flight elsewhere waits, and is looked for by a later claim of the batch.
"""

import heapq
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum, auto
from typing import Final

from airs_site.simulation.work import IN_FLIGHT, NEW, STORED, Archive, Batch, Job
from fulfillment.policy.batching import cut

FAILURES_KEPT: Final = timedelta(minutes=10)
"""How long it is known of a rating that it fails for good."""


class State(Enum):
    """Where a cut batch stands."""

    READY = auto()
    LEASED = auto()
    WAITING = auto()
    """For flights of other batches."""
    DONE = auto()


@dataclass(slots=True, eq=False)
class Cut:
    """A batch as intake cut it."""

    job: "CutJob"
    number: int
    """In the job."""
    open: list[int]
    """Ratings without an outcome, but for those that are sent."""
    state: State = State.READY


@dataclass(slots=True, eq=False)
class CutJob(Job):
    """An evaluation in batches."""

    cuts: list[Cut] = field(default_factory=list)
    ready: list[tuple[int, Cut]] = field(default_factory=list)
    """A heap, by number."""
    unsent: int = 0
    """Ratings in READY batches."""
    open: int = 0
    """Ratings without an outcome."""

    @classmethod
    def of(cls, job: Job, size: int) -> "CutJob":
        """Cut a job that was just submitted."""
        made = cls(**{each.name: getattr(job, each.name) for each in fields(Job)})
        made.cuts = [
            Cut(job=made, number=number, open=list(part))
            for number, part in enumerate(cut(job.pending, size))
        ]
        made.ready = [(each.number, each) for each in made.cuts]
        made.unsent = made.open = len(job.pending)
        made.pending = []
        return made

    def take(self) -> Cut | None:
        """Take its first READY batch off, None if there is none."""
        if not self.ready:
            return None
        each = heapq.heappop(self.ready)[1]
        self.unsent -= len(each.open)
        return each

    def give_back(self, each: Cut) -> None:
        """Let a batch be READY."""
        each.state = State.READY
        self.unsent += len(each.open)
        heapq.heappush(self.ready, (each.number, each))


@dataclass(slots=True, eq=False, kw_only=True)
class CutBatch(Batch):
    """What was sent of a cut batch."""

    cut: Cut
    sent_s: float
    score: int
    """Its priority as the model server is told it."""
    replica: int = -1

    @property
    def rank(self) -> int:
        """By which a replica takes the smallest first."""
        return -self.score


@dataclass(slots=True, eq=False)
class CutArchive(Archive):
    """The archive, and which batches wait for what is in flight."""

    failed_s: dict[int, float] = field(default_factory=dict)
    """When ratings failed for good."""
    waiting: dict[int, list[Cut]] = field(default_factory=dict)
    """By rating. Some wait no more."""
    woken: list[Cut] = field(default_factory=list)
    """Batches that may go on, since the last time that somebody looked."""

    def claim(self, each: Cut, now: float) -> list[int]:
        """Strike out what is there by now; return what may be sent, which is in flight then."""
        job = each.job
        sent, waits = [], []
        for rating in each.open:
            if self.layers.second_look and self.states[rating] == STORED:
                job.free += 1
            elif self._fails(rating, job, now):
                job.failed += 1
            elif self.layers.single_flight and self.states[rating] == IN_FLIGHT:
                waits.append(rating)
                self.waiting.setdefault(rating, []).append(each)
            else:
                if self.states[rating] == NEW:
                    self.states[rating] = IN_FLIGHT
                sent.append(rating)
        if ended := len(each.open) - len(waits) - len(sent):
            job.open -= ended
            job.last_s = now
        each.open = waits
        each.state = State.LEASED if sent else State.WAITING if waits else State.DONE
        return sent

    def put_back(self, each: Cut, ids: list[int]) -> None:
        """Undo the flights of a batch that found no place."""
        self._ground(ids)
        each.open = [*ids, *each.open]
        self.woken.append(each)

    def finish(self, batch: Batch, now: float) -> list[Job]:
        """Store what a batch computed; return its job."""
        each = cut_of(batch)
        job = each.job
        failed = job.failing.intersection(batch.ids)
        for rating in batch.ids:
            if rating in failed:
                self.failed_s[rating] = now
            if self.states[rating] != STORED:
                stays = self.layers.archive and rating not in failed
                self.states[rating] = STORED if stays else NEW
            self._land(rating)
        lost = sum(rating in failed for rating in batch.ids)
        job.computed += len(batch.ids) - lost
        job.failed += lost
        job.open -= len(batch.ids)
        job.last_s = now
        if job.is_expired or not each.open:
            self._close(each, now)
        elif all(self.states[rating] == IN_FLIGHT for rating in each.open):
            each.state = State.WAITING
        else:
            self.woken.append(each)
        return [job]

    def lose(self, batch: Batch) -> list[Job]:
        """Undo a batch whose replica is gone; return its job."""
        each = cut_of(batch)
        self._ground(batch.ids)
        each.open = [*batch.ids, *each.open]
        if each.job.is_expired:
            self._close(each, each.job.last_s)
        else:
            self.woken.append(each)
        return [each.job]

    def expire(self, job: Job, now: float) -> None:
        """End what the job did not start by its deadline, after a last look into the archive.

        What a batch that is under way waits for ends with that batch.
        """
        job = cut_job(job)
        for each in job.cuts:
            if each.state in (State.READY, State.WAITING):
                self._close(each, now)
        job.ready, job.unsent = [], 0
        job.is_expired = True

    def _fails(self, rating: int, job: Job, now: float) -> bool:
        """Say whether a rating has failed for good since the job was submitted, and of late."""
        failed_s = self.failed_s.get(rating, -1.0)
        return failed_s >= job.submitted_s and now - failed_s < FAILURES_KEPT.total_seconds()

    def _ground(self, ids: list[int]) -> None:
        for rating in ids:
            if self.states[rating] == IN_FLIGHT:
                self.states[rating] = NEW
            self._land(rating)

    def _land(self, rating: int) -> None:
        for each in self.waiting.pop(rating, ()):
            if each.state is State.WAITING:
                each.state = State.READY
                self.woken.append(each)

    def _close(self, each: Cut, now: float) -> None:
        job = each.job
        looks = self.layers.archive and self.layers.second_look
        found = sum(self.states[rating] == STORED for rating in each.open) if looks else 0
        if found:
            job.last_s = now
        job.free += found
        job.late += len(each.open) - found
        job.open -= len(each.open)
        each.open, each.state = [], State.DONE


def cut_of(batch: Batch) -> Cut:
    """Return the cut batch that a batch under way is of."""
    assert isinstance(batch, CutBatch)
    return batch.cut


def cut_job(job: Job) -> CutJob:
    """Return a job as one in batches."""
    assert isinstance(job, CutJob)
    return job
