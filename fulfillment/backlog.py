"""How much the backlog takes; whether there is room for more, policy/admission decides.

The backlog is what uploads wrote and nobody has erased: batches, payloads and requests of workflows
that are not finished, or whose payloads are still kept for a retry. Ingest counts it in its deltas
and retention sets it to 0; sizes of tables would not do, as they never shrink when rows go.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db import connection

from fulfillment.errors import BacklogFull
from fulfillment.policy.admission import Disk, admit

BELIEVED_S = 1.0
"""How long a process believes its last count, which reads a row a workflow that has payloads."""


def stored_bytes() -> int:
    """Return the bytes of the backlog as COPY sent them; indexes and row headers are not counted.

    One statement, so that a fold between its two parts neither hides nor doubles anything.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT coalesce((SELECT sum(stored_bytes) FROM fulfillment_workflowstats
                             WHERE stored_bytes > 0), 0)
                 + coalesce((SELECT sum(stored_bytes) FROM fulfillment_statsdelta), 0)
            """
        )
        (size,) = cursor.fetchone()
    return int(size)


def refuse_if_full() -> None:
    """Raise BacklogFull when the backlog is over its limit, or the disk of the data nearly full."""
    admission = admit(
        stored_bytes=_counted.bytes(), limit_bytes=settings.AIRS_MAX_BACKLOG_BYTES, disk=_disk()
    )
    if not admission.admitted:
        raise BacklogFull(
            admission.reason, code=admission.code, retry_after_s=admission.retry_after_s
        )


def _disk() -> Disk | None:
    directory: Path | None = settings.AIRS_DATA_DIRECTORY
    if directory is None:
        return None
    return Disk(
        free_bytes=shutil.disk_usage(directory).free, floor_bytes=settings.AIRS_MIN_FREE_BYTES
    )


@dataclass(slots=True)
class _Count:
    """The last count of this process. Two threads may count at once: both are right."""

    size: int = 0
    until_s: float = 0.0

    def bytes(self) -> int:
        if time.monotonic() >= self.until_s:
            self.size = stored_bytes()
            self.until_s = time.monotonic() + BELIEVED_S
        return self.size


_counted = _Count()
