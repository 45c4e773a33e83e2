"""Where replicas of hosted models run: the seam, and processes of this machine behind it.

A backend starts, watches and ends servers; what should live is not its business (see
`policy.reconcile` and `agent`). It forgets everything when its process ends, and its servers end
with it: each is bound to the agent by the kernel (Linux) and by `--exit-with-parent`, so that
after `kill -9` of the agent nothing stale serves.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote

from models_admin import probe

_LOG_LIMIT_BYTES: Final = 10 * 1024 * 1024
_LAST_WORDS_BYTES: Final = 500
_LONGEST_LINE_BYTES: Final = 64 * 1024
_READY_POLL_S: Final = 2.0
_POLL_TIMEOUT_S: Final = 1.5
_DRAIN_S: Final = 10
"""What a server gets for accepted rows after SIGTERM; the policy has drained it before."""
_TERM_GRACE_S: Final = 15.0
"""A server that was told to end and still lives after this is killed."""

_PRIVATE: Final = frozenset(
    {
        "AIRS_ADMIN_PASSWORD",
        "AIRS_API_TOKEN",
        "AIRS_SECRET_KEY",
        "DATABASE_URL",
        "REDIS_URL",
    }
)
"""What a model server has no use for, and so does not get."""

# Runs between fork and the server's own first line. A preexec_fn would do the same, but may
# deadlock in a process with threads. The parent may have died before the signal was asked for.
_BIND_TO_AGENT: Final = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the host agent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ReplicaName(NamedTuple):
    """Names one replica on a backend."""

    model_id: str
    ordinal: int


class LaunchFailed(Exception):
    """A server could not even be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """All that a server is started with."""

    name: ReplicaName
    model_name: str
    checkpoint: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a server says of its work since it started."""

    busy_seconds: float = 0.0
    rows_total: int = 0
    queue_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Living:
    """A server whose process lives."""

    pid: int
    address: str
    """"" until it is known."""
    version: str
    answers: bool
    ready: bool
    silent_s: float
    """Since its last answer, or its start."""
    idle: bool
    stopping: bool
    stats: Stats


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the backend runs, and how those ended that it saw ending since the last look."""

    living: Mapping[ReplicaName, Living]
    ended: Mapping[ReplicaName, str]


class HostingBackend(Protocol):
    """Where servers run. Called by one thread."""

    def start(self, launch: Launch) -> None:
        """Start a server under a name that has none; raises LaunchFailed."""

    def stop(self, name: ReplicaName) -> None:
        """Tell a server to end, and see to it that it does; harmless to repeat."""

    def observe(self) -> Observation:
        """Look at all servers; takes two seconds at most."""

    def stop_all(self) -> None:
        """End all servers and return when none lives."""


@dataclass(kw_only=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    model_name: str
    log: Path
    scanned: int
    """Bytes of the log that were searched for the address."""
    answered_at: float
    polled_at: float = float("-inf")
    address: str = ""
    version: str = ""
    answers: bool = False
    ready: bool = False
    idle: bool = False
    kill_at: float | None = None
    stats: Stats = Stats()


class LocalBackend:
    """Servers as processes of this machine, each in a session of its own, its log under `logs`."""

    def __init__(
        self,
        *,
        logs: Path,
        cache: Path,
        checkpoint_root: Path,
        cwd: Path,
        environ: Mapping[str, str],
        command: Sequence[str],
        term_grace_s: float = _TERM_GRACE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._cache = cache
        self._checkpoint_root = checkpoint_root
        self._cwd = cwd
        self._environ = {name: text for name, text in environ.items() if name not in _PRIVATE}
        self._command = tuple(command)
        self._term_grace_s = term_grace_s
        self._monotonic = monotonic
        self._children: dict[ReplicaName, _Child] = {}

    def start(self, launch: Launch) -> None:
        """Start a server; its address is known when it has bound a port and said so."""
        if launch.name in self._children:
            raise LaunchFailed("a server of this name lives")
        log = self._logs / f"model-{launch.name.model_id}-{launch.name.ordinal}.log"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._cache.mkdir(parents=True, exist_ok=True)
            _rotate(log)
            with log.open("ab") as output:
                scanned = output.tell()
                process = subprocess.Popen(
                    self._argv(launch),
                    cwd=self._cwd,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchFailed(f"{type(error).__name__}: {error.strerror}") from error
        self._children[launch.name] = _Child(
            process=process,
            model_name=launch.model_name,
            log=log,
            scanned=scanned,
            answered_at=self._monotonic(),
        )

    def stop(self, name: ReplicaName) -> None:
        """Send SIGTERM once; `observe` kills what still lives after the grace."""
        child = self._children.get(name)
        if child is not None and child.kill_at is None:
            child.process.terminate()
            child.kill_at = self._monotonic() + self._term_grace_s

    def observe(self) -> Observation:
        """Reap what ended, kill what does not end, and ask the others how they are."""
        ended = dict(self._reap())
        if due := self._due():
            # One that hangs must not make the others look silent.
            with ThreadPoolExecutor(max_workers=len(due), thread_name_prefix="poll") as pollers:
                list(pollers.map(self._poll, due))
        now = self._monotonic()
        return Observation(
            living={name: _living(child, now) for name, child in self._children.items()},
            ended=ended,
        )

    def stop_all(self) -> None:
        """Send SIGTERM to all at once, SIGKILL to what lives after the grace."""
        for name in self._children:
            self.stop(name)
        deadline = self._monotonic() + self._term_grace_s
        for child in self._children.values():
            try:
                child.process.wait(max(0.0, deadline - self._monotonic()))
            except subprocess.TimeoutExpired:
                _kill(child.process)
                child.process.wait()
        self._children.clear()

    def _argv(self, launch: Launch) -> list[str]:
        options = [
            part for name, value in sorted(launch.options.items()) for part in _option(name, value)
        ]
        return [
            *(sys.executable, "-I", "-S", "-c", _BIND_TO_AGENT, str(os.getpid())),
            *self._command,
            *("--model-name", launch.model_name),
            *("--checkpoint", launch.checkpoint),
            *("--checkpoint-root", str(self._checkpoint_root)),
            *("--cache-dir", str(self._cache)),
            *("--port", "0"),
            *("--drain-seconds", str(_DRAIN_S)),
            "--exit-with-parent",
            *options,
        ]

    def _reap(self) -> Iterator[tuple[ReplicaName, str]]:
        for name, child in list(self._children.items()):
            if child.process.poll() is not None:
                # What it left in its session may hold the device.
                _kill(child.process)
                del self._children[name]
                yield name, _ending(child)
            elif child.kill_at is not None and self._monotonic() >= child.kill_at:
                _kill(child.process)

    def _due(self) -> list[_Child]:
        now = self._monotonic()
        children = list(self._children.values())
        for child in children:
            if not child.address:
                _find_address(child)
            if child.address:
                _rotate(child.log)
        return [
            child
            for child in children
            if child.address and (not child.ready or now - child.polled_at >= _READY_POLL_S)
        ]

    def _poll(self, child: _Child) -> None:
        """Ask one server whether it is ready and what it did (in a thread of its own)."""
        child.polled_at = self._monotonic()
        url = f"{child.address}/v2/models/{quote(child.model_name, safe='')}/stats"
        answer = probe.ask(url, timeout_s=_POLL_TIMEOUT_S)
        if answer is None or answer.status != 200:
            child.answers = child.ready = child.idle = False
            return
        child.answers, child.ready = True, answer.body.get("ready") is True
        child.version = str(answer.body.get("model_version") or "")
        child.answered_at = self._monotonic()
        before, child.stats = child.stats, _stats(answer.body)
        child.idle = child.stats.queue_rows == 0 and child.stats == before


def _living(child: _Child, now: float) -> Living:
    return Living(
        pid=child.process.pid,
        address=child.address,
        version=child.version,
        answers=child.answers,
        ready=child.ready,
        silent_s=max(0.0, now - child.answered_at),
        idle=child.idle,
        stopping=child.kill_at is not None,
        stats=child.stats,
    )


def _stats(body: Mapping[str, Any]) -> Stats:
    return Stats(
        busy_seconds=probe.number(body, "busy_seconds"),
        rows_total=int(probe.number(body, "rows_total")),
        queue_rows=min(int(probe.number(body, "queue_rows")), 2**31 - 1),
    )


def _find_address(child: _Child) -> None:
    """Look for the address in what the server has written since the last time.

    It says so twice: in a line of its log when it listens, and after `READY` when it serves.
    """
    with child.log.open("rb") as log:
        log.seek(child.scanned)
        data = log.read(_LONGEST_LINE_BYTES)
    complete = data.rfind(b"\n") + 1
    if not complete and len(data) == _LONGEST_LINE_BYTES:
        complete = len(data)
    child.scanned += complete
    for line in data[:complete].splitlines():
        if b'"url"' in line and not child.address:
            child.address = _address(line.removeprefix(b"READY "))


def _address(line: bytes) -> str:
    try:
        url = json.loads(line)["url"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return url if isinstance(url, str) and url.startswith("http://") else ""


def _option(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]


def _ending(child: _Child) -> str:
    """Say how a server ended, with the last line that it wrote if it gave up by itself."""
    code = child.process.returncode
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    said = f"ended with exit code {code}"
    return said if code == 0 else f"{said}: {_last_line(child.log)}"


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_WORDS_BYTES))
        lines = [line for line in file.read().splitlines() if line.strip()]
    return lines[-1].decode(errors="replace").strip()[-_LAST_WORDS_BYTES:] if lines else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # The group is gone already (a zombie's is not to be signalled on macOS).
        return


def _rotate(log: Path) -> None:
    """Copy and empty a full log: its writer keeps its descriptor, which appends."""
    if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
