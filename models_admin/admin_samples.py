"""Admin pages to read: utilisation, and decisions of the rebalancer."""

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from models_admin.admin_common import ReadOnlyAdmin
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    RebalanceDecision,
    UtilizationSample,
)


@admin.register(RebalanceDecision)
class RebalanceDecisionAdmin(ReadOnlyAdmin):
    """What the rebalancer decided, and why."""

    list_display = ("at", "pool_id", "mode", "outcome", "applied", "moved", "reason", "signal_age")
    list_filter = ("pool_id", "mode", "outcome", "applied", "at")
    search_fields = ("reason",)
    ordering = ("-pk",)

    @admin.display(description="moves")
    def moved(self, decision: RebalanceDecision) -> str:
        return ", ".join(f"{m['model']} {m['before']} → {m['after']}" for m in decision.moves)

    @admin.display(description="signal")
    def signal_age(self, decision: RebalanceDecision) -> str:
        age_s = decision.signal_age_s
        return "" if age_s is None else f"{age_s:.0f} s old"


class _RegisteredFilter(admin.SimpleListFilter):
    """By what is registered; asking the samples for their values would read all of them."""

    table: ClassVar[type[AcceleratorPool | ModelConfig]]

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [
            (name, name) for name in self.table.objects.order_by("pk").values_list("pk", flat=True)
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset.filter((str(self.parameter_name), chosen)) if chosen else queryset


class _ModelFilter(_RegisteredFilter):
    title, parameter_name, table = "model", "model_id", ModelConfig


class _PoolFilter(_RegisteredFilter):
    title, parameter_name, table = "pool", "pool_id", AcceleratorPool


@admin.register(UtilizationSample)
class UtilizationSampleAdmin(ReadOnlyAdmin):
    """How busy the replicas of hosted models were, a line a model each half minute."""

    list_display = (
        *("at", "model_id", "pool_id", "busy", "replicas", "devices", "busy_s", "replica_s"),
        "agent",
    )
    list_filter = (_ModelFilter, _PoolFilter)
    date_hierarchy = "at"
    search_fields = ("model_id__exact",)
    search_help_text = "the whole id of a model, removed ones too"
    ordering = ("-at", "model_id")

    @admin.display(description="busy")
    def busy(self, sample: UtilizationSample) -> str:
        return f"{sample.busy_s / sample.replica_s:.1%}" if sample.replica_s else ""
