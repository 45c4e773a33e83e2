"""What models have to do, as model management asks for it (named by the setting AIRS_DEMAND).

Committed work with its deadlines, and what was cut, come from the forecasts. Open workflows without
one (no replica of their model can be reached, or nothing of their rater was measured yet) need
somebody, or a model that was left without a replica would never get one. What one replica could do
of them in time is due like committed work: where replicas are short, deadlines decide who has one,
and nobody is promised anything. The rest, and what was never measured, is uncommitted.

All is as old as the last run of the service that forecasts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection
from django.db.backends.utils import CursorWrapper

from fulfillment import blocked, commitments, promises
from fulfillment.models import ServiceRun
from fulfillment.policy.lifecycle import DISPATCHED, BatchState, WorkflowState

UNKNOWN_S = 1.0
"""Replica-seconds that stand for the work of a workflow of which nobody knows how long it takes."""

_SENT = [int(state) for state in DISPATCHED]


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Work of a workflow that is to be done in time, in replica-seconds."""

    deadline_at: datetime
    work_s: float


@dataclass(kw_only=True, slots=True)
class VersionDemand:
    """What one version of a model has to do."""

    model_id: str
    version: str
    dues: list[Due] = field(default_factory=list)
    other_s: float = 0.0
    """Replica-seconds that are not committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What all models have to do."""

    measured_at: datetime | None
    """When forecasts were last renewed; None if never."""
    versions: Sequence[VersionDemand]


def demand(now: datetime) -> Demand:
    """Return what models have to do, of workflows that are sent."""
    measured_at = (
        ServiceRun.objects.filter(pk=commitments.SERVICE).values_list("ran_at", flat=True).first()
    )
    versions: dict[str, VersionDemand] = {}
    kept_out = blocked.workflows(now)
    with connection.cursor() as cursor:
        for workflow_id, served_by, deadline_at, batch_s, *batches in _forecast(cursor, now):
            if workflow_id in kept_out:
                continue
            unsent, in_flight, cut = batches
            cut = min(cut, unsent)
            found = _of(versions, served_by)
            # Of what is in flight, half is done on average.
            work_s = (unsent - cut + in_flight / 2) * batch_s
            found.dues.append(Due(deadline_at=deadline_at, work_s=work_s))
            found.other_s += cut * batch_s
        planned_s: dict[str, float] = defaultdict(float)
        for workflow_id, served_by, deadline_at, work_s in _not_forecast(cursor, now):
            if workflow_id in kept_out:
                continue
            found = _of(versions, served_by)
            if work_s is None:
                found.other_s += UNKNOWN_S
                continue
            left_s = (deadline_at - now).total_seconds() - planned_s[served_by]
            due_s = min(work_s, max(0.0, left_s))
            planned_s[served_by] += due_s
            found.other_s += work_s - due_s
            if due_s:
                found.dues.append(Due(deadline_at=deadline_at, work_s=due_s))
    return Demand(measured_at=measured_at, versions=list(versions.values()))


def backlog(now: datetime) -> dict[tuple[str, str], int]:
    """Return the open requests by model and version (named by the setting AIRS_BACKLOG).

    Unlike `demand` it leaves nothing out: a paused rater's work waits for its version, what is over
    its time may still be computed, and a workflow that is being received will have some.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT v.spec->>'model_id', v.spec->>'model_version', sum(o.requests)::bigint
            FROM (
                SELECT w.rater_version_id,
                       greatest((w.state = %s)::int, (
                           SELECT sum(p.received - p.completed - p.failed - p.timed_out
                                      - p.cancelled)
                           FROM (
                               SELECT received, completed, failed, timed_out, cancelled
                               FROM fulfillment_workflowstats WHERE workflow_id = w.id
                               UNION ALL
                               SELECT received, completed, failed, timed_out, cancelled
                               FROM fulfillment_statsdelta WHERE workflow_id = w.id
                           ) AS p
                       )) AS requests
                FROM fulfillment_workflow w WHERE w.finished_at IS NULL
                UNION ALL
                -- Of a workflow that has ended, tries that were started go on.
                SELECT w.rater_version_id, 1
                FROM fulfillment_batch b JOIN fulfillment_workflow w ON w.id = b.workflow_id
                WHERE b.state = %s
            ) AS o
            JOIN fulfillment_raterversion v ON v.id = o.rater_version_id
            WHERE o.requests > 0 AND v.spec->>'model_version' IS NOT NULL
            GROUP BY 1, 2
            """,
            [int(WorkflowState.RECEIVING), int(BatchState.LEASED)],
        )
        return {(model_id, version): count for model_id, version, count in cursor.fetchall()}


def held(now: datetime) -> dict[str, int]:
    """Return the batches that are out by key of the replica (named by the setting AIRS_HELD)."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT replica, count(*) FROM fulfillment_batch WHERE state = %s GROUP BY 1",
            [int(BatchState.LEASED)],
        )
        return dict(cursor.fetchall())


def _of(versions: dict[str, VersionDemand], served_by: str) -> VersionDemand:
    # The name of a model holds no tab, that of a version may.
    model_id, _, version = served_by.partition("\t")
    return versions.setdefault(served_by, VersionDemand(model_id=model_id, version=version))


def _forecast(cursor: CursorWrapper, now: datetime) -> Iterable[Sequence[Any]]:
    cursor.execute(
        """
        SELECT w.id, f.served_by, least(w.deadline_at, w.ends_at), f.seconds_a_batch,
               f.unsent_batches, f.in_flight_batches, f.cut_batches
        FROM fulfillment_workflowforecast f
        -- By key alone: the index of what is unfinished would be walked once for each.
        CROSS JOIN LATERAL (
            SELECT * FROM fulfillment_workflow WHERE id = f.workflow_id OFFSET 0) AS w
        JOIN fulfillment_rater r ON r.id = w.rater_id AND r.paused_at IS NULL
        WHERE f.settled_at IS NULL AND f.made_at > %s
          AND w.finished_at IS NULL AND w.state = ANY(%s)
          AND least(w.deadline_at, w.ends_at) > %s
        """,
        [now - promises.BELIEVED, _SENT, now],
    )
    found: list[Sequence[Any]] = cursor.fetchall()
    return found


def _not_forecast(cursor: CursorWrapper, now: datetime) -> Iterable[Sequence[Any]]:
    """Return open workflows without a forecast, the earliest deadline first.

    Each is its key, what serves it, its deadline, and its work in replica-seconds, None if that is
    unknown.
    """
    cursor.execute(
        """
        SELECT w.id, v.spec->>'model_id' || E'\\t' || (v.spec->>'model_version'),
               least(w.deadline_at, w.ends_at), o.requests * c.seconds_a_request
        FROM fulfillment_workflow w
        JOIN fulfillment_rater r ON r.id = w.rater_id AND r.paused_at IS NULL
        JOIN fulfillment_raterversion v ON v.id = w.rater_version_id
        LEFT JOIN fulfillment_ratercost c ON c.rater_id = w.rater_id
        LEFT JOIN fulfillment_workflowforecast f
               ON f.workflow_id = w.id AND f.settled_at IS NULL AND f.made_at > %s
        CROSS JOIN LATERAL (
            SELECT sum(p.received - p.completed - p.failed - p.timed_out - p.cancelled) AS requests
            FROM (
                SELECT received, completed, failed, timed_out, cancelled
                FROM fulfillment_workflowstats WHERE workflow_id = w.id
                UNION ALL
                SELECT received, completed, failed, timed_out, cancelled
                FROM fulfillment_statsdelta WHERE workflow_id = w.id
            ) AS p
        ) AS o
        WHERE w.finished_at IS NULL AND w.state = ANY(%s)
          AND least(w.deadline_at, w.ends_at) > %s AND f.workflow_id IS NULL AND o.requests > 0
        ORDER BY 3
        """,
        [now - promises.BELIEVED, _SENT, now],
    )
    found: list[Sequence[Any]] = cursor.fetchall()
    return found
