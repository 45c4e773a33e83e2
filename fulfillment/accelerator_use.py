"""Accounts of accelerator-seconds: who had how much of them, by hour of the clock (UTC).

A finish says what its calls took (in its delta); a fold adds it to the hour in which it was said.
What is not folded yet is read beside it, in one statement, so that the sums are right at any moment
and the same by rater, by owner and by workflow.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from django.db import connection

By = Literal["rater", "owner", "workflow"]
HOUR = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What one rater, owner or workflow had; what does not belong to its kind is None."""

    rater: str | None
    owner: str | None
    workflow: str | None
    """Public id; None of one that was erased, too."""
    device_s: float
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What there was of a span: the largest, and all together."""

    since: datetime
    until: datetime
    """Both at the hour: the span asked for lies within."""
    items: list[Use]
    others: int
    """How many more there are, all smaller."""
    device_s: float
    calls: int


def hour_of(at: datetime) -> datetime:
    """Return the start of an hour of the clock."""
    return at.replace(minute=0, second=0, microsecond=0)


def read(
    since: datetime, until: datetime, *, by: By, owner: str | None = None, limit: int
) -> Account:
    """Return the account of the hours that a span touches, of one owner or of all."""
    first, end = hour_of(since), hour_of(until - timedelta(microseconds=1)) + HOUR
    rater, of_owner, workflow = {
        "rater": ("rater_id", "NULL", "NULL::bigint"),
        "owner": ("NULL", "owner", "NULL::bigint"),
        "workflow": ("rater_id", "owner", "workflow_id"),
    }[by]
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH used AS (
                SELECT workflow_id, rater_id, owner, device_s, calls
                FROM fulfillment_acceleratoruse WHERE hour >= %(first)s AND hour < %(end)s
                UNION ALL
                SELECT w.id, w.rater_id, w.owner, d.device_seconds, d.model_calls
                FROM fulfillment_statsdelta d JOIN fulfillment_workflow w ON w.id = d.workflow_id
                WHERE d.added_at >= %(first)s AND d.added_at < %(end)s
                  AND (d.model_calls > 0 OR d.device_seconds > 0)
            ), g AS (
                SELECT {rater}::text AS rater, {of_owner}::text AS owner, {workflow} AS id,
                       sum(device_s) AS device_s, sum(calls)::bigint AS calls
                FROM used WHERE %(owner)s::text IS NULL OR owner = %(owner)s GROUP BY 1, 2, 3
            )
            SELECT g.rater, g.owner, w.public_id, g.device_s, g.calls,
                   sum(g.device_s) OVER (), (sum(g.calls) OVER ())::bigint, count(*) OVER ()
            FROM g LEFT JOIN fulfillment_workflow w ON w.id = g.id
            ORDER BY g.device_s DESC, g.rater, g.owner, g.id LIMIT %(limit)s
            """,
            {"first": first, "end": end, "owner": owner, "limit": limit},
        )
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    device_s, calls, found = rows[0][5:] if rows else (0.0, 0, 0)
    return Account(
        since=first,
        until=end,
        items=[
            Use(rater=row[0], owner=row[1], workflow=row[2], device_s=row[3], calls=row[4])
            for row in rows
        ],
        others=found - len(rows),
        device_s=device_s,
        calls=calls,
    )
