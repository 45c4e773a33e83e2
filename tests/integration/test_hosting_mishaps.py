"""Mishaps around the host agent: files put back, logs removed, models gone, checks that hang."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings as site
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from models_admin import checkpoints, prospects, server_log, server_process, services
from models_admin.agent import HostAgent
from models_admin.hosting import Binding, DevicesHeld, Launch, Living, ReplicaName
from models_admin.management.commands import host_models
from models_admin.models import AcceleratorPool, ModelConfig, ModelServer, ModelVersion
from models_admin.policy.replicas import ServerState
from tests.hosted_machine import OTHER, Clock, Host, lives, machine, register, servers, wait_for
from tests.hosting_contract import until_checked
from tests.memory_hosting import MemoryBackend

pytestmark = pytest.mark.django_db

OPEN: dict[tuple[str, str], int] = {}
"""What AIRS_BACKLOG answers here."""
CHECK = Launch(name=ReplicaName("m", -1), model_name="m", checkpoint="tiny:0")
ON_DEVICE = Launch(
    name=ReplicaName("m", 0), model_name="m", checkpoint="tiny:0", binding=Binding(locks=("gpu-0",))
)

DIES_AS_IT_STARTS_ONE = """
import os, signal, subprocess, sys
from pathlib import Path
from models_admin.hosting import Binding, Launch, ReplicaName
from models_admin.local_hosting import LocalBackend

home, stub, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
start = subprocess.Popen

def popen(*arguments, **options):
    if when == "after":
        print(start(*arguments, **options).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = popen
backend = LocalBackend(
    logs=home / "logs", cache=home / "cache", locks=home / "devices", checkpoint_root=home,
    cwd=home, environ=os.environ, command=(sys.executable, stub),
)
backend.start(Launch(
    name=ReplicaName("m", 0), model_name="m", checkpoint="tiny:0", binding=Binding(locks=("gpu-0",))
))
"""


def backlog(now: datetime) -> Mapping[tuple[str, str], int]:
    return dict(OPEN)


class Machine:
    """An agent whose servers live in memory; a pass takes a second."""

    def __init__(self, root: Path) -> None:
        self.clock = Clock()
        self.backend = MemoryBackend(self.clock.monotonic)
        self.agent = HostAgent(
            name="local", boot_id=uuid4(), backend=self.backend, checkpoint_root=root
        )

    def passes(self, count: int) -> None:
        for _ in range(count):
            self.clock.jump(seconds=1)
            self.agent.run_once(self.clock.now())


@pytest.fixture
def memory(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    settings.AIRS_BACKLOG = f"{__name__}.backlog"
    monkeypatch.setattr(
        checkpoints, "version", lambda found, **_: found.argument.replace("tiny:", "stub-")
    )
    yield Machine(tmp_path)
    OPEN.clear()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with machine(tmp_path) as host:
        yield host


def test_files_that_are_put_back_are_served_as_the_version_they_were(
    memory: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    memory.passes(8)
    called, found = "overwritten", MemoryBackend._living

    def living(backend: MemoryBackend, server: Any) -> Living:
        seen = found(backend, server)
        return replace(seen, version=called) if seen.version else seen

    monkeypatch.setattr(MemoryBackend, "_living", living)
    services.restart_model("mini", now=memory.clock.now())
    memory.passes(20)
    assert ModelConfig.objects.get().version == "overwritten"

    called = "stub-0"
    services.restart_model("mini", now=memory.clock.now())
    memory.passes(20)

    assert ModelConfig.objects.get().version == "stub-0"
    states = dict(ModelVersion.objects.values_list("version", "state"))
    assert states == {"stub-0": "serving", "overwritten": "failed"}
    assert ModelServer.objects.get(state=ServerState.READY).version == "stub-0"


def test_work_that_came_in_the_last_seconds_keeps_its_version_a_replica(memory: Machine) -> None:
    services.register_pool(AcceleratorPool(id="box", devices=2))
    register(pool="box")
    memory.passes(10)
    services.update_model("mini", now=memory.clock.now(), checkpoint=f"tiny:{OTHER}")
    memory.passes(2)

    OPEN["mini", "stub-0"] = 3
    for _ in range(10):
        memory.passes(1)
        assert ModelServer.objects.filter(state=ServerState.READY, version="stub-0").exists()

    assert ModelConfig.objects.get().version == "stub-10"


def test_rows_from_before_versions_had_states_go_on_serving(memory: Machine) -> None:
    register()
    memory.passes(8)
    before = {"state": "", "loader": "", "serving": {}, "reason": "", "replicas": 0}
    ModelVersion.objects.update(**before, changed_at=None)
    ModelVersion.objects.create(
        model_id="mini", version="stub-10", checkpoint="tiny:10", first_seen_at=memory.clock.now()
    )
    ModelServer.objects.update(launched=None, devices=[])
    OPEN["mini", "stub-10"] = 1
    memory.backend.stop_all()
    memory.agent = HostAgent(
        name="local", boot_id=uuid4(), backend=memory.backend, checkpoint_root=Path("/none")
    )

    memory.passes(8)

    ready = ModelServer.objects.filter(state=ServerState.READY)
    assert set(ready.values_list("version", flat=True)) == {"stub-0", "stub-10"}
    assert ModelConfig.objects.get().version == "stub-0"
    (coming,) = prospects.new_versions(ModelConfig.objects.all()).values()
    assert coming == {"", "stub-0"}, "an old version gets no more replicas"


def test_a_model_that_is_removed_during_a_pass_ends_no_agent(
    memory: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    memory.passes(5)
    services.stop_model("mini", now=memory.clock.now())
    found = HostAgent._rows

    def rows(agent: HostAgent) -> Any:
        read = found(agent)
        services.remove_model("mini")
        return read

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(HostAgent, "_rows", rows)
        meanwhile.setattr(HostAgent, "lead", lambda agent: True)
        meanwhile.setattr(connection, "close", lambda: None)
        host_models._pass(memory.agent)
    memory.passes(3)

    assert memory.backend.observe().living == {}


@pytest.mark.parametrize("broken", ["\0", "\ud800"])
def test_what_a_refusal_quotes_can_be_stored(tmp_path: Path, broken: str) -> None:
    log = tmp_path / "server.log"
    said = {"event": "model not loaded", "code": "missing_tensor", "error": f"no x{broken}y"}
    log.write_text(json.dumps(said))

    refusal = server_log.refusal(server_log.last_words(log, 0, []))

    assert refusal is not None
    model = register()
    ModelServer.objects.create(model=model, agent="local", ordinal=0, reason=refusal.text)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends servers with their agent")
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_agent_that_dies_as_it_starts_a_server_leaves_no_device_held(
    host: Host, when: str
) -> None:
    program = [sys.executable, "-c", DIES_AS_IT_STARTS_ONE, str(host.home), str(host.stub), when]
    died = subprocess.run(program, cwd=site.BASE_DIR, capture_output=True, text=True, timeout=20)
    assert died.returncode == -signal.SIGKILL, died.stderr

    def can_be_started() -> bool:
        try:
            host.backend.start(ON_DEVICE)
        except DevicesHeld:
            return False
        return True

    wait_for(can_be_started, seconds=5)
    for pid in map(int, died.stdout.split()):
        assert not lives(pid)
    wait_for(lambda: host.backend.observe().living[ON_DEVICE.name].ready)


def test_servers_outlive_their_logs(host: Host) -> None:
    register()
    (row,) = host.until_state(ServerState.READY)
    shutil.rmtree(host.home / "logs")

    host.clock.jump(seconds=3)
    host.step()
    assert [each.pid for each in servers()] == [row.pid]
    os.kill(row.pid or 0, signal.SIGKILL)

    (row,) = host.until_state(ServerState.BACKOFF)
    assert "SIGKILL" in row.last_error


def test_a_death_by_a_signal_without_a_name_is_told(host: Host) -> None:
    host.stub.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGRTMIN + 1)\n")
    register()

    (row,) = host.until_state(ServerState.BACKOFF)

    assert row.reason.startswith(f"killed by signal {signal.SIGRTMIN + 1}")


def test_a_full_log_is_emptied_though_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: Path) -> None:
        raise OSError(28, "No space left on device")

    log = tmp_path / "server.log"
    log.write_bytes(bytes(11 << 20))
    monkeypatch.setattr(shutil, "copyfile", full)

    assert server_log.rotate(log)
    assert log.stat().st_size == 0


def test_a_check_that_hangs_ends_though_nobody_asks_for_it_again(host: Host) -> None:
    host.use(sys.executable, "-c", "import time; time.sleep(600)")
    host.backend.check(CHECK)
    (child,) = host.backend._checks.values()

    host.clock.jump(seconds=1_000)
    host.backend.observe()

    wait_for(lambda: not lives(child.process.pid))


def test_a_check_that_cannot_be_killed_does_not_stop_the_agent(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.use(sys.executable, "-c", "import time; time.sleep(600)")
    host.backend.check(CHECK)
    host.clock.jump(seconds=1_000)

    with monkeypatch.context() as hangs:
        hangs.setattr(server_process, "kill", lambda process: None)
        assert host.backend.check(CHECK) is None
        assert host.backend.check(replace(CHECK, checkpoint="tiny:10")) is None

    verdict = until_checked(host.backend, CHECK)
    assert not verdict.passed
    assert "SIGKILL" in verdict.text


def test_a_verdict_that_nobody_asked_for_is_forgotten(host: Host) -> None:
    command = host.backend._command
    host.backend._command = (sys.executable, "-c", "raise SystemExit('no such weights')")
    host.backend.check(CHECK)
    (child,) = host.backend._checks.values()
    child.process.wait(20)
    # The files are mended meanwhile.
    host.backend._command = command
    host.backend.observe()
    host.backend.observe()

    assert until_checked(host.backend, CHECK).passed


def test_a_pool_is_judged_under_its_lock() -> None:
    pool, _ = services.register_pool(AcceleratorPool(id="box", devices=2))

    with CaptureQueriesContext(connection) as asked:
        services.save_pool(pool)

    statements = [query["sql"] for query in asked]
    locked = next(n for n, sql in enumerate(statements) if "FOR UPDATE" in sql)
    judged = next(n for n, sql in enumerate(statements) if "models_admin_modelconfig" in sql)
    assert locked < judged


@pytest.mark.parametrize("state", [ServerState.BACKOFF, ServerState.FAILED])
def test_a_clock_that_is_set_back_prolongs_no_pause(memory: Machine, state: ServerState) -> None:
    register()
    memory.passes(8)
    memory.backend.kill(ReplicaName("mini", 0))
    later = memory.clock.now() + timedelta(hours=3)
    ModelServer.objects.update(state=state, ready_at=None, next_start_at=later)

    memory.passes(5)

    assert ModelServer.objects.get(state=ServerState.READY)


def test_a_clock_that_is_set_back_prolongs_no_drain(memory: Machine) -> None:
    register()
    memory.passes(8)
    services.stop_model("mini", now=memory.clock.now())
    later = memory.clock.now() + timedelta(hours=3)
    ModelServer.objects.update(state=ServerState.DRAINING, draining_at=later)

    memory.passes(3)

    assert memory.backend.observe().living == {}
