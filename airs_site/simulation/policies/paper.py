"""The paper's integrated mode: send at a rate, ask the quota, be refused, back off, ask again.

Each batch is a client of its own. The batches of an evaluation set out one after another at the
rater's rate, of which high priority has 85 in 100; each then asks until it is admitted or its time
is up. A batch that the server refuses waits the longer, the more refusals it had.
"""

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from airs_site.simulation.engine import World
from airs_site.simulation.policies.utilisation import Utilisation
from airs_site.simulation.work import Batch, Job

HIGH_SHARE: Final = 0.85
"""Of a rater's rate; the rest is for low priority."""
CROWDED: Final = 0.8
"""Share of the slots in flight from which on an owner's part is limited."""
RATE_UP: Final = 1.02
RATE_DOWN: Final = 0.98
MOST_RATE: Final = 15.0
"""In ratings a slot and service time: a quarter more than it can do, at 12 a batch."""
LEAST_RATE: Final = 0.1
"""Of the rate at the start; without a floor a rater that refuses much never sends again."""
RACE_BACKOFF_S: Final = (30.0, 1800.0)
LONGEST_DOUBLING: Final = 10
LOW_PATIENCE: Final = 1.5
"""How much longer low priority waits."""


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
        self._rate = [
            world.pool.ready[rater] / world.batch_s(rater, world.batch)
            for rater in range(len(world.raters))
        ]
        self._least_rate = [rate * LEAST_RATE for rate in self._rate]
        self._in_flight: dict[tuple[int, str], int] = {}
        Utilisation(world)

    def submitted(self, job: Job) -> None:
        """Let its batches set out."""
        self._set_out(job, -(-job.unsent // self._world.batch))

    def has_room(self, rater: int) -> None:
        """Do nothing: a client learns of room only by asking."""

    def finished(self, batch: Batch) -> None:
        """Go a little faster."""
        rater = batch.job.rater
        self._in_flight[rater, batch.job.evaluation.owner] -= 1
        # The rate counts batches, its limit ratings.
        most = MOST_RATE / self._world.batch * max(1, self._world.pool.ready[rater])
        self._rate[rater] = min(
            self._rate[rater] * RATE_UP, most / self._world.batch_s(rater, self._world.batch)
        )

    def changed(self, job: Job) -> None:
        """Let what was lost with a replica ask again, if nothing of the job asks any more."""
        if job.unsent:
            self._ask(job, 0)

    def _set_out(self, job: Job, batches: int) -> None:
        if not batches or not job.unsent:
            return
        self._ask(job, 0)
        share = 1 - HIGH_SHARE if job.evaluation.low else HIGH_SHARE
        pause_s = 1 / (self._rate[job.rater] * share)
        self._world.call_at(self._world.now + pause_s, partial(self._set_out, job, batches - 1))

    def _ask(self, job: Job, refusals: int) -> None:
        world = self._world
        if not job.unsent:
            return
        world.counts.attempts += 1
        if self._admits(job) and world.pool.room[job.rater] > 0:
            if world.send(job):
                key = job.rater, job.evaluation.owner
                self._in_flight[key] = self._in_flight.get(key, 0) + 1
            return
        wait_s = self._wait_s(job, refusals)
        world.call_at(world.now + wait_s, partial(self._ask, job, refusals + 1))

    def _wait_s(self, job: Job, refusals: int) -> float:
        """Return how long a batch waits after a refusal, of which it had so many before."""
        if self._chance.random() < self._tuning.race:
            rate = self._rate[job.rater] * RATE_DOWN
            self._rate[job.rater] = max(rate, self._least_rate[job.rater])
            first_s, most_s = RACE_BACKOFF_S
            return min(first_s * 2.0 ** min(refusals, LONGEST_DOUBLING), most_s)
        wait_s = self._tuning.backoff_s * (0.5 + self._chance.random())
        return wait_s * LOW_PATIENCE if job.evaluation.low else wait_s

    def _admits(self, job: Job) -> bool:
        pool = self._world.pool
        slots, in_flight = pool.ready[job.rater], pool.held[job.rater]
        gate = self._tuning.low_gate if job.evaluation.low else 1.0
        if in_flight >= gate * slots:
            return False
        own = self._in_flight.get((job.rater, job.evaluation.owner), 0)
        return in_flight <= CROWDED * slots or own < self._tuning.owner_cap * slots
