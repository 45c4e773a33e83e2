"""Admin pages of pools."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from models_admin import services
from models_admin.admin_common import Admin, Form, duty_of, to_form
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
class AcceleratorPoolAdmin(Admin):
    """Pools of devices."""

    form = PoolForm
    list_display = ("id", "kind", "devices", "used", "agent", "rebalancing", "found", "notes")
    list_select_related = ("outlook",)
    search_fields = ("id",)
    list_filter = ("kind", "rebalancing")

    @admin.display(description="used by started models")
    def used(self, pool: AcceleratorPool) -> int:
        return services.devices_used(pool.pk)

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

    @admin.display(description="duty cycle")
    def duty(self, pool: AcceleratorPool) -> str:
        return duty_of(pool_id=pool.pk)

    def save_model(
        self, request: HttpRequest, obj: AcceleratorPool, form: Any, change: bool
    ) -> None:
        services.save_pool(obj, actor=request.user.get_username())
