"""Views of how busy the replicas of a model, or of a pool, were over time."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import duty_history, services, utilisation
from models_admin.api.access import View, answers
from models_admin.api.queries import unknown, whole
from models_admin.clock import database_now
from models_admin.duty_history import MOST_LINES, MOST_STEPS, Line, Span
from models_admin.services.problems import Problem, refuse

_HOURS, _MOST_HOURS = 24, 24 * 31
_SHORTEST_S, _LONGEST_S = 30, 7 * 24 * 3600
_NICE_S: Final = (60, 300, 900, 1800, 3600, 2 * 3600, 6 * 3600, 24 * 3600)
_POINTS: Final = 120
"""Steps of an answer when none is asked for, at most."""
_LATE: Final = {"hour": timedelta(hours=1), "day": timedelta(days=1)}
_PARAMETERS: Final = (
    OpenApiParameter("hours", int, description=f"How far back, 1 to {_MOST_HOURS}; {_HOURS}"),
    OpenApiParameter(
        "step",
        int,
        description=f"Seconds, {_SHORTEST_S} to {_LONGEST_S:,}, that give {MOST_STEPS} steps at "
        f"most; such that there are about {_POINTS} if it is left out",
    ),
)


class DutyShape(serializers.Serializer[Any]):
    """Busy over lived up to now, 0 to 1; null where no replica lived."""

    hour = serializers.FloatField(allow_null=True, help_text="Of the last 60 minutes")
    day = serializers.FloatField(allow_null=True, help_text="Of the last 24 hours")


class UseStepShape(serializers.Serializer[Any]):
    """What replicas did in a step; a step in which nothing was sampled is left out."""

    at = serializers.DateTimeField(help_text="Begin of the step")
    busy_s = serializers.FloatField(help_text="Seconds in which they computed, of all together")
    replica_s = serializers.FloatField(help_text="Seconds that they lived, of all together")
    device_s = serializers.FloatField(help_text="The same, as often as each holds devices")
    duty = serializers.FloatField(
        allow_null=True,
        help_text="Busy over lived, 0 to 1, each replica counted as often as it holds devices",
    )


class ReplicaUseShape(serializers.Serializer[Any]):
    """What a replica did, through all its runs."""

    agent = serializers.CharField()
    ordinal = serializers.IntegerField()
    items = UseStepShape(many=True)


class ModelPartShape(serializers.Serializer[Any]):
    """What a model did in a pool."""

    model = serializers.CharField()
    items = UseStepShape(many=True)


class UtilisationShape(serializers.Serializer[Any]):
    """How busy replicas were; sampled each half minute, kept for AIRS_KEEP_QUEUE_SAMPLES."""

    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    step_s = serializers.FloatField()
    duty = DutyShape()
    items = UseStepShape(many=True)


class ModelUtilisationShape(UtilisationShape):
    """How busy a model was."""

    model = serializers.CharField()
    replicas = ReplicaUseShape(
        many=True, help_text=f"Of more than {MOST_LINES} those that lived longest"
    )


class PoolUtilisationShape(UtilisationShape):
    """How busy a pool was."""

    pool = serializers.CharField()
    models = ModelPartShape(
        many=True, help_text=f"Of more than {MOST_LINES} those that lived longest"
    )


class ModelUtilisationView(View):
    """How busy the replicas of a model were."""

    @extend_schema(
        operation_id="get_model_utilisation",
        parameters=list(_PARAMETERS),
        responses=answers(ModelUtilisationShape, 200, 404, 422),
    )
    def get(self, request: Request, model_id: str) -> Response:
        """Show the duty cycle of a model and of its replicas; of external models nothing."""
        model = services.find_model(model_id)
        now = database_now()
        span = _asked(request, now)
        replicas = duty_history.longest(duty_history.of_replicas(model.pk, span))
        return Response(
            {
                "model": model.pk,
                **_use(span, duty_history.of_model(model.pk, span)),
                "duty": _of_late(now, model_id=model.pk),
                "replicas": [
                    {"agent": agent, "ordinal": ordinal, "items": _buckets(line)}
                    for (agent, ordinal), line in replicas.items()
                ],
            }
        )


class PoolUtilisationView(View):
    """How busy the replicas of a pool were."""

    @extend_schema(
        operation_id="get_pool_utilisation",
        parameters=list(_PARAMETERS),
        responses=answers(PoolUtilisationShape, 200, 404, 422),
    )
    def get(self, request: Request, pool_id: str) -> Response:
        """Show the duty cycle of a pool and of the models in it, removed ones included."""
        pool = services.find_pool(pool_id)
        now = database_now()
        span = _asked(request, now)
        models = duty_history.of_models(pool.pk, span)
        return Response(
            {
                "pool": pool.pk,
                **_use(span, duty_history.together(models.values())),
                "duty": _of_late(now, pool_id=pool.pk),
                "models": [
                    {"model": model_id, "items": _buckets(line)}
                    for model_id, line in duty_history.longest(models).items()
                ],
            }
        )


def _asked(request: Request, now: datetime) -> Span:
    """Return the span that was asked for; raises InvalidFields."""
    query = request.query_params
    problems = unknown(query, {"hours", "step"})
    hours = whole("hours", query.get("hours", str(_HOURS)), 1, _MOST_HOURS, problems)
    length = timedelta(hours=hours)
    if "step" in query:
        step_s = whole("step", query["step"], _SHORTEST_S, _LONGEST_S, problems)
    else:
        step_s = next(step for step in _NICE_S if length / timedelta(seconds=step) <= _POINTS)
    refuse(problems)
    step = timedelta(seconds=step_s)
    if length / step > MOST_STEPS:
        least_s = math.ceil(length.total_seconds() / MOST_STEPS)
        detail = f"gives more than {MOST_STEPS} steps in {hours} h; from {least_s} s it does not"
        refuse([Problem(field="step", code="out_of_range", detail=detail)])
    return Span.ending(now.astimezone(UTC), length, step)


def _of_late(now: datetime, **of: str) -> dict[str, float | None]:
    return dict(zip(_LATE, utilisation.duty(list(_LATE.values()), now=now, **of), strict=True))


def _use(span: Span, line: Line) -> dict[str, Any]:
    return {
        "since": span.since,
        "until": span.until,
        "step_s": span.step.total_seconds(),
        "items": _buckets(line),
    }


def _buckets(line: Line) -> list[dict[str, Any]]:
    return [
        {
            "at": bucket.at,
            "busy_s": round(bucket.busy_s, 3),
            "replica_s": round(bucket.replica_s, 3),
            "device_s": round(bucket.device_s, 3),
            "duty": None if bucket.duty is None else round(bucket.duty, 4),
        }
        for bucket in line
    ]
