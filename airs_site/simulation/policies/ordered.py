"""The service's order of service, called as its dispatcher calls it.

What stands here is what the dispatcher does around `fulfillment.policy.ordering`: keep a rater's
memory, make its order anew when it is old or something came or went, and send what is picked.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from airs_site.simulation.engine import World
from airs_site.simulation.work import Job
from fulfillment.policy import fairness, lines, ordering
from fulfillment.policy.priority import PriorityClass

ORDER_AGE_S: Final = 0.25
"""At scale 1. At 1:S an order is S times as old, which is the same number of dispatches."""
_ALL: Final = 1 << 40

Send = Callable[[Job, PriorityClass | None], bool]
"""Sends a job's next batch; False where the job has none left."""


class Costs(Protocol):
    """Who has measured what batches take."""

    def seconds_a_batch(self, rater: int) -> float:
        """Return how long a batch of the rater takes."""

    def cost_of(self, job: Job) -> float:
        """Return how long a batch of the job takes, in times of its rater's mean."""


@dataclass(slots=True, eq=False)
class _Order:
    """A rater's order, since when it stands, and what left since."""

    by_class: lines.Order = field(default_factory=dict)
    made_s: float = 0.0
    is_stale: bool = True
    taken: dict[int, int] = field(default_factory=dict)
    memory: ordering.Memory = field(default_factory=ordering.Memory)


class Ordered:
    """Picks batches for free room; jobs given up are served as best effort.

    Without costs no deadline presses and nobody is over its share.
    """

    def __init__(
        self,
        world: World,
        costs: Costs | None = None,
        *,
        shares: Mapping[PriorityClass, float] = ordering.DEFAULT_SHARES,
        presses: bool = True,
        fair: bool = True,
    ) -> None:
        self._world = world
        self._costs = costs
        self._shares = shares
        self._presses = presses
        self._fair = fair
        self._age_s = ORDER_AGE_S * world.workload.scale
        self._orders = [_Order() for _ in world.raters]
        self.given_up: set[int] = set()
        """Places of jobs that are served as best effort."""
        self.resting: dict[int, int] = {}
        """Batches of a job that may not be sent now."""

    def forget(self, rater: int) -> None:
        """Make the rater's order anew before the next pick."""
        self._orders[rater].is_stale = True

    def serve(
        self,
        rater: int,
        room: int,
        send: Send,
        classes: Collection[PriorityClass] = tuple(PriorityClass),
    ) -> bool:
        """Send up to `room` batches of these classes; say whether there may be more to send."""
        order = self._orders[rater]
        is_fresh = self._line_up(rater, order)
        decision = ordering.fill(
            {cls: line for cls, line in order.by_class.items() if cls in classes},
            room=room,
            memory=order.memory,
            taken=order.taken,
            shares=self._shares,
        )
        order.memory = decision.memory
        for pick in decision.picks:
            self._send(rater, order, pick, send)
        if decision.picks:
            return True
        order.is_stale = not is_fresh
        return not is_fresh

    def _line_up(self, rater: int, order: _Order) -> bool:
        """Make the order anew if it is old; say whether it was."""
        now = self._world.now
        if not order.is_stale and now - order.made_s < self._age_s:
            return False
        jobs = self._world.open[rater].values()
        instant = self._world.instant()
        usage = fairness.aged(order.memory.usage, instant) if self._fair else fairness.Usage()
        order.memory = replace(order.memory, usage=usage)
        order.by_class = lines.line_up(
            [self._load(job) for job in jobs if job.unsent],
            instant,
            usage=usage,
            requests_per_s=self._requests_per_s(rater),
        )
        order.made_s = now
        order.is_stale = False
        order.taken = {}
        return True

    def _requests_per_s(self, rater: int) -> float | None:
        world = self._world
        if self._costs is None or not self._presses:
            return None
        return world.pool.allocated(rater) * world.batch / self._costs.seconds_a_batch(rater)

    def _load(self, job: Job) -> lines.Load:
        batches = -(-job.unsent // self._world.batch)
        is_given_up = job.place in self.given_up
        return lines.Load(
            workflow_id=job.place,
            owner=job.evaluation.owner,
            priority_class=PriorityClass.BEST_EFFORT if is_given_up else job.priority_class,
            ready_batches=max(0, batches - self.resting.get(job.place, 0)),
            open_requests=job.open,
            submitted_at=job.submitted_at,
            deadline_at=job.deadline_at,
            batch_size=self._world.batch,
            cost=self._costs.cost_of(job) if self._costs else 1.0,
        )

    def _send(self, rater: int, order: _Order, pick: ordering.Pick, send: Send) -> None:
        place = pick.workflow_id
        job = self._world.open[rater].get(place)
        given_up = PriorityClass.BEST_EFFORT if place in self.given_up else None
        for _ in range(pick.batches):
            if job is None or not send(job, given_up):
                order.taken[place] = _ALL
                return
            order.taken[place] = order.taken.get(place, 0) + 1
