"""Everything that people do to pools and models, for the admin and the API alike.

Validation names the field and a stable code. Start, stop, restart and resize only write what is
wanted; the host agent brings it about within a second or two. Nothing here holds a transaction
across a network call or the reading of a checkpoint.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypedDict, Unpack
from urllib.parse import urlsplit

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, Sum

from models_admin import checkpoints, probe, secrets, serving, versions
from models_admin.directory import call_headers
from models_admin.errors import CheckpointRefused, Conflict, InvalidFields, NotFound
from models_admin.models import (
    VERSION_LENGTH,
    AcceleratorPool,
    ModelConfig,
    ModelKind,
    ModelVersion,
    PoolKind,
    Protocol,
    Rebalancing,
)

logger = logging.getLogger(__name__)

LOADERS: Final = ("bert_encoder",)
MAX_REPLICAS: Final = 64
MAX_DEVICES: Final = 100_000
MAX_HEADERS: Final = 16
MAX_SECRET_CHARACTERS: Final = 8_192
PINNED_FOR: Final = timedelta(hours=1)
"""The rebalancer leaves a model alone for so long after somebody resized it."""
_LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "timeout_s": (0.1, 3_600),
    "max_concurrency": (1, 10_000),
    "window": (1, 1_000),
    "devices_per_replica": (1, 1_024),
    "replicas_min": (0, MAX_REPLICAS),
    "replicas_default": (0, MAX_REPLICAS),
    "replicas_max": (1, MAX_REPLICAS),
}
_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_-]{0,63}")
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,255}")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_OUR_HEADERS: Final = frozenset(
    {"connection", "content-length", "content-type", "expect", "host", "transfer-encoding"}
)

VersionProbe = Callable[..., str]
"""`probe.reported_version`, or what a test has instead."""


class ModelFields(TypedDict, total=False):
    """Settings of a model, as the API names them; secrets in clear, on their way in only."""

    kind: str
    protocol: str
    url: str
    model_name: str
    api_key: str | None
    headers: Mapping[str, str] | None
    timeout_s: float
    max_concurrency: int
    sends_priority: bool
    version: str
    version_label: str
    pool: str | None
    loader: str
    checkpoint: str
    serving: Mapping[str, Any]
    devices_per_replica: int
    replicas_min: int
    replicas_default: int
    replicas_max: int
    window: int
    pinned: bool


SECRETS: Final = frozenset({"api_key", "headers"})
IMMUTABLE: Final = frozenset({"kind"})
_ONLY_EXTERNAL: Final = ("url", "api_key", "headers", "version", "version_label")
_ONLY_HOSTED: Final = ("pool", "loader", "checkpoint", "serving", "pinned")
_SERVED: Final = ("url", "model_name", "checkpoint", "version_label")
"""A change of these may mean that another version is served."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One reason why a field cannot work."""

    field: str
    code: str
    detail: str


def refuse(problems: Sequence[Problem]) -> None:
    """Raise InvalidFields if there is a problem."""
    if problems:
        names = ", ".join(sorted({problem.field for problem in problems}))
        raise InvalidFields(
            f"Cannot work with {names}; see `errors`.",
            # A lone problem lends its code to the answer, so that clients need not look deeper.
            code=problems[0].code if len(problems) == 1 else None,
            errors=[dataclasses.asdict(problem) for problem in problems],
        )


# Pools


def find_pool(pool_id: str) -> AcceleratorPool:
    """Return a pool; raises NotFound."""
    pool = AcceleratorPool.objects.filter(pk=pool_id).first()
    if pool is None:
        raise NotFound(f"There is no pool {pool_id!r}.")
    return pool


def pool_problems(pool: AcceleratorPool) -> list[Problem]:
    """Return what is wrong with a pool that is about to be stored."""
    problems = []
    for field in ("id", "agent"):
        if not _ID.fullmatch(getattr(pool, field)):
            problems.append(_bad_id(field))
    if pool.kind not in PoolKind.values:
        problems.append(Problem(field="kind", code="bad_choice", detail=_one_of(PoolKind.values)))
    if pool.rebalancing not in Rebalancing.values:
        problems.append(
            Problem(field="rebalancing", code="bad_choice", detail=_one_of(Rebalancing.values))
        )
    used = devices_used(pool.pk)
    if not 1 <= pool.devices <= MAX_DEVICES:
        problems.append(_out_of_range("devices", 1, MAX_DEVICES))
    elif pool.devices < used:
        problems.append(
            Problem(
                field="devices", code="pool_too_small", detail=f"started models use {used} of them"
            )
        )
    return problems


def register_pool(pool: AcceleratorPool, *, actor: str = "") -> tuple[AcceleratorPool, bool]:
    """Store a new pool; return it and whether it is new. Registering the same again is harmless."""
    refuse(pool_problems(pool))
    existing = AcceleratorPool.objects.filter(pk=pool.pk).first()
    if existing is None:
        try:
            with transaction.atomic():
                pool.save(force_insert=True)
        except IntegrityError:
            existing = find_pool(pool.pk)
        else:
            _audit("pool_registered", pool.pk, actor)
            return pool, True
    if _values(existing) != _values(pool):
        raise Conflict(f"There is another pool {pool.pk!r} already.", code="pool_exists")
    return existing, False


def save_pool(pool: AcceleratorPool, *, actor: str = "") -> None:
    """Store a pool as it is, new or changed."""
    refuse(pool_problems(pool))
    pool.save()
    _audit("pool_saved", pool.pk, actor)


def change_pool(pool_id: str, changes: Mapping[str, Any], *, actor: str = "") -> AcceleratorPool:
    """Change settings of a pool."""
    with transaction.atomic():
        pool = AcceleratorPool.objects.select_for_update().filter(pk=pool_id).first()
        if pool is None:
            raise NotFound(f"There is no pool {pool_id!r}.")
        for name, value in changes.items():
            setattr(pool, name, value)
        save_pool(pool, actor=actor)
    return pool


def devices_used(pool_id: str, *, without: str = "") -> int:
    """Return how many devices of a pool the started models want, one of them left out."""
    models = ModelConfig.objects.filter(pool=pool_id, started=True).exclude(pk=without)
    used = models.aggregate(used=Sum(F("wanted_replicas") * F("devices_per_replica")))["used"]
    return int(used or 0)


# Models


def find_model(model_id: str) -> ModelConfig:
    """Return a model; raises NotFound."""
    model = ModelConfig.objects.select_related("pool").filter(pk=model_id).first()
    if model is None:
        raise NotFound(f"There is no model {model_id!r}.")
    return model


def register_model(
    model_id: str,
    *,
    now: datetime,
    actor: str = "",
    ask_version: VersionProbe = probe.reported_version,
    **fields: Unpack[ModelFields],
) -> tuple[ModelConfig, bool]:
    """Store a new model; return it and whether it is new.

    Its version is computed from the checkpoint, or asked of the external server (which need not
    be up: then its first answer tells). Registering the same model again changes nothing.
    """
    model = _with_defaults(ModelConfig(id=model_id, created_at=now, updated_at=now), fields)
    refuse(_problems(model, fields, new=True))
    existing = ModelConfig.objects.filter(pk=model_id).first()
    if existing is None:
        _assign(model, fields)
        model.wanted_replicas = model.replicas_default
        model.version = model.version or _find_version(model, ask_version)
        try:
            with transaction.atomic():
                if model.kind == ModelKind.EXTERNAL:
                    versions.settle(model, model.version)
                model.save(force_insert=True)
                _note_version(model, model.version, now)
        except IntegrityError:
            existing = find_model(model_id)
        else:
            _audit("model_registered", model_id, actor)
            return find_model(model_id), True
    if not _is_same(existing, model, fields):
        raise Conflict(
            f"There is another model {model_id!r} already; PATCH changes it.", code="model_exists"
        )
    return existing, False


def model_problems(model_id: str, fields: ModelFields, *, new: bool) -> list[Problem]:
    """Return what is wrong with settings, without storing anything (for forms)."""
    if new:
        return _problems(_with_defaults(ModelConfig(id=model_id), fields), fields, new=True)
    model = _assign(find_model(model_id), _without_secrets(fields))
    problems = _problems(model, fields, new=False)
    if model.started and model.pool and not problems:
        detail = _lack_of_room(model, model.pool, model.wanted_replicas)
        return [Problem(field="pool", code="pool_full", detail=detail)] if detail else []
    return problems


def update_model(
    model_id: str,
    *,
    now: datetime,
    actor: str = "",
    ask_version: VersionProbe = probe.reported_version,
    **fields: Unpack[ModelFields],
) -> ModelConfig:
    """Change settings of a model.

    Running replicas keep what they were started with until a restart. For an external model,
    `version` is the one that counts from now on; "" asks its server. One that cannot tell keeps the
    version it has, and pauses its raters should it turn out to serve another. Under a new label the
    next version that is known is the first one; a former label stands for what it did.
    `pinned` false also ends the pin that a resize left.
    """
    model = find_model(model_id)
    if "kind" in fields and fields["kind"] != model.kind:
        refuse([Problem(field="kind", code="immutable", detail="register another model instead")])
    before = {name: getattr(model, name) for name in _SERVED}
    _assign(model, fields)
    refuse(_problems(model, fields, new=False))
    moved = any(getattr(model, name) != value for name, value in before.items())
    asks = "version" in fields or moved
    found = fields.pop("version", "")
    if asks and not found:
        found = _find_version(model, ask_version)
    with transaction.atomic():
        current = _lock(model_id)
        label = current.version_label
        _assign(current, fields)
        if fields.get("pinned") is False:
            current.pinned_until = None
        current.wanted_replicas = min(
            max(current.wanted_replicas, current.replicas_min), current.replicas_max
        )
        _check_room(current, started=current.started, replicas=current.wanted_replicas)
        _note_version(current, found, now)
        if current.kind == ModelKind.EXTERNAL:
            if found or current.version_label != label:
                versions.settle(current, found)
        # What runs still serves the old checkpoint: the first new replica brings its version.
        elif found and not current.started:
            current.version = found
        current.updated_at = now
        current.save()
    _audit("model_changed", model_id, actor)
    return find_model(model_id)


def start_model(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Want the model's replicas; starting a started model changes nothing.

    In a pool that is rebalanced it begins with what is free, and gets more when it has work.
    """
    with transaction.atomic():
        model = _lock_hosted(model_id)
        if not model.started:
            replicas = model.wanted_replicas or max(model.replicas_default, 1)
            replicas = _check_room(model, started=True, replicas=replicas, or_fewer=True)
            model.started, model.wanted_replicas, model.updated_at = True, replicas, now
            model.save(update_fields=["started", "wanted_replicas", "updated_at"])
    _audit("model_started", model_id, actor)
    return find_model(model_id)


def stop_model(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Want no replica; those that live drain and end."""
    with transaction.atomic():
        model = _lock_hosted(model_id)
        model.started, model.updated_at = False, now
        model.save(update_fields=["started", "updated_at"])
    _audit("model_stopped", model_id, actor)
    return find_model(model_id)


def restart_model(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Replace the replicas, one at a time while others serve; ends back-off, too."""
    with transaction.atomic():
        model = _lock_hosted(model_id)
        if not model.started:
            raise Conflict(f"Model {model_id!r} is not started.", code="not_started")
        model.restart_generation, model.updated_at = model.restart_generation + 1, now
        model.save(update_fields=["restart_generation", "updated_at"])
    _audit("model_restarted", model_id, actor)
    return find_model(model_id)


def resize_model(model_id: str, replicas: int, *, now: datetime, actor: str = "") -> ModelConfig:
    """Want another number of replicas, now or when the model is started; pins it for an hour."""
    with transaction.atomic():
        model = _lock_hosted(model_id)
        if not model.replicas_min <= replicas <= model.replicas_max:
            refuse([_out_of_range("replicas", model.replicas_min, model.replicas_max)])
        _check_room(model, started=model.started, replicas=replicas)
        model.wanted_replicas, model.updated_at = replicas, now
        model.pinned_until = now + PINNED_FOR
        model.save(update_fields=["wanted_replicas", "pinned_until", "updated_at"])
    _audit("model_resized", model_id, actor)
    return find_model(model_id)


def unpin_model(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Let the rebalancer have a model again, whoever pinned it for however long."""
    return update_model(model_id, now=now, actor=actor, pinned=False)


def accept_version(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Let the version that an external server last came up with count from now on."""
    model = find_model(model_id)
    if not model.reported:
        raise Conflict(f"Model {model_id} reports no other version.", code="no_other_version")
    return update_model(model_id, now=now, actor=actor, version=model.reported)


def remove_model(model_id: str, *, actor: str = "") -> None:
    """Delete a model that is not started."""
    with transaction.atomic():
        model = _lock(model_id)
        if model.started:
            raise Conflict(f"Model {model_id!r} is started; stop it first.", code="started")
        model.delete()
    _audit("model_removed", model_id, actor)


# Assembling and checking


def _with_defaults(model: ModelConfig, fields: ModelFields) -> ModelConfig:
    _assign(model, _without_secrets(fields))
    if model.kind == ModelKind.HOSTED:
        model.loader = model.loader or LOADERS[0]
        model.model_name = model.model_name or model.pk
        if "replicas_max" not in fields:
            model.replicas_max = max(model.replicas_default, 1)
    return model


def _without_secrets(fields: ModelFields) -> ModelFields:
    plain: ModelFields = {**fields}
    plain.pop("api_key", None)
    plain.pop("headers", None)
    return plain


def _assign(model: ModelConfig, fields: ModelFields) -> ModelConfig:
    for name, value in fields.items():
        if name == "pool":
            model.pool_id = fields["pool"] or None
        elif name == "api_key":
            model.api_key = secrets.seal(fields["api_key"] or "")
        elif name == "headers":
            sent = fields["headers"] or {}
            model.headers = {header: secrets.seal(secret) for header, secret in sent.items()}
        elif name == "url":
            model.url = fields["url"].rstrip("/")
        else:
            setattr(model, name, value)
    return model


def _problems(model: ModelConfig, fields: ModelFields, *, new: bool) -> list[Problem]:
    problems = [
        _out_of_range(name, low, high)
        for name, (low, high) in _LIMITS.items()
        if not low <= getattr(model, name) <= high
    ]
    if new and not _ID.fullmatch(model.pk):
        problems.append(_bad_id("id"))
    if model.kind not in ModelKind.values:
        return [
            *problems,
            Problem(field="kind", code="bad_choice", detail=_one_of(ModelKind.values)),
        ]
    if model.protocol not in Protocol.values:
        problems.append(
            Problem(field="protocol", code="bad_choice", detail=_one_of(Protocol.values))
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
    if model.loader not in LOADERS:
        problems.append(Problem(field="loader", code="bad_choice", detail=_one_of(LOADERS)))
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
    elif "checkpoint" in fields:
        try:
            checkpoints.find(model.checkpoint, root=settings.AIRS_CHECKPOINT_ROOT)
        except CheckpointRefused as refusal:
            problems.append(Problem(field="checkpoint", code=refusal.code, detail=refusal.detail))
    return [*problems, *_pool_problems(model)]


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
        problems.append(_out_of_range("headers", 0, MAX_HEADERS))
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


def _find_version(model: ModelConfig, ask_version: VersionProbe) -> str:
    if model.kind == ModelKind.HOSTED:
        found = checkpoints.find(model.checkpoint, root=settings.AIRS_CHECKPOINT_ROOT)
        device = model.pool.kind if model.pool else PoolKind.CPU
        return checkpoints.version(found, device=device)
    if model.protocol == Protocol.OIP:
        return ask_version(model.url, model.model_name, headers=call_headers(model))
    return ""


def _note_version(model: ModelConfig, version: str, now: datetime) -> None:
    if version:
        ModelVersion.objects.get_or_create(
            model=model,
            version=version,
            defaults={"first_seen_at": now, "checkpoint": model.checkpoint},
        )


def _is_same(existing: ModelConfig, asked: ModelConfig, fields: ModelFields) -> bool:
    """Say whether a registration only repeats what is stored; sealed text differs each time."""
    ignored = SECRETS | {
        "version",
        "first_version",
        "reported",
        "started",
        "wanted_replicas",
        "restart_generation",
        "pinned_until",
        "start_up_s",
        "created_at",
        "updated_at",
    }
    if _values(existing, ignored) != _values(asked, ignored):
        return False
    key = secrets.unseal(existing.api_key) or ""
    if key != (fields.get("api_key") or "") and existing.api_key != fields.get("api_key"):
        return False
    stored = {name: (secrets.unseal(sealed), sealed) for name, sealed in existing.headers.items()}
    sent = fields.get("headers") or {}
    return stored.keys() == sent.keys() and all(sent[name] in stored[name] for name in stored)


def _values(row: AcceleratorPool | ModelConfig, ignored: frozenset[str] = frozenset()) -> Any:
    return {
        field.attname: getattr(row, field.attname)
        for field in row._meta.concrete_fields
        if field.name not in ignored
    }


# Locking


def _lock(model_id: str) -> ModelConfig:
    model = ModelConfig.objects.select_for_update().filter(pk=model_id).first()
    if model is None:
        raise NotFound(f"There is no model {model_id!r}.")
    return model


def _lock_hosted(model_id: str) -> ModelConfig:
    model = _lock(model_id)
    if model.kind != ModelKind.HOSTED:
        raise Conflict(
            f"Model {model_id!r} is external: AIRS does not run its server.", code="not_hosted"
        )
    return model


def _check_room(model: ModelConfig, *, started: bool, replicas: int, or_fewer: bool = False) -> int:
    """Refuse more replicas than the pool has devices for; holds the pool's row until the end.

    Returns the replicas there is room for: fewer, down to the model's minimum, if that will do and
    the pool is rebalanced.
    """
    if not started or model.pool_id is None:
        return replicas
    pool = AcceleratorPool.objects.select_for_update().get(pk=model.pool_id)
    if or_fewer and pool.rebalancing == Rebalancing.ON:
        free = pool.devices - devices_used(pool.pk, without=model.pk)
        replicas = min(replicas, max(free // model.devices_per_replica, model.replicas_min))
    if detail := _lack_of_room(model, pool, replicas):
        raise Conflict(detail, code="pool_full")
    return replicas


def _lack_of_room(model: ModelConfig, pool: AcceleratorPool, replicas: int) -> str | None:
    others = devices_used(pool.pk, without=model.pk)
    needed = replicas * model.devices_per_replica
    if others + needed <= pool.devices:
        return None
    return (
        f"Pool {pool.pk} has {pool.devices} devices; {model.pk} needs {needed}, other models use "
        f"{others}."
    )


# Answers


def _bad_id(field: str) -> Problem:
    return Problem(field=field, code="bad_id", detail="1 to 64 letters, digits, - and _")


def _out_of_range(field: str, low: float, high: float) -> Problem:
    return Problem(field=field, code="out_of_range", detail=f"from {low:g} to {high:g}")


def _one_of(values: Sequence[str]) -> str:
    return f"one of {', '.join(values)}"


def _audit(action: str, name: str, actor: str) -> None:
    logger.info("%s id=%s by=%s", action, name, actor or "system")
