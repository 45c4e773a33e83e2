"""The devices that an agent's living servers hold, by index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_admin.devices import Devices
from models_admin.hosting import Binding, ReplicaName
from models_admin.models import AcceleratorPool, ModelConfig, ModelServer, PoolKind

A, B = ReplicaName("m", 0), ReplicaName("m", 1)


def pool(name: str = "box", devices: int = 4, kind: PoolKind = PoolKind.CPU) -> AcceleratorPool:
    return AcceleratorPool(id=name, devices=devices, kind=kind)


def model(of: AcceleratorPool | None, devices: int = 1) -> ModelConfig:
    return ModelConfig(id="m", pool=of, devices_per_replica=devices)


def of_pools(*pools: AcceleratorPool) -> Devices:
    devices = Devices()
    devices.look(set(), {}, {}, pools)
    return devices


def bind(devices: Devices, name: ReplicaName, to: ModelConfig) -> Binding:
    found = devices.find(to)
    assert isinstance(found, Binding), found
    devices.take(name, found)
    return found


def test_a_server_holds_its_devices_from_its_launch_until_it_is_gone() -> None:
    box = pool()
    devices, large = of_pools(box), model(box, devices=3)

    assert bind(devices, A, large).indices == (0, 1, 2)
    assert devices.find(large) == "waits for 3 of the 4 devices of pool box: others hold 3"
    devices.look({A}, {}, {"m": large}, [box])
    assert bind(devices, B, model(box)).indices == (3,)
    devices.look({B}, {}, {"m": large}, [box])
    assert bind(devices, A, large).indices == (0, 1, 2)


def test_what_its_model_says_later_changes_nothing_for_a_server_that_lives() -> None:
    box, other = pool(), pool("other")
    devices = of_pools(box, other)
    bind(devices, A, model(box, devices=3))

    for changed in ({"m": model(box)}, {"m": model(other)}, {}):
        devices.look({A}, {}, changed, [box, other])

    assert isinstance(devices.find(model(box, devices=2)), str)
    assert bind(devices, B, model(box)).indices == (3,)


def test_what_an_earlier_agent_launched_is_known_by_its_row() -> None:
    box = pool()
    devices = Devices()
    rows = {A: ModelServer(model_id="m", ordinal=0, devices=[2])}

    devices.look({A}, rows, {"m": model(box)}, [box])

    assert bind(devices, B, model(box, devices=3)).indices == (0, 1, 3)


def test_one_of_which_nothing_is_noted_is_taken_for_what_its_model_says() -> None:
    box = pool()
    devices = Devices()

    devices.look({A, B}, {}, {"m": model(box, devices=2)}, [box])

    assert isinstance(devices.find(model(box)), str)


def test_without_a_pool_there_is_no_limit() -> None:
    devices = of_pools(pool())

    assert bind(devices, A, model(None, devices=9)).indices == ()
    assert bind(devices, B, model(None, devices=9)).env == {"JAX_PLATFORMS": "cpu"}


def test_pools_of_a_kind_follow_one_another_on_their_machine() -> None:
    first, second = pool("a", 2, PoolKind.GPU), pool("b", 2, PoolKind.GPU)
    devices = of_pools(second, first, pool("c", 2))

    assert bind(devices, A, model(second)).indices == (2,)
    assert bind(devices, B, model(first)).indices == (0,)
    assert bind(devices, ReplicaName("m", 2), model(pool("c", 2))).indices == (0,)


def test_what_a_pool_holds_counts_wherever_its_devices_lay_before() -> None:
    first, second = pool("a", 2, PoolKind.GPU), pool("b", 2, PoolKind.GPU)
    devices, large = of_pools(first, second), model(second, devices=2)
    assert bind(devices, A, large).indices == (2, 3)

    devices.look({A}, {}, {"m": large}, [second])

    assert devices.find(model(second)) == "waits for 1 of the 2 devices of pool b: others hold 2"


def test_the_shares_of_a_cpu_are_locked_by_pool_and_devices_by_machine() -> None:
    gpu, cpu = pool("b", 2, PoolKind.GPU), pool("c", 2)
    devices = of_pools(pool("a", 2, PoolKind.GPU), gpu, cpu)

    assert bind(devices, A, model(gpu, devices=2)).locks == ("gpu-2", "gpu-3")
    assert bind(devices, B, model(cpu)).locks == ("c-0",)


@pytest.mark.parametrize(
    ("kind", "count", "env"),
    [
        (PoolKind.CPU, 1, {"JAX_PLATFORMS": "cpu"}),
        (
            PoolKind.CPU,
            2,
            {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            },
        ),
        (PoolKind.GPU, 2, {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0,1"}),
        (
            PoolKind.TPU,
            1,
            {
                "JAX_PLATFORMS": "tpu",
                "TPU_VISIBLE_CHIPS": "0",
                "TPU_PROCESS_BOUNDS": "1,1,1",
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            },
        ),
        (PoolKind.TPU, 4, {"JAX_PLATFORMS": "tpu", "TPU_VISIBLE_CHIPS": "0,1,2,3"}),
    ],
)
def test_a_server_is_told_of_its_devices_and_of_no_others(
    kind: PoolKind, count: int, env: dict[str, str]
) -> None:
    box = pool(kind=kind)

    assert bind(of_pools(box), A, model(box, devices=count)).env == env


@given(
    sizes=st.lists(st.integers(1, 3), max_size=8),
    ends=st.lists(st.integers(0, 7), max_size=8),
)
def test_no_device_is_ever_given_twice(sizes: list[int], ends: list[int]) -> None:
    box = pool()
    devices = of_pools(box)
    held: dict[ReplicaName, tuple[int, ...]] = {}
    for number, size in enumerate(sizes):
        found = devices.find(model(box, devices=size))
        if isinstance(found, Binding):
            held[ReplicaName("m", number)] = found.indices
            devices.take(ReplicaName("m", number), found)
        for end in ends[number : number + 1]:
            held.pop(ReplicaName("m", end), None)
            devices.look(set(held), {}, {"m": model(box)}, [box])
        indices = [index for of in held.values() for index in of]
        assert len(indices) == len(set(indices))
        assert set(indices) <= set(range(4))
