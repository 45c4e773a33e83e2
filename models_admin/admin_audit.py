"""The admin page to read who did what."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from models_admin import traffic_rules
from models_admin.admin_common import ReadOnlyAdmin
from models_admin.models import AuditEntry


class _Kinds(admin.SimpleListFilter):
    """By kind; asking the entries for theirs would read all of them."""

    title = parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(kind, kind) for kind in ("model", "pool", traffic_rules.KIND)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        known = {kind for kind, _ in self.lookup_choices}
        return queryset.filter(kind=self.value()) if self.value() in known else queryset


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    """Who did what to models and pools, by the admin and by REST alike."""

    list_display = ("at", "actor", "action", "kind", "object_id", "changed")
    list_filter = (_Kinds, "at")
    search_fields = ("object_id__exact", "actor__exact")
    search_help_text = "the whole id of an object, or the whole name of a user"
    ordering = ("-pk",)

    @admin.display(description="what changed")
    def changed(self, entry: AuditEntry) -> str:
        return "; ".join(_said(name, change) for name, change in entry.detail.items())


def _said(name: str, change: Any) -> str:
    if isinstance(change, list) and len(change) == 2:
        return f"{name}: {change[0]} → {change[1]}"
    return f"{name}: {change}"
