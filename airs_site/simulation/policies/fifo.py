"""First in, first out within a priority, work-conserving: no owners, no deadlines, no polling."""

from collections import deque

from airs_site.simulation.engine import World
from airs_site.simulation.policies.pulling import Pulling
from airs_site.simulation.policies.utilisation import Utilisation
from airs_site.simulation.work import Job


class Fifo(Pulling):
    """Serves high priority first, each priority in the order in which it came."""

    name = "fifo"

    def begin(self, world: World) -> None:
        """Start with empty queues; the pool follows utilisation."""
        super().begin(world)
        self._queues: list[tuple[deque[Job], deque[Job]]] = [
            (deque(), deque()) for _ in world.raters
        ]
        Utilisation(world)

    def submitted(self, job: Job) -> None:
        """Queue behind all others of its priority."""
        self._queue(job).append(job)

    def next_job(self, rater: int) -> Job:
        """Return the oldest with something to send, of high priority if there is one."""
        for queue in self._queues[rater]:
            while queue:
                if queue[0].unsent:
                    return queue[0]
                queue.popleft()
        raise LookupError(f"rater {rater} has unsent ratings of no job")

    def changed(self, job: Job) -> None:
        """Bring back one that has something to send again."""
        if job.unsent and job not in self._queue(job):
            self._queue(job).appendleft(job)

    def _queue(self, job: Job) -> deque[Job]:
        return self._queues[job.rater][job.evaluation.low]
