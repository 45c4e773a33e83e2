"""A world whose batches stay as intake cut them, as those of production do.

`engine` forms a batch when it leaves. Here it is cut at submission and keeps its ratings: what was
rated meanwhile is struck out when it is claimed, what is in flight elsewhere waits and is looked
for again by a later claim, which takes a turn in the order of service though it may send nothing.
What one pass of a policy sends is claimed together, as the dispatcher does it: of equal ratings the
highest class takes the flight and goes to the emptiest replica, and what finds no place is READY
again.
"""

import heapq
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum, auto
from typing import Final

from airs_site.simulation.engine import Options, Policy, World
from airs_site.simulation.pool import Replica
from airs_site.simulation.trace import Workload
from airs_site.simulation.work import IN_FLIGHT, NEW, STORED, Archive, Batch, Job
from fulfillment.policy import traffic
from fulfillment.policy.batching import cut
from fulfillment.policy.priority import (
    PriorityClass,
    celery_priority,
    least_score,
    raised_step,
)

SCORES: Final = {
    PriorityClass.HIGH: 90,
    PriorityClass.MIDDLE: 50,
    PriorityClass.LOW: 10,
    PriorityClass.BEST_EFFORT: 0,
}
"""API scores that stand for classes where it matters what a model server is told."""
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
        for rating in ids:
            self.states[rating] = NEW
            self._land(rating)
        each.open = [*ids, *each.open]
        self.woken.append(each)

    def finish(self, batch: Batch, now: float) -> list[Job]:
        """Store what a batch computed; return its job."""
        each = _cut_of(batch)
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
        each = _cut_of(batch)
        for rating in batch.ids:
            if self.states[rating] == IN_FLIGHT:
                self.states[rating] = NEW
            self._land(rating)
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
        job = _cut_job(job)
        for each in job.cuts:
            if each.state in (State.READY, State.WAITING):
                self._close(each, now)
        job.ready, job.unsent = [], 0
        job.is_expired = True

    def _fails(self, rating: int, job: Job, now: float) -> bool:
        """Say whether a rating has failed for good since the job was submitted, and of late."""
        failed_s = self.failed_s.get(rating, -1.0)
        return failed_s >= job.submitted_s and now - failed_s < FAILURES_KEPT.total_seconds()

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


class KeptWorld(World):
    """Runs a policy over batches that stay as intake cut them."""

    def __init__(self, workload: Workload, policy: Policy, options: Options) -> None:
        super().__init__(workload, policy, options)
        self._cut_archive = CutArchive(states=bytearray(workload.distinct), layers=options.layers)
        self._archive = self._cut_archive
        self._claimed: list[Cut] = []
        """What is to be claimed together; room is kept for it."""

    def room(self, rater: int, cls: PriorityClass) -> int:
        """Return how many batches of a class the rater's replicas may take."""
        return self.pool.room_below(rater, self._limit(cls))

    def send(self, job: Job, priority_class: PriorityClass | None = None) -> bool:
        """Let the job's next batch be claimed when the pass is over; False if none is READY.

        On its way it is of its workflow's class, also where that was given up: claim and replicas
        of production do not know of that.
        """
        each = _cut_job(job).take()
        if each is None:
            return False
        self.unsent[job.rater] -= len(each.open)
        self.pool.room[job.rater] -= 1
        self._claimed.append(each)
        return True

    def claim(self, top: PriorityClass | None = None) -> None:
        """Claim what was sent since the last time.

        `top` is the highest class that waits still: what goes before it goes by the priority of
        that class.
        """
        claimed = sorted(self._claimed, key=lambda each: each.job.priority_class)
        self._claimed = []
        formed = [(each, self._cut_archive.claim(each, self.now)) for each in claimed]
        taking = []
        for each, ids in formed:
            self.pool.room[each.job.rater] += 1
            if not ids:
                # It took no place after all: another pass may fill that.
                self._dirty[each.job.rater] = None
                self._end_if_done(each.job)
            elif self.room(each.job.rater, each.job.priority_class):
                taking.append(self._put(each, ids, top))
            else:
                self._cut_archive.put_back(each, ids)
        self._wake(news=False)
        for replica in taking:
            if replica.running is None:
                self._take_up(replica)

    def _job(self, place: int) -> Job:
        return CutJob.of(super()._job(place), self.batch)

    def _acted(self) -> None:
        self._passed()
        # A pass looks at all raters, whoever rang.
        self._dirty.update(dict.fromkeys(range(len(self.raters))))

    def _passed(self) -> None:
        if self._claimed:
            self.claim()

    def _limit(self, cls: PriorityClass) -> int:
        kept = 0 if cls is PriorityClass.HIGH else traffic.kept_for_high(self.pool.window)
        return self.pool.window - kept

    def _put(self, each: Cut, ids: list[int], top: PriorityClass | None) -> Replica:
        job = each.job
        step = celery_priority(SCORES[job.priority_class])
        if top is not None and job.priority_class > top:
            step = raised_step(step, top)
        batch = CutBatch(
            job=job,
            ids=ids,
            service_s=self.service_s(job, len(ids)),
            number=self.counts.calls,
            priority_class=job.priority_class,
            cut=each,
            sent_s=self.now,
            score=max(SCORES[job.priority_class], least_score(step)),
        )
        self.counts.calls += 1
        job.batches_out += 1
        replica = self.pool.put(batch, by_number=True)
        batch.replica = replica.number
        return replica

    def _finish(self, replica: Replica, epoch: int) -> None:
        super()._finish(replica, epoch)
        self._wake()

    def _undo(self, batch: Batch) -> None:
        super()._undo(batch)
        self._wake()

    def _wake(self, *, news: bool = True) -> None:
        """Let batches be READY that may go on; `news` asks for another pass."""
        woken, self._cut_archive.woken = self._cut_archive.woken, []
        for each in woken:
            each.job.give_back(each)
            self.unsent[each.job.rater] += len(each.open)
            self._policy.changed(each.job)
            if news:
                self._dirty[each.job.rater] = None


def _cut_of(batch: Batch) -> Cut:
    assert isinstance(batch, CutBatch)
    return batch.cut


def _cut_job(job: Job) -> CutJob:
    assert isinstance(job, CutJob)
    return job
