"""Workflows: making, listing, showing, changing and appending to them."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import control, intake, progress, webhooks
from fulfillment.api.base import (
    ENCODING_HEADER,
    FORECASTER,
    KEY_HEADER,
    ROW_BODIES,
    ApiView,
    answers,
    checked_body,
    checked_query,
    find_workflow,
    from_cursor,
    json_answer,
    replayed,
    show_workflow,
    to_cursor,
    visible_workflows,
)
from fulfillment.clock import database_now
from fulfillment.errors import BadUpload, InvalidFields
from fulfillment.formats import Format
from fulfillment.models import WebhookEndpoint, Workflow
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.webhooks import WebhookForm

_LATER = ("dry_run",)
"""Fields of the interface that this release does not serve yet."""
_ROW_TYPES = (bodies.JSON_TYPE, *bodies.FILE_TYPES)


class WorkflowsView(ApiView):
    """All workflows, and making one."""

    @extend_schema(
        operation_id="list_workflows",
        parameters=[schema.WorkflowQuery],
        responses=answers(schema.WorkflowList, 200, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """List workflows, newest first: one's own, or everybody's for operators."""
        asked = checked_query(request, schema.WorkflowQuery)
        found = visible_workflows(request)
        if "owner" in asked:
            found = found.filter(owner=asked["owner"])
        if "rater" in asked:
            found = found.filter(rater_id=asked["rater"])
        if "state" in asked:
            found = found.filter(state=WorkflowState[asked["state"]])
        if "cursor" in asked:
            found = found.filter(pk__lt=from_cursor("w", asked["cursor"]))
        limit = asked["limit"]
        page = list(found.order_by("-pk")[: limit + 1])
        shown, now = page[:limit], database_now()
        return json_answer(
            {
                "items": [
                    schema.workflow_as_json(
                        workflow, counted, eta=FORECASTER.eta(workflow, counted, now=now)
                    )
                    for workflow, counted in zip(shown, progress.read_many(shown), strict=True)
                ],
                "next": to_cursor("w", shown[-1].pk) if len(page) > limit else None,
            }
        )

    @extend_schema(
        operation_id="create_workflow",
        parameters=[schema.UploadParameters, KEY_HEADER, ENCODING_HEADER],
        request={bodies.JSON_TYPE: schema.WorkflowBody, **ROW_BODIES},
        responses=answers(schema.SubmissionShape, 202, 400, 409, 413, 415, 422, 507),
    )
    def post(self, request: Request) -> HttpResponse:
        """Create a workflow from JSON, or from a file of rows with the fields in the query.

        Files are NDJSON, CSV or Parquet.
        """
        key = bodies.idempotency_key(request._request)
        kind = bodies.content_type(request._request, taken=_ROW_TYPES)
        if kind == bodies.JSON_TYPE:
            submission = _submit_json(request, key)
        else:
            submission = _submit_file(request, key, bodies.FILE_TYPES[kind])
        workflow = submission.workflow
        return json_answer(
            {**show_workflow(workflow), **submission.answer, **_webhook(workflow)},
            status=202,
            headers={
                "Location": f"/api/v1/workflows/{workflow.public_id}",
                **replayed(submission),
            },
        )


class WorkflowView(ApiView):
    """One workflow, and what may be changed of it."""

    @extend_schema(operation_id="get_workflow", responses=answers(schema.WorkflowShape, 200, 404))
    def get(self, request: Request, public_id: str) -> HttpResponse:
        """Show a workflow and its progress."""
        bodies.query(request, known=())
        return json_answer(show_workflow(find_workflow(request, public_id)))

    @extend_schema(
        operation_id="change_workflow",
        request=schema.WorkflowChanges,
        responses=answers(schema.WorkflowShape, 200, 400, 404, 409, 415, 422),
    )
    def patch(self, request: Request, public_id: str) -> HttpResponse:
        """Change name, priority or deadline; what waits goes by it at once."""
        workflow = find_workflow(request, public_id)
        changes = control.Changes(**checked_body(request, schema.WorkflowChanges, partial=True))
        changed = control.change(
            workflow_id=workflow.pk,
            changes=changes,
            now=database_now(),
            actor=request.user.username,
        )
        return json_answer(show_workflow(changed))


class WorkflowRequestsView(ApiView):
    """Rows of an open workflow."""

    @extend_schema(
        operation_id="append_requests",
        parameters=[KEY_HEADER, ENCODING_HEADER],
        request={bodies.JSON_TYPE: schema.RowsBody, **ROW_BODIES},
        responses=answers(schema.Acceptance, 200, 400, 404, 409, 413, 415, 422, 507),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Append rows to an open workflow."""
        bodies.query(request, known=())
        workflow = find_workflow(request, public_id)
        key = bodies.idempotency_key(request._request)
        kind = bodies.content_type(request._request, taken=_ROW_TYPES)
        if kind == bodies.JSON_TYPE:
            rows = bodies.json_rows(request._request, limit=settings.AIRS_MAX_JSON_BYTES)
            body = intake.Body(chunks=rows)
        else:
            body = intake.Body(
                chunks=bodies.stream(request._request), format=bodies.FILE_TYPES[kind]
            )
        submission = intake.append(
            workflow=workflow,
            body=body,
            owner=request.user.username,
            idempotency_key=key,
        )
        return json_answer(submission.answer, headers=replayed(submission))


def _submit_json(request: Request, key: str | None) -> intake.Submission:
    bodies.query(request, known=())
    body = bodies.json_object(request._request, limit=settings.AIRS_MAX_JSON_BYTES)
    given = body.values(leaving=["requests"])
    _refuse_later(given)
    bodies.refuse_unknown(given, known=schema.WorkflowForm().fields)
    _refuse_unknown_inside(given, "cache", schema.CacheForm)
    _refuse_unknown_inside(given, "webhook", schema.WebhookForm)
    fields = dict(schema.checked(schema.WorkflowForm(data=given)))
    close = fields.pop("close", None)
    if "webhook" in fields:
        fields["webhook"] = WebhookForm(**fields["webhook"])
        webhooks.refuse_unsafe(fields["webhook"], field="webhook.url")
    form = intake.WorkflowForm(**{**fields.pop("cache", {}), **fields})
    owner = request.user.username
    if "requests" in body:
        return intake.submit(
            form=form,
            body=intake.Body(chunks=body.lines("requests")),
            owner=owner,
            idempotency_key=key,
            close=close is not False,
        )
    if close:
        raise BadUpload(
            "A workflow without requests cannot be closed at once: it would rate nothing.",
            code="empty_file",
        )
    return intake.create_empty(form=form, owner=owner, idempotency_key=key)


def _submit_file(request: Request, key: str | None, format: Format) -> intake.Submission:
    _refuse_later(request.query_params)
    fields = dict(checked_query(request, schema.WorkflowParameters))
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
    return intake.submit(
        form=intake.WorkflowForm(**fields),
        body=intake.Body(chunks=bodies.stream(request._request), format=format),
        owner=request.user.username,
        idempotency_key=key,
        close=close,
    )


def _refuse_later(given: Mapping[str, Any]) -> None:
    later = [name for name in given if name.partition(".")[0] in _LATER]
    if later:
        raise InvalidFields(
            f"{', '.join(later)}: not supported by this release.",
            code="not_supported",
            errors=[
                {"field": name, "code": "not_supported", "detail": "leave it out"} for name in later
            ],
        )


def _refuse_unknown_inside(
    given: Mapping[str, Any], member: str, shape: type[schema.Plain]
) -> None:
    if isinstance(inner := given.get(member), dict):
        known = [f"{member}.{name}" for name in shape().fields]
        bodies.refuse_unknown([f"{member}.{name}" for name in inner], known=known)


def _webhook(workflow: Workflow) -> dict[str, Any]:
    """Return what the answer to a submission adds of its webhook.

    Also to a repeated one: the first answer, with the secret, may have been lost.
    """
    endpoint = WebhookEndpoint.objects.filter(workflow=workflow).first()
    if endpoint is None:
        return {}
    shown = {"endpoint": endpoint.public_id, "url": endpoint.url, "format": endpoint.format}
    if secret := webhooks.generated_secret(endpoint):
        shown["secret"] = secret
    return {"webhook": shown}
