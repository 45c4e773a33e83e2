"""How many replicas a model could have: what the others of its pool do not need.

Forecasts plan with that where replicas move by themselves; where they don't, a model has what it
has. Needs are those that the rebalancer last found.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from django.db.models import F, Q

from models_admin.models import ModelConfig, ModelVersion, PoolOutlook, Rebalancing
from models_admin.policy.rollout import VersionState

BELIEVED: Final = timedelta(minutes=5)
"""Needs that were found longer ago say nothing any more."""


def new_versions(models: Iterable[ModelConfig]) -> Mapping[str, frozenset[str]]:
    """Return what a further replica of each hosted model may turn out to serve, by model.

    Once a version is served, its candidate has yet to prove itself, and an old one gets no more.
    """
    found: dict[str, set[str]] = {model.pk: {"", model.version} for model in models}
    # One without a state was seen before versions had any: its checkpoint is all that is known.
    coming = ModelVersion.objects.filter(
        Q(state__in=[VersionState.CANDIDATE, VersionState.SERVING])
        | Q(state="", checkpoint=F("model__checkpoint")),
        model__in=found,
    )
    for model_id, version in coming.values_list("model_id", "version"):
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
