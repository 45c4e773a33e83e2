"""Results: the ratings of a workflow, page by page in input order, while it runs or after.

A page is a list of request ids found by one short keyset query; its records are then read in small
steps, each its own statement, so that neither memory nor a pinned snapshot grows with an export.
What a finished request says never changes; one that still runs is shown as it is when read.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import orjson
from django.db import connection

from fulfillment.models import POSITION_BITS, RatingRequest, Side, Workflow, request_key
from fulfillment.policy.lifecycle import BatchState, RequestState, Source

MAX_PAGE = 10_000
STEP_ROWS = 1_000
"""Records read in one statement."""

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
    "rater_version",
    "warnings",
)
"""Fields of a record, and the columns of its CSV, in this order."""

_SELECT = """
    SELECT id, request_id, query_id, result_id, side, state, score, label, output::text, source,
           error, attempts, rated_at, warnings
    FROM fulfillment_ratingrequest WHERE id = ANY(%s) ORDER BY id
"""
# Dictionaries, because a look-up of an enum costs more than all else of a record.
_SIDES = {side.value: side.label for side in Side}
_STATES = {state.value: state.name for state in RequestState}
_SOURCES = {source.value: source.name.lower() for source in Source}
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
        rows = RatingRequest.objects.filter(id__gte=start, id__lt=end)
        if state is not None:
            rows = rows.filter(state=RequestState[state])
        found = list(rows.order_by("id").values_list("id", flat=True)[: limit + 1])
    more = len(found) > limit
    ids = found[:limit]
    return Page(workflow=workflow, ids=ids, state=state, next=_position(ids[-1]) if more else None)


def records(of: Page) -> Iterator[dict[str, Any]]:
    """Yield the page's records as dictionaries of FIELDS, ready for orjson."""
    version = f"{of.workflow.rater_id}@{of.workflow.rater_version.number}"
    for ids in _batched(of.ids, STEP_ROWS):
        with connection.cursor() as cursor:
            cursor.execute(_SELECT, [ids])
            step = cursor.fetchall()
        pending = [row[0] for row in step if row[_STATE] == RequestState.PENDING]
        live: Mapping[int, str] = {}
        if pending:
            live = _live(of.workflow, start=pending[0], end=pending[-1] + 1)
        for row in step:
            record = _record(row, live, of.workflow.created_at, version)
            if of.state is None or record["state"] == of.state:
                yield record


def as_jsonl(of: Page) -> Iterator[bytes]:
    """Yield the page as lines of JSON."""
    for lines in _batched(records(of), STEP_ROWS):
        yield b"".join(
            orjson.dumps(line, option=orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE)
            for line in lines
        )


def as_csv(of: Page, *, header: bool) -> Iterator[bytes]:
    """Yield the page as CSV whose text cells no spreadsheet takes for a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    if header:
        writer.writerow(FIELDS)
    for step in _batched(records(of), STEP_ROWS):
        writer.writerows([_cell(record[field]) for field in FIELDS] for record in step)
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    if rest := text.getvalue():  # the header of a page without records
        yield rest.encode()


def _record(
    row: Sequence[Any], live: Mapping[int, str], accepted_at: datetime, version: str
) -> dict[str, Any]:
    (key, request_id, query_id, result_id, side, state, score, label, output) = row[:9]
    (source, error, attempts, rated_at, warnings) = row[9:]
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
        "age_s": _age_s(source, rated_at, accepted_at),
        "rater_version": version,
        "warnings": warnings or [],
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
    states = {
        RUNNING: [BatchState.LEASED],
        RETRYING: [BatchState.DELAYED],
        None: [BatchState.LEASED, BatchState.DELAYED],
    }[only]
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT p.position, b.state
            FROM fulfillment_batch b
            CROSS JOIN LATERAL unnest(b.positions, b.item_of) AS p(position, item)
            WHERE b.workflow_id = %(workflow)s
              AND b.state <> %(done)s
              AND b.state = ANY(%(states)s)
              AND p.position BETWEEN %(first)s AND %(last)s
              AND (b.open_mask >> p.item::int) & 1 = 1
              AND (b.state = %(delayed)s OR b.started_at IS NOT NULL)
            ORDER BY p.position
            LIMIT %(limit)s
            """,
            {
                "workflow": workflow.pk,
                "done": int(BatchState.DONE),
                "states": [int(state) for state in states],
                "delayed": int(BatchState.DELAYED),
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


# Where a spreadsheet may start a formula: also behind blanks, and with full-width signs. A leading
# apostrophe is doubled, so that taking one away gives the text back.
_FORMULA = re.compile(r"'|[\t\r\n]|\s*[=+\-@＝＋－＠]")  # noqa: RUF001


def safe_text(text: str) -> str:
    """Return a text cell that no spreadsheet evaluates; drop one leading apostrophe to undo it."""
    return f"'{text}" if _FORMULA.match(text) else text


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case str():
            return safe_text(value)
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case int():
            return str(value)
        case datetime():
            return orjson.dumps(value, option=orjson.OPT_UTC_Z).decode().strip('"')
        case []:
            return ""
        case _:
            return orjson.dumps(value).decode()


def _batched(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of at most `size` values."""
    iterator = iter(values)
    while step := list(islice(iterator, size)):
        yield step
