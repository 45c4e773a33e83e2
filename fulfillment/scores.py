"""Writing what models scored: rating, request and flight of each item in one statement.

The caller holds the row locks of the batches and knows which open bits it cleared. Ratings get
their ids first, so that requests can name them without a second way to the client: three statements
with their arrays cost PostgreSQL and the client half as much again.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db.backends.utils import CursorWrapper

from fulfillment import arrays, outcomes, prepared
from fulfillment.models import request_key
from fulfillment.policy.lifecycle import RequestState, Source


class Scored(NamedTuple):
    """A valid score of an item. `age_s` is the time since the model answered."""

    score: float
    label: str | None = None
    output: str | None = None
    """JSON text."""
    warnings: Sequence[str] = ()
    age_s: float = 0.0
    url_digest: str | None = None


class ScoredBatch(NamedTuple):
    """The scored items of a batch."""

    batch_id: int
    workflow_id: int
    rater_version_id: int
    reusable: bool
    fingerprints: Sequence[str]
    """Of all items of the batch, 32 hex digits each."""
    items: Sequence[tuple[int, Scored, Sequence[int], int]]
    """Number in the batch, score, positions of the rows that it completes, and their attempts.

    The first position is the one it was computed for. There is none where the workflow ended
    meanwhile: the score enters the archive only.
    """


MODEL, COALESCED = Source.MODEL.value, Source.COALESCED.value

_WRITE = f"""
WITH item AS MATERIALIZED (
    SELECT nextval('fulfillment_rating_id_seq') AS id,
           %s::timestamptz - make_interval(secs => u.age_s) AS produced_at, u.*
    FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bool[], %s::float8[],
                %s::text[], %s::jsonb[], %s::uuid[], %s::float8[], %s::text[]) WITH ORDINALITY
         AS u(fingerprint, batch_id, rater_version_id, workflow_id, reusable, score, label, output,
              url_digest, age_s, warnings, number)
), stored AS (
    INSERT INTO fulfillment_rating (id, fingerprint, rater_version_id, workflow_id, score, label,
                                    output, url_digest, produced_at, reusable)
    SELECT id, fingerprint, rater_version_id, workflow_id, score, label, output, url_digest,
           produced_at, reusable
    FROM item
), landed AS (
    DELETE FROM fulfillment_flight f USING item i
    WHERE f.fingerprint = i.fingerprint AND f.batch_id = i.batch_id
)
UPDATE fulfillment_ratingrequest r
SET state = {RequestState.COMPLETED:d}, source = u.source, score = i.score, label = i.label,
    output = i.output, rating_id = i.id, rated_by_id = NULL, rated_at = i.produced_at,
    error = NULL, attempts = u.attempts,
    warnings = r.warnings || string_to_array(i.warnings, ',')
FROM unnest(%s::bigint[], %s::bigint[], %s::smallint[], %s::smallint[])
     AS u(id, number, source, attempts), item i
WHERE i.number = u.number AND r.id = u.id
"""


def write(
    cursor: CursorWrapper,
    batches: Iterable[ScoredBatch],
    *,
    now: datetime,
    progress: outcomes.Progress,
) -> None:
    """Append the ratings, complete the requests, end the flights; add to the progress."""
    fingerprints: list[str] = []
    of_batch: list[tuple[int, int, int, bool]] = []
    scores: list[Scored] = []
    ended: list[tuple[int, int, int, int]] = []
    for batch in batches:
        about = (batch.batch_id, batch.rater_version_id, batch.workflow_id, batch.reusable)
        of_batch += [about] * len(batch.items)
        before, from_model, score_sum = len(ended), 0, 0.0
        for item, scored, positions, attempts in batch.items:
            fingerprints.append(batch.fingerprints[item])
            scores.append(scored)
            source = MODEL
            for position in positions:
                key = request_key(batch.workflow_id, position)
                ended.append((key, len(scores), source, min(attempts, outcomes.MOST_ATTEMPTS)))
                source = COALESCED
            from_model += bool(positions)
            score_sum += scored.score * len(positions)
        added = progress[batch.workflow_id]
        added["completed"] += len(ended) - before
        added["from_model"] += from_model
        added["coalesced"] += len(ended) - before - from_model
        added["score_sum"] += score_sum
    if not scores:
        return
    batch_ids, version_ids, workflow_ids, reusable = zip(*of_batch, strict=True)
    keys, numbers, sources, attempts_of = zip(*ended, strict=True) if ended else ((), (), (), ())
    prepared.execute(
        cursor,
        _WRITE,
        [
            now,
            arrays.uuids(fingerprints),
            arrays.integers(batch_ids),
            arrays.integers(version_ids),
            arrays.integers(workflow_ids),
            arrays.booleans(reusable),
            arrays.floats([s.score for s in scores]),
            arrays.texts(_unless_none([s.label for s in scores])),
            arrays.texts(_unless_none([s.output for s in scores])),
            arrays.uuids(_unless_none([s.url_digest for s in scores])),
            arrays.floats([s.age_s for s in scores]),
            arrays.texts(
                _unless_none([",".join(s.warnings) if s.warnings else None for s in scores])
            ),
            arrays.integers(keys),
            arrays.integers(numbers),
            arrays.integers(sources),
            arrays.integers(attempts_of),
        ],
    )


def _unless_none(values: list[str | None]) -> Sequence[str | None]:
    """Return the values, or nothing where all are None: `unnest` fills up with NULL."""
    return values if any(v is not None for v in values) else ()
