"""Admin pages to read: replicas, also on the page of their model, and versions."""

from typing import Any

from django.contrib import admin
from django.db.models import DurationField, ExpressionWrapper, F, Model, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest

from models_admin.admin_common import Inline, ReadOnlyAdmin
from models_admin.models import ModelServer, ModelVersion


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
        if server.ready_at is None or server.heartbeat_at is None:
            return ""
        lived = (server.heartbeat_at - server.ready_at).total_seconds()
        return f"{min(server.busy_seconds / lived, 1):.0%}" if lived > 0 else ""


class ReplicaInline(Seen, Inline):
    """The replicas of a model, on its page."""

    model = ModelServer
    verbose_name_plural = "Replicas"
    extra = 0
    can_delete = False
    ordering = ("agent", "ordinal")
    fields = readonly_fields = (
        *("ordinal", "state", "reason", "busy", "queue_rows", "rows_total", "seen", "failures"),
        *("last_error", "address", "pid"),
    )

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


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


@admin.register(ModelVersion)
class ModelVersionAdmin(ReadOnlyAdmin):
    """Versions that were seen."""

    list_display = ("model_id", "version", "checkpoint", "first_seen_at")
    search_fields = ("model__id", "version")
    ordering = ("model_id", "-first_seen_at")
