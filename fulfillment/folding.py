"""Folding of deltas: what messages added goes into the stats of their workflows.

Finish inserts a delta a workflow and message instead of counting in a row that all would wait for.
Whoever folds them, a chunk of all or those of one workflow, deletes and adds in one statement.
"""

from django.db import connection
from django.db.backends.utils import CursorWrapper

from fulfillment.models import PROGRESS_FIELDS
from fulfillment.policy.lifecycle import Tally

FOLDED = 20_000
"""Deltas that one `fold` takes at most."""

# What a retry takes back (negative) is no result; and an archive hit, or what a sweep ends, says
# nothing of the pace of work.
_RESULTS = """
    min(added_at) FILTER (WHERE completed + failed + timed_out + cancelled > 0) AS first_at,
    max(added_at) FILTER (WHERE completed + failed + timed_out + cancelled > 0) AS last_at,
    coalesce(sum(completed + failed + timed_out + cancelled)
             FILTER (WHERE completed + failed + timed_out + cancelled > 0), 0) AS ended,
    coalesce(sum(completed - from_archive + failed)
             FILTER (WHERE completed - from_archive + failed > 0), 0) AS worked
"""
_RESULT_TIMES = """
    first_result_at = least(s.first_result_at, a.first_at),
    last_result_at = greatest(s.last_result_at, a.last_at)
"""
_FLOW = """
    INSERT INTO fulfillment_flow
        (workflow_id, ended, worked, model_calls, accelerator_seconds, device_seconds)
    SELECT {workflow}, ended, worked, model_calls, accelerator_seconds, device_seconds FROM a
    WHERE ended > 0 OR model_calls > 0
"""
# After the stats of their workflows are locked, so that two folds never wait for each other.
_USE = """
    INSERT INTO fulfillment_acceleratoruse (hour, workflow_id, rater_id, owner, device_s, calls)
    SELECT date_trunc('hour', g.added_at, 'UTC'), w.id, w.rater_id, w.owner,
           sum(g.device_seconds), sum(g.model_calls)
    FROM gone g JOIN folded f ON f.workflow_id = g.workflow_id
    JOIN fulfillment_workflow w ON w.id = g.workflow_id
    WHERE g.model_calls > 0 OR g.device_seconds > 0
    GROUP BY 1, 2
    ON CONFLICT (hour, workflow_id) DO UPDATE
    SET device_s = fulfillment_acceleratoruse.device_s + excluded.device_s,
        calls = fulfillment_acceleratoruse.calls + excluded.calls
"""


def fold() -> int:
    """Add deltas to the stats of their workflows; return how many deltas."""
    sums = ", ".join(f"sum({name}) AS {name}" for name in PROGRESS_FIELDS)
    adds = ", ".join(f"{name} = s.{name} + a.{name}" for name in PROGRESS_FIELDS)
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH due AS (
                SELECT id FROM fulfillment_statsdelta ORDER BY id LIMIT {FOLDED}
                FOR UPDATE SKIP LOCKED
            ), gone AS (
                DELETE FROM fulfillment_statsdelta d USING due WHERE d.id = due.id RETURNING d.*
            ), a AS (
                SELECT workflow_id, count(*) AS deltas, {_RESULTS}, {sums}
                FROM gone GROUP BY workflow_id
            ), flow AS ({_FLOW.format(workflow="workflow_id")}), folded AS (
                UPDATE fulfillment_workflowstats s SET {_RESULT_TIMES}, {adds} FROM a
                WHERE s.workflow_id = a.workflow_id
                RETURNING s.workflow_id
            ), used AS ({_USE})
            SELECT coalesce(sum(deltas), 0) FROM a
            """
        )
        (count,) = cursor.fetchone()
    return int(count)


def fold_one(cursor: CursorWrapper, workflow_id: int) -> Tally:
    """Fold the deltas of one workflow, locked by the caller; return how its requests stand."""
    sums = ", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in PROGRESS_FIELDS)
    adds = ", ".join(f"{name} = s.{name} + a.{name}" for name in PROGRESS_FIELDS)
    cursor.execute(
        f"""
        WITH gone AS (
            DELETE FROM fulfillment_statsdelta WHERE workflow_id = %s RETURNING *
        ), a AS (SELECT {_RESULTS}, {sums} FROM gone),
        flow AS ({_FLOW.format(workflow="%s")}),
        folded AS (
            UPDATE fulfillment_workflowstats s SET {_RESULT_TIMES}, {adds} FROM a
            WHERE s.workflow_id = %s
            RETURNING s.workflow_id, s.received, s.completed, s.failed, s.timed_out, s.cancelled
        ), used AS ({_USE})
        SELECT received, completed, failed, timed_out, cancelled FROM folded
        """,
        [workflow_id, workflow_id, workflow_id],
    )
    received, completed, failed, timed_out, cancelled = cursor.fetchone()
    return Tally(
        total=received,
        completed=completed,
        failed=failed,
        timed_out=timed_out,
        cancelled=cancelled,
    )
