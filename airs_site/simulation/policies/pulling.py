"""What all policies share that send work only when a replica has room for it."""

from airs_site.simulation.engine import World
from airs_site.simulation.work import Batch, Job


class Pulling:
    """Does nothing by itself; a policy overrides what it cares for."""

    name = ""
    world: World

    def begin(self, world: World) -> None:
        """Remember the world."""
        self.world = world

    def submitted(self, job: Job) -> None:
        """Nothing to remember."""

    def has_room(self, rater: int) -> None:
        """Send while there is room and work."""
        world = self.world
        while world.pool.room[rater] > 0 and world.unsent[rater]:
            # A job whose rest was done for free sends nothing; the next one is asked.
            world.counts.attempts += world.send(self.next_job(rater))

    def next_job(self, rater: int) -> Job:
        """Return a job of the rater with ratings to send; there is one."""
        raise NotImplementedError

    def finished(self, batch: Batch) -> None:
        """Nothing to learn."""

    def changed(self, job: Job) -> None:
        """Nothing to forget."""
