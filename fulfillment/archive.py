"""The archive: ratings by fingerprint, append-only; the newest valid one of each is its entry.

A rating is fresh while its age is below the rater's freshness (or the request's `max_age_s`), from
the moment the model answered; reads and copies do not renew it. A clock that was set back may leave
ratings of the future: up to five minutes count as fresh. Ratings are erased in chunks after
freshness plus a buffer; what a finished workflow answers was copied to its requests and stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import arrays
from fulfillment.models import RaterVersion

BUFFER = timedelta(days=10)
FUTURE = timedelta(minutes=5)
_CHUNK = 20_000
_LATE = timedelta(days=1)
"""More than a rating can be older than those that were stored before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A valid rating, as it is copied to a request."""

    rating_id: int
    score: float
    label: str | None
    output: Any
    produced_at: datetime


def look_up(
    cursor: CursorWrapper,
    fingerprints: Sequence[str],
    *,
    produced_after: datetime,
    now: datetime | None = None,
) -> dict[str, Entry]:
    """Return the entry of each fingerprint (32 hex digits) with one produced after the instant.

    With `now`, ratings of the far future do not count. One index scan of the fingerprints given,
    whatever the size of the archive.
    """
    if not fingerprints:
        return {}
    cursor.execute(
        """
        SELECT DISTINCT ON (fingerprint)
               replace(fingerprint::text, '-', ''), id, score, label, output::text, produced_at
        FROM fulfillment_rating
        WHERE fingerprint = ANY(%s::uuid[]) AND reusable AND produced_at > %s
          AND produced_at <= %s
        ORDER BY fingerprint, produced_at DESC, id DESC
        """,
        [arrays.uuids(fingerprints), produced_after, "infinity" if now is None else now + FUTURE],
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
    if rater_id is None and version_id is None and before is None:
        raise ValueError("a purge needs a rater, a version or a time")
    versions = RaterVersion.objects.all()
    if rater_id is not None:
        versions = versions.filter(rater_id=rater_id)
    if version_id is not None:
        versions = versions.filter(pk=version_id)
    return _erase(dict.fromkeys(versions.values_list("pk", flat=True), before))


def retain(*, now: datetime) -> int:
    """Erase what is past its rater's freshness and the buffer; return how many."""
    freshness = dict(RaterVersion.objects.values_list("pk", "rater__freshness_s"))
    due = {pk: now - timedelta(seconds=s) - BUFFER for pk, s in freshness.items()}
    return _erase(due, stop_after=max(due.values(), default=now) + _LATE)


def _erase(before: Mapping[int, datetime | None], *, stop_after: datetime | None = None) -> int:
    """Erase ratings of versions produced before an instant each (None: all); return how many.

    Walks the archive in order of storage, so that no statement runs long or holds many locks, up to
    the first stretch that has only ratings produced after `stop_after`.
    """
    erased = last = 0
    while True:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                f"""
                WITH looked AS MATERIALIZED (
                    SELECT id, rater_version_id, produced_at FROM fulfillment_rating
                    WHERE id > %s ORDER BY id LIMIT {_CHUNK}
                ), gone AS (
                    DELETE FROM fulfillment_rating r
                    USING looked l JOIN unnest(%s::bigint[], %s::timestamptz[]) AS due(version, at)
                          ON l.rater_version_id = due.version AND l.produced_at < due.at
                    WHERE r.id = l.id
                    RETURNING r.id
                )
                SELECT (SELECT count(*) FROM gone), max(id), min(produced_at) FROM looked
                """,
                [last, list(before), [at or "infinity" for at in before.values()]],
            )
            count, highest, oldest = cursor.fetchone()
        erased += int(count)
        if highest is None or (stop_after is not None and oldest > stop_after):
            return erased
        last = highest
