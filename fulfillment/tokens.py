"""Bearer tokens: issued once, kept as a digest, looked up by it.

A token is 32 random bytes, so its SHA-256 needs neither salt nor stretching, and the look-up by
digest tells an attacker who measures time nothing about a token.
"""

import hashlib
import secrets
from datetime import datetime

from django.db.models import QuerySet

from fulfillment.errors import InvalidFields, NotFound
from fulfillment.models import ApiToken, Role

PREFIX = "airs_"
"""Lets secret scanners find a token that was committed by mistake."""

LEAST_SECRET_CHARACTERS = 16
_HINT_CHARACTERS = 4


def digest(secret: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def new_secret() -> str:
    """Return a fresh random token."""
    return PREFIX + secrets.token_urlsafe(32)


def issue(
    *,
    user: str,
    role: str,
    expires_at: datetime | None,
    now: datetime,
    secret: str | None = None,
) -> tuple[ApiToken, str]:
    """Store a token and return it with its secret, which nothing can return again.

    `secret` is given only by bootstrap, for an operator who brings a token of their own.
    """
    if expires_at is not None and expires_at <= now:
        raise _invalid("expires_at", "in_the_past", "The token would be expired already.")
    if secret is None:
        secret = new_secret()
    elif len(secret) < LEAST_SECRET_CHARACTERS:
        raise _invalid(
            "secret", "too_short", f"A token has at least {LEAST_SECRET_CHARACTERS} characters."
        )
    token = ApiToken.objects.create(
        user=user,
        role=Role(role),
        digest=digest(secret),
        hint=secret[-_HINT_CHARACTERS:],
        created_at=now,
        expires_at=expires_at,
    )
    return token, secret


def find(secret: str) -> ApiToken | None:
    """Return the token with this secret, expired or not."""
    return ApiToken.objects.filter(digest=digest(secret)).first()


def listed() -> QuerySet[ApiToken]:
    """Return all tokens, oldest first."""
    return ApiToken.objects.order_by("id")


def revoke(token_id: int) -> None:
    """Delete a token; its user's workflows stay."""
    deleted, _ = ApiToken.objects.filter(pk=token_id).delete()
    if not deleted:
        raise NotFound(f"There is no token {token_id}.")


def _invalid(field: str, code: str, detail: str) -> InvalidFields:
    return InvalidFields(
        detail, code=code, errors=[{"field": field, "code": code, "detail": detail}]
    )
