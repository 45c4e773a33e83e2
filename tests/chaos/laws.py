"""The invariants of the design (I1-I6, I13) as SQL over whatever has been committed.

`query` runs a statement and returns its rows, on the database of a test or of a running stack. A
law returns rows that break it. `remember_moves` lets the database write down every change of a
request that had ended, and every end: nothing else shows that a state was written twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

Query = Callable[..., list[tuple[Any, ...]]]

_OPEN_ITEMS = """
    SELECT b.workflow_id << 31 | p.position AS id
    FROM fulfillment_batch b
    CROSS JOIN LATERAL unnest(b.positions, b.item_of) AS p(position, item)
    WHERE b.state <> 4 AND b.open_mask >> p.item & 1 = 1
"""

ALWAYS = {
    "I1: counts told (stats and deltas) are those of the request rows": """
        WITH told AS (
            SELECT s.workflow_id,
                   s.received + coalesce(sum(d.received), 0) AS received,
                   s.completed + coalesce(sum(d.completed), 0) AS completed,
                   s.failed + coalesce(sum(d.failed), 0) AS failed,
                   s.timed_out + coalesce(sum(d.timed_out), 0) AS timed_out,
                   s.cancelled + coalesce(sum(d.cancelled), 0) AS cancelled,
                   s.from_archive + coalesce(sum(d.from_archive), 0) AS from_archive,
                   s.coalesced + coalesce(sum(d.coalesced), 0) AS coalesced,
                   s.from_model + coalesce(sum(d.from_model), 0) AS from_model
            FROM fulfillment_workflowstats s
            LEFT JOIN fulfillment_statsdelta d ON d.workflow_id = s.workflow_id
            GROUP BY s.workflow_id
        ), counted AS (
            SELECT r.workflow_id, count(*) AS received,
                   count(*) FILTER (WHERE r.state = 1) AS completed,
                   count(*) FILTER (WHERE r.state = 2) AS failed,
                   count(*) FILTER (WHERE r.state = 3) AS timed_out,
                   count(*) FILTER (WHERE r.state = 4) AS cancelled,
                   count(*) FILTER (WHERE r.source = 0) AS from_archive,
                   count(*) FILTER (WHERE r.source = 1) AS coalesced,
                   count(*) FILTER (WHERE r.source = 2) AS from_model
            FROM fulfillment_ratingrequest r GROUP BY r.workflow_id
        )
        SELECT told.*, counted.* FROM told LEFT JOIN counted USING (workflow_id)
        JOIN fulfillment_workflow w ON w.id = told.workflow_id AND w.state <> 0
        WHERE (told.received, told.completed, told.failed, told.timed_out, told.cancelled,
               told.from_archive, told.coalesced, told.from_model) IS DISTINCT FROM
              (coalesce(counted.received, 0), coalesce(counted.completed, 0),
               coalesce(counted.failed, 0), coalesce(counted.timed_out, 0),
               coalesce(counted.cancelled, 0), coalesce(counted.from_archive, 0),
               coalesce(counted.coalesced, 0), coalesce(counted.from_model, 0))
    """,
    "accounts: what was folded of a workflow's calls is in the accounts, once": """
        SELECT s.workflow_id, s.device_seconds, u.device_s, s.model_calls, u.calls
        FROM fulfillment_workflowstats s
        LEFT JOIN (SELECT workflow_id, sum(device_s) AS device_s, sum(calls) AS calls
                   FROM fulfillment_acceleratoruse GROUP BY workflow_id) u USING (workflow_id)
        WHERE s.model_calls <> coalesce(u.calls, 0)
           OR abs(s.device_seconds - coalesce(u.device_s, 0)) > 1e-6
    """,
    "I1: a request is PENDING iff it is an open item of one batch": f"""
        WITH open AS (SELECT id, count(*) AS batches FROM ({_OPEN_ITEMS}) o GROUP BY id),
        pending AS (
            SELECT r.id FROM fulfillment_ratingrequest r
            JOIN fulfillment_workflow w ON w.id = r.workflow_id
            WHERE r.state = 0 AND w.state <> 0)
        SELECT open.id, open.batches, pending.id FROM open FULL JOIN pending USING (id)
        JOIN fulfillment_workflow w ON w.id = coalesce(open.id, pending.id) >> 31 AND w.state <> 0
        WHERE open.id IS NULL OR pending.id IS NULL OR open.batches <> 1
    """,
    "I1: a finished workflow has no PENDING request": """
        SELECT r.id FROM fulfillment_ratingrequest r
        JOIN fulfillment_workflow w ON w.id = r.workflow_id
        WHERE r.state = 0 AND w.finished_at IS NOT NULL
    """,
    "I2: what was completed by a rating has that very rating, unless its url was purged": """
        SELECT r.id, r.rating_id FROM fulfillment_ratingrequest r
        LEFT JOIN fulfillment_rating a ON a.id = r.rating_id
        WHERE r.state = 1 AND (a.fingerprint, a.score) IS DISTINCT FROM (r.fingerprint, r.score)
          AND NOT (a.id IS NULL AND r.rating_id IS NOT NULL AND EXISTS (
              SELECT FROM fulfillment_purge p
              WHERE p.url_digest = r.url_digest AND NOT p.dry_run))
    """,
    "I3: one rating completes one request as `model`, and others only as copies": """
        SELECT r.rating_id, count(*) FROM fulfillment_ratingrequest r
        WHERE r.source = 2 GROUP BY r.rating_id HAVING count(*) > 1
    """,
    "I4: each item that was sent flies under the current lease of its batch": """
        SELECT b.id, b.fence, p.fingerprint, f.batch_id, f.fence FROM fulfillment_batch b
        CROSS JOIN LATERAL unnest(b.fingerprints) WITH ORDINALITY AS p(fingerprint, nr)
        LEFT JOIN fulfillment_flight f ON f.fingerprint = p.fingerprint
        WHERE b.state = 1 AND b.sent_mask >> (p.nr - 1)::int & 1 = 1
          AND (f.batch_id, f.fence) IS DISTINCT FROM (b.id, b.fence)
    """,
    "I5: a workflow is finished iff it has one event of its round, which says its state": """
        SELECT w.id, w.state, w.round, count(e.id) FROM fulfillment_workflow w
        LEFT JOIN fulfillment_event e ON e.workflow_id = w.id AND e.round = w.round
        GROUP BY w.id
        HAVING count(e.id) <> (w.finished_at IS NOT NULL)::int
            OR w.finished_at IS NOT NULL AND bool_or(e.kind <> 'workflow.' ||
               (ARRAY['completed', 'partial', 'failed', 'cancelled'])[w.state - 4])
    """,
    "I5: the event's counts are those of the rows": """
        SELECT w.id, e.data FROM fulfillment_workflow w
        JOIN fulfillment_event e ON e.workflow_id = w.id AND e.round = w.round
        CROSS JOIN LATERAL (
            SELECT count(*) AS total, count(*) FILTER (WHERE r.state = 1) AS completed
            FROM fulfillment_ratingrequest r WHERE r.workflow_id = w.id) AS c
        WHERE ((e.data ->> 'total')::int, (e.data ->> 'completed')::int)
              <> (c.total, c.completed)
    """,
    "I6: only scores of the rater's range, of the workflow's version, are in the archive": """
        SELECT a.id, a.score FROM fulfillment_rating a
        JOIN fulfillment_raterversion v ON v.id = a.rater_version_id
        JOIN fulfillment_rater r ON r.id = v.rater_id
        LEFT JOIN fulfillment_workflow w ON w.id = a.workflow_id
        WHERE a.score < r.score_min OR a.score > r.score_max
           OR w.id IS NOT NULL AND w.rater_version_id <> a.rater_version_id
    """,
    "I1, I13: a request ends once a round, and stays what it was": """
        SELECT m.request, count(*) FILTER (WHERE m.before = 0) AS ends,
               count(*) FILTER (WHERE m.after = 0) AS reopened,
               count(*) FILTER (WHERE m.before <> 0 AND m.after <> 0) AS changed
        FROM chaos_move m GROUP BY m.request
        HAVING count(*) FILTER (WHERE m.before = 0)
               > count(*) FILTER (WHERE m.after = 0) + 1
            OR count(*) FILTER (WHERE m.before <> 0 AND m.after <> 0) > 0
    """,
}
"""Laws that hold at each instant."""

AT_REST = {
    "every workflow is finished": """
        SELECT id, state, closed_at FROM fulfillment_workflow WHERE finished_at IS NULL
    """,
    "every batch is DONE": "SELECT id, state, fence FROM fulfillment_batch WHERE state <> 4",
    "nothing flies": "SELECT * FROM fulfillment_flight",
    "nothing waits": "SELECT * FROM fulfillment_batchwait",
}
"""Laws that hold once all is over and every lease has ended."""

_REMEMBER = """
    CREATE TABLE IF NOT EXISTS chaos_move (request bigint, before int, after int);
    CREATE OR REPLACE FUNCTION chaos_note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO chaos_move VALUES (NEW.id, OLD.state, NEW.state);
        RETURN NULL;
    END $$;
    DROP TRIGGER IF EXISTS chaos_note ON fulfillment_ratingrequest;
    CREATE TRIGGER chaos_note AFTER UPDATE ON fulfillment_ratingrequest FOR EACH ROW
    WHEN ((OLD.state, OLD.source, OLD.score, OLD.label, OLD.rating_id, OLD.rated_at, OLD.error)
          IS DISTINCT FROM
          (NEW.state, NEW.source, NEW.score, NEW.label, NEW.rating_id, NEW.rated_at, NEW.error))
    EXECUTE FUNCTION chaos_note();
"""
_FORGET = """
    DROP TRIGGER IF EXISTS chaos_note ON fulfillment_ratingrequest;
    DROP FUNCTION IF EXISTS chaos_note;
    DROP TABLE IF EXISTS chaos_move;
"""


def remember_moves(execute: Callable[[str], Any]) -> None:
    """Let the database note each change of a request's state or result."""
    execute(_REMEMBER)


def forget_moves(execute: Callable[[str], Any]) -> None:
    """Undo `remember_moves`."""
    execute(_FORGET)


def broken(query: Query, laws: dict[str, str]) -> list[tuple[str, Sequence[Any]]]:
    """Return the laws that do not hold, each with the first rows that break it."""
    return [(name, rows[:3]) for name, sql in laws.items() if (rows := query(sql))]


def in_flight_items(query: Query) -> int:
    """Return the items of batches that are being computed now."""
    ((items,),) = query(
        "SELECT coalesce(sum(bit_count(sent_mask::bit(64))), 0) FROM fulfillment_batch"
        " WHERE state = 1 AND started_at IS NOT NULL"
    )
    return int(items)
