"""What is wrong with the settings of a model, hosted or external."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings

from models_admin import checkpoints, secrets, serving
from models_admin.errors import CheckpointRefused
from models_admin.models import (
    CHAT,
    NO_PRIORITY,
    STYLES,
    VERSION_LENGTH,
    AcceleratorPool,
    ModelConfig,
    ModelKind,
    Protocol,
    ScoringEndpoint,
)
from models_admin.services.fields import ModelFields
from models_admin.services.problems import ID, Problem, bad_id, one_of, out_of_range

MAX_REPLICAS: Final = 64
MAX_HEADERS: Final = 16
MAX_SECRET_CHARACTERS: Final = 8_192
_LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "timeout_s": (0.1, 3_600),
    "max_concurrency": (1, 10_000),
    "window": (1, 1_000),
    "devices_per_replica": (1, 1_024),
    "replicas_min": (0, MAX_REPLICAS),
    "replicas_default": (0, MAX_REPLICAS),
    "replicas_max": (1, MAX_REPLICAS),
}
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,255}")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_OUR_HEADERS: Final = frozenset(
    {"connection", "content-length", "content-type", "expect", "host", "transfer-encoding"}
)
_ONLY_EXTERNAL: Final = (
    *("url", "endpoint", "api_key", "headers", "version", "version_label", "priority_style"),
)
_ONLY_HOSTED: Final = ("pool", "loader", "checkpoint", "serving", "pinned")


def find_problems(model: ModelConfig, fields: ModelFields, *, new: bool) -> list[Problem]:
    """Return what is wrong with a model; `fields` are those that were sent."""
    problems = [
        out_of_range(name, low, high)
        for name, (low, high) in _LIMITS.items()
        if not low <= getattr(model, name) <= high
    ]
    if new and not ID.fullmatch(model.pk):
        problems.append(bad_id("id"))
    if model.kind not in ModelKind.values:
        return [
            *problems,
            Problem(field="kind", code="bad_choice", detail=one_of(ModelKind.values)),
        ]
    if model.protocol not in Protocol.values:
        problems.append(
            Problem(field="protocol", code="bad_choice", detail=one_of(Protocol.values))
        )
    # Of an external model, dots and slashes are OpenAI's business; OIP puts the name into a path.
    if model.protocol == Protocol.OIP and not _NAME.fullmatch(model.model_name):
        problems.append(
            Problem(
                field="model_name",
                code="path_not_allowed",
                detail="letters, digits, . _ - only, no leading dot",
            )
        )
    elif not (model.model_name.isprintable() and model.model_name.strip()):
        problems.append(
            Problem(field="model_name", code="empty_field", detail="what its server calls it")
        )
    if model.kind == ModelKind.HOSTED:
        return [*problems, *_hosted_problems(model, fields, new=new)]
    return [*problems, *_external_problems(model, fields)]


def _hosted_problems(model: ModelConfig, fields: ModelFields, *, new: bool) -> list[Problem]:
    problems = _foreign(fields, _ONLY_EXTERNAL, "is of external models only")
    if model.protocol != Protocol.OIP:
        problems.append(
            Problem(field="protocol", code="bad_choice", detail="hosted models speak oip")
        )
    known = checkpoints.loaders()
    if model.loader not in known:
        problems.append(Problem(field="loader", code="bad_choice", detail=_loaders(known)))
    if not model.replicas_min <= model.replicas_default <= model.replicas_max:
        problems.append(
            Problem(
                field="replicas_default",
                code="out_of_range",
                detail="min ≤ default ≤ max must hold",
            )
        )
    problems += [
        Problem(field="serving", code="bad_option", detail=detail)
        for detail in serving.problems(model.serving)
    ]
    if new and "checkpoint" not in fields:
        problems.append(
            Problem(field="checkpoint", code="missing_field", detail="a hosted model needs one")
        )
    elif "checkpoint" in fields or "loader" in fields:
        problems += _checkpoint_problems(model, model.loader if model.loader in known else None)
    return [*problems, *_pool_problems(model)]


def _loaders(known: Sequence[str]) -> str:
    if not known:
        return "no loader is installed at all: run `pip install -e .` in the checkout of AIRS"
    return f"{one_of(known)}; a package of yours adds one by the entry-point group airs.loaders"


def _checkpoint_problems(model: ModelConfig, loader: str | None) -> list[Problem]:
    """Look at the files, and at their headers with the loader that is to read them."""
    try:
        checkpoints.find(model.checkpoint, root=settings.AIRS_CHECKPOINT_ROOT, loader=loader)
    except CheckpointRefused as refusal:
        return [Problem(field="checkpoint", code=refusal.code, detail=refusal.detail)]
    return []


def _pool_problems(model: ModelConfig) -> list[Problem]:
    if model.pool_id is None:
        return []
    pool = AcceleratorPool.objects.filter(pk=model.pool_id).first()
    if pool is None:
        return [Problem(field="pool", code="unknown_pool", detail="there is no such pool")]
    needed = model.devices_per_replica * max(model.replicas_default, 1)
    if needed > pool.devices:
        detail = f"the pool has {pool.devices} devices, the model needs {needed}"
        return [Problem(field="pool", code="pool_too_small", detail=detail)]
    return []


def _external_problems(model: ModelConfig, fields: ModelFields) -> list[Problem]:
    problems = _foreign(fields, _ONLY_HOSTED, "is of hosted models only")
    if model.endpoint and model.protocol != Protocol.OPENAI:
        only = "is of models of the protocol openai only; leave it out, or send chat"
        problems.append(Problem(field="endpoint", code="not_allowed", detail=only))
    elif model.endpoint and model.endpoint not in ScoringEndpoint.values:
        known = one_of([CHAT, *ScoringEndpoint.values])
        problems.append(Problem(field="endpoint", code="bad_choice", detail=known))
    styles = STYLES.get(model.protocol, ())
    if model.endpoint == ScoringEndpoint.TEI_RERANK:
        styles = ()
    if model.priority_style and model.priority_style not in styles:
        known = one_of([NO_PRIORITY, *styles])
        problems.append(Problem(field="priority_style", code="bad_choice", detail=f"here {known}"))
    if detail := _url_problem(model.url):
        problems.append(Problem(field="url", code="url_not_allowed", detail=detail))
    for name in ("version", "version_label"):
        value = getattr(model, name)
        if len(value) > VERSION_LENGTH or not value.isprintable():
            problems.append(
                Problem(
                    field=name,
                    code="bad_character",
                    detail=f"printable, at most {VERSION_LENGTH} characters",
                )
            )
    named = {"api_key": fields.get("api_key") or ""}
    sent = fields.get("headers") or {}
    if len(sent) > MAX_HEADERS:
        problems.append(out_of_range("headers", 0, MAX_HEADERS))
    for header, secret in sent.items():
        if not _HEADER.fullmatch(header) or header.lower() in _OUR_HEADERS:
            problems.append(
                Problem(field="headers", code="bad_header", detail="not a header to be set here")
            )
        named[f"headers.{header}"] = secret
    for field, secret in named.items():
        detail = secrets.problem(secret)
        if len(secret) > MAX_SECRET_CHARACTERS:
            detail = f"at most {MAX_SECRET_CHARACTERS} characters"
        if detail:
            problems.append(Problem(field=field, code="bad_secret", detail=detail))
    return problems


def _url_problem(url: str) -> str | None:
    """Say what is wrong with a server's address, without repeating it: it may hold a key."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "it cannot be read as a URL"
    if parts.scheme not in {"http", "https"}:
        return "only http and https"
    if not parts.hostname or port == 0:
        return "it names no host and port"
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return "no user, query or fragment: keys belong into `api_key` or `headers`"
    if not url.isascii() or not url.isprintable() or " " in url or len(url) > 2_048:
        return "printable ASCII without blanks, at most 2048 characters"
    return None


def _foreign(fields: ModelFields, names: Sequence[str], detail: str) -> list[Problem]:
    given: Mapping[str, Any] = {**fields}
    return [
        Problem(field=name, code="not_allowed", detail=detail) for name in names if given.get(name)
    ]
