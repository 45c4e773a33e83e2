"""Acts on a model: start, stop, restart, resize, unpin, and accepting a version."""

from datetime import datetime, timedelta
from typing import Final

from django.db import transaction

from models_admin import versions
from models_admin.errors import Conflict
from models_admin.models import ModelConfig, ModelVersion
from models_admin.services.audit import audit
from models_admin.services.problems import out_of_range, refuse
from models_admin.services.registering import find_model, update_model
from models_admin.services.room import check_room
from models_admin.services.rows import lock_hosted

PINNED_FOR: Final = timedelta(hours=1)
"""The rebalancer leaves a model alone for so long after somebody resized it."""


def start_model(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Want the model's replicas; starting a started model changes nothing.

    In a pool that is rebalanced it begins with what is free, and gets more when it has work.
    """
    with transaction.atomic():
        model = lock_hosted(model_id)
        if not model.started:
            replicas = model.wanted_replicas or max(model.replicas_default, 1)
            replicas = check_room(model, started=True, replicas=replicas, or_fewer=True)
            model.started, model.wanted_replicas, model.updated_at = True, replicas, now
            model.save(update_fields=["started", "wanted_replicas", "updated_at"])
            audit("model_started", model_id, actor, kind="model", detail={"replicas": replicas})
    return find_model(model_id)


def stop_model(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Want no replica; those that live drain and end."""
    with transaction.atomic():
        model = lock_hosted(model_id)
        if model.started:
            model.started, model.updated_at = False, now
            model.save(update_fields=["started", "updated_at"])
            audit("model_stopped", model_id, actor, kind="model")
    return find_model(model_id)


def restart_model(model_id: str, *, now: datetime, actor: str = "") -> ModelConfig:
    """Replace the replicas, one at a time while others serve; ends back-off, too."""
    with transaction.atomic():
        model = lock_hosted(model_id)
        if not model.started:
            raise Conflict(f"Model {model_id!r} is not started.", code="not_started")
        model.restart_generation, model.updated_at = model.restart_generation + 1, now
        model.save(update_fields=["restart_generation", "updated_at"])
        audit("model_restarted", model_id, actor, kind="model")
    return find_model(model_id)


def resize_model(model_id: str, replicas: int, *, now: datetime, actor: str = "") -> ModelConfig:
    """Want another number of replicas, now or when the model is started; pins it for an hour."""
    with transaction.atomic():
        model = lock_hosted(model_id)
        if not model.replicas_min <= replicas <= model.replicas_max:
            refuse([out_of_range("replicas", model.replicas_min, model.replicas_max)])
        check_room(model, started=model.started, replicas=replicas)
        detail = {"replicas": [model.wanted_replicas, replicas]}
        model.wanted_replicas, model.updated_at = replicas, now
        model.pinned_until = now + PINNED_FOR
        model.save(update_fields=["wanted_replicas", "pinned_until", "updated_at"])
        audit("model_resized", model_id, actor, kind="model", detail=detail)
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


def retire_version(model_id: str, version: str, *, now: datetime, actor: str = "") -> ModelVersion:
    """Let an old version of a hosted model end, whatever work waits for it.

    Raises NotFound, or Conflict `version_serving` for the version that is to be served.
    """
    with transaction.atomic():
        withdrawn = ModelVersion.objects.filter(model_id=model_id, is_withdrawn=True)
        # Compared here: an address may hold what the database takes for no text.
        is_news = version not in set(withdrawn.values_list("version", flat=True))
        retired = versions.retire_version(model_id, version, now=now)
        if is_news:
            detail = {"version": version}
            audit("model_version_retired", model_id, actor, kind="model", detail=detail)
    return retired
