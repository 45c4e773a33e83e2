"""A hosting backend without processes: servers live in memory and behave by their checkpoint.

The checkpoints are those of the stub (see `hosted_machine`): what refuses to load, and what serves.
"""

from collections.abc import Callable
from dataclasses import dataclass

from models_admin.hosting import (
    DevicesHeld,
    Ending,
    Launch,
    LaunchFailed,
    Living,
    Observation,
    ReplicaName,
    Stats,
    Verdict,
)
from tests.hosted_machine import REFUSES

WHY = "wrong_shapes: encoder.layer.0: (384, 384), not (128, 128)"


@dataclass(kw_only=True, slots=True)
class _Server:
    launch: Launch
    started_at: float
    looks: int = 0
    told_to_end: bool = False
    notice: bool = False


class MemoryBackend:
    """Servers are ready at the third look, and end at the first one after they were told to."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._servers: dict[ReplicaName, _Server] = {}
        self._checks: dict[ReplicaName, Launch] = {}
        self._ended: dict[ReplicaName, Ending] = {}

    def start(self, launch: Launch) -> None:
        if launch.name in self._servers:
            raise LaunchFailed("a server of this name lives")
        held = {lock for each in self._servers.values() for lock in each.launch.binding.locks}
        if taken := held & set(launch.binding.locks):
            raise DevicesHeld(f"waits for {min(taken)}: an earlier server has not ended")
        self._servers[launch.name] = _Server(launch=launch, started_at=self._monotonic())

    def stop(self, name: ReplicaName) -> None:
        if name in self._servers:
            self._servers[name].told_to_end = True

    def check(self, launch: Launch) -> Verdict | None:
        if self._checks.get(launch.name) != launch:
            self._checks[launch.name] = launch
            return None
        del self._checks[launch.name]
        refused = _refuses(launch)
        return Verdict(passed=not refused, text=WHY if refused else "")

    def observe(self) -> Observation:
        ended, self._ended = self._ended, {}
        for name, server in list(self._servers.items()):
            server.looks += 1
            if _refuses(server.launch):
                ended[name] = Ending(text=WHY, refused=True, log_tail=WHY)
            elif (server.told_to_end or server.notice) and server.looks > 1:
                ended[name] = Ending(text="ended with exit code 0", clean=True)
        for name in ended:
            self._servers.pop(name, None)
        return Observation(
            living={name: self._living(each) for name, each in self._servers.items()}, ended=ended
        )

    def stop_all(self) -> None:
        self._servers.clear()
        self._checks.clear()

    def kill(self, name: ReplicaName) -> None:
        del self._servers[name]
        self._ended[name] = Ending(text="killed by SIGKILL")

    def notify(self, name: ReplicaName) -> None:
        self._servers[name].notice = True

    def _living(self, server: _Server) -> Living:
        ready = server.looks >= 3 and not server.notice
        return Living(
            host="memory",
            slot=server.launch.slot,
            address="http://127.0.0.1:1" if server.looks >= 2 else "",
            version=server.launch.checkpoint.replace("tiny:", "stub-") if ready else "",
            answers=server.looks >= 2,
            ready=ready,
            draining=server.notice,
            silent_s=0.0,
            idle=True,
            stopping=server.told_to_end,
            stats=Stats(),
            log_tail="listening",
        )


def _refuses(launch: Launch) -> bool:
    return launch.checkpoint == f"tiny:{REFUSES}"
