"""Rebalancing by the pressure of deadlines: the service's own policy over the simulated pool."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Protocol

from airs_site.simulation.engine import SIGNAL_PERIOD_S, Move, World
from airs_site.simulation.work import Job
from models_admin.policy import rebalancing

PERIOD_S: Final = 60.0


class Plan(Protocol):
    """Who knows what is committed of a job, and how long a batch takes."""

    def cut_of(self, job: Job) -> float:
        """Return the batches of a job that are not committed."""

    def seconds_a_batch(self, rater: int) -> float:
        """Return how long a batch of the rater takes, as far as measured."""

    def cost_of(self, job: Job) -> float:
        """Return how long a batch of the job takes, in times of its rater's mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Signal:
    """What raters had to do at some time."""

    at_s: float
    models: Sequence[rebalancing.Model]


class Deadlines:
    """Moves replicas each minute, by what is known then of what raters have to do."""

    def __init__(self, world: World, plan: Plan, *, to_zero: bool) -> None:
        self._world = world
        self._plan = plan
        self._to_zero = to_zero
        self._numbers = {rater.id: n for n, rater in enumerate(world.raters)}
        self.needs: dict[str, float] = {}
        """Replicas that each rater needed at the last look."""
        self._late: deque[_Signal] = deque()
        """Signals on their way, the oldest first."""
        if world.options.signal_age_s:
            world.call_at(0.0, self._send_signal)

    def round(self) -> None:
        """Decide and carry out one round, if model management is there and knows anything."""
        models = self._known()
        if models is None or self._world.management_is_away():
            return
        decision = rebalancing.rebalance(
            models,
            self._world.instant(),
            start_up=timedelta(seconds=self._world.options.start_up_s),
        )
        self.needs = dict(decision.needs)
        self._world.move(
            [
                Move(
                    donor=self._numbers[move.donor],
                    receiver=self._numbers[move.receiver],
                    replicas=move.replicas,
                )
                for move in decision.moves
            ]
        )

    def reachable(self, rater: int) -> float:
        """Return the replicas that a rater could have if the others got what they need."""
        own = self._world.raters[rater].id
        others = sum(need for model_id, need in self.needs.items() if model_id != own)
        return max(self._world.pool.size - others, self._world.pool.allocated(rater))

    def _known(self) -> Sequence[rebalancing.Model] | None:
        """Return what raters have to do, as far as is known; the pool itself is known as it is."""
        world = self._world
        if not world.options.signal_age_s:
            return self._models()
        while len(self._late) > 1 and self._late[1].at_s <= world.now - world.options.signal_age_s:
            self._late.popleft()
        if not self._late or self._late[0].at_s > world.now - world.options.signal_age_s:
            return None
        return [
            replace(model, replicas=world.pool.allocated(rater))
            for rater, model in enumerate(self._late[0].models)
        ]

    def _send_signal(self) -> None:
        self._late.append(_Signal(at_s=self._world.now, models=self._models()))
        self._world.call_at(self._world.now + SIGNAL_PERIOD_S, self._send_signal)

    def _models(self) -> Sequence[rebalancing.Model]:
        return [self._model(rater) for rater in range(len(self._world.raters))]

    def _model(self, rater: int) -> rebalancing.Model:
        world = self._world
        params = world.raters[rater]
        mean_s = self._plan.seconds_a_batch(rater) * world.signal_factor(rater)
        dues: list[rebalancing.Due] = []
        other_s = 0.0
        for job in world.open[rater].values():
            batch_s = mean_s * self._plan.cost_of(job)
            cut = self._plan.cut_of(job)
            batches = job.unsent / world.batch
            due = max(0.0, batches - cut) + job.batches_out / 2
            dues.append(rebalancing.Due(deadline_at=job.deadline_at, work_s=due * batch_s))
            other_s += min(cut, batches) * batch_s
        return rebalancing.Model(
            model_id=params.id,
            default=params.default_replicas,
            least=0 if self._to_zero else params.min_replicas,
            replicas=world.pool.allocated(rater),
            dues=dues,
            other_s=other_s,
        )
