"""The dispatcher: decides which batch leaves now, claims it, and hands it to Celery.

Work is sent when there is room and not before: a pass reads what may be sent and what is out from
PostgreSQL, asks the policies, claims in one transaction, and publishes after COMMIT. If it dies
in between, the pick-up lease ends and the batches go again.

One dispatcher leads: it holds an advisory lock on the very connection it claims with, so that a
lost lock cannot claim. A frozen leader loses that connection to `idle_session_timeout`.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import orjson
from django.db import OperationalError, connection

from fulfillment import leases, prepared
from fulfillment.claim import Pass, claim
from fulfillment.model_directory import ModelDirectory, Replica
from fulfillment.policy import ordering, traffic
from fulfillment.policy.priority import PriorityClass, priority_class

logger = logging.getLogger(__name__)

LEADER_LOCK = 0x41495253  # "AIRS"
FROZEN_S = 10
"""Idle time after which PostgreSQL takes the connection of a leader that stands still."""
REST = timedelta(seconds=2)
"""How long nothing is sent to a replica that refused a connection or is warming up."""
READY_LOOK = 128
"""READY batches counted a workflow: more than a pass can send of one."""

Publish = Callable[[Sequence[tuple[int, int, str]], int], None]
"""Sends [(batch id, fence, replica)] to the executors at a Celery priority."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionLoad:
    """What may be sent of one rater version."""

    version_id: int
    rater_id: str
    model_id: str
    model_version: str
    autorater: str
    plugin_version: str
    max_qps: float | None
    loads: Sequence[ordering.Load]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Batches out now, by replica and class."""

    replica: str
    priority_class: PriorityClass
    version_id: int
    batches: int


@dataclass(kw_only=True, slots=True)
class Memory:
    """What the leader remembers between passes; losing it costs a little order, no work."""

    orders: dict[int, ordering.Memory] = field(default_factory=dict)
    windows: dict[str, traffic.Window] = field(default_factory=dict)
    buckets: dict[str, traffic.Bucket] = field(default_factory=dict)
    """Of raters with a `max_qps`. What a bisected batch asks in addition is not counted."""
    resting: dict[str, datetime] = field(default_factory=dict)
    """Until when a replica that was not there is left alone."""


def lead(name: str) -> bool:
    """Try to become the leader on this connection, which pg_stat_activity then shows as `name`."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('application_name', %s, false)", [name])
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK])
        (leads,) = cursor.fetchone()
        if leads:
            cursor.execute(f"SET idle_session_timeout = '{FROZEN_S}s'")
            # All that a pass reads has an index; the planner, whose statistics of tables that
            # fill and empty within seconds are always old, would scan the archive at times: this
            # also turns scans off.
            prepared.allow(connection)
    return bool(leads)


def observe(memory: Memory, signals: Sequence[Mapping[str, Any]], now: datetime) -> None:
    """Learn from what executors met: windows of external models adapt, silent replicas rest."""
    for replica in {s["replica"] for s in signals if s.get("away")}:
        memory.resting[replica] = now + REST
    memory.resting = {r: until for r, until in memory.resting.items() if until > now}
    met: dict[str, list[traffic.Signal]] = defaultdict(list)
    for signal in signals:
        if "replica" in signal:
            met[signal["replica"]].append(
                traffic.Signal(
                    priority_class=PriorityClass(signal["cls"]),
                    succeeded=signal["succeeded"],
                    overloaded=signal["overloaded"],
                )
            )
    for replica, of_replica in met.items():
        if replica in memory.windows:
            memory.windows[replica] = traffic.adapt(memory.windows[replica], of_replica, now)


def run_once(now: datetime, *, memory: Memory, directory: ModelDirectory, publish: Publish) -> Pass:
    """Fill all free room of all raters; return what was done."""
    total_slots, plugins = _executors(now)
    if not total_slots:
        return Pass()
    versions = _versions(now)
    if not versions:
        return Pass()
    held = _held()
    replicas = [r for r in directory.replicas(now) if r.key not in memory.resting]
    rooms = {v.version_id: _Room(v, replicas, held, memory) for v in versions}
    served = [v for v in versions if v.plugin_version in plugins.get(v.autorater, ())]
    shares = traffic.slots_for(
        {str(v.version_id): _wanted(v, rooms[v.version_id]) for v in served},
        max(0, total_slots - sum(h.batches for h in held)),
        {str(v.version_id): sum(h.batches for h in held if h.version_id == v.version_id)
         for v in served},
        total_slots,
    )  # fmt: skip
    done = Pass()
    for version in served:
        share = shares[str(version.version_id)]
        if share > 0:
            passed = _serve(version, rooms[version.version_id], share, now, memory, publish)
            done = Pass(
                sent=done.sent + passed.sent,
                ended=done.ended + passed.ended,
                waiting=done.waiting + passed.waiting,
                full=done.full or passed.full,
            )
    return done


def _wanted(version: VersionLoad, room: "_Room") -> int:
    return min(room.most, sum(load.ready_batches for load in version.loads))


def _executors(now: datetime) -> tuple[int, dict[str, set[str]]]:
    """Return the slots of live executors, and the plug-in versions that they have."""
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            "SELECT slots, plugins FROM fulfillment_executorboot"
            " WHERE heartbeat_at > %s::timestamptz",
            [now - leases.SILENCE],
        )
        rows = cursor.fetchall()
    plugins: dict[str, set[str]] = defaultdict(set)
    for _, names in rows:
        for name, version in orjson.loads(names).items():
            plugins[name].add(version)
    return sum(slots for slots, _ in rows), plugins


def _versions(now: datetime) -> list[VersionLoad]:
    """Return what is READY, by rater version."""
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            """
            SELECT w.rater_version_id, w.rater_id, r.max_qps, v.spec, w.id, w.owner, w.priority,
                   w.best_effort, w.created_at, w.deadline_at, ready.batches,
                   w.next_position - s.completed - s.failed - s.timed_out - s.cancelled
            FROM fulfillment_workflow w
            JOIN fulfillment_rater r ON r.id = w.rater_id AND r.paused_at IS NULL
            JOIN fulfillment_raterversion v ON v.id = w.rater_version_id
            JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
            CROSS JOIN LATERAL (
                SELECT count(*) AS batches FROM (
                    -- Without the order the planner scans the table for a quick 128.
                    SELECT FROM fulfillment_batch b WHERE b.workflow_id = w.id AND b.state = 0
                    ORDER BY b.position LIMIT %s::bigint) AS b
            ) AS ready
            WHERE w.finished_at IS NULL AND w.state IN (1, 2) AND w.deadline_at > %s::timestamptz
              AND v.retired_at IS NULL AND ready.batches > 0
            """,
            [READY_LOOK, now],
        )
        rows = cursor.fetchall()
    loads: dict[int, list[ordering.Load]] = defaultdict(list)
    specs: dict[int, tuple[str, float | None, dict[str, Any]]] = {}
    for version_id, rater_id, max_qps, spec, *rest in rows:
        workflow_id, owner, priority, best_effort, created_at, deadline_at, ready, open_ = rest
        specs[version_id] = (rater_id, max_qps, orjson.loads(spec))
        loads[version_id].append(
            ordering.Load(
                workflow_id=workflow_id,
                owner=owner,
                priority_class=priority_class(priority, best_effort=best_effort),
                ready_batches=ready,
                open_requests=max(open_, 1),
                submitted_at=created_at,
                deadline_at=deadline_at,
            )
        )
    return [
        VersionLoad(
            version_id=version_id,
            rater_id=rater_id,
            model_id=spec["model_id"],
            model_version=spec["model_version"],
            autorater=spec["autorater"],
            plugin_version=spec["plugin_version"],
            max_qps=max_qps,
            loads=loads[version_id],
        )
        for version_id, (rater_id, max_qps, spec) in specs.items()
    ]


def _held() -> list[Held]:
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            """
            SELECT b.replica, w.priority, w.best_effort, w.rater_version_id, count(*)
            FROM fulfillment_batch b JOIN fulfillment_workflow w ON w.id = b.workflow_id
            WHERE b.state = 1 GROUP BY 1, 2, 3, 4
            """,
        )
        return [
            Held(
                replica=replica,
                priority_class=priority_class(priority, best_effort=best_effort),
                version_id=version_id,
                batches=batches,
            )
            for replica, priority, best_effort, version_id, batches in cursor.fetchall()
        ]


class _Room:
    """The free room of the replicas that serve one rater version."""

    def __init__(
        self,
        version: VersionLoad,
        replicas: Sequence[Replica],
        held: list[Held],
        memory: Memory,
    ) -> None:
        self._replicas = [
            r
            for r in replicas
            if r.model_id == version.model_id
            and (not r.version or version.model_version in {"", r.version, r.label})
        ]
        self._held = held
        self._version_id = version.version_id
        self._windows: dict[str, traffic.Window] = {}
        for replica in self._replicas:
            if not replica.managed:
                window = memory.windows.get(replica.key)
                if window is None or window.ceiling != replica.window:
                    window = memory.windows[replica.key] = traffic.open_window(replica.window)
                self._windows[replica.key] = window
        self.most = len(self.names(PriorityClass.HIGH, ordering.MAX_CLAIMS))

    def names(self, cls: PriorityClass, count: int) -> list[str]:
        """Name a replica for each of up to `count` batches of a class."""
        loads = []
        for replica in self._replicas:
            by_class: dict[PriorityClass, int] = defaultdict(int)
            for held in self._held:
                if held.replica == replica.key:
                    by_class[held.priority_class] += held.batches
            total = sum(by_class.values())
            window = self._windows.get(replica.key)
            free = replica.window - total if window is None else traffic.room(window, by_class, cls)
            loads.append(
                traffic.ReplicaLoad(
                    key=replica.key, version=replica.version, window=total + free, held=total
                )
            )
        return traffic.assign(loads, count)

    def take(self, cls: PriorityClass, names: Sequence[str]) -> None:
        """Count batches that were just sent, for all raters of this pass."""
        self._held += (
            Held(replica=name, priority_class=cls, version_id=self._version_id, batches=1)
            for name in names
        )


def _serve(
    version: VersionLoad,
    room: _Room,
    share: int,
    now: datetime,
    memory: Memory,
    publish: Publish,
) -> Pass:
    order = memory.orders.get(version.version_id, ordering.Memory())
    free = {
        cls: len(room.names(cls, ordering.MAX_CLAIMS))
        for cls in {load.priority_class for load in version.loads}
    }
    decision = ordering.next_batches(
        [load for load in version.loads if free[load.priority_class]],
        room=min(share, room.most, _calls_allowed(version, memory, now)),
        now=now,
        memory=order,
    )
    picks = _fitting(decision.picks, version.loads, free)
    if not picks:
        return Pass()
    try:
        claims, passed = claim(picks, room=room, now=now)
    except OperationalError as error:
        if "lock timeout" not in str(error):
            raise
        # Somebody holds what we wanted; the next pass finds it.
        logger.info("claim met a lock", extra={"rater": version.rater_id})
        return Pass()
    memory.orders[version.version_id] = decision.memory
    if version.max_qps is not None:
        bucket = memory.buckets[version.rater_id]
        memory.buckets[version.rater_id] = traffic.spend(bucket, passed.sent)
    for (step, cls), sent in claims.items():
        size = traffic.message_size(
            room=room.most, urgent=cls is PriorityClass.HIGH and len(sent) < 4
        )
        for start in range(0, len(sent), size):
            publish(sent[start : start + size], step)
    return passed


def _calls_allowed(version: VersionLoad, memory: Memory, now: datetime) -> int:
    """Return how many calls the rater's `max_qps` lets start now."""
    if version.max_qps is None:
        return ordering.MAX_CLAIMS
    bucket = traffic.fill(memory.buckets.get(version.rater_id), version.max_qps, now)
    memory.buckets[version.rater_id] = bucket
    return max(0, int(bucket.calls))


def _fitting(
    picks: Sequence[ordering.Pick],
    loads: Sequence[ordering.Load],
    free: Mapping[PriorityClass, int],
) -> list[ordering.Pick]:
    """Cut picks to the windows of their classes, which may be smaller than the room as a whole.

    Claiming more would write batches only to put them back. The order remembers them as served.
    """
    left = dict(free)
    classes = {load.workflow_id: load.priority_class for load in loads}
    fitting = []
    for pick in picks:
        cls = classes[pick.workflow_id]
        if batches := min(pick.batches, left[cls]):
            fitting.append(ordering.Pick(workflow_id=pick.workflow_id, batches=batches))
            left[cls] -= batches
    return fitting
