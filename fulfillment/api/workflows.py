"""Workflows: making, listing, showing, changing and appending to them."""

from typing import Any

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import control, intake, progress, promises, standings, webhooks
from fulfillment.api import submissions
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
from fulfillment.api.estimates import estimated
from fulfillment.api.submissions import Asked
from fulfillment.authentication import role_of
from fulfillment.clock import database_now
from fulfillment.estimates_schema import EstimateShape
from fulfillment.models import WebhookEndpoint, Workflow
from fulfillment.policy.lifecycle import WorkflowState


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
        said = promises.of(workflow.pk for workflow in shown)
        told = standings.of(shown, now)
        return json_answer(
            {
                "items": [
                    schema.workflow_as_json(
                        workflow,
                        counted,
                        eta=FORECASTER.eta(workflow, counted, now=now),
                        forecast=said.get(workflow.pk),
                        standing=told.get(workflow.pk),
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
        responses={
            **answers(schema.SubmissionShape, 202, 400, 409, 413, 415, 422, 507),
            (200, bodies.JSON_TYPE): EstimateShape,
        },
    )
    def post(self, request: Request) -> HttpResponse:
        """Create a workflow from JSON, or from a file of rows with the fields in the query.

        Files are NDJSON, CSV or Parquet. With `dry_run` it is checked and estimated only: 200.
        """
        key = bodies.idempotency_key(request._request)
        asked = submissions.read(
            request, form=schema.WorkflowForm, parameters=schema.WorkflowParameters
        )
        if asked.more.get("dry_run"):
            return estimated(request, asked)
        submission = _submitted(request, asked, key)
        workflow = submission.workflow
        # Of a repeated one, what was said at first is told.
        brought = submission.answer if "pending" in submission.answer else None
        return json_answer(
            {
                **show_workflow(workflow, brought=None if submission.replayed else brought),
                **submission.answer,
                **_webhook(workflow),
            },
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
            role=role_of(request),
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
        kind = bodies.content_type(request._request, taken=submissions.ROW_TYPES)
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


def _submitted(request: Request, asked: Asked, key: str | None) -> intake.Submission:
    owner, role = request.user.username, role_of(request)
    if asked.body is None:
        return intake.create_empty(form=asked.form, owner=owner, role=role, idempotency_key=key)
    return intake.submit(
        form=asked.form,
        body=asked.body,
        owner=owner,
        role=role,
        idempotency_key=key,
        close=asked.close,
    )


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
