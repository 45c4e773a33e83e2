"""Secrets of models at rest: encrypted with a key derived from SECRET_KEY, or `env:NAME`.

They are written, never read back: people see the last four characters. A reference is resolved by
the process that calls the model, so that the secret itself never enters the database.
"""

import logging
import os
import re
from collections.abc import Callable

from cryptography.fernet import InvalidToken, MultiFernet
from django.conf import settings
from django.utils.module_loading import import_string

logger = logging.getLogger(__name__)

_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]{0,127})")
_OURS = frozenset(
    {
        "AIRS_ADMIN_PASSWORD",
        "AIRS_API_TOKEN",
        "AIRS_SECRET_KEY",
        "DATABASE_URL",
        "DJANGO_SECRET_KEY",
        "REDIS_URL",
    }
)
"""Never sent to a model, whoever asks for it."""


def seal(secret: str) -> str:
    """Return what to store for a secret; a reference to the environment stays readable."""
    if not secret or _REFERENCE.fullmatch(secret):
        return secret
    return _cipher().encrypt(secret.encode()).decode()


def unseal(stored: str) -> str | None:
    """Return the secret, or None when it cannot be had here (said in the log, without it)."""
    if not stored:
        return None
    if reference := _REFERENCE.fullmatch(stored):
        # `env:NAME` is the operator's way to keep a secret out of the database.
        value = os.environ.get(reference[1])  # noqa: TID251
        if value is None:
            logger.warning("secret_unavailable name=%s", reference[1])
        return value
    try:
        return _cipher().decrypt(stored.encode()).decode()
    except InvalidToken:
        logger.warning("secret_unreadable: SECRET_KEY is not the one it was written with")
        return None


def hint(stored: str) -> str | None:
    """Return what may be shown of a stored secret: a reference, or its last four characters."""
    if not stored:
        return None
    if _REFERENCE.fullmatch(stored):
        return stored
    secret = unseal(stored)
    # Four characters of a short secret would be most of it.
    return f"…{secret[-4:]}" if secret and len(secret) >= 12 else "…"


def problem(secret: str) -> str | None:
    """Return why a secret cannot be taken, or None."""
    if secret.startswith("env:"):
        reference = _REFERENCE.fullmatch(secret)
        if reference is None:
            return "a reference is env:NAME, with letters, digits and _"
        if reference[1] in _OURS:
            return "this variable is AIRS's own and is never sent to a model"
    if not secret.isascii() or not secret.isprintable():
        return "a header value is printable ASCII"
    return None


def _cipher() -> MultiFernet:
    cipher: Callable[[str], MultiFernet] = import_string(settings.AIRS_CIPHER)
    return cipher("models")
