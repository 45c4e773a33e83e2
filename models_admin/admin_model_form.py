"""The form of a model in the admin."""

from typing import Any, ClassVar, cast

from django import forms

from models_admin import checkpoints, services, serving
from models_admin.admin_common import BlindTextarea, Form, to_form
from models_admin.models import ModelConfig

_FORM_FIELDS = (
    *("kind", "protocol", "endpoint", "model_name", "timeout_s"),
    *("sends_priority", "priority_style"),
    *("url", "max_concurrency", "version_label"),
    *("pool", "loader", "checkpoint", "serving", "devices_per_replica"),
    *("replicas_min", "replicas_default", "replicas_max", "window", "tunes_window"),
    "pinned",
)


def _loaders() -> list[tuple[str, str]]:
    return [("", "---------"), *((name, name) for name in checkpoints.loaders())]


class ModelConfigForm(Form):
    """Checks a model as the API does; secrets are written only."""

    new_api_key = forms.CharField(
        required=False,
        strip=False,
        label="New API key",
        widget=forms.PasswordInput(attrs={"autocomplete": "off", "class": "vTextField"}),
        help_text="Or env:NAME, the name of an environment variable. Empty: it stays as it is.",
    )
    drop_api_key = forms.BooleanField(required=False, label="Remove the API key")
    new_headers = forms.JSONField(
        required=False,
        label="New headers",
        widget=BlindTextarea(attrs={"rows": 3, "autocomplete": "off"}),
        help_text='Replaces all headers: {"Name": "value or env:NAME"}; {} removes them. '
        "Empty: they stay as they are.",
    )

    loader = forms.ChoiceField(required=False, choices=_loaders)

    class Meta:
        model = ModelConfig
        fields = ("id", *_FORM_FIELDS)
        labels: ClassVar = {"timeout_s": "Timeout (s)", "url": "URL"}
        help_texts: ClassVar = {
            "model_name": "Name that its server knows it by. Of a hosted model, empty: its id.",
            "url": "Of its server, without /v2",
            "serving": f"A JSON object of options. {serving.described()}",
            "checkpoint": "pkg:PACKAGE/PATH, a path under AIRS_CHECKPOINT_ROOT, or tiny:SEED "
            "(random weights, for trials)",
        }
        widgets: ClassVar = {"serving": forms.Textarea(attrs={"rows": 3})}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "model_name" in self.fields:
            self.fields["model_name"].required = False

    def clean_new_headers(self) -> dict[str, str] | None:
        headers = self.cleaned_data["new_headers"]
        if headers is None:
            return None
        if not isinstance(headers, dict) or not all(isinstance(v, str) for v in headers.values()):
            raise forms.ValidationError("An object of strings.", code="bad_type")
        return headers

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        new = self.instance._state.adding
        model_id = cleaned.get("id", "") if new else self.instance.pk
        if "kind" not in self.errors:
            to_form(self, services.model_problems(model_id, self.model_fields(), new=new))
        if not self.errors:
            self.seen = services.look_at(model_id, self.model_fields(), new=new)
            if self.seen.wrong:
                self.add_error("url", forms.ValidationError(self.seen.wrong, code="wrong_answer"))
        return cleaned

    def model_fields(self) -> services.ModelFields:
        """Return what was entered, as the services take it."""
        cleaned = self.cleaned_data
        entered = {name: cleaned[name] for name in _FORM_FIELDS if name in cleaned}
        # Not pinned is not unpinned: that would end what a resize has left.
        if "pinned" not in self.changed_data:
            entered.pop("pinned", None)
        # Left empty they have defaults, which the services know.
        for name in ("model_name", "loader"):
            if not entered.get(name):
                entered.pop(name, None)
        fields = cast(services.ModelFields, entered)
        pool = cleaned.get("pool")
        fields["pool"] = pool.pk if pool else None
        fields["serving"] = {} if cleaned.get("serving") is None else cleaned["serving"]
        if cleaned.get("drop_api_key"):
            fields["api_key"] = None
        elif cleaned.get("new_api_key"):
            fields["api_key"] = cleaned["new_api_key"]
        if cleaned.get("new_headers") is not None:
            fields["headers"] = cleaned["new_headers"]
        return fields

    def validate_constraints(self) -> None:
        """The services have said what is wrong in words; the database has the last one."""
