"""Results: the ratings of a workflow in input order, while it runs or after.

A page is a list of request ids found by short keyset queries; its records are then read in small
steps, each its own statement, so that neither memory nor a pinned snapshot grows with an export.
What a finished request says never changes; one that still runs is shown as it is when read. How
records become bytes is told in fulfillment.exports.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

import orjson
from django.db import connection

from fulfillment.models import POSITION_BITS, RatingRequest, Side, Workflow, request_key
from fulfillment.policy.freshness import Look
from fulfillment.policy.lifecycle import BatchState, RequestState, Source

T = TypeVar("T")

MAX_PAGE = 10_000
STEP_ROWS = 1_000
"""Records read in one statement."""
SPAN = 100_000
"""Requests among which one statement looks for those of a state: no index has the state."""

RUNNING = "RUNNING"
RETRYING = "RETRYING"
STATES = (*(state.name for state in RequestState), RUNNING, RETRYING)
"""What a record's `state` may say: the stored ones, and two that are read off the open batches."""

FIELDS = (
    "request_id",
    "query_id",
    "result_id",
    "side",
    "state",
    "score",
    "label",
    "output",
    "source",
    "error",
    "attempts",
    "rated_at",
    "age_s",
    "look",
    "rated_by",
    "rater_version",
    "warnings",
    "extra",
)
"""Fields of a record, and the columns of its CSV, in this order."""

_SELECT = """
    SELECT r.id, r.request_id, r.query_id, r.result_id, r.side, r.state, r.score, r.label,
           r.output::text, r.source, r.error, r.attempts, r.rated_at, r.warnings, r.look,
           r.rated_by_id, w.public_id, r.extra::text
    FROM fulfillment_ratingrequest r LEFT JOIN fulfillment_workflow w ON w.id = r.rated_by_id
    WHERE r.id = ANY(%s) ORDER BY r.id
"""
# Dictionaries, because a look-up of an enum costs more than all else of a record.
_SIDES = {side.value: side.label for side in Side}
_STATES = {state.value: state.name for state in RequestState}
_SOURCES = {source.value: source.name.lower() for source in Source}
_LOOKS = {look.value: look.name.lower() for look in Look}
_STATE = 5
"""Where the state stands in a row of _SELECT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The requests of a page, by id; `next` is the last position of it if there are more now."""

    workflow: Workflow
    ids: Sequence[int]
    state: str | None
    next: int | None


def page(workflow: Workflow, *, after: int | None, limit: int, state: str | None) -> Page:
    """Return the page of at most `limit` requests behind position `after`.

    With a `state`, a request that leaves the state before it is read is not shown.
    """
    start = request_key(workflow.pk, after + 1 if after is not None else 0)
    end = request_key(workflow.pk + 1, 0)
    if state in {RUNNING, RETRYING}:
        live = _live(workflow, start=start, end=end, limit=limit + 1, only=state)
        found = sorted(live)
    else:
        found = _found(start, end, limit=limit + 1, state=state)
    more = len(found) > limit
    ids = found[:limit]
    return Page(workflow=workflow, ids=ids, state=state, next=_position(ids[-1]) if more else None)


def records(of: Page) -> Iterator[dict[str, Any]]:
    """Yield the page's records as dictionaries of FIELDS, ready for orjson."""
    version = f"{of.workflow.rater_id}@{of.workflow.rater_version.number}"
    for ids in batched(of.ids, STEP_ROWS):
        with connection.cursor() as cursor:
            cursor.execute(_SELECT, [ids])
            step = cursor.fetchall()
        pending = [row[0] for row in step if row[_STATE] == RequestState.PENDING]
        live: Mapping[int, str] = {}
        if pending:
            live = _live(of.workflow, start=pending[0], end=pending[-1] + 1)
        for row in step:
            record = _record(row, live, of.workflow, version)
            if of.state is None or record["state"] == of.state:
                yield record


def everything(workflow: Workflow, *, after: int | None, state: str | None) -> Iterator[Page]:
    """Yield the pages behind position `after` up to the end, each found when it is asked for."""
    while True:
        of = page(workflow, after=after, limit=MAX_PAGE, state=state)
        yield of
        if of.next is None:
            return
        after = of.next


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` values."""
    iterator = iter(values)
    while step := list(islice(iterator, size)):
        yield step


def _found(start: int, end: int, *, limit: int, state: str | None) -> list[int]:
    """Return up to `limit` ids from `start` to below `end`, of one stored state if it is given."""
    rows = RatingRequest.objects.filter(id__gte=start, id__lt=end).order_by("id")
    ids = rows.values_list("id", flat=True)
    if state is None:
        return list(ids[:limit])
    ids = ids.filter(state=RequestState[state])
    last = rows.values_list("id", flat=True).last()
    found: list[int] = []
    while last is not None and start <= last and len(found) < limit:
        found += ids.filter(id__gte=start, id__lt=start + SPAN)[: limit - len(found)]
        start += SPAN
    return found


def _record(
    row: Sequence[Any], live: Mapping[int, str], workflow: Workflow, version: str
) -> dict[str, Any]:
    (key, request_id, query_id, result_id, side, state, score, label, output) = row[:9]
    (source, error, attempts, rated_at, warnings, look, rated_by_id, rated_by, extra) = row[9:]
    if rated_by_id is None and source is not None:
        rated_by = workflow.public_id
    return {
        "request_id": request_id,
        "query_id": query_id,
        "result_id": result_id,
        "side": _SIDES.get(side),
        "state": live.get(key) or _STATES[state],
        "score": score,
        "label": label,
        "output": None if output is None else orjson.Fragment(output),
        "source": _SOURCES.get(source),
        "error": error,
        "attempts": attempts,
        "rated_at": rated_at,
        "age_s": _age_s(source, rated_at, workflow.created_at),
        "look": _LOOKS.get(look),
        "rated_by": rated_by,
        "rater_version": version,
        "warnings": warnings or [],
        "extra": None if extra is None else orjson.Fragment(extra),
    }


def _age_s(source: int | None, rated_at: datetime | None, accepted_at: datetime) -> int | None:
    """Return how old an archive rating was when its request was accepted."""
    if source != Source.ARCHIVE or rated_at is None:
        return None
    return max(0, int((accepted_at - rated_at).total_seconds()))


def _live(
    workflow: Workflow, *, start: int, end: int, limit: int | None = None, only: str | None = None
) -> dict[int, str]:
    """Return the ids from `start` to below `end` that are RUNNING or RETRYING now.

    RUNNING is an open item of a batch that an executor has taken over, RETRYING one of a batch
    that tries again later: the same as in the counts of fulfillment.progress.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            # Constant states, one each: so both look-ups use the index of what is out, not that of
            # all open batches of the workflow.
            """
            SELECT p.position, b.state
            FROM (
                SELECT state, positions, item_of, open_mask FROM fulfillment_batch
                WHERE state = 1 AND started_at IS NOT NULL AND workflow_id = %(workflow)s
                  AND %(running)s
                UNION ALL
                SELECT state, positions, item_of, open_mask FROM fulfillment_batch
                WHERE state = 3 AND workflow_id = %(workflow)s AND %(retrying)s
            ) AS b
            CROSS JOIN LATERAL unnest(b.positions, b.item_of) AS p(position, item)
            WHERE p.position BETWEEN %(first)s AND %(last)s
              AND (b.open_mask >> p.item::int) & 1 = 1
            ORDER BY p.position
            LIMIT %(limit)s
            """,
            {
                "workflow": workflow.pk,
                "running": only in {None, RUNNING},
                "retrying": only in {None, RETRYING},
                "first": _position(start),
                "last": _position(end - 1),
                "limit": limit,
            },
        )
        return {
            request_key(workflow.pk, position): RUNNING if state == BatchState.LEASED else RETRYING
            for position, state in cursor.fetchall()
        }


def _position(key: int) -> int:
    return key & ((1 << POSITION_BITS) - 1)
