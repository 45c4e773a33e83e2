"""Views of models: registering, changing, starting and stopping them, and their addresses."""

from collections.abc import Mapping
from typing import Any, cast

from django.db.models import Prefetch, QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import services
from models_admin.api.access import View, actor, answers, given_by, page
from models_admin.api.forms import ModelChanges, ModelForm, ResizeForm
from models_admin.api.shapes import ModelList, OneModelShape, SavedModelShape, model_as_json
from models_admin.clock import database_now
from models_admin.directory import directory
from models_admin.errors import InvalidFields
from models_admin.models import ModelConfig, ModelServer
from models_admin.services.rows import named


class AddressShape(serializers.Serializer[Any]):
    """A replica that can be sent to now."""

    key = serializers.CharField()
    url = serializers.CharField()
    version = serializers.CharField()
    window = serializers.IntegerField(help_text="Batches it may hold")
    managed = serializers.BooleanField(help_text="Its window comes from model management")


class AddressList(serializers.Serializer[Any]):
    """Live addresses of a model."""

    items = AddressShape(many=True)
    next = serializers.CharField(allow_null=True)


class ModelsView(View):
    """All models, and registering one."""

    @extend_schema(operation_id="list_models", responses=answers(ModelList, 200))
    def get(self, request: Request) -> Response:
        """List models by id."""
        found, following = page(request, _models().order_by("pk"))
        return Response({"items": [model_as_json(model) for model in found], "next": following})

    @extend_schema(
        operation_id="register_model",
        request=ModelForm,
        responses=answers(SavedModelShape, 201, 400, 409, 422),
    )
    def post(self, request: Request) -> Response:
        """Register a model; the same one again changes nothing."""
        given, warnings = given_by(ModelForm, request), list[str]()
        try:
            model, is_new = services.register_model(
                given.pop("id"),
                now=database_now(),
                actor=actor(request),
                warn=warnings.append,
                **_fields(given),
            )
        except InvalidFields as refusal:
            raise _named_as_sent(refusal) from refusal
        return Response(
            {**_shown(model.pk), "warnings": warnings},
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/models/{model.pk}"},
        )


class ModelView(View):
    """One model."""

    @extend_schema(operation_id="get_model", responses=answers(OneModelShape, 200, 404))
    def get(self, request: Request, model_id: str) -> Response:
        """Show a model and its replicas."""
        return Response(_shown(model_id))

    @extend_schema(
        operation_id="change_model",
        request=ModelChanges,
        responses=answers(SavedModelShape, 200, 400, 404, 409, 422),
    )
    def patch(self, request: Request, model_id: str) -> Response:
        """Change settings of a model; running replicas keep theirs until a restart."""
        given, warnings = given_by(ModelChanges, request), list[str]()
        try:
            services.update_model(
                model_id,
                now=database_now(),
                actor=actor(request),
                warn=warnings.append,
                **_fields(given),
            )
        except InvalidFields as refusal:
            raise _named_as_sent(refusal) from refusal
        return Response({**_shown(model_id), "warnings": warnings})

    @extend_schema(operation_id="remove_model", responses=answers(None, 204, 404, 409))
    def delete(self, request: Request, model_id: str) -> Response:
        """Remove a model that is not started, with its versions."""
        services.remove_model(model_id, actor=actor(request))
        return Response(status=204)


class ModelStartView(View):
    """Starting a model."""

    @extend_schema(
        operation_id="start_model", request=None, responses=answers(OneModelShape, 202, 404, 409)
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Want the model's replicas to live."""
        services.start_model(model_id, now=database_now(), actor=actor(request))
        return Response(_shown(model_id), status=202)


class ModelStopView(View):
    """Stopping a model."""

    @extend_schema(
        operation_id="stop_model", request=None, responses=answers(OneModelShape, 202, 404, 409)
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Drain and end the model's replicas."""
        services.stop_model(model_id, now=database_now(), actor=actor(request))
        return Response(_shown(model_id), status=202)


class ModelRestartView(View):
    """Restarting a model."""

    @extend_schema(
        operation_id="restart_model", request=None, responses=answers(OneModelShape, 202, 404, 409)
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Replace the model's replicas, one at a time while others serve."""
        services.restart_model(model_id, now=database_now(), actor=actor(request))
        return Response(_shown(model_id), status=202)


class ModelResizeView(View):
    """Resizing a model."""

    @extend_schema(
        operation_id="resize_model",
        request=ResizeForm,
        responses=answers(OneModelShape, 202, 400, 404, 409, 422),
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Want another number of replicas."""
        given = given_by(ResizeForm, request)
        services.resize_model(model_id, given["replicas"], now=database_now(), actor=actor(request))
        return Response(_shown(model_id), status=202)


class ModelAddressView(View):
    """Where a model can be reached."""

    @extend_schema(operation_id="get_model_address", responses=answers(AddressList, 200, 404))
    def get(self, request: Request, model_id: str) -> Response:
        """List the addresses that can be sent to now; none while no replica is ready."""
        services.find_model(model_id)
        live = [r for r in directory.replicas(database_now()) if r.model_id == model_id]
        items = [
            {
                "key": replica.key,
                "url": replica.address,
                "version": replica.shown_version,
                "window": replica.window,
                "managed": replica.managed,
            }
            for replica in live
        ]
        return Response({"items": items, "next": None})


def _models() -> QuerySet[ModelConfig]:
    return ModelConfig.objects.select_related("health", "tuned_window").prefetch_related(
        Prefetch("servers", ModelServer.objects.order_by("ordinal", "agent"))
    )


def _shown(model_id: str) -> dict[str, Any]:
    return model_as_json(named(_models(), model_id, "model"), alone_at=database_now())


def _fields(given: Mapping[str, Any]) -> services.ModelFields:
    """Return the fields as services name them: `replicas.min` is `replicas_min`."""
    flat = {name: value for name, value in given.items() if name != "replicas"}
    bounds = given.get("replicas", {})
    return cast(
        services.ModelFields, flat | {f"replicas_{name}": value for name, value in bounds.items()}
    )


def _named_as_sent(refusal: InvalidFields) -> InvalidFields:
    """Name the fields as the client did."""
    errors = [
        {**error, "field": error["field"].replace("replicas_", "replicas.")}
        for error in refusal.errors
    ]
    return InvalidFields(
        refusal.detail.replace("replicas_", "replicas."), code=refusal.code, errors=errors
    )
