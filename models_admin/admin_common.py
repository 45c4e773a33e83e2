"""What admin pages share: their bases, problems in forms, secrets, and duty cycles."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest, HttpResponse

from models_admin import charts, services, utilisation
from models_admin.clock import database_now

if TYPE_CHECKING:
    Form = forms.ModelForm[Any]
    Admin = admin.ModelAdmin[Any]
else:
    Form = forms.ModelForm
    Admin = admin.ModelAdmin


def to_form(form: Form, problems: list[services.Problem]) -> None:
    """Show problems at their fields, unless Django found one there already.

    Those of fields that the form lacks stand at its top.
    """
    wrong = set(form.errors)
    for problem in problems:
        field = problem.field.split(".")[0]
        name = next((name for name in (field, f"new_{field}") if name in form.fields), None)
        if name not in wrong:
            form.add_error(name, forms.ValidationError(problem.detail, code=problem.code))


class BlindTextarea(forms.Textarea):
    """Takes text and never shows it again, not even beside an error."""

    def format_value(self, value: Any) -> None:
        return None


_SPANS = {"hour": timedelta(hours=1), "day": timedelta(days=1)}


def duty_of(**of: str) -> str:
    """Say how busy the replicas of a model, or of a pool, were of late."""
    shares = utilisation.duty(list(_SPANS.values()), now=database_now(), **of)
    said = [
        f"{share:.1%} in the last {name}"
        for name, share in zip(_SPANS, shares, strict=True)
        if share is not None
    ]
    return ", ".join(said) or "No replica lived in the last day."


def short_duty_of(**of: str) -> str:
    """Say how busy they were in the last hour and day, in the room that a list has."""
    shares = utilisation.duty(list(_SPANS.values()), now=database_now(), **of)
    return " / ".join(charts.percent(share) for share in shares)


class ServiceAdmin(Admin):
    """Rows that services store: each page shows more than its form, and removes that row alone."""

    def around(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return what the page of a row shows beside its settings."""
        raise NotImplementedError

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        more = {} if obj is None else self.around(request, obj)
        return super().render_change_form(request, {**context, **more}, add, change, form_url, obj)

    def get_actions(self, request: HttpRequest) -> Any:
        found = super().get_actions(request)
        # A row's own page asks the service, which says what stands against it.
        found.pop("delete_selected", None)
        return found


class ReadOnlyAdmin(Admin):
    """Rows that the host agent or the services write."""

    show_full_result_count = False
    actions: Any = None

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False
