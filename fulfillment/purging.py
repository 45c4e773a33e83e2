"""Purging the archive: erasing ratings on an operator's order, and what a url has left behind.

1. An order is a row: what it asks for, who gave it, and how far it is.
2. Ratings are walked in the order of their ids, or found by the index of their url's digest.
3. Of a url also the traces in requests and payloads are blanked (purged_traces).

Each step is one short transaction that commits its position with its work: killed anywhere, the
next step goes on. The call that gives an order takes the first steps, so that a small one is done
when it answers; `run_once` (control worker) takes the rest.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import completion, purged_traces
from fulfillment.errors import InvalidFields, NotFound
from fulfillment.expiry import newest_rating_id
from fulfillment.models import (
    POSITION_BITS,
    Purge,
    PurgeStage,
    Rater,
    RaterVersion,
    ShadowSample,
)
from fulfillment.policy.fingerprint import url_digest

logger = logging.getLogger(__name__)

CHUNK = 20_000
"""Ratings or requests read a step."""
STEPS_IN_CALL = 20
STEPS_A_RUN = 40
"""Of the control worker, every five seconds."""
KEPT = timedelta(days=365)
"""Records of purges that were done."""
_LATE = timedelta(days=1)
"""More than a rating can be older than those that were stored before it."""
_OF_URL = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Criteria:
    """What is purged: what meets all that are given; at least one is."""

    rater: str | None = None
    version: int | None = None
    """Number of a version of the rater."""
    url: str | None = None
    """Exactly as it was sent."""
    before: datetime | None = None
    """Ratings produced, and requests of workflows created, before then."""


def begin(criteria: Criteria, *, dry_run: bool, actor: str, now: datetime) -> Purge:
    """Record the order; raise InvalidFields where it makes no sense."""
    purge = Purge.objects.create(
        actor=actor,
        rater_id=criteria.rater or "",
        version_number=criteria.version,
        version_ids=_versions(criteria),
        before=criteria.before,
        url_digest=(None if criteria.url is None else UUID(bytes=url_digest(criteria.url))),
        dry_run=dry_run,
        last_rating_id=newest_rating_id(),
        last_request_id=purged_traces.newest_request_id(),
        created_at=now,
    )
    logger.info("purge_begun id=%s dry_run=%s by=%s", purge.public_id, dry_run, actor)
    return purge


def find(public_id: str) -> Purge:
    """Return a purge; raise NotFound."""
    purge = Purge.objects.filter(public_id=public_id).first()
    if purge is None:
        raise NotFound(f"There is no purge {public_id!r}.")
    return purge


def advance(purge_id: int, *, now: datetime, most_steps: int) -> Purge:
    """Take up to so many steps; return the purge as it stands then.

    Somebody else who takes steps of it at the same time is left alone.
    """
    for _ in range(most_steps):
        with transaction.atomic(), connection.cursor() as cursor:
            purge = (
                Purge.objects.select_for_update(skip_locked=True)
                .filter(pk=purge_id, finished_at=None)
                .first()
            )
            if purge is None:
                break
            emptied = _step(cursor, purge, now)
            purge.save()
        if purge.finished_at:
            logger.info(
                "purge_done id=%s ratings=%d requests=%d payloads=%d",
                purge.public_id, purge.ratings, purge.requests, purge.payloads,
            )  # fmt: skip
        # After COMMIT, as after a finish: nobody else will find that these were the last items.
        for workflow_id in emptied:
            completion.check(workflow_id)
    return Purge.objects.get(pk=purge_id)


def run_once(now: datetime) -> int:
    """Go on with the purges that are not done, oldest first; return how many were looked at."""
    Purge.objects.filter(finished_at__lt=now - KEPT).delete()
    unfinished = list(
        Purge.objects.filter(finished_at=None).order_by("pk").values_list("pk", flat=True)
    )
    for purge_id in unfinished:
        advance(purge_id, now=now, most_steps=max(1, STEPS_A_RUN // len(unfinished)))
    return len(unfinished)


def _versions(criteria: Criteria) -> list[int] | None:
    """Return the ids of the versions meant, None for all."""
    if criteria == Criteria():
        raise _bad("rater", "missing_field", "give at least one of rater, url and before")
    if criteria.version is not None and criteria.rater is None:
        raise _bad("version", "missing_field", "a version is one of a rater: give rater too")
    if criteria.rater is None:
        return None
    if not Rater.objects.filter(pk=criteria.rater).exists():
        raise _bad("rater", "unknown_rater", "no such rater")
    versions = RaterVersion.objects.filter(rater_id=criteria.rater)
    if criteria.version is not None:
        versions = versions.filter(number=criteria.version)
        if not versions:
            raise _bad("version", "unknown_version", "the rater has no such version")
    return list(versions.values_list("pk", flat=True))


def _bad(field: str, code: str, detail: str) -> InvalidFields:
    return InvalidFields(
        f"{field}: {detail}.",
        code=code,
        errors=[{"field": field, "code": code, "detail": detail}],
    )


def _step(cursor: CursorWrapper, purge: Purge, now: datetime) -> Iterable[int]:
    """Take one step under the purge's lock; return workflows that may be complete by it."""
    emptied: Iterable[int] = ()
    if purge.stage == PurgeStage.REQUESTS:
        emptied, more = purged_traces.step(cursor, purge, chunk=CHUNK)
        # Once more: what was being computed may have ended before the walk came to its request.
        done = not more and (purge.dry_run or not _ratings_of_url(cursor, purge))
    elif purge.url_digest is None:
        done = not _walk_ratings(cursor, purge)
    else:
        done = False
        if not _ratings_of_url(cursor, purge):
            purge.stage = PurgeStage.REQUESTS
            _forget_samples(purge)
    if done:
        purge.stage, purge.finished_at = PurgeStage.DONE, now
        _forget_samples(purge)
    return emptied


def _forget_samples(purge: Purge) -> None:
    # Before requests are walked, so that no workflow is made of them behind the walk; and after,
    # for what was drawn by an upload that was under way.
    if purge.url_digest is not None and not purge.dry_run:
        ShadowSample.objects.filter(url_digest=purge.url_digest).delete()


def _values(purge: Purge) -> dict[str, Any]:
    return {
        "position": purge.position,
        "last": purge.last_rating_id,
        "last_workflow": purge.last_request_id >> POSITION_BITS,
        "versions": purge.version_ids,
        "before": purge.before,
        "url": purge.url_digest,
    }


_MEANT = """
    (%(versions)s::bigint[] IS NULL OR rater_version_id = ANY(%(versions)s::bigint[]))
    AND (%(before)s::timestamptz IS NULL OR produced_at < %(before)s)
"""


def _walk_ratings(cursor: CursorWrapper, purge: Purge) -> bool:
    """Look at the next ratings by id; say whether there are more that may be meant."""
    gone = "DELETE FROM fulfillment_rating r USING due WHERE r.id = due.id RETURNING r.id"
    cursor.execute(
        f"""
        WITH looked AS MATERIALIZED (
            SELECT id, rater_version_id, produced_at FROM fulfillment_rating
            WHERE id > %(position)s AND id <= %(last)s ORDER BY id LIMIT {CHUNK}
        ), due AS (SELECT id FROM looked WHERE {_MEANT}),
        gone AS ({"SELECT id FROM due" if purge.dry_run else gone})
        SELECT max(id), min(produced_at), (SELECT count(*) FROM gone) FROM looked
        """,
        _values(purge),
    )
    last, oldest, count = cursor.fetchone()
    if last is None:
        return False
    purge.position = last
    purge.ratings += count
    return purge.before is None or oldest <= purge.before + _LATE


def _ratings_of_url(cursor: CursorWrapper, purge: Purge) -> bool:
    """Erase (or, in a dry run, count) ratings by the digest of their url; say if there are more.

    Also those that were stored since, for workflows that were there when the order came.
    """
    meant = f"""
        url_digest = %(url)s::uuid AND (id <= %(last)s OR workflow_id <= %(last_workflow)s)
        AND {_MEANT}
    """
    if purge.dry_run:
        cursor.execute(f"SELECT count(*) FROM fulfillment_rating WHERE {meant}", _values(purge))
        (count,) = cursor.fetchone()
        purge.ratings += count
        return False
    cursor.execute(
        f"""
        DELETE FROM fulfillment_rating WHERE id IN (
            SELECT id FROM fulfillment_rating WHERE {meant} LIMIT {_OF_URL})
        """,
        _values(purge),
    )
    purge.ratings += cursor.rowcount
    return bool(cursor.rowcount == _OF_URL)
