"""A world whose batches stay as intake cut them, as those of production do.

`engine` forms a batch when it leaves. Here it is cut at submission: a claim may find that it has
nothing to send, and takes a turn in the order of service all the same. What one pass of a policy
sends is claimed together, as the dispatcher does it: of equal ratings the highest class takes the
flight and goes to the emptiest replica, and what finds no place is READY again.
"""

from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter
from typing import Final

from airs_site.simulation.cuts import Cut, CutArchive, CutBatch, CutJob, cut_job
from airs_site.simulation.engine import Options, Policy, World
from airs_site.simulation.pool import Replica
from airs_site.simulation.trace import Workload
from airs_site.simulation.work import Batch, Job
from fulfillment.policy import quota
from fulfillment.policy.priority import (
    PriorityClass,
    celery_priority,
    least_score,
    travel_step,
)

SCORES: Final = {
    PriorityClass.HIGH: 90,
    PriorityClass.MIDDLE: 50,
    PriorityClass.LOW: 10,
    PriorityClass.BEST_EFFORT: 0,
}
"""API scores that stand for classes where it matters what a model server is told."""


class KeptWorld(World):
    """Runs a policy over batches that stay as intake cut them."""

    def __init__(self, workload: Workload, policy: Policy, options: Options) -> None:
        super().__init__(workload, policy, options)
        self._cut_archive = CutArchive(states=bytearray(workload.distinct), layers=options.layers)
        self._archive = self._cut_archive
        self._claimed: list[tuple[PriorityClass, Cut]] = []
        """What is to be claimed together, with the class that it goes by; room is kept for it."""
        self._taking: list[Replica] = []
        """Replicas that got something in this pass."""

    def room(self, rater: int, cls: PriorityClass) -> int:
        """Return how many batches of a class the rater's replicas may take."""
        return sum(max(0, self._free(replica, cls)) for replica in self.pool.serving(rater))

    def loads(self, rater: int) -> Sequence[quota.ReplicaLoad]:
        """Return what the rater's replicas hold of their windows."""
        return [
            quota.ReplicaLoad(
                key=str(replica.number), version="", window=self.pool.window, held=replica.held
            )
            for replica in self.pool.serving(rater)
        ]

    def out(self, rater: int) -> Iterator[Batch]:
        """Yield the batches that the rater's replicas hold."""
        for replica in self.pool.serving(rater):
            yield from _held(replica)

    def send(self, job: Job, priority_class: PriorityClass | None = None) -> bool:
        """Let the job's next batch be claimed when the pass is over; False if none is READY."""
        each = cut_job(job).take()
        if each is None:
            return False
        self.unsent[job.rater] -= len(each.open)
        self.pool.room[job.rater] -= 1
        self._claimed.append(
            (job.priority_class if priority_class is None else priority_class, each)
        )
        return True

    def claim(self, waiting: Collection[PriorityClass] = ()) -> bool:
        """Claim what was sent since the last time; say whether some of it found no place.

        `waiting` are the classes that still wait, which tell by which priority it goes.
        """
        claimed = sorted(self._claimed, key=itemgetter(0))
        self._claimed = []
        formed = [(cls, each, self._cut_archive.claim(each, self.now)) for cls, each in claimed]
        is_short = False
        for cls, each, ids in formed:
            self.pool.room[each.job.rater] += 1
            if not ids:
                # It took no place after all: another pass may fill that.
                self._dirty[each.job.rater] = None
                self._end_if_done(each.job)
            elif self.room(each.job.rater, cls):
                self._taking.append(self._put(each, ids, cls, waiting))
            else:
                self._cut_archive.put_back(each, ids)
                is_short = True
        return is_short

    def end_pass(self) -> None:
        """Let replicas begin with what they got, and what found no place be READY again."""
        self._wake(news=False)
        taking, self._taking = self._taking, []
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
            self.end_pass()

    def _free(self, replica: Replica, cls: PriorityClass) -> int:
        """Return the places of a replica that are free for a class."""
        kept = 0
        if cls is not PriorityClass.HIGH:
            high = sum(batch.priority_class is PriorityClass.HIGH for batch in _held(replica))
            kept = quota.kept_for_high(self.pool.window, high)
        return self.pool.window - replica.held - kept

    def _put(
        self, each: Cut, ids: list[int], cls: PriorityClass, waiting: Collection[PriorityClass]
    ) -> Replica:
        job = each.job
        step = travel_step(celery_priority(SCORES[cls]), cls, waiting)
        batch = CutBatch(
            job=job,
            ids=ids,
            service_s=self.service_s(job, len(ids)),
            number=self.counts.calls,
            priority_class=cls,
            cut=each,
            sent_s=self.now,
            score=max(SCORES[cls], least_score(step)),
        )
        self.counts.calls += 1
        job.batches_out += 1
        # Where most is free, of several the first.
        replica = max(
            self.pool.serving(job.rater), key=lambda each: (self._free(each, cls), -each.number)
        )
        self.pool.put(batch, replica)
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


def _held(replica: Replica) -> list[Batch]:
    """Return the batches that a replica computes or has queued."""
    queued = [batch for _, _, batch in replica.queue]
    return queued if replica.running is None else [*queued, replica.running]
