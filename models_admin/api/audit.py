"""The view of who did what."""

import re

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin.api.access import View, answers
from models_admin.api.shapes import AuditList, AuditShape
from models_admin.models import AuditEntry

_MOST_ENTRIES = 100


class AuditView(View):
    """Who did what to models and pools."""

    @extend_schema(
        operation_id="list_audit",
        parameters=[
            OpenApiParameter("kind", str, description="Of the object: model, pool, …"),
            OpenApiParameter("id", str, description="Id of the object"),
            OpenApiParameter("actor", str, description="User who did it"),
            OpenApiParameter("cursor", str, description="`next` of the page before"),
        ],
        responses=answers(AuditList, 200),
    )
    def get(self, request: Request) -> Response:
        """List acts, the newest first, with what each changed; kept for AIRS_KEEP_AUDIT."""
        found = AuditEntry.objects.order_by("-pk")
        for parameter, column in (("kind", "kind"), ("id", "object_id"), ("actor", "actor")):
            if wanted := request.query_params.get(parameter, "").replace("\0", ""):
                found = found.filter((column, wanted))
        cursor = request.query_params.get("cursor", "")
        if re.fullmatch(r"[0-9]{1,18}", cursor):
            found = found.filter(pk__lt=int(cursor))
        rows = list(found[: _MOST_ENTRIES + 1])
        items = rows[:_MOST_ENTRIES]
        following = str(items[-1].pk) if len(rows) > _MOST_ENTRIES else None
        return Response({"items": AuditShape(items, many=True).data, "next": following})
