"""Policy `airs` over batches that stay as intake cut them, with what production knows and no more.

The decisions are the same pure functions. What they are told here is what the services tell them;
`airs` itself is told more, or counts otherwise:

- READY batches are counted one by one, however few ratings are left in them.
- What a workflow still wants is what is open of it, less a whole batch for each that is out. So
  what it waits for counts, too.
- A newcomer is planned beside what the last minute saw of the others. Where a rater has no replica
  nothing is planned, nor taken back.
- The replicas that a rater could have are counted each minute.
- All workflows of a rater are taken to cost the same.
- A replica that may hold some batches keeps places for the highest class. What is served for its
  class's share goes to the replica before the class that it went before.
- Where replicas have work enough, a backlog waits until a quarter of their places is free.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from airs_site.simulation.cuts import CutJob
from airs_site.simulation.engine import World
from airs_site.simulation.kept import KeptWorld
from airs_site.simulation.policies import ordered
from airs_site.simulation.policies.airs import Airs
from airs_site.simulation.policies.deadlines import Deadlines
from airs_site.simulation.policies.ordered import Ordered
from airs_site.simulation.work import Job
from fulfillment.policy import lines, messages, quota
from fulfillment.policy.commitments import Demand
from fulfillment.policy.priority import PriorityClass


class KeptAirs(Airs):
    """Order, commitments and rebalancing as the services carry them out."""

    def begin(self, world: World) -> None:
        """Start with nothing remembered."""
        super().begin(world)
        setup = self._setup
        self._replicas = _Deadlines(world, self, to_zero=setup.to_zero)
        self._replicas.moves = setup.rebalances
        self._replicas.count()
        self._rebalancer = self._replicas
        self._order = _Ordered(
            world, self, shares=setup.shares, presses=setup.presses, fair=setup.fair
        )
        self._ordered = self._order
        self._seen: dict[int, tuple[float, int]] = {}
        """Batches of a job that were wanted, and out, when it was forecast last."""
        self._newcomer: Job | None = None

    def cost_of(self, job: Job) -> float:
        """Return 1: what single workflows take is not looked at."""
        return 1.0

    def has_room(self, rater: int) -> None:
        """Run a pass: fill the room of each class, as far as replicas have some for it.

        What one class finds no place for, others may have: it goes on by the same order.
        """
        world = self._world
        assert isinstance(world, KeptWorld)
        if self._can_wait(world, rater):
            return
        while self._fill(world, rater):
            self._order.keep(kept=True)
        self._order.keep(kept=False)
        world.end_pass()

    def _can_wait(self, world: KeptWorld, rater: int) -> bool:
        ready = self._ready(rater)
        highest = messages.highest_of(ready)
        # What is out counts by what it is now, as the dispatcher counts it.
        classes = {self._class(batch.job) for batch in world.out(rater)}
        return (
            highest is not None
            and quota.can_wait(world.loads(rater))
            and messages.can_wait(
                ready,
                most_urgent_out=min(classes, default=None),
                free=world.room(rater, highest),
                window=world.pool.window * world.pool.ready[rater],
                no_thread=False,
            )
        )

    def _fill(self, world: KeptWorld, rater: int) -> bool:
        """Claim once; say whether some of it found no place."""
        left = {cls: world.room(rater, cls) for cls in self._ready(rater)}
        if not any(left.values()):
            return False

        def send(job: Job, given_up: PriorityClass | None) -> bool:
            cls = job.priority_class if given_up is None else given_up
            if not left[cls]:
                return False
            left[cls] -= 1
            return self._send(job, given_up)

        classes = [cls for cls, room in left.items() if room]
        self._ordered.serve(rater, max(left.values()), send, classes)
        return world.claim(self._ready(rater))

    def changed(self, job: Job) -> None:
        """Order anew; forget a job that has ended."""
        super().changed(job)
        if job.has_ended:
            self._seen.pop(job.place, None)

    def _tick(self) -> None:
        self._replicas.count()
        super()._tick()

    def _commit(self, rater: int, newcomer: Job | None) -> None:
        if self._replicas.reachable(rater):
            self._newcomer = newcomer
            super()._commit(rater, newcomer)

    def _ready(self, rater: int) -> Mapping[PriorityClass, int]:
        """Return the batches that are READY, by class: of none where there are none."""
        ready: Counter[PriorityClass] = Counter()
        for job in self._world.open[rater].values():
            if job.unsent:
                assert isinstance(job, CutJob)
                ready[self._class(job)] += len(job.ready)
        return ready

    def _class(self, job: Job) -> PriorityClass:
        """Return the class that a job goes by now."""
        is_given_up = job.place in self._ordered.given_up
        return PriorityClass.BEST_EFFORT if is_given_up else job.priority_class

    def _demand(self, job: Job) -> Demand:
        if self._newcomer is None or self._newcomer is job:
            wanted = max(0.0, job.open / self._world.batch - job.batches_out)
            self._seen[job.place] = (wanted, job.batches_out)
        batches, out = self._seen.get(job.place, (0.0, 0))
        is_given_up = job.place in self._ordered.given_up
        return replace(
            super()._demand(job),
            wanted=0.0 if is_given_up else batches,
            cut=batches if is_given_up else 0.0,
            in_flight=out,
        )


class _Ordered(Ordered):
    def keep(self, *, kept: bool) -> None:
        """Go on by the order that was made, however old; or no more."""
        self._age_s = inf if kept else ordered.ORDER_AGE_S * self._world.workload.scale

    def _load(self, job: Job) -> lines.Load:
        assert isinstance(job, CutJob)
        return replace(super()._load(job), ready_batches=len(job.ready))


class _Deadlines(Deadlines):
    moves = True
    """Whether replicas do move: else a rater can have what it has."""
    counted: Sequence[float] = ()

    def count(self) -> None:
        """Count the replicas that each rater could have."""
        count = super().reachable if self.moves and self.needs else self._world.pool.allocated
        self.counted = [count(rater) for rater in range(len(self._world.raters))]

    def reachable(self, rater: int) -> float:
        return self.counted[rater]
