"""Acts upon a workflow."""

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import completion
from fulfillment.api.base import ApiView, answers, find_workflow, json_answer, show_workflow


class WorkflowCancelView(ApiView):
    """The early end of a workflow."""

    @extend_schema(
        operation_id="cancel_workflow",
        request=None,
        responses=answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """End a workflow now; finished work is kept."""
        bodies.query(request, known=())
        return json_answer(
            show_workflow(completion.cancel(workflow_id=find_workflow(request, public_id).pk))
        )
