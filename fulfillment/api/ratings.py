"""The ratings of a workflow."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import urlencode
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import results
from fulfillment.api.base import (
    ApiView,
    answers,
    checked_query,
    find_workflow,
    from_cursor,
    to_cursor,
)
from fulfillment.errors import InvalidFields
from fulfillment.exports import text

PARQUET_TYPE = "application/vnd.apache.parquet"
_TAKES_GZIP = re.compile(r"\b(?:x-)?gzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))", re.IGNORECASE)


class RatingsView(ApiView):
    """The ratings of a workflow."""

    @extend_schema(
        operation_id="list_ratings",
        parameters=[
            schema.RatingQuery,
            OpenApiParameter(
                name="X-Next-Cursor",
                location=OpenApiParameter.HEADER,
                response=[200],
                description="Cursor of the next page; absent on the last one.",
            ),
        ],
        responses={
            **answers(schema.RatingShape, 200, 404, 422, media_type=bodies.NDJSON_TYPES[0]),
            (200, "text/csv"): OpenApiTypes.STR,
            (200, PARQUET_TYPE): OpenApiTypes.BINARY,
        },
    )
    def get(self, request: Request, public_id: str) -> HttpResponseBase:
        """Stream a page of records, or all, in input order: JSON Lines, CSV or Parquet."""
        asked = checked_query(request, schema.RatingQuery)
        after = from_cursor("r", asked["cursor"]) if "cursor" in asked else None
        workflow = find_workflow(request, public_id)
        state = asked.get("state")
        if asked["all"]:
            _refuse_limit(request)
            pages = results.everything(workflow, after=after, state=state)
            # The first look now: what is wrong becomes an answer, not a stream that breaks off.
            first = next(pages)
            following = None
        else:
            first = results.page(workflow, after=after, limit=asked["limit"], state=state)
            pages, following = iter(()), first.next
        response = _streamed(request, chain([first], pages), asked["format"], header=after is None)
        if asked["format"] == "parquet":
            name = f'attachment; filename="{workflow.public_id}.parquet"'
            response["Content-Disposition"] = name
        if following is not None:
            cursor = to_cursor("r", following)
            query = urlencode({**request.query_params.dict(), "cursor": cursor})
            response["X-Next-Cursor"] = cursor
            response["Link"] = f'<{request.path}?{query}>; rel="next"'
        return response


def _refuse_limit(request: Request) -> None:
    if "limit" in request.query_params:
        detail = "is for pages; leave it out with all=true"
        raise InvalidFields(
            f"limit {detail}.",
            errors=[{"field": "limit", "code": "not_together", "detail": detail}],
        )


def _streamed(
    request: Request, pages: Iterable[results.Page], kind: str, *, header: bool
) -> StreamingHttpResponse:
    stream: Iterator[bytes]
    if kind == "parquet":
        # Its library is large; a process that writes none never loads it.
        from fulfillment.exports.parquet import parquet

        return StreamingHttpResponse(parquet(pages), content_type=PARQUET_TYPE)
    if kind == "csv":
        stream, media_type = text.delimited(pages, header=header), "text/csv; charset=utf-8"
    else:
        stream, media_type = text.jsonl(pages), bodies.NDJSON_TYPES[0]
    zipped = bool(_TAKES_GZIP.search(request.headers.get("Accept-Encoding", "")))
    response = StreamingHttpResponse(
        text.gzipped(stream) if zipped else stream, content_type=media_type
    )
    response["Vary"] = "Accept-Encoding"
    if zipped:
        response["Content-Encoding"] = "gzip"
    return response
