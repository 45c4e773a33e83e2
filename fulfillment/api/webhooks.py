"""Webhook endpoints, what was delivered to them, and sending it again."""

import re
from collections.abc import Mapping
from typing import Any

from django.db.models import F, Prefetch
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import deliveries, webhooks
from fulfillment.api.base import (
    ApiView,
    answers,
    checked_body,
    checked_query,
    from_cursor,
    json_answer,
    to_cursor,
)
from fulfillment.authentication import sees_everything
from fulfillment.clock import database_now
from fulfillment.errors import NotFound
from fulfillment.models import Delivery, DeliveryAttempt, WebhookEndpoint
from fulfillment.policy.delivery import DeliveryState
from fulfillment.policy.webhook_body import WebhookFormat
from fulfillment.webhooks import WebhookForm

SHOWN_ATTEMPTS = 100
"""Newest attempts that a delivery shows."""

_ENDPOINT_ID = re.compile(r"we_[0-9a-f]{32}")
_DELIVERY_ID = re.compile(r"dlv_[0-9a-f]{32}")


class EndpointShape(schema.Plain):
    """A webhook endpoint; its secret is never shown again."""

    id = serializers.CharField()
    url = serializers.CharField()
    format = serializers.ChoiceField(choices=list(WebhookFormat))
    owner = serializers.CharField()
    workflow = serializers.CharField(
        allow_null=True, help_text="The one it belongs to; null: all workflows of its owner."
    )
    created_at = serializers.DateTimeField()
    disabled_at = serializers.DateTimeField(allow_null=True)
    disabled_reason = serializers.CharField(
        allow_blank=True, help_text="`gone`: the receiver answered 410."
    )


class NewEndpointShape(EndpointShape):
    """An endpoint as it was made, with the secret if AIRS made it."""

    secret = serializers.CharField(required=False, help_text="`whsec_…`, shown this once.")


class EndpointList(schema.Plain):
    """Endpoints, newest first."""

    items = EndpointShape(many=True)
    next = serializers.CharField(allow_null=True)


class AttemptShape(schema.Plain):
    """One attempt; what the receiver answered is not kept but for its status."""

    number = serializers.IntegerField()
    at = serializers.DateTimeField()
    duration_s = serializers.FloatField()
    status = serializers.IntegerField(allow_null=True)
    code = serializers.CharField(allow_blank=True, help_text="What was wrong; empty for nothing.")


class DeliveryShape(schema.Plain):
    """An event on its way to an endpoint."""

    id = serializers.CharField()
    event = serializers.CharField(help_text="`webhook-id` of every attempt.")
    type = serializers.CharField()
    workflow = serializers.CharField()
    round = serializers.IntegerField()
    state = serializers.ChoiceField(choices=[state.name for state in DeliveryState])
    code = serializers.CharField(allow_blank=True)
    attempts = serializers.IntegerField()
    next_attempt_at = serializers.DateTimeField(allow_null=True)
    created_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)
    log = AttemptShape(many=True, help_text=f"The newest {SHOWN_ATTEMPTS} attempts, oldest first.")


class DeliveryList(schema.Plain):
    """Deliveries, newest first."""

    items = DeliveryShape(many=True)
    next = serializers.CharField(allow_null=True)


class EndpointQuery(schema.Plain):
    """Query parameters of `GET /webhook-endpoints`."""

    workflow = schema.TextField(
        required=False, max_length=64, help_text="The endpoint of this workflow."
    )
    cursor = schema.TextField(required=False, max_length=200)
    limit = schema.WholeField(required=False, default=100, min_value=1, max_value=500)


class DeliveryQuery(schema.Plain):
    """Query parameters of `GET /webhook-endpoints/{id}/deliveries`."""

    state = schema.ChoiceField(required=False, choices=[state.name for state in DeliveryState])
    cursor = schema.TextField(required=False, max_length=200)
    limit = schema.WholeField(required=False, default=100, min_value=1, max_value=500)


class WebhookEndpointsView(ApiView):
    """All endpoints, and registering one that hears of all workflows of its owner."""

    @extend_schema(
        operation_id="list_webhook_endpoints",
        parameters=[EndpointQuery],
        responses=answers(EndpointList, 200, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """List endpoints, newest first: one's own, or everybody's for operators."""
        asked = checked_query(request, EndpointQuery)
        found = _visible(request).order_by("-pk")
        if "workflow" in asked:
            found = found.filter(workflow__public_id=asked["workflow"])
        return _page(asked, found, "e", endpoint_as_json)

    @extend_schema(
        operation_id="register_webhook_endpoint",
        request=schema.WebhookForm,
        responses=answers(NewEndpointShape, 201, 400, 409, 415, 422),
    )
    def post(self, request: Request) -> HttpResponse:
        """Register an endpoint. The same URL again is the same one, enabled again (200)."""
        form = WebhookForm(**checked_body(request, schema.WebhookForm))
        webhooks.refuse_unsafe(form, field="url")
        endpoint, is_new = webhooks.register(
            owner=request.user.username, form=form, now=database_now()
        )
        shown = endpoint_as_json(endpoint)
        if is_new and (secret := webhooks.generated_secret(endpoint)):
            shown["secret"] = secret
        return json_answer(
            shown,
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/webhook-endpoints/{endpoint.public_id}"},
        )


class WebhookEndpointView(ApiView):
    """One endpoint."""

    @extend_schema(operation_id="get_webhook_endpoint", responses=answers(EndpointShape, 200, 404))
    def get(self, request: Request, endpoint_id: str) -> HttpResponse:
        """Show an endpoint."""
        bodies.query(request, known=())
        return json_answer(endpoint_as_json(_find(request, endpoint_id)))

    @extend_schema(
        operation_id="delete_webhook_endpoint",
        responses={204: None, (404, "application/problem+json"): schema.ProblemShape},
    )
    def delete(self, request: Request, endpoint_id: str) -> HttpResponse:
        """Delete an endpoint, its deliveries and their log; what is on its way may still arrive."""
        bodies.query(request, known=())
        _find(request, endpoint_id).delete()
        return HttpResponse(status=204)


class WebhookDeliveriesView(ApiView):
    """What was and will be delivered to an endpoint."""

    @extend_schema(
        operation_id="list_webhook_deliveries",
        parameters=[DeliveryQuery],
        responses=answers(DeliveryList, 200, 404, 422),
    )
    def get(self, request: Request, endpoint_id: str) -> HttpResponse:
        """List deliveries with their attempts, newest first."""
        asked = checked_query(request, DeliveryQuery)
        found = _shown_deliveries().filter(endpoint=_find(request, endpoint_id)).order_by("-pk")
        if "state" in asked:
            found = found.filter(state=DeliveryState[asked["state"]])
        return _page(asked, found, "d", delivery_as_json)


class WebhookReplayView(ApiView):
    """Sending a delivery again."""

    @extend_schema(
        operation_id="replay_webhook_delivery",
        request=None,
        responses=answers(DeliveryShape, 202, 404),
    )
    def post(self, request: Request, endpoint_id: str, delivery_id: str) -> HttpResponse:
        """Send the same id and bytes again within seconds, and for a day until it is taken."""
        bodies.query(request, known=())
        found = Delivery.objects.filter(endpoint=_find(request, endpoint_id))
        delivery = None
        if _DELIVERY_ID.fullmatch(delivery_id):
            delivery = found.filter(public_id=delivery_id).first()
        if delivery is None:
            raise NotFound("There is no such delivery.")
        deliveries.replay(delivery.pk, now=database_now())
        return json_answer(delivery_as_json(_shown_deliveries().get(pk=delivery.pk)), status=202)


def endpoint_as_json(endpoint: WebhookEndpoint) -> dict[str, Any]:
    """Return what clients see of an endpoint."""
    return {
        "id": endpoint.public_id,
        "url": endpoint.url,
        "format": endpoint.format,
        "owner": endpoint.owner,
        "workflow": endpoint.workflow.public_id if endpoint.workflow else None,
        "created_at": endpoint.created_at,
        "disabled_at": endpoint.disabled_at,
        "disabled_reason": endpoint.disabled_reason,
    }


def delivery_as_json(delivery: Delivery) -> dict[str, Any]:
    """Return what clients see of a delivery."""
    pending = delivery.state == DeliveryState.PENDING
    return {
        "id": delivery.public_id,
        "event": delivery.event.public_id,
        "type": delivery.event.kind,
        "workflow": delivery.event.workflow.public_id,
        "round": delivery.event.round,
        "state": DeliveryState(delivery.state).name,
        "code": delivery.code,
        "attempts": delivery.attempts,
        "next_attempt_at": delivery.due_at if pending else None,
        "created_at": delivery.created_at,
        "finished_at": delivery.finished_at,
        "log": [
            {
                "number": attempt.number,
                "at": attempt.started_at,
                "duration_s": attempt.duration_s,
                "status": attempt.status,
                "code": attempt.code,
            }
            for attempt in delivery.log.all()
        ],
    }


def _shown_deliveries() -> Any:
    newest = DeliveryAttempt.objects.filter(
        number__gt=F("delivery__attempts") - SHOWN_ATTEMPTS
    ).order_by("number")
    return Delivery.objects.select_related("event__workflow").prefetch_related(
        Prefetch("log", queryset=newest)
    )


def _visible(request: Request) -> Any:
    found = WebhookEndpoint.objects.select_related("workflow")
    return found if sees_everything(request) else found.filter(owner=request.user.username)


def _find(request: Request, public_id: str) -> WebhookEndpoint:
    endpoint = None
    if _ENDPOINT_ID.fullmatch(public_id):
        endpoint = _visible(request).filter(public_id=public_id).first()
    if endpoint is None:
        raise NotFound("There is no such webhook endpoint.")
    assert isinstance(endpoint, WebhookEndpoint)
    return endpoint


def _page(asked: Mapping[str, Any], found: Any, kind: str, show: Any) -> HttpResponse:
    if "cursor" in asked:
        found = found.filter(pk__lt=from_cursor(kind, asked["cursor"]))
    limit = asked["limit"]
    page = list(found[: limit + 1])
    return json_answer(
        {
            "items": [show(row) for row in page[:limit]],
            "next": to_cursor(kind, page[limit - 1].pk) if len(page) > limit else None,
        }
    )
