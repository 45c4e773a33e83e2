"""Shapes of answers."""

from typing import Any

from rest_framework import serializers

from models_admin import secrets
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelKind,
    ModelServer,
    Outcome,
    PoolOutlook,
    Protocol,
    RebalanceDecision,
)
from models_admin.policy.reconcile import LIVE, ServerState

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
