"""Trying a model: one call, as executors make it."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin.api.access import View, actor, answers, given_by
from models_admin.api.forms import TryForm
from models_admin.asking import Question
from models_admin.clock import database_now
from models_admin.trial import Trial, try_model


class TrialError(serializers.Serializer[Any]):
    """Why a model gave no answer that can be used."""

    code = serializers.CharField()
    detail = serializers.CharField(help_text="In its server's words, without secrets")


class TrialShape(serializers.Serializer[Any]):
    """What came of trying a model."""

    model = serializers.CharField()
    address = serializers.CharField()
    latency_s = serializers.FloatField()
    version = serializers.CharField(help_text="As the answer names it")
    rows = serializers.ListField(
        child=serializers.DictField(),
        help_text="Of each row its outputs by name; `truncated`: what the model cut, in tokens",
    )
    content = serializers.CharField()
    finish_reason = serializers.CharField()
    truncated = serializers.BooleanField()
    error = TrialError(allow_null=True)


class ModelTryView(View):
    """Trying a model."""

    @extend_schema(
        operation_id="try_model",
        request=TryForm,
        responses=answers(TrialShape, 200, 400, 404, 409, 422),
    )
    def post(self, request: Request, model_id: str) -> Response:
        """Ask a model once, as executors do; nothing is archived.

        What its server did wrong is in `error`: the answer is 200 all the same.
        """
        given = given_by(TryForm, request)
        question = Question(
            rows=[(row["query"], row["text"]) for row in given.get("rows", [])],
            message=given.get("message", ""),
        )
        tried = try_model(model_id, question, now=database_now(), actor=actor(request))
        return Response(_shown(model_id, tried))


def _shown(model_id: str, tried: Trial) -> dict[str, Any]:
    """Return what clients see of a trial."""
    answer = tried.answer
    return {
        "model": model_id,
        "address": tried.address,
        "latency_s": round(answer.latency_s, 4),
        "version": answer.version,
        "rows": answer.rows,
        "content": answer.content,
        "finish_reason": answer.finish_reason,
        "truncated": answer.truncated,
        "error": {"code": answer.code, "detail": answer.detail} if answer.code else None,
    }
