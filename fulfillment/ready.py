"""What is READY, by rater version, and in which order it is served.

Reading it costs some microseconds a workflow that waits. While few wait, every pass reads it
anew; of thousands, a reading is believed for a while that grows with what it took (so that reading
takes a fifth of the time at most), less what has been claimed since, and less long once somebody
rang. What is missed meanwhile (a retry that came due) is seen at the next reading; what is gone (a
workflow that was cancelled), the claim finds.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

import orjson
from django.db import connection

from fulfillment import prepared
from fulfillment.models import Mode
from fulfillment.policy import fairness, lines, ordering
from fulfillment.policy.fairness import Usage
from fulfillment.policy.priority import priority_class

READY_LOOK = 128
"""READY batches counted a workflow: more than a pass can send of one."""
FEW = 500
"""Workflows that are read in every pass."""
BELIEVED, BELIEVED_AFTER_RING = 4, 1
"""How long a reading of more is believed, in times of what it took."""
LONGEST = timedelta(seconds=2)
BELIEVED_FORECAST = timedelta(minutes=5)
"""Forecasts are made, and replicas counted, each minute; what is older says nothing any more."""
_NOBODY: Mapping[int, Usage] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionLoad:
    """What may be sent of one rater version."""

    version_id: int
    rater_id: str
    model_id: str
    model_version: str
    autorater: str
    plugin_version: str
    max_qps: float | None
    isolated: bool
    batch_size: int
    """The largest of its workflows."""
    workflows: int
    order: lines.Order
    requests_per_s: float | None
    """What its rater can do with the replicas that were counted of late, as far as is known."""


@dataclass(kw_only=True, slots=True)
class Sight:
    """The last reading, and what was claimed of it."""

    versions: Sequence[VersionLoad] = ()
    taken: Counter[int] = field(default_factory=Counter)
    """Batches claimed since, by workflow."""
    read_at: datetime | None = None
    took: timedelta = timedelta()
    rung: bool = False

    def ring(self) -> None:
        """Somebody says that work has come or changed."""
        self.rung = True

    def take(self, picks: Iterable[ordering.Pick]) -> None:
        """Count what was claimed, or was not there any more."""
        for pick in picks:
            self.taken[pick.workflow_id] += pick.batches

    def look(self, now: datetime, usages: Mapping[int, Usage] = _NOBODY) -> Sequence[VersionLoad]:
        """Return what is READY, read now or a moment ago.

        `usages` is what owners were served of late, by rater version.
        """
        if not self._is_believed(now):
            began_s = time.perf_counter()
            self.versions, self.read_at, self.rung = read(now, usages), now, False
            self.taken.clear()
            self.took = timedelta(seconds=time.perf_counter() - began_s)
        return self.versions

    def wanted(self, version: VersionLoad) -> int:
        """Return the READY batches that are left of a version."""
        return sum(
            line.total - sum(n for w, n in self.taken.items() if w in line.ready)
            for line in version.order.values()
        )

    def _is_believed(self, now: datetime) -> bool:
        workflows = sum(version.workflows for version in self.versions)
        if self.read_at is None or workflows <= FEW:
            return False
        times = BELIEVED_AFTER_RING if self.rung else BELIEVED
        # Counted from before it was read.
        believed = min(LONGEST, (1 + times) * self.took)
        return timedelta(0) <= now - self.read_at < believed


def read(now: datetime, usages: Mapping[int, Usage] = _NOBODY) -> list[VersionLoad]:
    """Read what is READY and line it up, by rater version."""
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            """
            SELECT w.rater_version_id, w.rater_id, r.max_qps, r.mode, v.spec, w.batch_size,
                   c.servers, c.seconds_a_request,
                   w.id, w.owner, w.priority, w.best_effort OR f.cut_batches > 0,
                   coalesce(w.round_at, w.created_at), w.deadline_at, ready.batches,
                   w.next_position - s.completed - s.failed - s.timed_out - s.cancelled, o.weight
            FROM fulfillment_workflow w
            JOIN fulfillment_rater r ON r.id = w.rater_id AND r.paused_at IS NULL
            JOIN fulfillment_raterversion v ON v.id = w.rater_version_id
            JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
            LEFT JOIN fulfillment_ratercost c
                ON c.rater_id = w.rater_id AND c.looked_at > %s::timestamptz
            LEFT JOIN fulfillment_workflowforecast f
                ON f.workflow_id = w.id AND f.settled_at IS NULL AND f.made_at > %s::timestamptz
            LEFT JOIN fulfillment_ownershare o ON o.owner = w.owner
            CROSS JOIN LATERAL (
                SELECT count(*) AS batches FROM (
                    -- Without the order the planner scans the table for a quick 128.
                    SELECT FROM fulfillment_batch b WHERE b.workflow_id = w.id AND b.state = 0
                    ORDER BY b.position LIMIT %s::bigint) AS b
            ) AS ready
            WHERE w.finished_at IS NULL AND w.state IN (1, 2) AND w.deadline_at > %s::timestamptz
              AND v.retired_at IS NULL AND ready.batches > 0
            """,
            [now - BELIEVED_FORECAST, now - BELIEVED_FORECAST, READY_LOOK, now],
        )
        rows = cursor.fetchall()
    loads: dict[int, list[lines.Load]] = defaultdict(list)
    facts: dict[int, Sequence[Any]] = {}
    weights: dict[str, float] = {}
    for row in rows:
        version_id, batch_size, weight = row[0], row[5], row[-1]
        facts.setdefault(version_id, row[1:8])
        load = _load(batch_size, row[8:-1])
        loads[version_id].append(load)
        if weight is not None:
            weights[load.owner] = weight
    return [
        _version(version_id, facts[version_id], of_version, now, usages, weights)
        for version_id, of_version in loads.items()
    ]


def _load(batch_size: int, row: Sequence[Any]) -> lines.Load:
    workflow_id, owner, priority, best_effort, accepted_at, deadline_at, ready, open_ = row
    return lines.Load(
        workflow_id=workflow_id,
        owner=owner,
        priority_class=priority_class(priority, best_effort=bool(best_effort)),
        ready_batches=ready,
        open_requests=max(open_, 1),
        submitted_at=accepted_at,
        deadline_at=deadline_at,
        batch_size=batch_size,
    )


def _version(
    version_id: int,
    facts: Sequence[Any],
    loads: Sequence[lines.Load],
    now: datetime,
    usages: Mapping[int, Usage],
    weights: Mapping[str, float],
) -> VersionLoad:
    rater_id, max_qps, mode, text, _, servers, seconds = facts
    spec: Mapping[str, Any] = orjson.loads(text)
    pace = servers / seconds if servers and seconds else None
    return VersionLoad(
        version_id=version_id,
        rater_id=rater_id,
        model_id=spec["model_id"],
        model_version=spec["model_version"],
        autorater=spec["autorater"],
        plugin_version=spec["plugin_version"],
        max_qps=max_qps,
        isolated=mode == Mode.ISOLATED,
        batch_size=max(load.batch_size for load in loads),
        workflows=len(loads),
        order=lines.line_up(
            loads,
            now,
            usage=fairness.aged(usages.get(version_id, Usage()), now),
            requests_per_s=pace,
            weights=weights,
        ),
        requests_per_s=pace,
    )
