"""The service without its model management: an adaptive window a rater finds what the model takes.

The policy does not know how many replicas serve a rater. It sends while the window of
`fulfillment.policy.traffic` has room; a replica that is free takes the batch, else the model
refuses, the window drops and the batch waits its back-off. The pool is moved by utilisation.
"""

from functools import partial
from random import Random
from typing import Final

from airs_site.simulation.engine import World
from airs_site.simulation.policies.ordered import Ordered
from airs_site.simulation.policies.utilisation import Utilisation
from airs_site.simulation.work import Batch, Job
from fulfillment.policy import traffic
from fulfillment.policy.priority import PriorityClass

CEILING: Final = 2
"""Calls that an operator allows in flight, in default replicas of the rater."""


class Isolated:
    """Order of the service, windows instead of knowledge of the pool."""

    name = "isolated"

    def begin(self, world: World) -> None:
        """Start with full windows."""
        self._world = world
        self._chance = Random(world.options.seed)
        self._ordered = Ordered(world)
        self._windows = [traffic.open_window(CEILING * r.default_replicas) for r in world.raters]
        self._in_flight = [dict.fromkeys(PriorityClass, 0) for _ in world.raters]
        self._refusals: dict[int, int] = {}
        """Of a job since its last success."""
        self._looks_at = [-1.0] * len(world.raters)
        Utilisation(world)

    def submitted(self, job: Job) -> None:
        """Send at once if the window has room."""
        self._ordered.forget(job.rater)
        self._pump(job.rater)

    def has_room(self, rater: int) -> None:
        """Send; that a replica is free is not known, but something has changed."""
        self._pump(rater)

    def finished(self, batch: Batch) -> None:
        """Let the window grow."""
        rater = batch.job.rater
        self._in_flight[rater][batch.priority_class] -= 1
        self._refusals.pop(batch.job.place, None)
        self._learn(rater, traffic.Signal(priority_class=batch.priority_class, succeeded=1))
        self._pump(rater)

    def changed(self, job: Job) -> None:
        """Order anew."""
        self._ordered.forget(job.rater)

    def _pump(self, rater: int) -> None:
        while self._world.unsent[rater]:
            classes = [cls for cls in PriorityClass if self._room(rater, cls) > 0]
            # One at a time: each answer of the model changes the window.
            if not classes or not self._ordered.serve(rater, 1, self._send, classes):
                return

    def _room(self, rater: int, cls: PriorityClass) -> int:
        now = self._world.instant()
        return traffic.room(self._windows[rater], self._in_flight[rater], cls, now=now)

    def _send(self, job: Job, priority_class: PriorityClass | None) -> bool:
        """Try one batch. One that is refused rests: it counts as gone from the order."""
        world, rater = self._world, job.rater
        cls = job.priority_class if priority_class is None else priority_class
        if world.pool.room[rater] > 0:
            is_sent = world.send(job, priority_class)
            world.counts.attempts += is_sent
            self._in_flight[rater][cls] += is_sent
            return is_sent
        world.counts.attempts += 1
        self._learn(rater, traffic.Signal(priority_class=cls, overloaded=1))
        self._rest(job)
        self._look_again(rater)
        return True

    def _rest(self, job: Job) -> None:
        refusals = self._refusals.get(job.place, 0) + 1
        self._refusals[job.place] = refusals
        wait = traffic.backoff(attempt=refusals, chance=self._chance.random(), retry_after_s=None)
        self._ordered.resting[job.place] = self._ordered.resting.get(job.place, 0) + 1
        at_s = self._world.now + wait.total_seconds()
        self._world.call_at(at_s, partial(self._wake, job))

    def _wake(self, job: Job) -> None:
        self._ordered.resting[job.place] -= 1
        self._ordered.forget(job.rater)
        self._pump(job.rater)

    def _look_again(self, rater: int) -> None:
        """Plan a look for when what was refused has cooled."""
        at_s = self._world.now + traffic.COOLING.total_seconds()
        if self._looks_at[rater] < self._world.now:
            self._looks_at[rater] = at_s
            self._world.call_at(at_s, partial(self._pump, rater))

    def _learn(self, rater: int, signal: traffic.Signal) -> None:
        now = self._world.instant()
        self._windows[rater] = traffic.adapt(self._windows[rater], [signal], now)
