"""The claim: one transaction that leases batches, and where equal work meets (single flight).

Open fingerprints are inserted as flights, and only then looked up in the archive, in a later
statement of the same READ COMMITTED transaction. Archived meanwhile: done for free. In flight
elsewhere: the item waits. The rest is sent. What may be claimed, and through whom, is decided in
dispatch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import archive, arrays, completion, ending, given_up, leases, outcomes, prepared
from fulfillment.outcomes import Outcome
from fulfillment.policy import ordering
from fulfillment.policy.freshness import fresh_after
from fulfillment.policy.lifecycle import (
    DISPATCHED,
    STARTED,
    BatchState,
    RequestState,
    WorkflowState,
)
from fulfillment.policy.priority import PriorityClass, celery_priority, priority_class
from fulfillment.policy.quota import Grant

Claims = dict[tuple[int, PriorityClass], list[tuple[int, int, str]]]
"""(Celery step, class) -> [(batch id, fence, replica)]: what is to be published."""


class Room(Protocol):
    """The free room of the replicas that serve one rater version."""

    def wanted(self, items: int) -> int:
        """Return how many calls a batch of so many items can make at once."""

    def grants(self, cls: PriorityClass, wanted: Sequence[int]) -> list[Grant]:
        """Grant replica and calls to batches of a class, which want so many calls at once each."""

    def take(
        self, cls: PriorityClass, granted: Mapping[int, Grant], workflows: Mapping[int, int]
    ) -> None:
        """Count batches that were just sent, by their id; `workflows` are theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one pass did."""

    sent: int = 0
    ended: int = 0
    waiting: int = 0
    calls: int = 0
    """That the batches sent will make, if nothing has to be asked again."""
    gone: Counter[int] = field(default_factory=Counter)
    """Batches that were picked and not there, by workflow: it has none READY any more, or somebody
    else holds them."""
    put_back: Counter[int] = field(default_factory=Counter)
    """Batches that found no place, by workflow: they are READY as before."""
    full: bool = False
    """Whether more could be claimed at once: it ended or parked items instead of sending them."""

    @property
    def missing(self) -> int:
        """How many of the batches picked were not there."""
        return self.gone.total()

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            sent=self.sent + other.sent,
            ended=self.ended + other.ended,
            waiting=self.waiting + other.waiting,
            calls=self.calls + other.calls,
            gone=self.gone + other.gone,
            put_back=self.put_back + other.put_back,
            full=self.full or other.full,
        )


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
    accepted_at: datetime
    sent: int = 0
    done: int = 0
    waits: list[str] = field(default_factory=list)
    replica: str = ""
    calls: int = 1

    @property
    def open_items(self) -> list[int]:
        return [i for i in range(len(self.fingerprints)) if self.open_mask >> i & 1]


def claim(picks: Sequence[ordering.Pick], *, room: Room, now: datetime) -> tuple[Claims, Pass]:
    """Claim what the policy picked; return what is to be published after COMMIT."""
    asked = Counter({pick.workflow_id: pick.batches for pick in picks})
    with transaction.atomic(), connection.cursor() as cursor:
        # Nobody waits for the disk: where a crash of PostgreSQL loses a claim, its batches are as
        # they were, and whoever got its message may take them over only if nobody else did.
        cursor.execute("SET LOCAL lock_timeout = '200ms'; SET LOCAL synchronous_commit = off")
        batches = _pick(cursor, picks)
        if not batches:
            return {}, Pass(gone=asked)
        facts = _workflow_facts(cursor, {batch.workflow_id for batch in batches}, now)
        batches = [batch for batch in batches if batch.workflow_id in facts]
        # Of equal items the most urgent one is sent: it must not wait for its like in a backlog.
        ours = _take_off(cursor, sorted(batches, key=lambda batch: facts[batch.workflow_id].cls))
        ended = _second_look(cursor, batches, facts, ours, now)
        _name_replicas(batches, facts, room)
        _write(cursor, batches, ours, facts, now)
        progress = outcomes.end_requests(cursor, ended)
        outcomes.add_progress(cursor, progress)
    _check_emptied(progress)
    claims: Claims = defaultdict(list)
    for batch in batches:
        if batch.replica:
            fact = facts[batch.workflow_id]
            claims[fact.step, fact.cls].append((batch.id, batch.fence + 1, batch.replica))
    sent = sum(len(c) for c in claims.values())
    put_back = Counter(b.workflow_id for b in batches if b.sent and not b.replica)
    return claims, Pass(
        sent=sent,
        ended=len(ended),
        waiting=sum(bool(batch.waits) and not batch.replica for batch in batches),
        calls=sum(room.wanted(batch.sent.bit_count()) for batch in batches if batch.replica),
        gone=asked - Counter(batch.workflow_id for batch in batches),
        put_back=put_back,
        full=sent + put_back.total() < len(batches),
    )


def look_again(now: datetime) -> int:
    """Give DELAYED batches one of whose flights is gone a look into the archive, and no try.

    Their waiting items must not stand until the back-off of others is over, which may be half an
    hour. What is not found waits no more: it is tried with the rest. Return the items ended.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        prepared.execute(
            cursor,
            f"""
            SELECT {_COLUMNS} FROM fulfillment_batch b
            WHERE b.state = 3 AND b.id IN (
                SELECT w.batch_id FROM fulfillment_batchwait w WHERE NOT EXISTS (
                    SELECT FROM fulfillment_flight f WHERE f.fingerprint = w.fingerprint))
            ORDER BY b.id LIMIT 500 FOR UPDATE SKIP LOCKED
            """,
        )
        batches = _claimed(cursor)
        if not batches:
            return 0
        facts = _workflow_facts(
            cursor, {batch.workflow_id for batch in batches}, now, states=STARTED
        )
        batches = [batch for batch in batches if batch.workflow_id in facts]
        ended = _second_look(cursor, batches, facts, {}, now)
        ids = arrays.integers(batch.id for batch in batches)
        prepared.execute(
            cursor,
            """
            UPDATE fulfillment_batch b
            SET open_mask = u.open_mask, state = CASE WHEN u.open_mask = 0 THEN 4 ELSE 3 END,
                not_before = CASE WHEN u.open_mask = 0 THEN NULL ELSE b.not_before END
            FROM unnest(%s::bigint[], %s::bigint[]) AS u(id, open_mask)
            WHERE b.id = u.id
            """,
            [ids, arrays.integers(batch.open_mask & ~batch.done for batch in batches)],
        )
        prepared.execute(
            cursor,
            """
            DELETE FROM fulfillment_batchwait w
            WHERE w.batch_id = ANY(%s::bigint[]) AND NOT EXISTS (
                SELECT FROM fulfillment_flight f WHERE f.fingerprint = w.fingerprint)
            """,
            [ids],
        )
        progress = outcomes.end_requests(cursor, ended)
        outcomes.add_progress(cursor, progress)
    _check_emptied(progress)
    return len(ended)


def _check_emptied(progress: Mapping[int, object]) -> None:
    """Ring for workflows whose last items the archive has ended: no executor will.

    After COMMIT, as in `leases.finish`: of two that end at once neither sees the other's.
    """
    if not progress:
        return
    with connection.cursor() as cursor:
        emptied = outcomes.without_open_items(cursor, progress)
    for workflow_id in emptied:
        completion.check(workflow_id)


_COLUMNS = """b.id, b.workflow_id, b.fence, b.open_mask, b.positions, b.item_of,
               replace(array_to_string(b.fingerprints, ','), '-', ''), b.attempts, b.accepted_at"""


def _pick(cursor: CursorWrapper, picks: Sequence[ordering.Pick]) -> list[_Claimed]:
    prepared.execute(
        cursor,
        f"""
        SELECT {_COLUMNS}
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
    return _claimed(cursor)


def _claimed(cursor: CursorWrapper) -> list[_Claimed]:
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
            accepted_at=accepted_at,
        )
        for (
            batch_id, workflow_id, fence, open_mask, positions, item_of, fingerprints, attempts,
            accepted_at,
        ) in cursor.fetchall()
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What the claim must know of a workflow, read under the claim's transaction."""

    priority: int
    best_effort: bool
    """Also where it was given up."""
    bypass: bool
    fresh_after: datetime
    started: bool

    def produced_after(self, batch: _Claimed) -> datetime:
        """Return when a rating must have been produced for the rows of a batch to take it."""
        return max(self.fresh_after, batch.accepted_at) if self.bypass else self.fresh_after

    @property
    def cls(self) -> PriorityClass:
        return priority_class(self.priority, best_effort=self.best_effort)

    @property
    def step(self) -> int:
        """The Celery priority; best effort comes last, whatever its score."""
        return celery_priority(0 if self.best_effort else self.priority)


def _workflow_facts(
    cursor: CursorWrapper,
    ids: set[int],
    now: datetime,
    *,
    states: Iterable[WorkflowState] = DISPATCHED,
) -> dict[int, _Facts]:
    """Read again what may have changed since the order was made; ended ones are left out."""
    prepared.execute(
        cursor,
        f"""
        SELECT w.id, w.priority, {given_up.BEST_EFFORT}, w.max_age_s, w.bypass, r.freshness_s,
               w.started_at IS NOT NULL, clock_timestamp()
        FROM fulfillment_workflow w JOIN fulfillment_rater r ON r.id = w.rater_id
        {given_up.forecast("%s::timestamptz")}
        WHERE w.id = ANY(%s::bigint[]) AND w.state = ANY(%s::int[])
        """,
        [now, arrays.integers(ids), arrays.integers(states)],
    )
    return {
        workflow_id: _Facts(
            priority=priority,
            best_effort=best_effort,
            bypass=bypass,
            fresh_after=fresh_after(
                now=read_at,
                freshness_s=freshness_s,
                max_age_s=max_age_s,
                accepted_at=read_at,
                bypass=False,
            ),
            started=started,
        )
        for (
            workflow_id, priority, best_effort, max_age_s, bypass, freshness_s, started, read_at,
        ) in cursor.fetchall()
    }  # fmt: skip


def _take_off(cursor: CursorWrapper, batches: Sequence[_Claimed]) -> dict[str, int]:
    """Insert flights for open fingerprints; return those that are ours, with their batch.

    Of equal items that of the batch which stands first is taken.
    """
    wanted: dict[str, tuple[int, int]] = {}
    for batch in batches:
        flight = batch.id, batch.fence + 1
        for i in batch.open_items:
            wanted.setdefault(batch.fingerprints[i], flight)
    ordered = sorted(wanted)  # one lock order for all claims
    prepared.execute(
        cursor,
        """
        INSERT INTO fulfillment_flight (fingerprint, batch_id, fence)
        SELECT * FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[])
        ON CONFLICT DO NOTHING
        RETURNING replace(fingerprint::text, '-', ''), batch_id
        """,
        [
            arrays.uuids(ordered),
            arrays.integers(wanted[fingerprint][0] for fingerprint in ordered),
            arrays.integers(wanted[fingerprint][1] for fingerprint in ordered),
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
        produced_after=min((f.fresh_after for f in facts.values()), default=now),
        now=now,
    )
    failures = _failures(cursor, fingerprints)
    ended: list[Outcome] = []
    for batch in batches:
        produced_after = facts[batch.workflow_id].produced_after(batch)
        items = outcomes.positions_by_item(batch.positions, batch.item_of)
        for item in batch.open_items:
            fingerprint = batch.fingerprints[item]
            entry = entries.get(fingerprint)
            code, failed_at = failures.get(fingerprint, ("", batch.accepted_at))
            if entry is not None and entry.produced_at > produced_after:
                ended.append(
                    ending.copied(
                        batch.workflow_id, batch.accepted_at, items[item], entry,
                        attempts=batch.attempts,
                    )
                )  # fmt: skip
                batch.done |= 1 << item
            elif failed_at > batch.accepted_at:
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
    prepared.execute(cursor, "SELECT EXISTS (SELECT FROM fulfillment_failedflight)")
    if cursor.fetchone() == (False,):  # as nearly always: no need to send all fingerprints
        return {}
    prepared.execute(
        cursor,
        """
        SELECT replace(fingerprint::text, '-', ''), code, failed_at
        FROM fulfillment_failedflight WHERE fingerprint = ANY(%s::uuid[])
        """,
        [arrays.uuids(fingerprints)],
    )
    return {fingerprint: (code, failed_at) for fingerprint, code, failed_at in cursor.fetchall()}


def _name_replicas(batches: Sequence[_Claimed], facts: Mapping[int, _Facts], room: Room) -> None:
    """Give each batch that has something to send replica and calls, while windows have room."""
    by_class: dict[PriorityClass, list[_Claimed]] = defaultdict(list)
    for batch in batches:
        if batch.sent:
            by_class[facts[batch.workflow_id].cls].append(batch)
    for cls in sorted(by_class):
        wanted = [room.wanted(batch.sent.bit_count()) for batch in by_class[cls]]
        granted = list(zip(by_class[cls], room.grants(cls, wanted), strict=False))
        for batch, grant in granted:
            batch.replica, batch.calls = grant.replica, grant.calls
        room.take(
            cls,
            {batch.id: grant for batch, grant in granted},
            {batch.id: batch.workflow_id for batch, _ in granted},
        )


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
            replica = u.replica, calls = u.calls, fence = b.fence + 1,
            lease_until = CASE WHEN u.state = 1
                               THEN clock_timestamp() + make_interval(secs => %s::float8) END
        FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::smallint[], %s::text[],
                    %s::smallint[]) AS u(id, open_mask, sent_mask, state, replica, calls)
        WHERE b.id = u.id
        """,
        [
            leases.PICK_UP.total_seconds(),
            ids,
            arrays.integers(batch.open_mask & ~batch.done for batch in batches),
            arrays.integers(batch.sent if batch.replica else 0 for batch in batches),
            arrays.integers(_state(batch) for batch in batches),
            arrays.texts(batch.replica for batch in batches),
            arrays.integers(batch.calls for batch in batches),
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
