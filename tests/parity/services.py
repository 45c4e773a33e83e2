"""A scenario through the services, in virtual time."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import Any
from uuid import UUID

from django.db import connection

from airs_site.simulation.kept import SCORES
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
from fulfillment.policy import ordering
from fulfillment.policy.lifecycle import BatchState
from fulfillment.policy.priority import PriorityClass, least_score, priority_class
from fulfillment.ready import Sight, VersionLoad
from fulfillment.scores import Scored
from tests import builders, rating_queue
from tests.builders import DIRECTORY, Model
from tests.parity.scenario import BATCH, BATCH_S, RATERS, Event, Scenario, in_order
from tests.rating_queue import SCORE, Replica, boot, key, progress, sent_items

AHEAD = timedelta(days=1)
"""By which virtual time is later than the clock, so that no deadline has passed by that."""


def served(scenario: Scenario) -> list[Event]:
    """Return what the services do; needs plug-ins and the directory of `builders.use_plugins`."""
    return _Service(scenario).run()


@dataclass(kw_only=True, slots=True, eq=False)
class _Server:
    """A model server: one batch at a time, the highest priority first."""

    rater: int
    number: int
    running: Taken | None = None
    queue: list[tuple[int, int, Taken]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Sight(Sight):
    """What is READY; counts the claims."""

    claims: int = 0

    def take(self, version: VersionLoad, picks: Iterable[ordering.Pick]) -> None:
        self.claims += 1
        super(_Sight, self).take(version, picks)


class _Service:
    """The services, and a heap of what is still to come."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._now_s = 0.0
        self._start = database_now() + AHEAD
        self._planned = count()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._events: list[Event] = []
        self._sight = _Sight()
        self._memory = dispatch.Memory(sight=self._sight)
        self._sent: dict[int, tuple[int, int, int]] = {}
        """Fence, least priority and number of the claim of what was published, by batch."""
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
        self._plan(60.0, self._tick)
        while len(self._places) < len(self._scenario.works) or self._open:
            self._now_s, _, act = heapq.heappop(self._coming)
            act()
        for place, workflow in self._workflows.items():
            self._note_outcome(place, workflow)
        return in_order(self._events)

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
        commitments.admit(
            workflow,
            pending=len(missing),
            accepted=len(names),
            etas={False: None, True: None},
            now=self._now,
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
            self._sent[batch_id] = (fence, least_score(step), self._sight.claims)

    def _take_over(self) -> None:
        """Let executors take over what was sent; it reaches the servers all at once."""
        sent, self._sent = self._sent, {}
        held = [(batch_id, fence) for batch_id, (fence, _, _) in sent.items()]
        # In the order in which claims name replicas.
        arrived = sorted(
            rating_queue.take(held, by=self._executor),
            key=lambda taken: (sent[taken.batch_id][2], _class_of(taken)),
        )
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
            device_seconds=BATCH_S / BATCH * cost * len(items),
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
