"""Admin pages of rules for priorities and of owners' shares.

Loaded by the app's configuration. Forms call one service each, as the API does; below the list of
rules stands who would get what by them.
"""

from datetime import timedelta
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import URLPattern, path

from fulfillment import owner_shares, priority_rules
from fulfillment.admin import AnyAdmin, AnyForm
from fulfillment.clock import database_now
from fulfillment.models import OwnerShare, PriorityRule, Rater


class PriorityRuleForm(AnyForm):
    """Checks a rule as the API does."""

    class Meta:
        model = PriorityRule
        fields = (
            "position", "name", "enabled", "trigger", "purpose", "min_role", "owner", "rater",
            "max_checkpoint_age_s", "default_score", "ceiling",
        )  # fmt: skip
        labels: ClassVar = {
            "min_role": "Role of the requester, at least",
            "max_checkpoint_age_s": "New checkpoint: age below (s)",
            "default_score": "Default",
        }

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if not self.errors:
            for problem in priority_rules.problems(PriorityRule(pk=self.instance.pk, **cleaned)):
                self.add_error(problem["field"], problem["detail"].capitalize() + ".")
        return cleaned


class WhoGetsWhat(forms.Form):
    """What the preview is asked for."""

    rater = forms.ModelChoiceField(Rater.objects.all(), required=False, empty_label="any other")
    owner = forms.CharField(max_length=150, required=False)
    priority = forms.IntegerField(min_value=0, max_value=100, required=False, label="Asked for")
    checkpoint_age_days = forms.IntegerField(
        min_value=0, max_value=3650, required=False, label="Age of the checkpoint (days)"
    )

    def lines(self) -> list[priority_rules.Preview]:
        """Return who would get what; nothing if the form is wrong."""
        if not self.is_valid():
            return []
        asked = self.cleaned_data
        days = asked["checkpoint_age_days"]
        return priority_rules.preview(
            asked=asked["priority"],
            owner=asked["owner"],
            rater=asked["rater"],
            checkpoint_age=None if days is None else timedelta(days=days),
            now=database_now(),
        )


@admin.register(PriorityRule)
class PriorityRuleAdmin(AnyAdmin):
    """Rules, in the order in which they are asked."""

    form = PriorityRuleForm
    ordering = ("position",)
    sortable_by = ()
    list_display = (
        "position", "name", "enabled", "trigger", "purpose", "min_role", "owner", "rater",
        "max_checkpoint_age_s", "default_score", "ceiling",
    )  # fmt: skip
    list_display_links = ("name",)
    list_select_related = ("rater",)
    change_list_template = "fulfillment/priority_rules.html"

    def get_urls(self) -> list[URLPattern]:
        preview = path(
            "preview/",
            self.admin_site.admin_view(self.preview_view),
            name="fulfillment_priorityrule_preview",
        )
        return [preview, *super().get_urls()]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        return {
            "position": priority_rules.next_position(),
            **super().get_changeform_initial_data(request),
        }

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        return super().changelist_view(request, {**_preview({}), **(extra_context or {})})

    def preview_view(self, request: HttpRequest) -> TemplateResponse:
        """Show who would get what by the rules, for one rater, owner, wish and checkpoint."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return TemplateResponse(
            request,
            "fulfillment/priority_preview.html",
            {
                **self.admin_site.each_context(request),
                "title": "Who would get what",
                "opts": self.opts,
                **_preview(request.GET),
            },
        )

    def save_model(self, request: HttpRequest, obj: PriorityRule, form: Any, change: bool) -> None:
        priority_rules.save(obj, actor=request.user.get_username())

    def delete_model(self, request: HttpRequest, obj: PriorityRule) -> None:
        priority_rules.remove(obj.pk, actor=request.user.get_username())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[PriorityRule]) -> None:
        for rule in queryset:
            self.delete_model(request, rule)


def _preview(asked: Any) -> dict[str, Any]:
    form = WhoGetsWhat(asked)
    return {"preview_form": form, "preview_lines": form.lines()}


@admin.register(OwnerShare)
class OwnerShareAdmin(AnyAdmin):
    """Weights of owners; without a row it is 1."""

    list_display = ("owner", "weight", "note")
    search_fields = ("owner",)

    def get_readonly_fields(
        self, request: HttpRequest, obj: OwnerShare | None = None
    ) -> tuple[str, ...]:
        return ("owner",) if obj else ()

    def save_model(self, request: HttpRequest, obj: OwnerShare, form: Any, change: bool) -> None:
        owner_shares.put(obj, actor=request.user.get_username())

    def delete_model(self, request: HttpRequest, obj: OwnerShare) -> None:
        owner_shares.remove(obj.pk, actor=request.user.get_username())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[OwnerShare]) -> None:
        for share in queryset:
            self.delete_model(request, share)
