"""The queue as it stands: each workflow's open work, and what of it is out, by rater and class.

Read from counters, not from the backlog: stats and unfolded deltas of the unfinished workflows, and
the batches that are out, delayed or waiting, which have small indexes. So a look costs the same
with a million batches READY as with none; what is READY is what the counters leave.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction

from fulfillment.policy import distributions
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from fulfillment.policy.priority import PriorityClass, priority_class

MOST_COUNTED = 20_000
"""Batches WAITING, and DELAYED, that are counted one by one, of all raters together."""
PACE_WINDOW = timedelta(seconds=90)
"""How far back the pace of work is looked at."""

# One statement, so that a fold in between counts nothing twice, and no join of what is summed up:
# the planner takes such sums for a handful of rows and loops over them.
_WORK = """
    SELECT w.id, s.received - s.completed - s.failed - s.timed_out - s.cancelled, 0, 0, s.received,
           w.rater_id, w.owner, w.priority, w.best_effort, w.state, w.batch_size, w.created_at,
           w.started_at, w.rater_version_id, w.round, w.closed_at, w.deadline_at,
           w.ends_at
    FROM fulfillment_workflow w JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
    WHERE w.finished_at IS NULL AND w.state = ANY(%(states)s)
    UNION ALL
    SELECT workflow_id, sum(received - completed - failed - timed_out - cancelled)::bigint, 0,
           sum(greatest(completed - from_archive + failed, 0))::bigint, sum(received)::bigint,
           NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM fulfillment_statsdelta GROUP BY workflow_id
    UNION ALL
    SELECT workflow_id, 0, sum(worked)::bigint, 0, 0,
           NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM fulfillment_flow WHERE at > %(since)s GROUP BY workflow_id
"""
_OUT = f"""
    SELECT workflow_id, state, count(*) FROM (
        (SELECT workflow_id, state FROM fulfillment_batch WHERE state = 1
         ORDER BY id LIMIT {MOST_COUNTED})
        UNION ALL
        (SELECT workflow_id, state FROM fulfillment_batch WHERE state = 2
         ORDER BY id LIMIT {MOST_COUNTED})
        UNION ALL
        (SELECT workflow_id, state FROM fulfillment_batch WHERE state = 3
         ORDER BY not_before LIMIT {MOST_COUNTED})
    ) AS b GROUP BY workflow_id, state
"""
_STATES = [WorkflowState.OPEN, WorkflowState.RUNNING, WorkflowState.PAUSED]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One unfinished workflow: what of it is open, and what of it ended by work of late."""

    workflow_id: int
    rater_id: str
    version_id: int
    owner: str
    priority_class: PriorityClass
    paused: bool
    batch_size: int
    round: int
    accepted_at: datetime
    started_at: datetime | None
    closed_at: datetime | None
    due_at: datetime
    """Its deadline, or its max duration if that comes first."""
    ends_at: datetime
    received: int
    open_requests: int
    worked: int
    """In the PACE_WINDOW before the look, up to the last fold."""
    worked_since: int
    """Since the last fold."""
    out: Mapping[BatchState, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """What a fold, or several at one moment, added to the work of a rater."""

    at: datetime
    worked: int
    batches: float
    """That it would fill: work comes in lumps of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Depth:
    """The queue of one rater and class. Ages count from when the workflow was accepted."""

    rater_id: str
    priority_class: PriorityClass
    ready: int = 0
    """Derived: batches that the open requests fill, without those in the other states."""
    leased: int = 0
    delayed: int = 0
    waiting: int = 0
    workflows: int = 0
    open_requests: int = 0
    paused_requests: int = 0
    oldest_s: float | None = None
    """Of the workflows with READY batches: what waits for a retry says nothing of the queue."""
    age_p50_s: float | None = None
    age_p90_s: float | None = None
    age_p99_s: float | None = None


def standings(now: datetime) -> list[Standing]:
    """Return all workflows that take part in the queue, paused ones included."""
    out: dict[int, dict[BatchState, int]] = defaultdict(dict)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            _WORK, {"since": now - PACE_WINDOW, "states": [int(state) for state in _STATES]}
        )
        rows = cursor.fetchall()
        # Statistics of tables that fill and empty within seconds are always old; with them the
        # planner would scan all batches for the few that are out.
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(_OUT)
        for workflow_id, state, count in cursor.fetchall():
            out[workflow_id][BatchState(state)] = count
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for workflow_id, *added in (row[:5] for row in rows):
        sums[workflow_id] = [a + b for a, b in zip(sums[workflow_id], added, strict=True)]
    return [_standing(row, sums[row[0]], out.get(row[0], {})) for row in rows if row[5] is not None]


def folds(now: datetime) -> dict[str, list[Fold]]:
    """Return what ended by work in the PACE_WINDOW, by rater, of finished workflows too."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT w.rater_id, f.at, sum(f.worked), sum(f.worked::float8 / w.batch_size)
            FROM fulfillment_flow f JOIN fulfillment_workflow w ON w.id = f.workflow_id
            WHERE f.at > %s AND f.worked > 0 GROUP BY 1, 2
            """,
            [now - PACE_WINDOW],
        )
        found: dict[str, list[Fold]] = defaultdict(list)
        for rater_id, at, worked, batches in cursor.fetchall():
            found[rater_id].append(Fold(at=at, worked=int(worked), batches=batches))
    return found


def depths(found: Iterable[Standing], now: datetime) -> list[Depth]:
    """Return the queue by rater and class, those with nothing open left out."""
    groups: dict[tuple[str, PriorityClass], list[Standing]] = defaultdict(list)
    for standing in found:
        if standing.open_requests or standing.out:
            groups[standing.rater_id, standing.priority_class].append(standing)
    return [_depth(*key, groups[key], now) for key in sorted(groups)]


def _standing(row: Sequence[Any], sums: Sequence[int], out: Mapping[BatchState, int]) -> Standing:
    rater_id, owner, priority, best_effort, state, batch_size, accepted_at, started_at = row[5:13]
    version_id, round_, closed_at, deadline_at, ends_at = row[13:]
    open_requests, worked, worked_since, received = sums
    return Standing(
        workflow_id=row[0],
        rater_id=rater_id,
        version_id=version_id,
        owner=owner,
        priority_class=priority_class(priority, best_effort=best_effort),
        paused=state == WorkflowState.PAUSED,
        batch_size=batch_size,
        round=round_,
        accepted_at=accepted_at,
        started_at=started_at,
        closed_at=closed_at,
        due_at=min(deadline_at, ends_at),
        ends_at=ends_at,
        received=received,
        open_requests=max(0, open_requests),
        worked=worked,
        worked_since=worked_since,
        out=out,
    )


def _depth(rater_id: str, cls: PriorityClass, of: Sequence[Standing], now: datetime) -> Depth:
    queued = [standing for standing in of if not standing.paused]
    ages: dict[float, int] = defaultdict(int)
    oldest_s: float | None = None
    ready = 0
    for standing in queued:
        age_s = max(0.0, (now - standing.accepted_at).total_seconds())
        ages[age_s] += standing.open_requests
        if own := _ready(standing):
            ready += own
            oldest_s = max(age_s, oldest_s or 0.0)
    open_requests = sum(ages.values())
    p50, p90, p99 = distributions.quantiles(ages) if open_requests else (None, None, None)
    out = {state: sum(s.out.get(state, 0) for s in of) for state in BatchState}
    return Depth(
        rater_id=rater_id,
        priority_class=cls,
        ready=ready,
        leased=out[BatchState.LEASED],
        delayed=out[BatchState.DELAYED],
        waiting=out[BatchState.WAITING],
        workflows=sum(standing.open_requests > 0 for standing in queued),
        open_requests=open_requests,
        paused_requests=sum(s.open_requests for s in of if s.paused),
        oldest_s=oldest_s,
        age_p50_s=p50,
        age_p90_s=p90,
        age_p99_s=p99,
    )


def _ready(standing: Standing) -> int:
    filled = -(-standing.open_requests // standing.batch_size)
    return max(0, filled - sum(standing.out.values()))
