"""The view of who did what."""

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin.api.access import View, answers, newest
from models_admin.models import AuditEntry

_MOST_ENTRIES = 100


class AuditShape(serializers.ModelSerializer[AuditEntry]):
    """Something that somebody did."""

    id = serializers.CharField(source="object_id", help_text="Of the object")
    detail = serializers.DictField(
        help_text="What changed, by field: [before, after]; of a secret only that it changed"
    )

    class Meta:
        model = AuditEntry
        fields = ("at", "actor", "action", "kind", "id", "detail")


class AuditList(serializers.Serializer[Any]):
    """Acts, the newest first."""

    items = AuditShape(many=True)
    next = serializers.CharField(allow_null=True)


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
        found = AuditEntry.objects.all()
        for parameter, column in (("kind", "kind"), ("id", "object_id"), ("actor", "actor")):
            if wanted := request.query_params.get(parameter, "").replace("\0", ""):
                found = found.filter((column, wanted))
        items, following = newest(request, found, _MOST_ENTRIES)
        return Response({"items": AuditShape(items, many=True).data, "next": following})
