"""The archive: ratings by fingerprint, append-only; the newest valid one of each is its entry.

Looking up is all that happens here. Which rating is fresh enough is decided in policy.freshness;
what erases ratings is `expiry` (time) and `purging` (an operator). What a finished workflow answers
was copied to its requests and stays.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db.backends.utils import CursorWrapper

from fulfillment import arrays
from fulfillment.policy.freshness import FUTURE


class Entry(NamedTuple):
    """A valid rating, as it is copied to a request."""

    rating_id: int
    workflow_id: int
    """The workflow whose model call it came from."""
    score: float
    label: str | None
    output: Any
    produced_at: datetime


def look_up(
    cursor: CursorWrapper,
    fingerprints: Sequence[str],
    *,
    produced_after: datetime | None,
    now: datetime | None = None,
) -> dict[str, Entry]:
    """Return the newest entry of each fingerprint (32 hex digits) that has one.

    Only those produced after the instant count; with None, any: who asks so tells a stale entry
    from none. With `now`, ratings of the far future do not count. One index scan of the
    fingerprints given, whatever the size of the archive.
    """
    if not fingerprints:
        return {}
    cursor.execute(
        """
        SELECT DISTINCT ON (fingerprint)
               replace(fingerprint::text, '-', ''), id, workflow_id, score, label, output::text,
               produced_at
        FROM fulfillment_rating
        WHERE fingerprint = ANY(%s::uuid[]) AND reusable AND produced_at > %s
          AND produced_at <= %s
        ORDER BY fingerprint, produced_at DESC, id DESC
        """,
        [
            arrays.uuids(fingerprints),
            "-infinity" if produced_after is None else produced_after,
            "infinity" if now is None else now + FUTURE,
        ],
    )
    return {row[0]: Entry._make(row[1:]) for row in cursor.fetchall()}


def known(
    cursor: CursorWrapper, fingerprints: Sequence[str], *, produced_after: datetime, now: datetime
) -> set[str]:
    """Return those fingerprints that `look_up` would find an entry of; what it says is not read."""
    if not fingerprints:
        return set()
    cursor.execute(
        """
        SELECT DISTINCT replace(fingerprint::text, '-', '') FROM fulfillment_rating
        WHERE fingerprint = ANY(%s::uuid[]) AND reusable AND produced_at > %s
          AND produced_at <= %s
        """,
        [arrays.uuids(fingerprints), produced_after, now + FUTURE],
    )
    return {fingerprint for (fingerprint,) in cursor.fetchall()}
