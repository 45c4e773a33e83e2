"""The REST API of model management: pools and models.

Everybody with a token reads, operators write. Secrets go in and never come out. Views check types
and unknown fields, call one service and show what it returns; errors become problem documents in
the site.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from django.db.models import Prefetch, QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiParameter,
    OpenApiResponse,
    extend_schema,
    extend_schema_field,
)
from rest_framework import serializers
from rest_framework.exceptions import ParseError, ValidationError
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from models_admin import secrets, services
from models_admin.clock import database_now
from models_admin.directory import directory
from models_admin.errors import InvalidFields
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelKind,
    ModelServer,
    Outcome,
    PoolKind,
    PoolOutlook,
    Protocol,
    RebalanceDecision,
    Rebalancing,
)
from models_admin.policy.reconcile import LIVE, ServerState

_READERS = frozenset({"viewer", "submitter", "operator", "admin"})
_WRITERS = frozenset({"operator", "admin"})
_MOST_ITEMS = 500
_MOST_DECISIONS = 100
_REPLICAS = ("min", "default", "max")


# Shapes


def _typed(data: Any, kind: type, words: str) -> None:
    """Refuse another JSON type: values are never coerced (true is no number, "1" neither)."""
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValidationError(f"Must be {words}.", code="bad_type")


class _Text(serializers.CharField):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: Any) -> str:
        _typed(data, str, "a string")
        return super().to_internal_value(data)


class _Whole(serializers.IntegerField):
    def to_internal_value(self, data: Any) -> int:
        _typed(data, int, "a whole number")
        return super().to_internal_value(data)


class _Number(serializers.FloatField):
    def to_internal_value(self, data: Any) -> float:
        _typed(data, int | float, "a number")  # type: ignore[arg-type]
        return super().to_internal_value(data)


class _Switch(serializers.BooleanField):
    def to_internal_value(self, data: Any) -> bool:
        _typed(data, bool, "true or false")
        return super().to_internal_value(data)


class _Choice(serializers.ChoiceField):
    def to_internal_value(self, data: Any) -> Any:
        _typed(data, str, "a string")
        return super().to_internal_value(data)


class _Object(serializers.JSONField):
    def to_internal_value(self, data: Any) -> Any:
        _typed(data, dict, "an object")
        return super().to_internal_value(data)


@extend_schema_field(OpenApiTypes.STR)
class _Path(serializers.Field[str, Any, str, Any]):
    """Text that the checkpoint's own rule judges, control characters and all."""

    def to_internal_value(self, data: Any) -> str:
        _typed(data, str, "a string")
        return str(data)

    def to_representation(self, value: str) -> str:
        return value


class _Form(serializers.Serializer[Any]):
    """A body whose unknown fields are refused by name."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping) and (unknown := set(data) - set(self.fields)):
            detail = f"The fields are {', '.join(sorted(self.fields))}."
            raise ValidationError(
                {
                    str(name)[:100]: [serializers.ErrorDetail(detail, code="unknown_field")]
                    for name in sorted(unknown, key=str)
                }
            )
        return super().to_internal_value(data)


class ReplicaBounds(_Form):
    """How many replicas there may be, and how many there are at first."""

    min = _Whole(required=False)
    default = _Whole(required=False)
    max = _Whole(required=False)


class ModelChanges(_Form):
    """Settings of a model that may change; running replicas take them at their next restart."""

    protocol = _Choice(choices=Protocol.choices, required=False)
    url = _Text(required=False, max_length=2048, help_text="Of an external server")
    model_name = _Text(required=False, max_length=256, help_text="What its server calls it")
    api_key = _Text(
        required=False,
        allow_null=True,
        allow_blank=True,
        write_only=True,
        help_text="Sent as bearer token; or env:NAME. Shown as its last characters",
    )
    headers = serializers.DictField(
        child=_Text(), required=False, allow_null=True, help_text="Values like api_key"
    )
    timeout_s = _Number(required=False)
    max_concurrency = _Whole(
        required=False, help_text="Calls an external server may hold; an OIP batch is one"
    )
    sends_priority = _Switch(required=False, help_text="Its server knows OIP priorities")
    version = _Text(
        required=False,
        allow_blank=True,
        max_length=128,
        help_text="External: the version that counts from now on, as its server reports it; "
        "empty: ask the server",
    )
    version_label = _Text(
        required=False,
        allow_blank=True,
        max_length=128,
        help_text="External: your name for what it serves; another name is another archive key",
    )
    pool = _Text(required=False, allow_null=True, max_length=64)
    loader = _Text(required=False, max_length=32)
    checkpoint = _Path(
        required=False, help_text="pkg:PACKAGE/PATH, or a path under AIRS_CHECKPOINT_ROOT"
    )
    serving = _Object(required=False, help_text="Options of the model server")
    devices_per_replica = _Whole(required=False)
    replicas = ReplicaBounds(required=False)
    window = _Whole(required=False, help_text="Batches that a replica may hold")
    pinned = _Switch(
        required=False,
        help_text="The rebalancer leaves its replicas as they are; false also ends the pin that a "
        "resize leaves for an hour",
    )


class ModelForm(ModelChanges):
    """A new model: hosted from a checkpoint, or external at a URL."""

    id = _Text(max_length=64)
    kind = _Choice(choices=ModelKind.choices)


class ResizeForm(_Form):
    """How many replicas are wanted."""

    replicas = _Whole()


class PoolChanges(_Form):
    """Settings of a pool."""

    kind = _Choice(choices=PoolKind.choices, required=False)
    devices = _Whole(required=False, min_value=1, max_value=services.MAX_DEVICES)
    agent = _Text(required=False, max_length=64)
    rebalancing = _Choice(
        choices=Rebalancing.choices,
        required=False,
        help_text="Whether replicas move between its models; dry_run says only what would move",
    )
    notes = _Text(required=False, allow_blank=True, max_length=10_000)


class PoolForm(PoolChanges):
    """A new pool of accelerator devices."""

    id = _Text(max_length=64)


class OutlookShape(serializers.ModelSerializer[PoolOutlook]):
    """What the rebalancer last found of a pool."""

    needs = serializers.DictField(
        child=serializers.FloatField(), help_text="Replicas that each model needs"
    )

    class Meta:
        model = PoolOutlook
        fields = ("at", "needs", "reason", "signal_age_s")


class PoolShape(serializers.ModelSerializer[AcceleratorPool]):
    """A pool."""

    devices_used = serializers.IntegerField(help_text="By started models")
    outlook = OutlookShape(allow_null=True)

    class Meta:
        model = AcceleratorPool
        fields = (
            *("id", "kind", "devices", "devices_used", "agent", "rebalancing", "outlook", "notes"),
        )


class MoveShape(serializers.Serializer[Any]):
    """Another number of replicas for a model."""

    model = serializers.CharField()
    before = serializers.IntegerField()
    after = serializers.IntegerField()


class DecisionShape(serializers.ModelSerializer[RebalanceDecision]):
    """A round of the rebalancer."""

    outcome = serializers.ChoiceField(choices=Outcome.choices)
    moves = MoveShape(many=True)
    needs = serializers.DictField(child=serializers.FloatField(), help_text="Replicas by model")
    targets = serializers.DictField(child=serializers.FloatField(), help_text="Replicas by model")

    class Meta:
        model = RebalanceDecision
        fields = (
            *("id", "at", "mode", "outcome", "applied", "moves", "needs", "targets", "reason"),
            "signal_age_s",
        )


class DecisionList(serializers.Serializer[Any]):
    """Decisions, the newest first."""

    items = DecisionShape(many=True)
    next = serializers.CharField(allow_null=True)


class ServerShape(serializers.ModelSerializer[ModelServer]):
    """One replica."""

    class Meta:
        model = ModelServer
        fields = (
            *("ordinal", "state", "reason", "last_error", "address", "pid", "version", "starts"),
            *("failures", "started_at", "ready_at", "next_start_at", "heartbeat_at"),
            *("busy_seconds", "rows_total", "queue_rows", "agent"),
        )


class WantedReplicas(serializers.Serializer[Any]):
    """Bounds, and what is wanted now."""

    min = serializers.IntegerField()
    default = serializers.IntegerField()
    max = serializers.IntegerField()
    wanted = serializers.IntegerField()
    ready = serializers.IntegerField()


class ModelShape(serializers.Serializer[Any]):
    """A model; secrets show as their last characters."""

    id = serializers.CharField()
    kind = serializers.ChoiceField(choices=ModelKind.choices)
    protocol = serializers.ChoiceField(choices=Protocol.choices)
    state = serializers.ChoiceField(
        choices=["STOPPED", "STARTING", "READY", "DRAINING", "IDLE"],
        allow_null=True,
        help_text="Of a hosted model: READY when a replica serves, IDLE when it is started and has "
        "none for want of work",
    )
    model_name = serializers.CharField()
    version = serializers.CharField()
    version_label = serializers.CharField()
    timeout_s = serializers.FloatField()
    sends_priority = serializers.BooleanField()
    url = serializers.CharField()
    api_key = serializers.CharField(allow_null=True)
    headers = serializers.DictField(child=serializers.CharField())
    max_concurrency = serializers.IntegerField()
    pool = serializers.CharField(allow_null=True)
    loader = serializers.CharField()
    checkpoint = serializers.CharField()
    serving = serializers.JSONField()
    devices_per_replica = serializers.IntegerField()
    replicas = WantedReplicas()
    window = serializers.IntegerField()
    started = serializers.BooleanField()
    pinned = serializers.BooleanField(help_text="The rebalancer leaves it alone")
    pinned_until = serializers.DateTimeField(
        allow_null=True, help_text="The same until then, as it was resized"
    )
    start_up_s = serializers.FloatField(
        allow_null=True, help_text="From start to ready, as its replicas last took"
    )
    servers = ServerShape(many=True)
    created_at = serializers.DateTimeField()
    updated_at = serializers.DateTimeField()


class ModelList(serializers.Serializer[Any]):
    """Models by id."""

    items = ModelShape(many=True)
    next = serializers.CharField(allow_null=True)


class PoolList(serializers.Serializer[Any]):
    """Pools by id."""

    items = PoolShape(many=True)
    next = serializers.CharField(allow_null=True)


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


_SAME = (
    *("id", "kind", "protocol", "model_name", "version_label", "timeout_s", "sends_priority"),
    *("url", "max_concurrency", "loader", "checkpoint", "serving", "devices_per_replica"),
    *("window", "started", "pinned", "pinned_until", "start_up_s"),
)


def model_as_json(model: ModelConfig) -> dict[str, Any]:
    """Return what clients see of a model; its servers are best prefetched."""
    servers = list(model.servers.all())
    return {
        **{name: getattr(model, name) for name in _SAME},
        "version": model.served_version,
        "state": _state(model, servers),
        "api_key": secrets.hint(model.api_key),
        "headers": {name: secrets.hint(sealed) for name, sealed in model.headers.items()},
        "pool": model.pool_id,
        "replicas": {
            **{bound: getattr(model, f"replicas_{bound}") for bound in _REPLICAS},
            "wanted": model.target_replicas,
            "ready": sum(server.state == ServerState.READY for server in servers),
        },
        "servers": ServerShape(servers, many=True).data,
        "created_at": model.created_at,
        "updated_at": model.updated_at,
    }


def _state(model: ModelConfig, servers: list[ModelServer]) -> str | None:
    if model.kind == ModelKind.EXTERNAL:
        return None
    states = {ServerState(server.state) for server in servers}
    if not model.started:
        return "DRAINING" if states & LIVE else "STOPPED"
    if ServerState.READY in states:
        return "READY"
    if model.target_replicas:
        return "STARTING"
    return "DRAINING" if states & LIVE else "IDLE"


# Views


class OperatorWrites(BasePermission):
    """Any token reads, an operator's writes; knows tokens by their `role` only."""

    message = "This needs a token with the role operator or a higher one."

    def has_permission(self, request: Request, view: Any) -> bool:
        allowed = _READERS if request.method in SAFE_METHODS else _WRITERS
        return getattr(request.auth, "role", None) in allowed


class _View(APIView):
    permission_classes = [OperatorWrites]


def _answers(shape: Any, status: int, *refusals: int) -> dict[int, Any]:
    refusal = OpenApiResponse(OpenApiTypes.OBJECT, description="Problem document (RFC 9457)")
    return {status: shape, **dict.fromkeys((401, 403, *refusals), refusal)}


class ModelsView(_View):
    """All models, and registering one."""

    @extend_schema(operation_id="list_models", responses=_answers(ModelList, 200))
    def get(self, request: Request) -> Response:
        """List models by id."""
        found, following = _page(request, _models().order_by("pk"))
        return Response({"items": [model_as_json(model) for model in found], "next": following})

    @extend_schema(
        operation_id="register_model",
        request=ModelForm,
        responses=_answers(ModelShape, 201, 400, 409, 422),
    )
    def post(self, request: Request) -> Response:
        """Register a model; the same one again changes nothing."""
        given = _given(ModelForm, request)
        try:
            model, is_new = services.register_model(
                given.pop("id"), now=database_now(), actor=_actor(request), **_fields(given)
            )
        except InvalidFields as refusal:
            raise _named_as_sent(refusal) from refusal
        return Response(
            _shown(model),
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/models/{model.pk}"},
        )


class ModelView(_View):
    """One model."""

    @extend_schema(operation_id="get_model", responses=_answers(ModelShape, 200, 404))
    def get(self, request: Request, model_id: str) -> Response:
        """Show a model and its replicas."""
        return Response(_shown(services.find_model(model_id)))

    @extend_schema(
        operation_id="change_model",
        request=ModelChanges,
        responses=_answers(ModelShape, 200, 400, 404, 409, 422),
    )
    def patch(self, request: Request, model_id: str) -> Response:
        """Change settings of a model; running replicas keep theirs until a restart."""
        given = _given(ModelChanges, request)
        try:
            model = services.update_model(
                model_id, now=database_now(), actor=_actor(request), **_fields(given)
            )
        except InvalidFields as refusal:
            raise _named_as_sent(refusal) from refusal
        return Response(_shown(model))

    @extend_schema(operation_id="remove_model", responses=_answers(None, 204, 404, 409))
    def delete(self, request: Request, model_id: str) -> Response:
        """Remove a model that is not started, with its versions."""
        services.remove_model(model_id, actor=_actor(request))
        return Response(status=204)


class ModelStartView(_View):
    """Starting a model."""

    @extend_schema(
        operation_id="start_model", request=None, responses=_answers(ModelShape, 202, 404, 409)
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Want the model's replicas to live."""
        model = services.start_model(model_id, now=database_now(), actor=_actor(request))
        return Response(_shown(model), status=202)


class ModelStopView(_View):
    """Stopping a model."""

    @extend_schema(
        operation_id="stop_model", request=None, responses=_answers(ModelShape, 202, 404, 409)
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Drain and end the model's replicas."""
        model = services.stop_model(model_id, now=database_now(), actor=_actor(request))
        return Response(_shown(model), status=202)


class ModelRestartView(_View):
    """Restarting a model."""

    @extend_schema(
        operation_id="restart_model", request=None, responses=_answers(ModelShape, 202, 404, 409)
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Replace the model's replicas, one at a time while others serve."""
        model = services.restart_model(model_id, now=database_now(), actor=_actor(request))
        return Response(_shown(model), status=202)


class ModelResizeView(_View):
    """Resizing a model."""

    @extend_schema(
        operation_id="resize_model",
        request=ResizeForm,
        responses=_answers(ModelShape, 202, 400, 404, 409, 422),
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Want another number of replicas."""
        given = _given(ResizeForm, request)
        model = services.resize_model(
            model_id, given["replicas"], now=database_now(), actor=_actor(request)
        )
        return Response(_shown(model), status=202)


class ModelAddressView(_View):
    """Where a model can be reached."""

    @extend_schema(operation_id="get_model_address", responses=_answers(AddressList, 200, 404))
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


class PoolsView(_View):
    """All pools, and registering one."""

    @extend_schema(operation_id="list_pools", responses=_answers(PoolList, 200))
    def get(self, request: Request) -> Response:
        """List pools by id."""
        pools = AcceleratorPool.objects.select_related("outlook").order_by("pk")
        found, following = _page(request, pools)
        return Response({"items": [_pool(pool) for pool in found], "next": following})

    @extend_schema(
        operation_id="register_pool",
        request=PoolForm,
        responses=_answers(PoolShape, 201, 400, 409, 422),
    )
    def post(self, request: Request) -> Response:
        """Register a pool; the same one again changes nothing."""
        pool, is_new = services.register_pool(
            AcceleratorPool(**_given(PoolForm, request)), actor=_actor(request)
        )
        return Response(
            _pool(pool),
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/pools/{pool.pk}"},
        )


class PoolView(_View):
    """One pool."""

    @extend_schema(operation_id="get_pool", responses=_answers(PoolShape, 200, 404))
    def get(self, request: Request, pool_id: str) -> Response:
        """Show a pool."""
        return Response(_pool(services.find_pool(pool_id)))

    @extend_schema(
        operation_id="change_pool",
        request=PoolChanges,
        responses=_answers(PoolShape, 200, 400, 404, 422),
    )
    def patch(self, request: Request, pool_id: str) -> Response:
        """Change a pool; it keeps the devices that started models use."""
        pool = services.change_pool(pool_id, _given(PoolChanges, request), actor=_actor(request))
        return Response(_pool(pool))


class PoolDecisionsView(_View):
    """What the rebalancer decided for a pool."""

    @extend_schema(
        operation_id="list_pool_decisions",
        parameters=[OpenApiParameter("cursor", str, description="`next` of the page before")],
        responses=_answers(DecisionList, 200, 404),
    )
    def get(self, request: Request, pool_id: str) -> Response:
        """List decisions, the newest first; rounds without news are kept each ten minutes."""
        pool = services.find_pool(pool_id)
        found = RebalanceDecision.objects.filter(pool_id=pool.pk).order_by("-pk")
        cursor = request.query_params.get("cursor", "")
        if re.fullmatch(r"[0-9]{1,18}", cursor):
            found = found.filter(pk__lt=int(cursor))
        rows = list(found[: _MOST_DECISIONS + 1])
        items = rows[:_MOST_DECISIONS]
        following = str(items[-1].pk) if len(rows) > _MOST_DECISIONS else None
        return Response({"items": DecisionShape(items, many=True).data, "next": following})


def _models() -> QuerySet[ModelConfig]:
    return ModelConfig.objects.prefetch_related(
        Prefetch("servers", ModelServer.objects.order_by("ordinal", "agent"))
    )


def _shown(model: ModelConfig) -> dict[str, Any]:
    return model_as_json(_models().get(pk=model.pk))


def _pool(pool: AcceleratorPool) -> dict[str, Any]:
    pool.devices_used = services.devices_used(pool.pk)  # type: ignore[attr-defined]
    return cast(dict[str, Any], PoolShape(pool).data)


def _page(request: Request, found: QuerySet[Any]) -> tuple[list[Any], str | None]:
    """Return a page in order of ids, and the cursor of the next: the last id on this one."""
    cursor = request.query_params.get("cursor", "")
    if "\0" in cursor or len(cursor) > 64:
        cursor = ""
    rows = list(found.filter(pk__gt=cursor)[: _MOST_ITEMS + 1])
    return rows[:_MOST_ITEMS], rows[_MOST_ITEMS - 1].pk if len(rows) > _MOST_ITEMS else None


def _given(form: type[_Form], request: Request) -> dict[str, Any]:
    try:
        data = request.data
    except RecursionError as error:
        raise ParseError("The body is nested too deeply.") from error
    checked = form(data=data)
    checked.is_valid(raise_exception=True)
    return dict(checked.validated_data)


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


def _actor(request: Request) -> str:
    return str(request.user)
