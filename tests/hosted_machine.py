"""A machine with a host agent, stepped by the test: its servers are real processes of a stub.

The stub behaves by its checkpoint (`tiny:<mode>`), so that nothing but the product's own command
line reaches it. Time is the test's: `Clock` moves the database's and the backend's clock together.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from django.conf import settings as site

from models_admin import services
from models_admin.agent import HostAgent
from models_admin.local_hosting import LocalBackend
from models_admin.models import ModelConfig, ModelServer
from models_admin.policy.replicas import ServerState

NORMAL, DIES_AT_ONCE, NEVER_READY, DEAF, BUSY, REFUSES = range(6)
OTHER = 10
"""Added to a mode: another version that behaves alike."""

STUB = """
import argparse, json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for name in ("model-name", "checkpoint", "checkpoint-root", "cache-dir", "port", "max-queue",
             "drain-seconds", "loader"):
    parser.add_argument("--" + name)
for name in ("exit-with-parent", "check"):
    parser.add_argument("--" + name, action="store_true")
options = parser.parse_args()
kind, _, seed = options.checkpoint.partition(":")
seed = int(seed) if kind == "tiny" else 0
mode = seed % 10
if mode == 5:
    error = "encoder.layer.0: (384, 384), not (128, 128)"
    print(json.dumps({"event": "model not loaded", "code": "wrong_shapes", "error": error,
                      "exception": "Traceback" + 20_000 * "."}), flush=True)
    sys.exit(1)
if options.check:
    print(json.dumps({"event": "checked", "version": f"stub-{seed}"}), flush=True)
    sys.exit(0)
state = {
    "ready": mode != 2,
    "model_version": f"stub-{seed}",
    "busy_seconds": 1.5,
    "rows_total": 7,
    "real_tokens_total": 99,
    "queue_rows": 5 if mode == 4 else 0,
}
print("a line of noise, with the secret:", os.environ.get("DATABASE_URL"), flush=True)
if mode == 1:
    print("no such weights", flush=True)
    sys.exit(3)
for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS"):
    print(name, "is", os.environ.get(name), flush=True)

def drain(*_):
    state.update(ready=False, phase="draining")
    threading.Thread(target=end_when_idle).start()

def end_when_idle():
    while state["queue_rows"]:
        time.sleep(0.02)
    os._exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == 3 else drain)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path == f"/v2/models/{options.model_name}/stats"
        self.answer(200 if found else 404, state)

    def do_POST(self):
        if self.path.endswith("/infer"):
            if not state["ready"]:
                return self.answer(503, {})
            time.sleep(0.03)
            return self.answer(200, {"model_version": state["model_version"]})
        state["queue_rows"] = 0
        self.answer(200, {})

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(options.port)), Handler)
url = f"http://127.0.0.1:{server.server_port}"
print(json.dumps({"event": "listening", "url": url}), flush=True)
server.serve_forever()
"""


@dataclass
class Clock:
    """Real time, and the jumps of the test."""

    jumped: timedelta = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.jumped

    def monotonic(self) -> float:
        return time.monotonic() + self.jumped.total_seconds()

    def jump(self, **span: float) -> None:
        self.jumped += timedelta(**span)


@dataclass
class Host:
    """A machine with its agent, stepped by the test."""

    home: Path
    stub: Path
    clock: Clock = field(default_factory=Clock)
    root: Path = field(init=False)
    backend: LocalBackend = field(init=False)
    agent: HostAgent = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.home / "checkpoints"
        self.use(sys.executable, str(self.stub))

    def use(self, *command: str) -> None:
        """Begin anew with another server behind the agent."""
        self.backend = LocalBackend(
            logs=self.home / "logs",
            cache=self.home / "cache",
            locks=self.home / "devices",
            checkpoint_root=self.root,
            cwd=site.BASE_DIR,
            environ=os.environ,
            command=command,
            term_grace_s=5.0,
            monotonic=self.clock.monotonic,
        )
        self.new_agent()

    def new_agent(self) -> None:
        self.agent = HostAgent(
            name="local", boot_id=uuid4(), backend=self.backend, checkpoint_root=self.root
        )

    def step(self) -> None:
        self.agent.run_once(self.clock.now())

    def until(self, reached: Callable[[], bool]) -> None:
        """Run passes until a state is reached that depends on a process."""
        deadline = time.monotonic() + 20
        while not reached():
            assert time.monotonic() < deadline, [vars(row) for row in ModelServer.objects.all()]
            time.sleep(0.02)
            self.step()

    def until_state(self, *states: ServerState) -> list[ModelServer]:
        """Run passes until the replicas stand so, in order of ordinals."""
        self.until(lambda: [row.state for row in servers()] == list(states))
        return servers()


def servers() -> list[ModelServer]:
    return list(ModelServer.objects.order_by("model_id", "ordinal"))


def serving() -> list[ModelServer]:
    return [row for row in servers() if row.state == ServerState.READY]


def register(mode: int = NORMAL, *, name: str = "mini", **fields: Any) -> ModelConfig:
    services.register_model(
        name,
        now=datetime.now(UTC),
        kind="hosted",
        checkpoint=f"tiny:{mode}",
        **{"replicas_max": 4, **fields},
    )
    return services.start_model(name, now=datetime.now(UTC))


def lives(pid: int | None) -> bool:
    """Say whether a process runs; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(reached: Callable[[], bool], *, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.05)


@contextmanager
def machine(home: Path) -> Iterator[Host]:
    """A machine of its own, without a process when it is left."""
    stub = home / "stub.py"
    stub.write_text(STUB)
    host = Host(home=home, stub=stub)
    yield host
    host.backend.stop_all()
