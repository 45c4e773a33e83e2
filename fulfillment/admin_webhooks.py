"""Admin pages of events, webhook endpoints and deliveries: what was told to whom, and again.

Loaded by the app's configuration. State is read-only here; actions call one service each.
"""

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from fulfillment import deliveries
from fulfillment.admin import NewestFirst, ReadOnlyAdmin
from fulfillment.clock import database_now
from fulfillment.models import Delivery, DeliveryAttempt, WebhookEndpoint
from fulfillment.policy.delivery import DeliveryState

if TYPE_CHECKING:
    AnyInline = admin.TabularInline[Any, Any]
else:  # generic for the type checker only
    AnyInline = admin.TabularInline


@admin.register(WebhookEndpoint)
class WebhookEndpointAdmin(ReadOnlyAdmin):
    """Who hears of events; deleting one ends its deliveries."""

    ordering = ("-pk",)
    list_display = ("public_id", "url", "owner", "workflow", "format", "enabled", "created_at")
    list_select_related = ("workflow",)
    search_fields = ("public_id__exact", "owner__exact", "workflow__public_id__exact")
    search_help_text = "an id of an endpoint or a workflow, or an owner"
    readonly_fields = ("their_deliveries",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[NewestFirst]:
        return NewestFirst

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return bool(request.user.has_perm("fulfillment.delete_webhookendpoint"))

    @admin.display(description="enabled")
    def enabled(self, endpoint: WebhookEndpoint) -> str:
        if endpoint.disabled_at is None:
            return "yes"
        return f"disabled: {endpoint.disabled_reason}, {endpoint.disabled_at:%Y-%m-%d %H:%M:%SZ}"

    @admin.display(description="see its")
    def their_deliveries(self, endpoint: WebhookEndpoint) -> SafeString:
        address = reverse("admin:fulfillment_delivery_changelist")
        return format_html('<a href="{}?q={}">deliveries</a>', address, endpoint.public_id)


class AttemptInline(AnyInline):
    """The log of a delivery."""

    model = DeliveryAttempt
    fields = ("number", "started_at", "duration_s", "status", "code")
    readonly_fields = fields
    ordering = ("number",)
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Delivery)
class DeliveryAdmin(ReadOnlyAdmin):
    """Deliveries, each with its attempts; a person may have them sent again."""

    ordering = ("-pk",)
    list_display = (
        "public_id", "state", "code", "attempts", "next_attempt", "event", "receiver", "endpoint",
        "created_at", "finished_at",
    )  # fmt: skip
    list_filter = ("state",)
    list_select_related = ("event", "endpoint")
    search_fields = (
        "public_id__exact", "endpoint__public_id__exact", "event__public_id__exact",
        "event__workflow__public_id__exact",
    )  # fmt: skip
    search_help_text = "an id of a delivery, an endpoint, an event or a workflow"
    exclude = ("body", "lease_until", "fence")
    readonly_fields = ("sent_body",)
    inlines = (AttemptInline,)
    actions = ("replay",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[NewestFirst]:
        return NewestFirst

    @admin.display(description="body")
    def sent_body(self, delivery: Delivery) -> str:
        return bytes(delivery.body).decode()

    @admin.display(description="next attempt")
    def next_attempt(self, delivery: Delivery) -> str:
        if delivery.state != DeliveryState.PENDING:
            return ""
        return f"{delivery.due_at:%Y-%m-%d %H:%M:%SZ}"

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("fulfillment.change_delivery"))

    @admin.action(description="Send selected deliveries again", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> None:
        for delivery in queryset:
            deliveries.replay(delivery.pk, now=database_now())
            self.log_change(request, delivery, "Sent again.")
        self.message_user(
            request,
            "They are sent within seconds, the same id and bytes, and tried for a day.",
            messages.SUCCESS,
        )
