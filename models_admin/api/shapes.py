"""What clients see of a model and its replicas."""

from datetime import datetime
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from models_admin import secrets
from models_admin.api.externals import HealthShape, health_as_json
from models_admin.models import (
    CHAT,
    NO_PRIORITY,
    ModelConfig,
    ModelKind,
    ModelServer,
    PriorityStyle,
    Protocol,
    ScoringEndpoint,
    tuned_window,
    window_of,
)
from models_admin.policy.replicas import LIVE, ServerState
from models_admin.replicas import busy_share, restarts, shares_of_hour

MODEL_STATES = ("STOPPED", "STARTING", "READY", "DRAINING", "IDLE")
_REPLICAS = ("min", "default", "max")


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
            *("busy_seconds", "busy_share", "rows_total", "tokens_total", "queue_rows", "agent"),
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
    endpoint = serializers.ChoiceField(
        choices=[CHAT, *ScoringEndpoint.values],
        allow_null=True,
        help_text="What an OpenAI-compatible server is asked by; null: another protocol",
    )
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
    window = serializers.IntegerField(help_text="Batches that a replica may hold, as was set")
    tunes_window = serializers.BooleanField(help_text="It becomes what keeps replicas busy")
    window_now = serializers.IntegerField(help_text="What it is now")
    window_reason = serializers.CharField(allow_null=True, help_text="Why, where it is tuned")
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


_SAME = (
    *("id", "kind", "protocol", "model_name", "version_label", "timeout_s", "sends_priority"),
    *("url", "max_concurrency", "loader", "checkpoint", "serving", "devices_per_replica"),
    *("window", "tunes_window", "started", "pinned", "pinned_until", "start_up_s"),
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
        "endpoint": (model.endpoint or CHAT) if model.protocol == Protocol.OPENAI else None,
        "state": _state(model, servers),
        "priority_style": model.spoken_priority,
        "health": health_as_json(model),
        "api_key": secrets.hint(model.api_key),
        "headers": {name: secrets.hint(sealed) for name, sealed in model.headers.items()},
        "pool": model.pool_id,
        "window_now": window_of(model),
        "window_reason": tuned.reason if (tuned := tuned_window(model)) else None,
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
