"""One scenario through the simulator and through the services, each told as a list of events.

`simulated` runs policy `airs` over batches that stay as intake cut them. `served` runs intake's
rows, dispatcher, take-over, finish, completion checker and forecasts on the real database, in
virtual time: every service is given the instant, and model servers are played by a heap of events.
Both sides plan the events of one instant in the same order.

What is inherently another on the two sides is held fixed here:

- What a rater's work takes. The services learn it from samples of the queue, the simulator from
  each batch: here it is, and stays, twelve seconds a batch. What single workflows take is learned.
- How old an order may be. While few workflows wait, the dispatcher makes it in each pass; so does
  the simulator here, which else believes one for a quarter of a second.
- Replicas stay where they are: who moves them is model management.
- Executors and servers take what is sent at once, and the checker runs when there is something for
  it: its five seconds, and the way of a message, are not virtual.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection

from airs_site.simulation.engine import Loss, Options, World
from airs_site.simulation.kept import SCORES, CutBatch, KeptWorld
from airs_site.simulation.policies.airs import Setup
from airs_site.simulation.policies.kept import KeptAirs
from airs_site.simulation.trace import Workload, expand
from airs_site.simulation.work import Batch as Sent
from airs_site.simulation.work import Job
from airs_site.simulation.workload import Evaluation
from fulfillment import archive, commitments, completion, dispatch, folding, leases
from fulfillment.clock import database_now
from fulfillment.leases import Finish, Taken
from fulfillment.model_directory import Replica as ModelReplica
from fulfillment.models import (
    Batch,
    ExecutorBoot,
    RaterCost,
    RaterVersion,
    Workflow,
    WorkflowForecast,
)
from fulfillment.policy.lifecycle import BatchState
from fulfillment.policy.priority import PriorityClass, least_score, priority_class
from fulfillment.scores import Scored
from tests import builders, rating_queue
from tests.builders import DIRECTORY, Model
from tests.rating_queue import SCORE, Replica, boot, key, progress, sent_items
from tests.simulation import small

BATCH = 12
BATCH_S = 12.0
"""Of a full one; one of n takes 3 + 0.75 n, times the cost of its workflow."""
RATERS = ("big", "tiny", "third")
AHEAD = timedelta(days=1)
"""By which virtual time is later than the clock, so that no deadline has passed by that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A workflow, and the ratings it asks for: runs of numbers, (first, how many)."""

    at_s: float
    owner: str
    ratings: Sequence[tuple[int, int]]
    rater: int = 0
    priority_class: PriorityClass = PriorityClass.HIGH
    deadline_s: float = 7200.3
    """After `at_s`."""
    cost: float = 1.0

    @property
    def numbers(self) -> list[int]:
        """The numbers of its ratings."""
        return [n for first, many in self.ratings for n in range(first, first + many)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What happens to whom."""

    works: Sequence[Work]
    """In the order of their time."""
    replicas: Sequence[int] = (3, 1)
    """By rater."""
    window: int = 2
    late_s: float | None = None
    """When the first replica comes, where it is not there from the start."""
    commits: bool = True
    stored: Sequence[tuple[int, int]] = ()
    """Ratings that the archive has from the start."""
    bad: frozenset[int] = frozenset()
    """Ratings that fail for good, whoever asks for them."""


class Event(NamedTuple):
    """Something that happened; `work` is the place of the workflow in the scenario."""

    at_s: float
    rater: int
    what: str
    work: int
    detail: tuple[Any, ...] = ()


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


def served(scenario: Scenario) -> list[Event]:
    """Return what the services do; needs plug-ins and the directory of `builders.use_plugins`."""
    return _Service(scenario).run()


def _in_order(events: Sequence[Event]) -> list[Event]:
    """Return the events by time; at one instant raters do not depend on each other."""
    return sorted(events, key=lambda event: (event.at_s, event.rater, event.what, event.work))


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
        super().__init__(Setup(rebalances=False, commits=scenario.commits))
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

    def finished(self, batch: Sent) -> None:
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
        return _in_order(self._events)

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

    def _ratings(self, batch: Sent) -> tuple[int, ...]:
        return tuple(sorted(self._numbers[rating] for rating in batch.ids))


@dataclass(kw_only=True, slots=True, eq=False)
class _Server:
    """A model server: one batch at a time, the highest priority first."""

    rater: int
    number: int
    running: Taken | None = None
    queue: list[tuple[int, int, Taken]] = field(default_factory=list)


class _Service:
    """The services, and a heap of what is still to come."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._now_s = 0.0
        self._start = database_now() + AHEAD
        self._planned = count()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._events: list[Event] = []
        self._memory = dispatch.Memory()
        self._sent: dict[int, tuple[int, int]] = {}
        """Fence and least priority of what was published, by batch."""
        self._numbers: Counter[int] = Counter()
        self._places: dict[int, int] = {}
        """Of workflows, by their id."""
        self._workflows: dict[int, Workflow] = {}
        self._hits: dict[int, int] = {}
        self._open: set[int] = set()
        """Ids of workflows that have not ended."""
        self._given_up: set[int] = set()
        self._names = {key(str(n)): n for work in scenario.works for n in work.numbers}
        self._executor = self._boot()
        self._versions = [self._rater(n, many) for n, many in enumerate(scenario.replicas)]
        self._servers = [
            _Server(rater=rater, number=0)
            for rater, many in enumerate(scenario.replicas)
            for _ in range(many)
        ]
        for number, server in enumerate(self._servers):
            server.number = number
        self._replicas: list[ModelReplica] = [
            Replica(
                key=f"{server.number:02}",
                model_id=RATERS[server.rater],
                window=scenario.window,
            )
            for server in self._servers
        ]
        DIRECTORY.live = self._replicas[scenario.late_s is not None :]
        for first, many in scenario.stored:
            for n in range(first, first + many):
                rating_queue.archived(str(n))

    def run(self) -> list[Event]:
        """Play the scenario until all has ended."""
        for place, work in enumerate(self._scenario.works):
            self._plan(work.at_s, partial(self._submit, place))
        if self._scenario.late_s is not None:
            self._plan(self._scenario.late_s, self._come)
        if self._scenario.commits:
            self._plan(60.0, self._tick)
        while len(self._places) < len(self._scenario.works) or self._open:
            self._now_s, _, act = heapq.heappop(self._coming)
            act()
        for place, workflow in self._workflows.items():
            self._note_outcome(place, workflow)
        return _in_order(self._events)

    @property
    def _now(self) -> datetime:
        return self._at(self._now_s)

    def _at(self, at_s: float) -> datetime:
        return self._start + timedelta(seconds=at_s)

    def _plan(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (at_s, next(self._planned), act))

    def _boot(self) -> UUID:
        executor = boot(slots=1_000)
        ExecutorBoot.objects.update(heartbeat_at=self._start + AHEAD)
        return executor

    def _rater(self, number: int, replicas: int) -> RaterVersion:
        name = RATERS[number]
        DIRECTORY.models[name] = Model(id=name)
        of = builders.version(builders.rater(name, model_id=name, batch_size=BATCH))
        RaterCost.objects.create(
            rater=of.rater,
            seconds_a_request=BATCH_S / BATCH,
            call_seconds_a_request=BATCH_S / BATCH,
            requests=1_000,
            exact=True,
            measured_at=self._start,
            read_to=self._start,
            servers=replicas,
            looked_at=self._start,
        )
        return of

    # What happens.

    def _submit(self, place: int) -> None:
        work = self._scenario.works[place]
        names = [str(n) for n in work.numbers]
        missing = self._missing(names)
        workflow = rating_queue.submit(
            missing,
            of=self._versions[work.rater],
            batch_size=BATCH,
            owner=work.owner,
            priority=SCORES[work.priority_class],
            best_effort=work.priority_class is PriorityClass.BEST_EFFORT,
            created_at=self._now,
            closed_at=self._now,
            deadline_at=self._at(self._now_s + work.deadline_s),
            ends_at=self._at(self._now_s + work.deadline_s) + AHEAD,
        )
        self._places[workflow.pk] = place
        self._workflows[place] = workflow
        self._hits[place] = len(names) - len(missing)
        self._note("submit", workflow.pk, self._hits[place])
        self._open.add(workflow.pk)
        if not missing:
            completion.check(workflow.pk)
            self._dispatch()
            return
        self._plan(self._now_s + work.deadline_s, partial(self._expire, workflow.pk))
        if self._scenario.commits:
            commitments.admit(
                workflow, pending=len(missing), accepted=len(names), eta=None, now=self._now
            )
            self._note_given_up()
        self._dispatch()

    def _missing(self, names: Sequence[str]) -> list[str]:
        with connection.cursor() as cursor:
            known = archive.known(
                cursor,
                [key(name) for name in names],
                produced_after=database_now() - AHEAD,
                now=self._now,
            )
        return [name for name in names if key(name) not in known]

    def _dispatch(self) -> None:
        """Run passes as the dispatcher's loop does, until one asks for no other."""
        more = True
        while more:
            folding.fold()
            leases.wake(now=self._now)
            more = dispatch.run_once(
                self._now, memory=self._memory, directory=DIRECTORY, publish=self._publish
            ).full
            self._take_over()
            self._note_ends()

    def _publish(self, batches: Sequence[tuple[int, int, str]], step: int) -> None:
        for batch_id, fence, _ in batches:
            self._sent[batch_id] = (fence, least_score(step))

    def _take_over(self) -> None:
        """Let executors take over what was sent; it reaches the servers all at once."""
        sent, self._sent = self._sent, {}
        held = [(batch_id, fence) for batch_id, (fence, _) in sent.items()]
        arrived = sorted(rating_queue.take(held, by=self._executor), key=_class_of)
        for taken in arrived:
            server = self._servers[int(taken.replica)]
            number = self._numbers[server.rater]
            self._numbers[server.rater] += 1
            # As workers.caller tells it.
            priority = max(0 if taken.best_effort else taken.priority, sent[taken.batch_id][1])
            self._note(
                "dispatch", taken.workflow_id, number, priority, server.number,
                *self._ratings(taken),
            )  # fmt: skip
            heapq.heappush(server.queue, (-priority, number, taken))
        for taken in arrived:
            server = self._servers[int(taken.replica)]
            if server.running is None:
                self._compute(server)

    def _compute(self, server: _Server) -> None:
        taken = server.running = heapq.heappop(server.queue)[2]
        cost = self._scenario.works[self._places[taken.workflow_id]].cost
        took_s = (3.0 + 0.75 * len(sent_items(taken))) * cost
        self._plan(self._now_s + took_s, partial(self._finish, server))

    def _finish(self, server: _Server) -> None:
        taken = server.running
        assert taken is not None
        server.running = None
        if server.queue:
            self._compute(server)
        emptied = leases.finish([self._computed(taken)])
        self._note("finish", taken.workflow_id, *self._ratings(taken))
        for workflow_id in emptied:
            completion.check(workflow_id)
        if taken.deadline_at <= self._now:
            completion.run_once(self._now)
        self._dispatch()

    def _computed(self, taken: Taken) -> Finish:
        cost = self._scenario.works[self._places[taken.workflow_id]].cost
        items = sent_items(taken)
        bad = {i for i in items if self._names[taken.fingerprints[i]] in self._scenario.bad}
        return Finish(
            taken=taken,
            scored={i: Scored(score=SCORE) for i in items if i not in bad},
            failed=dict.fromkeys(bad, "bad_page"),
            for_good=frozenset(bad),
            calls=1,
            accelerator_seconds=BATCH_S / BATCH * cost * len(items),
        )

    def _expire(self, workflow_id: int) -> None:
        if workflow_id in self._open:
            completion.run_once(self._now)
        self._dispatch()

    def _come(self) -> None:
        DIRECTORY.live = self._replicas
        self._dispatch()

    def _tick(self) -> None:
        commitments.run_once(self._now)
        self._note_given_up()
        self._plan(self._now_s + 60.0, self._tick)
        self._dispatch()

    # What is told.

    def _note(self, what: str, workflow_id: int, *detail: Any) -> None:
        place = self._places[workflow_id]
        rater = self._scenario.works[place].rater
        self._events.append(Event(self._now_s, rater, what, place, detail))

    def _note_ends(self) -> None:
        ended = Workflow.objects.filter(pk__in=self._open, finished_at__isnull=False)
        for workflow_id in ended.values_list("pk", flat=True):
            self._open.discard(workflow_id)
            self._given_up.discard(workflow_id)
            self._note("complete", workflow_id)

    def _note_given_up(self) -> None:
        """Note, of workflows that have batches READY, which were given up and which no more."""
        ready = Batch.objects.filter(workflow__in=self._open, state=BatchState.READY)
        waiting = set(ready.values_list("workflow", flat=True))
        cut = WorkflowForecast.objects.filter(cut_batches__gt=0, settled_at__isnull=True)
        given_up = waiting & set(cut.values_list("pk", flat=True))
        for workflow_id in waiting:
            if (workflow_id in given_up) != (workflow_id in self._given_up):
                self._note("given up" if workflow_id in given_up else "committed", workflow_id)
        self._given_up = given_up

    def _note_outcome(self, place: int, workflow: Workflow) -> None:
        found = progress(workflow)
        work = self._scenario.works[place]
        self._events.append(
            Event(
                work.at_s + work.deadline_s,
                work.rater,
                "outcome",
                place,
                (
                    self._hits[place],
                    found["from_model"],
                    found["from_archive"] + found["coalesced"],
                    found["failed"],
                    found["timed_out"],
                ),
            )
        )

    def _ratings(self, taken: Taken) -> tuple[int, ...]:
        return tuple(sorted(self._names[taken.fingerprints[i]] for i in sent_items(taken)))


def _class_of(taken: Taken) -> PriorityClass:
    return priority_class(taken.priority, best_effort=taken.best_effort)
