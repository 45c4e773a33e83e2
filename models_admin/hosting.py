"""Where replicas of hosted models run: the seam between the host agent and what runs servers.

A backend starts, watches, checks and ends servers; what should live is not its business (see
`policy.reconcile` and `agent`). `local_hosting` has the one for processes of this machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from models_admin.policy.rollout import Slot


class ReplicaName(NamedTuple):
    """Names one replica on a backend."""

    model_id: str
    ordinal: int


class LaunchFailed(Exception):
    """A server could not even be started."""


class DevicesHeld(LaunchFailed):
    """Somebody still holds its devices: an earlier run that has not ended yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The devices of a replica, and how its server is told of them."""

    pool_id: str = ""
    indices: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    locks: tuple[str, ...] = ()
    """Names of the devices on their host: who holds one keeps all others off it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """All that a server is started with, or checked."""

    name: ReplicaName
    model_name: str
    checkpoint: str
    loader: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    slot: Slot | None = None
    """What it is a run of; told back with what lives."""
    binding: Binding = Binding()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a server says of its work since it started."""

    busy_seconds: float = 0.0
    rows_total: int = 0
    tokens_total: int = 0
    """Those of texts, without what pads them."""
    queue_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Living:
    """A server that lives."""

    host: str
    """Where it runs."""
    address: str
    """"" until it is known."""
    version: str
    answers: bool
    ready: bool
    draining: bool
    """Says that it takes nothing new: it was told to end, by us or from outside."""
    silent_s: float
    """Since its last answer, or its start."""
    idle: bool
    stopping: bool
    """Was told to end by us."""
    stats: Stats
    slot: Slot | None = None
    """What it was launched for."""
    log_tail: str = ""
    """The last lines that it wrote, 4 kB at most, without secrets."""
    pid: int | None = None
    """Of its process, where it has one that can be named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a server ended."""

    text: str
    clean: bool = False
    """It was told to end (whoever did) and had nothing left to do."""
    refused: bool = False
    """It said that it cannot load what it was given, and will not another time."""
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a check run came to."""

    passed: bool
    text: str
    """Why not; "" if it passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the backend runs, and how those ended that it saw ending since the last look."""

    living: Mapping[ReplicaName, Living]
    ended: Mapping[ReplicaName, Ending]


class HostingBackend(Protocol):
    """Where servers run. Called by one thread; none of its calls takes longer than two seconds."""

    def start(self, launch: Launch) -> None:
        """Start a server under a name that has none; raises LaunchFailed."""

    def stop(self, name: ReplicaName) -> None:
        """Tell a server to end, and see to it that it does; harmless to repeat."""

    def check(self, launch: Launch) -> Verdict | None:
        """Load what a server would and serve nothing; None while that goes on.

        The first call begins it; one for another launch of this name ends the one before. A verdict
        is given once, and the next call checks anew.
        """

    def observe(self) -> Observation:
        """Look at all servers."""

    def stop_all(self) -> None:
        """End all servers and checks and return when none lives; this may take longer."""
