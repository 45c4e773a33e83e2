"""The health of external models: its shape, and checking it now."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import external, services
from models_admin.api.access import View, answers
from models_admin.clock import database_now
from models_admin.errors import Conflict
from models_admin.models import ModelConfig, ModelKind, health_of


class HealthShape(serializers.Serializer[Any]):
    """Whether an external model is up, as was found when its server was last asked."""

    state = serializers.ChoiceField(
        choices=["up", "down", "unknown"],
        help_text="down: it gets one call at a time; unknown: its server does not tell",
    )
    detail = serializers.CharField(help_text="What the last check found")
    checked_at = serializers.DateTimeField()
    changed_at = serializers.DateTimeField(help_text="Since when it is in this state")
    failures = serializers.IntegerField(help_text="Checks in a row that were bad")
    latency_s = serializers.FloatField(help_text="Of the last check")


def health_as_json(model: ModelConfig) -> dict[str, Any] | None:
    """Return what clients see of a model's health.

    None of a hosted one, and until the server of a new or changed one was asked.
    """
    health = health_of(model) if model.kind == ModelKind.EXTERNAL else None
    if health is None:
        return None
    return {
        "state": health.word,
        "detail": health.detail,
        "checked_at": health.checked_at,
        "changed_at": health.changed_at,
        "failures": health.failures,
        "latency_s": health.latency_s,
    }


class ModelCheckView(View):
    """Checking an external model."""

    @extend_schema(
        operation_id="check_model", request=None, responses=answers(HealthShape, 200, 404, 409)
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Ask the server of an external model how it is; one that was just asked is not again."""
        model = services.find_model(model_id)
        if model.kind != ModelKind.EXTERNAL:
            raise Conflict(
                f"Model {model_id!r} is hosted: its agent watches its replicas.",
                code="not_external",
            )
        external.check_model(model_id, database_now())
        health = health_as_json(services.find_model(model_id))
        if health is None:
            raise Conflict(
                f"Model {model_id!r} was changed while its server was asked: check it again.",
                code="model_changed",
            )
        return Response(health)
