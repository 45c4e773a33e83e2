"""What a pass of the dispatcher costs, whatever waits: CPU of its thread and of its backend.

Run by `inside`. Each backlog lies in a database of its own of one server, and all replicas are full
when the measuring begins. Before each pass sixteen batches are taken back, by another connection;
then the dispatcher hears of them, wakes and fills the room as its loop does, and rests as that
does. CPU says what a pass costs beside whoever else runs.

Of more than a hundred workflows a reading of what is READY is believed for a while, so that it
takes a fifth of the time at most. A pass is measured while it is believed, and the reading apart.
So is the count of what is out, which is believed for a second.

The floor is the claim alone: the same transaction for sixteen batches that somebody else picked.
"""

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper

from fulfillment import claim, dispatch, leases, ready
from fulfillment.clock import database_now
from fulfillment.held import Held
from fulfillment.management.commands.dispatch import LONGEST_REST_S, REST_FACTOR, SHORTEST_REST_S
from fulfillment.models import ExecutorBoot, Mode
from fulfillment.policy import ordering
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.policy.priority import PriorityClass
from fulfillment.ready import Sight
from fulfillment.windows import Room, Windows
from tests.benchmarks import queue_rows
from tests.benchmarks.report import Figure, number, spread
from tests.rating_queue import Fleet, Replica

PLACES = 16
"""A replica's, and batches that are taken back before a pass."""
WARM_UP, PASSES, ROUNDS = 3, 20, 5
READINGS = 3
"""A round."""
SMALL = "10,000 batches of one workflow"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """CPU of a pass, in ms."""

    dispatcher: float
    backend: float

    @property
    def total(self) -> float:
        return self.dispatcher + self.backend


@dataclass(kw_only=True, slots=True)
class Backlog:
    """A database with batches of workflows of raters, and the dispatcher that leads there."""

    batches: int
    workflows: int
    raters: int
    spread: bool = False
    """Whether the batches that are taken back are of sixteen raters, not of one."""
    memory: dispatch.Memory = field(default_factory=dispatch.Memory)
    version_ids: Sequence[int] = ()
    turn: int = 0
    rung: list[dict[str, object]] = field(default_factory=list)
    """What executors would have rung of the batches that were taken back."""
    costs: list[Cost] = field(default_factory=list)
    readings: list[Cost] = field(default_factory=list)
    counts: list[Cost] = field(default_factory=list)

    def __str__(self) -> str:
        room = " with a place each" if self.spread else ""
        counts = ((self.batches, "batch", "es"), (self.workflows, "workflow", "s"))
        named = [f"{n:,} {what}{many * (n > 1)}" for n, what, many in counts]
        return f"{', '.join(named)}, {self.raters} rater{'s' * (self.raters > 1)}{room}"

    @property
    def name(self) -> str:
        return f"dispatch_{self.batches}_{self.workflows}_{self.raters}"

    @property
    def fleet(self) -> Fleet:
        return Fleet(
            live=[
                Replica(key=f"r{n}", model_id=f"m{n}", version="", window=PLACES)
                for n in range(self.raters)
            ]
        )

    def make(self) -> None:
        """Store the rows, and let all replicas be full."""
        queue_rows.enter(self.name)
        versions = [
            queue_rows.version(f"rater-{n}", model_id=f"m{n}", mode=Mode.INTEGRATED)
            for n in range(self.raters)
        ]
        self.version_ids = [version.pk for version in versions]
        for n, version in enumerate(versions):
            count = self.workflows // self.raters + (n < self.workflows % self.raters)
            ids = queue_rows.workflows(count, version=version, state=WorkflowState.RUNNING)
            queue_rows.batches(ids, self.batches // self.workflows)
        _make_urgent()
        _executor()
        queue_rows.analyze()
        self.lead()
        while self._dispatch(self.fleet):
            pass
        queue_rows.analyze()

    def lead(self) -> None:
        """Go on in this database as its leader."""
        queue_rows.enter(self.name)
        assert dispatch.lead("bench")
        _executor()

    def measure(self) -> None:
        """Measure some passes."""
        self.lead()
        self.memory.sight = Sight()
        fleet = self.fleet
        with _other_connection() as other:

            def before() -> None:
                self.free(other)
                if self.memory.sight.workflows > ready.FEW:
                    self.memory.sight.read_at = database_now()
                    self.memory.sight.took = ready.LONGEST

            self.costs.append(_measured(lambda: self._dispatch(fleet), before))
        self.readings.append(_measured(_read, warm_up=1, times=READINGS))
        self.counts.append(_measured(_count, warm_up=1, times=READINGS))

    def free(self, other: BaseDatabaseWrapper) -> None:
        """Take sixteen batches back, so that what waits stays as much."""
        raters = PLACES if self.spread else 1
        self.turn += raters
        numbers = [(self.turn + n) % self.raters for n in range(raters)]
        chosen = [self.version_ids[n] for n in numbers]
        met = {"cls": PriorityClass.HIGH, "succeeded": PLACES // raters, "overloaded": 0}
        self.rung = [{"replica": f"r{n}", **met} for n in numbers]
        with other.cursor() as cursor:
            cursor.execute(
                """
                WITH taken AS (
                    SELECT b.id FROM unnest(%s::bigint[]) AS v(id) CROSS JOIN LATERAL (
                        SELECT b.id FROM fulfillment_batch b
                        JOIN fulfillment_workflow w ON w.id = b.workflow_id
                        WHERE b.state = 1 AND w.rater_version_id = v.id ORDER BY b.id LIMIT %s
                    ) AS b
                ), landed AS (
                    DELETE FROM fulfillment_flight f USING taken t WHERE f.batch_id = t.id
                )
                UPDATE fulfillment_batch b SET state = 0, sent_mask = 0, lease_until = NULL
                FROM taken t WHERE b.id = t.id
                """,
                [chosen, PLACES // raters],
            )

    def _dispatch(self, fleet: Fleet) -> int:
        """Run a pass; return what was sent."""
        now = database_now()
        leases.wake(now=now, sweep=False)
        dispatch.observe(self.memory, self.rung, now)
        self.rung = []
        return dispatch.run_once(
            now, memory=self.memory, directory=fleet, publish=lambda *_: None
        ).sent


def measure(*, quick: bool) -> Iterator[Figure]:
    """Measure passes beside each backlog, in turns, and the bare claim."""
    large = 100_000 if quick else 1_000_000
    small = Backlog(batches=10_000, workflows=1, raters=1)
    others = [
        Backlog(batches=large, workflows=1, raters=1),
        Backlog(batches=10_000, workflows=5_000, raters=1),
        Backlog(batches=large, workflows=5_000, raters=1),
        Backlog(batches=10_000, workflows=300, raters=300),
        Backlog(batches=10_000, workflows=5_000, raters=300),
        Backlog(batches=large, workflows=5_000, raters=300),
    ]
    for backlog in (small, *others):
        queue_rows.copy_database(backlog.name)
    for backlog in (small, *others):
        backlog.make()
    floors: list[Cost] = []
    for _ in range(ROUNDS):
        for backlog in (small, *others):
            backlog.measure()
        floors.append(_bare_claims(small))
    yield _figure(
        "dispatch_ms", small.costs, floors, "the claim alone of sixteen batches, somehow picked",
        str(small),
    )  # fmt: skip
    for backlog in others:
        yield _figure(f"{backlog.name}_ms", backlog.costs, small.costs, SMALL, str(backlog))
    for backlog in others:
        yield _figure(
            f"{backlog.name}_reading_ms", backlog.readings, small.readings, SMALL,
            f"reading {backlog}", unit="ms CPU", n=ROUNDS * READINGS,
        )  # fmt: skip
    yield _figure(
        f"{others[-1].name}_count_ms", others[-1].counts, small.counts, SMALL,
        f"counting what is out of {others[-1]}", unit="ms CPU", n=ROUNDS * READINGS,
    )  # fmt: skip
    for backlog in others[-2:]:
        backlog.spread, backlog.costs = True, []
    for _ in range(ROUNDS):
        for backlog in others[-2:]:
            backlog.measure()
    few, many = others[-2:]
    yield _figure(f"{many.name}_spread_ms", many.costs, few.costs, str(few), str(many))


def _figure(
    name: str,
    costs: Sequence[Cost],
    beside: Sequence[Cost],
    ratio_to: str,
    what: str,
    *,
    unit: str = "ms CPU a pass",
    n: int = ROUNDS * PASSES,
) -> Figure:
    totals = [cost.total for cost in costs]
    value = statistics.median(totals)
    dispatcher = statistics.median(cost.dispatcher for cost in costs)
    return Figure(
        name=name,
        value=value,
        unit=unit,
        ratio_to=ratio_to,
        ratio=statistics.median(cost.total for cost in beside) / value,
        n=n,
        note=f"{what}; dispatcher {number(dispatcher)}, PostgreSQL {number(value - dispatcher)};"
        f" rounds {spread(totals)}",
    )


def _measured(
    act: Callable[[], int],
    before: Callable[[], object] = lambda: None,
    *,
    warm_up: int = WARM_UP,
    times: int = PASSES,
) -> Cost:
    """Return what an act costs on average, which sends sixteen batches if any."""
    backend = _backend()
    rest = threading.Event()
    spent_s = began_s = 0.0
    for turn in range(warm_up + times):
        if turn == warm_up:
            spent_s, began_s = 0.0, _cpu_s(backend)
        before()
        began_at = time.thread_time()
        sent = act()
        took_s = time.thread_time() - began_at
        spent_s += took_s
        assert sent in (0, PLACES), sent
        rest.wait(min(max(REST_FACTOR * took_s, SHORTEST_REST_S), LONGEST_REST_S))
    return Cost(dispatcher=1e3 * spent_s / times, backend=1e3 * (_cpu_s(backend) - began_s) / times)


def _read() -> int:
    """Read what is READY, and let all raters have room for it."""
    for version in ready.read(database_now()):
        version.line_up(None)
    return 0


def _count() -> int:
    """Count what is out, as is done each second."""
    Held().look(database_now())
    return 0


def _bare_claims(backlog: Backlog) -> Cost:
    """Measure the claim of what its only workflow has next."""
    backlog.lead()
    (replica,) = backlog.fleet.live
    (version_id,) = backlog.version_ids
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM fulfillment_workflow")
        ((workflow_id,),) = cursor.fetchall()

    def act() -> int:
        now = database_now()
        room = Room(
            version_id=version_id, replicas=[replica], batch_size=queue_rows.ITEMS, isolated=False,
            held=Held(), windows=Windows(), now=now,
        )  # fmt: skip
        picks = [ordering.Pick(workflow_id=workflow_id, batches=PLACES)]
        return claim.claim(picks, room=room, now=now)[1].sent

    with _other_connection() as other:
        return _measured(act, lambda: backlog.free(other))


def _make_urgent() -> None:
    """Let all workflows be of the class that may take all places, and count their requests."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH found AS (
                SELECT workflow_id, count(*) * %s AS rows FROM fulfillment_batch GROUP BY 1
            ), counted AS (
                UPDATE fulfillment_workflowstats s SET received = f.rows FROM found f
                WHERE s.workflow_id = f.workflow_id
            )
            UPDATE fulfillment_workflow w SET next_position = f.rows, priority = 90 FROM found f
            WHERE w.id = f.workflow_id
            """,
            [queue_rows.ITEMS],
        )


def _executor() -> None:
    """Let a live executor have slots for all."""
    now = database_now()
    ExecutorBoot.objects.all().delete()
    ExecutorBoot.objects.create(
        boot_id=uuid.uuid4(), host="bench", pid=1, slots=100_000, plugins={"bench": "1"},
        started_at=now, heartbeat_at=now,
    )  # fmt: skip


@contextmanager
def _other_connection() -> Iterator[BaseDatabaseWrapper]:
    other = connection.copy()
    try:
        yield other
    finally:
        other.close()


def _backend() -> psutil.Process:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    return psutil.Process(pid)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
