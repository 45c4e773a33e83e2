"""What is said of workflows, kept as rows, and whether it turned out true.

A promise is the first share that was said once all rows of a workflow were known: "all in time" is
kept if no request of it timed out. It counts neither way if the client cancelled the workflow or
forced its end. Pausing it, or another deadline or priority class, begins a new one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connection

from fulfillment import arrays, given_up, prepared
from fulfillment.demands import Said
from fulfillment.models import WorkflowForecast
from fulfillment.policy.lifecycle import EndingReason, WorkflowState

BELIEVED = given_up.BELIEVED

# Whether what was said first was about the same.
_STANDS = """
    f.first_at IS NOT NULL AND (f.round, f.deadline_at, f.priority_class)
        = (EXCLUDED.round, EXCLUDED.deadline_at, EXCLUDED.priority_class)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """What is said of a workflow, and of what."""

    said: Said
    served_by: str
    round: int
    is_closed: bool
    """Whether all its rows are known."""
    eta: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRate:
    """Promises to workflows whose end was noticed in a span."""

    promised: int
    """Said to be all in time."""
    kept: int
    doubted: int
    """Said to be in time in part only."""
    doubted_whole: int
    """Of these, all in time after all."""

    @property
    def rate(self) -> float | None:
        """Share of what was promised that was kept; None without a promise."""
        return self.kept / self.promised if self.promised else None


def of(workflow_ids: Iterable[int]) -> dict[int, WorkflowForecast]:
    """Return the forecasts that there are, by workflow."""
    return WorkflowForecast.objects.in_bulk(list(workflow_ids))


def cuts(now: datetime) -> Mapping[int, float]:
    """Return the batches of each workflow that are not committed, of forecasts that still count."""
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            """
            SELECT f.workflow_id, f.cut_batches FROM fulfillment_workflowforecast f
            JOIN fulfillment_workflow w ON w.id = f.workflow_id AND w.round = f.round
            WHERE f.settled_at IS NULL AND f.cut_batches > 0 AND f.made_at > %s
            """,
            [now - BELIEVED],
        )
        return dict(cursor.fetchall())


def store(statements: Iterable[Statement], now: datetime) -> None:
    """Write forecasts. What was said first stays, unless it was about something else."""
    rows = sorted(statements, key=lambda row: row.said.of.workflow_id)
    said = [row.said for row in rows]
    opens = [each.of for each in said]
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            INSERT INTO fulfillment_workflowforecast AS f (
                workflow_id, served_by, round, priority_class, deadline_at, seconds_a_batch,
                received, unsent_batches, in_flight_batches, cut_batches, share, reason,
                eta_s, eta_low_s, eta_high_s, made_at, first_at, first_share)
            SELECT u.id, u.served_by, u.round, u.cls, u.deadline_at, u.batch_s, u.received,
                   u.unsent, u.in_flight, u.cut, u.share, u.reason, u.eta, u.low, u.high, %s,
                   CASE WHEN u.closed THEN %s END, CASE WHEN u.closed THEN u.share END
            FROM unnest(
                %s::bigint[], %s::text[], %s::smallint[], %s::smallint[], %s::timestamptz[],
                %s::float8[], %s::bigint[], %s::float8[], %s::float8[], %s::float8[], %s::float8[],
                %s::text[], %s::float8[], %s::float8[], %s::float8[], %s::boolean[]
            ) AS u(id, served_by, round, cls, deadline_at, batch_s, received, unsent, in_flight,
                   cut, share, reason, eta, low, high, closed)
            ON CONFLICT (workflow_id) DO UPDATE SET
                served_by = EXCLUDED.served_by, round = EXCLUDED.round,
                priority_class = EXCLUDED.priority_class, deadline_at = EXCLUDED.deadline_at,
                seconds_a_batch = EXCLUDED.seconds_a_batch, received = EXCLUDED.received,
                unsent_batches = EXCLUDED.unsent_batches,
                in_flight_batches = EXCLUDED.in_flight_batches,
                cut_batches = EXCLUDED.cut_batches, share = EXCLUDED.share,
                reason = EXCLUDED.reason, eta_s = EXCLUDED.eta_s,
                eta_low_s = EXCLUDED.eta_low_s, eta_high_s = EXCLUDED.eta_high_s,
                made_at = EXCLUDED.made_at, settled_at = NULL, kept = NULL,
                first_at = CASE WHEN {_STANDS} THEN f.first_at ELSE EXCLUDED.first_at END,
                first_share = CASE WHEN {_STANDS} THEN f.first_share ELSE EXCLUDED.first_share END
            WHERE f.settled_at IS NULL OR f.round < EXCLUDED.round
            """,
            [
                now,
                now,
                arrays.integers(each.workflow_id for each in opens),
                arrays.texts(row.served_by for row in rows),
                arrays.integers(row.round for row in rows),
                arrays.integers(each.priority_class for each in opens),
                arrays.instants(each.deadline_at for each in opens),
                arrays.floats(each.batch_s for each in opens),
                arrays.integers(each.received for each in opens),
                arrays.floats(each.unsent for each in opens),
                arrays.floats(each.in_flight for each in opens),
                arrays.floats(each.cut for each in said),
                arrays.floats(each.share for each in said),
                arrays.texts(each.reason for each in said),
                arrays.floats(row.eta.get("seconds") for row in rows),
                arrays.floats(row.eta.get("low") for row in rows),
                arrays.floats(row.eta.get("high") for row in rows),
                arrays.booleans(row.is_closed for row in rows),
            ],
        )


def cut(said: Sequence[Said]) -> None:
    """Write what is cut of workflows that were promised more."""
    if not said:
        return
    said = sorted(said, key=lambda each: each.of.workflow_id)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE fulfillment_workflowforecast f
            SET cut_batches = u.cut, share = u.share, reason = u.reason
            FROM unnest(%s::bigint[], %s::float8[], %s::float8[], %s::text[])
                 AS u(id, cut, share, reason)
            WHERE f.workflow_id = u.id AND f.settled_at IS NULL
            """,
            [
                arrays.integers(each.of.workflow_id for each in said),
                arrays.floats(each.cut for each in said),
                arrays.floats(each.share for each in said),
                arrays.texts(each.reason for each in said),
            ],
        )


def settle(now: datetime) -> int:
    """Note how workflows ended whose forecast is not settled; forget those that are paused."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE fulfillment_workflowforecast f
            SET settled_at = %s, kept = CASE WHEN f.first_at IS NOT NULL THEN ended.kept END
            FROM (
                SELECT o.workflow_id,
                       CASE WHEN w.state <> %s AND w.ending_reason <> %s
                            THEN s.timed_out = 0 END AS kept
                FROM fulfillment_workflowforecast o
                -- By key alone: of finished ones there is no end.
                CROSS JOIN LATERAL (
                    SELECT * FROM fulfillment_workflow WHERE id = o.workflow_id OFFSET 0) AS w
                JOIN fulfillment_workflowstats s ON s.workflow_id = o.workflow_id
                WHERE o.settled_at IS NULL AND w.finished_at IS NOT NULL
                ORDER BY o.workflow_id FOR UPDATE OF o
            ) AS ended
            WHERE f.workflow_id = ended.workflow_id
            """,
            [now, WorkflowState.CANCELLED, EndingReason.FORCED],
        )
        settled = cursor.rowcount
        cursor.execute(
            """
            DELETE FROM fulfillment_workflowforecast f USING fulfillment_workflow w
            WHERE f.settled_at IS NULL AND w.id = f.workflow_id AND w.state = %s
            """,
            [WorkflowState.PAUSED],
        )
        return int(settled + cursor.rowcount)


def kept_rate(since: datetime, now: datetime) -> KeptRate:
    """Return how far promises were kept to workflows whose end was noticed in a span."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT count(*) FILTER (WHERE first_share >= 1),
                   count(*) FILTER (WHERE first_share >= 1 AND kept),
                   count(*) FILTER (WHERE first_share < 1),
                   count(*) FILTER (WHERE first_share < 1 AND kept)
            FROM fulfillment_workflowforecast
            WHERE settled_at >= %s AND settled_at < %s AND kept IS NOT NULL
            """,
            [since, now],
        )
        promised, kept, doubted, doubted_whole = cursor.fetchone()
    return KeptRate(promised=promised, kept=kept, doubted=doubted, doubted_whole=doubted_whole)
