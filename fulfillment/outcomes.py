"""Writing what became of items: ratings, requests and progress, in the caller's transaction.

The caller holds the row locks of the batches and has cleared, or is about to clear, the open bits
of exactly the items it passes here: that makes every terminal state written once (I1, I3).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.backends.utils import CursorWrapper

from fulfillment.models import PROGRESS_FIELDS, request_key
from fulfillment.policy.lifecycle import RequestState, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one item ended; `positions` are its rows, the first of which it was computed for."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRating:
    """A rating for the archive."""

    fingerprint: str
    rater_version_id: int
    workflow_id: int
    score: float
    label: str | None
    output: str | None
    url_digest: str | None
    produced_at: datetime
    reusable: bool


def positions_by_item(positions: Sequence[int], item_of: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions of each item of a batch."""
    items: dict[int, list[int]] = defaultdict(list)
    for position, item in zip(positions, item_of, strict=True):
        items[item].append(position)
    return items


def add_ratings(cursor: CursorWrapper, ratings: Sequence[NewRating]) -> dict[str, int]:
    """Append ratings to the archive; return their ids by fingerprint."""
    if not ratings:
        return {}
    cursor.execute(
        """
        INSERT INTO fulfillment_rating (fingerprint, rater_version_id, workflow_id, score, label,
                                        output, url_digest, produced_at, reusable)
        SELECT * FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::float8[], %s::text[],
                             %s::jsonb[], %s::uuid[], %s::timestamptz[], %s::bool[])
        RETURNING replace(fingerprint::text, '-', ''), id
        """,
        [
            [r.fingerprint for r in ratings],
            [r.rater_version_id for r in ratings],
            [r.workflow_id for r in ratings],
            [r.score for r in ratings],
            [r.label for r in ratings],
            [r.output for r in ratings],
            [r.url_digest for r in ratings],
            [r.produced_at for r in ratings],
            [r.reusable for r in ratings],
        ],
    )
    return dict(cursor.fetchall())


def end_requests(cursor: CursorWrapper, outcomes: Iterable[Outcome]) -> dict[int, dict[str, Any]]:
    """Write the terminal states of all rows of the items; return the progress by workflow."""
    rows: list[tuple[int, Source | None, Outcome]] = []
    progress: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(int))
    for outcome in outcomes:
        for number, position in enumerate(outcome.positions):
            source = outcome.source
            if source is Source.MODEL and number:
                source = Source.COALESCED
            rows.append((request_key(outcome.workflow_id, position), source, outcome))
            _count(progress[outcome.workflow_id], outcome, source)
    if rows:
        cursor.execute(
            """
            UPDATE fulfillment_ratingrequest r
            SET state = u.state, source = u.source, score = u.score, label = u.label,
                output = u.output, rating_id = u.rating_id, rated_at = u.rated_at,
                error = u.error, attempts = u.attempts,
                warnings = CASE WHEN u.warnings = '' THEN r.warnings
                                ELSE r.warnings || string_to_array(u.warnings, ',') END
            FROM unnest(%s::bigint[], %s::smallint[], %s::smallint[], %s::float8[], %s::text[],
                        %s::jsonb[], %s::bigint[], %s::timestamptz[], %s::text[], %s::smallint[],
                        %s::text[])
                 AS u(id, state, source, score, label, output, rating_id, rated_at, error,
                      attempts, warnings)
            WHERE r.id = u.id
            """,
            [
                [key for key, _, _ in rows],
                [o.state for _, _, o in rows],
                [source for _, source, _ in rows],
                [o.score for _, _, o in rows],
                [o.label for _, _, o in rows],
                [o.output for _, _, o in rows],
                [o.rating_id for _, _, o in rows],
                [o.rated_at for _, _, o in rows],
                [o.error for _, _, o in rows],
                [min(o.attempts, 32_767) for _, _, o in rows],
                [",".join(o.warnings) for _, _, o in rows],
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
    columns = ", ".join(PROGRESS_FIELDS)
    arrays = ", ".join(
        "%s::float8[]" if name in {"score_sum", "accelerator_seconds"} else "%s::bigint[]"
        for name in PROGRESS_FIELDS
    )
    cursor.execute(
        f"INSERT INTO fulfillment_statsdelta (workflow_id, {columns})"
        f" SELECT * FROM unnest(%s::bigint[], {arrays})",
        [
            list(progress),
            *([added.get(name, 0) for added in progress.values()] for name in PROGRESS_FIELDS),
        ],
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
