"""Admin pages of models, with their actions."""

from collections.abc import Callable
from typing import Any, ClassVar, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.auth import get_permission_codename
from django.db.models import QuerySet
from django.http import HttpRequest

from models_admin import secrets, services, serving
from models_admin.admin_common import Admin, BlindTextarea, Form, duty_of, to_form
from models_admin.admin_servers import ReplicaInline
from models_admin.clock import database_now
from models_admin.errors import ModelsAdminError
from models_admin.models import ModelConfig, ModelKind
from models_admin.policy.reconcile import ServerState, summary

_FORM_FIELDS = (
    *("kind", "protocol", "model_name", "timeout_s", "sends_priority"),
    *("url", "max_concurrency", "version_label"),
    *("pool", "loader", "checkpoint", "serving", "devices_per_replica"),
    *("replicas_min", "replicas_default", "replicas_max", "window", "pinned"),
)


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

    loader = forms.ChoiceField(
        required=False, choices=[("", "---------"), *((name, name) for name in services.LOADERS)]
    )

    class Meta:
        model = ModelConfig
        fields = ("id", *_FORM_FIELDS)
        labels: ClassVar = {"timeout_s": "Timeout (s)", "url": "URL"}
        help_texts: ClassVar = {
            "model_name": "Name that its server knows it by. Of a hosted model, empty: its id.",
            "url": "Of its server, without /v2",
            "serving": f"A JSON object; the options are {', '.join(serving.OPTIONS)}",
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


_Service = Callable[..., ModelConfig]


@admin.register(ModelConfig)
class ModelConfigAdmin(Admin):
    """Models, with start, stop and restart."""

    form = ModelConfigForm
    list_display = ("id", "kind", "pool", "started", "replicas", "version", "protocol")
    list_filter = ("kind", "started", "pool")
    list_select_related = ("pool",)
    search_fields = ("id", "model_name")
    show_full_result_count = False
    actions = ("start", "stop", "restart", "unpin", "accept_version")
    inlines = (ReplicaInline,)
    _common = ("id", "kind", "protocol", "model_name", "timeout_s")
    _external = ("max_concurrency", "sends_priority", "version_label")
    _hosted = (
        *("pool", "loader", "checkpoint", "serving", "devices_per_replica"),
        *("replicas_min", "replicas_default", "replicas_max", "window", "pinned"),
    )
    _secrets = ("api_key_hint", "new_api_key", "drop_api_key", "headers_hint", "new_headers")

    def get_fieldsets(self, request: HttpRequest, obj: ModelConfig | None = None) -> Any:
        """A new model may be of either kind; of one that exists, show what belongs to it."""
        if obj is None:
            new_external = ("url", "new_api_key", "new_headers", *self._external)
            return [
                (None, {"fields": self._common}),
                ("External: a server somewhere", {"fields": new_external}),
                ("Hosted: its servers are run by AIRS", {"fields": self._hosted}),
            ]
        external = obj.kind == ModelKind.EXTERNAL
        hosted = (*self._hosted, "pinned_until", "start_up_s", "duty")
        fields = ("url", *self._secrets, *self._external) if external else hosted
        return [
            (None, {"fields": (*self._common, "version")}),
            (obj.get_kind_display(), {"fields": fields}),
        ]

    def get_inlines(self, request: HttpRequest, obj: ModelConfig | None) -> Any:
        return self.inlines if obj is not None and obj.kind == ModelKind.HOSTED else ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[ModelConfig]:
        return super().get_queryset(request).prefetch_related("servers")

    def get_readonly_fields(
        self, request: HttpRequest, obj: ModelConfig | None = None
    ) -> tuple[str, ...]:
        if obj is None:
            return ()
        found = ("pinned_until", "start_up_s", "duty")
        return ("id", "kind", "version", "api_key_hint", "headers_hint", *found)

    def get_actions(self, request: HttpRequest) -> Any:
        found = super().get_actions(request)
        # It would delete started models, and list every server on its page.
        found.pop("delete_selected", None)
        return found

    def has_delete_permission(self, request: HttpRequest, obj: ModelConfig | None = None) -> bool:
        stopped = obj is None or not obj.started
        return stopped and super().has_delete_permission(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        # Versions and servers go with their model, though nobody may delete them alone.
        chosen = list(objs)
        return [str(model) for model in chosen], {"models": len(chosen)}, set(), []

    def save_model(self, request: HttpRequest, obj: ModelConfig, form: Any, change: bool) -> None:
        fields = form.model_fields()
        actor = request.user.get_username()
        if change:
            fields.pop("kind", None)
            saved = services.update_model(obj.pk, now=database_now(), actor=actor, **fields)
        else:
            model_id = form.cleaned_data["id"]
            saved, _ = services.register_model(model_id, now=database_now(), actor=actor, **fields)
        obj.__dict__.update(saved.__dict__)

    def delete_model(self, request: HttpRequest, obj: ModelConfig) -> None:
        services.remove_model(obj.pk, actor=request.user.get_username())

    @admin.display(description="Stored API key")
    def api_key_hint(self, obj: ModelConfig) -> str:
        return secrets.hint(obj.api_key) or "none"

    @admin.display(description="Stored headers")
    def headers_hint(self, obj: ModelConfig) -> str:
        shown = [f"{name}: {secrets.hint(sealed)}" for name, sealed in obj.headers.items()]
        return "; ".join(shown) or "none"

    @admin.display(description="duty cycle")
    def duty(self, obj: ModelConfig) -> str:
        return duty_of(model_id=obj.pk)

    @admin.display(description="Replicas")
    def replicas(self, obj: ModelConfig) -> str:
        if obj.kind == ModelKind.EXTERNAL:
            return "external"
        states = [ServerState(server.state) for server in obj.servers.all()]
        ready = states.count(ServerState.READY)
        return f"{ready} of {obj.target_replicas} ready: {summary(states)}"

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Who may change a model may start and stop it (named by the actions below)."""
        codename = get_permission_codename("change", self.opts)
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    @admin.action(permissions=["operate"], description="Start")
    def start(self, request: HttpRequest, chosen: QuerySet[ModelConfig]) -> None:
        self._each(request, chosen, services.start_model, "Started")

    @admin.action(permissions=["operate"], description="Stop")
    def stop(self, request: HttpRequest, chosen: QuerySet[ModelConfig]) -> None:
        self._each(request, chosen, services.stop_model, "Stopped")

    @admin.action(permissions=["operate"], description="Restart")
    def restart(self, request: HttpRequest, chosen: QuerySet[ModelConfig]) -> None:
        self._each(request, chosen, services.restart_model, "Restarted")

    @admin.action(permissions=["operate"], description="Let the rebalancer move its replicas again")
    def unpin(self, request: HttpRequest, chosen: QuerySet[ModelConfig]) -> None:
        self._each(request, chosen, services.unpin_model, "Unpinned")

    @admin.action(
        permissions=["operate"], description="Accept the version that the external server reports"
    )
    def accept_version(self, request: HttpRequest, chosen: QuerySet[ModelConfig]) -> None:
        self._each(request, chosen, services.accept_version, "Accepted the version of")

    def _each(
        self, request: HttpRequest, chosen: QuerySet[ModelConfig], service: _Service, done: str
    ) -> None:
        """Do it to each chosen model, say what became of it, and keep a log entry."""
        actor = request.user.get_username()
        for model in chosen:
            try:
                service(model.pk, now=database_now(), actor=actor)
            except ModelsAdminError as refusal:
                self.message_user(request, refusal.detail, messages.ERROR)
            else:
                self.log_change(request, model, f"{done} {model.pk}.")
                self.message_user(request, f"{done} {model.pk}.", messages.SUCCESS)
