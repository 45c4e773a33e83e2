"""The service's own policies together: order of service, commitments, rebalancing.

They are the functions that production calls; here is what its forecast and its rebalancer do
around them: keep what they remember, hand them values, carry out what they decide.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from airs_site.simulation.engine import World
from airs_site.simulation.policies.deadlines import PERIOD_S, Deadlines
from airs_site.simulation.policies.ordered import Ordered
from airs_site.simulation.work import Batch, Job
from fulfillment.policy import commitments, ordering
from fulfillment.policy.priority import PriorityClass

_MEAN_WEIGHT: Final = 0.02
"""Of a batch in the moving average of what a batch takes."""


_OWN_WEIGHT: Final = 10
"""Batches of a job after which its own mean says as much of it as its rater's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Which of the service's policies are on; each can be switched off to see its worth."""

    name: str = "airs"
    shares: Mapping[PriorityClass, float] = field(default_factory=lambda: ordering.DEFAULT_SHARES)
    presses: bool = True
    """Deadlines that press are served first, and owners over their share last."""
    fair: bool = True
    """What an owner was served of late counts."""
    commits: bool = True
    rebalances: bool = True
    to_zero: bool = True
    """Raters without work may have no replica."""
    cost_error: float = 1.0
    """By which the planner is off when it thinks of what a batch takes."""


SERVICE: Final = Setup()


@dataclass(slots=True)
class _Own:
    """Full batches of a job, and how long they took together."""

    batches: int = 0
    seconds: float = 0.0


class Airs:
    """Order, commitments and rebalancing of the service."""

    def __init__(self, setup: Setup = SERVICE) -> None:
        self.name = setup.name
        self._setup = setup
        self.expected: dict[int, bool] = {}
        """Whether all of a job was expected in time when it came, by its place."""

    def begin(self, world: World) -> None:
        """Start with nothing remembered."""
        self._world = world
        setup = self._setup
        self._ordered = Ordered(
            world, self, shares=setup.shares, presses=setup.presses, fair=setup.fair
        )
        self._batch_s = [world.batch_s(rater, world.batch) for rater in range(len(world.raters))]
        self._own: dict[int, _Own] = {}
        self._rebalancer = Deadlines(world, self, to_zero=setup.to_zero)
        world.call_at(PERIOD_S, self._tick)

    def cut_of(self, job: Job) -> float:
        """Return the batches of a job that are not committed."""
        return job.unsent / self._world.batch if job.place in self._ordered.given_up else 0.0

    def seconds_a_batch(self, rater: int) -> float:
        """Return the moving average, off by the error that the setup asks for."""
        return self._batch_s[rater] * self._setup.cost_error

    def cost_of(self, job: Job) -> float:
        """Return what a job's batches take in times of its rater's, by what it has had so far."""
        own = self._own.get(job.place)
        if own is None:
            return 1.0
        mean_s = self._batch_s[job.rater]
        return (own.seconds + _OWN_WEIGHT * mean_s) / ((own.batches + _OWN_WEIGHT) * mean_s)

    def submitted(self, job: Job) -> None:
        """Forecast, and commit to it if it fits."""
        self._ordered.forget(job.rater)
        if self._setup.commits:
            self._commit(job.rater, job)
            self.expected[job.place] = job.place not in self._ordered.given_up

    def has_room(self, rater: int) -> None:
        """Fill the room by the order of service."""
        pool, unsent = self._world.pool, self._world.unsent
        while pool.room[rater] > 0 and unsent[rater]:
            if not self._ordered.serve(rater, pool.room[rater], self._send):
                return

    def finished(self, batch: Batch) -> None:
        """Learn what a full batch takes."""
        rater, world = batch.job.rater, self._world
        share = world.batch_s(rater, len(batch.ids)) / world.batch_s(rater, world.batch)
        full_s = batch.service_s / share
        self._batch_s[rater] += _MEAN_WEIGHT * (full_s - self._batch_s[rater])
        if not batch.job.has_ended:
            own = self._own.setdefault(batch.job.place, _Own())
            own.batches += 1
            own.seconds += full_s

    def changed(self, job: Job) -> None:
        """Order anew; forget a job that has ended."""
        self._ordered.forget(job.rater)
        if job.has_ended:
            self._ordered.given_up.discard(job.place)
            self._own.pop(job.place, None)

    def _send(self, job: Job, priority_class: PriorityClass | None) -> bool:
        is_sent = self._world.send(job, priority_class)
        self._world.counts.attempts += is_sent
        return is_sent

    def _tick(self) -> None:
        world = self._world
        if self._setup.commits and not world.management_is_away():
            for rater in range(len(world.raters)):
                self._commit(rater, None)
        if self._setup.rebalances:
            self._rebalancer.round()
        world.call_at(world.now + PERIOD_S, self._tick)

    def _commit(self, rater: int, newcomer: Job | None) -> None:
        jobs = [job for job in self._world.open[rater].values() if not job.is_expired]
        if not jobs:
            return
        demands = [self._demand(job) for job in jobs]
        capacity = commitments.Capacity(
            replicas=self._rebalancer.reachable(rater), seconds_a_batch=self.seconds_a_batch(rater)
        )
        now = self._world.instant()
        if newcomer is None:
            cut = commitments.renew(demands, capacity, now).cut
        else:
            cut = commitments.admit(demands, newcomer.place, capacity, now).cut
        self._ordered.given_up.difference_update(job.place for job in jobs)
        self._ordered.given_up.update(cut)
        self._ordered.forget(rater)

    def _demand(self, job: Job) -> commitments.Demand:
        batches = job.unsent / self._world.batch
        cut = self.cut_of(job)
        return commitments.Demand(
            workflow_id=job.place,
            owner=job.evaluation.owner,
            priority_class=job.priority_class,
            deadline_at=job.deadline_at,
            wanted=batches - cut,
            cut=cut,
            in_flight=job.batches_out,
            cost=self.cost_of(job),
        )
