"""The service without its windows: batches ask for room again and again, as in the paper.

Commitments and rebalancing stay. The order of service has nothing to decide, because room goes to
whoever happens to ask when there is some.
"""

from functools import partial
from random import Random
from typing import Final

from airs_site.simulation.engine import World
from airs_site.simulation.policies.airs import Airs
from airs_site.simulation.work import Job

BACKOFF_S: Final = 120.0
"""Mean wait of a refused batch: that of `paper`."""


class Polling(Airs):
    """Each batch is a client of its own."""

    def begin(self, world: World) -> None:
        """Start with nobody that asks."""
        super().begin(world)
        self._chance = Random(world.options.seed)
        self._asking: dict[int, int] = {}
        """Batches of a job that will ask again, by its place."""

    def submitted(self, job: Job) -> None:
        """Let all its batches ask."""
        super().submitted(job)
        self._let_ask(job)

    def has_room(self, rater: int) -> None:
        """Do nothing: a client learns of room only by asking."""

    def changed(self, job: Job) -> None:
        """Let what was lost with a replica ask again."""
        super().changed(job)
        self._let_ask(job)

    def _let_ask(self, job: Job) -> None:
        batches = -(-job.unsent // self._world.batch)
        asking = self._asking.get(job.place, 0)
        self._asking[job.place] = max(asking, batches)
        for _ in range(batches - asking):
            self._ask(job)

    def _ask(self, job: Job) -> None:
        world = self._world
        if job.unsent:
            world.counts.attempts += 1
            if world.pool.room[job.rater] <= 0:
                wait_s = BACKOFF_S * (0.5 + self._chance.random())
                world.call_at(world.now + wait_s, partial(self._ask, job))
                return
            world.send(job)
        self._asking[job.place] -= 1
