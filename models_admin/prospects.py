"""How many replicas a model could have: what the others of its pool do not need.

Forecasts plan with that where replicas move by themselves; where they don't, a model has what it
has. Needs are those that the rebalancer last found.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from models_admin.models import ModelConfig, ModelVersion, PoolOutlook, Rebalancing

BELIEVED: Final = timedelta(minutes=5)
"""Needs that were found longer ago say nothing any more."""


def new_versions(models: Iterable[ModelConfig]) -> Mapping[str, frozenset[str]]:
    """Return what a new replica of each hosted model may turn out to serve, by model."""
    checkpoints = {model.pk: model.checkpoint for model in models}
    found: dict[str, set[str]] = {model_id: {""} for model_id in checkpoints}
    seen = ModelVersion.objects.filter(model__in=checkpoints)
    for model_id, version, checkpoint in seen.values_list("model_id", "version", "checkpoint"):
        if checkpoint == checkpoints[model_id]:
            found[model_id].add(version)
    return {model_id: frozenset(versions) for model_id, versions in found.items()}


def could_have(model_id: str, version: str, now: datetime) -> float:
    """Return the replicas that a version could have if others got what they need; 0 if none move.

    A replica that moves serves the present version: an older one keeps what it has.
    """
    model = (
        ModelConfig.objects.select_related("pool")
        .filter(pk=model_id, started=True, pool__rebalancing=Rebalancing.ON)
        .first()
    )
    if model is None or model.pool is None or model.is_pinned(now):
        return 0.0
    outlook = PoolOutlook.objects.filter(pk=model.pool_id, at__gt=now - BELIEVED).first()
    if outlook is None or not outlook.needs or version not in new_versions([model])[model_id]:
        return 0.0
    others = ModelConfig.objects.filter(pool=model.pool_id, started=True).exclude(pk=model_id)
    needed = sum(
        outlook.needs.get(other_id, wanted) * devices
        for other_id, wanted, devices in others.values_list(
            "id", "wanted_replicas", "devices_per_replica"
        )
    )
    left = (model.pool.devices - needed) / model.devices_per_replica
    return float(min(max(left, 0.0), model.replicas_max))
