"""View of the quota peek."""

from typing import Any, Final

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import quota
from models_admin.api.access import WRITERS, View, answers
from models_admin.api.queries import unknown, whole
from models_admin.clock import database_now
from models_admin.policy.traffic_rules import TrafficClass
from models_admin.services.problems import Problem, refuse

_PARAMETERS: Final = (
    OpenApiParameter("priority", int, description="0 to 100; that of the workflow, or 50"),
    OpenApiParameter("workflow", str, description="Its id, wf_…: rules that name it hold, too"),
)


class ReasonShape(serializers.Serializer[Any]):
    """Why it is no more."""

    code = serializers.CharField()
    detail = serializers.CharField()


class QuotaShape(serializers.Serializer[Any]):
    """What could be sent now; counts are in batches."""

    rater = serializers.CharField(allow_null=True, help_text="Null of a model by itself")
    model = serializers.CharField()
    model_version = serializers.CharField()
    priority_class = serializers.ChoiceField(choices=list(TrafficClass))
    replicas = serializers.IntegerField(help_text="That can be sent to")
    calls_a_batch = serializers.IntegerField(help_text="Of a chat model an item is a call")
    window = serializers.IntegerField(help_text="That its replicas may hold")
    held = serializers.IntegerField()
    kept_for_high = serializers.IntegerField(help_text="Free, and not for this class")
    free = serializers.IntegerField(help_text="For the most urgent class")
    granted = serializers.IntegerField(help_text="That would leave now if they were ready")
    service_s = serializers.FloatField(
        allow_null=True, help_text="Of a replica for a batch, as measured"
    )
    wait_s = serializers.FloatField(allow_null=True, help_text="Until what is held is done")
    reasons = ReasonShape(many=True)


class QuotaView(View):
    """What of a rater could leave now."""

    @extend_schema(
        operation_id="peek_quota",
        parameters=list(_PARAMETERS),
        responses=answers(QuotaShape, 200, 404, 422),
    )
    def get(self, request: Request, name: str) -> Response:
        """Say what would be sent now for a rater, or to a model, and why it is no more."""
        asked = request.query_params
        problems = unknown(asked, {"priority", "workflow"})
        priority = None
        if "priority" in asked:
            priority = whole("priority", asked["priority"], 0, 100, problems)
        workflow = asked.get("workflow")
        if workflow is not None and "\0" in workflow:
            problems.append(Problem(field="workflow", code="bad_id", detail="holds no NUL"))
        refuse(problems)
        sees_all = getattr(request.auth, "role", None) in WRITERS
        found = quota.peek(
            name,
            priority=priority,
            workflow=workflow,
            owner=None if sees_all else str(request.user),
            now=database_now(),
        )
        return Response(QuotaShape(found).data)
