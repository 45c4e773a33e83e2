"""What is out: the batches that are leased, by replica and by rater version.

To count them costs some microseconds each. While few are out, every pass does; of more, a count is
believed for a second: what is claimed is added, and what has come back is looked for when somebody
rings for its replica. A ring that is lost costs the rest of that second.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import NamedTuple

from django.db import connection

from fulfillment import arrays, given_up, prepared
from fulfillment.policy.priority import PriorityClass, priority_class

FEW = 300
"""Batches that are counted in every pass."""
BELIEVED = timedelta(seconds=1)


class Lease(NamedTuple):
    """A batch that is out."""

    priority_class: PriorityClass
    version_id: int
    calls: int
    """That it may make at once."""


_NONE: Mapping[PriorityClass, int] = MappingProxyType({})


class Held:
    """The leases that the leader knows."""

    def __init__(self) -> None:
        self._rung: set[str] = set()
        self._counted_at: datetime | None = None
        self._messages: dict[int, int] = {}
        """By batch; of those that came back until the next count."""
        self._sent = 0
        self._clear()

    @property
    def total(self) -> int:
        """Batches that are out."""
        return self._batches.total()

    @property
    def messages(self) -> int:
        """Messages that this leader has sent and of which some batch is out still."""
        out = (leases.keys() & self._messages.keys() for leases in self._leases.values())
        return len({self._messages[batch_id] for batch_ids in out for batch_id in batch_ids})

    def send(self, batch_ids: Collection[int]) -> None:
        """Say that batches left in one message."""
        self._sent += 1
        self._messages.update(dict.fromkeys(batch_ids, self._sent))

    def of(self, version_id: int) -> int:
        """Return the batches of a rater version that are out."""
        return self._batches[version_id]

    def calls(self, replica: str) -> Mapping[PriorityClass, int]:
        """Return the calls that batches of each class may make at once through a replica."""
        return self._calls.get(replica, _NONE)

    def ring(self, replicas: Iterable[str]) -> None:
        """Say that batches came back from these replicas."""
        self._rung.update(replicas)

    def forget(self) -> None:
        """Count anew at the next look."""
        self._counted_at = None

    def look(self, now: datetime) -> None:
        """Count what is out, or look for what has come back since."""
        if self._is_believed(now):
            self._look_for({replica for replica in self._rung if self._leases.get(replica)})
        else:
            self._count(now)
        self._rung.clear()

    def add(self, replica: str, leases: Mapping[int, Lease]) -> None:
        """Add batches that were just claimed."""
        # One that was claimed before and came back, which nobody has looked for yet.
        self._drop(replica, leases.keys() & self._leases[replica].keys())
        self._leases[replica].update(leases)
        for lease in leases.values():
            self._calls[replica][lease.priority_class] += lease.calls
            self._batches[lease.version_id] += 1

    def _drop(self, replica: str, batch_ids: Iterable[int]) -> None:
        for batch_id in batch_ids:
            lease = self._leases[replica].pop(batch_id)
            self._calls[replica][lease.priority_class] -= lease.calls
            self._batches[lease.version_id] -= 1

    def _is_believed(self, now: datetime) -> bool:
        if self._counted_at is None or self.total <= FEW:
            return False
        return timedelta(0) <= now - self._counted_at < BELIEVED

    def _look_for(self, replicas: set[str]) -> None:
        """Drop what these replicas hold no more."""
        if not replicas:
            return
        with connection.cursor() as cursor:
            prepared.execute(
                cursor,
                # `state + 0`: by primary key, not by the index of all that is leased.
                "SELECT replica, id FROM fulfillment_batch"
                " WHERE id = ANY(%s::bigint[]) AND state + 0 = 1",
                [arrays.integers(b for replica in replicas for b in self._leases[replica])],
            )
            # What left again through another replica has come back from this one.
            held = set(cursor.fetchall())
        for replica in replicas:
            self._drop(replica, [b for b in self._leases[replica] if (replica, b) not in held])

    def _count(self, now: datetime) -> None:
        with connection.cursor() as cursor:
            prepared.execute(
                cursor,
                f"""
                SELECT b.replica, w.priority, {given_up.BEST_EFFORT}, w.rater_version_id, b.calls,
                       string_agg(b.id::text, ',')
                -- In order: no plan, made when tables were small, reads the index of all open ones.
                FROM (SELECT id, workflow_id, replica, calls FROM fulfillment_batch
                      WHERE state = 1 ORDER BY id LIMIT 1000000) AS b
                JOIN fulfillment_workflow w ON w.id = b.workflow_id
                {given_up.forecast("%s::timestamptz")}
                GROUP BY 1, 2, 3, 4, 5
                """,
                [now],
            )
            rows = cursor.fetchall()
        self._clear()
        for replica, priority, best_effort, version_id, calls, batch_ids in rows:
            lease = Lease(priority_class(priority, best_effort=best_effort), version_id, calls)
            self.add(replica, dict.fromkeys(map(int, batch_ids.split(",")), lease))
        out = {batch_id for leases in self._leases.values() for batch_id in leases}
        self._messages = {b: message for b, message in self._messages.items() if b in out}
        self._counted_at = now

    def _clear(self) -> None:
        self._leases: dict[str, dict[int, Lease]] = defaultdict(dict)
        """By replica and batch."""
        self._calls: dict[str, Counter[PriorityClass]] = defaultdict(Counter)
        self._batches: Counter[int] = Counter()
        """By rater version."""
