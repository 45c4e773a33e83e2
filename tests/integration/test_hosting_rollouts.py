"""Versions of hosted models with real processes: replaced under load, failing, coming back."""

import json
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest
from pytest_django import Settings

from models_admin import checkpoints, services, versions
from models_admin.directory import Replica, directory
from models_admin.errors import Conflict, NotFound
from models_admin.models import AcceleratorPool, ModelConfig, ModelVersion
from models_admin.policy.replicas import ServerState
from models_admin.policy.rollout import VersionState
from models_admin.services import devices_used
from tests.hosted_machine import (
    BUSY,
    DIES_AT_ONCE,
    NEVER_READY,
    NORMAL,
    OTHER,
    REFUSES,
    STUB,
    Host,
    lives,
    machine,
    register,
    servers,
    serving,
    wait_for,
)
from workers.model_client.outcomes import classify
from workers.model_server.server import DRAINING
from workers.work import FREE

pytestmark = pytest.mark.django_db

OPEN: dict[tuple[str, str], int] = {}
"""What AIRS_BACKLOG answers here."""


def backlog(now: datetime) -> Mapping[tuple[str, str], int]:
    return dict(OPEN)


@pytest.fixture
def host(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    settings.AIRS_BACKLOG = f"{__name__}.backlog"
    # As the stub will call it.
    monkeypatch.setattr(
        checkpoints, "version", lambda found, **_: found.argument.replace("tiny:", "stub-")
    )
    with machine(tmp_path) as host:
        yield host
    OPEN.clear()


@pytest.fixture
def box() -> AcceleratorPool:
    pool, _ = services.register_pool(AcceleratorPool(id="box", devices=2))
    return pool


def patch(host: Host, checkpoint: int, name: str = "mini") -> None:
    services.update_model(name, now=host.clock.now(), checkpoint=f"tiny:{checkpoint}")


def version(seed: int) -> ModelVersion:
    return ModelVersion.objects.get(version=f"stub-{seed}")


def served() -> list[str]:
    return sorted(row.version for row in serving())


def steps(host: Host, *, seconds: float) -> None:
    """Let so much time pass, a second a pass, with never more processes than the pool has room."""
    for _ in range(round(seconds)):
        host.clock.jump(seconds=1)
        host.step()


class TestReplacing:
    """A changed checkpoint."""

    def test_the_new_one_serves_before_the_old_one_drains(
        self, host: Host, box: AcceleratorPool
    ) -> None:
        register(pool="box")
        (before,) = host.until_state(ServerState.READY)
        least = 1

        patch(host, OTHER)
        host.step()
        assert devices_used("box") == 2, "both count"
        while served() != ["stub-10"]:
            host.clock.jump(seconds=1)
            host.step()
            least = min(least, len(directory.replicas(host.clock.now())))
            assert sum(lives(row.pid) for row in servers()) <= 2
        host.until(lambda: not lives(before.pid))

        assert least == 1
        assert (version(NORMAL).state, version(OTHER).state) == ("retired", "serving")
        assert ModelConfig.objects.get().version == "stub-10"
        assert devices_used("box") == 1

    def test_a_crash_brings_back_the_old_version_while_it_is_kept(
        self, host: Host, box: AcceleratorPool
    ) -> None:
        register(pool="box")
        host.until_state(ServerState.READY)
        OPEN["mini", "stub-0"] = 3
        patch(host, OTHER)
        host.until(lambda: served() == ["stub-0", "stub-10"])
        kept = next(row for row in serving() if row.version == "stub-0")
        steps(host, seconds=15)
        assert served() == ["stub-0", "stub-10"]
        assert "3 requests are open" in version(NORMAL).reason

        os.kill(kept.pid or 0, signal.SIGKILL)
        host.until(lambda: served() == ["stub-10"])
        host.clock.jump(seconds=2)
        host.until(lambda: served() == ["stub-0", "stub-10"])

        OPEN.clear()
        steps(host, seconds=10)
        host.until(lambda: version(NORMAL).state == VersionState.RETIRED)
        assert served() == ["stub-10"]

    def test_a_version_that_work_was_pinned_to_late_comes_back_for_it(self, host: Host) -> None:
        register()
        host.until_state(ServerState.READY)
        patch(host, OTHER)
        host.until(lambda: served() == ["stub-10"] and version(NORMAL).state == "retired")

        OPEN["mini", "stub-0"] = 1
        host.clock.jump(seconds=6)
        host.until(lambda: served() == ["stub-0", "stub-10"])

    def test_an_operator_may_retire_an_old_version_with_its_backlog(self, host: Host) -> None:
        register()
        host.until_state(ServerState.READY)
        OPEN["mini", "stub-0"] = 3
        patch(host, OTHER)
        host.until(lambda: version(OTHER).state == VersionState.SERVING)

        with pytest.raises(Conflict) as refused:
            versions.retire_version("mini", "stub-10", now=host.clock.now())
        with pytest.raises(NotFound):
            versions.retire_version("mini", "stub-9", now=host.clock.now())
        versions.retire_version("mini", "stub-0", now=host.clock.now())
        versions.retire_version("mini", "stub-0", now=host.clock.now())
        steps(host, seconds=10)

        assert refused.value.code == "version_serving"
        host.until(lambda: version(NORMAL).state == VersionState.RETIRED)
        assert served() == ["stub-10"]
        assert "operator" in version(NORMAL).reason

    def test_other_options_of_the_same_version_replace_it_without_waiting_for_its_backlog(
        self, host: Host
    ) -> None:
        register()
        host.until_state(ServerState.READY)
        OPEN["mini", "stub-0"] = 3

        services.update_model("mini", now=host.clock.now(), serving={"max_queue": 77})
        with_options = ModelVersion.objects.get(serving={"max_queue": 77})
        host.until(lambda: [row.launched_id for row in serving()] == [with_options.pk])

        (row,) = serving()
        assert row.version == "stub-0"
        assert "--max-queue\x0077" in Path(f"/proc/{row.pid}/cmdline").read_text()

    def test_an_agent_that_dies_in_the_middle_is_followed_by_one_that_goes_on(
        self, host: Host, box: AcceleratorPool
    ) -> None:
        register(pool="box")
        host.until_state(ServerState.READY)
        OPEN["mini", "stub-0"] = 3
        patch(host, OTHER)
        host.until(lambda: served() == ["stub-0", "stub-10"])
        host.backend.stop_all()

        host.new_agent()
        host.until(lambda: served() == ["stub-0", "stub-10"])
        OPEN.clear()
        steps(host, seconds=10)
        host.until(lambda: version(NORMAL).state == VersionState.RETIRED)

        assert served() == ["stub-10"]

    def test_a_patch_back_needs_nothing_new(self, host: Host, box: AcceleratorPool) -> None:
        register(pool="box")
        (before,) = host.until_state(ServerState.READY)
        patch(host, NEVER_READY + OTHER)
        host.until(lambda: "WARMING" in {row.state for row in servers()})

        patch(host, NORMAL)
        steps(host, seconds=5)

        assert [row.pid for row in serving()] == [before.pid]
        assert version(NORMAL).state == VersionState.SERVING
        assert version(NEVER_READY + OTHER).state == VersionState.RETIRED


class TestFailing:
    """What cannot be loaded."""

    @pytest.mark.parametrize("devices", [1, 2], ids=["no device is free", "a device is free"])
    def test_the_old_one_goes_on_and_the_version_says_why(self, host: Host, devices: int) -> None:
        services.register_pool(AcceleratorPool(id="box", devices=devices))
        register(pool="box")
        (before,) = host.until_state(ServerState.READY)

        patch(host, REFUSES)
        host.until(lambda: version(REFUSES).state == VersionState.FAILED)
        steps(host, seconds=5)

        assert version(REFUSES).reason.startswith("wrong_shapes: encoder.layer.0: (384, 384)")
        assert [row.pid for row in serving()] == [before.pid]
        assert ModelConfig.objects.get().version == "stub-0"
        assert version(NORMAL).state == VersionState.SERVING
        assert devices_used("box") == 1

        services.restart_model("mini", now=host.clock.now())
        host.step()
        assert version(REFUSES).state == VersionState.CANDIDATE, "another chance"

    def test_alone_it_is_no_crash_loop(self, host: Host) -> None:
        register(REFUSES)

        (row,) = host.until_state(ServerState.FAILED)
        steps(host, seconds=60)

        (later,) = servers()
        assert (later.state, later.starts) == (ServerState.FAILED, 1)
        assert row.last_error.startswith("wrong_shapes: ")
        assert later.reason == row.reason, "why is still said"
        assert version(REFUSES).state == VersionState.FAILED
        assert '"code": "wrong_shapes"' not in later.reason

    def test_one_that_dies_again_and_again_is_given_up_beside_the_old_one(self, host: Host) -> None:
        register()
        (before,) = host.until_state(ServerState.READY)

        patch(host, DIES_AT_ONCE)
        deadline = time.monotonic() + 20
        while version(DIES_AT_ONCE).state != VersionState.FAILED:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            host.clock.jump(seconds=5)
            host.step()

        assert "no such weights" in version(DIES_AT_ONCE).reason
        assert [row.pid for row in serving()] == [before.pid]

    def test_files_that_changed_under_a_version_are_another_one(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        register()
        (row,) = host.until_state(ServerState.READY)
        host.step()
        # The same checkpoint holds other weights now.
        host.stub.write_text(host.stub.read_text().replace('f"stub-{seed}"', '"overwritten"'))

        os.kill(row.pid or 0, signal.SIGKILL)
        host.until_state(ServerState.BACKOFF)
        host.clock.jump(seconds=2)
        host.until(lambda: ModelConfig.objects.get().version == "overwritten")

        was = ModelVersion.objects.get(version="stub-0")
        assert (was.state, "overwritten" in was.reason) == (VersionState.FAILED, True)
        assert ModelVersion.objects.get(version="overwritten").state == VersionState.SERVING


class TestInPlace:
    """Without a free device."""

    def test_it_is_checked_and_takes_over_one_replica_at_a_time(
        self, host: Host, box: AcceleratorPool
    ) -> None:
        register(pool="box", replicas_default=2)
        host.until_state(ServerState.READY, ServerState.READY)

        patch(host, OTHER)
        deadline = time.monotonic() + 20
        while served() != ["stub-10", "stub-10"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            host.clock.jump(seconds=0.5)
            host.step()
            assert serving()
            assert sum(lives(row.pid) for row in servers()) <= 2
            assert devices_used("box") == 2
        indices = [index for row in serving() for index in row.devices]
        assert sorted(indices) == [0, 1]
        log = (host.home / "logs" / "check-mini.log").read_text()
        assert '"event": "checked"' in log

    def test_the_only_replica_ends_the_old_work_first_and_new_work_goes_to_the_new_version(
        self, host: Host
    ) -> None:
        services.register_pool(AcceleratorPool(id="one", devices=1))
        register(pool="one")
        host.until_state(ServerState.READY)
        OPEN["mini", "stub-0"] = 3

        patch(host, OTHER)
        host.until(lambda: version(OTHER).state == VersionState.SERVING)
        steps(host, seconds=10)
        assert served() == ["stub-0"]
        assert ModelConfig.objects.get().version == version(OTHER).version
        assert "backlog of stub-0 is empty" in version(OTHER).reason or "waits for a device" in (
            version(OTHER).reason
        )

        OPEN.clear()
        steps(host, seconds=10)
        host.until(lambda: served() == ["stub-10"])


@dataclass
class Clients:
    """Calls replicas of the version it is pinned to, without a pause, as executors do."""

    replicas: list[Replica] = field(default_factory=list)
    pinned: str = "stub-0"
    answered: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        turn = number
        while not self.ended.is_set():
            pinned = self.pinned
            fitting = [each for each in self.replicas if each.version == pinned]
            if not fitting:
                time.sleep(0.005)
                continue
            turn += 1
            self._call(fitting[turn % len(fitting)], pinned)

    def _call(self, replica: Replica, pinned: str) -> None:
        url = f"{replica.address}/v2/models/mini/infer"
        try:
            with urllib.request.urlopen(url, data=b"{}", timeout=5) as answer:
                said = json.load(answer)["model_version"]
        except OSError as error:
            self.failed.append(f"{replica.key}: {error}")
            return
        if said != pinned:
            self.failed.append(f"{replica.key} answered as {said}, not {pinned}")
        self.answered[said] += 1


def test_a_version_is_replaced_and_a_model_resized_under_load_without_a_failed_call(
    host: Host, box: AcceleratorPool
) -> None:
    register(pool="box")
    host.until_state(ServerState.READY)
    OPEN["mini", "stub-0"] = 1
    clients = Clients()
    threads = [threading.Thread(target=clients.run, args=[number]) for number in range(4)]

    def passes(seconds: float) -> None:
        """Ten times as fast as life; a call takes 0.3 s of it."""
        for _ in range(round(seconds / 0.5)):
            host.clock.jump(seconds=0.45)
            host.step()
            clients.replicas = list(directory.replicas(host.clock.now()))
            time.sleep(0.03)

    try:
        passes(1)
        for thread in threads:
            thread.start()
        services.resize_model("mini", 2, now=host.clock.now())
        passes(10)
        services.resize_model("mini", 1, now=host.clock.now())
        passes(10)
        patch(host, OTHER)
        passes(5)
        # New workflows are pinned to the new version; then the last one of the old is done.
        clients.pinned = ModelConfig.objects.get().version
        OPEN.clear()
        passes(15)
    finally:
        clients.ended.set()
        for thread in threads:
            thread.join()

    assert clients.failed == []
    assert min(clients.answered["stub-0"], clients.answered["stub-10"]) > 20
    assert version(NORMAL).state == VersionState.RETIRED
    assert served() == ["stub-10"]


class TestEnding:
    """SIGTERM from outside, and a drain that lasts."""

    def test_a_notice_from_outside_drains_and_costs_no_failure(self, host: Host) -> None:
        register(BUSY)
        (row,) = host.until_state(ServerState.READY)

        os.kill(row.pid or 0, signal.SIGTERM)
        host.clock.jump(seconds=3)
        (draining,) = host.until_state(ServerState.DRAINING)
        assert "from outside" in draining.reason
        assert directory.replicas(host.clock.now()) == []
        assert directory.endpoint(row.key) is not None, "what it has is answered"

        urllib.request.urlopen(urllib.request.Request(row.address, method="POST"), timeout=5)
        host.until(lambda: len(serving()) == 1 and not lives(row.pid))
        steps(host, seconds=3)
        assert sum(each.starts for each in servers()) == 2
        assert {(each.failures, each.last_error) for each in servers()} == {(0, "")}

    def test_what_a_draining_server_refuses_costs_no_attempt(self) -> None:
        code, text, _ = DRAINING
        verdict = classify(503, json.dumps({"error": text, "code": code}), rows=12)

        assert verdict.outcome in FREE

    def test_a_drain_lasts_as_long_as_a_call_may(self, host: Host) -> None:
        register(BUSY, timeout_s=90)
        (row,) = host.until_state(ServerState.READY)

        services.stop_model("mini", now=host.clock.now())
        steps(host, seconds=85)
        assert lives(row.pid)
        host.clock.jump(seconds=6)
        host.step()
        host.clock.jump(seconds=6)

        host.until_state(ServerState.STOPPED)

    def test_a_device_is_kept_until_an_earlier_servers_process_is_gone(self, host: Host) -> None:
        """Also across agents: what drains on after `kill -9` of its agent holds a lock."""
        services.register_pool(AcceleratorPool(id="one", devices=1))
        register(BUSY, pool="one")
        (row,) = host.until_state(ServerState.READY)
        second = Host(home=host.home, stub=host.stub, clock=host.clock)

        second.step()
        assert servers()[0].state == ServerState.STOPPED
        assert "an earlier server has not ended" in servers()[0].reason
        os.kill(row.pid or 0, signal.SIGKILL)
        wait_for(lambda: not lives(row.pid))
        (after,) = second.until_state(ServerState.READY)
        os.kill(after.pid or 0, signal.SIGKILL)
        second.backend.stop_all()


def test_what_a_server_wrote_last_is_in_its_row_without_secrets(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://top-secret")
    seen = Host(home=host.home, stub=host.stub, clock=host.clock)
    seen.stub.write_text("print('leaks top-secret and postgresql://top-secret')\n" + STUB)
    register()
    (row,) = seen.until_state(ServerState.READY)
    seen.clock.jump(seconds=6)
    seen.step()
    seen.backend.stop_all()

    (row,) = servers()
    assert '"event": "listening"' in row.log_tail
    assert "leaks top-secret and ***" in row.log_tail
    assert "JAX_PLATFORMS is cpu" in row.log_tail
    assert len(row.log_tail) <= 4_000
    assert row.host
