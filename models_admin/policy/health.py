"""Whether an external model is up, by what its server answers to small questions.

One question that goes wrong proves little: an address is down after three checks in a row that
found nobody there or a server that is not ready, and up again after two that found one. What only
a call can tell (a key that is refused, a name that is not listed) takes nothing down: a key may be
for calls alone, a proxy may list nothing. It is said, and the first call finds out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

DOWN_AFTER: Final = 3
UP_AFTER: Final = 2
BELIEVED: Final = timedelta(seconds=60)
"""What was found longer ago counts for nothing: whoever checks may be away itself."""

MAX_VERSION: Final = 128
_NAMES_SHOWN: Final = 3
_NAME: Final = re.compile(r"[\w./:@+-]{1,80}", re.ASCII)


class Sign(StrEnum):
    """What one check says."""

    GOOD = "good"
    BAD = "bad"
    """Nobody is there, or a server that is not ready: calls would meet the same."""
    UNTOLD = "untold"
    """The server is there, but does not say whether calls would succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came of one question: a status and a JSON object, or why there was no answer."""

    status: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    """Empty unless it was a JSON object that is not too long."""
    fault: str = ""
    """Why no answer came; "" when one did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found."""

    sign: Sign
    detail: str
    """For people; it repeats no words of the server but names of models."""
    version: str = ""
    """The version of the model that its server names, if one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Whether a model is up, and since when; None while that is not known."""

    up: bool | None
    checked_at: datetime
    changed_at: datetime
    failures: int
    """Checks in a row that were bad."""
    successes: int
    """Checks in a row that were good."""
    latency_s: float
    """Of the last check."""
    detail: str

    @property
    def word(self) -> str:
        """How it is, in a word."""
        return {True: "up", False: "down", None: "unknown"}[self.up]


def follow(before: Health | None, finding: Finding, *, latency_s: float, now: datetime) -> Health:
    """Return the health after one more check; `before` is None for a new or changed model."""
    was = None if before is None else before.up
    failures = successes = 0
    if finding.sign is Sign.BAD:
        failures = 1 + (before.failures if before else 0)
    elif finding.sign is Sign.GOOD:
        successes = 1 + (before.successes if before else 0)
    up = _state(was, finding.sign, failures=failures, successes=successes)
    return Health(
        up=up,
        checked_at=now,
        changed_at=now if before is None or up is not was else before.changed_at,
        failures=failures,
        successes=successes,
        latency_s=latency_s,
        detail=finding.detail,
    )


def _state(was: bool | None, sign: Sign, *, failures: int, successes: int) -> bool | None:
    if sign is Sign.UNTOLD:
        return None
    if sign is Sign.BAD:
        return False if failures >= DOWN_AFTER else was
    if was is False:
        return successes >= UP_AFTER
    return True


def rests(health: Health, now: datetime) -> bool:
    """Say whether an address is left alone, but for a call now and then that may prove it wrong."""
    # A check of the future was made before the clock was set back.
    return health.up is False and abs(now - health.checked_at) <= BELIEVED


def of_oip(server: Reply, model: Reply, metadata: Reply, *, name: str) -> Finding:
    """Return what a server of the Open Inference Protocol says: of itself, and of the model."""
    if finding := _not_there(server, asked="/v2/health/ready") or _not_there(
        model, asked="the model's readiness"
    ):
        return finding
    # Triton and MLServer say 400; Triton also of a model that it does not have.
    if server.status == 400 or model.status == 400 or model.body.get("ready") is False:
        return Finding(sign=Sign.BAD, detail=f"the model is not ready (HTTP {model.status})")
    # A gateway may know metadata alone.
    if model.status in (200, 429) or (model.status == 404 and metadata.status == 200):
        return Finding(
            sign=Sign.GOOD,
            detail="the model is ready" + _busy(model),
            version=version_of(metadata.body) if metadata.status == 200 else "",
        )
    if model.status == 404:
        return Finding(sign=Sign.UNTOLD, detail=f"its server has no model {name!r} (HTTP 404)")
    return _untold(model, asked="the model's readiness")


def of_openai(models: Reply, health: Reply, *, name: str, scores: bool = False) -> Finding:
    """Return what an OpenAI-compatible server says: its list of models, and `/health` if it has it.

    Hosted services have no `/health`; servers that one runs oneself load models behind it. Of
    those that only score, some have no list of models.
    """
    if finding := _not_there(models, asked="/v1/models"):
        return finding
    if health.status == 503:
        return Finding(
            sign=Sign.BAD, detail="/health answers HTTP 503: it loads, or its engine died"
        )
    if models.status == 429:
        return Finding(sign=Sign.GOOD, detail="it answers" + _busy(models))
    if scores and models.status == 404 and health.status == 200:
        return Finding(sign=Sign.GOOD, detail="/health is well; it has no list of models")
    if models.status != 200:
        return _untold(models, asked="/v1/models")
    listed = _names(models.body)
    if listed is None:
        return Finding(sign=Sign.GOOD, detail="it answers, without a list of models that we read")
    if name in listed:
        return Finding(sign=Sign.GOOD, detail="it lists the model")
    shown = [each for each in listed if _NAME.fullmatch(each)][:_NAMES_SHOWN]
    has = f"; it has {', '.join(shown)}" + ", …" * (len(listed) > len(shown)) if shown else ""
    return Finding(sign=Sign.UNTOLD, detail=f"it lists no model {name!r}{has}")


def version_of(metadata: Mapping[str, Any]) -> str:
    """Return the version in a model's metadata, "" when it names none or many."""
    version, versions = metadata.get("model_version"), metadata.get("versions")
    if not isinstance(version, str) and isinstance(versions, list) and len(versions) == 1:
        version = versions[0]
    return version[:MAX_VERSION] if isinstance(version, str) and version.isprintable() else ""


def _not_there(reply: Reply, *, asked: str) -> Finding | None:
    if reply.fault:
        return Finding(sign=Sign.BAD, detail=reply.fault)
    if reply.status == 503:
        return Finding(sign=Sign.BAD, detail=f"{asked}: not ready (HTTP 503)")
    if reply.status >= 500:
        return Finding(sign=Sign.BAD, detail=f"{asked}: HTTP {reply.status}")
    return None


_UNTOLD: Final[Mapping[int, str]] = {
    401: "it refuses our key (HTTP 401), or wants one",
    403: "our key may not ask for this (HTTP 403)",
    404: "there is no such address (HTTP 404)",
}


def _untold(reply: Reply, *, asked: str) -> Finding:
    said = _UNTOLD.get(reply.status, f"HTTP {reply.status}")
    if 300 <= reply.status < 400:
        said = f"it redirects (HTTP {reply.status}), which is not followed"
    return Finding(sign=Sign.UNTOLD, detail=f"{asked}: {said}; whether calls succeed is not told")


def _busy(reply: Reply) -> str:
    return ", and busy (HTTP 429)" if reply.status == 429 else ""


def _names(body: Mapping[str, Any]) -> Sequence[str] | None:
    data = body.get("data")
    if not isinstance(data, list):
        return None
    found = [each.get("id") for each in data if isinstance(each, dict)]
    return [each for each in found if isinstance(each, str)]
