"""The host agent dies, or loses the database, between any two statements; its successor goes on.

Its servers live in memory; what is left of them holds its devices for seconds. An operator replaces
a version, restarts, resizes and stops a model meanwhile: what comes of it must be the same wherever
the agent dies.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest
from django.core.exceptions import ObjectDoesNotExist
from django.db import Error, connection
from django.db.models import Sum
from pytest_django import Settings

from models_admin import checkpoints, services
from models_admin.agent import HostAgent
from models_admin.hosting import DevicesHeld, Launch, ReplicaName
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelServer,
    ModelVersion,
    ReplicaSample,
    UtilizationSample,
)
from models_admin.policy.replicas import ServerState
from tests.chaos.fail_points import FailPoints, How, watched
from tests.hosted_machine import OTHER, Clock, register, serving, wait_for
from tests.memory_hosting import MemoryBackend

pytestmark = pytest.mark.django_db(transaction=True)

HOWS: Final[tuple[How, ...]] = ("dies", "breaks")
SEED: Final = 20_261_201
FEW: Final = 2
"""Boundaries that the quick form strikes in each way."""
DRAIN_S: Final = 5.0
EACH: Final[Mapping[How, int]] = {"dies": 1, "breaks": 3}
"""The whole form dies at every boundary, and breaks the connection at one in three."""
OPEN: dict[tuple[str, str], int] = {}
"""What AIRS_BACKLOG answers here."""


def backlog(now: datetime) -> Mapping[tuple[str, str], int]:
    return dict(OPEN)


@pytest.fixture(autouse=True)
def _stubs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings.AIRS_BACKLOG = f"{__name__}.backlog"
    monkeypatch.setattr(
        checkpoints, "version", lambda found, **_: found.argument.replace("tiny:", "stub-")
    )
    yield
    OPEN.clear()
    connection.close()  # and the lock of the agent with it


class Backend(MemoryBackend):
    """Devices may be held by what drains on, since the last agent died."""

    def __init__(self, monotonic: Callable[[], float], held: Set[str]) -> None:
        super().__init__(monotonic)
        self._held, self._until = held, monotonic() + DRAIN_S

    def start(self, launch: Launch) -> None:
        if self._held & set(launch.binding.locks) and self._monotonic() < self._until:
            raise DevicesHeld("waits: an earlier server has not ended")
        super().start(launch)

    @property
    def launches(self) -> dict[ReplicaName, Launch]:
        return {name: server.launch for name, server in self._servers.items()}


class Machine:
    """A machine whose agent may die; a pass takes a second."""

    def __init__(self, devices: int) -> None:
        self.clock = Clock()
        self.devices = devices
        self.lived_s = 0
        """Of all servers together."""
        self.begin()

    def begin(self, held: Set[str] = frozenset()) -> None:
        """Begin anew, as after a death: the servers have ended with their agent, or drain."""
        self.backend = Backend(self.clock.monotonic, held)
        self.agent = HostAgent(
            name="local", boot_id=uuid4(), backend=self.backend, checkpoint_root=Path("/none")
        )

    def passes(self, count: int) -> None:
        for _ in range(count):
            self.clock.jump(seconds=1)
            self.lived_s += len(self.backend.launches)
            try:
                wait_for(self.agent.lead)
                self.agent.run_once(self.clock.now())
            except (Error, ObjectDoesNotExist):
                connection.close()
            self.no_device_is_held_twice()

    def no_device_is_held_twice(self) -> None:
        launches = self.backend.launches.values()
        held = [index for launch in launches for index in launch.binding.indices]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(self.devices))

    def locks(self) -> Set[str]:
        launches = self.backend.launches.values()
        return {lock for launch in launches for lock in launch.binding.locks}

    def one_version_counts(self) -> None:
        """New work is pinned to what serves, and each replica is known by what it runs."""
        (model,) = ModelConfig.objects.all()
        (counts,) = ModelVersion.objects.filter(state="serving")
        assert model.version == counts.version
        for row in serving():
            assert row.boot_id == self.agent._boot_id
            launch = self.backend.launches[ReplicaName("mini", row.ordinal)]
            assert row.version == launch.checkpoint.replace("tiny:", "stub-")


def served() -> list[str]:
    return sorted(row.version for row in serving())


def _replace(machine: Machine) -> None:
    OPEN["mini", "stub-0"] = 3
    services.update_model("mini", now=machine.clock.now(), checkpoint=f"tiny:{OTHER}")


def _end_backlog(machine: Machine) -> None:
    OPEN.clear()


def _restart(machine: Machine) -> None:
    services.restart_model("mini", now=machine.clock.now())


def _resize(machine: Machine) -> None:
    services.resize_model("mini", 2, now=machine.clock.now())


def _stop(machine: Machine) -> None:
    services.stop_model("mini", now=machine.clock.now())


Phases = Sequence[tuple[Callable[[Machine], None], list[str]]]
"""What an operator does, and what is served then."""
PHASES: Final[Mapping[int, Phases]] = {
    # Checked, in place.
    1: (
        (_replace, ["stub-0"]),
        (_end_backlog, ["stub-10"]),
        (_restart, ["stub-10"]),
        (_stop, []),
    ),
    # Side by side.
    2: (
        (_replace, ["stub-0", "stub-10"]),
        (_end_backlog, ["stub-10"]),
        (_restart, ["stub-10"]),
        (_resize, ["stub-10", "stub-10"]),
        (_stop, []),
    ),
}
"""By the devices of the pool."""
ENOUGH: Final = 14
"""Passes that bring any of it about."""


def play(points: FailPoints, devices: int) -> None:
    services.register_pool(AcceleratorPool(id="box", devices=devices))
    register(pool="box")
    machine = Machine(devices)
    machine.passes(ENOUGH)
    assert served() == ["stub-0"]
    is_over = False
    for act, expected in PHASES[devices]:
        act(machine)
        if points.struck:
            machine.passes(ENOUGH)
        else:
            with watched(points):
                machine.passes(ENOUGH)
        if points.struck and not is_over:
            is_over = True
            if points.how == "dies":
                machine.begin(machine.locks())
            machine.passes(ENOUGH)
        assert served() == expected, act.__name__
        machine.one_version_counts()

    rows = list(ModelServer.objects.all())
    assert {row.state for row in rows} == {ServerState.STOPPED}
    assert not any(row.pid or row.address or row.devices for row in rows)
    assert not machine.backend.launches
    states = dict(ModelVersion.objects.values_list("version", "state"))
    assert states == {"stub-0": "retired", "stub-10": "serving"}
    if points.how == "dies":
        assert not any(row.last_error for row in rows), "the agent's death is nobody's failure"
    of_model = UtilizationSample.objects.aggregate(told=Sum("replica_s"))["told"]
    of_replicas = ReplicaSample.objects.aggregate(told=Sum("lived_s"))["told"]
    assert of_model == pytest.approx(of_replicas)
    # Real seconds pass beside those of the test.
    assert machine.lived_s / 4 < of_replicas < machine.lived_s + 5


def boundaries(devices: int) -> list[tuple[int, str]]:
    """Return where something is written: to die between reads is to die before the next write."""
    points = FailPoints()
    play(points, devices)
    return [
        (number, name)
        for number, name in enumerate(points.passed)
        if not name.removeprefix("after ").startswith(("SELECT", "SAVEPOINT", "RELEASE", "return"))
    ]


def strike(how: How, at: int, name: str, devices: int) -> None:
    ModelConfig.objects.all().delete()
    for table in (AcceleratorPool, UtilizationSample, ReplicaSample):
        table.objects.all().delete()
    OPEN.clear()
    points = FailPoints(at=at, how=how)
    try:
        play(points, devices)
        assert points.struck
    except BaseException as error:
        error.add_note(f"the agent {how} at boundary {at}: {name}")
        raise


@pytest.mark.parametrize("devices", PHASES)
def test_few_boundaries(devices: int) -> None:
    found = boundaries(devices)
    chance = random.Random(f"{SEED} {devices}")
    for how in HOWS:
        for at, name in chance.sample(found, FEW):
            strike(how, at, name, devices)


@pytest.mark.chaos
@pytest.mark.parametrize("devices", PHASES)
@pytest.mark.parametrize("how", HOWS)
def test_every_boundary(how: How, devices: int) -> None:
    for at, name in boundaries(devices)[:: EACH[how]]:
        strike(how, at, name, devices)
