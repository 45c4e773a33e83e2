"""The REST API of Rating Fulfillment: workflows, ratings, raters, tokens.

Views check who calls and what is sent, call one service and show what it returns. Bodies are read
by api_bodies, shapes are api_schema's, errors become problem documents in airs_site.problems.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson
from django.conf import settings
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import urlencode
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import completion, intake, progress, raters, results, tokens
from fulfillment.authentication import (
    IsAdmin,
    IsOperator,
    IsSubmitter,
    IsViewer,
    sees_everything,
)
from fulfillment.clock import database_now
from fulfillment.errors import BadUpload, InvalidFields, NotFound
from fulfillment.models import ApiToken, Rater, Workflow
from fulfillment.policy.lifecycle import WorkflowState

_PUBLIC_ID = re.compile(r"wf_[0-9a-f]{32}")
_TOKEN_ID = re.compile(r"tok_(\d{1,18})")
_LATER = ("webhook", "dry_run")
"""Fields of the interface that this release does not serve yet."""

_WORKFLOW_COLUMNS = ("rater", "rater_version")
_MOST_RATERS = 500


def _json(
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


def _answers(
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


_KEY = OpenApiParameter(
    name="Idempotency-Key",
    location=OpenApiParameter.HEADER,
    description="The same key and body give the same object, for at least 24 hours.",
)
_ROWS: dict[str, Any] = {bodies.NDJSON_TYPES[0]: OpenApiTypes.STR}


class WorkflowsView(ApiView):
    """All workflows, and making one."""

    @extend_schema(
        operation_id="list_workflows",
        parameters=[schema.WorkflowQuery],
        responses=_answers(schema.WorkflowList, 200, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """List workflows, newest first: one's own, or everybody's for operators."""
        asked = _query(request, schema.WorkflowQuery)
        found = _visible(request)
        if "owner" in asked:
            found = found.filter(owner=asked["owner"])
        if "rater" in asked:
            found = found.filter(rater_id=asked["rater"])
        if "state" in asked:
            found = found.filter(state=WorkflowState[asked["state"]])
        if "cursor" in asked:
            found = found.filter(pk__lt=_from_cursor("w", asked["cursor"]))
        limit = asked["limit"]
        page = list(found.order_by("-pk")[: limit + 1])
        shown, now = page[:limit], database_now()
        return _json(
            {
                "items": [
                    schema.workflow_as_json(workflow, counted, now=now)
                    for workflow, counted in zip(shown, progress.read_many(shown), strict=True)
                ],
                "next": _cursor("w", shown[-1].pk) if len(page) > limit else None,
            }
        )

    @extend_schema(
        operation_id="create_workflow",
        parameters=[schema.UploadParameters, _KEY],
        request={bodies.JSON_TYPE: schema.WorkflowBody, **_ROWS},
        responses=_answers(schema.SubmissionShape, 202, 400, 409, 413, 415, 422, 507),
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
        return _json(
            {**_shown(workflow), **submission.answer},
            status=202,
            headers={
                "Location": f"/api/v1/workflows/{workflow.public_id}",
                **_replayed(submission),
            },
        )


class WorkflowView(ApiView):
    """One workflow."""

    @extend_schema(operation_id="get_workflow", responses=_answers(schema.WorkflowShape, 200, 404))
    def get(self, request: Request, public_id: str) -> HttpResponse:
        """Show a workflow and its progress."""
        bodies.query(request, known=())
        return _json(_shown(_find(request, public_id)))


class WorkflowRequestsView(ApiView):
    """Rows of an open workflow."""

    @extend_schema(
        operation_id="append_requests",
        parameters=[_KEY],
        request={bodies.JSON_TYPE: schema.RowsBody, **_ROWS},
        responses=_answers(schema.Acceptance, 200, 400, 404, 409, 413, 415, 422, 507),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Append rows to an open workflow."""
        bodies.query(request, known=())
        workflow = _find(request, public_id)
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
        return _json(submission.answer, headers=_replayed(submission))


class WorkflowCloseView(ApiView):
    """The end of a workflow's input."""

    @extend_schema(
        operation_id="close_workflow",
        request=None,
        responses=_answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """Take no more rows."""
        bodies.query(request, known=())
        return _json(_shown(completion.close(workflow_id=_find(request, public_id).pk)))


class WorkflowCancelView(ApiView):
    """The early end of a workflow."""

    @extend_schema(
        operation_id="cancel_workflow",
        request=None,
        responses=_answers(schema.WorkflowShape, 200, 404, 409),
    )
    def post(self, request: Request, public_id: str) -> HttpResponse:
        """End a workflow now; finished work is kept."""
        bodies.query(request, known=())
        return _json(_shown(completion.cancel(workflow_id=_find(request, public_id).pk)))


class RatingsView(ApiView):
    """The ratings of a workflow."""

    @extend_schema(
        operation_id="list_ratings",
        parameters=[
            schema.RatingQuery,
            OpenApiParameter(
                name="X-Next-Cursor",
                location=OpenApiParameter.HEADER,
                response=[200],
                description="Cursor of the next page; absent on the last one.",
            ),
        ],
        responses={
            **_answers(schema.RatingShape, 200, 404, 422, media_type=bodies.NDJSON_TYPES[0]),
            (200, "text/csv"): OpenApiTypes.STR,
        },
    )
    def get(self, request: Request, public_id: str) -> HttpResponseBase:
        """Stream a page of records in input order, one JSON object a line, or as CSV."""
        asked = _query(request, schema.RatingQuery)
        after = _from_cursor("r", asked["cursor"]) if "cursor" in asked else None
        page = results.page(
            _find(request, public_id),
            after=after,
            limit=asked["limit"],
            state=asked.get("state"),
        )
        stream: Iterator[bytes]
        if asked["format"] == "csv":
            stream = results.as_csv(page, header=after is None)
            kind = "text/csv; charset=utf-8"
        else:
            stream, kind = results.as_jsonl(page), bodies.NDJSON_TYPES[0]
        response = StreamingHttpResponse(stream, content_type=kind)
        if page.next is not None:
            cursor = _cursor("r", page.next)
            query = urlencode({**request.query_params.dict(), "cursor": cursor})
            response["X-Next-Cursor"] = cursor
            response["Link"] = f'<{request.path}?{query}>; rel="next"'
        return response


class RatersView(ApiView):
    """All raters, and registering one."""

    writes = IsOperator

    @extend_schema(operation_id="list_raters", responses=_answers(schema.RaterList))
    def get(self, request: Request) -> HttpResponse:
        """List raters by id."""
        asked = bodies.query(request, known=["cursor"])
        found = Rater.objects.select_related("current_version").order_by("pk")
        if "cursor" in asked:
            found = found.filter(pk__gt=asked["cursor"])
        page = list(found[: _MOST_RATERS + 1])
        return _json(
            {
                "items": [schema.rater_as_json(rater) for rater in page[:_MOST_RATERS]],
                "next": page[_MOST_RATERS - 1].pk if len(page) > _MOST_RATERS else None,
            }
        )

    @extend_schema(
        operation_id="register_rater",
        request=schema.RaterForm,
        responses=_answers(schema.RaterShape, 201, 400, 409, 415, 422),
    )
    def post(self, request: Request) -> HttpResponse:
        """Register a rater; the same one again changes nothing."""
        given = _body(request, schema.RaterForm)
        rater, is_new = raters.register(
            Rater(key_level=given.pop("key_level", ""), **given), now=database_now()
        )
        return _json(
            schema.rater_as_json(rater),
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/raters/{rater.pk}"},
        )


class RaterView(ApiView):
    """One rater."""

    writes = IsOperator

    @extend_schema(operation_id="get_rater", responses=_answers(schema.RaterShape, 200, 404))
    def get(self, request: Request, rater_id: str) -> HttpResponse:
        """Show a rater."""
        bodies.query(request, known=())
        return _json(schema.rater_as_json(raters.find(rater_id)))

    @extend_schema(
        operation_id="change_rater",
        request=schema.RaterChanges,
        responses=_answers(schema.RaterShape, 200, 400, 404, 415, 422),
    )
    def patch(self, request: Request, rater_id: str) -> HttpResponse:
        """Change a rater; what decides the score makes a new version for new workflows."""
        changes = _body(request, schema.RaterChanges, partial=True)
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
        return _json(schema.rater_as_json(rater))


class RaterVersionsView(ApiView):
    """The versions of a rater."""

    @extend_schema(
        operation_id="list_rater_versions",
        responses=_answers(schema.RaterVersionList, 200, 404),
    )
    def get(self, request: Request, rater_id: str) -> HttpResponse:
        """List the versions of a rater, newest first."""
        bodies.query(request, known=())
        current_id = raters.find(rater_id).current_version_id
        return _json(
            {
                "items": [
                    schema.version_as_json(version, current_id=current_id)
                    for version in raters.versions(rater_id)
                ],
                "next": None,
            }
        )


class TokensView(ApiView):
    """All tokens, and issuing one."""

    reads = IsAdmin
    writes = IsAdmin

    @extend_schema(operation_id="list_tokens", responses=_answers(schema.TokenList))
    def get(self, request: Request) -> HttpResponse:
        """List tokens, without their secrets."""
        bodies.query(request, known=())
        return _json({"items": [_token(token) for token in tokens.listed()], "next": None})

    @extend_schema(
        operation_id="issue_token",
        request=schema.TokenForm,
        responses=_answers(schema.IssuedTokenShape, 201, 400, 415, 422),
    )
    def post(self, request: Request) -> HttpResponse:
        """Issue a token; its secret is shown this once."""
        given = _body(request, schema.TokenForm)
        token, secret = tokens.issue(
            user=given["user"],
            role=given["role"],
            expires_at=given.get("expires_at"),
            now=database_now(),
        )
        return _json({**_token(token), "secret": secret}, status=201)


class TokenView(ApiView):
    """One token."""

    reads = IsAdmin
    writes = IsAdmin

    @extend_schema(
        operation_id="revoke_token",
        responses={204: None, (404, "application/problem+json"): schema.ProblemShape},
    )
    def delete(self, request: Request, token_id: str) -> HttpResponse:
        """Revoke a token."""
        matched = _TOKEN_ID.fullmatch(token_id)
        if matched is None:
            raise NotFound("There is no such token.")
        tokens.revoke(int(matched[1]))
        return HttpResponse(status=204)


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
    fields = dict(_query(request, schema.WorkflowParameters))
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


def _replayed(submission: intake.Submission) -> dict[str, str]:
    return {"Idempotency-Replayed": "true"} if submission.replayed else {}


def _visible(request: Request) -> Any:
    """Return the workflows that the caller may see; one that is being taken in is hidden."""
    found = Workflow.objects.select_related(*_WORKFLOW_COLUMNS).exclude(
        state=WorkflowState.RECEIVING
    )
    return found if sees_everything(request) else found.filter(owner=request.user.username)


def _find(request: Request, public_id: str) -> Workflow:
    workflow = None
    if _PUBLIC_ID.fullmatch(public_id):
        workflow = _visible(request).filter(public_id=public_id).first()
    if workflow is None:
        raise NotFound("There is no such workflow.")
    assert isinstance(workflow, Workflow)
    return workflow


def _shown(workflow: Workflow) -> dict[str, Any]:
    return schema.workflow_as_json(workflow, progress.read(workflow), now=database_now())


def _token(token: ApiToken) -> dict[str, Any]:
    return {
        "id": f"tok_{token.pk}",
        "user": token.user,
        "role": token.role,
        "hint": token.hint,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
    }


def _query(request: Request, shape: type[schema.Plain]) -> Mapping[str, Any]:
    """Return the checked query parameters."""
    given = bodies.query(request, known=shape().fields)
    return schema.checked(shape(data=given, context={"text": True}))


def _body(request: Request, shape: type[schema.Plain], *, partial: bool = False) -> dict[str, Any]:
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


def _cursor(kind: str, place: int) -> str:
    """Return an opaque cursor."""
    return base64.urlsafe_b64encode(f"{kind}{place}".encode()).decode().rstrip("=")


def _from_cursor(kind: str, cursor: str) -> int:
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
