"""Servers as processes of this machine.

The backend forgets everything when its process ends, and its servers end with it: each is bound to
the agent by the kernel (Linux) and by `--exit-with-parent`, so that after `kill -9` of the agent
nothing stale serves for long. What still drains then keeps its devices by locks on files.
"""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from models_admin import probe, server_environment, server_log, server_process
from models_admin.hosting import (
    Ending,
    Launch,
    LaunchFailed,
    Living,
    Observation,
    ReplicaName,
    Stats,
    Verdict,
)

_READY_POLL_S: Final = 2.0
_POLL_TIMEOUT_S: Final = 1.5
_TAIL_EVERY_S: Final = 2.0
_TERM_GRACE_S: Final = 30.0
"""A server that was told to end and still lives after this is killed."""
_STOP_ALL_S: Final = 15.0
"""The same where the agent itself has to end."""
_CHECK_LIMIT_S: Final = 900.0


@dataclass(kw_only=True, slots=True)
class _Child:
    """A server, or a check run."""

    launch: Launch
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    scanned: int
    """Bytes of the log that were searched for the address."""
    started_at: float
    answered_at: float
    polled_at: float = float("-inf")
    tailed_at: float = float("-inf")
    address: str = ""
    version: str = ""
    answers: bool = False
    ready: bool = False
    draining: bool = False
    idle: bool = False
    kill_at: float | None = None
    stats: Stats = field(default_factory=Stats)
    log_tail: str = ""


class LocalBackend:
    """Servers as processes of this machine, each in a session of its own, its log under `logs`."""

    def __init__(
        self,
        *,
        logs: Path,
        cache: Path,
        locks: Path,
        checkpoint_root: Path,
        cwd: Path,
        environ: Mapping[str, str],
        command: Sequence[str],
        term_grace_s: float = _TERM_GRACE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._cache = cache
        self._locks = locks
        self._checkpoint_root = checkpoint_root
        self._cwd = cwd
        self._environ = server_environment.of(environ)
        self._secrets = server_environment.secrets(environ)
        self._command = tuple(command)
        self._term_grace_s = term_grace_s
        self._monotonic = monotonic
        self._host = socket.gethostname()
        self._children: dict[ReplicaName, _Child] = {}
        self._checks: dict[ReplicaName, _Child] = {}

    def start(self, launch: Launch) -> None:
        """Start a server; its address is known when it has bound a port and said so."""
        if launch.name in self._children:
            raise LaunchFailed("a server of this name lives")
        name = f"model-{launch.name.model_id}-{launch.name.ordinal}"
        self._children[launch.name] = self._launch(launch, name, locks=launch.binding.locks)

    def stop(self, name: ReplicaName) -> None:
        """Send SIGTERM once; `observe` kills what still lives after the grace."""
        child = self._children.get(name)
        if child is not None and child.kill_at is None:
            child.process.terminate()
            child.kill_at = self._monotonic() + self._term_grace_s

    def check(self, launch: Launch) -> Verdict | None:
        """Run the server's own `--check`; it uses the CPU, whatever the server will run on."""
        child = self._checks.get(launch.name)
        if child is not None and child.launch != launch:
            # One that cannot even be killed (its disk hangs) must not stop the agent.
            server_process.kill(child.process)
            if child.process.poll() is None:
                return None
            child = None
        if child is None:
            try:
                self._checks[launch.name] = self._launch(
                    launch, f"check-{launch.name.model_id}", "--check"
                )
            except LaunchFailed as failure:
                return Verdict(passed=False, text=f"could not be checked: {failure}")
            return None
        if child.process.poll() is None:
            if self._monotonic() - child.started_at >= _CHECK_LIMIT_S:
                server_process.kill(child.process)
            return None
        del self._checks[launch.name]
        return _verdict(child, server_log.last_words(child.log, child.log_start, self._secrets))

    def observe(self) -> Observation:
        """Reap what ended, kill what does not end, and ask the others how they are."""
        ended = dict(self._reap())
        for name, check in list(self._checks.items()):
            is_late = self._monotonic() - check.started_at >= _CHECK_LIMIT_S
            if check.process.returncode is not None:
                # It had ended at the last look, and nobody asked: its verdict is out of date.
                del self._checks[name]
            elif check.process.poll() is None and is_late:
                server_process.kill(check.process)
        if due := self._due():
            # One that hangs must not make the others look silent.
            with ThreadPoolExecutor(max_workers=len(due), thread_name_prefix="poll") as pollers:
                list(pollers.map(self._poll, due))
        now = self._monotonic()
        return Observation(
            living={name: self._living(child, now) for name, child in self._children.items()},
            ended=ended,
        )

    def stop_all(self) -> None:
        """Send SIGTERM to all at once, SIGKILL to what lives after the grace."""
        for child in self._checks.values():
            _end(child)
        self._checks.clear()
        for name in self._children:
            self.stop(name)
        deadline = self._monotonic() + min(self._term_grace_s, _STOP_ALL_S)
        for child in self._children.values():
            try:
                child.process.wait(max(0.0, deadline - self._monotonic()))
            except subprocess.TimeoutExpired:
                _end(child)
        self._children.clear()

    def _launch(self, launch: Launch, name: str, *flags: str, locks: Sequence[str] = ()) -> _Child:
        log = self._logs / f"{name}.log"
        with contextlib.ExitStack() as held:
            try:
                for folder in (self._logs, self._cache, self._locks):
                    folder.mkdir(parents=True, exist_ok=True)
                server_log.rotate(log)
                held_by = [
                    held.enter_context(server_process.locked(self._locks / lock)) for lock in locks
                ]
                with log.open("ab") as output:
                    start = output.tell()
                    process = subprocess.Popen(
                        server_process.argv(
                            launch,
                            command=(*self._command, *flags),
                            checkpoint_root=self._checkpoint_root,
                            cache=self._cache,
                        ),
                        cwd=self._cwd,
                        env={**self._environ, **launch.binding.env},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=held_by,
                        start_new_session=True,
                    )
            except OSError as error:
                raise LaunchFailed(f"{type(error).__name__}: {error.strerror}") from error
        now = self._monotonic()
        return _Child(
            launch=launch,
            process=process,
            log=log,
            log_start=start,
            scanned=start,
            started_at=now,
            answered_at=now,
        )

    def _reap(self) -> Iterator[tuple[ReplicaName, Ending]]:
        for name, child in list(self._children.items()):
            if child.process.poll() is not None:
                # What it left in its session may hold the device.
                server_process.kill(child.process)
                del self._children[name]
                words = server_log.last_words(child.log, child.log_start, self._secrets)
                yield name, self._ending(child, words)
            elif child.kill_at is not None and self._monotonic() >= child.kill_at:
                server_process.kill(child.process)

    def _ending(self, child: _Child, words: str) -> Ending:
        """Say how a server ended, with its reason, or its last line, if it gave up by itself."""
        code = child.process.returncode
        log_tail = server_log.tail(child.log, child.log_start, self._secrets)
        if code < 0:
            return Ending(text=f"killed by {server_process.signal_name(-code)}", log_tail=log_tail)
        if code == 0:
            return Ending(text="ended with exit code 0", clean=True, log_tail=log_tail)
        if (refusal := server_log.refusal(words)) is not None:
            return Ending(text=refusal.text, refused=refusal.is_permanent, log_tail=log_tail)
        said = server_log.last_line(words)
        return Ending(text=f"ended with exit code {code}: {said}", log_tail=log_tail)

    def _due(self) -> list[_Child]:
        now = self._monotonic()
        children = list(self._children.values())
        for child in children:
            if not child.address:
                child.address, child.scanned = server_log.find_address(child.log, child.scanned)
            if now - child.tailed_at >= _TAIL_EVERY_S:
                child.tailed_at = now
                child.log_tail = server_log.tail(child.log, child.log_start, self._secrets)
            if child.address and server_log.rotate(child.log):
                child.log_start = 0
        return [
            child
            for child in children
            if child.address and (not child.ready or now - child.polled_at >= _READY_POLL_S)
        ]

    def _poll(self, child: _Child) -> None:
        """Ask one server whether it is ready and what it did (in a thread of its own)."""
        child.polled_at = self._monotonic()
        url = f"{child.address}/v2/models/{quote(child.launch.model_name, safe='')}/stats"
        answer = probe.ask(url, timeout_s=_POLL_TIMEOUT_S)
        if answer is None or answer.status != 200:
            child.answers = child.ready = child.idle = False
            return
        child.answers, child.ready = True, answer.body.get("ready") is True
        child.draining = answer.body.get("phase") == "draining"
        child.version = str(answer.body.get("model_version") or "")
        child.answered_at = self._monotonic()
        before, child.stats = child.stats, _stats(answer.body)
        child.idle = child.stats.queue_rows == 0 and child.stats == before

    def _living(self, child: _Child, now: float) -> Living:
        return Living(
            host=self._host,
            pid=child.process.pid,
            slot=child.launch.slot,
            address=child.address,
            version=child.version,
            answers=child.answers,
            ready=child.ready,
            draining=child.draining,
            silent_s=max(0.0, now - child.answered_at),
            idle=child.idle,
            stopping=child.kill_at is not None,
            stats=child.stats,
            log_tail=child.log_tail,
        )


def _verdict(child: _Child, words: str) -> Verdict:
    code = child.process.returncode
    if code == 0 and server_log.checked(words):
        return Verdict(passed=True, text="")
    if (refusal := server_log.refusal(words)) is not None:
        return Verdict(passed=False, text=refusal.text)
    ended = f"killed by {server_process.signal_name(-code)}" if code < 0 else f"ended with {code}"
    return Verdict(passed=False, text=f"its check {ended}: {server_log.last_line(words)}")


def _stats(body: Mapping[str, Any]) -> Stats:
    return Stats(
        busy_seconds=probe.number(body, "busy_seconds"),
        rows_total=int(probe.number(body, "rows_total")),
        tokens_total=int(probe.number(body, "real_tokens_total")),
        queue_rows=min(int(probe.number(body, "queue_rows")), 2**31 - 1),
    )


def _end(child: _Child) -> None:
    server_process.kill(child.process)
    child.process.wait()
