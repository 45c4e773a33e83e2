"""Who calls: bearer tokens for the REST API, and what each role may do.

| role | may |
|---|---|
| viewer | read the workflows of its own user, raters, models |
| submitter | also create, append to, close and cancel them |
| operator | also read and steer everybody's workflows, change raters and models |
| admin | also issue and revoke tokens |

A workflow that a token may not see answers 404, like one that does not exist.
"""

from dataclasses import dataclass
from typing import Any, Final

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from fulfillment import tokens
from fulfillment.clock import database_now
from fulfillment.models import ApiToken, Role

CHALLENGE: Final = 'Bearer realm="airs"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """The caller as Django and DRF want to see one; there is no row behind it."""

    username: str
    is_authenticated: bool = True
    is_active: bool = True

    def __str__(self) -> str:
        return self.username


class TokenAuthentication(BaseAuthentication):
    """`Authorization: Bearer <token>`; sets `request.user` (Principal) and `.auth` (ApiToken)."""

    def authenticate(self, request: Request) -> tuple[Principal, ApiToken] | None:
        """Return the caller, None without the header; raise on any other header."""
        header = get_authorization_header(request)
        if not header:
            return None
        scheme, _, secret = header.decode("latin-1").partition(" ")
        # A malformed header costs the same look-up as a wrong token.
        token = tokens.find(secret.strip())
        if scheme.lower() != "bearer" or token is None:
            raise AuthenticationFailed("This token is not valid.", code="invalid_token")
        if token.expires_at is not None and token.expires_at <= database_now():
            raise AuthenticationFailed("This token has expired.", code="expired_token")
        return Principal(username=token.user), token

    def authenticate_header(self, request: Request) -> str:
        """Return the challenge of a 401 answer."""
        return CHALLENGE


def role_of(request: Request) -> Role:
    """Return the role of the caller's token; the permissions have seen that there is one."""
    assert isinstance(request.auth, ApiToken)
    return Role(request.auth.role)


def has_role(request: Request, role: Role) -> bool:
    """Say whether the caller's token has the role or a higher one."""
    held = getattr(request.auth, "role", None)
    return held in Role.values and Role(held).rank >= role.rank


def sees_everything(request: Request) -> bool:
    """Say whether the caller may see workflows of others."""
    return has_role(request, Role.OPERATOR)


class _AtLeast(BasePermission):
    """Base of the permissions by role."""

    role: Role

    @property
    def message(self) -> str:
        """Tell the caller what is missing."""
        return f"This needs a token with the role {self.role.value} or a higher one."

    def has_permission(self, request: Request, view: Any) -> bool:
        return has_role(request, self.role)


class IsViewer(_AtLeast):
    """Any valid token."""

    role = Role.VIEWER


class IsSubmitter(_AtLeast):
    """May create and steer its own workflows."""

    role = Role.SUBMITTER


class IsOperator(_AtLeast):
    """May steer everybody's workflows, raters and models."""

    role = Role.OPERATOR


class IsAdmin(_AtLeast):
    """May issue and revoke tokens."""

    role = Role.ADMIN


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Shows the bearer scheme in the OpenAPI document."""

    target_class = "fulfillment.authentication.TokenAuthentication"
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer"}
