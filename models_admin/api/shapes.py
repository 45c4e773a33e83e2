"""Shapes of answers."""

from datetime import datetime
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from models_admin import secrets
from models_admin.api.externals import HealthShape, health_as_json
from models_admin.models import (
    NO_PRIORITY,
    AcceleratorPool,
    AuditEntry,
    ModelConfig,
    ModelKind,
    ModelServer,
    ModelVersion,
    Outcome,
    PoolOutlook,
    PriorityStyle,
    Protocol,
    RebalanceDecision,
)
from models_admin.policy.reconcile import LIVE, ServerState
from models_admin.replicas import busy_share, restarts, shares_of_hour
from models_admin.trial import Trial

MODEL_STATES = ("STOPPED", "STARTING", "READY", "DRAINING", "IDLE")
_REPLICAS = ("min", "default", "max")


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


class ServerShape(serializers.ModelSerializer[ModelServer]):
    """One replica."""

    busy_share = serializers.SerializerMethodField(
        help_text="Of its time since it was ready, in which its device computed"
    )
    restarts = serializers.SerializerMethodField(help_text="Starts after the first")
    devices = serializers.ListField(
        child=serializers.IntegerField(), help_text="Indices on its host"
    )

    class Meta:
        model = ModelServer
        fields: tuple[str, ...] = (
            *("ordinal", "state", "reason", "last_error", "address", "host", "pid", "devices"),
            *(
                "version",
                "starts",
                "restarts",
                "failures",
                "started_at",
                "ready_at",
                "next_start_at",
                "heartbeat_at",
            ),
            *("busy_seconds", "busy_share", "rows_total", "queue_rows", "agent"),
        )

    def get_restarts(self, server: ModelServer) -> int:
        """Return how often it was started again."""
        return restarts(server)

    @extend_schema_field(OpenApiTypes.FLOAT)
    def get_busy_share(self, server: ModelServer) -> float | None:
        """Return the share of its time since it was ready in which its device computed."""
        return busy_share(server)


class LoggedServerShape(ServerShape):
    """One replica, with the last lines of its log."""

    busy_share_hour = serializers.SerializerMethodField(
        help_text="Of the last hour, through all its runs, loading included"
    )

    class Meta(ServerShape.Meta):
        fields = (*ServerShape.Meta.fields, "busy_share_hour", "log_tail")

    @extend_schema_field(OpenApiTypes.FLOAT)
    def get_busy_share_hour(self, server: ModelServer) -> float | None:
        """Return the share of the last hour in which its device computed, if that is known."""
        share: float | None = self.context["of_hour"].get((server.agent, server.ordinal))
        return share


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
        choices=MODEL_STATES,
        allow_null=True,
        help_text="Of a hosted model: READY when a replica serves, IDLE when it is started and has "
        "none for want of work",
    )
    model_name = serializers.CharField()
    version = serializers.CharField()
    version_label = serializers.CharField()
    timeout_s = serializers.FloatField()
    sends_priority = serializers.BooleanField()
    priority_style = serializers.ChoiceField(choices=[NO_PRIORITY, *PriorityStyle.values])
    url = serializers.CharField()
    api_key = serializers.CharField(allow_null=True)
    headers = serializers.DictField(child=serializers.CharField())
    max_concurrency = serializers.IntegerField()
    health = HealthShape(
        allow_null=True, help_text="Of an external model, once its server was asked"
    )
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


class OneModelShape(ModelShape):
    """A model, with the last lines of its replicas' logs."""

    servers = LoggedServerShape(many=True)


class SavedModelShape(OneModelShape):
    """A model as it is stored now."""

    warnings = serializers.ListField(
        child=serializers.CharField(),
        help_text="What may be wrong though it was taken: an external server that does not answer",
    )


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


class TrialError(serializers.Serializer[Any]):
    """Why a model gave no answer that can be used."""

    code = serializers.CharField()
    detail = serializers.CharField(help_text="In its server's words, without secrets")


class TrialShape(serializers.Serializer[Any]):
    """What came of trying a model."""

    model = serializers.CharField()
    address = serializers.CharField()
    latency_s = serializers.FloatField()
    version = serializers.CharField(help_text="As the answer names it")
    rows = serializers.ListField(
        child=serializers.DictField(),
        help_text="Of each row its outputs by name; `truncated`: what the model cut, in tokens",
    )
    content = serializers.CharField()
    finish_reason = serializers.CharField()
    truncated = serializers.BooleanField()
    error = TrialError(allow_null=True)


def trial_as_json(model_id: str, tried: Trial) -> dict[str, Any]:
    """Return what clients see of a trial."""
    answer = tried.answer
    return {
        "model": model_id,
        "address": tried.address,
        "latency_s": round(answer.latency_s, 4),
        "version": answer.version,
        "rows": answer.rows,
        "content": answer.content,
        "finish_reason": answer.finish_reason,
        "truncated": answer.truncated,
        "error": {"code": answer.code, "detail": answer.detail} if answer.code else None,
    }


_SAME = (
    *("id", "kind", "protocol", "model_name", "version_label", "timeout_s", "sends_priority"),
    *("url", "max_concurrency", "loader", "checkpoint", "serving", "devices_per_replica"),
    *("window", "started", "pinned", "pinned_until", "start_up_s"),
)


def model_as_json(model: ModelConfig, *, alone_at: datetime | None = None) -> dict[str, Any]:
    """Return what clients see of a model; its servers are best prefetched.

    Of one that is shown alone, now, they see logs and the last hour of its replicas, too.
    """
    servers = list(model.servers.all())
    shown: Any = ServerShape(servers, many=True)
    if alone_at is not None:
        context = {"of_hour": shares_of_hour(model.pk, alone_at)}
        shown = LoggedServerShape(servers, many=True, context=context)
    return {
        **{name: getattr(model, name) for name in _SAME},
        "version": model.served_version,
        "state": _state(model, servers),
        "priority_style": model.spoken_priority,
        "health": health_as_json(model),
        "api_key": secrets.hint(model.api_key),
        "headers": {name: secrets.hint(sealed) for name, sealed in model.headers.items()},
        "pool": model.pool_id,
        "replicas": {
            **{bound: getattr(model, f"replicas_{bound}") for bound in _REPLICAS},
            "wanted": model.target_replicas,
            "ready": sum(server.state == ServerState.READY for server in servers),
        },
        "servers": shown.data,
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
