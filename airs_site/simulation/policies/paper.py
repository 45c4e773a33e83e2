"""The paper's integrated mode: send at a rate, ask the quota, be refused, back off, ask again.

Each evaluation has a sender, which sends its batches one after another: at the rater's rate, of
which high priority has 85 in 100. Each attempt asks the quota; a batch that is refused stands in
its sender's line again when its wait is over, and one that the server refuses waits the longer, the
more refusals it had. What is to be computed was decided at submit.
"""

import heapq
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from airs_site.simulation.engine import World
from airs_site.simulation.policies.utilisation import Utilisation
from airs_site.simulation.work import Batch, Job
from fulfillment.policy.priority import PriorityClass

HIGH_SHARE: Final = 0.85
"""Of a rater's rate; the rest is for low priority."""
CROWDED: Final = 0.8
"""Share of the slots in flight from which on an owner's part is limited."""
RATE_UP: Final = 1.02
RATE_DOWN: Final = 0.98
MOST_RATE: Final = 15.0
"""In attempts a slot and service time."""
LEAST_RATE: Final = 0.1
"""Of the rate at the start; without a floor a rater that refuses much never sends again."""
RACE_BACKOFF_S: Final = (30.0, 1800.0)
LONGEST_DOUBLING: Final = 10
LOW_PATIENCE: Final = 1.5
"""How much longer low priority waits."""

_Line = list[tuple[float, int]]
"""A heap: when a batch may ask (again), and how many refusals it had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What the paper leaves to operators."""

    name: str
    backoff_s: float
    owner_cap: float
    """Share of the slots that one owner may have in flight where it is crowded."""
    low_gate: float
    """Share of the slots from which on low priority is refused."""
    race: float
    """Share of the refusals that are admitted by the quota and refused by the server."""


PAPER: Final = Tuning(name="paper", backoff_s=120, owner_cap=0.15, low_gate=0.33, race=0.02)
TUNED_1: Final = Tuning(
    name="paper-tuned-1", backoff_s=30, owner_cap=0.10, low_gate=0.90, race=0.02
)
TUNED_2: Final = Tuning(name="paper-tuned-2", backoff_s=15, owner_cap=0.15, low_gate=0.90, race=0)


class Paper:
    """Polling, with the paper's rate, quota and back-off."""

    def __init__(self, tuning: Tuning = PAPER) -> None:
        self.name = tuning.name
        self._tuning = tuning

    def begin(self, world: World) -> None:
        """Start at one batch a slot and service time."""
        self._world = world
        self._chance = Random(world.options.seed)
        self._service_s = [world.batch_s(rater, world.batch) for rater in range(len(world.raters))]
        self._rate = [
            max(1, ready) / service_s
            for ready, service_s in zip(world.pool.ready, self._service_s, strict=True)
        ]
        self._least_rate = [rate * LEAST_RATE for rate in self._rate]
        self._lines: dict[int, _Line] = {}
        """Of the senders that are at work, by the place of their job."""
        self._owned: dict[tuple[int, str], list[Job]] = {}
        """Jobs that have not ended, by rater and owner."""
        world.look_once()
        Utilisation(world)

    def submitted(self, job: Job) -> None:
        """Let its sender begin."""
        self._owned.setdefault((job.rater, job.evaluation.owner), []).append(job)
        self._line_up(job)

    def has_room(self, rater: int) -> None:
        """Do nothing: a client learns of room only by asking."""

    def finished(self, batch: Batch) -> None:
        """Go a little faster."""
        rater = batch.job.rater
        most = MOST_RATE * max(1, self._world.pool.ready[rater]) / self._service_s[rater]
        self._rate[rater] = min(self._rate[rater] * RATE_UP, most)

    def changed(self, job: Job) -> None:
        """Let what was lost with a replica ask again."""
        if job.has_ended:
            self._owned[job.rater, job.evaluation.owner].remove(job)
        elif job.unsent:
            self._line_up(job)

    def _line_up(self, job: Job) -> None:
        """Give the job's sender what stands in no line."""
        line = self._lines.get(job.place, [])
        batches = -(-job.unsent // self._world.batch) - len(line)
        for _ in range(batches):
            heapq.heappush(line, (self._world.now, 0))
        if line and job.place not in self._lines:
            self._lines[job.place] = line
            self._send_next(job)

    def _send_next(self, job: Job) -> None:
        """Let the next batch of the job ask, if it is its time."""
        world, line = self._world, self._lines[job.place]
        if not line or not job.unsent:
            del self._lines[job.place]
            return
        next_s, refusals = line[0]
        if next_s <= world.now:
            heapq.heappop(line)
            world.counts.attempts += 1
            if self._admits(job):
                world.send(job)
            else:
                heapq.heappush(line, (world.now + self._wait_s(job, refusals), refusals + 1))
            share = HIGH_SHARE if job.priority_class is PriorityClass.HIGH else 1 - HIGH_SHARE
            next_s = world.now + 1 / (self._rate[job.rater] * share)
        world.call_at(next_s, partial(self._send_next, job))

    def _wait_s(self, job: Job, refusals: int) -> float:
        """Return how long a batch waits after a refusal, of which it had so many before."""
        if self._chance.random() < self._tuning.race:
            rate = self._rate[job.rater] * RATE_DOWN
            self._rate[job.rater] = max(rate, self._least_rate[job.rater])
            first_s, most_s = RACE_BACKOFF_S
            return min(first_s * 2.0 ** min(refusals, LONGEST_DOUBLING), most_s)
        wait_s = self._tuning.backoff_s * (0.5 + self._chance.random())
        return wait_s if job.priority_class is PriorityClass.HIGH else wait_s * LOW_PATIENCE

    def _admits(self, job: Job) -> bool:
        pool = self._world.pool
        slots, in_flight = pool.ready[job.rater], pool.held[job.rater]
        gate = 1.0 if job.priority_class is PriorityClass.HIGH else self._tuning.low_gate
        if in_flight >= gate * slots:
            return False
        # With the one that asks: else an owner's part of a few slots would never be limited.
        if in_flight + 1 <= CROWDED * slots:
            return True
        own = sum(each.batches_out for each in self._owned[job.rater, job.evaluation.owner])
        return own < self._tuning.owner_cap * slots
