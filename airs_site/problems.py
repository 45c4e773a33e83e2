"""Every error under /api as RFC 9457 `application/problem+json`, in one place.

Errors of the apps are known by their shape (`status`, `code`, `detail`, `errors`, `extra`), not by
their class, so that model management's are served like fulfillment's. What nobody foresaw is
logged with its traceback and answered without any of it.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol, runtime_checkable

import orjson
from django.core.exceptions import PermissionDenied
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.views import defaults
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rest_framework import exceptions
from rest_framework.views import set_rollback

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"
RETRY_AFTER_S = 2
"""What a client is told to wait when the database or the broker is away."""

_AWAY = (OperationalError, InterfaceError, BrokerError, RedisConnectionError, RedisTimeoutError)


@runtime_checkable
class Refusal(Protocol):
    """The shape of an error that knows how it is to be answered."""

    status: int
    code: str
    detail: str
    errors: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any]


def problem(
    request: HttpRequest | None,
    *,
    status: int,
    code: str,
    detail: str,
    errors: Sequence[Mapping[str, Any]] = (),
    extra: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    """Return a problem document; `extra` never overrides its own members."""
    document: dict[str, Any] = {
        **(extra or {}),
        "type": f"urn:airs:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "instance": _instance(request),
    }
    if errors:
        document["errors"] = list(errors)
    # orjson writes NaN and infinity as null; `default` covers dates and uuids inside `extra`.
    body = orjson.dumps(document, default=str, option=orjson.OPT_NON_STR_KEYS)
    return HttpResponse(body, status=status, content_type=CONTENT_TYPE, headers=headers)


def exception_handler(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Answer an exception of a REST view (named in REST_FRAMEWORK)."""
    set_rollback()
    request = getattr(context.get("request"), "_request", None)
    return answer(request, exc)


def answer(request: HttpRequest | None, exc: Exception) -> HttpResponse:
    """Return the problem document for an exception."""
    if isinstance(exc, Refusal):
        return problem(
            request,
            status=exc.status,
            code=exc.code,
            detail=exc.detail,
            errors=exc.errors,
            extra=exc.extra,
            headers=_retry_after(exc.extra.get("retry_after_s")),
        )
    if isinstance(exc, Http404):
        return problem(request, status=404, code="not_found", detail="There is nothing here.")
    if isinstance(exc, PermissionDenied):
        return problem(request, status=403, code="forbidden", detail="This is not allowed.")
    if isinstance(exc, exceptions.APIException):
        return _framework_error(request, exc)
    if isinstance(exc, _AWAY):
        logger.warning("database or broker away", extra={"error": type(exc).__name__})
        return problem(
            request,
            status=503,
            code="unavailable",
            detail="The database or the broker does not answer; try again shortly.",
            headers=_retry_after(RETRY_AFTER_S),
        )
    logger.error("unexpected error", exc_info=exc, extra={"instance": _instance(request)})
    return problem(
        request,
        status=500,
        code="internal_error",
        detail="Something failed that should not; the log has it under `instance`.",
    )


def _framework_error(request: HttpRequest | None, exc: exceptions.APIException) -> HttpResponse:
    headers: dict[str, str] = {}
    if challenge := getattr(exc, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    wait = getattr(exc, "wait", None)
    headers.update(_retry_after(wait) or {})
    if isinstance(exc, exceptions.ValidationError):
        errors = list(field_errors(exc.get_full_details()))
        return problem(
            request,
            status=422,
            # A lone problem lends its code to the answer, so that clients need not look deeper.
            code=errors[0]["code"] if len(errors) == 1 else "invalid_fields",
            detail=_summary(errors),
            errors=errors,
        )
    codes = exc.get_codes()
    return problem(
        request,
        status=exc.status_code,
        code=_CODES.get(codes, codes) if isinstance(codes, str) else exc.default_code,
        detail=str(exc.detail),
        headers=headers,
    )


_CODES = {
    "required": "missing_field",
    "null": "missing_field",
    "blank": "empty_field",
    "invalid": "bad_type",
    "not_a_dict": "bad_type",
    "not_a_list": "bad_type",
    "max_string_length": "field_too_long",
    "max_length": "field_too_long",
    "min_value": "out_of_range",
    "max_value": "out_of_range",
    "overflow": "bad_number",
    "invalid_choice": "bad_choice",
    "null_characters_not_allowed": "bad_character",
    "surrogate_characters_not_allowed": "bad_character",
    "permission_denied": "forbidden",
    "parse_error": "invalid_json",
}
"""Our stable codes for the framework's."""


def field_errors(details: Any, prefix: str = "") -> list[dict[str, Any]]:
    """Flatten the framework's nested validation details into `{"field", "code", "detail"}`."""
    if isinstance(details, Mapping) and {"message", "code"} == set(details):
        code = str(details["code"])
        return [
            {
                "field": prefix or "body",
                "code": _CODES.get(code, code),
                "detail": str(details["message"]),
            }
        ]
    if isinstance(details, Mapping):
        return [
            error
            for name, inner in details.items()
            for error in field_errors(
                inner,
                prefix
                if name == "non_field_errors"
                else f"{prefix}.{name}"
                if prefix
                else str(name),
            )
        ]
    return [error for inner in details for error in field_errors(inner, prefix)]


def _summary(errors: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({str(error["field"]) for error in errors})
    return f"Cannot work with {', '.join(names)}; see `errors`."


def _retry_after(seconds: Any) -> dict[str, str] | None:
    if not isinstance(seconds, int | float):
        return None
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _instance(request: HttpRequest | None) -> str:
    return str(request.META.get("AIRS_REQUEST_ID", "")) if request is not None else ""


def _is_api(request: HttpRequest) -> bool:
    return request.path.startswith("/api/")


# handler400 … handler500 of airs_site.urls: what fails before, or without, a REST view.


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a request that Django itself refuses."""
    if not _is_api(request):
        return defaults.bad_request(request, exception)
    return problem(
        request, status=400, code="bad_request", detail="The request cannot be understood."
    )


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a refusal outside a REST view."""
    if not _is_api(request):
        return defaults.permission_denied(request, exception)
    return answer(request, PermissionDenied())


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer an address that nothing serves."""
    if not _is_api(request):
        return defaults.page_not_found(request, exception)
    return problem(
        request,
        status=404,
        code="not_found",
        detail=f"{request.path} is no address of this API; /api/docs shows them all.",
    )


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer what failed outside a REST view; Django has logged it."""
    if not _is_api(request):
        return defaults.server_error(request)
    return problem(request, status=500, code="internal_error", detail="Something failed.")
