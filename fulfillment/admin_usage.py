"""Admin page of accounts of accelerators. Loaded by the app's configuration."""

from typing import Any

from django.contrib import admin
from django.db.models import OuterRef, Q, QuerySet, Subquery

from fulfillment.admin import BigTableAdmin
from fulfillment.models import AcceleratorUse, Workflow


@admin.register(AcceleratorUse)
class AcceleratorUseAdmin(BigTableAdmin):
    """What workflows had of accelerators, hour by hour; `GET /usage` sums it up."""

    list_display = ("hour", "rater_id", "owner", "workflow", "seconds", "calls")
    list_select_related = ()
    search_fields = ("rater_id",)
    search_help_text = "the id of a rater, an owner, or wf_… for a workflow"

    def found(self, queryset: QuerySet[Any], term: str) -> QuerySet[Any]:
        term = term.strip()
        workflow = Workflow.objects.filter(public_id=term).values("pk")
        return queryset.filter(Q(rater_id=term) | Q(owner=term) | Q(workflow_id__in=workflow))

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        named = Workflow.objects.filter(pk=OuterRef("workflow_id")).values("public_id")[:1]
        found: QuerySet[Any] = super().get_queryset(request).annotate(public_id=Subquery(named))
        return found

    @admin.display(description="workflow")
    def workflow(self, use: Any) -> str:
        return use.public_id or "erased"

    @admin.display(description="accelerator-seconds")
    def seconds(self, use: AcceleratorUse) -> str:
        return f"{use.device_s:,.3f}"
