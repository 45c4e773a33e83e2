"""Writing what became of items: ratings, requests and progress, in the caller's transaction.

The caller holds the row locks of the batches and has cleared, or is about to clear, the open bits
of exactly the items it passes here: that makes every terminal state written once (I1, I3).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db.backends.utils import CursorWrapper

from fulfillment import arrays, prepared
from fulfillment.models import PROGRESS_FIELDS, request_key
from fulfillment.policy.lifecycle import RequestState, Source

MOST_ATTEMPTS = 32_767
"""What the column of a request's attempts takes."""


class Outcome(NamedTuple):
    """How one item ended; `positions` are its rows, the first of which it was computed for.

    A tuple, as a frozen dataclass takes three times as long to make: there is one for every item.
    """

    workflow_id: int
    positions: Sequence[int]
    state: RequestState
    source: Source | None = None
    score: float | None = None
    label: str | None = None
    output: str | None = None
    """JSON text."""
    rating_id: int | None = None
    rated_at: datetime | None = None
    error: str | None = None
    attempts: int = 0
    warnings: Sequence[str] = ()
    rated_by_id: int | None = None
    """The workflow whose model call it came from, where that is another one."""


Progress = dict[int, dict[str, Any]]
"""What was added, by workflow and name of a progress field; 0 where nothing was said."""


def no_progress() -> Progress:
    """Return progress to add to."""
    return defaultdict(lambda: defaultdict(int))


def positions_by_item(positions: Sequence[int], item_of: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions of each item of a batch."""
    items: dict[int, list[int]] = defaultdict(list)
    for position, item in zip(positions, item_of, strict=True):
        items[item].append(position)
    return items


def end_requests(
    cursor: CursorWrapper, outcomes: Iterable[Outcome], *, progress: Progress | None = None
) -> Progress:
    """Write the terminal states of all rows of the items; return the progress, with what it was."""
    rows: list[tuple[int, Source | None, Outcome]] = []
    progress = no_progress() if progress is None else progress
    for outcome in outcomes:
        for number, position in enumerate(outcome.positions):
            source = outcome.source
            if source is Source.MODEL and number:
                source = Source.COALESCED
            rows.append((request_key(outcome.workflow_id, position), source, outcome))
            _count(progress[outcome.workflow_id], outcome, source)
    if rows:
        prepared.execute(
            cursor,
            """
            UPDATE fulfillment_ratingrequest r
            SET state = u.state, source = u.source, score = u.score, label = u.label,
                output = u.output, rating_id = u.rating_id, rated_by_id = u.rated_by_id,
                rated_at = u.rated_at,
                error = u.error, attempts = u.attempts,
                warnings = CASE WHEN u.warnings = '' THEN r.warnings
                                ELSE r.warnings || string_to_array(u.warnings, ',') END
            FROM unnest(%s::bigint[], %s::smallint[], %s::smallint[], %s::float8[], %s::text[],
                        %s::jsonb[], %s::bigint[], %s::bigint[], %s::timestamptz[], %s::text[],
                        %s::smallint[], %s::text[])
                 AS u(id, state, source, score, label, output, rating_id, rated_by_id, rated_at,
                      error, attempts, warnings)
            WHERE r.id = u.id
            """,
            [
                arrays.integers(key for key, _, _ in rows),
                arrays.integers(o.state for _, _, o in rows),
                arrays.integers(source for _, source, _ in rows),
                arrays.floats(o.score for _, _, o in rows),
                arrays.texts(o.label for _, _, o in rows),
                arrays.texts(o.output for _, _, o in rows),
                arrays.integers(o.rating_id for _, _, o in rows),
                arrays.integers(o.rated_by_id for _, _, o in rows),
                arrays.instants(o.rated_at for _, _, o in rows),
                arrays.texts(o.error for _, _, o in rows),
                arrays.integers(min(o.attempts, MOST_ATTEMPTS) for _, _, o in rows),
                arrays.texts(",".join(o.warnings) for _, _, o in rows),
            ],
        )
    return progress


_COUNTED = {
    RequestState.COMPLETED: "completed",
    RequestState.FAILED: "failed",
    RequestState.TIMED_OUT: "timed_out",
    RequestState.CANCELLED: "cancelled",
}
_SOURCES = {
    Source.ARCHIVE: "from_archive",
    Source.COALESCED: "coalesced",
    Source.MODEL: "from_model",
}


def _count(progress: dict[str, Any], outcome: Outcome, source: Source | None) -> None:
    progress[_COUNTED[outcome.state]] += 1
    if source is not None and outcome.score is not None:
        progress[_SOURCES[source]] += 1
        progress["score_sum"] += outcome.score


def add_progress(cursor: CursorWrapper, progress: Mapping[int, Mapping[str, Any]]) -> None:
    """Insert one delta row a workflow; the completion checker folds them."""
    if not progress:
        return
    prepared.execute(
        cursor,
        _ADD_PROGRESS,
        [
            arrays.integers(progress),
            *(
                arrays.floats([added.get(name, 0) for added in progress.values()])
                for name in _ADDED
            ),
        ],
    )


_ADDED = tuple(name for name in PROGRESS_FIELDS if name != "stored_bytes")
"""What is stored is told by ingest alone."""
_ADD_PROGRESS = (
    f"INSERT INTO fulfillment_statsdelta (workflow_id, {', '.join(_ADDED)})"
    f" SELECT * FROM unnest(%s::bigint[], {', '.join(['%s::float8[]'] * len(_ADDED))})"
)


def land(cursor: CursorWrapper, flights: Sequence[tuple[str, int]]) -> None:
    """Delete flights, each (fingerprint, batch), that are still the batch's."""
    if not flights:
        return
    fingerprints, batch_ids = zip(*flights, strict=True)
    prepared.execute(
        cursor,
        """
        DELETE FROM fulfillment_flight f
        USING unnest(%s::uuid[], %s::bigint[]) AS u(fingerprint, id)
        WHERE f.fingerprint = u.fingerprint AND f.batch_id = u.id
        """,
        [arrays.uuids(fingerprints), arrays.integers(batch_ids)],
    )


def remember_failures(
    cursor: CursorWrapper, failures: Mapping[str, str], *, failed_at: datetime
) -> None:
    """Tell followers of these fingerprints, for ten minutes, that they fail for good."""
    if not failures:
        return
    ordered = sorted(failures)  # one lock order for all finishers
    cursor.execute(
        """
        INSERT INTO fulfillment_failedflight (fingerprint, code, failed_at)
        SELECT f, c, %s FROM unnest(%s::uuid[], %s::text[]) AS u(f, c)
        ON CONFLICT (fingerprint) DO UPDATE
        SET code = excluded.code, failed_at = excluded.failed_at
        """,
        [failed_at, ordered, [failures[f] for f in ordered]],
    )


def without_open_items(cursor: CursorWrapper, workflow_ids: Iterable[int]) -> list[int]:
    """Return those of the workflows that have no open item left: they may be complete."""
    prepared.execute(
        cursor,
        """
        SELECT w FROM unnest(%s::bigint[]) w
        WHERE NOT EXISTS (SELECT FROM fulfillment_batch b
                          WHERE b.workflow_id = w AND b.state <> 4 AND b.open_mask <> 0)
        """,
        [arrays.integers(workflow_ids)],
    )
    return [row[0] for row in cursor.fetchall()]
