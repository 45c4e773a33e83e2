"""Admin pages of models, with their actions."""

from collections.abc import Callable
from typing import Any, ClassVar, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from models_admin import admin_charts, checkpoints, secrets, services, serving
from models_admin.admin_acts import Act, Confirmed, action_of
from models_admin.admin_common import Admin, BlindTextarea, Form, duty_of, to_form
from models_admin.admin_externals import health_text
from models_admin.admin_servers import rows_of, versions_of
from models_admin.admin_trial import Tried
from models_admin.clock import database_now
from models_admin.models import ModelConfig, ModelKind
from models_admin.replicas import in_words

_FORM_FIELDS = (
    *("kind", "protocol", "model_name", "timeout_s", "sends_priority", "priority_style"),
    *("url", "max_concurrency", "version_label"),
    *("pool", "loader", "checkpoint", "serving", "devices_per_replica"),
    *("replicas_min", "replicas_default", "replicas_max", "window", "pinned"),
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


_OFFERED = {
    ModelKind.HOSTED: ("start", "stop", "restart", "resize", "unpin"),
    ModelKind.EXTERNAL: ("accept_version",),
}
"""Acts that a model's own page offers; the list offers all, and says which were refused."""


class ReplicasForm(forms.Form):
    """How many replicas are wanted."""

    replicas = forms.IntegerField(min_value=0, max_value=services.MAX_REPLICAS)


def _by_id(service: Callable[..., ModelConfig]) -> Callable[..., ModelConfig]:
    def run(model: ModelConfig, **more: Any) -> ModelConfig:
        return service(model.pk, **more)

    return run


_ACTS = (
    Act(
        name="start",
        title="Start",
        service=_by_id(services.start_model),
        done="Started",
        meaning="The host agent of the pool starts replicas within seconds; they take work once "
        "they are READY.",
    ),
    Act(
        name="stop",
        title="Stop",
        service=_by_id(services.stop_model),
        done="Stopped",
        meaning="All replicas take nothing new, finish what they have and end. Work for these "
        "models waits until they are started again; deadlines go on.",
    ),
    Act(
        name="restart",
        title="Restart",
        service=_by_id(services.restart_model),
        done="Restarted",
        meaning="The replicas are replaced one at a time, while others serve. What was changed in "
        "the settings comes into force with it; a pause after failures ends.",
    ),
    Act(
        name="resize",
        title="Resize",
        service=_by_id(services.resize_model),
        done="Resized",
        meaning="So many replicas are wanted from now on, or when the model is started. The "
        "rebalancer leaves them alone for an hour.",
        form=ReplicasForm,
    ),
    Act(
        name="unpin",
        title="Let the rebalancer move its replicas again:",
        service=_by_id(services.unpin_model),
        done="Unpinned",
        on_page="Unpin",
        meaning="The rebalancer moves replicas of these models again, where their pool has it on.",
    ),
    Act(
        name="accept_version",
        title="Accept the version that its server reports:",
        service=_by_id(services.accept_version),
        done="Accepted the version of",
        on_page="Accept reported version",
        meaning="What these external servers report counts from now on. Another version is "
        "another key of the archive: what the old one rated is not taken for it.",
    ),
)


@admin.register(ModelConfig)
class ModelConfigAdmin(Confirmed, Tried, Admin):
    """Models, with what can be done to them."""

    class Media:
        css: ClassVar = {"all": ["models_admin/live.css", "models_admin/duty.css"]}
        js = ("models_admin/live.js",)

    form = ModelConfigForm
    list_display = ("id", "kind", "pool", "started", "replicas", "condition", "version", "protocol")
    list_filter = ("kind", "started", "pool")
    list_select_related = ("pool", "health")
    search_fields = ("id", "model_name")
    show_full_result_count = False
    acts = _ACTS
    actions = tuple(action_of(act) for act in _ACTS)
    change_form_template = "models_admin/model.html"
    _common = ("id", "kind", "protocol", "model_name", "timeout_s")
    _external = ("max_concurrency", "sends_priority", "priority_style", "version_label")
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
        hosted = (*self._hosted, "pinned_until", "start_up_s")
        fields = ("url", "condition", *self._secrets, *self._external) if external else hosted
        return [
            (None, {"fields": (*self._common, "version")}),
            (obj.get_kind_display(), {"fields": fields}),
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[ModelConfig]:
        return super().get_queryset(request).prefetch_related("servers")

    def get_readonly_fields(
        self, request: HttpRequest, obj: ModelConfig | None = None
    ) -> tuple[str, ...]:
        if obj is None:
            return ()
        found = ("pinned_until", "start_up_s", "condition")
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
        actor, now = request.user.get_username(), database_now()

        def looked(model: ModelConfig) -> services.Seen:
            seen: services.Seen = form.seen
            return seen

        def warn(warning: str) -> None:
            self.message_user(request, warning, messages.WARNING)

        if change:
            fields.pop("kind", None)
            saved = services.update_model(
                obj.pk, now=now, actor=actor, look=looked, warn=warn, **fields
            )
        else:
            model_id = form.cleaned_data["id"]
            saved, _ = services.register_model(
                model_id, now=now, actor=actor, look=looked, warn=warn, **fields
            )
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

    @admin.display(description="Health")
    def condition(self, obj: ModelConfig) -> str:
        return health_text(obj)

    @admin.display(description="Replicas")
    def replicas(self, obj: ModelConfig) -> str:
        if obj.kind == ModelKind.EXTERNAL:
            return "external"
        return in_words(obj, list(obj.servers.all()))

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Who may change a model may start and stop it (named by the actions)."""
        codename = get_permission_codename("change", self.opts)
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    def now_of(self, row: ModelConfig) -> str:
        return self.replicas(row)

    def initial_of(self, chosen: list[ModelConfig]) -> dict[str, Any]:
        return {"replicas": max(model.wanted_replicas for model in chosen)}

    def get_urls(self) -> list[URLPattern]:
        pages = (
            ("replicas/", self.live_view, "live"),
            ("try/", self.try_view, "try"),
        )
        ours = [
            path(
                f"<slug:object_id>/{address}",
                self.admin_site.admin_view(view),
                name=f"models_admin_modelconfig_{name}",
            )
            for address, view, name in pages
        ]
        return [*ours, *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        model = self.get_object(request, object_id)
        more = {} if model is None else self._around(request, model)
        return super().change_view(request, object_id, form_url, {**more, **(extra_context or {})})

    def _around(self, request: HttpRequest, model: ModelConfig) -> dict[str, Any]:
        """Return what the page of a model shows beside its settings."""
        hosted = model.kind == ModelKind.HOSTED
        may = self.has_operate_permission(request)
        around: dict[str, Any] = {
            "page_acts": [
                act for act in _ACTS if may and act.name in _OFFERED[ModelKind(model.kind)]
            ]
        }
        if may:
            around["trial_form"] = self.trial_form(model)
        if hosted:
            address = reverse("admin:models_admin_modelconfig_live", args=[model.pk])
            around |= {"replicas_url": address, **self._live(model, may=may)}
            around["charts"] = admin_charts.of_model(model.pk, database_now())
        return around

    def _live(self, model: ModelConfig, *, may: bool) -> dict[str, Any]:
        return {
            "replicas": rows_of(model, database_now()),
            "versions": versions_of(model),
            "may_operate": may,
            "summary": self.replicas(model),
            "duty": duty_of(model_id=model.pk),
        }

    def live_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the replicas alone, for the page that fetches them anew."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        model = self.get_object(request, object_id)
        if model is None or model.kind != ModelKind.HOSTED:
            raise Http404
        live = self._live(model, may=self.has_operate_permission(request))
        return TemplateResponse(request, "models_admin/replicas.html", live)
