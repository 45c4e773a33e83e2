"""Raters and their versions."""

from collections.abc import Sequence
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import control, raters, windows
from fulfillment.api.base import ApiView, answers, checked_body, json_answer
from fulfillment.authentication import (
    IsOperator,
)
from fulfillment.clock import database_now
from fulfillment.models import Rater

_MOST_RATERS = 500


def _as_json(found: Sequence[Rater]) -> list[dict[str, Any]]:
    """Return raters with the windows of their models."""
    by_model = windows.written({rater.model_id for rater in found}, database_now())
    return [
        schema.rater_as_json(rater, windows=by_model.get(rater.model_id, ())) for rater in found
    ]


class RatersView(ApiView):
    """All raters, and registering one."""

    writes = IsOperator

    @extend_schema(operation_id="list_raters", responses=answers(schema.RaterList))
    def get(self, request: Request) -> HttpResponse:
        """List raters by id."""
        asked = bodies.query(request, known=["cursor"])
        found = Rater.objects.select_related("current_version").order_by("pk")
        if "cursor" in asked:
            found = found.filter(pk__gt=asked["cursor"])
        page = list(found[: _MOST_RATERS + 1])
        return json_answer(
            {
                "items": _as_json(page[:_MOST_RATERS]),
                "next": page[_MOST_RATERS - 1].pk if len(page) > _MOST_RATERS else None,
            }
        )

    @extend_schema(
        operation_id="register_rater",
        request=schema.RaterForm,
        responses=answers(schema.RaterShape, 201, 400, 409, 415, 422),
    )
    def post(self, request: Request) -> HttpResponse:
        """Register a rater; the same one again changes nothing."""
        given = checked_body(request, schema.RaterForm)
        rater, is_new = raters.register(
            Rater(key_level=given.pop("key_level", ""), **given), now=database_now()
        )
        return json_answer(
            _as_json([rater])[0],
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/raters/{rater.pk}"},
        )


class RaterView(ApiView):
    """One rater."""

    writes = IsOperator

    @extend_schema(operation_id="get_rater", responses=answers(schema.RaterShape, 200, 404))
    def get(self, request: Request, rater_id: str) -> HttpResponse:
        """Show a rater."""
        bodies.query(request, known=())
        return json_answer(_as_json([raters.find(rater_id)])[0])

    @extend_schema(
        operation_id="change_rater",
        request=schema.RaterChanges,
        responses=answers(schema.RaterShape, 200, 400, 404, 415, 422),
    )
    def patch(self, request: Request, rater_id: str) -> HttpResponse:
        """Change a rater; what decides the score makes a new version for new workflows."""
        changes = checked_body(request, schema.RaterChanges, partial=True)
        paused = changes.pop("paused", None)
        now = database_now()
        rater = raters.change(rater_id=rater_id, changes=changes, now=now)
        if paused is False:
            rater = raters.resume(rater_id=rater_id)
        elif paused:
            rater = raters.pause(
                rater_id=rater_id,
                code=raters.PAUSED_BY_OPERATOR,
                detail=f"Paused by {request.user.username}.",
                now=now,
            )
        return json_answer(_as_json([rater])[0])


class RaterVersionsView(ApiView):
    """The versions of a rater."""

    @extend_schema(
        operation_id="list_rater_versions",
        responses=answers(schema.RaterVersionList, 200, 404),
    )
    def get(self, request: Request, rater_id: str) -> HttpResponse:
        """List the versions of a rater, newest first."""
        bodies.query(request, known=())
        current_id = raters.find(rater_id).current_version_id
        return json_answer(
            {
                "items": [
                    schema.version_as_json(version, current_id=current_id)
                    for version in raters.versions(rater_id)
                ],
                "next": None,
            }
        )


class RaterVersionRetireView(ApiView):
    """The end of an old rater version."""

    writes = IsOperator

    @extend_schema(
        operation_id="retire_rater_version",
        request=None,
        responses=answers(schema.RaterVersionShape, 200, 404, 409),
    )
    def post(self, request: Request, rater_id: str, number: int) -> HttpResponse:
        """End what still waits for an old version: FAILED `version_retired`."""
        bodies.query(request, known=())
        version = control.retire(
            version=raters.find_version(rater_id, number),
            now=database_now(),
            actor=request.user.username,
        )
        return json_answer(
            schema.version_as_json(version, current_id=version.rater.current_version_id)
        )
