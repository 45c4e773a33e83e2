"""Pid files that never name a stranger, and the end of processes with all their children.

`run/<name>.pid` holds three lines: the pid, what tells that process from a later one with the same
pid, and the signal that stops it. Supervisor, embedded servers, `manage.py down` and tests share
it.
"""

import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

HOME_VARIABLE = "AIRS_SUPERVISED_HOME"
"""Set in every child of a supervisor and so in its children: finds those that outlive a parent."""

GRACE_S = 10.0
"""How long leftovers may take to stop before they are killed."""


def write_pid(
    home: Path, name: str, pid: int, *, stop_signal: signal.Signals = signal.SIGTERM
) -> None:
    """Notes that `pid` runs as `name`."""
    path = _pid_file(home, name)
    draft = path.with_suffix(".pid.new")
    draft.write_text(f"{pid}\n{_identity(pid)}\n{stop_signal.name}\n")
    draft.replace(path)


def read_pid(home: Path, name: str) -> int | None:
    """The pid of the living process that is noted under `name`."""
    note = _read(home, name)
    return note[0].pid if note else None


def forget_pid(home: Path, name: str) -> None:
    """Removes the note."""
    _pid_file(home, name).unlink(missing_ok=True)


def end_leftovers(home: Path, *, grace_s: float = GRACE_S) -> list[str]:
    """Ends what was started for this home and still runs; the names of those found."""
    names = sorted(path.stem for path in (home / "run").glob("*.pid"))
    found = {name: note for name in names if (note := _read(home, name)) is not None}
    leaders = [leader for leader, _ in found.values()]
    everyone = [*leaders, *descendants(leaders), *_marked(home)]
    for leader, stop_signal in found.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            leader.send_signal(stop_signal)
    psutil.wait_procs(leaders, timeout=grace_s)
    kill(everyone)
    for name in names:
        forget_pid(home, name)
    return list(found)


def descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """All children of these processes, theirs too, in whatever process group or session."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to those that still live; returns when they are gone."""
    victims = list(processes)
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims, timeout=GRACE_S)


def _marked(home: Path) -> Iterator[psutil.Process]:
    """Processes started below a supervisor of this home; never the caller or its parents."""
    me = psutil.Process()
    mine = {me.pid, *(parent.pid for parent in me.parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marked = process.pid not in mine and process.environ().get(HOME_VARIABLE)
            if marked == str(home.resolve()):
                yield process


def _read(home: Path, name: str) -> tuple[psutil.Process, signal.Signals] | None:
    try:
        pid, identity, stop_signal = _pid_file(home, name).read_text().split()
        process = psutil.Process(int(pid))
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None
    # Looked at after the handle was made: a handle of psutil never passes to another process.
    return (process, signal.Signals[stop_signal]) if _identity(process.pid) == identity else None


def _identity(pid: int) -> str:
    """Differs between two processes with the same pid; empty for one that does not live.

    On Linux the start in clock ticks since boot, which setting the clock does not move, and the
    boot. A zombie does not live.
    """
    if sys.platform != "linux":
        with contextlib.suppress(psutil.NoSuchProcess):
            return f"{psutil.Process(pid).create_time():.0f}"
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return "" if stat[0] in "ZX" else f"{stat[19]}@{boot}"


def _pid_file(home: Path, name: str) -> Path:
    return home / "run" / f"{name}.pid"
