"""What all views share: who may call, how bodies and queries are checked, cursors, answers."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import commitments, intake, progress, promises, standings
from fulfillment.authentication import (
    IsSubmitter,
    IsViewer,
    sees_everything,
)
from fulfillment.clock import database_now
from fulfillment.errors import InvalidFields, NotFound
from fulfillment.forecast import Forecaster
from fulfillment.models import Workflow
from fulfillment.policy.lifecycle import WorkflowState

_PUBLIC_ID = re.compile(r"wf_[0-9a-f]{32}")


WORKFLOW_COLUMNS = ("rater", "rater_version")


FORECASTER = Forecaster()


KEY_HEADER = OpenApiParameter(
    name="Idempotency-Key",
    location=OpenApiParameter.HEADER,
    description="The same key and body give the same object, for at least 24 hours.",
)


ENCODING_HEADER = OpenApiParameter(
    name="Content-Encoding",
    location=OpenApiParameter.HEADER,
    enum=["gzip", "identity"],
    description="gzip, of one or several members. Limits count decompressed bytes.",
)


ROW_BODIES: dict[str, Any] = {
    bodies.NDJSON_TYPES[0]: OpenApiTypes.STR,
    bodies.CSV_TYPE: OpenApiTypes.STR,
    bodies.PARQUET_TYPE: OpenApiTypes.BINARY,
}


def json_answer(
    data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    # orjson writes NaN and infinity as null, and instants in UTC with Z.
    return HttpResponse(
        orjson.dumps(data, option=orjson.OPT_UTC_Z),
        status=status,
        content_type=bodies.JSON_TYPE,
        headers=headers,
    )


class ApiView(APIView):
    """Base of the views: who may read and write, and what a refused upload leaves behind."""

    reads: ClassVar[type[BasePermission]] = IsViewer
    writes: ClassVar[type[BasePermission]] = IsSubmitter

    def get_permissions(self) -> list[BasePermission]:
        method = self.request.method if self.request else "GET"
        return [self.reads() if method in SAFE_METHODS else self.writes()]

    def finalize_response(  # type: ignore[override]
        self, request: Request, response: HttpResponseBase, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        if response.status_code >= 400:
            bodies.drain(request._request)
        return super().finalize_response(request, response, *args, **kwargs)  # type: ignore[arg-type]


def answers(
    shape: Any, status: int = 200, *problems: int, media_type: str = bodies.JSON_TYPE
) -> dict[Any, Any]:
    """Return the documented answers of a call."""
    return {
        (status, media_type): shape,
        **{
            (code, "application/problem+json"): schema.ProblemShape
            for code in (401, 403, *problems, 503)
        },
    }


def visible_workflows(request: Request) -> Any:
    """Return the workflows that the caller may see; one that is being taken in is hidden."""
    found = Workflow.objects.select_related(*WORKFLOW_COLUMNS).exclude(
        state=WorkflowState.RECEIVING
    )
    return found if sees_everything(request) else found.filter(owner=request.user.username)


def find_workflow(request: Request, public_id: str) -> Workflow:
    workflow = None
    if _PUBLIC_ID.fullmatch(public_id):
        workflow = visible_workflows(request).filter(public_id=public_id).first()
    if workflow is None:
        raise NotFound("There is no such workflow.")
    assert isinstance(workflow, Workflow)
    return workflow


def show_workflow(
    workflow: Workflow, *, brought: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what clients see of a workflow.

    One that has just come is forecast now: `brought` says what became of its rows.
    """
    counted, now = progress.read(workflow), database_now()
    if brought is None:
        said = promises.of([workflow.pk]).get(workflow.pk)
        expected = FORECASTER.eta(workflow, counted, now=now)
    else:
        etas = {
            is_cut: FORECASTER.eta(workflow, counted, is_cut=is_cut, now=now)
            for is_cut in (False, True)
        }
        said = commitments.admit(
            workflow,
            pending=brought["pending"],
            accepted=brought["accepted"],
            etas=etas,
            now=now,
        )
        expected = etas[said is not None and said.cut_batches > 0]
    standing = standings.of([workflow], now).get(workflow.pk)
    return schema.workflow_as_json(
        workflow, counted, eta=expected, forecast=said, standing=standing
    )


def replayed(submission: intake.Submission) -> dict[str, str]:
    return {"Idempotency-Replayed": "true"} if submission.replayed else {}


def checked_query(request: Request, shape: type[schema.Plain]) -> Mapping[str, Any]:
    """Return the checked query parameters."""
    given = bodies.query(request, known=shape().fields)
    return schema.checked(shape(data=given, context={"text": True}))


def checked_body(
    request: Request, shape: type[schema.Plain], *, partial: bool = False
) -> dict[str, Any]:
    """Return the checked members of a small JSON body, under the names of the tables."""
    bodies.query(request, known=())
    bodies.content_type(request._request, taken=[bodies.JSON_TYPE])
    body = bodies.json_object(request._request, limit=bodies.MAX_SMALL_BYTES)
    given = body.values()
    bodies.refuse_unknown(given, known=shape().fields)
    fields = dict(schema.checked(shape(data=given, partial=partial)))
    if "model" in fields:
        fields["model_id"] = fields.pop("model")
    return fields


def to_cursor(kind: str, place: int) -> str:
    """Return an opaque cursor."""
    return base64.urlsafe_b64encode(f"{kind}{place}".encode()).decode().rstrip("=")


def from_cursor(kind: str, cursor: str) -> int:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        text = ""
    if not re.fullmatch(rf"{kind}\d{{1,18}}", text, re.ASCII):
        detail = "is none of this list"
        raise InvalidFields(
            f"cursor {detail}; take it from an answer.",
            code="bad_cursor",
            errors=[{"field": "cursor", "code": "bad_cursor", "detail": detail}],
        )
    return int(text[1:])
