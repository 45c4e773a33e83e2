"""What all views share: who may, what was sent, and how answers are told of and paged."""

import re
from typing import Any

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiResponse
from rest_framework.exceptions import ParseError
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from models_admin.api.fields import Form

_READERS = frozenset({"viewer", "submitter", "operator", "admin"})
WRITERS = frozenset({"operator", "admin"})
_MOST_ITEMS = 500


class OperatorWrites(BasePermission):
    """Any token reads, an operator's writes; knows tokens by their `role` only."""

    message = "This needs a token with the role operator or a higher one."

    def has_permission(self, request: Request, view: Any) -> bool:
        allowed = _READERS if request.method in SAFE_METHODS else WRITERS
        return getattr(request.auth, "role", None) in allowed


class View(APIView):
    """A view that tokens may read and operators write."""

    permission_classes = [OperatorWrites]


def answers(shape: Any, status: int, *refusals: int) -> dict[int, Any]:
    """Return what a view may answer, for the schema."""
    refusal = OpenApiResponse(OpenApiTypes.OBJECT, description="Problem document (RFC 9457)")
    return {status: shape, **dict.fromkeys((401, 403, *refusals), refusal)}


def page(request: Request, found: QuerySet[Any]) -> tuple[list[Any], str | None]:
    """Return a page in order of ids, and the cursor of the next: the last id on this one."""
    cursor = request.query_params.get("cursor", "")
    if "\0" in cursor or len(cursor) > 64:
        cursor = ""
    rows = list(found.filter(pk__gt=cursor)[: _MOST_ITEMS + 1])
    return rows[:_MOST_ITEMS], rows[_MOST_ITEMS - 1].pk if len(rows) > _MOST_ITEMS else None


def newest(request: Request, found: QuerySet[Any], most: int) -> tuple[list[Any], str | None]:
    """Return a page of numbered rows, the newest first, and the cursor of the next."""
    cursor = request.query_params.get("cursor", "")
    if re.fullmatch(r"[0-9]{1,18}", cursor):
        found = found.filter(pk__lt=int(cursor))
    rows = list(found.order_by("-pk")[: most + 1])
    return rows[:most], str(rows[most - 1].pk) if len(rows) > most else None


def given_by(form: type[Form], request: Request) -> dict[str, Any]:
    """Return the checked body of a request."""
    try:
        data = request.data
    except RecursionError as error:
        raise ParseError("The body is nested too deeply.") from error
    checked = form(data=data)
    checked.is_valid(raise_exception=True)
    return dict(checked.validated_data)


def actor(request: Request) -> str:
    """Return who asks, for the log."""
    return str(request.user)
