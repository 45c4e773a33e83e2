"""Admin pages to read: how external models are."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from models_admin.admin_common import ReadOnlyAdmin
from models_admin.models import ExternalHealth, ModelConfig, ModelKind, health_of


def health_text(model: ModelConfig) -> str:
    """Say how an external model is, and why; "" of a hosted one."""
    if model.kind != ModelKind.EXTERNAL:
        return ""
    health = health_of(model)
    if health is None:
        return "not checked yet"
    return f"{health.word} since {health.changed_at:%Y-%m-%d %H:%M:%S} UTC: {health.detail}"


@admin.register(ExternalHealth)
class ExternalHealthAdmin(ReadOnlyAdmin):
    """External models, as the checks of every ten seconds find them."""

    list_display = ("model_id", "state", "changed_at", "checked_at", "failures", "took", "detail")
    list_filter = ("up",)
    search_fields = ("model__id",)
    search_help_text = "id of a model"
    ordering = ("model_id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[ExternalHealth]:
        return super().get_queryset(request).select_related("model")

    @admin.display(description="state", ordering="up")
    def state(self, health: ExternalHealth) -> str:
        """What is older than the model's last change is of another address, perhaps."""
        found = health_of(health.model)
        return "not checked yet" if found is None else found.word

    @admin.display(description="took", ordering="latency_s")
    def took(self, health: ExternalHealth) -> str:
        return f"{health.latency_s * 1000:.0f} ms"
