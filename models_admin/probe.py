"""Asks a model server something small over HTTP: stats, readiness, metadata.

Plain http.client: no proxies of the environment, no redirects, one deadline for the whole answer.
"""

import http.client
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from models_admin.policy.health import version_of

_LONGEST_ANSWER_BYTES = 64 * 1024
_CHUNK_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server said; `body` is empty unless it was a JSON object."""

    status: int
    body: Mapping[str, Any]


def ask(
    url: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    longest_bytes: int = _LONGEST_ANSWER_BYTES,
) -> Answer | None:
    """GET `url`; None when no complete answer came in time."""
    parts = urlsplit(url)
    deadline = time.monotonic() + timeout_s
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/", headers=dict(headers or {}))
        response = connection.getresponse()
        data = b""
        while chunk := response.read1(_CHUNK_BYTES):
            data += chunk
            if time.monotonic() > deadline or len(data) > longest_bytes:
                return None
        return Answer(status=response.status, body=_json_object(data))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def reported_version(
    url: str, model_name: str, *, headers: Mapping[str, str], timeout_s: float = 2.0
) -> str:
    """Return the version in an OIP server's metadata of a model, "" when it names none or many."""
    address = f"{url.rstrip('/')}/v2/models/{quote(model_name, safe='')}"
    answer = ask(address, headers=headers, timeout_s=timeout_s)
    return version_of(answer.body) if answer is not None and answer.status == 200 else ""


def number(body: Mapping[str, Any], name: str) -> float:
    """Return a finite, non-negative number of an answer, 0 when it has none."""
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if math.isfinite(value) and 0 <= value < 2**53 else 0.0


def _json_object(data: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
