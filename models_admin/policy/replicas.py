"""What is known of a replica: where it stands, what is remembered of it, and what is seen of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from models_admin.policy.rollout import Slot


class ServerState(StrEnum):
    """Where a replica stands, and who moves it on (always the host agent)."""

    STOPPED = "STOPPED"
    """No process; started by the next pass if it is wanted."""
    STARTING = "STARTING"
    """Process started, it does not answer yet."""
    WARMING = "WARMING"
    """Answers, but compiles its shapes."""
    READY = "READY"
    """Serves; the only state that is sent to."""
    DRAINING = "DRAINING"
    """Gets nothing new; told to end when it has nothing left, or after the drain limit."""
    BACKOFF = "BACKOFF"
    """Died or hung; starts again at `next_start_at`."""
    FAILED = "FAILED"
    """Could not be launched or loaded (bad checkpoint …); tried again at `next_start_at`."""


LIVE = frozenset(
    {ServerState.STARTING, ServerState.WARMING, ServerState.READY, ServerState.DRAINING}
)
"""States that claim a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A living process of a replica, as the hosting backend sees it."""

    answers: bool = False
    ready: bool = False
    silent: timedelta = timedelta(0)
    """Since it last answered (or was started)."""
    idle: bool = False
    """Has nothing to compute, and got nothing for a while."""
    stopping: bool = False
    """Was told to end, by us."""
    draining: bool = False
    """Says that it takes nothing new any more: it was told to end."""
    slot: Slot | None = None
    """What it was launched for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is remembered of a replica from pass to pass."""

    state: ServerState = ServerState.STOPPED
    slot: Slot | None = None
    """What it was last launched for."""
    failures: int = 0
    """Deaths in a row."""
    started_at: datetime | None = None
    ready_at: datetime | None = None
    draining_at: datetime | None = None
    next_start_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One replica: its record, its process if one lives, and how the last one ended."""

    ordinal: int
    record: Record = Record()
    seen: Seen | None = None
    ended: str = ""
    refused: bool = False
    """It said that it cannot load what it was given."""
    ended_well: bool = False
    """It ended because it was told to (whoever did), with nothing left to do."""
    inherited: bool = False
    """The record was written by an agent that is gone, and its servers with it."""

    @property
    def slot(self) -> Slot | None:
        """What it runs, or last ran."""
        return self.record.slot if self.seen is None else self.seen.slot or self.record.slot


def summary(states: Sequence[ServerState]) -> str:
    """Return a model's replicas in one line: `2 READY, 1 BACKOFF`."""
    counts = {state: states.count(state) for state in ServerState}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
