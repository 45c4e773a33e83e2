"""Room in a pool for the replicas of a model."""

from models_admin.errors import Conflict
from models_admin.models import AcceleratorPool, ModelConfig, Rebalancing
from models_admin.services.pools import devices_used


def check_room(model: ModelConfig, *, started: bool, replicas: int, or_fewer: bool = False) -> int:
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
    if detail := lack_of_room(model, pool, replicas):
        raise Conflict(detail, code="pool_full")
    return replicas


def lack_of_room(model: ModelConfig, pool: AcceleratorPool, replicas: int) -> str | None:
    """Say what a pool lacks for so many replicas of a model."""
    others = devices_used(pool.pk, without=model.pk)
    needed = replicas * model.devices_per_replica
    if others + needed <= pool.devices:
        return None
    return (
        f"Pool {pool.pk} has {pool.devices} devices; {model.pk} needs {needed}, other models use "
        f"{others}."
    )
