"""The archive: ratings by fingerprint, append-only; the newest valid one of each is its entry.

A rating is fresh while its age is below the rater's freshness (or the request's `max_age_s`), from
the moment the model answered; reads and copies do not renew it. Ratings are erased in chunks after
freshness plus a buffer; what a finished workflow answers was copied to its requests and stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment.models import Rater

BUFFER = timedelta(days=10)
_CHUNK = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A valid rating, as it is copied to a request."""

    rating_id: int
    score: float
    label: str | None
    output: Any
    produced_at: datetime


def look_up(
    cursor: CursorWrapper, fingerprints: Sequence[str], *, produced_after: datetime
) -> dict[str, Entry]:
    """Return the entry of each fingerprint (32 hex digits) with one produced after the instant.

    One index scan of the fingerprints given, whatever the size of the archive.
    """
    if not fingerprints:
        return {}
    cursor.execute(
        """
        SELECT DISTINCT ON (fingerprint)
               replace(fingerprint::text, '-', ''), id, score, label, output::text, produced_at
        FROM fulfillment_rating
        WHERE fingerprint = ANY(%s::uuid[]) AND reusable AND produced_at > %s
        ORDER BY fingerprint, produced_at DESC, id DESC
        """,
        [fingerprints, produced_after],
    )
    return {
        fingerprint: Entry(
            rating_id=rating_id,
            score=score,
            label=label,
            output=output,
            produced_at=produced_at,
        )
        for fingerprint, rating_id, score, label, output, produced_at in cursor.fetchall()
    }


def fresh_after(
    *, now: datetime, freshness_s: int, max_age_s: int | None, accepted_at: datetime, bypass: bool
) -> datetime:
    """Return the instant after which a rating must have been produced to be taken.

    `bypass` takes only what was produced after the workflow was accepted: it still coalesces.
    """
    age_s = freshness_s if max_age_s is None else min(freshness_s, max_age_s)
    oldest = now - timedelta(seconds=age_s)
    return max(oldest, accepted_at) if bypass else oldest


def purge(
    *,
    rater_id: str | None = None,
    version_id: int | None = None,
    before: datetime | None = None,
) -> int:
    """Erase ratings by rater, version or time, in chunks; return how many.

    Requests keep their copies (I13). At least one criterion must be given.
    """
    criteria: list[tuple[str, Any]] = []
    if rater_id is not None:
        criteria.append(
            (
                "rater_version_id IN (SELECT id FROM fulfillment_raterversion WHERE rater_id = %s)",
                rater_id,
            )
        )
    if version_id is not None:
        criteria.append(("rater_version_id = %s", version_id))
    if before is not None:
        criteria.append(("produced_at < %s", before))
    if not criteria:
        raise ValueError("a purge needs a rater, a version or a time")
    where = " AND ".join(condition for condition, _ in criteria)
    return _erase(where, [value for _, value in criteria])


def retain(*, now: datetime) -> int:
    """Erase what is past its rater's freshness and the buffer; return how many."""
    return sum(
        _erase(
            "rater_version_id IN (SELECT id FROM fulfillment_raterversion WHERE rater_id = %s)"
            " AND produced_at < %s",
            [rater_id, now - timedelta(seconds=freshness_s) - BUFFER],
        )
        for rater_id, freshness_s in Rater.objects.values_list("id", "freshness_s")
    )


def _erase(where: str, values: Sequence[Any]) -> int:
    """Delete in chunks walked by id, so that no statement runs long or holds many locks."""
    erased, last = 0, 0
    while True:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                f"""
                WITH doomed AS (
                    SELECT id FROM fulfillment_rating
                    WHERE id > %s AND {where} ORDER BY id LIMIT {_CHUNK}
                ), gone AS (
                    DELETE FROM fulfillment_rating r USING doomed d WHERE r.id = d.id
                    RETURNING r.id
                )
                SELECT count(*), max(id) FROM gone
                """,
                [last, *values],
            )
            count, highest = cursor.fetchone()
        if not count:
            return erased
        erased, last = erased + count, highest
