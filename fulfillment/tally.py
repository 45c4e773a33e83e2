"""What becomes of the rows of a body: archive hits, equal rows, items for the model, batches.

Rows are looked up as at intake, chunk by chunk, and nothing is stored. Memory does not grow with
the body but for some tens of bytes a row that misses, with which equal rows are found.

Equal rows count as they will end: the first is rated, the others are coalesced, wherever they
stand. What other workflows will have rated by then is not foreseen, so that items are too many
rather than too few.
"""

from array import array
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
from django.db import connection, transaction

from fulfillment import archive
from fulfillment.clock import database_now
from fulfillment.intake import Draft, WorkflowForm
from fulfillment.policy.freshness import fresh_after
from fulfillment.spool import MOST_LISTED, Spool


@dataclass(kw_only=True, slots=True)
class Tally:
    """What becomes of the rows of a body, or of as many more as it is a sample of."""

    rows: int = 0
    hits: int = 0
    coalesced: int = 0
    items: int = 0
    batches: int = 0
    warnings: list[dict[str, Any]] = field(default_factory=list)

    def scaled(self, by: float) -> "Tally":
        """Return what becomes of so many times the rows."""
        rows, hits = round(self.rows * by), round(self.hits * by)
        coalesced = min(rows - hits, round(self.coalesced * by))
        items = rows - hits - coalesced
        return Tally(
            rows=rows,
            hits=hits,
            coalesced=coalesced,
            items=items,
            batches=min(items, ceil(self.batches * by)),
        )


def count(spool: Spool, draft: Draft, form: WorkflowForm) -> Tally:
    """Count what becomes of the rows of a spool."""
    tally = Tally()
    # Of items that missed, in their order: the first half of the fingerprint, and the batch.
    keys, batch_of, batches = array("Q"), array("I"), 0
    for records in spool.chunks():
        tally.warnings += (
            {"line": record.line, "request_id": record.name(position), "code": code}
            for position, record in enumerate(records, tally.rows)
            for code in record.warnings
        )
        del tally.warnings[MOST_LISTED:]
        known = _known({record.fingerprint for record in records}, draft, form)
        missed = [record.fingerprint for record in records if record.fingerprint not in known]
        tally.rows += len(records)
        tally.hits += len(records) - len(missed)
        items = list(dict.fromkeys(missed))
        keys.extend(int(fingerprint[:16], 16) for fingerprint in items)
        batch_of.extend(batches + number // draft.batch_size for number in range(len(items)))
        batches += -(-len(items) // draft.batch_size)
    if keys:
        # An item that an earlier chunk had is rated there; a batch of such alone is never sent.
        _, first = np.unique(np.frombuffer(keys, dtype=np.uint64), return_index=True)
        tally.items = len(first)
        tally.batches = len(np.unique(np.frombuffer(batch_of, dtype=np.uintc)[first]))
    tally.coalesced = tally.rows - tally.hits - tally.items
    return tally


def _known(fingerprints: set[str], draft: Draft, form: WorkflowForm) -> set[str]:
    if form.bypass:
        return set()
    now = database_now()
    oldest = fresh_after(
        now=now,
        freshness_s=draft.rater.freshness_s,
        max_age_s=form.max_age_s,
        accepted_at=now,
        bypass=False,
    )
    with transaction.atomic(), connection.cursor() as cursor:
        # As at intake: statistics of the archive are always old.
        cursor.execute("SET LOCAL enable_seqscan = off")
        return archive.known(cursor, list(fingerprints), produced_after=oldest, now=now)
