"""What the requests of a workflow went through: how long they waited, how often they were tried.

Exact for a small workflow. For a large one from a sample of its positions that is always the same
one, spread evenly, so that asking again shows what has changed and nothing else.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from math import sqrt
from typing import Any

from django.db import connection

from fulfillment.models import RatingRequest, Upload, Workflow, request_key
from fulfillment.policy import distributions
from fulfillment.policy.lifecycle import RequestState, Source

SAMPLE = 5_000
"""Requests looked at, at most."""
WAIT_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)
ATTEMPT_BOUNDS = (1.0, 2.0, 3.0, 5.0, 8.0)
_GOLDEN = (sqrt(5) - 1) / 2


def spread(workflow: Workflow, *, now: datetime) -> dict[str, Any]:
    """Return the distributions of waiting times and attempts.

    `waited_s` is from a row's upload to its rating, of rows that the archive did not answer when
    they came; `open_s` the same up to `now` of rows that still wait; `attempts` the tries of rows
    that ended and were tried. An upload's time is known for two days; then the workflow's serves.
    """
    rows, total = _rows(workflow)
    accepted_at = _Acceptance(workflow)
    waited, still, tried = [], [], []
    for key, state, source, attempts, rated_at in rows:
        if state == RequestState.PENDING:
            still.append(_seconds(accepted_at.of(key), now))
        elif attempts:
            tried.append(float(attempts))
        if rated_at is not None and source in {Source.MODEL, Source.COALESCED}:
            waited.append(_seconds(accepted_at.of(key), rated_at))
    return {
        "requests": total,
        "looked_at": len(rows),
        "exact": len(rows) == total,
        "waited_s": _summary(waited, WAIT_BOUNDS_S),
        "open_s": _summary(still, WAIT_BOUNDS_S),
        "attempts": _summary(tried, ATTEMPT_BOUNDS),
    }


def sample(positions: int) -> Sequence[int]:
    """Return the positions that are looked at: all, or one in each of SAMPLE equal stretches.

    Where in its stretch follows the golden ratio: a fixed place would beat with the batch size.
    """
    if positions <= SAMPLE:
        return range(positions)
    stretch = positions / SAMPLE
    # Stretches of less than two positions may share one.
    return sorted({int((i + i * _GOLDEN % 1) * stretch) for i in range(SAMPLE)})


class _Acceptance:
    """When the row at a position was accepted: with its upload, or else with its workflow."""

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow
        uploads = Upload.objects.filter(workflow=workflow).order_by("first_position")
        found = list(uploads.values_list("first_position", "created_at"))
        self._keys = [request_key(workflow.pk, position) for position, _ in found]
        self._times = [created_at for _, created_at in found]

    def of(self, key: int) -> datetime:
        place = bisect_right(self._keys, key)
        return self._times[place - 1] if place else self._workflow.created_at


def _rows(workflow: Workflow) -> tuple[list[tuple[Any, ...]], int]:
    """Return the rows that are looked at, and how many rows there are."""
    first, end = request_key(workflow.pk, 0), request_key(workflow.pk + 1, 0)
    last = (
        RatingRequest.objects.filter(id__gte=first, id__lt=end)
        .order_by("-id")
        .values_list("id", flat=True)
        .first()
    )
    positions = 0 if last is None else last - first + 1
    looked_at = sample(positions)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT id, state, source, attempts, rated_at
            FROM fulfillment_ratingrequest WHERE id = ANY(%s)
            """,
            [[first + position for position in looked_at]],
        )
        rows = cursor.fetchall()
    # Positions of rows that were refused alone are empty.
    return rows, len(rows) if positions <= SAMPLE else positions


def _seconds(start: datetime, end: datetime) -> float:
    return max(0.0, (end - start).total_seconds())


def _summary(values: Sequence[float], bounds: Sequence[float]) -> dict[str, Any] | None:
    found = distributions.summary(values, bounds=bounds)
    if found is None:
        return None
    rounded = {
        name: round(getattr(found, name), 3) for name in ("mean", "p50", "p90", "p99", "max")
    }
    return {"n": found.n, **rounded, "histogram": [asdict(b) for b in found.histogram]}
