"""Acts in the admin, upon models and versions: each is confirmed on a page that says what it does.

An act is chosen in the list, for some rows at once, or on the page of one row; either way the
confirmation is sent to the list, which checks the permission again and says what became of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import url_has_allowed_host_and_scheme

from models_admin.clock import database_now
from models_admin.errors import ModelsAdminError

MOST_AT_ONCE = 100
"""Rows that one action takes."""

Service = Callable[..., object]
"""Takes the row and the keywords `now` and `actor`, and what the form asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """An act as the admin offers it."""

    name: str
    title: str
    service: Service
    done: str
    meaning: str
    on_page: str = ""
    """What the link on a row's page says; otherwise the title."""
    form: Callable[..., forms.Form] | None = None
    """Asks for more; takes the data, or the keyword `initial`."""


class Confirmed:
    """Mixed into an admin class: `acts` become actions of its list and pages of its rows."""

    acts: tuple[Act, ...] = ()

    def now_of(self, row: Any) -> str:
        """Say in which state a row is, for the page that asks."""
        return ""

    def back_of(self, row: Any) -> str:
        """Return the page to which an act upon one row leads back: its own."""
        opts = row._meta
        return reverse(f"admin:{opts.app_label}_{opts.model_name}_change", args=[row.pk])

    def get_urls(self) -> list[URLPattern]:
        site: Any = self
        act = path(
            "<slug:object_id>/act/<slug:name>/",
            site.admin_site.admin_view(self.act_view),
            name=f"{site.opts.app_label}_{site.opts.model_name}_act",
        )
        return [act, *super().get_urls()]  # type: ignore[misc]

    def initial_of(self, chosen: list[Any]) -> dict[str, Any]:
        """Return what the form of an act has filled in."""
        return {}

    def act_view(self, request: HttpRequest, object_id: str, name: str) -> HttpResponseBase:
        """Ask whether to do an act to one row, on its own page."""
        site: Any = self
        act = next((act for act in self.acts if act.name == name), None)
        row = site.get_object(request, object_id)
        if act is None or row is None:
            raise Http404
        if not site.has_operate_permission(request):
            raise PermissionDenied
        return asked(site, request, act, [row], back=self.back_of(row))


def action_of(act: Act) -> Any:
    """Return an act as an action of a list; it asks for the permission `operate`."""

    def run(site: Any, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponseBase | None:
        chosen = list(queryset.order_by("pk")[: MOST_AT_ONCE + 1])
        if len(chosen) > MOST_AT_ONCE:
            site.message_user(request, f"Choose {MOST_AT_ONCE} at most.", messages.ERROR)
            return None
        back = request.POST.get("back", "")
        # Only ours: it comes from the browser.
        if not url_has_allowed_host_and_scheme(back, allowed_hosts=None):
            back = request.get_full_path()
        if "confirmed" not in request.POST:
            return asked(site, request, act, chosen, back=back)
        more: dict[str, Any] = {}
        if act.form is not None:
            form = act.form(request.POST)
            if not form.is_valid():
                return asked(site, request, act, chosen, back=back, form=form)
            more = form.cleaned_data
        for row in chosen:
            _do(site, request, act, row, database_now(), more)
        return HttpResponseRedirect(back)

    run.__name__ = act.name
    return admin.action(run, permissions=["operate"], description=act.title)


def asked(
    site: Any,
    request: HttpRequest,
    act: Act,
    chosen: list[Any],
    *,
    back: str,
    form: forms.Form | None = None,
) -> TemplateResponse:
    """Return the page that says what an act does, and asks."""
    if form is None and act.form is not None:
        form = act.form(initial=site.initial_of(chosen))
    opts = site.opts
    several = f"{len(chosen)} {opts.verbose_name_plural}"
    return TemplateResponse(
        request,
        "models_admin/confirm_act.html",
        {
            **site.admin_site.each_context(request),
            "title": f"{act.title} {chosen[0] if len(chosen) == 1 else several}",
            "opts": opts,
            "act": act.name,
            "meaning": act.meaning,
            "chosen": [(row, site.now_of(row)) for row in chosen],
            "form": form,
            "back": back,
        },
    )


def _do(
    site: Any, request: HttpRequest, act: Act, row: Model, now: datetime, more: dict[str, Any]
) -> None:
    actor = request.user.get_username()
    try:
        act.service(row, now=now, actor=actor, **more)
    except ModelsAdminError as refusal:
        site.message_user(request, f"Not done to {row}: {in_words(refusal)}", messages.ERROR)
    else:
        site.log_change(request, row, f"{act.done} {row}.")
        site.message_user(request, f"{act.done} {row}.", messages.SUCCESS)


def in_words(refusal: ModelsAdminError) -> str:
    """Return what a refusal says, with what is wrong with each field."""
    if not refusal.errors:
        return refusal.detail
    return "; ".join(f"{error['field']}: {error['detail']}" for error in refusal.errors)
