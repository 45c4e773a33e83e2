"""Admin pages of models, with their actions."""

from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from models_admin import admin_charts, secrets, services
from models_admin.admin_acts import Confirmed, action_of
from models_admin.admin_common import ServiceAdmin, duty_of
from models_admin.admin_externals import health_text
from models_admin.admin_model_acts import ACTS, OFFERED
from models_admin.admin_model_form import ModelConfigForm
from models_admin.admin_servers import rows_of, versions_of
from models_admin.admin_trial import Tried
from models_admin.clock import database_now
from models_admin.models import ModelConfig, ModelKind, tuned_window
from models_admin.replicas import in_words


@admin.register(ModelConfig)
class ModelConfigAdmin(Confirmed, Tried, ServiceAdmin):
    """Models, with what can be done to them."""

    class Media:
        css: ClassVar = {"all": ["models_admin/live.css", "models_admin/duty.css"]}
        js = ("models_admin/live.js",)

    form = ModelConfigForm
    list_display = ("id", "kind", "pool", "started", "replicas", "condition", "version", "protocol")
    list_filter = ("kind", "started", "pool")
    list_select_related = ("pool", "health", "tuned_window")
    search_fields = ("id", "model_name")
    show_full_result_count = False
    acts = ACTS
    actions = tuple(action_of(act) for act in ACTS)
    change_form_template = "models_admin/model.html"
    _common = ("id", "kind", "protocol", "model_name", "timeout_s")
    _external = (
        *("endpoint", "max_concurrency", "sends_priority", "priority_style", "version_label"),
    )
    _hosted = (
        *("pool", "loader", "checkpoint", "serving", "devices_per_replica"),
        *("replicas_min", "replicas_default", "replicas_max", "window"),
        *("tunes_window", "pinned"),
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
        hosted = (*self._hosted, "window_now", "pinned_until", "start_up_s")
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
        found = ("window_now", "pinned_until", "start_up_s", "condition")
        return ("id", "kind", "version", "api_key_hint", "headers_hint", *found)

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

    @admin.display(description="window now")
    def window_now(self, obj: ModelConfig) -> str:
        tuned = tuned_window(obj)
        return str(obj.window) if tuned is None else f"{tuned.window}: {tuned.reason}"

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

    def around(self, request: HttpRequest, row: ModelConfig) -> dict[str, Any]:
        hosted = row.kind == ModelKind.HOSTED
        may = self.has_operate_permission(request)
        around: dict[str, Any] = {
            "page_acts": [act for act in ACTS if may and act.name in OFFERED[row.kind]]
        }
        if may:
            around["trial_form"] = self.trial_form(row)
        if hosted:
            address = reverse("admin:models_admin_modelconfig_live", args=[row.pk])
            around |= {"replicas_url": address, **self._live(row, may=may)}
            around["charts"] = admin_charts.of_model(row.pk, database_now())
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
