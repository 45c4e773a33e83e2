"""CPU of a whole stack, by process: what a request costs does not depend on who else runs.

A process counts with its children, those that have ended included (PostgreSQL's backends come and
go). `foreign` tells how many cores everybody else took meanwhile: above about 0.2, trust the CPU
figures and not the rates.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

SUPERVISOR = "supervisor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What was used between two looks."""

    wall_s: float
    cpu_s: Mapping[str, float]
    foreign_cores: float

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())

    def us_each(self, count: int) -> dict[str, float]:
        """Return microseconds by process for each of `count` things."""
        return {name: 1e6 * seconds / count for name, seconds in self.cpu_s.items()}

    def us(self, count: int) -> float:
        """Return microseconds for each of `count` things, all processes together."""
        return 1e6 * self.total_s / count


class Meter:
    """Looks at a supervised home, from its making to `read`."""

    def __init__(self, home: Path, *, others: Mapping[str, int] | None = None) -> None:
        self._home = home
        self._others = dict(others or {})
        self._began_at = time.perf_counter()
        self._busy_s = _machine_busy_s()
        self._before = self._look()

    def read(self) -> Cost:
        """Return the cost since the start; pids of `others` count as foreign no more."""
        after = self._look()
        wall_s = time.perf_counter() - self._began_at
        spent = {
            name: max(0.0, seconds - self._before.get(name, 0.0)) for name, seconds in after.items()
        }
        foreign_s = _machine_busy_s() - self._busy_s - sum(spent.values())
        return Cost(
            wall_s=wall_s,
            cpu_s={name: s for name, s in spent.items() if name not in self._others},
            foreign_cores=max(0.0, foreign_s / wall_s),
        )

    def _look(self) -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for name, process in supervised(self._home):
            if name != SUPERVISOR:
                with contextlib.suppress(psutil.NoSuchProcess):
                    spent[name] += _family_s(process)
        for name, pid in self._others.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                spent[name] += _family_s(psutil.Process(pid))
        return spent


def supervised(home: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the supervised processes of a home, and the supervisor, by role: without numbers."""
    for path in (home / "run").glob("*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError, FileNotFoundError):
            process = psutil.Process(int(path.read_text().split()[0]))
            yield path.stem.rstrip("-0123456789"), process


def _family_s(process: psutil.Process) -> float:
    seconds = 0.0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))
