"""A model server as a process of this machine: how it begins, what it holds, how it is ended."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from models_admin.hosting import DevicesHeld, Launch

_DRAIN_S: Final = 25
"""What a server gets for accepted rows after SIGTERM: who preempts a machine gives 30 s notice."""

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


def argv(
    launch: Launch, *, command: Sequence[str], checkpoint_root: Path, cache: Path
) -> list[str]:
    """Return the command line of a server that ends with this process."""
    options = [
        part for name, value in sorted(launch.options.items()) for part in _option(name, value)
    ]
    return [
        *(sys.executable, "-I", "-S", "-c", _BIND_TO_AGENT, str(os.getpid())),
        *command,
        *("--model-name", launch.model_name),
        *("--checkpoint", launch.checkpoint),
        *("--checkpoint-root", str(checkpoint_root)),
        *("--cache-dir", str(cache)),
        *("--port", "0"),
        *("--drain-seconds", str(_DRAIN_S)),
        "--exit-with-parent",
        *(("--loader", launch.loader) if launch.loader else ()),
        *options,
    ]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock of a device for a server: it goes over to it, and ends with its process."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DevicesHeld(f"waits for {path.name}: an earlier server has not ended") from error
        yield lock
    finally:
        os.close(lock)


def signal_name(number: int) -> str:
    """Return what a signal is called."""
    # Real-time signals have no name.
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and whatever it left in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # The group is gone already (a zombie's is not to be signalled on macOS).
        return


def _option(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]
