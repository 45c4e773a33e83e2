"""The service's order of service, called as its dispatcher calls it.

What stands here is what the dispatcher does around `fulfillment.policy.ordering`: keep a rater's
memory, make its order anew when it is old or something came or went, and send what is picked.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from airs_site.simulation.engine import World
from airs_site.simulation.work import Job
from fulfillment.policy import ordering
from fulfillment.policy.priority import PriorityClass

ORDER_AGE_S: Final = 0.25
"""At scale 1. At 1:S an order is S times as old, which is the same number of dispatches."""
_ALL: Final = 1 << 40

Send = Callable[[Job, PriorityClass | None], bool]
"""Sends a job's next batch; False where the job has none left."""


@dataclass(slots=True, eq=False)
class _Order:
    """A rater's order, since when it stands, and what left since."""

    lines: ordering.Order = field(default_factory=dict)
    made_s: float = 0.0
    is_stale: bool = True
    taken: dict[int, int] = field(default_factory=dict)
    memory: ordering.Memory = field(default_factory=ordering.Memory)


class Ordered:
    """Picks batches for free room; batches set apart are served as best effort or not at all."""

    def __init__(
        self,
        world: World,
        *,
        shares: Mapping[PriorityClass, float] = ordering.DEFAULT_SHARES,
        owner_turns: bool = True,
    ) -> None:
        self._world = world
        self._shares = shares
        self._owner_turns = owner_turns
        self._age_s = ORDER_AGE_S * world.workload.scale
        self._orders = [_Order() for _ in world.raters]
        self.best_effort: dict[int, float] = {}
        """Batches of a job, by its place, that are served as best effort."""
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
            {cls: line for cls, line in order.lines.items() if cls in classes},
            # Without turns each dispatch goes to the smallest score, as the first of a pass does.
            room=room if self._owner_turns else 1,
            memory=order.memory,
            taken=order.taken,
            shares=self._shares,
        )
        order.memory = decision.memory
        if not self._owner_turns:
            order.memory = replace(order.memory, turns=frozenset())
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
        loads = [load for job in jobs if job.unsent for load in self._loads(job)]
        order.lines = ordering.line_up(loads, self._world.instant())
        order.made_s = now
        order.is_stale = False
        order.taken = {}
        return True

    def _loads(self, job: Job) -> list[ordering.Load]:
        batches = -(-job.unsent // self._world.batch)
        batches = max(0, batches - self.resting.get(job.place, 0))
        rest = min(batches, round(self.best_effort.get(job.place, 0.0)))
        load = ordering.Load(
            workflow_id=job.place,
            owner=job.evaluation.owner,
            priority_class=job.priority_class,
            ready_batches=batches - rest,
            open_requests=job.open,
            submitted_at=job.submitted_at,
            deadline_at=job.deadline_at,
        )
        if not rest:
            return [load]
        # One workflow in two classes: the rest goes under a number of its own.
        apart = replace(
            load,
            workflow_id=~job.place,
            priority_class=PriorityClass.BEST_EFFORT,
            ready_batches=rest,
        )
        return [load, apart] if rest < batches else [apart]

    def _send(self, rater: int, order: _Order, pick: ordering.Pick, send: Send) -> None:
        is_rest = pick.workflow_id < 0
        place = ~pick.workflow_id if is_rest else pick.workflow_id
        job = self._world.open[rater].get(place)
        for _ in range(pick.batches):
            if job is None or not send(job, PriorityClass.BEST_EFFORT if is_rest else None):
                order.taken[pick.workflow_id] = _ALL
                return
            order.taken[pick.workflow_id] = order.taken.get(pick.workflow_id, 0) + 1
            if is_rest:
                self.best_effort[place] = max(0.0, self.best_effort.get(place, 0.0) - 1)
