"""The devices that an agent's living servers hold."""

from models_admin.devices import Devices
from models_admin.hosting import ReplicaName
from models_admin.models import AcceleratorPool, ModelConfig

A, B = ReplicaName("m", 0), ReplicaName("m", 1)


def model(*, pool: str | None = "box", devices: int = 1) -> ModelConfig:
    of = None if pool is None else AcceleratorPool(id=pool, devices=4)
    return ModelConfig(id="m", pool=of, devices_per_replica=devices)


def test_a_server_holds_its_devices_from_its_launch_until_it_is_gone() -> None:
    devices, large = Devices(), model(devices=3)

    assert not devices.lack(large)
    devices.take(A, large)
    assert devices.lack(large) == "waits for 3 of the 4 devices of pool box: others hold 3"
    devices.look([A], {"m": large})
    assert devices.lack(large)
    devices.look([], {"m": large})
    assert not devices.lack(large)


def test_what_its_model_says_later_changes_nothing_for_a_server_that_lives() -> None:
    devices = Devices()
    devices.take(A, model(devices=3))

    for changed in ({"m": model(devices=1)}, {"m": model(pool="other")}, {}):
        devices.look([A], changed)

    assert devices.lack(model(devices=2))
    assert not devices.lack(model(devices=1))
    assert not devices.lack(model(pool="other", devices=4))


def test_one_whose_launch_was_not_seen_is_taken_for_what_its_model_says() -> None:
    devices = Devices()

    devices.look([A, B], {"m": model(devices=2)})

    assert devices.lack(model())


def test_without_a_pool_there_is_no_limit() -> None:
    devices = Devices()
    for name in (A, B):
        devices.take(name, model(pool=None, devices=9))

    assert not devices.lack(model(pool=None, devices=9))
    assert not devices.lack(model(devices=4))
