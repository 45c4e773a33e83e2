"""Drawing the hits that shadow refresh computes again: a share of them, by a hash.

The draw depends on the fingerprint and the workflow only, so that a chunk that is taken in again
draws the same, and that no item is drawn each time or never.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db.backends.utils import CursorWrapper

from fulfillment import documents
from fulfillment.archive import Entry
from fulfillment.models import ShadowSample, Workflow
from fulfillment.spool import Record

MOST_BYTES = 1 << 20
"""Larger samples are left out: a share of a thousand must not become a share of the disk."""
_HASHES = 1 << 32
_ODD = 0x9E3779B1
"""Spreads consecutive workflow ids over all hashes (Fibonacci hashing)."""


def draw(
    cursor: CursorWrapper,
    workflow: Workflow,
    records: Sequence[Record],
    hits: Mapping[str, Entry],
    now: datetime,
) -> None:
    """Keep what the drawn hits were rated by, in the transaction that answers them."""
    limit = int(settings.AIRS_SHADOW_REFRESH * _HASHES)
    if not limit:
        return
    salt = workflow.pk * _ODD
    drawn = [f for f in hits if (int(f[:8], 16) + salt) % _HASHES < limit]
    if not drawn:
        return
    drawn.sort()  # one lock order: the same hits may be drawn by several uploads at once
    by_fingerprint = {record.fingerprint: record for record in records}
    samples = [
        ShadowSample(
            rater_version_id=workflow.rater_version_id,
            fingerprint=UUID(fingerprint),
            url_digest=UUID(record.url_digest) if record.url_digest else None,
            score=hits[fingerprint].score,
            produced_at=hits[fingerprint].produced_at,
            sampled_at=now,
            data=documents.compressed(record.item),
        )
        for fingerprint in drawn
        for record in (by_fingerprint[fingerprint],)
    ]
    ShadowSample.objects.bulk_create(
        [sample for sample in samples if len(sample.data) <= MOST_BYTES], ignore_conflicts=True
    )
