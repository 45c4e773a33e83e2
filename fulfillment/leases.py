"""Leases: how a batch is taken over, kept, given back by its executor, or taken from a dead one.

Two leases, one fence. The claim (dispatch) gives a short pick-up lease; the executor's first
statement takes the batch over for the length of its calls. Every write of an executor names the
fence it was given and counts only if that is still the batch's: whoever lost a lease writes
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection, transaction

from fulfillment import arrays, given_up, outcomes, prepared, scores
from fulfillment.outcomes import Outcome
from fulfillment.policy.batching import indices_of
from fulfillment.policy.lifecycle import DISPATCHED, STARTED, BatchState, RequestState
from fulfillment.scores import Scored, ScoredBatch

PICK_UP = timedelta(seconds=15)
"""From the claim to the executor's first statement; then the message counts as lost."""
SILENCE = timedelta(seconds=15)
"""An executor without heartbeat for so long is dead: its leases end."""
MARGIN = timedelta(seconds=15)
"""What a lease has beyond the longest call, to write what came back."""
LOST_BEFORE_SINGLES = 2
"""Started tries whose executor died, after which the items run one by one: the third death shows
which of them kills."""


class Taken(NamedTuple):
    """A batch in the hands of an executor, as `take_over` reads it."""

    batch_id: int
    fence: int
    replica: str
    workflow_id: int
    rater_version_id: int
    rater_id: str
    positions: Sequence[int]
    item_of: Sequence[int]
    fingerprints: Sequence[str]
    sent: int
    attempts: int
    lost: int
    priority: int
    best_effort: bool
    """Also where its workflow was given up."""
    deadline_at: datetime
    max_attempts: int
    no_store: bool
    payload: bytes
    taken_at: datetime
    calls: int
    """How many it may make at once."""
    tries: Sequence[int] | None
    max_qps: float | None

    def tries_of(self, item: int) -> int:
        """Return how many tries the item had: waiting for others, or being fine, is none."""
        return self.attempts if self.tries is None else self.tries[item]


def take_over(
    leases: Sequence[tuple[int, int]], *, boot_id: UUID, task_id: UUID, call_limit: timedelta
) -> list[Taken]:
    """Take over batches by (id, fence); those whose lease is another's by now are left out.

    So are those of workflows that may not start a try any more. Repeating it for the same boot and
    task returns the same, so a redelivered message is harmless.
    """
    # It need not outlive a crash of PostgreSQL, so nobody waits for the disk: the batch is then as
    # it was claimed, and what was taken over may still be written under the same fence.
    # `state + 0`, here and in `_release`: with `state` the planner takes the small partial index of
    # leased batches, which holds the dead entries of the last seconds, instead of the primary key.
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            f"""
            WITH ours AS (
                SELECT b.id
                FROM fulfillment_batch b
                JOIN unnest(%s::bigint[], %s::bigint[]) AS m(id, fence)
                  ON b.id = m.id AND b.fence = m.fence
                WHERE (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
                  AND b.state + 0 = %s::int AND b.open_mask <> 0
                  AND (b.boot_id IS NULL OR b.boot_id = %s::uuid AND b.task_id = %s::uuid)
                ORDER BY b.id FOR UPDATE OF b  -- as sweeps and finishes lock them
            )
            UPDATE fulfillment_batch b
            SET boot_id = %s::uuid, task_id = %s::uuid, started_at = clock_timestamp(),
                lease_until = clock_timestamp() + make_interval(secs => %s::float8)
            FROM ours, fulfillment_workflow w {given_up.forecast("clock_timestamp()")},
                 fulfillment_rater r, fulfillment_batchpayload p
            WHERE b.id = ours.id AND w.id = b.workflow_id AND w.state = ANY(%s::int[])
              AND w.deadline_at > clock_timestamp() AND r.id = w.rater_id AND p.batch_id = b.id
            RETURNING b.id, b.fence, b.replica, b.workflow_id, w.rater_version_id, w.rater_id,
                      b.positions, b.item_of,
                      replace(array_to_string(b.fingerprints, ','), '-', ''), b.sent_mask,
                      b.attempts, b.lost, w.priority, {given_up.BEST_EFFORT}, w.deadline_at,
                      r.max_attempts, w.no_store, p.data, b.started_at, b.calls, b.tries, r.max_qps
            """,
            [
                arrays.integers(batch_id for batch_id, _ in leases),
                arrays.integers(fence for _, fence in leases),
                BatchState.LEASED,
                boot_id,
                task_id,
                boot_id,
                task_id,
                (call_limit + MARGIN).total_seconds(),
                arrays.integers(DISPATCHED),
            ],
        )
        rows = cursor.fetchall()
    return [
        Taken(*row)._replace(fingerprints=row[8].split(","), payload=bytes(row[17])) for row in rows
    ]


def extend(batch_id: int, fence: int, *, call_limit: timedelta, probing: int | None = None) -> bool:
    """Extend a lease before a further call, naming the item probed; False means stop."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE fulfillment_batch b
            SET lease_until = clock_timestamp() + make_interval(secs => %s), probing = %s
            FROM fulfillment_workflow w
            WHERE b.id = %s AND b.fence = %s AND b.state = %s AND w.id = b.workflow_id
              AND w.state = ANY(%s)
            """,
            [
                (call_limit + MARGIN).total_seconds(),
                probing,
                batch_id,
                fence,
                BatchState.LEASED,
                [state.value for state in STARTED],
            ],
        )
        return bool(cursor.rowcount)


@dataclass(kw_only=True, slots=True)
class Finish:
    """What an executor says of a batch that it took over; items it leaves out stay open."""

    taken: Taken
    scored: Mapping[int, Scored] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    """Item -> code; `for_good` says which of them would fail for others too."""
    for_good: frozenset[int] = frozenset()
    said: Mapping[int, str] = field(default_factory=dict)
    """Failed item -> what the model or its server said, as JSON text."""
    timed_out: Mapping[int, str] = field(default_factory=dict)
    not_before: datetime | None = None
    """When the items that were sent and are not named above are tried again."""
    cost_attempt: bool = True
    tries: Sequence[int] | None = None
    """Tries by item, this one included, where they are not the same for all of the batch."""
    calls: int = 0
    accelerator_seconds: float = 0.0
    """Of its calls, waits included."""
    device_seconds: float = 0.0


def finish(finishes: Sequence[Finish]) -> list[int]:
    """Write the outcomes of batches in one transaction; return workflows left with nothing open.

    A batch whose fence is not current is skipped whole; an item whose open bit was cleared
    meanwhile (the workflow ended) enters the archive only. Saying it twice writes nothing.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        current, now = _release(cursor, finishes)
        if now is None:
            return []
        live = [(f, current[f.taken.batch_id]) for f in finishes if f.taken.batch_id in current]
        progress = outcomes.no_progress()
        scores.write(
            cursor,
            [scored_of(f, cleared) for f, cleared in live],
            now=now,
            progress=progress,
        )
        outcomes.end_requests(
            cursor, [o for f, cleared in live for o in failures_of(f, cleared)], progress=progress
        )
        for f, _ in live:
            added = progress[f.taken.workflow_id]
            added["model_calls"] += f.calls
            added["attempts"] += 1
            added["accelerator_seconds"] += f.accelerator_seconds
            added["device_seconds"] += f.device_seconds
        outcomes.add_progress(cursor, progress)
        outcomes.remember_failures(
            cursor,
            {f.taken.fingerprints[i]: f.failed[i] for f, _ in live for i in f.for_good},
            failed_at=now,
        )
        _note_tries(cursor, [f for f, _ in live if f.tries is not None])
        outcomes.land(
            cursor,
            [
                (f.taken.fingerprints[i], f.taken.batch_id)
                for f, _ in live
                for i in indices_of(f.taken.sent)
                if i not in f.scored
            ],
        )
    # After COMMIT: of two that finish at once, neither would see that the other's was the last.
    with connection.cursor() as cursor:
        return outcomes.without_open_items(cursor, list(progress))


def _release(cursor: Any, finishes: Sequence[Finish]) -> tuple[dict[int, int], datetime | None]:
    """Clear the open bits and end the leases; return the bits cleared, by batch still current.

    And the database's time, None if no batch is.
    """
    done = [sum(1 << item for item in {*f.scored, *f.failed, *f.timed_out}) for f in finishes]
    prepared.execute(
        cursor,
        """
        WITH f AS (
            SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::timestamptz[],
                                 %s::smallint[]) AS f(id, fence, done, not_before, cost)
        ), held AS (
            SELECT b.id, b.open_mask, f.done, f.not_before, f.cost
            FROM fulfillment_batch b JOIN f ON f.id = b.id AND f.fence = b.fence
            WHERE b.state + 0 = 1
            ORDER BY b.id FOR UPDATE OF b
        )
        UPDATE fulfillment_batch b
        SET open_mask = h.open_mask & ~h.done, sent_mask = 0, lost = 0, probing = NULL,
            boot_id = NULL, task_id = NULL, started_at = NULL, lease_until = NULL,
            attempts = b.attempts + h.cost, fence = b.fence + 1, not_before = h.not_before,
            state = CASE WHEN h.open_mask & ~h.done = 0 THEN 4
                         WHEN b.sent_mask & h.open_mask & ~h.done = 0 THEN 2
                         WHEN h.not_before IS NOT NULL THEN 3
                         ELSE 0 END
        FROM held h WHERE b.id = h.id
        RETURNING b.id, h.open_mask & h.done, clock_timestamp()
        """,
        [
            arrays.integers(f.taken.batch_id for f in finishes),
            arrays.integers(f.taken.fence for f in finishes),
            arrays.integers(done),
            arrays.instants(f.not_before for f in finishes),
            arrays.integers(f.cost_attempt for f in finishes),
        ],
    )
    rows = cursor.fetchall()
    return {batch_id: cleared for batch_id, cleared, _ in rows}, rows[0][2] if rows else None


def _note_tries(cursor: Any, finishes: Sequence[Finish]) -> None:
    if finishes:
        cursor.execute(
            """
            UPDATE fulfillment_batch b SET tries = u.tries::smallint[]
            FROM unnest(%s::bigint[], %s::text[]) AS u(id, tries) WHERE b.id = u.id
            """,
            [
                [f.taken.batch_id for f in finishes],
                [arrays.integers(f.tries or ()) for f in finishes],
            ],
        )


def scored_of(f: Finish, cleared: int) -> ScoredBatch:
    """Return the scores of a finish, with the rows of the items whose open bits it cleared."""
    taken = f.taken
    rows = outcomes.positions_by_item(taken.positions, taken.item_of)
    return ScoredBatch(
        batch_id=taken.batch_id,
        workflow_id=taken.workflow_id,
        rater_version_id=taken.rater_version_id,
        reusable=not taken.no_store,
        fingerprints=taken.fingerprints,
        items=[
            (item, scored, rows[item] if cleared >> item & 1 else (), taken.tries_of(item) + 1)
            for item, scored in f.scored.items()
        ],
    )


def failures_of(f: Finish, cleared: int) -> list[Outcome]:
    """Return how the items of a finish end that have no score, if it cleared their open bits."""
    if not f.failed and not f.timed_out:
        return []
    taken = f.taken
    rows = outcomes.positions_by_item(taken.positions, taken.item_of)
    return [
        Outcome(
            workflow_id=taken.workflow_id,
            positions=rows[item],
            state=state,
            error=code,
            output=f.said.get(item),
            attempts=taken.tries_of(item) + 1,
        )
        for state, codes in (
            (RequestState.FAILED, f.failed),
            (RequestState.TIMED_OUT, f.timed_out),
        )
        for item, code in codes.items()
        if cleared >> item & 1
    ]


def expire(*, now: datetime, trust_heartbeats: bool) -> int:
    """Take batches back from lost messages and dead executors; return how many.

    A batch not yet taken over goes back untouched. A started one counts as lost; if it died while
    an item was probed alone, that item is the culprit: FAILED `worker_lost`. `trust_heartbeats` is
    False while heartbeats may be old because the database was away.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT b.id, b.workflow_id, b.positions, b.item_of, b.open_mask, b.probing, b.attempts,
                   b.started_at IS NOT NULL
            FROM fulfillment_batch b
            WHERE b.state = 1 AND (
                b.lease_until < %s
                OR %s AND b.boot_id IS NOT NULL AND NOT EXISTS (
                    SELECT FROM fulfillment_executorboot e
                    WHERE e.boot_id = b.boot_id AND e.heartbeat_at > %s))
            ORDER BY b.id LIMIT 1000 FOR UPDATE SKIP LOCKED
            """,
            [now, trust_heartbeats, now - SILENCE],
        )
        rows = cursor.fetchall()
        if not rows:
            return 0
        culprits = [_culprit(row) for row in rows if row[5] is not None and row[4] >> row[5] & 1]
        progress = outcomes.end_requests(cursor, culprits)
        outcomes.add_progress(cursor, progress)
        cursor.execute(
            """
            UPDATE fulfillment_batch b
            SET open_mask = u.open_mask, sent_mask = 0, fence = fence + 1, probing = NULL,
                boot_id = NULL, task_id = NULL, started_at = NULL, lease_until = NULL,
                lost = CASE WHEN u.culprit THEN 0 ELSE lost + u.started END,
                state = CASE WHEN u.open_mask = 0 THEN 4 ELSE 0 END
            FROM unnest(%s::bigint[], %s::bigint[], %s::smallint[], %s::bool[])
                 AS u(id, open_mask, started, culprit)
            WHERE b.id = u.id
            """,
            [
                [row[0] for row in rows],
                [row[4] & ~(0 if row[5] is None else 1 << row[5]) for row in rows],
                [int(row[7]) for row in rows],
                [row[5] is not None for row in rows],
            ],
        )
        # By batch: one whose rows went over to a new round has no fingerprints any more. There are
        # as many flights as items under way, and leases end so only when something broke.
        cursor.execute(
            "DELETE FROM fulfillment_flight WHERE batch_id = ANY(%s)", [[row[0] for row in rows]]
        )
        return len(rows)


def _culprit(row: Sequence[Any]) -> Outcome:
    _, workflow_id, positions, item_of, _, probing, attempts, _ = row
    return Outcome(
        workflow_id=workflow_id,
        positions=outcomes.positions_by_item(positions, item_of)[probing],
        state=RequestState.FAILED,
        error="worker_lost",
        attempts=attempts + LOST_BEFORE_SINGLES + 1,
    )


def wake(*, now: datetime, sweep: bool = True) -> int:
    """Make READY what may go on: retries that are due, and waiters one of whose flights is gone.

    Only the dispatcher wakes. A LEASED batch is never touched. `sweep` also removes flights that
    are no current lease's: whoever ends a lease removes its flights, so that there are none.
    """
    with connection.cursor() as cursor:
        if sweep:
            cursor.execute(
                """
                DELETE FROM fulfillment_flight f WHERE NOT EXISTS (
                    SELECT FROM fulfillment_batch b
                    WHERE b.id = f.batch_id AND b.fence = f.fence AND b.state = 1)
                """
            )
        prepared.execute(
            cursor,
            """
            UPDATE fulfillment_batch SET state = 0, not_before = NULL
            WHERE id IN (SELECT id FROM fulfillment_batch
                         WHERE state = 3 AND not_before <= %s::timestamptz
                         ORDER BY not_before LIMIT 1000 FOR UPDATE SKIP LOCKED)
            """,
            [now],
        )
        woken: int = cursor.rowcount
        prepared.execute(
            cursor,
            """
            UPDATE fulfillment_batch SET state = 0
            WHERE id IN (
                SELECT b.id FROM fulfillment_batch b
                WHERE b.state = 2 AND (
                    NOT EXISTS (SELECT FROM fulfillment_batchwait w WHERE w.batch_id = b.id)
                    OR EXISTS (SELECT FROM fulfillment_batchwait w
                               WHERE w.batch_id = b.id AND NOT EXISTS (
                                   SELECT FROM fulfillment_flight f
                                   WHERE f.fingerprint = w.fingerprint)))
                FOR UPDATE SKIP LOCKED)
            """,
        )
        return woken + int(cursor.rowcount)
