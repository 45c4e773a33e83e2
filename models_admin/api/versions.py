"""Views of the versions of a model."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import services
from models_admin.api.access import View, actor, answers
from models_admin.clock import database_now
from models_admin.models import ModelVersion


class VersionShape(serializers.ModelSerializer[ModelVersion]):
    """A version of a model that was seen."""

    state = serializers.CharField(
        help_text="Of a hosted model: candidate, serving, retiring, retired or failed"
    )

    class Meta:
        model = ModelVersion
        fields = (
            *("version", "state", "reason", "checkpoint", "loader", "serving", "replicas"),
            *("first_seen_at", "changed_at"),
        )


class VersionList(serializers.Serializer[Any]):
    """Versions of a model, the newest first."""

    items = VersionShape(many=True)
    next = serializers.CharField(allow_null=True)


class ModelVersionsView(View):
    """Versions of a model."""

    @extend_schema(operation_id="list_model_versions", responses=answers(VersionList, 200, 404))
    def get(self, request: Request, model_id: str) -> Response:
        """List the versions that were seen of a model, the newest first."""
        model = services.find_model(model_id)
        found = model.versions.order_by("-first_seen_at", "-pk")
        return Response({"items": VersionShape(found, many=True).data, "next": None})


class ModelVersionRetireView(View):
    """The end of an old version."""

    @extend_schema(
        operation_id="retire_model_version",
        request=None,
        responses=answers(VersionShape, 200, 404, 409),
    )
    def post(self, request: Request, model_id: str, version: str) -> Response:
        """End an old version's replicas, whatever work waits for it.

        That work is ended by retiring the rater version that is pinned to it.
        """
        retired = services.retire_version(
            model_id, version, now=database_now(), actor=actor(request)
        )
        return Response(VersionShape(retired).data)
