"""Workflows: making, listing, showing, appending to and closing them."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import completion, intake, progress
from fulfillment.api.base import (
    KEY_HEADER,
    ROW_BODIES,
    ApiView,
    answers,
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
from fulfillment.policy.lifecycle import WorkflowState

_LATER = ("webhook", "dry_run")
"""Fields of the interface that this release does not serve yet."""


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
                    schema.workflow_as_json(workflow, counted, now=now)
                    for workflow, counted in zip(shown, progress.read_many(shown), strict=True)
                ],
                "next": to_cursor("w", shown[-1].pk) if len(page) > limit else None,
            }
        )

    @extend_schema(
        operation_id="create_workflow",
        parameters=[schema.UploadParameters, KEY_HEADER],
        request={bodies.JSON_TYPE: schema.WorkflowBody, **ROW_BODIES},
        responses=answers(schema.SubmissionShape, 202, 400, 409, 413, 415, 422, 507),
    )
    def post(self, request: Request) -> HttpResponse:
        """Create a workflow from JSON, or from an NDJSON file with the fields in the query."""
        key = bodies.idempotency_key(request._request)
        kind = bodies.content_type(request._request, taken=(bodies.JSON_TYPE, *bodies.NDJSON_TYPES))
        if kind == bodies.JSON_TYPE:
            submission = _submit_json(request, key)
        else:
            submission = _submit_file(request, key)
        workflow = submission.workflow
        return json_answer(
            {**show_workflow(workflow), **submission.answer},
            status=202,
            headers={
                "Location": f"/api/v1/workflows/{workflow.public_id}",
                **replayed(submission),
            },
        )


class WorkflowView(ApiView):
    """One workflow."""

    @extend_schema(operation_id="get_workflow", responses=answers(schema.WorkflowShape, 200, 404))
    def get(self, request: Request, public_id: str) -> HttpResponse:
        """Show a workflow and its progress."""
        bodies.query(request, known=())
        return json_answer(show_workflow(find_workflow(request, public_id)))


class WorkflowRequestsView(ApiView):
    """Rows of an open workflow."""

    @extend_schema(
        operation_id="append_requests",
        parameters=[KEY_HEADER],
        request={bodies.JSON_TYPE: schema.RowsBody, **ROW_BODIES},
        responses=answers(schema.Acceptance, 200, 400, 404, 409, 413, 415, 422, 507),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Append rows to an open workflow."""
        bodies.query(request, known=())
        workflow = find_workflow(request, public_id)
        key = bodies.idempotency_key(request._request)
        kind = bodies.content_type(request._request, taken=(bodies.JSON_TYPE, *bodies.NDJSON_TYPES))
        if kind == bodies.JSON_TYPE:
            chunks = bodies.json_rows(request._request, limit=settings.AIRS_MAX_JSON_BYTES)
        else:
            chunks = bodies.stream(request._request)
        submission = intake.append(
            workflow=workflow,
            body=intake.Body(chunks=chunks),
            owner=request.user.username,
            idempotency_key=key,
        )
        return json_answer(submission.answer, headers=replayed(submission))


class WorkflowCloseView(ApiView):
    """The end of a workflow's input."""

    @extend_schema(
        operation_id="close_workflow",
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Take no more rows."""
        bodies.query(request, known=())
        return json_answer(
            show_workflow(completion.close(workflow_id=find_workflow(request, public_id).pk))
        )


def _submit_json(request: Request, key: str | None) -> intake.Submission:
    bodies.query(request, known=())
    body = bodies.json_object(request._request, limit=settings.AIRS_MAX_JSON_BYTES)
    given = body.values(leaving=["requests"])
    _refuse_later(given)
    bodies.refuse_unknown(given, known=schema.WorkflowForm().fields)
    if isinstance(cache := given.get("cache"), dict):
        _refuse_unknown_cache(cache)
    fields = dict(schema.checked(schema.WorkflowForm(data=given)))
    close = fields.pop("close", None)
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


def _submit_file(request: Request, key: str | None) -> intake.Submission:
    _refuse_later(request.query_params)
    fields = dict(checked_query(request, schema.WorkflowParameters))
    close = fields.pop("close")
    return intake.submit(
        form=intake.WorkflowForm(**fields),
        body=intake.Body(chunks=bodies.stream(request._request)),
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


def _refuse_unknown_cache(cache: Mapping[str, Any]) -> None:
    known = [f"cache.{name}" for name in schema.CacheForm().fields]
    bodies.refuse_unknown([f"cache.{name}" for name in cache], known=known)
