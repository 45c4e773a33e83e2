"""The host agent with real processes: most tests run a stub, the last ones the real server."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings as site
from django.db import connection
from pytest_django import Settings

from models_admin import rebalancer, services
from models_admin.clock import database_now
from models_admin.directory import HEARTBEAT_LIMIT, directory
from models_admin.hosting import Launch, LaunchFailed, ReplicaName
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelServer,
    ModelVersion,
    Rebalancing,
    UtilizationSample,
)
from models_admin.policy.replicas import ServerState
from tests import demand_source
from tests.demand_source import SOURCE, Due, Work
from tests.hosted_machine import (
    BUSY,
    DEAF,
    DIES_AT_ONCE,
    NEVER_READY,
    Host,
    lives,
    machine,
    register,
    servers,
    serving,
    wait_for,
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with machine(tmp_path) as host:
        yield host


@pytest.mark.django_db
class TestAgent:
    def test_a_started_model_gets_a_server_that_is_sent_to(self, host: Host) -> None:
        model = register(window=9)

        (row,) = host.until_state(ServerState.READY)

        assert lives(row.pid)
        assert (row.version, row.starts, row.failures) == ("stub-0", 1, 0)
        assert (row.busy_seconds, row.rows_total, row.tokens_total) == (1.5, 7, 99)
        (replica,) = directory.replicas(host.clock.now())
        assert (replica.address, replica.window, replica.version) == (row.address, 9, "stub-0")
        model.refresh_from_db()
        assert model.version == "stub-0", "what a replica reports counts"
        assert ModelVersion.objects.filter(version="stub-0").exists()

    def test_how_busy_replicas_are_is_sampled(self, host: Host) -> None:
        register(replicas_default=2)
        host.until_state(ServerState.READY, ServerState.READY)

        host.clock.jump(seconds=30)
        host.step()

        sample = UtilizationSample.objects.get()
        assert (sample.model_id, sample.pool_id, sample.agent) == ("mini", "", "local")
        # Each says that it was busy for 1.5 s.
        assert (sample.replicas, sample.busy_s) == (2, 3.0)
        assert 60 <= sample.replica_s < 100

    def test_a_killed_server_comes_back_after_a_pause_as_another_run(self, host: Host) -> None:
        register()
        (first,) = host.until_state(ServerState.READY)
        assert first.pid is not None

        os.kill(first.pid, signal.SIGKILL)
        (dead,) = host.until_state(ServerState.BACKOFF)
        host.clock.jump(seconds=1)
        (second,) = host.until_state(ServerState.READY)

        assert "killed by SIGKILL" in dead.last_error
        assert (dead.failures, dead.pid, dead.address) == (1, None, "")
        assert second.pid != first.pid
        assert directory.endpoint(first.key) is None
        assert directory.endpoint(second.key) is not None

    def test_a_server_that_dies_at_once_is_started_less_and_less_often(self, host: Host) -> None:
        register(DIES_AT_ONCE)
        pauses = []
        for _ in range(4):
            (row,) = host.until_state(ServerState.BACKOFF)
            assert row.next_start_at is not None
            pauses.append(round((row.next_start_at - host.clock.now()).total_seconds()))
            host.clock.jump(seconds=pauses[-1])
            host.step()
            host.until(lambda starts=row.starts: servers()[0].starts > starts)  # type: ignore[misc]

        assert pauses == [1, 2, 4, 8]
        assert "exit code 3: no such weights" in servers()[0].last_error

    def test_a_restart_ends_the_pause(self, host: Host) -> None:
        register(DIES_AT_ONCE)
        host.until_state(ServerState.BACKOFF)

        services.update_model("mini", now=host.clock.now(), checkpoint="tiny:0")
        services.restart_model("mini", now=host.clock.now())

        (row,) = host.until_state(ServerState.READY)
        assert row.failures == 0

    def test_a_server_that_is_not_ready_is_not_sent_to(self, host: Host) -> None:
        register(NEVER_READY)

        host.until_state(ServerState.WARMING)

        assert directory.replicas(host.clock.now()) == []

    def test_a_stopped_model_drains_before_its_server_ends(self, host: Host) -> None:
        register(BUSY)
        (row,) = host.until_state(ServerState.READY)

        services.stop_model("mini", now=host.clock.now())
        host.step()
        host.clock.jump(seconds=5)
        host.step()
        host.clock.jump(seconds=5)
        host.step()

        assert (servers()[0].state, lives(row.pid)) == (ServerState.DRAINING, True)
        assert directory.replicas(host.clock.now()) == []
        assert directory.endpoint(row.key) is not None, "what was claimed still arrives"

        urllib.request.urlopen(urllib.request.Request(row.address, method="POST"), timeout=5)
        for _ in range(2):
            host.clock.jump(seconds=3)
            host.step()
        (after,) = host.until_state(ServerState.STOPPED)

        assert not lives(row.pid)
        assert (after.pid, after.address) == (None, "")
        assert directory.endpoint(row.key) is None

    def test_a_server_that_does_not_end_is_killed(self, host: Host) -> None:
        register(DEAF)
        (row,) = host.until_state(ServerState.READY)

        services.stop_model("mini", now=host.clock.now())
        host.step()
        host.clock.jump(seconds=31)
        host.step()
        host.clock.jump(seconds=6)

        host.until_state(ServerState.STOPPED)
        assert not lives(row.pid)

    def test_a_frozen_server_leaves_the_directory_and_is_replaced(self, host: Host) -> None:
        register()
        (row,) = host.until_state(ServerState.READY)
        assert row.pid is not None

        os.kill(row.pid, signal.SIGSTOP)
        host.clock.jump(seconds=10.5)
        host.step()
        assert directory.replicas(host.clock.now()) == []
        assert servers()[0].state == ServerState.READY, "a slow answer costs no restart"

        host.clock.jump(seconds=10)
        host.step()
        assert servers()[0].state == ServerState.BACKOFF
        host.clock.jump(seconds=6)
        (second,) = host.until_state(ServerState.READY)
        assert second.pid != row.pid
        assert not lives(row.pid)

    def test_resizing_keeps_the_first_replicas(self, host: Host) -> None:
        register(replicas_default=2)
        before = host.until_state(ServerState.READY, ServerState.READY)

        services.resize_model("mini", 1, now=host.clock.now())
        host.step()
        host.clock.jump(seconds=31)

        kept, gone = host.until_state(ServerState.READY, ServerState.STOPPED)
        assert kept.pid == before[0].pid
        assert gone.pid is None

    def test_a_restart_starts_the_next_one_before_it_ends_another(self, host: Host) -> None:
        register(replicas_default=2)
        before = host.until_state(ServerState.READY, ServerState.READY)
        least = 2

        services.restart_model("mini", now=host.clock.now())
        deadline = time.monotonic() + 20
        while {row.pid for row in servers()} & {row.pid for row in before}:
            assert time.monotonic() < deadline
            host.step()
            host.clock.jump(seconds=1)
            least = min(least, len(directory.replicas(host.clock.now())))

        assert least == 2
        host.until(lambda: len(serving()) == 2)
        assert {row.generation for row in serving()} == {1}

    def test_a_checkpoint_that_became_a_link_out_is_not_launched(self, host: Host) -> None:
        register()
        outside = host.home / "outside"
        outside.mkdir()
        host.root.mkdir()
        (host.root / "later").symlink_to(outside)
        ModelConfig.objects.update(checkpoint="later")

        (row,) = host.until_state(ServerState.FAILED)

        assert row.pid is None
        assert "checkpoint" in row.last_error
        assert row.next_start_at is not None

    def test_a_removed_model_leaves_no_process(self, host: Host) -> None:
        register()
        (row,) = host.until_state(ServerState.READY)

        ModelConfig.objects.all().delete()
        host.step()

        host.until(lambda: not lives(row.pid))
        assert servers() == []

    def test_models_of_another_agents_pool_are_left_alone(self, host: Host) -> None:
        services.register_pool(AcceleratorPool(id="far", agent="other"))
        register(pool="far")

        host.step()

        assert servers() == []

    def test_a_new_agent_replaces_what_its_predecessor_left_in_the_rows(self, host: Host) -> None:
        register()
        (first,) = host.until_state(ServerState.READY)
        host.backend.stop_all()

        host.new_agent()
        host.step()
        (second,) = host.until_state(ServerState.READY)

        assert second.pid != first.pid
        assert (second.starts, second.failures) == (2, 0)

    def test_an_agent_that_stops_takes_its_servers_along_and_says_so(self, host: Host) -> None:
        register()
        (row,) = host.until_state(ServerState.READY)

        host.agent.stop(host.clock.now())

        assert not lives(row.pid)
        assert servers()[0].state == ServerState.STOPPED

    def test_without_a_database_an_agent_that_stops_still_ends_its_servers(
        self, host: Host
    ) -> None:
        register()
        (row,) = host.until_state(ServerState.READY)

        host.agent.stop(None)

        assert not lives(row.pid)

    def test_a_server_gets_options_and_none_of_our_secrets(self, host: Host) -> None:
        register(serving={"max_queue": 77})
        (row,) = host.until_state(ServerState.READY)

        command = Path(f"/proc/{row.pid}/cmdline").read_text().split("\0")
        log = (host.home / "logs" / "model-mini-0.log").read_text()

        assert command[command.index("--max-queue") + 1] == "77"
        assert "with the secret: None" in log
        assert os.getpgid(row.pid or 0) == row.pid, "a group of its own"


def test_a_name_that_lives_is_not_started_twice(host: Host) -> None:
    launch = Launch(name=ReplicaName("m", 0), model_name="m", checkpoint="tiny:0")

    host.backend.start(launch)

    with pytest.raises(LaunchFailed):
        host.backend.start(launch)


def test_a_full_log_is_emptied_and_kept_once(host: Host) -> None:
    name = ReplicaName("m", 0)
    host.backend.start(Launch(name=name, model_name="m", checkpoint="tiny:0"))
    wait_for(lambda: host.backend.observe().living[name].ready)
    log = host.home / "logs" / "model-m-0.log"
    with log.open("ab") as file:
        file.truncate(11 * 1024 * 1024)

    host.backend.observe()

    assert log.stat().st_size == 0
    assert log.with_suffix(".log.1").stat().st_size == 11 * 1024 * 1024


@pytest.mark.django_db
class TestDevices:
    """What lives never holds more devices than its pool has, whatever is wanted."""

    def states(self, host: Host) -> dict[str, list[str]]:
        """Take a step; return the states of replicas by model."""
        host.step()
        assert sum(lives(row.pid) for row in servers()) <= 2
        found: dict[str, list[str]] = {}
        for row in servers():
            found.setdefault(row.model_id, []).append(row.state)
        return found

    def test_a_moved_replica_starts_when_the_one_it_follows_is_gone(
        self, host: Host, settings: Settings
    ) -> None:
        settings.AIRS_DEMAND = demand_source.NAME
        services.register_pool(
            AcceleratorPool(id="box", devices=2, rebalancing=Rebalancing.ON), actor="test"
        )
        register(BUSY, name="donor", pool="box", replicas_default=2, timeout_s=30)
        first, second = host.until_state(ServerState.READY, ServerState.READY)
        register(name="receiver", pool="box")
        now = host.clock.now()
        work = Due(deadline_at=now + timedelta(hours=1), work_s=6_000)
        SOURCE.works = [Work(model_id="receiver", dues=[work]), Work(model_id="donor", other_s=1)]
        try:
            rebalancer.run_once(now)
        finally:
            SOURCE.reset()

        assert self.states(host) == {"donor": ["READY", "DRAINING"], "receiver": ["STOPPED"]}
        assert "waits for 1 of the 2 devices of pool box: others hold 2" in servers()[2].reason
        host.clock.jump(seconds=29)
        assert self.states(host)["receiver"] == ["STOPPED"]
        host.clock.jump(seconds=2)
        wait_for(lambda: self.states(host)["receiver"] == ["READY"])

        assert [lives(row.pid) for row in (first, second)] == [True, False]
        assert [row.state for row in servers()] == ["READY", "STOPPED", "READY"]

    def test_a_pool_that_is_full_is_restarted_all_the_same(self, host: Host) -> None:
        services.register_pool(AcceleratorPool(id="box", devices=2))
        register(pool="box", replicas_default=2)
        before = host.until_state(ServerState.READY, ServerState.READY)

        services.restart_model("mini", now=host.clock.now())
        deadline = time.monotonic() + 20
        while {row.pid for row in servers()} & {row.pid for row in before}:
            assert time.monotonic() < deadline
            self.states(host)
            host.clock.jump(seconds=1)
            assert serving(), "one at a time"

        host.until(lambda: len(serving()) == 2)

    def test_no_more_start_in_one_pass_than_there_are_devices_for(self, host: Host) -> None:
        services.register_pool(AcceleratorPool(id="box", devices=2))
        register(pool="box")
        ModelConfig.objects.update(wanted_replicas=4)

        host.until_state(
            ServerState.READY, ServerState.READY, ServerState.STOPPED, ServerState.STOPPED
        )

    def test_one_that_was_killed_gives_its_device_back(self, host: Host) -> None:
        services.register_pool(AcceleratorPool(id="box", devices=1))
        register(pool="box")
        (row,) = host.until_state(ServerState.READY)
        assert row.pid is not None

        os.kill(row.pid, signal.SIGKILL)
        host.until_state(ServerState.BACKOFF)
        host.clock.jump(seconds=1)

        host.until_state(ServerState.READY)


# The command, as a process of its own

AGENT = """
import sys
import django
from django.core.management import call_command
django.setup()
from models_admin.management.commands.host_models import Command
if len(sys.argv) > 1:
    Command.server_command = (sys.executable, sys.argv[1])
call_command(Command())
"""


def agent_environment() -> Mapping[str, str]:
    test_database = connection.settings_dict
    host = f"host={test_database['HOST']}&port={test_database['PORT']}"
    name, user = test_database["NAME"], test_database["USER"]
    return os.environ | {
        "DATABASE_URL": f"postgresql://{user}@/{name}?{host}",
        "DJANGO_SETTINGS_MODULE": "airs_site.settings",
    }


@pytest.fixture
def start_agent(host: Host) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, *arguments],
            cwd=site.BASE_DIR,
            env=agent_environment(),
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ready_server() -> ModelServer | None:
    return ModelServer.objects.filter(state=ServerState.READY).first()


@pytest.mark.django_db(transaction=True)
def test_a_killed_agent_leaves_nothing_that_serves_and_the_next_one_starts_again(
    host: Host, start_agent: Callable[..., subprocess.Popen[bytes]]
) -> None:
    register()
    first = start_agent(str(host.stub))
    wait_for(lambda: ready_server() is not None)
    standby = start_agent(str(host.stub))
    before = servers()[0]
    assert before.pid is not None
    assert directory.replicas(database_now())

    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for(lambda: not lives(before.pid), seconds=2)
    wait_for(lambda: (row := ready_server()) is not None and row.pid != before.pid)
    after = servers()[0]

    assert (after.starts, after.failures) == (before.starts + 1, 0)
    assert directory.endpoint(before.key) is None
    assert directory.endpoint(after.key) is not None

    standby.send_signal(signal.SIGTERM)
    assert standby.wait(timeout=20) == 0
    assert not lives(after.pid)
    assert servers()[0].state == ServerState.STOPPED
    assert directory.replicas(database_now()) == []


@pytest.mark.django_db(transaction=True)
def test_an_agent_that_loses_its_session_keeps_its_servers(
    host: Host, start_agent: Callable[..., subprocess.Popen[bytes]]
) -> None:
    register()
    agent = start_agent(str(host.stub))
    wait_for(lambda: ready_server() is not None)
    before = servers()[0]

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    lost_at = database_now()
    wait_for(lambda: ModelServer.objects.filter(heartbeat_at__gt=lost_at).exists())

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database"
            " WHERE locktype = 'advisory' AND datname = current_database()"
        )
        assert cursor.fetchone() == (1,), "it leads again, or its next stand-by would, too"
    assert agent.poll() is None
    assert (servers()[0].pid, servers()[0].state) == (before.pid, ServerState.READY)


@pytest.mark.acceptance
@pytest.mark.django_db(transaction=True)
def test_the_real_server_serves_the_version_it_was_registered_with_and_ends_with_its_agent(
    start_agent: Callable[..., subprocess.Popen[bytes]],
) -> None:
    registered = register()
    agent = start_agent()

    wait_for(lambda: ready_server() is not None, seconds=60)
    row = servers()[0]
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    wait_for(lambda: not lives(row.pid))

    assert row.version == registered.version
    assert ModelVersion.objects.count() == 1
    assert directory.replicas(database_now() + HEARTBEAT_LIMIT) == []
