"""Open work as the policy of commitments takes it: what waits for the same replicas.

All that one model version serves is planned together, whichever rater it is of. Each workflow has
batches of a size of its own and each rater its own time a request: what a batch costs is told in
times of a unit, a batch of one of the raters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

from fulfillment import costs
from fulfillment.models import Rater, RaterCost, RaterVersion
from fulfillment.policy import feasibility
from fulfillment.policy.commitments import Capacity, Commitment, Demand
from fulfillment.policy.priority import PriorityClass, priority_class


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """The open work of a workflow, in batches of its own, and what a batch takes."""

    workflow_id: int
    owner: str
    priority_class: PriorityClass
    deadline_at: datetime
    """Or its max duration, if that comes first."""
    batch_size: int
    batch_s: float
    """Replica-seconds."""
    received: int
    """All its requests."""
    unsent: float
    in_flight: float = 0.0
    cut: float = 0.0

    def demand(self, unit_s: float) -> Demand:
        """Return it where a batch of ordinary cost takes `unit_s`."""
        cut = min(self.cut, self.unsent)
        return Demand(
            workflow_id=self.workflow_id,
            owner=self.owner,
            priority_class=self.priority_class,
            deadline_at=self.deadline_at,
            wanted=self.unsent - cut,
            cut=cut,
            in_flight=self.in_flight,
            cost=self.batch_s / unit_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """All open work that the same replicas serve."""

    opens: Sequence[Open]
    servers: float
    unit_s: float
    """Replica-seconds of a batch of ordinary cost."""

    @property
    def capacity(self) -> Capacity:
        """What serves it."""
        return Capacity(replicas=self.servers, seconds_a_batch=self.unit_s)

    @property
    def demands(self) -> list[Demand]:
        """What is wanted of it."""
        return [each.demand(self.unit_s) for each in self.opens]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What is said of a workflow: batches of its own that are cut, and the share in time."""

    of: Open
    cut: float
    share: float
    reason: str


class Takes:
    """What batches of a rater take, as it is planned with so many servers."""

    def __init__(self, rater: Rater, cost: RaterCost, *, servers: float, is_chat: bool) -> None:
        self._rater = rater
        self._cost = cost
        self._servers = servers
        self._is_chat = is_chat

    def batch_s(self, batch_size: int) -> float:
        """Return the replica-seconds of a batch of so many requests."""
        return costs.seconds_a_batch(
            self._cost,
            servers=self._servers,
            batch_size=batch_size,
            is_chat=self._is_chat,
            max_qps=self._rater.max_qps,
        )


def served_by(version: RaterVersion) -> str:
    """Return the name of what serves a rater version: all of one name share replicas."""
    return f"{version.spec['model_id']}\t{version.spec['model_version']}"


def forecast_open(
    name: str, *, made_after: datetime, now: datetime, without: int = 0, most: int
) -> list[Open]:
    """Return what is open by that name, as it was last forecast, up to `most`."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT f.workflow_id, w.owner, w.priority, w.best_effort,
                   least(w.deadline_at, w.ends_at), w.batch_size, f.seconds_a_batch, f.received,
                   f.unsent_batches, f.in_flight_batches, f.cut_batches
            FROM fulfillment_workflowforecast f
            -- By key alone: the index of what is unfinished would be walked once for each.
            CROSS JOIN LATERAL (
                SELECT * FROM fulfillment_workflow WHERE id = f.workflow_id OFFSET 0) AS w
            WHERE f.served_by = %s AND f.settled_at IS NULL AND f.made_at > %s
              AND w.finished_at IS NULL AND w.state IN (1, 2)
              AND least(w.deadline_at, w.ends_at) > %s AND w.id <> %s
            LIMIT %s
            """,
            [name, made_after, now, without, most],
        )
        return [_open(row) for row in cursor.fetchall()]


def say(
    line: Line, decide: Callable[[Sequence[Demand], Capacity], Commitment], now: datetime
) -> list[Said]:
    """Return what is said of each workflow of a line, in their order.

    Of one that is cut as much is in time as fits beside what is committed, but never all.
    """
    demands, capacity = line.demands, line.capacity
    cut = decide(demands, capacity).cut
    left = feasibility.leftovers(demands, cut, capacity, now)
    said = []
    for each in line.opens:
        late = 0.0
        if batches := cut.get(each.workflow_id, 0.0):
            late = max(1.0, (batches - left[each.workflow_id]) * each.batch_size)
        said.append(
            Said(
                of=each,
                cut=batches,
                share=share_in_time(late=late, rows=each.received),
                reason=_reason(each, late / each.batch_size, line.servers),
            )
        )
    return said


def share_in_time(*, late: float, rows: int) -> float:
    """Return the share of rows that is in time where so many are late."""
    return min(1.0, max(0.0, 1 - late / rows)) if rows else 1.0


def _open(row: Sequence[Any]) -> Open:
    workflow_id, owner, priority, best_effort, deadline_at, batch_size, batch_s = row[:7]
    received, unsent, in_flight, cut = row[7:]
    return Open(
        workflow_id=workflow_id,
        owner=owner,
        priority_class=priority_class(priority, best_effort=best_effort),
        deadline_at=deadline_at,
        batch_size=batch_size,
        batch_s=batch_s,
        received=received,
        unsent=unsent,
        in_flight=in_flight,
        cut=cut,
    )


def _reason(of: Open, late: float, servers: float) -> str:
    if not late:
        return "all is expected in time"
    return (
        f"{late:.1f} of {of.unsent:.1f} batches that wait do not fit before the deadline: "
        f"{servers:g} at a time, {of.batch_s:.3g} s a batch, less what others are promised"
    )
