"""The "Try it" box on the page of a model, and the page that shows what came of it."""

from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse

from models_admin.admin_acts import in_words
from models_admin.asking import Question
from models_admin.clock import database_now
from models_admin.errors import ModelsAdminError
from models_admin.models import ModelConfig, Protocol
from models_admin.trial import MOST_CHARACTERS, MOST_ROWS, Trial, try_model


class RowsForm(forms.Form):
    """One query, and some texts to it."""

    query = forms.CharField(max_length=MOST_CHARACTERS, strip=False)
    texts = forms.CharField(
        strip=False,
        widget=forms.Textarea(attrs={"rows": 4}),
        help_text=f"One a line, {MOST_ROWS} at most.",
    )

    def question(self) -> Question:
        lines = [line for line in self.cleaned_data["texts"].splitlines() if line.strip()]
        return Question(rows=[(self.cleaned_data["query"], line) for line in lines])


class MessageForm(forms.Form):
    """What a chat model is told."""

    message = forms.CharField(
        max_length=MOST_CHARACTERS, strip=False, widget=forms.Textarea(attrs={"rows": 4})
    )

    def question(self) -> Question:
        return Question(message=self.cleaned_data["message"])


class Tried:
    """Mixed into the admin class of models."""

    def trial_form(self, model: ModelConfig, data: Any = None) -> RowsForm | MessageForm:
        """Return the form by which a model is asked."""
        form = RowsForm if model.rater_protocol == Protocol.OIP else MessageForm
        return form(data, prefix="try")

    def try_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask a model once and show what came of it."""
        site: Any = self
        if not site.has_operate_permission(request):
            raise PermissionDenied
        model = site.get_object(request, object_id)
        if model is None:
            raise Http404
        form = self.trial_form(model, request.POST if request.method == "POST" else None)
        tried: Trial | None = None
        refused = ""
        if form.is_bound and form.is_valid():
            try:
                tried = try_model(
                    model.pk,
                    form.question(),
                    now=database_now(),
                    actor=request.user.get_username(),
                )
            except ModelsAdminError as refusal:
                refused = in_words(refusal)
        return TemplateResponse(
            request,
            "models_admin/trial.html",
            {
                **site.admin_site.each_context(request),
                "title": f"Try {model}",
                "opts": site.opts,
                "original": model,
                "trial_form": form,
                "tried": tried,
                "results": [] if tried is None else _results(tried),
                "refused": refused,
                "back": reverse("admin:models_admin_modelconfig_change", args=[model.pk]),
            },
        )


def _results(tried: Trial) -> list[tuple[str, str]]:
    """Return each text with what the model put out for it, in words."""
    return [
        (text, ", ".join(_said(name, value) for name, value in row.items() if value != {}))
        for (_, text), row in zip(tried.question.rows, tried.answer.rows, strict=False)
    ]


def _said(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{name} {value:.6g}"
    return f"{name} {value}"
