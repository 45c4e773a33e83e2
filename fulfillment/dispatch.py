"""The dispatcher: decides which batch leaves now, claims it, and hands it to Celery.

Work is sent when there is room and not before: a pass reads what may be sent and what is out from
PostgreSQL, asks the policies, claims in one transaction, and publishes after COMMIT. If it dies
in between, the pick-up lease ends and the batches go again.

The claim is where equal work meets (single flight): open fingerprints are inserted as flights, and
only then looked up in the archive, in a later statement of the same READ COMMITTED transaction.
Archived meanwhile: done for free. In flight elsewhere: the item waits. The rest is sent.

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
from django.db import OperationalError, connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import archive, arrays, completion, leases, outcomes, prepared
from fulfillment.model_directory import ModelDirectory, Replica
from fulfillment.outcomes import Outcome
from fulfillment.policy import ordering, traffic
from fulfillment.policy.lifecycle import BatchState, RequestState
from fulfillment.policy.priority import PriorityClass, celery_priority, priority_class

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one pass did."""

    sent: int = 0
    ended: int = 0
    waiting: int = 0
    full: bool = False
    """Whether more could be claimed at once: it ended or parked items instead of sending them."""


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

    def take(self, cls: PriorityClass, names: Sequence[str], version_id: int) -> None:
        """Count batches that were just sent, for all raters of this pass."""
        self._held += (
            Held(replica=name, priority_class=cls, version_id=version_id, batches=1)
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
        claims, passed = _claim(version, picks, room, now)
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


@dataclass(slots=True)
class _Claimed:
    """A batch under the claim's row lock, and what is to become of its items."""

    id: int
    workflow_id: int
    fence: int
    open_mask: int
    positions: Sequence[int]
    item_of: Sequence[int]
    fingerprints: Sequence[str]
    attempts: int
    sent: int = 0
    done: int = 0
    waits: list[str] = field(default_factory=list)
    replica: str = ""

    @property
    def open_items(self) -> list[int]:
        return [i for i in range(len(self.fingerprints)) if self.open_mask >> i & 1]


def _claim(
    version: VersionLoad, picks: Sequence[ordering.Pick], room: _Room, now: datetime
) -> tuple[dict[tuple[int, PriorityClass], list[tuple[int, int, str]]], Pass]:
    """Claim what the policy picked; return what is to be published, by Celery step and class."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '200ms'")
        batches = _pick(cursor, picks)
        if not batches:
            return {}, Pass()
        facts = _workflow_facts(cursor, {batch.workflow_id for batch in batches})
        batches = [batch for batch in batches if batch.workflow_id in facts]
        ours = _take_off(cursor, batches)
        ended = _second_look(cursor, batches, facts, ours, now)
        _name_replicas(batches, facts, room, version.version_id)
        _write(cursor, batches, ours, facts, now)
        progress = outcomes.end_requests(cursor, ended)
        outcomes.add_progress(cursor, progress)
    if progress:
        # After COMMIT, as in `leases.finish`. No executor will ring for what the archive has ended.
        with connection.cursor() as cursor:
            emptied = outcomes.without_open_items(cursor, progress)
        for workflow_id in emptied:
            completion.check(workflow_id)
    claims: dict[tuple[int, PriorityClass], list[tuple[int, int, str]]] = defaultdict(list)
    for batch in batches:
        if batch.replica:
            fact = facts[batch.workflow_id]
            claims[fact.step, fact.cls].append((batch.id, batch.fence + 1, batch.replica))
    sent = sum(len(c) for c in claims.values())
    put_back = sum(bool(batch.sent) and not batch.replica for batch in batches)
    return claims, Pass(
        sent=sent,
        ended=len(ended),
        waiting=sum(bool(batch.waits) and not batch.replica for batch in batches),
        full=sent + put_back < len(batches),
    )


def _pick(cursor: CursorWrapper, picks: Sequence[ordering.Pick]) -> list[_Claimed]:
    prepared.execute(
        cursor,
        """
        SELECT b.id, b.workflow_id, b.fence, b.open_mask, b.positions, b.item_of,
               replace(array_to_string(b.fingerprints, ','), '-', ''), b.attempts
        FROM unnest(%s::bigint[], %s::int[]) WITH ORDINALITY AS pick(workflow_id, batches, nr)
        CROSS JOIN LATERAL (
            SELECT * FROM fulfillment_batch b
            WHERE b.workflow_id = pick.workflow_id AND b.state = 0
            ORDER BY b.position LIMIT pick.batches FOR UPDATE SKIP LOCKED
        ) AS b
        ORDER BY pick.nr, b.position
        """,
        [
            arrays.integers(pick.workflow_id for pick in picks),
            arrays.integers(pick.batches for pick in picks),
        ],
    )
    return [
        _Claimed(
            id=batch_id,
            workflow_id=workflow_id,
            fence=fence,
            open_mask=open_mask,
            positions=positions,
            item_of=item_of,
            fingerprints=fingerprints.split(","),
            attempts=attempts,
        )
        for (
            batch_id, workflow_id, fence, open_mask, positions, item_of, fingerprints, attempts,
        ) in cursor.fetchall()
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What the claim must know of a workflow, read under the claim's transaction."""

    priority: int
    best_effort: bool
    accepted_at: datetime
    produced_after: datetime
    started: bool

    @property
    def cls(self) -> PriorityClass:
        return priority_class(self.priority, best_effort=self.best_effort)

    @property
    def step(self) -> int:
        """The Celery priority; best effort comes last, whatever its score."""
        return celery_priority(0 if self.best_effort else self.priority)


def _workflow_facts(cursor: CursorWrapper, ids: set[int]) -> dict[int, _Facts]:
    """Read again what may have changed since the order was made; ended ones are left out."""
    prepared.execute(
        cursor,
        """
        SELECT w.id, w.priority, w.best_effort, w.created_at, w.max_age_s, w.bypass,
               r.freshness_s, w.started_at IS NOT NULL, clock_timestamp()
        FROM fulfillment_workflow w JOIN fulfillment_rater r ON r.id = w.rater_id
        WHERE w.id = ANY(%s::bigint[]) AND w.state IN (1, 2)
        """,
        [arrays.integers(ids)],
    )
    return {
        workflow_id: _Facts(
            priority=priority,
            best_effort=best_effort,
            accepted_at=created_at,
            produced_after=archive.fresh_after(
                now=now,
                freshness_s=freshness_s,
                max_age_s=max_age_s,
                accepted_at=created_at,
                bypass=bypass,
            ),
            started=started,
        )
        for (
            workflow_id, priority, best_effort, created_at, max_age_s, bypass, freshness_s,
            started, now,
        ) in cursor.fetchall()
    }  # fmt: skip


def _take_off(cursor: CursorWrapper, batches: Sequence[_Claimed]) -> dict[str, int]:
    """Insert flights for open fingerprints; return those that are ours, with their batch."""
    wanted = sorted(
        (batch.fingerprints[i], batch.id, batch.fence + 1)
        for batch in batches
        for i in batch.open_items
    )
    prepared.execute(
        cursor,
        """
        INSERT INTO fulfillment_flight (fingerprint, batch_id, fence)
        SELECT * FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[])
        ON CONFLICT DO NOTHING
        RETURNING replace(fingerprint::text, '-', ''), batch_id
        """,
        [
            arrays.uuids(w[0] for w in wanted),
            arrays.integers(w[1] for w in wanted),
            arrays.integers(w[2] for w in wanted),
        ],
    )
    return dict(cursor.fetchall())


def _second_look(
    cursor: CursorWrapper,
    batches: Sequence[_Claimed],
    facts: Mapping[int, _Facts],
    ours: Mapping[str, int],
    now: datetime,
) -> list[Outcome]:
    """Decide each open item: archived, failed a moment ago, ours to send, or waiting."""
    fingerprints = list({batch.fingerprints[i] for batch in batches for i in batch.open_items})
    entries = archive.look_up(
        cursor,
        fingerprints,
        produced_after=min((f.produced_after for f in facts.values()), default=now),
        now=now,
    )
    failures = _failures(cursor, fingerprints)
    ended: list[Outcome] = []
    for batch in batches:
        fact = facts[batch.workflow_id]
        items = outcomes.positions_by_item(batch.positions, batch.item_of)
        for item in batch.open_items:
            fingerprint = batch.fingerprints[item]
            entry = entries.get(fingerprint)
            code, failed_at = failures.get(fingerprint, ("", fact.accepted_at))
            if entry is not None and entry.produced_at > fact.produced_after:
                ended.append(
                    completion.copied(
                        batch.workflow_id, fact.accepted_at, items[item], entry,
                        attempts=batch.attempts,
                    )
                )  # fmt: skip
                batch.done |= 1 << item
            elif failed_at > fact.accepted_at:
                ended.append(
                    Outcome(
                        workflow_id=batch.workflow_id,
                        positions=items[item],
                        state=RequestState.FAILED,
                        error=code,
                        attempts=batch.attempts,
                    )
                )
                batch.done |= 1 << item
            elif ours.get(fingerprint) == batch.id:
                batch.sent |= 1 << item
            else:
                batch.waits.append(fingerprint)
    return ended


def _failures(cursor: CursorWrapper, fingerprints: list[str]) -> dict[str, tuple[str, datetime]]:
    prepared.execute(
        cursor,
        """
        SELECT replace(fingerprint::text, '-', ''), code, failed_at
        FROM fulfillment_failedflight WHERE fingerprint = ANY(%s::uuid[])
        """,
        [arrays.uuids(fingerprints)],
    )
    return {fingerprint: (code, failed_at) for fingerprint, code, failed_at in cursor.fetchall()}


def _name_replicas(
    batches: Sequence[_Claimed], facts: Mapping[int, _Facts], room: _Room, version_id: int
) -> None:
    """Give each batch that has something to send a replica, while windows have room."""
    by_class: dict[PriorityClass, list[_Claimed]] = defaultdict(list)
    for batch in batches:
        if batch.sent:
            by_class[facts[batch.workflow_id].cls].append(batch)
    for cls in sorted(by_class):
        names = room.names(cls, len(by_class[cls]))
        for batch, name in zip(by_class[cls], names, strict=False):
            batch.replica = name
        room.take(cls, names, version_id)


def _write(
    cursor: CursorWrapper,
    batches: Sequence[_Claimed],
    ours: Mapping[str, int],
    facts: Mapping[int, _Facts],
    now: datetime,
) -> None:
    """Lease what is sent, park what waits, end what is done; drop flights that nobody needs."""
    ids = arrays.integers(batch.id for batch in batches)
    prepared.execute(
        cursor,
        """
        UPDATE fulfillment_batch b
        SET open_mask = u.open_mask, sent_mask = u.sent_mask, state = u.state,
            replica = u.replica, fence = b.fence + 1,
            lease_until = CASE WHEN u.state = 1
                               THEN clock_timestamp() + make_interval(secs => %s::float8) END
        FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::smallint[], %s::text[])
             AS u(id, open_mask, sent_mask, state, replica)
        WHERE b.id = u.id
        """,
        [
            leases.PICK_UP.total_seconds(),
            ids,
            arrays.integers(batch.open_mask & ~batch.done for batch in batches),
            arrays.integers(batch.sent if batch.replica else 0 for batch in batches),
            arrays.integers(_state(batch) for batch in batches),
            arrays.texts(batch.replica for batch in batches),
        ],
    )
    sent = {
        batch.fingerprints[i]
        for batch in batches
        if batch.replica
        for i in batch.open_items
        if batch.sent >> i & 1
    }
    unused = [fingerprint for fingerprint in ours if fingerprint not in sent]
    if unused:
        cursor.execute(
            "DELETE FROM fulfillment_flight WHERE fingerprint = ANY(%s::uuid[])",
            [arrays.uuids(unused)],
        )
    prepared.execute(
        cursor, "DELETE FROM fulfillment_batchwait WHERE batch_id = ANY(%s::bigint[])", [ids]
    )
    waits = [(batch.id, fingerprint) for batch in batches for fingerprint in batch.waits]
    if waits:
        cursor.execute(
            """
            INSERT INTO fulfillment_batchwait (batch_id, fingerprint)
            SELECT * FROM unnest(%s::bigint[], %s::uuid[])
            """,
            [[w[0] for w in waits], [w[1] for w in waits]],
        )
    starting = {b.workflow_id for b in batches if b.replica and not facts[b.workflow_id].started}
    if starting:
        cursor.execute(
            "UPDATE fulfillment_workflow SET started_at = %s WHERE id = ANY(%s)",
            [now, list(starting)],
        )


def _state(batch: _Claimed) -> BatchState:
    if batch.replica:
        return BatchState.LEASED
    if batch.open_mask == batch.done:
        return BatchState.DONE
    return BatchState.READY if batch.sent else BatchState.WAITING
