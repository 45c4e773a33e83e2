"""Rows of replicas: between what the policy remembers, what a backend sees, and what is stored."""

from datetime import UTC, datetime, timedelta
from typing import Final

from models_admin.hosting import Ending, Living
from models_admin.models import ModelServer
from models_admin.policy.replicas import LIVE, Record, Replica, Seen, ServerState
from models_admin.policy.rollout import Slot

FIELDS: Final = (
    *("state", "reason", "last_error", "address", "pid", "host", "version", "boot_id", "starts"),
    *("generation", "failures", "started_at", "ready_at", "draining_at", "next_start_at"),
    *("heartbeat_at", "busy_seconds", "rows_total", "tokens_total", "queue_rows", "launched_id"),
    "devices",
    "log_tail",
)
"""What the agent writes."""
COLUMNS: Final = ("launched", *(name for name in FIELDS if name != "launched_id"))
_HEARTBEAT_STEP: Final = timedelta(seconds=1.5)
"""Rows are written when there is news; a heartbeat is news when it is so much younger."""
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


def record(row: ModelServer) -> Record:
    """Return what a row remembers."""
    slot = None if row.launched_id is None else Slot(row.launched_id, row.generation)
    return Record(
        state=ServerState(row.state),
        slot=slot,
        failures=row.failures,
        started_at=row.started_at,
        ready_at=row.ready_at,
        draining_at=row.draining_at,
        next_start_at=row.next_start_at,
    )


def replica(
    ordinal: int,
    row: ModelServer | None,
    living: Living | None,
    ending: Ending | None,
    *,
    inherited: bool,
) -> Replica:
    """Return all that is known of a replica."""
    return Replica(
        ordinal=ordinal,
        record=Record() if row is None else record(row),
        seen=None if living is None else _seen(living),
        ended="" if ending is None else ending.text,
        ended_well=ending is not None and ending.clean,
        refused=ending is not None and ending.refused,
        inherited=inherited,
    )


def remember(row: ModelServer, after: Record, reason: str) -> None:
    """Let a row remember."""
    if after.slot is not None:
        row.launched_id, row.generation = after.slot
    row.state, row.failures = after.state, after.failures
    row.started_at, row.ready_at = after.started_at, after.ready_at
    row.draining_at, row.next_start_at = after.draining_at, after.next_start_at
    row.reason = reason or row.reason


def take_note(row: ModelServer, living: Living, now: datetime) -> None:
    """Let a row say what a living server does."""
    row.pid, row.host, row.address = living.pid, living.host, living.address
    row.version = living.version or row.version
    answered_at = now - timedelta(seconds=living.silent_s)
    if living.answers and answered_at - (row.heartbeat_at or _LONG_AGO) >= _HEARTBEAT_STEP:
        row.heartbeat_at = answered_at
    row.busy_seconds = living.stats.busy_seconds
    row.rows_total = living.stats.rows_total
    row.tokens_total = living.stats.tokens_total
    row.queue_rows = living.stats.queue_rows


def clear(row: ModelServer) -> None:
    """Let a row say that nothing lives; how many lives it had, and its last words, stay."""
    if row.state not in LIVE:
        row.pid, row.address, row.queue_rows, row.devices = None, "", 0, []


def reset(row: ModelServer) -> None:
    """Let a row stand for a new run."""
    row.starts += 1
    row.address, row.version, row.pid = "", "", None
    row.busy_seconds, row.rows_total, row.tokens_total = 0.0, 0, 0
    row.queue_rows, row.heartbeat_at = 0, None


def _seen(living: Living) -> Seen:
    return Seen(
        answers=living.answers,
        ready=living.ready and bool(living.address),
        silent=timedelta(seconds=living.silent_s),
        idle=living.idle,
        stopping=living.stopping,
        draining=living.draining,
        slot=living.slot,
    )
