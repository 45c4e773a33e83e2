"""Admin pages of replicas, which a model's page shows, too, and of versions."""

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse

from models_admin import services
from models_admin.admin_acts import Act, Confirmed, action_of
from models_admin.admin_common import ReadOnlyAdmin
from models_admin.models import ModelConfig, ModelServer, ModelVersion
from models_admin.policy.rollout import VersionState
from models_admin.replicas import age_s, busy_share, restarts, shares_of_hour


def rows_of(model: ModelConfig, now: datetime) -> list[dict[str, Any]]:
    """Return the replicas of a model for the table on its page."""
    of_hour = shares_of_hour(model.pk, now)
    return [
        {
            "ordinal": server.ordinal,
            "agent": server.agent,
            "state": server.state,
            "reason": server.reason,
            "last_error": server.last_error,
            "address": server.address,
            "host": server.host,
            "pid": server.pid,
            "devices": ", ".join(map(str, server.devices)),
            "log_tail": server.log_tail,
            "version": server.version,
            "queue_rows": server.queue_rows,
            "failures": server.failures,
            "restarts": restarts(server),
            "busy": percent(busy_share(server)),
            "busy_hour": percent(of_hour.get((server.agent, server.ordinal))),
            "seen": "" if (age := age_s(server, now)) is None else f"{age:.0f} s ago",
        }
        for server in model.servers.order_by("agent", "ordinal")
    ]


def versions_of(model: ModelConfig) -> list[ModelVersion]:
    """Return the versions of a model that are not over, the newest first."""
    return list(model.versions.exclude(state=VersionState.RETIRED).order_by("-pk"))


def percent(share: float | None) -> str:
    """Return a share in words; "" while it is not known."""
    return "" if share is None else f"{share:.0%}"


class Seen:
    """Columns of replicas that need the clock or a division."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[ModelServer]:
        age = ExpressionWrapper(Now() - F("heartbeat_at"), output_field=DurationField())
        found: QuerySet[ModelServer] = super().get_queryset(request)  # type: ignore[misc]
        return found.annotate(age=age)

    @admin.display(description="last answer")
    def seen(self, server: Any) -> str:
        return "" if server.age is None else f"{max(server.age.total_seconds(), 0):.0f} s ago"

    @admin.display(description="busy")
    def busy(self, server: ModelServer) -> str:
        """The share of its time, since it was ready, in which its device computed."""
        return percent(busy_share(server))


@admin.register(ModelServer)
class ModelServerAdmin(Seen, ReadOnlyAdmin):
    """Replicas of hosted models, as their agents see them."""

    list_display = (
        *("replica", "state", "reason", "busy", "queue_rows", "rows_total", "seen", "failures"),
        *("version", "address", "pid"),
    )
    list_filter = ("state",)
    search_fields = ("model__id",)
    search_help_text = "id of a model"
    ordering = ("model_id", "ordinal")

    @admin.display(description="replica", ordering="model_id")
    def replica(self, server: ModelServer) -> str:
        return str(server)


def _retire(version: ModelVersion, *, now: datetime, actor: str) -> ModelVersion:
    return services.retire_version(version.model_id, version.version, now=now, actor=actor)


_RETIRE = Act(
    name="retire",
    title="Retire",
    service=_retire,
    done="Retired",
    meaning="Replicas of this old version end, whatever work waits for it. Nothing does that work "
    "any more: retire the rater versions that are pinned to it, too.",
)


@admin.register(ModelVersion)
class ModelVersionAdmin(Confirmed, ReadOnlyAdmin):
    """Versions, and how far their rollout is."""

    acts = (_RETIRE,)
    actions = (action_of(_RETIRE),)
    list_display = ("model_id", "version", "state", "reason", "replicas", "checkpoint", "loader")
    list_filter = ("state",)
    search_fields = ("model__id", "version")
    ordering = ("model_id", "-first_seen_at")

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Who may change a model may retire its versions."""
        return request.user.has_perm("models_admin.change_modelconfig")

    def now_of(self, row: ModelVersion) -> str:
        return f"{row.state or 'seen'} {row.reason}".strip()

    def back_of(self, row: ModelVersion) -> str:
        return reverse("admin:models_admin_modelconfig_change", args=[row.model_id])
