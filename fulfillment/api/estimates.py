"""What a submission, or a new version of a rater, would cost."""

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import estimates_schema as schema
from fulfillment import estimating, promotion
from fulfillment.api import submissions
from fulfillment.api.base import (
    ENCODING_HEADER,
    FORECASTER,
    ROW_BODIES,
    ApiView,
    answers,
    checked_query,
    json_answer,
)
from fulfillment.api.submissions import Asked
from fulfillment.authentication import role_of
from fulfillment.clock import database_now


def estimated(request: Request, asked: Asked) -> HttpResponse:
    """Answer what would become of a submission."""
    return json_answer(
        estimating.estimate(
            form=asked.form,
            body=asked.body,
            owner=request.user.username,
            role=role_of(request),
            forecaster=FORECASTER,
            sample_of=asked.more.get("sample_of"),
        )
    )


class EstimatesView(ApiView):
    """Estimates of submissions."""

    @extend_schema(
        operation_id="estimate_workflow",
        parameters=[schema.EstimateFileParameters, ENCODING_HEADER],
        request={bodies.JSON_TYPE: schema.EstimateBody, **ROW_BODIES},
        responses=answers(schema.EstimateShape, 200, 400, 413, 415, 422, 507),
    )
    def post(self, request: Request) -> HttpResponse:
        """Estimate what `POST /workflows` would make of the same body, or of more of its kind.

        Hits, model calls, accelerator-seconds, ETA, whether in time and what would make it so. What
        would be refused is refused; nothing is stored.
        """
        return estimated(
            request,
            submissions.read(
                request, form=schema.EstimateForm, parameters=schema.EstimateParameters
            ),
        )


class PromotionEstimateView(ApiView):
    """What a new version of a rater would cost."""

    @extend_schema(
        operation_id="estimate_promotion",
        parameters=[schema.PromotionQuery],
        responses=answers(schema.PromotionShape, 200, 404, 422),
    )
    def get(self, request: Request, rater_id: str) -> HttpResponse:
        """Show what the archive saves with the current version, and another one would not."""
        days = checked_query(request, schema.PromotionQuery)["days"]
        return json_answer(promotion.estimate(rater_id, days=days, now=database_now()))
