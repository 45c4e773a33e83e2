"""Admission: whether a new upload may come in, by what the backlog and its disk have room for.

The backlog may reach its limit and, by the uploads under way, exceed it: what was let in is never
refused later, so that a resumed upload does not meet a full backlog half-way.
"""

from dataclasses import dataclass
from typing import Final

BACKLOG_FULL: Final = "backlog_full"
RETRY_AFTER_S: Final = 60.0
"""When to come back: room comes with work that is done, of which nobody knows the pace here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The disk that the database has its data on."""

    free_bytes: int
    floor_bytes: int
    """That must stay free: a database without any stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Whether an upload may come in; `code` is "" and `retry_after_s` 0 for one that may."""

    admitted: bool
    code: str
    retry_after_s: float
    reason: str


def admit(*, stored_bytes: int, limit_bytes: int, disk: Disk | None) -> Admission:
    """Judge a new upload; without `disk` that of the database is somebody else's to watch."""
    if stored_bytes > limit_bytes:
        return _refused(
            f"the backlog has {stored_bytes} bytes, the limit (AIRS_MAX_BACKLOG_BYTES) is "
            f"{limit_bytes}; send it again when some of it is done"
        )
    if disk is not None and disk.free_bytes < disk.floor_bytes:
        return _refused(
            f"the disk of the database has {disk.free_bytes} free bytes, fewer than "
            f"{disk.floor_bytes} (AIRS_MIN_FREE_BYTES); free some, or send it again when some of "
            "the backlog is done"
        )
    return Admission(
        admitted=True,
        code="",
        retry_after_s=0.0,
        reason=f"the backlog has {stored_bytes} bytes of {limit_bytes}",
    )


def _refused(reason: str) -> Admission:
    return Admission(admitted=False, code=BACKLOG_FULL, retry_after_s=RETRY_AFTER_S, reason=reason)
