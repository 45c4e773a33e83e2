"""Admin pages of traffic rules."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from models_admin import traffic_rules
from models_admin.admin_common import Admin, Form, to_form
from models_admin.models import TrafficRule
from models_admin.traffic_limits import as_rule


class TrafficRuleForm(Form):
    """Checks a rule as the API does."""

    class Meta:
        model = TrafficRule
        fields = (
            *("position", "name", "enabled", "rater", "model", "priority_class", "trigger"),
            *("purpose", "owner", "workflow", "min_load", "max_share", "max_batches", "block"),
            "reason",
        )

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if not self.errors:
            to_form(self, traffic_rules.problems(TrafficRule(pk=self.instance.pk, **cleaned)))
        return cleaned

    def validate_constraints(self) -> None:
        """What the rules have said in words already."""


@admin.register(TrafficRule)
class TrafficRuleAdmin(Admin):
    """How much of a model's room some traffic may take; the strictest rule decides."""

    form = TrafficRuleForm
    sortable_by = ()
    list_display = ("name", "enabled", "asks_for", "does", "position")
    list_filter = ("enabled",)
    search_fields = ("name", "reason")
    fieldsets = (
        (None, {"fields": ("name", "enabled", "position", "reason")}),
        (
            "Which traffic: what meets all of these, empty for any",
            {
                "fields": (
                    *("rater", "model", "priority_class", "trigger", "purpose", "owner"),
                    *("workflow", "min_load"),
                )
            },
        ),
        ("What is left to it", {"fields": ("max_share", "max_batches", "block")}),
    )

    @admin.display(description="which traffic")
    def asks_for(self, rule: TrafficRule) -> str:
        names = ("rater", "model", "priority_class", "trigger", "purpose", "owner", "workflow")
        asked = [f"{name} {getattr(rule, name)}" for name in names if getattr(rule, name)]
        return ", ".join(asked) or "all"

    @admin.display(description="what it does")
    def does(self, rule: TrafficRule) -> str:
        load = f" from a load of {rule.min_load:.0%} on" if rule.min_load else ""
        return as_rule(rule).effect + load

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        position = traffic_rules.next_position()
        return {"position": str(position), **super().get_changeform_initial_data(request)}

    def save_model(self, request: HttpRequest, obj: TrafficRule, form: Any, change: bool) -> None:
        traffic_rules.save(obj, actor=request.user.get_username())

    def delete_model(self, request: HttpRequest, obj: TrafficRule) -> None:
        traffic_rules.remove(obj.pk, actor=request.user.get_username())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[TrafficRule]) -> None:
        for rule in queryset:
            self.delete_model(request, rule)
