"""What browsers may do with our pages: nothing inline runs, nothing comes from elsewhere.

Pages show texts of strangers (queries, names, what models answer). Templates escape them all; this
is the second line of defence. Django 5.2 has none of its own.
"""

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_SWAGGER = "/api/docs"
# Swagger UI brings a style element and style attributes of its own, and shows no stranger's text.
_SWAGGER_POLICY = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")


class ContentSecurityPolicyMiddleware:
    """Sets the header of the same name."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        response["Content-Security-Policy"] = (
            _SWAGGER_POLICY if request.path == _SWAGGER else POLICY
        )
        return response
