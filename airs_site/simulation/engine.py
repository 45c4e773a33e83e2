"""The event loop: submits, dispatches, finishes and deadlines in virtual time.

Events of one instant happen in the order in which they were planned, and all chance is drawn from
seeded generators: a run is a function of its workload, policy and options. A policy is an object
that is told what happens and sends batches through the `World` it is given.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Final, Protocol

from airs_site.simulation.hours import HOUR_S, Hours
from airs_site.simulation.pool import Pool, Replica, State
from airs_site.simulation.trace import Progress, Workload
from airs_site.simulation.work import Archive, Batch, Job, Layers, failing
from airs_site.simulation.workload import DAY_S, Rater
from fulfillment.policy.priority import PriorityClass

EPOCH: Final = datetime(2025, 10, 18, tzinfo=UTC)
"""Second 0 for policies, which take instants; a Saturday, as in the paper."""
START_UP_S: Final = 240.0
SIGNAL_PERIOD_S: Final = 30.0
"""How often a signal is taken that arrives late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Replicas that leave one rater for another."""

    donor: int
    receiver: int
    replicas: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A share of the pool is gone for a while, with whatever it was computing."""

    at_s: float
    until_s: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a run may vary besides its workload and policy."""

    window: int = 1
    """Batches that a replica may hold. One batch at 1:100 lasts as long as a hundred at 1:1, so
    one slot is the nearest to 16 held batches of the full size."""
    start_up_s: float = START_UP_S
    layers: Layers = field(default_factory=Layers)
    batch: int | None = None
    """Ratings a batch, instead of the workload's."""
    losses: Sequence[Loss] = ()
    priorities: bool = True
    """Without them all evaluations are of high priority, as far as a policy can tell."""
    signal_age_s: float = 0.0
    """How late it is known for rebalancing what raters do and have to do."""
    signal_error: float = 1.0
    """By which that is wrong: too much for every second rater, too little for the others."""
    management_away: tuple[float, float] | None = None
    """From when until when no replica is moved, and nobody says how many there are."""
    days: int | None = None
    """Only so many of the workload's days."""
    seed: int = 0
    """Of what a policy draws."""


class Policy(Protocol):
    """Who decides. The world calls these; what a policy wants done it tells the world."""

    name: str

    def begin(self, world: "World") -> None:
        """Look around before anything happens; plan timers here."""

    def submitted(self, job: Job) -> None:
        """An evaluation has ratings to compute."""

    def has_room(self, rater: int) -> None:
        """Work and room may have met: a rater has both."""

    def finished(self, batch: Batch) -> None:
        """A batch was computed."""

    def changed(self, job: Job) -> None:
        """A job has ended, expired, or has something to send again."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """What happened in the measured days."""

    attempts: int = 0
    """Asked the quota or was sent."""
    calls: int = 0
    lost: int = 0
    moves: int = 0
    busy_s: list[float] = field(default_factory=list)
    """Replica-seconds of computing, by hour."""
    events: int = 0


class World:
    """State of a run, as policies see it, and what they may do."""

    def __init__(self, workload: Workload, policy: Policy, options: Options) -> None:
        params = workload.params
        self.workload = workload
        self.options = options
        self.raters: Sequence[Rater] = params.raters
        self.now = 0.0
        self.batch = options.batch or params.batch
        self.pool = Pool([r.default_replicas for r in params.raters], window=options.window)
        self.open: list[dict[int, Job]] = [{} for _ in params.raters]
        """Jobs that have not ended, by rater and place, in the order of submission."""
        self.unsent = [0] * len(params.raters)
        """Ratings that may be sent, by rater."""
        self.jobs: list[Job] = []
        self.counts = Counts()
        self.days = min(options.days or params.days, params.days)
        self.hours = Hours(hours=int(self.days * DAY_S // HOUR_S))
        self.busy_s = [0.0] * len(params.raters)
        """Replica-seconds of computing until the last change, by rater."""
        self._busy_since = [0.0] * len(params.raters)
        self._policy = policy
        self._archive = Archive.of(workload.distinct, options.layers)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._unfinished = 0
        """Jobs that are open or still to come."""
        self._dirty: dict[int, None] = {}
        self._late: deque[list[float]] = deque(
            maxlen=1 + round(options.signal_age_s / SIGNAL_PERIOD_S)
        )
        """What raters' replicas had computed, the oldest first, where that is known late."""

    # What policies may do.

    def instant(self) -> datetime:
        """Return the time as an instant."""
        return EPOCH + timedelta(seconds=self.now)

    def call_at(self, at_s: float, act: Callable[[], None]) -> None:
        """Plan an act; acts that are planned keep no run going, only open jobs do."""
        self._planned += 1
        heapq.heappush(self._events, (at_s, self._planned, act))

    def look_once(self) -> None:
        """Compute all that was missing at submit, without what production sees at the claim."""
        layers = self._archive.layers
        self._archive.layers = replace(layers, second_look=False, single_flight=False)

    def send(self, job: Job, priority_class: PriorityClass | None = None) -> bool:
        """Send the job's next batch to a replica, which must have room; False if none was left."""
        before = job.unsent
        ids = self._archive.form(job, self.batch, self.now)
        self.unsent[job.rater] -= before - job.unsent
        if not ids:
            self._end_if_done(job)
            return False
        batch = Batch(
            job=job,
            ids=ids,
            service_s=self.service_s(job, len(ids)),
            number=self.counts.calls,
            priority_class=job.priority_class if priority_class is None else priority_class,
        )
        self.counts.calls += 1
        job.batches_out += 1
        replica = self.pool.put(batch)
        if replica.running is None:
            self._take_up(replica)
        return True

    def service_s(self, job: Job, ratings: int) -> float:
        """Return how long a batch of so many ratings takes."""
        return self.batch_s(job.rater, ratings) * job.evaluation.cost

    def batch_s(self, rater: int, ratings: int) -> float:
        """Return how long such a batch takes for an evaluation of ordinary cost."""
        params = self.workload.params
        full = self.workload.scale * params.batch_service_s * self.raters[rater].cost_mult
        return full * (0.25 + 0.75 * ratings / params.batch)

    def move(self, moves: Sequence[Move]) -> None:
        """Take replicas from raters for others; what they hold ends first."""
        if self.management_is_away():
            return
        for move in moves:
            for _ in range(move.replicas):
                replica = self.pool.drain(move.donor, move.receiver)
                if replica is None:
                    break
                self.counts.moves += 1
                if not replica.held:
                    self._start_next(replica)

    def management_is_away(self) -> bool:
        """Say whether model management does nothing now, nor tells anything."""
        away = self.options.management_away
        return away is not None and away[0] <= self.now < away[1]

    def signal_factor(self, rater: int) -> float:
        """Return by which the load of the rater is overstated to whoever rebalances."""
        error = self.options.signal_error
        return 1 / error if rater % 2 else error

    # The run.

    def run(self, progress: Progress) -> None:
        """Run until nothing is open and nothing more comes."""
        horizon_s = self.days * DAY_S
        self._archive.warm(self.workload.stored)
        for place, evaluation in enumerate(self.workload.evaluations):
            if evaluation.at_s < 0:
                self._archive.warm(self.workload.requests(place))
            elif evaluation.at_s < horizon_s:
                self.call_at(evaluation.at_s, self._submission(place))
                self._unfinished += 1
        for loss in self.options.losses:
            self.call_at(loss.at_s, self._lose(loss))
        if self.options.signal_age_s:
            self._take_signal()
        self._policy.begin(self)
        told = -inf
        while self._unfinished:
            self.now, _, act = heapq.heappop(self._events)
            if self.now >= self.hours.due_s:
                self._look()
            act()
            self._acted()
            self.counts.events += 1
            while self._dirty:
                rater = next(iter(self._dirty))
                del self._dirty[rater]
                if self.unsent[rater] and self.pool.room[rater] > 0:
                    self._policy.has_room(rater)
                    self._passed()
            if self.now - told >= HOUR_S:
                told = self.now
                progress(min(1.0, self.now / horizon_s))
        self._look(at_end=True)

    def _acted(self) -> None:
        """Do nothing more after an event."""

    def _passed(self) -> None:
        """Do nothing after a policy filled room: a batch leaves when it is sent."""

    def _look(self, *, at_end: bool = False) -> None:
        self.hours.look(
            inf if at_end else self.now,
            calls=self.counts.calls,
            attempts=self.counts.attempts,
            unsent=self.unsent,
            replicas=self.pool.ready,
        )

    def _take_signal(self) -> None:
        self._late.append([self._busy_now(rater) for rater in range(len(self.raters))])
        self.call_at(self.now + SIGNAL_PERIOD_S, self._take_signal)

    def _submission(self, place: int) -> Callable[[], None]:
        return lambda: self._submit(place)

    def _submit(self, place: int) -> None:
        job = self._job(place)
        self.jobs.append(job)
        if not job.open:
            job.has_ended = True
            self._unfinished -= 1
            return
        self.open[job.rater][place] = job
        self.unsent[job.rater] += job.unsent
        self.call_at(job.deadline_s, lambda: self._expire(job))
        self._policy.submitted(job)
        self._dirty[job.rater] = None

    def _job(self, place: int) -> Job:
        """Return an evaluation as it is submitted now, after a look into the archive."""
        evaluation = self.workload.evaluations[place]
        ids = self.workload.requests(place)
        missing = self._archive.missing(ids)
        deadline_s = self.now + evaluation.deadline_s
        return Job(
            place=place,
            evaluation=evaluation,
            rater=self._rater_no(evaluation.rater),
            priority_class=(
                PriorityClass.LOW
                if evaluation.low and self.options.priorities
                else PriorityClass.HIGH
            ),
            submitted_s=self.now,
            deadline_s=deadline_s,
            submitted_at=self.instant(),
            deadline_at=EPOCH + timedelta(seconds=deadline_s),
            requests=len(ids),
            hits=len(ids) - len(missing),
            pending=missing.tolist(),
            failing=failing(missing, evaluation),
            last_s=self.now,
        )

    def _rater_no(self, rater: str) -> int:
        return next(number for number, r in enumerate(self.raters) if r.id == rater)

    def _take_up(self, replica: Replica) -> None:
        rater = replica.rater
        self._account(rater)
        batch = self.pool.take_up(replica)
        if batch is not None:
            batch.started_s = self.now
            epoch = replica.epoch
            self.call_at(self.now + batch.service_s, lambda: self._finish(replica, epoch))

    def _finish(self, replica: Replica, epoch: int) -> None:
        if replica.epoch != epoch:
            return
        rater = replica.rater
        self._account(rater)
        batch = self.pool.end(replica)
        self._busy(batch.started_s, self.now)
        batch.job.batches_out -= 1
        met = self._archive.finish(batch, self.now)
        if replica.queue:
            self._take_up(replica)
        elif replica.state is State.DRAINING:
            self._start_next(replica)
        self._policy.finished(batch)
        for job in met:
            self._end_if_done(job)
        self._dirty[rater] = None

    def _expire(self, job: Job) -> None:
        if job.has_ended:
            return
        self.unsent[job.rater] -= job.unsent
        self._archive.expire(job, self.now)
        if not self._end_if_done(job):
            self._policy.changed(job)

    def _end_if_done(self, job: Job) -> bool:
        if job.has_ended or job.open:
            return False
        job.has_ended = True
        self._unfinished -= 1
        del self.open[job.rater][job.place]
        self._policy.changed(job)
        return True

    def _start_next(self, replica: Replica) -> None:
        self.pool.hand_over(replica)
        self._start_up(replica)

    def _start_up(self, replica: Replica) -> None:
        epoch = replica.epoch

        def ready() -> None:
            if replica.epoch == epoch:
                self.pool.start(replica)
                self._dirty[replica.rater] = None

        self.call_at(self.now + self.options.start_up_s, ready)

    def _lose(self, loss: Loss) -> Callable[[], None]:
        def vanish() -> None:
            replicas = self.pool.replicas
            lost = [
                # Spread over the pool, so that each rater loses its part.
                replica
                for replica in (replicas[int(n / loss.share)] for n in range(self._share_of(loss)))
                if replica.state is not State.GONE
            ]
            for replica in lost:
                self._account(replica.rater)
                if replica.running is not None:
                    self._busy(replica.running.started_s, self.now)
                for batch in self.pool.lose(replica):
                    self._undo(batch)
            self.call_at(loss.until_s, lambda: self._bring_back(lost))

        return vanish

    def _share_of(self, loss: Loss) -> int:
        return int(len(self.pool.replicas) * loss.share)

    def _undo(self, batch: Batch) -> None:
        """Give back what a lost replica held; equal ratings of other jobs may go again too."""
        rater = batch.job.rater
        self.counts.lost += 1
        batch.job.batches_out -= 1
        met = {job.place: job for job in self._archive.lose(batch)}
        self.unsent[rater] = sum(job.unsent for job in self.open[rater].values())
        for job in met.values():
            if not self._end_if_done(job):
                self._policy.changed(job)
        self._dirty[rater] = None

    def _bring_back(self, lost: Sequence[Replica]) -> None:
        for replica in lost:
            self.pool.bring_back(replica, replica.rater)
            self._start_up(replica)

    def _account(self, rater: int) -> None:
        """Count the computing of a rater's replicas until now."""
        self.busy_s[rater] += self.pool.running[rater] * (self.now - self._busy_since[rater])
        self._busy_since[rater] = self.now

    def busy_until_now(self, rater: int) -> float:
        """Return the replica-seconds that the rater's replicas have computed, as far as known."""
        if self._late:
            return self._late[0][rater] * self.signal_factor(rater)
        self._account(rater)
        return self.busy_s[rater] * self.signal_factor(rater)

    def _busy_now(self, rater: int) -> float:
        since_s = self.now - self._busy_since[rater]
        return self.busy_s[rater] + self.pool.running[rater] * since_s

    def _busy(self, start_s: float, end_s: float) -> None:
        hours = self.counts.busy_s
        while len(hours) <= end_s // HOUR_S:
            hours.append(0.0)
        while start_s < end_s:
            hour = int(start_s // HOUR_S)
            part = min(end_s, (hour + 1) * HOUR_S)
            hours[hour] += part - start_s
            start_s = part


def simulate(
    workload: Workload,
    policy: Policy,
    options: Options | None = None,
    *,
    progress: Progress = lambda share: None,
) -> World:
    """Run a policy over a workload; the world that is returned holds all jobs and counts."""
    world = World(workload, policy, options or Options())
    world.run(progress)
    return world
