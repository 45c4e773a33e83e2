"""Writing a part of a batch while the rest of it is still being computed.

A chat model takes an item a call, so that one that hangs would hold up its neighbours until the
call's limit: they would miss the end of their workflow. What is written here is ended for good;
lease and fence stay, for the items that are left.
"""

from dataclasses import replace

from django.db import connection, transaction

from fulfillment import outcomes, scores
from fulfillment.leases import Finish, failures_of, scored_of


def write(part: Finish) -> bool:
    """Write the items that a finish names, and keep the lease; False when it is another's by now.

    As with a finish, an item whose open bit was cleared meanwhile enters the archive only. The
    item is no longer sent then, so that saying it twice writes nothing.
    """
    taken = part.taken
    items = [*part.scored, *part.failed]
    done = sum(1 << item for item in items)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            """
            WITH held AS (
                SELECT id, open_mask, sent_mask FROM fulfillment_batch
                WHERE id = %s AND fence = %s AND state + 0 = 1 FOR UPDATE
            )
            UPDATE fulfillment_batch b
            SET open_mask = h.open_mask & ~%s::bigint, sent_mask = b.sent_mask & ~%s::bigint
            FROM held h WHERE b.id = h.id
            RETURNING h.open_mask & %s::bigint, h.sent_mask & %s::bigint, clock_timestamp()
            """,
            [taken.batch_id, taken.fence, done, done, done, done],
        )
        row = cursor.fetchone()
        if row is None:
            return False
        cleared, new, now = row
        part = replace(part, scored={item: s for item, s in part.scored.items() if new >> item & 1})
        progress = outcomes.no_progress()
        scores.write(cursor, [scored_of(part, cleared)], now=now, progress=progress)
        outcomes.end_requests(cursor, failures_of(part, cleared), progress=progress)
        outcomes.add_progress(cursor, progress)
        outcomes.remember_failures(
            cursor,
            {taken.fingerprints[item]: part.failed[item] for item in part.for_good},
            failed_at=now,
        )
        outcomes.land(
            cursor,
            [(taken.fingerprints[i], taken.batch_id) for i in items if i not in part.scored],
        )
    return True
