"""The archive: why a row would hit or miss, purging it, and how stale it is."""

import re
from collections.abc import Mapping
from typing import Any

import orjson
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import archive_schema as schema
from fulfillment import explaining, purging, staleness
from fulfillment.api.base import (
    ApiView,
    answers,
    checked_body,
    checked_query,
    from_cursor,
    json_answer,
    to_cursor,
)
from fulfillment.authentication import IsOperator, IsViewer
from fulfillment.clock import database_now
from fulfillment.errors import InvalidFields, NotFound
from fulfillment.explaining import Question
from fulfillment.formats import Refused
from fulfillment.formats.ndjson import read_row
from fulfillment.models import Purge

_PURGE_ID = re.compile(r"prg_[0-9a-f]{32}")
_MOST_LISTED = 100


class ArchiveExplainView(ApiView):
    """What the archive has for a row."""

    writes = IsViewer

    @extend_schema(
        operation_id="explain_archive",
        parameters=[schema.ExplainQuery],
        responses=answers(schema.ExplanationShape, 200, 404, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """Say what a row is known by, which ratings there are, and what it would get now."""
        fields = dict(checked_query(request, schema.ExplainQuery))
        if "context" in fields:
            fields["context"] = _object(fields["context"])
        return _explained(fields)

    @extend_schema(
        operation_id="explain_archive_row",
        request=schema.ExplainBody,
        responses=answers(schema.ExplanationShape, 200, 400, 404, 415, 422),
    )
    def post(self, request: Request) -> HttpResponse:
        """Say the same of a row in the body; nothing is stored."""
        return _explained(checked_body(request, schema.ExplainBody))


class ArchivePurgesView(ApiView):
    """All purges."""

    reads = IsOperator

    @extend_schema(operation_id="list_purges", responses=answers(schema.PurgeList, 200, 422))
    def get(self, request: Request) -> HttpResponse:
        """List purges, newest first."""
        asked = bodies.query(request, known=["cursor"])
        found = Purge.objects.order_by("-pk")
        if "cursor" in asked:
            found = found.filter(pk__lt=from_cursor("p", asked["cursor"]))
        page = list(found[: _MOST_LISTED + 1])
        more = len(page) > _MOST_LISTED
        return json_answer(
            {
                "items": [schema.purge_as_json(purge) for purge in page[:_MOST_LISTED]],
                "next": to_cursor("p", page[_MOST_LISTED - 1].pk) if more else None,
            }
        )


class ArchivePurgeView(ApiView):
    """Ordering a purge."""

    writes = IsOperator

    @extend_schema(
        operation_id="purge_archive",
        request=schema.PurgeForm,
        responses={
            **answers(schema.PurgeShape, 200, 400, 415, 422),
            (202, bodies.JSON_TYPE): schema.PurgeShape,
        },
    )
    def post(self, request: Request) -> HttpResponse:
        """Erase ratings, or count them: 200 when that is done, 202 while it goes on."""
        given = checked_body(request, schema.PurgeForm)
        now = database_now()
        purge = purging.begin(
            purging.Criteria(**{name: v for name, v in given.items() if name != "dry_run"}),
            dry_run=given["dry_run"],
            actor=str(request.user.username),
            now=now,
        )
        purge = purging.advance(purge.pk, now=now, most_steps=purging.STEPS_IN_CALL)
        return json_answer(
            schema.purge_as_json(purge),
            status=200 if purge.finished_at else 202,
            headers={"Location": f"/api/v1/archive/purges/{purge.public_id}"},
        )


class ArchivePurgeStateView(ApiView):
    """One purge."""

    reads = IsOperator

    @extend_schema(operation_id="get_purge", responses=answers(schema.PurgeShape, 200, 404))
    def get(self, request: Request, purge_id: str) -> HttpResponse:
        """Show how far a purge is."""
        bodies.query(request, known=())
        if not _PURGE_ID.fullmatch(purge_id):
            raise NotFound("There is no such purge.")
        return json_answer(schema.purge_as_json(purging.find(purge_id)))


class ArchiveStalenessView(ApiView):
    """How stale the archive is."""

    @extend_schema(
        operation_id="get_archive_staleness",
        parameters=[schema.StalenessQuery],
        responses=answers(schema.StalenessShape, 200, 404, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """Show how archived scores differ, by age, from what their rater version says now."""
        return json_answer(staleness.report(checked_query(request, schema.StalenessQuery)["rater"]))


def _explained(fields: Mapping[str, Any]) -> HttpResponse:
    uses = {name: fields[name] for name in ("max_age_s", "bypass") if name in fields}
    row = {name: v for name, v in fields.items() if name not in {"rater", *uses}}
    return json_answer(
        explaining.explain(
            Question(rater=fields["rater"], item=_checked(row), **uses), now=database_now()
        )
    )


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row as intake would take it, or raise InvalidFields as intake would refuse it."""
    checked = read_row(1, orjson.dumps(row))
    if isinstance(checked, Refused):
        raise InvalidFields(
            f"This row would be refused: {checked.detail}.",
            code=checked.code,
            errors=[{"line": 1, "code": checked.code, "detail": checked.detail}],
        )
    return checked.item


def _object(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidFields(
            "context is no JSON; send the text of an object.",
            code="invalid_json",
            errors=[{"field": "context", "code": "invalid_json", "detail": str(error)}],
        ) from error
