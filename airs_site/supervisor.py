"""Keeps the processes of one AIRS home alive, and ends them all with itself.

Each child leads a process group of its own, writes to `logs/<name>.log` and is named by
`run/<name>.pid`. What dies is started again, after a pause that grows while it keeps dying. A
*guard* process waits for the end of the supervisor, so that even `kill -9` of it leaves nothing
running; should the guard be killed too, the next supervisor of the home ends what is left.

Own code, because `supervisor` from PyPI leaves its children running when it is killed, and honcho
ends everything when one child dies. What runs, and in which order, is the caller's business.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from airs_site.processes import (
    GRACE_S,
    HOME_VARIABLE,
    descendants,
    end_leftovers,
    forget_pid,
    kill,
    read_pid,
    write_pid,
)

REPOSITORY = Path(__file__).resolve().parents[1]

_TICK_S = 0.1
_LOG_LIMIT_BYTES = 10 * 1024 * 1024
_STABLE_AFTER_S = 30.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_HOPELESS_STARTS = 5
_ITSELF = "supervisor"


class HomeInUse(Exception):
    """Another supervisor holds this home."""

    def __init__(self, home: Path, holder: int | None) -> None:
        self.holder = holder
        super().__init__(f"{home} is in use by process {holder or '(unknown)'}")


class NotReady(Exception):
    """A process did not get ready, or a step failed; the text ends with its log."""


class Stopped(Exception):
    """SIGINT, SIGTERM or SIGHUP came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A command to keep running. The highest stage is stopped first."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path = REPOSITORY
    ready: Callable[[], bool] | None = None
    stage: int = 0
    stop_signal: signal.Signals = signal.SIGTERM
    grace_s: float = 20.0


def restart_pause(*, failures: int) -> float:
    """Seconds until the next start, after `failures` short runs in a row before this one."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures, 20), _LONGEST_PAUSE_S)


def rotate_log(log: Path) -> None:
    """Copies and empties a full log. Its writer goes on: its descriptor appends.

    Lines written between copy and truncation are lost. A pipe would lose none, but stall its
    writer whenever the supervisor stalls.
    """
    if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)


class Guard:
    """A process that outlives this one, and then ends what its home's pid files name."""

    def __init__(self, home: Path, *, keep_open: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "airs_site.supervisor", str(home.resolve())),
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=keep_open,
            start_new_session=True,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def dismiss(self) -> None:
        """Ends the guard: nothing is left to watch."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(b"dismissed")


@dataclass(kw_only=True, slots=True)
class _Child:
    process: Process
    running: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_again_at: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Supervisor:
    """A context manager for the main thread: it holds the home, turns SIGINT, SIGTERM and SIGHUP
    into `Stopped`, raised by whatever method waits, and stops all children on the way out.
    """

    home: Path
    report: Callable[[str], None] = lambda line: None
    _children: dict[str, _Child] = field(default_factory=dict)
    _signalled: bool = False
    _guard: Guard | None = None
    _leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _lock: IO[str] | None = None

    def __enter__(self) -> "Supervisor":
        with self._leave:
            for directory in ("run", "logs"):
                (self.home / directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._leave.enter_context(_hold(self.home))
            end_leftovers(self.home)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._leave.callback(signal.signal, number, signal.signal(number, self._on_signal))
            write_pid(self.home, _ITSELF, os.getpid())
            self._leave.callback(forget_pid, self.home, _ITSELF)
            self._watch()
            self._leave = self._leave.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._leave:
            self.stop()
            if self._guard is not None:
                self._guard.dismiss()

    def start(self, process: Process, *, timeout_s: float = 60.0) -> None:
        """Starts `process`, returns when it is ready, and keeps it running from then on."""
        child = self._children[process.name] = _Child(process=process)
        self._spawn(child)
        deadline = time.monotonic() + timeout_s
        while process.ready is not None and not process.ready():
            if time.monotonic() > deadline or child.failures >= _HOPELESS_STARTS:
                raise NotReady(f"{process.name} does not get ready.\n{self._log_tail(process)}")
            self._tick()

    def complete(self, process: Process) -> None:
        """Runs `process` once, to its end, which must be exit code 0."""
        child = _Child(process=process)
        self._spawn(child)
        assert child.running is not None
        try:
            while child.running.poll() is None:
                self._tick()
        finally:
            self._end(child)
        if child.running.returncode != 0:
            how = _ending(child.running)
            raise NotReady(f"{process.name} failed ({how}).\n{self._log_tail(process)}")

    def run(self) -> None:
        """Keeps everything running until a signal comes."""
        with contextlib.suppress(Stopped):
            while True:
                self._tick()

    def stop(self) -> None:
        """Stops all children, the highest stage first, the last started first."""
        children = list(reversed(self._children.values()))
        self._children = {}
        for stage in sorted({child.process.stage for child in children}, reverse=True):
            self._stop_stage([child for child in children if child.process.stage == stage])

    def _stop_stage(self, children: list[_Child]) -> None:
        outsiders = descendants(
            psutil.Process(child.running.pid)
            for child in children
            if child.running is not None and child.running.poll() is None
        )
        for child in children:
            if child.running is not None:
                child.running.send_signal(child.process.stop_signal)
        deadline = time.monotonic() + max(child.process.grace_s for child in children)
        for child in children:
            try:
                if child.running is not None:
                    child.running.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.report(f"{child.process.name} does not stop and is killed")
            self._end(child)
        kill(outsiders)

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        if self._signalled:
            raise Stopped
        self._watch()
        for child in self._children.values():
            self._tend(child, now=time.monotonic())

    def _tend(self, child: _Child, *, now: float) -> None:
        if child.running is None:
            if now >= child.start_again_at:
                self._spawn(child)
        elif child.running.poll() is None:
            rotate_log(self._log(child.process))
        else:
            self._end(child)
            if now - child.started_at >= _STABLE_AFTER_S:
                child.failures = 0
            pause_s = restart_pause(failures=child.failures)
            how = _ending(child.running)
            self.report(f"{child.process.name} ended ({how}), starts again in {pause_s:.1f} s")
            child.failures += 1
            child.start_again_at = now + pause_s
            child.running = None

    def _spawn(self, child: _Child) -> None:
        process = child.process
        with self._log(process).open("ab") as log:
            child.running = subprocess.Popen(
                process.argv,
                env={**process.env, HOME_VARIABLE: str(self.home.resolve())},
                cwd=process.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        child.started_at = time.monotonic()
        write_pid(self.home, process.name, child.running.pid, stop_signal=process.stop_signal)

    def _end(self, child: _Child) -> None:
        """Ends the group: what a killed parent leaves in it may hold a port or a lock."""
        if child.running is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.running.pid, signal.SIGKILL)
            child.running.wait()
        forget_pid(self.home, child.process.name)

    def _watch(self) -> None:
        if self._guard is None or not self._guard.is_alive():
            assert self._lock is not None
            # The guard shares the lock, so that nobody takes the home while it cleans up.
            self._guard = Guard(self.home, keep_open=(self._lock.fileno(),))

    def _on_signal(self, *args: Any) -> None:
        self._signalled = True

    def _log(self, process: Process) -> Path:
        return self.home / "logs" / f"{process.name}.log"

    def _log_tail(self, process: Process) -> str:
        lines = self._log(process).read_text(errors="replace").splitlines()[-20:]
        return "\n".join((f"The end of {self._log(process)}:", *lines))


@contextlib.contextmanager
def _hold(home: Path) -> Iterator[IO[str]]:
    # The guard of a killed supervisor holds the home while it cleans up.
    deadline = time.monotonic() + 3 * GRACE_S
    with (home / "run" / "supervisor.lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = read_pid(home, _ITSELF)
                if holder is not None or time.monotonic() > deadline:
                    raise HomeInUse(home, holder) from None
            time.sleep(_TICK_S)
        yield lock


def _ending(running: subprocess.Popen[bytes]) -> str:
    code = running.returncode
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


if __name__ == "__main__":
    # The guard: its input ends when the supervisor does.
    if not sys.stdin.buffer.read():
        end_leftovers(Path(sys.argv[1]))
