"""What a webhook says, and what it is signed with: Standard Webhooks, or CloudEvents 1.0.

Both carry the same facts. The bytes are made once and stored: every attempt sends the very same.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

SECRET_PREFIX: Final = "whsec_"


class WebhookFormat(StrEnum):
    """How the body is laid out."""

    STANDARD = "standard"
    """`{"type", "timestamp", "data"}` as Standard Webhooks recommends."""
    CLOUDEVENTS = "cloudevents"
    """A CloudEvent in structured JSON."""


CONTENT_TYPES: Final[Mapping[WebhookFormat, str]] = {
    WebhookFormat.STANDARD: "application/json",
    WebhookFormat.CLOUDEVENTS: "application/cloudevents+json",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """An event as receivers get to know it."""

    id: str
    kind: str
    """Such as `workflow.completed`."""
    workflow: str
    occurred_at: datetime
    data: Mapping[str, Any]


def body_of(fact: Fact, layout: WebhookFormat) -> bytes:
    """Return the bytes to send, UTF-8 as it is: no escapes for other letters than ASCII."""
    at = fact.occurred_at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if layout is WebhookFormat.STANDARD:
        document = {"type": fact.kind, "timestamp": at, "data": fact.data}
    else:
        document = {
            "specversion": "1.0",
            "id": fact.id,
            "source": "/api/v1/workflows",
            "type": f"airs.{fact.kind}",
            "subject": fact.workflow,
            "time": at,
            "datacontenttype": "application/json",
            "data": fact.data,
        }
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def key_of(secret: str) -> bytes:
    """Return the key of an HMAC: what follows `whsec_` decoded from base64, else the text's bytes.

    A secret of one's own needs no form: what is no `whsec_` with base64 is taken as it is.
    """
    if secret.startswith(SECRET_PREFIX):
        encoded = secret.removeprefix(SECRET_PREFIX).rstrip("=")
        padded = encoded + "=" * (-len(encoded) % 4)
        try:
            if key := base64.b64decode(padded, validate=True):
                return key
        except binascii.Error:
            pass
    return secret.encode()
