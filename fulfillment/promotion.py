"""What promoting a new version of a rater will cost: the archive that it empties.

The first version of a new checkpoint, prompt or setting has no rating yet. What the archive
answered before goes to the model, until it has been asked for once under the new version. How much
of the archive is asked for again nobody knows. Two bounds from above are told: all hits of a day
become work, as on the first day; and, in the end, each rating of the archive is made anew.

The archive is not counted where it is large: pages of it are drawn at random.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction

from fulfillment import raters
from fulfillment.costs import Servers, reachable_by_current
from fulfillment.demands import Takes
from fulfillment.model_directory import model_directory
from fulfillment.models import Rater, RaterCost, RaterVersion

MOST_PAGES = 3_000
"""Of 8 KiB, that are read of the archive: all of some hundred thousand ratings, else a sample."""
DEFAULT_DAYS, MOST_DAYS = 7, 90


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """Ratings of a version that the archive would still answer with."""

    count: int
    exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """What workflows that came in a span asked for, and what the archive had of it."""

    days: float
    """The span, or less where the version is younger."""
    requests: int
    hits: int


def estimate(rater_id: str, *, days: int = DEFAULT_DAYS, now: datetime) -> dict[str, Any]:
    """Return what another version of a rater would cost; raise NotFound."""
    rater = raters.find(rater_id)
    version = rater.current_version
    entries = _entries(rater, version, now) if version else Entries(count=0, exact=True)
    hits = _hits(version, days, now) if version else Hits(days=0.0, requests=0, hits=0)
    # Of a version that is younger than a day, a day has not been seen.
    hits_a_day = hits.hits / max(1.0, hits.days)
    work = _Work(rater, Servers(model_directory(), now))
    return {
        "rater": rater.pk,
        "rater_version": f"{rater.pk}@{version.number}" if version else None,
        "entries": entries.count,
        "entries_exact": entries.exact,
        "days": round(hits.days, 3),
        "requests": hits.requests,
        "hits": hits.hits,
        "hit_rate": hits.hits / hits.requests if hits.requests else None,
        "a_day": work.of(hits_a_day),
        "whole_archive": work.of(entries.count),
        "servers": round(work.servers, 2),
        "reason": work.reason,
        "at": now,
    }


def _entries(rater: Rater, version: RaterVersion, now: datetime) -> Entries:
    """Count the fresh ratings of a version, in a sample of the table where that is large.

    Its pages lie in the order of time; drawn at random, those of a version come in proportion.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_relation_size('fulfillment_rating') / 8192")
        (pages,) = cursor.fetchone()
        percent = min(100.0, 100 * MOST_PAGES / max(1, pages))
        sample = "" if percent >= 100 else f"TABLESAMPLE SYSTEM ({percent:.6f})"
        cursor.execute(
            f"""
            SELECT count(*) FROM fulfillment_rating {sample}
            WHERE rater_version_id = %s AND reusable AND produced_at > %s
            """,
            [version.pk, now - timedelta(seconds=rater.freshness_s)],
        )
        (count,) = cursor.fetchone()
    return Entries(count=round(count * 100 / percent), exact=not sample)


def _hits(version: RaterVersion, days: int, now: datetime) -> Hits:
    """Sum up the folded counts of workflows of a version, of which there is a row each."""
    since = max(now - timedelta(days=days), version.created_at)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT coalesce(sum(s.received), 0)::bigint, coalesce(sum(s.from_archive), 0)::bigint
            FROM fulfillment_workflow w JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
            WHERE w.rater_id = %s AND w.rater_version_id = %s AND w.created_at > %s
            """,
            [version.rater_id, version.pk, since],
        )
        requests, hits = cursor.fetchone()
    return Hits(days=max(0.0, (now - since) / timedelta(days=1)), requests=requests, hits=hits)


class _Work:
    """What requests of a rater take of its servers."""

    def __init__(self, rater: Rater, servers: Servers) -> None:
        self._rater = rater
        self._cost = RaterCost.objects.filter(pk=rater.pk).first()
        self._is_chat = servers.protocol(rater.model_id) == "openai"
        self.servers = reachable_by_current(rater.current_version, servers)

    @property
    def reason(self) -> str | None:
        """Why times are null, if they are."""
        if self._cost is None:
            return f"{self._rater.pk} has rated nothing of late: nobody knows what a batch takes"
        return None if self.servers else f"nobody serves {self._rater.model_id} now"

    def of(self, requests: float) -> dict[str, float | None]:
        """Return what so many more requests take, in batches of the rater's size."""
        batches = requests / self._rater.batch_size
        device_s = hours = None
        if self._cost is not None and self._cost.device_seconds_a_request:
            device_s = round(requests * self._cost.device_seconds_a_request, 1)
        if self._cost is not None and self.servers:
            takes = Takes(self._rater, self._cost, servers=self.servers, is_chat=self._is_chat)
            busy_s = batches * takes.batch_s(self._rater.batch_size)
            hours = round(busy_s / self.servers / 3600, 3)
        return {
            "requests": round(requests),
            "model_calls": round(requests if self._is_chat else batches),
            "accelerator_seconds": device_s,
            "pool_hours": hours,
        }
