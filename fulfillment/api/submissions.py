"""Reading what a client wants rated, as JSON or as a file of rows, checked but for the rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import intake, webhooks
from fulfillment.api.base import checked_query
from fulfillment.errors import BadUpload, InvalidFields
from fulfillment.webhooks import WebhookForm

ROW_TYPES = (bodies.JSON_TYPE, *bodies.FILE_TYPES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a client wants; without a body where it brings no rows."""

    form: intake.WorkflowForm
    body: intake.Body | None
    close: bool
    more: Mapping[str, Any]
    """Fields that are not the workflow's: how the call is meant."""


def read(
    request: Request,
    *,
    form: type[schema.WorkflowForm],
    parameters: type[schema.WorkflowParameters],
) -> Asked:
    """Read a body of either kind: JSON with the fields of `form`, or rows with `parameters`."""
    kind = bodies.content_type(request._request, taken=ROW_TYPES)
    if kind == bodies.JSON_TYPE:
        return _read_json(request, form)
    fields = dict(checked_query(request, parameters))
    close = fields.pop("close")
    webhook = {
        name: fields.pop(f"webhook_{name}")
        for name in ("url", "format")
        if f"webhook_{name}" in fields
    }
    if webhook:
        if "url" not in webhook:
            raise InvalidFields(
                "webhook_format needs a webhook_url.",
                errors=[{"field": "webhook_url", "code": "missing_field", "detail": "is missing"}],
            )
        fields["webhook"] = WebhookForm(**webhook)
        webhooks.refuse_unsafe(fields["webhook"], field="webhook_url")
    body = intake.Body(chunks=bodies.stream(request._request), format=bodies.FILE_TYPES[kind])
    return _asked(fields, body, close=close)


def _read_json(request: Request, shape: type[schema.WorkflowForm]) -> Asked:
    bodies.query(request, known=())
    body = bodies.json_object(request._request, limit=settings.AIRS_MAX_JSON_BYTES)
    given = body.values(leaving=["requests"])
    bodies.refuse_unknown(given, known=shape().fields)
    _refuse_unknown_inside(given, "cache", schema.CacheForm)
    _refuse_unknown_inside(given, "webhook", schema.WebhookForm)
    fields = dict(schema.checked(shape(data=given)))
    close = fields.pop("close", None)
    if "webhook" in fields:
        fields["webhook"] = WebhookForm(**fields["webhook"])
        webhooks.refuse_unsafe(fields["webhook"], field="webhook.url")
    fields = {**fields.pop("cache", {}), **fields}
    if "requests" in body:
        rows = intake.Body(chunks=body.lines("requests"))
        return _asked(fields, rows, close=close is not False)
    if close:
        raise BadUpload(
            "A workflow without requests cannot be closed at once: it would rate nothing.",
            code="empty_file",
        )
    return _asked(fields, None, close=False)


def _asked(fields: Mapping[str, Any], body: intake.Body | None, *, close: bool) -> Asked:
    ours = intake.WorkflowForm.__dataclass_fields__.keys()
    return Asked(
        form=intake.WorkflowForm(**{name: fields[name] for name in fields if name in ours}),
        body=body,
        close=close,
        more={name: fields[name] for name in fields if name not in ours},
    )


def _refuse_unknown_inside(
    given: Mapping[str, Any], member: str, shape: type[schema.Plain]
) -> None:
    if isinstance(inner := given.get(member), dict):
        known = [f"{member}.{name}" for name in shape().fields]
        bodies.refuse_unknown([f"{member}.{name}" for name in inner], known=known)
