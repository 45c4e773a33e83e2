"""Models: registering, finding, changing and removing them."""

from collections.abc import Callable
from datetime import datetime
from typing import Final, Unpack

from django.conf import settings
from django.db import IntegrityError, transaction

from models_admin import checkpoints, secrets, versions
from models_admin.errors import Conflict
from models_admin.models import (
    CHAT,
    NO_PRIORITY,
    ModelConfig,
    ModelKind,
    ModelVersion,
    PoolKind,
)
from models_admin.services import looking
from models_admin.services.audit import audit, changes, settings_of, state
from models_admin.services.fields import SECRETS, ModelFields
from models_admin.services.looking import Look, Seen
from models_admin.services.problems import Problem, refuse
from models_admin.services.room import check_room, lack_of_room
from models_admin.services.rows import lock, named, values
from models_admin.services.validation import find_problems

Warn = Callable[[str], None]
"""Is told what a person should know of a model that is taken all the same."""
_SERVED: Final = (
    *("url", "protocol", "endpoint", "model_name", "version_label"),
    *("pool_id", "loader", "checkpoint", "serving"),
)
"""A change of these may mean that another version is served."""


def _unheard(warning: str) -> None:
    """Nobody listens."""


def find_model(model_id: str) -> ModelConfig:
    """Return a model; raises NotFound."""
    return named(ModelConfig.objects.select_related("pool"), model_id, "model")


def register_model(
    model_id: str,
    *,
    now: datetime,
    actor: str = "",
    look: Look = looking.look,
    warn: Warn = _unheard,
    **fields: Unpack[ModelFields],
) -> tuple[ModelConfig, bool]:
    """Store a new model; return it and whether it is new.

    Its version is computed from the checkpoint, or asked of the external server, which need not
    be up (then its first answer tells) but must not answer like something else. Registering the
    same model again changes nothing.
    """
    model = _with_defaults(ModelConfig(id=model_id, created_at=now, updated_at=now), fields)
    refuse(find_problems(model, fields, new=True))
    existing = ModelConfig.objects.filter(pk=model_id).first()
    if existing is None:
        _assign(model, fields)
        model.wanted_replicas = model.replicas_default
        found = _find_version(model, look, warn)
        model.version = model.version or found
        try:
            with transaction.atomic():
                if model.kind == ModelKind.EXTERNAL:
                    versions.settle(model, model.version)
                model.save(force_insert=True)
                _note_version(model, model.version, now)
                audit("model_registered", model_id, actor, kind="model", detail=settings_of(model))
        except IntegrityError:
            existing = find_model(model_id)
        else:
            return find_model(model_id), True
    if not _is_same(existing, model, fields):
        raise Conflict(
            f"There is another model {model_id!r} already; PATCH changes it.", code="model_exists"
        )
    return existing, False


def model_problems(model_id: str, fields: ModelFields, *, new: bool) -> list[Problem]:
    """Return what is wrong with settings, without storing anything (for forms)."""
    if new:
        return find_problems(_with_defaults(ModelConfig(id=model_id), fields), fields, new=True)
    model = _assign(find_model(model_id), _without_secrets(fields))
    problems = find_problems(model, fields, new=False)
    if model.started and model.pool and not problems:
        detail = lack_of_room(model, model.pool, model.wanted_replicas)
        return [Problem(field="pool", code="pool_full", detail=detail)] if detail else []
    return problems


def look_at(model_id: str, fields: ModelFields, *, new: bool) -> Seen:
    """Look at the server of an external model as it would be stored (for forms)."""
    model = ModelConfig(id=model_id) if new else find_model(model_id)
    before = {name: getattr(model, name) for name in _SERVED}
    _assign(model, fields)
    same = all(getattr(model, name) == value for name, value in before.items())
    if model.kind == ModelKind.HOSTED or (same and not new):
        return Seen()
    return looking.look(model)


def update_model(
    model_id: str,
    *,
    now: datetime,
    actor: str = "",
    look: Look = looking.look,
    warn: Warn = _unheard,
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
    refuse(find_problems(model, fields, new=False))
    moved = any(getattr(model, name) != value for name, value in before.items())
    asks = "version" in fields or moved
    found = fields.pop("version", "")
    if asks and not found:
        found = _find_version(model, look, warn)
    with transaction.atomic():
        current = lock(model_id)
        label, stored = current.version_label, state(current)
        _assign(current, fields)
        if fields.get("pinned") is False:
            current.pinned_until = None
        current.wanted_replicas = min(
            max(current.wanted_replicas, current.replicas_min), current.replicas_max
        )
        check_room(current, started=current.started, replicas=current.wanted_replicas)
        _note_version(current, found, now)
        if current.kind == ModelKind.EXTERNAL:
            if found or current.version_label != label:
                versions.settle(current, found)
        # What runs still serves the old checkpoint: the first new replica brings its version.
        elif found and not current.started:
            current.version = found
        current.updated_at = now
        current.save()
        if detail := changes(stored, state(current)):
            audit("model_changed", model_id, actor, kind="model", detail=detail)
    return find_model(model_id)


def remove_model(model_id: str, *, actor: str = "") -> None:
    """Delete a model that is not started."""
    with transaction.atomic():
        model = lock(model_id)
        if model.started:
            raise Conflict(f"Model {model_id!r} is started; stop it first.", code="started")
        audit("model_removed", model_id, actor, kind="model", detail=settings_of(model))
        model.delete()


def _with_defaults(model: ModelConfig, fields: ModelFields) -> ModelConfig:
    _assign(model, _without_secrets(fields))
    if model.kind == ModelKind.HOSTED:
        model.loader = model.loader or checkpoints.DEFAULT_LOADER
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
        elif name == "endpoint":
            model.endpoint = "" if fields["endpoint"] == CHAT else fields["endpoint"]
        elif name == "url":
            model.url = fields["url"].rstrip("/")
        elif name == "priority_style":
            style = fields["priority_style"]
            model.priority_style = "" if style == NO_PRIORITY else style
            if style:
                model.sends_priority = style != NO_PRIORITY and fields.get("sends_priority", True)
        elif name == "sends_priority":
            if not fields.get("priority_style"):
                model.sends_priority = fields["sends_priority"]
        else:
            setattr(model, name, value)
    return model


def _find_version(model: ModelConfig, look: Look, warn: Warn) -> str:
    if model.kind == ModelKind.HOSTED:
        found = checkpoints.find(model.checkpoint, root=settings.AIRS_CHECKPOINT_ROOT)
        device = model.pool.kind if model.pool else PoolKind.CPU
        return checkpoints.version(found, device=device, loader=model.loader, serving=model.serving)
    seen = look(model)
    if seen.wrong:
        refuse([Problem(field="url", code="wrong_answer", detail=seen.wrong)])
    if seen.warning:
        warn(seen.warning)
    return seen.version


def _note_version(model: ModelConfig, version: str, now: datetime) -> None:
    if version and model.kind == ModelKind.HOSTED:
        versions.propose(model, version, now)
    elif version:
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
    if values(existing, ignored) != values(asked, ignored):
        return False
    key = secrets.unseal(existing.api_key) or ""
    if key != (fields.get("api_key") or "") and existing.api_key != fields.get("api_key"):
        return False
    stored = {name: (secrets.unseal(sealed), sealed) for name, sealed in existing.headers.items()}
    sent = fields.get("headers") or {}
    return stored.keys() == sent.keys() and all(sent[name] in stored[name] for name in stored)
