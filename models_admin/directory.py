"""What other parts may know of models: their versions, live replicas and how to call them.

`directory` satisfies fulfillment's ModelDirectory (named by AIRS_MODEL_DIRECTORY); the executor
asks it for endpoints. Reading is one or two statements; callers cache for a moment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q, QuerySet

from models_admin import prospects, secrets, traffic_limits, versions
from models_admin.models import (
    ModelConfig,
    ModelKind,
    ModelServer,
    ModelVersion,
    PriorityStyle,
    health_of,
    window_of,
)
from models_admin.policy.health import rests
from models_admin.policy.replicas import ServerState
from models_admin.policy.traffic_rules import Rule

HEARTBEAT_LIMIT = timedelta(seconds=10)
"""A replica that has not answered its agent for longer is not sent to."""
COMING = (ServerState.STARTING, ServerState.WARMING)
LAST_RESORT_CALLS = 1
"""To an external model that is down: what checks say may be wrong, and a call proves it."""
START_LIMIT = timedelta(minutes=15)
"""A replica that has been starting for longer is not reckoned with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """A registered model as raters are bound to it."""

    id: str
    protocol: str
    """That autoraters call it by; `oip` for all that take rows."""
    version: str
    """What raters are pinned to."""
    kind: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A live address of a model, and how many calls it may hold."""

    key: str
    model_id: str
    version: str
    """What raters that it may rate for are pinned to."""
    shown_version: str
    """What its server calls it, or the operator's label while that is not known."""
    window: int
    protocol: str
    managed: bool
    address: str
    seen_at: datetime | None = None
    """When its agent last heard of it; nobody watches an external model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointData:
    """How to call a replica, secrets included: for the process that calls, never to be stored."""

    url: str
    model_name: str
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float
    sends_priority: bool
    priority_style: str
    """In whose direction urgency is told; "" for what is usual for the protocol."""
    protocol: str
    scoring: str
    """By which endpoint an OpenAI-compatible server scores rows; "" for all others."""
    managed: bool
    """Whether we run its server: then another version's answer is one of another replica."""
    version: str
    """What its answers call themselves; "" when an external server has not said yet."""
    key_version: str
    """What raters are pinned to whose ratings those answers are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionReport:
    """What became of a version that a server reported."""

    version: str
    """The one that counts: the first reported, until an operator accepts another."""
    key_version: str | None
    """What raters are pinned to whose ratings its answers are; None when the model is gone."""
    changed: bool
    """The server now is another one: its answers must not be used, the rater pauses."""


class ModelDirectory:
    """The questions that fulfillment and workers ask about models."""

    def describe(self, model_id: str) -> ModelDescription | None:
        """Return a registered model, or None."""
        model = ModelConfig.objects.filter(pk=model_id).first()
        if model is None:
            return None
        return ModelDescription(
            id=model.id,
            protocol=model.rater_protocol,
            version=model.key_version,
            kind=model.kind,
            timeout_s=model.timeout_s,
        )

    def replicas(self, now: datetime) -> Sequence[Replica]:
        """Return what can be sent to now: hosted replicas that are ready, external models."""
        hosted = ModelServer.objects.filter(
            state=ServerState.READY, heartbeat_at__gte=now - HEARTBEAT_LIMIT
        ).select_related("model__tuned_window")
        external = ModelConfig.objects.filter(kind=ModelKind.EXTERNAL).select_related("health")
        return [
            *(
                Replica(
                    key=server.key,
                    model_id=server.model_id,
                    version=server.version,
                    shown_version=server.version,
                    window=window_of(server.model),
                    protocol=server.model.protocol,
                    managed=True,
                    address=server.address,
                    seen_at=server.heartbeat_at,
                )
                for server in hosted.order_by("model_id", "ordinal")
            ),
            *(
                Replica(
                    key=f"ext-{model.id}",
                    model_id=model.id,
                    version=model.key_version,
                    shown_version=model.served_version,
                    window=_calls_to_external(model, now),
                    protocol=model.rater_protocol,
                    managed=False,
                    address=model.url,
                )
                for model in external.order_by("id")
            ),
        ]

    def reachable(self, model_id: str, version: str, now: datetime) -> float:
        """Return the replicas of a hosted model that serve a version, or will within minutes.

        Where its pool is rebalanced, it could have all that the others do not need.
        """
        serving = Q(state=ServerState.READY, heartbeat_at__gte=now - HEARTBEAT_LIMIT)
        found = ModelServer.objects.filter(model_id=model_id, version__in=["", version])
        own = found.filter(serving | _coming(now)).count()
        return max(float(own), prospects.could_have(model_id, version, now))

    def coming(self, now: datetime) -> Sequence[tuple[str, str]]:
        """Return model and version of replicas that start; "" for a version not known yet."""
        return list(ModelServer.objects.filter(_coming(now)).values_list("model_id", "version"))

    def limits(self, now: datetime) -> Sequence[Rule]:
        """Return the traffic rules that whoever sends goes by."""
        return traffic_limits.enabled()

    def endpoint(self, replica_key: str) -> EndpointData | None:
        """Return how to call a replica; None when this run of it has ended."""
        kind, _, name = replica_key.partition("-")
        if kind == "ext":
            model = _externals(name).first()
            return None if model is None else external_endpoint(model)
        pk, _, starts = name.partition("-")
        if kind != "ms" or not (pk.isdecimal() and starts.isdecimal()):
            return None
        # A draining replica still takes what was claimed before it left `replicas`.
        server = (
            ModelServer.objects.filter(
                pk=int(pk),
                starts=int(starts),
                state__in=[ServerState.READY, ServerState.DRAINING],
            )
            .exclude(address="")
            .select_related("model")
            .first()
        )
        return None if server is None else _hosted(server)

    def report_version(self, model_id: str, version: str, now: datetime) -> VersionReport:
        """Take note of the version in an answer of an external model.

        The first one counts; a later, different one is recorded for the operator to accept
        (`PATCH /models/{id}` with `version`) and changes nothing.
        """
        model = _externals(model_id).first()
        if model is not None and version not in ("", model.version, model.reported):
            model = _note(model_id, version, now)
        if model is None:
            return VersionReport(version="", key_version=None, changed=False)
        return VersionReport(
            version=model.version,
            key_version=model.key_version,
            changed=version not in ("", model.version),
        )


def _calls_to_external(model: ModelConfig, now: datetime) -> int:
    """Return how many calls an external model may hold: of one that is down, the last resort."""
    health = health_of(model)
    return LAST_RESORT_CALLS if health and rests(health, now) else model.max_concurrency


def _coming(now: datetime) -> Q:
    return Q(state__in=COMING, started_at__gte=now - START_LIMIT)


def _externals(model_id: str) -> QuerySet[ModelConfig]:
    return ModelConfig.objects.filter(pk=model_id, kind=ModelKind.EXTERNAL)


def _note(model_id: str, version: str, now: datetime) -> ModelConfig | None:
    """Store a version that is news, and return the model."""
    with transaction.atomic():
        # Of two first reports at once, the second finds that the first counts.
        model = _externals(model_id).select_for_update().first()
        if model is None:
            return None
        ModelVersion.objects.get_or_create(
            model=model, version=version, defaults={"first_seen_at": now}
        )
        if not model.version:
            versions.settle(model, version)
        elif model.version != version:
            model.reported = version
        model.save(update_fields=["version", "first_version", "reported"])
    return model


def _hosted(server: ModelServer) -> EndpointData:
    return EndpointData(
        url=server.address,
        model_name=server.model.model_name,
        headers={},
        timeout_s=server.model.timeout_s,
        sends_priority=True,
        priority_style=PriorityStyle.TRITON,
        protocol=server.model.protocol,
        scoring="",
        managed=True,
        version=server.version,
        key_version=server.version,
    )


def external_endpoint(model: ModelConfig) -> EndpointData:
    """Return how to call an external model, stored or not."""
    return EndpointData(
        url=model.url,
        model_name=model.model_name,
        headers=call_headers(model),
        timeout_s=model.timeout_s,
        sends_priority=model.sends_priority,
        priority_style=model.priority_style,
        protocol=model.rater_protocol,
        scoring=model.endpoint,
        managed=False,
        version=model.version,
        key_version=model.key_version,
    )


def call_headers(model: ModelConfig) -> dict[str, str]:
    """Return the headers of a call, secrets included; what cannot be unsealed here is left out.

    Its server then refuses the call, which pauses the rater and shows why.
    """
    sealed = dict(model.headers)
    headers = {name: value for name in sealed if (value := secrets.unseal(sealed[name]))}
    if key := secrets.unseal(model.api_key):
        headers.setdefault("Authorization", f"Bearer {key}")
    return headers


directory = ModelDirectory()
