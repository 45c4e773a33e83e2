"""The devices of pools, by index: nothing starts on a device that is held.

What is wanted of a pool never exceeds it, but what lives may, for a while: replicas drain while
others are wanted already. A server holds its devices from its launch until its process is gone,
whatever its model's configuration says meanwhile. Pools of one kind and agent follow one another
on the machine, in order of their ids.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from models_admin.hosting import Binding, ReplicaName
from models_admin.models import AcceleratorPool, ModelConfig, ModelServer, PoolKind

_BOUNDS: Final = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How so many TPU chips of a host lie together."""


class Devices:
    """What the living servers of one agent hold."""

    def __init__(self) -> None:
        self._pools: dict[str, AcceleratorPool] = {}
        self._holds: dict[ReplicaName, Binding] = {}

    def look(
        self,
        living: Set[ReplicaName],
        rows: Mapping[ReplicaName, ModelServer],
        models: Mapping[str, ModelConfig],
        pools: Iterable[AcceleratorPool],
    ) -> None:
        """Take note of which servers live, and of the pools of this agent."""
        self._pools = {pool.pk: pool for pool in pools}
        before, self._holds = self._holds, {}
        for name in sorted(living):
            hold = before.get(name) or _by_row(rows.get(name), models.get(name.model_id))
            if hold is not None:
                self._holds[name] = hold
        # Of what nobody noted anything, its model says how much it holds.
        for name in sorted(living - self._holds.keys()):
            model = models.get(name.model_id)
            found = self.find(model) if model is not None else ""
            if isinstance(found, Binding):
                self.take(name, found)

    def find(self, model: ModelConfig) -> Binding | str:
        """Return devices for a replica of a model, or what it has to wait for."""
        pool = self._pools.get(model.pool_id or "")
        if pool is None:
            return Binding(env=_environment(PoolKind.CPU, range(1), shared=False))
        holds = [
            (self._pools[hold.pool_id].kind, hold)
            for hold in self._holds.values()
            if hold.pool_id in self._pools
        ]
        held = {index for kind, hold in holds if kind == pool.kind for index in hold.indices}
        own = sum(len(hold.indices) for _, hold in holds if hold.pool_id == pool.pk)
        first = sum(
            other.devices
            for other in self._pools.values()
            if other.kind == pool.kind and other.pk < pool.pk
        )
        free = [index for index in range(first, first + pool.devices) if index not in held]
        needed = model.devices_per_replica
        if own + needed > pool.devices or len(free) < needed:
            return (
                f"waits for {needed} of the {pool.devices} devices of pool {pool.pk}: "
                f"others hold {max(own, pool.devices - len(free))}"
            )
        indices = tuple(free[:needed])
        # The shares of a CPU are numbers; what has a lock is a device of the machine.
        scope = pool.pk if pool.kind == PoolKind.CPU else pool.kind
        return Binding(
            pool_id=pool.pk,
            indices=indices,
            env=_environment(PoolKind(pool.kind), indices, shared=needed < pool.devices),
            locks=tuple(f"{scope}-{index}" for index in indices),
        )

    def take(self, name: ReplicaName, binding: Binding) -> None:
        """Note that a server was launched on devices."""
        if binding.indices:
            self._holds[name] = binding


def _by_row(row: ModelServer | None, model: ModelConfig | None) -> Binding | None:
    """Return what a server holds that another run of the agent launched."""
    if row is None or model is None or model.pool_id is None or not row.devices:
        return None
    return Binding(pool_id=model.pool_id, indices=tuple(row.devices))


def _environment(kind: PoolKind, indices: Sequence[int], *, shared: bool) -> dict[str, str]:
    """Return how a server is told of its devices; JAX must not fall back to others unnoticed."""
    named = ",".join(map(str, indices))
    if kind is PoolKind.GPU:
        return {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": named}
    if kind is PoolKind.TPU:
        env = {"JAX_PLATFORMS": "tpu", "TPU_VISIBLE_CHIPS": named}
        if shared and len(indices) in _BOUNDS:
            env["TPU_PROCESS_BOUNDS"] = "1,1,1"
            env["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _BOUNDS[len(indices)]
        return env
    env = {"JAX_PLATFORMS": "cpu"}
    if len(indices) > 1:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(indices)}"
    return env
