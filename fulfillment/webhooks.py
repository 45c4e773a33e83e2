"""Webhook endpoints: who wants to hear of events, and the secrets that sign what they get.

An endpoint stands for all workflows of its owner, or belongs to one workflow. A secret is sealed at
rest. One that AIRS made is shown to who made the endpoint, one that a user brought never again.
"""

import base64
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography.fernet import InvalidToken, MultiFernet
from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils.module_loading import import_string

from fulfillment import outgoing
from fulfillment.errors import Conflict, InvalidFields
from fulfillment.models import WebhookEndpoint, Workflow
from fulfillment.policy.addresses import Refusal
from fulfillment.policy.delivery import NOT_ALLOWED
from fulfillment.policy.webhook_body import SECRET_PREFIX, WebhookFormat, key_of

MOST_ENDPOINTS: Final = 50
"""Standing endpoints of one owner: each costs a delivery an event."""
SECRET_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookForm:
    """What a client says of a webhook; without a secret one is found or made."""

    url: str
    secret: str | None = None
    format: str = WebhookFormat.STANDARD


def refuse_unsafe(form: WebhookForm, *, field: str) -> None:
    """Raise InvalidFields `url_not_allowed` for an address that may not be sent to."""
    refusal = outgoing.judge(form.url)
    if isinstance(refusal, Refusal):
        raise InvalidFields(
            f"{field}: {refusal.reason}.",
            code=NOT_ALLOWED,
            errors=[{"field": field, "code": NOT_ALLOWED, "detail": refusal.reason}],
        )


def attach(workflow: Workflow, form: WebhookForm, *, now: datetime) -> WebhookEndpoint:
    """Store the endpoint of one workflow, inside the transaction that makes the workflow.

    Signed with the secret that was brought, else with that of the owner's standing endpoint of this
    URL, else with a new one.
    """
    standing = None
    if form.secret is None:
        standing = _standing(workflow.owner, form.url).first()
    return WebhookEndpoint.objects.create(
        owner=workflow.owner,
        workflow=workflow,
        url=form.url,
        format=form.format,
        secret=standing.secret if standing else _seal(form.secret or new_secret()),
        generated=form.secret is None and standing is None,
        created_at=now,
    )


def register(*, owner: str, form: WebhookForm, now: datetime) -> tuple[WebhookEndpoint, bool]:
    """Store a standing endpoint; return it and whether it is new.

    The same URL again is the same endpoint: it gets what is given now, and is enabled again.
    """
    with transaction.atomic():
        existing = _standing(owner, form.url).select_for_update(no_key=True).first()
        if existing is not None:
            existing.format = form.format
            existing.disabled_at, existing.disabled_reason = None, ""
            if form.secret is not None:
                existing.secret, existing.generated = _seal(form.secret), False
            existing.save()
            return existing, False
        if WebhookEndpoint.objects.filter(owner=owner, workflow=None).count() >= MOST_ENDPOINTS:
            raise Conflict(
                f"{owner} has {MOST_ENDPOINTS} webhook endpoints; delete one first",
                code="too_many_endpoints",
            )
        # Two at a time may both come here: the second one is told of a conflict by the database.
        endpoint, is_new = WebhookEndpoint.objects.get_or_create(
            owner=owner,
            url=form.url,
            workflow=None,
            defaults={
                "format": form.format,
                "secret": _seal(form.secret or new_secret()),
                "generated": form.secret is None,
                "created_at": now,
            },
        )
        return endpoint, is_new


def new_secret() -> str:
    """Return a fresh secret as Standard Webhooks writes them."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def secret_of(endpoint: WebhookEndpoint) -> str | None:
    """Return the secret, None when SECRET_KEY is not the one it was sealed with."""
    try:
        return _cipher().decrypt(endpoint.secret.encode()).decode()
    except InvalidToken:
        return None


def generated_secret(endpoint: WebhookEndpoint) -> str | None:
    """Return the secret if AIRS made it, for the answer to whoever made the endpoint."""
    return secret_of(endpoint) if endpoint.generated else None


def signing_key(endpoint: WebhookEndpoint) -> bytes | None:
    """Return what signs, None when it cannot be had."""
    secret = secret_of(endpoint)
    return None if secret is None else key_of(secret)


def _standing(owner: str, url: str) -> QuerySet[WebhookEndpoint]:
    return WebhookEndpoint.objects.filter(owner=owner, url=url, workflow=None)


def _seal(secret: str) -> str:
    return _cipher().encrypt(secret.encode()).decode()


def _cipher() -> MultiFernet:
    cipher: Callable[[str], MultiFernet] = import_string(settings.AIRS_CIPHER)
    return cipher("webhooks")
