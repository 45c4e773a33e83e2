"""A scenario through the simulator."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from airs_site.simulation.cuts import CutBatch
from airs_site.simulation.engine import Loss, Options, World
from airs_site.simulation.kept import KeptWorld
from airs_site.simulation.policies.airs import Setup
from airs_site.simulation.policies.kept import KeptAirs
from airs_site.simulation.trace import Workload, expand
from airs_site.simulation.work import Batch, Job
from airs_site.simulation.workload import Evaluation
from tests.parity.scenario import BATCH_S, RATERS, Event, Scenario, Work, in_order
from tests.simulation import small


def simulated(scenario: Scenario) -> list[Event]:
    """Return what happens in the simulator."""
    workload = _workload(scenario)
    watched = _Watched(scenario)
    losses = []
    if scenario.late_s is not None:
        losses = [Loss(at_s=-1.0, until_s=scenario.late_s, share=1 / sum(scenario.replicas))]
    options = Options(window=scenario.window, losses=losses, start_up_s=0.0)
    world = KeptWorld(workload, watched, options)
    world.run(lambda share: None)
    return watched.told()


def _workload(scenario: Scenario) -> Workload:
    evaluations = [
        _evaluation(number, work.ratings, work) for number, work in enumerate(scenario.works)
    ]
    if scenario.stored:
        before = Work(at_s=-1.0, owner="", ratings=())
        evaluations.append(_evaluation(len(evaluations), scenario.stored, before))
    return expand(small.params(scenario.replicas), evaluations, scale=1)


def _evaluation(number: int, ratings: Sequence[tuple[int, int]], work: Work) -> Evaluation:
    return small.evaluation(
        number,
        1,
        at_s=work.at_s,
        rater=RATERS[work.rater],
        owner=work.owner,
        deadline_s=work.deadline_s,
        mode="listed",
        ids=tuple(ratings),
        cost=work.cost,
    )


class _Watched(KeptAirs):
    """Policy `airs` without rebalancing; tells what it sees."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(Setup(rebalances=False))
        self._scenario = scenario
        self._events: list[Event] = []
        self._batches: list[CutBatch] = []
        self._known: set[int] = set()
        """Places of jobs that were given up when that was looked at last."""

    def begin(self, world: World) -> None:
        super().begin(world)
        numbers = [n for work in self._scenario.works for n in work.numbers]
        self._numbers = dict(zip(world.workload.ids.tolist(), numbers, strict=False))

    def submitted(self, job: Job) -> None:
        job.priority_class = self._scenario.works[job.place].priority_class
        job.failing = frozenset(r for r in self._ids(job) if self._numbers[r] in self._scenario.bad)
        super().submitted(job)
        self._note_given_up()

    def finished(self, batch: Batch) -> None:
        assert isinstance(batch, CutBatch)
        super().finished(batch)
        self._batch_s[batch.job.rater] = BATCH_S
        self._batches.append(batch)
        self._note("finish", batch.job, *self._ratings(batch))

    def changed(self, job: Job) -> None:
        super().changed(job)
        if job.has_ended:
            self._known.discard(job.place)
            self._note("complete", job)

    def told(self) -> list[Event]:
        """Return all that happened."""
        for job in self._world.jobs:
            ended = (job.hits, job.computed, job.free, job.failed, job.late)
            self._events.append(Event(job.submitted_s, job.rater, "submit", job.place, (job.hits,)))
            self._events.append(Event(job.deadline_s, job.rater, "outcome", job.place, ended))
            if job.hits == job.requests:
                self._events.append(Event(job.submitted_s, job.rater, "complete", job.place))
        numbers: Counter[int] = Counter()
        for batch in sorted(self._batches, key=lambda batch: batch.number):
            job = batch.job
            self._events.append(
                Event(
                    batch.sent_s,
                    job.rater,
                    "dispatch",
                    job.place,
                    (
                        numbers[job.rater],
                        batch.score,
                        batch.replica,
                        *self._ratings(batch),
                    ),
                )
            )
            numbers[job.rater] += 1
        return in_order(self._events)

    def _tick(self) -> None:
        super()._tick()
        self._note_given_up()

    def _note(self, what: str, job: Job, *detail: Any) -> None:
        self._events.append(Event(self._world.now, job.rater, what, job.place, detail))

    def _note_given_up(self) -> None:
        jobs = [job for jobs in self._world.open for job in jobs.values() if job.unsent]
        given_up = {job.place for job in jobs} & self._ordered.given_up
        for job in jobs:
            if (job.place in given_up) != (job.place in self._known):
                self._note("given up" if job.place in given_up else "committed", job)
        self._known = given_up

    def _ids(self, job: Job) -> list[int]:
        ids: list[int] = self._world.workload.requests(job.place).tolist()
        return ids

    def _ratings(self, batch: Batch) -> tuple[int, ...]:
        return tuple(sorted(self._numbers[rating] for rating in batch.ids))
