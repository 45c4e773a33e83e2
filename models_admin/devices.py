"""The devices of pools, as an agent's servers hold them: nothing starts on a device that is held.

What is wanted of a pool never exceeds it, but what lives may, for a while: replicas drain while
others are wanted already. A server holds its devices from its launch until its process is gone,
whatever its model's configuration says meanwhile.
"""

from collections.abc import Collection, Mapping

from models_admin.hosting import ReplicaName
from models_admin.models import ModelConfig

_Hold = tuple[str, int]
"""A pool, and how many of its devices."""


class Devices:
    """What the living servers of one agent hold."""

    def __init__(self) -> None:
        self._holds: dict[ReplicaName, _Hold] = {}

    def look(self, living: Collection[ReplicaName], models: Mapping[str, ModelConfig]) -> None:
        """Take note of which servers live."""
        self._holds = {
            name: hold
            for name in living
            if (hold := self._holds.get(name) or _hold(models.get(name.model_id)))
        }

    def lack(self, model: ModelConfig) -> str:
        """Say what a replica of a model has to wait for; "" if its devices are free."""
        if model.pool is None:
            return ""
        held = sum(devices for pool_id, devices in self._holds.values() if pool_id == model.pool_id)
        if held + model.devices_per_replica <= model.pool.devices:
            return ""
        return (
            f"waits for {model.devices_per_replica} of the {model.pool.devices} devices of pool "
            f"{model.pool_id}: others hold {held}"
        )

    def take(self, name: ReplicaName, model: ModelConfig) -> None:
        """Note that a server of a model was launched."""
        if hold := _hold(model):
            self._holds[name] = hold


def _hold(model: ModelConfig | None) -> _Hold | None:
    if model is None or model.pool_id is None:
        return None
    return model.pool_id, model.devices_per_replica
