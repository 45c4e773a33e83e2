"""The real model server under the host agent where something is wrong: what state, what message."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings
from safetensors.numpy import load_file, save_file

from models_admin import checkpoints, services
from models_admin.hosting import Launch, ReplicaName, Verdict
from models_admin.models import AcceleratorPool, ModelServer, ModelVersion
from models_admin.policy.replicas import ServerState
from models_admin.policy.rollout import VersionState
from tests.hosted_machine import Host, machine, servers
from tests.hosting_contract import until_checked
from workers.model_server import loader as server_loader

pytestmark = [pytest.mark.acceptance, pytest.mark.django_db]

REAL = (sys.executable, "-m", "workers.model_server")

ON_PORT = """
import os, sys
arguments = sys.argv[2:]
arguments[arguments.index("--port") + 1] = sys.argv[1]
os.execv(sys.executable, [sys.executable, "-m", "workers.model_server", *arguments])
"""
CHECKS_ONLY = """
import os, sys
server = ["-m", "workers.model_server"] if "--check" in sys.argv else [sys.argv[1]]
os.execv(sys.executable, [sys.executable, *server, *sys.argv[2:]])
"""


@pytest.fixture
def host(tmp_path: Path, settings: Settings) -> Iterator[Host]:
    """A machine whose servers are real ones; a checkpoint `good` lies under its root."""
    with machine(tmp_path) as host:
        settings.AIRS_CHECKPOINT_ROOT = host.root
        folder = host.root / "good"
        folder.mkdir(parents=True)
        for name, content in server_loader.find(checkpoints.DEFAULT_LOADER).random(5).items():
            (folder / name).write_bytes(content)
        host.use(*REAL)
        yield host


def start(name: str = "real", **fields: Any) -> None:
    services.register_model(name, now=datetime.now(UTC), kind="hosted", checkpoint="good", **fields)
    services.start_model(name, now=datetime.now(UTC))


def cut_off(weights: Path) -> None:
    """As a full disk leaves what is copied to it."""
    weights.write_bytes(weights.read_bytes()[:5_000])


def other_shapes(weights: Path) -> None:
    tensors = load_file(weights)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    save_file({**tensors, name: tensors[name][:, :-1].copy()}, weights)


@pytest.mark.parametrize(
    ("damage", "code"), [(cut_off, "checkpoint_unreadable"), (other_shapes, "wrong_shapes")]
)
def test_a_checkpoint_that_is_no_good_any_more_fails_for_good_and_says_why(
    host: Host, damage: Any, code: str
) -> None:
    start()
    damage(host.root / "good" / "model.safetensors")

    (row,) = host.until_state(ServerState.FAILED)
    host.step()

    assert row.last_error.startswith(f"{code}: ")
    assert "{" not in row.last_error, "a sentence, no log line"
    assert row.next_start_at is not None
    assert (row.next_start_at - host.clock.now()).total_seconds() > 500
    (version,) = ModelVersion.objects.all()
    assert (version.state, version.reason) == (VersionState.FAILED, row.last_error)


def test_a_port_that_is_taken_is_said_and_tried_again(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host.use(*script(host, ON_PORT), str(taken.getsockname()[1]))
        start()
        (row,) = host.until_state(ServerState.BACKOFF)
    host.use(sys.executable, str(host.stub))
    host.clock.jump(seconds=2)

    assert "address already in use" in row.last_error
    (row,) = host.until_state(ServerState.READY)
    assert row.last_error, "what was wrong stays to be read"


def test_a_disk_that_is_full_fails_the_launch_until_there_is_room(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    host.use(sys.executable, str(host.stub))
    start()
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", no_space)
        host.step()
        (row,) = servers()
        assert (row.state, row.pid) == (ServerState.FAILED, None)
        assert "No space left on device" in row.last_error
    host.clock.jump(seconds=2)

    host.until_state(ServerState.READY)


def test_a_full_disk_for_compiled_shapes_costs_only_their_reuse(host: Host) -> None:
    cache = host.home / "cache"
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cache)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        with pytest.raises(OSError, match="No space left"):
            (cache / "ballast").write_bytes(bytes(1 << 20))
        verdict = until_checked(
            host.backend,
            Launch(name=ReplicaName("real", 0), model_name="real", checkpoint="good"),
        )
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=True)

    assert verdict == Verdict(passed=True, text="")


def test_a_candidate_that_no_server_can_load_is_found_out_by_its_check(host: Host) -> None:
    services.register_pool(AcceleratorPool(id="one", devices=1))
    host.use(*script(host, CHECKS_ONLY), str(host.stub))
    start(pool="one")
    (before,) = host.until_state(ServerState.READY)
    host.step()
    bad = host.root / "bad"
    shutil.copytree(host.root / "good", bad)
    services.update_model("real", now=host.clock.now(), checkpoint="bad", serving={"max_queue": 9})
    other_shapes(bad / "model.safetensors")

    host.until(lambda: ModelVersion.objects.filter(state=VersionState.FAILED).exists())

    (failed,) = ModelVersion.objects.filter(state=VersionState.FAILED)
    assert (failed.checkpoint, failed.reason.split(":")[0]) == ("bad", "wrong_shapes")
    assert [row.pid for row in ModelServer.objects.filter(state="READY")] == [before.pid]


def script(host: Host, text: str) -> tuple[str, str]:
    path = host.home / "server.py"
    path.write_text(text)
    return sys.executable, str(path)
