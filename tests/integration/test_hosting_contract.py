"""The hosting contract on processes of this machine and on one without any."""

import os
import signal
import time
from pathlib import Path
from typing import cast
from uuid import uuid4

import pytest

from models_admin import services
from models_admin.agent import HostAgent
from models_admin.hosting import HostingBackend, Living, ReplicaName
from models_admin.models import ModelServer, ModelVersion
from models_admin.policy.replicas import ServerState
from tests.hosted_machine import OTHER, REFUSES, STUB, Clock, Host, register
from tests.hosting_contract import HostingContract
from tests.memory_hosting import MemoryBackend


class TestLocalBackend(HostingContract):
    """Real processes."""

    def make(self, request: pytest.FixtureRequest) -> HostingBackend:
        home: Path = request.getfixturevalue("tmp_path")
        stub = home / "stub.py"
        stub.write_text(STUB)
        return Host(home=home, stub=stub).backend

    def kill(self, backend: HostingBackend, living: Living, name: ReplicaName) -> None:
        os.kill(living.pid or 0, signal.SIGKILL)

    def notify(self, backend: HostingBackend, living: Living, name: ReplicaName) -> None:
        os.kill(living.pid or 0, signal.SIGTERM)


class TestMemoryBackend(HostingContract):
    """No process, and no pid."""

    def make(self, request: pytest.FixtureRequest) -> HostingBackend:
        return MemoryBackend(time.monotonic)

    def kill(self, backend: HostingBackend, living: Living, name: ReplicaName) -> None:
        cast(MemoryBackend, backend).kill(name)

    def notify(self, backend: HostingBackend, living: Living, name: ReplicaName) -> None:
        cast(MemoryBackend, backend).notify(name)


@pytest.mark.django_db
def test_the_agent_needs_no_change_for_another_backend(tmp_path: Path) -> None:
    clock = Clock()
    backend = MemoryBackend(clock.monotonic)
    agent = HostAgent(name="local", boot_id=uuid4(), backend=backend, checkpoint_root=tmp_path)

    def passes(count: int) -> None:
        for _ in range(count):
            clock.jump(seconds=1)
            agent.run_once(clock.now())

    register()
    passes(8)
    services.update_model("mini", now=clock.now(), checkpoint=f"tiny:{OTHER}")
    passes(30)
    services.update_model("mini", now=clock.now(), checkpoint=f"tiny:{REFUSES}")
    passes(10)

    (serving,) = ModelServer.objects.filter(state=ServerState.READY)
    assert (serving.version, serving.host, serving.pid) == ("stub-10", "memory", None)
    states = dict(ModelVersion.objects.values_list("checkpoint", "state"))
    assert states == {"tiny:0": "retired", "tiny:10": "serving", f"tiny:{REFUSES}": "failed"}
