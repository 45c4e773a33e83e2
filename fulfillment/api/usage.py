"""Accounts of accelerator-seconds."""

from datetime import UTC, timedelta

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import accelerator_use
from fulfillment import usage_schema as schema
from fulfillment.api.base import ApiView, answers, checked_query, json_answer
from fulfillment.authentication import sees_everything
from fulfillment.clock import database_now
from fulfillment.errors import InvalidFields

_SPAN = timedelta(days=1)


class UsageView(ApiView):
    """Who had how much of the accelerators."""

    @extend_schema(
        operation_id="get_usage",
        parameters=[schema.UsageQuery],
        responses=answers(schema.UsageShape, 200, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """Sum accelerator-seconds by rater, owner or workflow: one's own, or for operators all."""
        asked = checked_query(request, schema.UsageQuery)
        until = (asked.get("until") or database_now()).astimezone(UTC)
        since = (asked["from"] if "from" in asked else until - _SPAN).astimezone(UTC)
        if since >= until:
            detail = "must be before until"
            raise InvalidFields(
                f"from {detail}.",
                errors=[{"field": "from", "code": "not_before", "detail": detail}],
            )
        by = asked.get("by", "rater")
        account = accelerator_use.read(
            since,
            until,
            by=by,
            owner=None if sees_everything(request) else request.user.username,
            limit=asked.get("limit", schema.ITEMS),
        )
        return json_answer(schema.account_as_json(account, by))
