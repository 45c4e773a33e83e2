"""Echo the client's `X-Request-Id`, or give the request one."""

import re
import uuid
from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase

_ACCEPTABLE = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIdMiddleware:
    """Sets `request.request_id` and the response header of the same meaning."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        sent = request.headers.get("X-Request-Id", "")
        request_id = sent if _ACCEPTABLE.fullmatch(sent) else uuid.uuid4().hex
        request.META["AIRS_REQUEST_ID"] = request_id
        response = self.get_response(request)
        response["X-Request-Id"] = request_id
        return response
