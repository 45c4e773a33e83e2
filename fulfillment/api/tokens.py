"""Tokens: who may call."""

import re
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import tokens
from fulfillment.api.base import ApiView, answers, checked_body, json_answer
from fulfillment.authentication import (
    IsAdmin,
)
from fulfillment.clock import database_now
from fulfillment.errors import NotFound
from fulfillment.models import ApiToken

_TOKEN_ID = re.compile(r"tok_(\d{1,18})")


class TokensView(ApiView):
    """All tokens, and issuing one."""

    reads = IsAdmin
    writes = IsAdmin

    @extend_schema(operation_id="list_tokens", responses=answers(schema.TokenList))
    def get(self, request: Request) -> HttpResponse:
        """List tokens, without their secrets."""
        bodies.query(request, known=())
        return json_answer({"items": [_token(token) for token in tokens.listed()], "next": None})

    @extend_schema(
        operation_id="issue_token",
        request=schema.TokenForm,
        responses=answers(schema.IssuedTokenShape, 201, 400, 415, 422),
    )
    def post(self, request: Request) -> HttpResponse:
        """Issue a token; its secret is shown this once."""
        given = checked_body(request, schema.TokenForm)
        token, secret = tokens.issue(
            user=given["user"],
            role=given["role"],
            expires_at=given.get("expires_at"),
            now=database_now(),
        )
        return json_answer({**_token(token), "secret": secret}, status=201)


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


def _token(token: ApiToken) -> dict[str, Any]:
    return {
        "id": f"tok_{token.pk}",
        "user": token.user,
        "role": token.role,
        "hint": token.hint,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
    }
