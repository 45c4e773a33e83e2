"""Admin pages of pools."""

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from models_admin import admin_charts, services
from models_admin.admin_common import Form, ServiceAdmin, duty_of, short_duty_of, to_form
from models_admin.clock import database_now
from models_admin.models import AcceleratorPool


class PoolForm(Form):
    """Checks a pool as the API does."""

    class Meta:
        model = AcceleratorPool
        fields = ("id", "kind", "devices", "agent", "rebalancing", "notes")

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        pool = AcceleratorPool(**{"id": self.instance.pk, **cleaned})
        to_form(self, services.pool_problems(pool))
        return cleaned


@admin.register(AcceleratorPool)
class AcceleratorPoolAdmin(ServiceAdmin):
    """Pools of devices."""

    class Media:
        css: ClassVar = {"all": ["models_admin/duty.css"]}

    form = PoolForm
    change_form_template = "models_admin/pool.html"
    list_display = (
        *("id", "kind", "devices", "used", "late", "agent", "rebalancing", "found", "notes"),
    )
    list_select_related = ("outlook",)
    search_fields = ("id",)
    list_filter = ("kind", "rebalancing")

    def get_queryset(self, request: HttpRequest) -> QuerySet[AcceleratorPool]:
        return services.with_use(super().get_queryset(request))

    @admin.display(description="used")
    def used(self, pool: Any) -> int:
        return int(pool.devices_used)

    @admin.display(description="what the rebalancer last found")
    def found(self, pool: AcceleratorPool) -> str:
        outlook = getattr(pool, "outlook", None)
        return "" if outlook is None else f"{outlook.at:%Y-%m-%d %H:%M:%S} UTC: {outlook.reason}"

    def get_readonly_fields(
        self, request: HttpRequest, obj: AcceleratorPool | None = None
    ) -> tuple[str, ...]:
        return ("id", "found", "duty") if obj else ()

    def get_fields(self, request: HttpRequest, obj: AcceleratorPool | None = None) -> Any:
        return (*PoolForm.Meta.fields, *(("found", "duty") if obj else ()))

    @admin.display(description="duty 1 h / 1 d")
    def late(self, pool: AcceleratorPool) -> str:
        return short_duty_of(pool_id=pool.pk)

    @admin.display(description="duty cycle")
    def duty(self, pool: AcceleratorPool) -> str:
        return duty_of(pool_id=pool.pk)

    def around(self, request: HttpRequest, row: AcceleratorPool) -> dict[str, Any]:
        return {"charts": admin_charts.of_pool(row.pk, database_now())}

    def delete_model(self, request: HttpRequest, obj: AcceleratorPool) -> None:
        services.remove_pool(obj.pk, actor=request.user.get_username())

    def save_model(
        self, request: HttpRequest, obj: AcceleratorPool, form: Any, change: bool
    ) -> None:
        services.save_pool(obj, actor=request.user.get_username())
