"""The ratings of a workflow."""

from collections.abc import Iterator

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
        },
    )
    def get(self, request: Request, public_id: str) -> HttpResponseBase:
        """Stream a page of records in input order, one JSON object a line, or as CSV."""
        asked = checked_query(request, schema.RatingQuery)
        after = from_cursor("r", asked["cursor"]) if "cursor" in asked else None
        page = results.page(
            find_workflow(request, public_id),
            after=after,
            limit=asked["limit"],
            state=asked.get("state"),
        )
        stream: Iterator[bytes]
        if asked["format"] == "csv":
            stream = results.as_csv(page, header=after is None)
            kind = "text/csv; charset=utf-8"
        else:
            stream, kind = results.as_jsonl(page), bodies.NDJSON_TYPES[0]
        response = StreamingHttpResponse(stream, content_type=kind)
        if page.next is not None:
            cursor = to_cursor("r", page.next)
            query = urlencode({**request.query_params.dict(), "cursor": cursor})
            response["X-Next-Cursor"] = cursor
            response["Link"] = f'<{request.path}?{query}>; rel="next"'
        return response
