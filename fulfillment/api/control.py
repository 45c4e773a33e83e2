"""Acts upon a workflow."""

from collections.abc import Callable

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import control
from fulfillment.api.base import (
    KEY_HEADER,
    ApiView,
    answers,
    find_workflow,
    json_answer,
    show_workflow,
)
from fulfillment.models import Workflow


def _answer(request: Request, public_id: str, act: Callable[..., Workflow]) -> HttpResponse:
    bodies.query(request, known=())
    workflow = find_workflow(request, public_id)
    return json_answer(
        show_workflow(act(workflow_id=workflow.pk, actor=str(request.user.username)))
    )


class WorkflowCloseView(ApiView):
    """The end of a workflow's input."""

    @extend_schema(
        operation_id="close_workflow",
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Take no more rows."""
        return _answer(request, public_id, control.close)


class WorkflowPauseView(ApiView):
    """A workflow that is to wait."""

    @extend_schema(
        operation_id="pause_workflow",
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Send nothing more of a workflow until it is resumed; its deadline goes on."""
        return _answer(request, public_id, control.pause)


class WorkflowResumeView(ApiView):
    """A workflow that is to go on."""

    @extend_schema(
        operation_id="resume_workflow",
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Send of a paused workflow again."""
        return _answer(request, public_id, control.resume)


class WorkflowCancelView(ApiView):
    """The early end of a workflow."""

    @extend_schema(
        operation_id="cancel_workflow",
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """End a workflow now; finished work is kept."""
        return _answer(request, public_id, control.cancel)


class WorkflowCompleteView(ApiView):
    """The forced completion of a workflow."""

    @extend_schema(
        operation_id="complete_workflow",
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """End a workflow now, as what its requests say; open ones are not awaited."""
        return _answer(request, public_id, control.complete)


class WorkflowRetryView(ApiView):
    """A new round of a workflow."""

    @extend_schema(
        operation_id="retry_workflow",
        parameters=[KEY_HEADER],
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Rate in a new round what did not complete, with a fresh deadline."""
        key = bodies.idempotency_key(request._request)
        return _answer(request, public_id, lambda **of: control.retry(key=key, **of))
