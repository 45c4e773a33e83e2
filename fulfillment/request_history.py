"""What was asked of the service in a span of time: workflows, and which ratings they asked for.

Read in pages by key, each a statement of its own: no snapshot is held, and what is erased meanwhile
is left out. Which ratings were asked for is read of one in `one_in` fingerprints, the same ones in
every workflow, so that what coincides stays so.
"""

from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Final, NamedTuple

from django.db import connection

from fulfillment.models import request_key
from fulfillment.policy.freshness import Look
from fulfillment.policy.lifecycle import RequestState, Source, WorkflowState

_PAGE: Final = 5_000
_SPAN: Final = 200_000
"""Requests looked at in one statement."""


class AskedWorkflow(NamedTuple):
    """One workflow as it was submitted, and what became of it."""

    id: int
    created_at: datetime
    rater_id: str
    owner: str
    priority: int
    best_effort: bool
    trigger: str
    batch_size: int
    allowed_s: float
    """Until its deadline."""
    positions: int
    """Of its requests, cancelled ones included."""
    requests: int
    """Without those that were cancelled."""
    computed: int
    """Rated by a model call of its own, or failed."""
    failed: int
    model_calls: int
    call_s: float
    """Seconds of its calls, waits in a server's queue included."""


class AskedRating(NamedTuple):
    """One request."""

    rating: int
    """Equal for equal fingerprints: 64 bits of it."""
    look: int | None
    """What the archive said at intake, as `freshness.Look`; None where it was not noted."""
    source: int | None


def asked(
    since: datetime, until: datetime, *, without: Collection[str] = ()
) -> Iterator[AskedWorkflow]:
    """Yield workflows that were submitted in the span, in the order of their ids."""
    after = 0
    while True:
        with connection.cursor() as cursor:
            cursor.execute(
                """
                SELECT w.id, w.created_at, w.rater_id, w.owner, w.priority, w.best_effort,
                       w.trigger, w.batch_size,
                       extract(epoch FROM w.deadline_at
                                          - coalesce(w.round_at, w.created_at))::float8,
                       w.next_position, s.received - s.cancelled, s.from_model + s.failed,
                       s.failed, s.model_calls, s.accelerator_seconds
                FROM fulfillment_workflow w
                JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
                WHERE w.id > %s AND w.created_at >= %s AND w.created_at < %s
                  AND w.state <> %s AND w.owner <> ALL(%s) AND s.received > s.cancelled
                ORDER BY w.id LIMIT %s
                """,
                [after, since, until, WorkflowState.RECEIVING, list(without), _PAGE],
            )
            page = [AskedWorkflow(*row) for row in cursor.fetchall()]
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1].id


def ratings(workflow: AskedWorkflow, *, one_in: int) -> Iterator[AskedRating]:
    """Yield one in so many requests of a workflow in input order, without cancelled ones.

    A workflow of which none is chosen yields its first one.
    """
    any_chosen = False
    for first in range(0, workflow.positions, _SPAN):
        for rating in _page(workflow, first, min(first + _SPAN, workflow.positions), one_in):
            any_chosen = True
            yield rating
    if not any_chosen:
        yield from _page(workflow, 0, workflow.positions, 1, limit=1)


def _page(
    workflow: AskedWorkflow, first: int, end: int, one_in: int, *, limit: int | None = None
) -> list[AskedRating]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT rating, look, source
            FROM (
                SELECT id, ('x' || translate(left(fingerprint::text, 18), '-', ''))::bit(64)::bigint
                           AS rating, look, source
                FROM fulfillment_ratingrequest
                WHERE id >= %s AND id < %s AND state <> %s
            ) AS r
            WHERE abs(rating %% %s) = 0
            ORDER BY id LIMIT %s
            """,
            [
                request_key(workflow.id, first),
                request_key(workflow.id, end),
                RequestState.CANCELLED,
                one_in,
                limit,
            ],
        )
        return [AskedRating(*row) for row in cursor.fetchall()]


def was_hit(rating: AskedRating) -> bool:
    """Say whether the archive had it when it was asked for."""
    if rating.look is not None:
        return rating.look == Look.HIT
    return rating.source == Source.ARCHIVE
