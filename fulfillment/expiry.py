"""Erasing ratings that are past their rater's freshness and the buffer, a stretch at a time.

Ratings lie in order of their ids, which is the order in which they were stored: those due are the
oldest, up to a frontier that moves on with time. Each rater version remembers how far it was
walked, so that a run reads only what has become due since the last one, also where one rater's
ratings live for a day and another's, between them, for three months.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from django.db import connection, transaction
from django.db.models.functions import Greatest

from fulfillment.models import RaterVersion
from fulfillment.policy.freshness import FUTURE, due_before

CHUNK = 20_000
"""Ratings read a transaction; it locks only those it erases, which nobody else writes."""
MOST_CHUNKS = 100
"""Read a freshness and run, so that a run ends soon; the next one goes on."""


def newest_rating_id() -> int:
    """Return an id that no rating stored from now on falls below."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM fulfillment_rating_id_seq"
        )
        (newest,) = cursor.fetchone()
    return int(newest)


def retain(*, now: datetime) -> int:
    """Erase what is past its rater's freshness and the buffer; return how many."""
    groups: dict[int, dict[int, int]] = defaultdict(dict)
    for version_id, erased_to, freshness_s in RaterVersion.objects.values_list(
        "pk", "erased_to", "rater__freshness_s"
    ):
        groups[freshness_s][version_id] = erased_to
    return sum(
        _walk(list(versions), min(versions.values()), due_before(now=now, freshness_s=s), now)
        for s, versions in groups.items()
    )


def _walk(version_ids: Sequence[int], start: int, due: datetime, now: datetime) -> int:
    """Erase ratings of versions with one freshness behind `start`, up to the frontier.

    The frontier is the first chunk with ratings only that are younger than `due`. A rating below
    it that seems to come from the future was stored when its neighbours were, by a clock that was
    wrong: it goes with them. One that is not due yet keeps the memory, not the walk, where it is.
    """
    erased, position, done_to, holds = 0, start, start, False
    for _ in range(MOST_CHUNKS):
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                f"""
                WITH looked AS MATERIALIZED (
                    SELECT id, rater_version_id, produced_at FROM fulfillment_rating
                    WHERE id > %(position)s ORDER BY id LIMIT {CHUNK}
                ), chunk AS (
                    SELECT max(id) AS last, min(produced_at) < %(due)s AS reached FROM looked
                ), ours AS (
                    SELECT l.id, l.produced_at < %(due)s OR l.produced_at > %(future)s AS due
                    FROM looked l, chunk c
                    WHERE c.reached AND l.rater_version_id = ANY(%(versions)s)
                ), gone AS (
                    DELETE FROM fulfillment_rating r USING ours o WHERE r.id = o.id AND o.due
                    RETURNING r.id
                )
                SELECT c.last, c.reached, (SELECT count(*) FROM gone),
                       (SELECT bool_or(NOT due) FROM ours)
                FROM chunk c
                """,
                {
                    "position": position,
                    "due": due,
                    "future": now + FUTURE,
                    "versions": list(version_ids),
                },
            )
            last, reached, count, left = cursor.fetchone()
        erased += int(count)
        if not reached:
            break
        position = last
        holds = holds or bool(left)
        if not holds:
            done_to = last
    if done_to > start:
        RaterVersion.objects.filter(pk__in=version_ids).update(
            erased_to=Greatest("erased_to", done_to)
        )
    return erased
