"""A clock that was set: what waits for an instant goes on waiting for as long as it had to.

Instants that decide are PostgreSQL's wall clock. Set an hour ahead, it would end the leases of
running calls and let all retries go at once; set back, retries and lost messages would stand for an
hour. Deadlines are not moved: they are the instants that their clients named. A step that no
dispatcher lives through is not noticed.
"""

from datetime import datetime

from django.db import connection


def follow(*, before: datetime, now: datetime) -> int:
    """Move back-offs and leases by a step of the clock; return how many.

    `before` is what the clock would show now without it. What was written since the step cannot be
    told apart for sure where the step is short: it may then wait longer, but at most by the step.
    """
    moved = 0
    with connection.cursor() as cursor:
        for state, column in ((3, "not_before"), (1, "lease_until")):
            cursor.execute(
                f"""
                UPDATE fulfillment_batch
                SET {column} = {column} + (%(now)s::timestamptz - %(before)s::timestamptz)
                WHERE id IN (SELECT id FROM fulfillment_batch
                             WHERE state = %(state)s AND {column} > %(before)s
                               AND (%(now)s < %(before)s OR {column} <= %(now)s)
                             ORDER BY id FOR UPDATE SKIP LOCKED)
                """,
                {"now": now, "before": before, "state": state},
            )
            moved += int(cursor.rowcount)
    return moved
