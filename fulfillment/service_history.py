"""What the service did in a span of time: workflows that ended in it, and work of its raters.

Read in pages by key, from rows of which there is one a workflow, and from samples of the queue:
never from requests or batches.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from django.db import connection

from fulfillment.models import Rater, Workflow
from fulfillment.policy.lifecycle import WorkflowState

_PAGE = 10_000


class EndedWorkflow(NamedTuple):
    """One workflow that ended: its last round, and the requests of all its rounds.

    A tuple, as there may be hundreds of thousands.
    """

    id: int
    finished_at: datetime
    accepted_at: datetime
    rater_id: str
    owner: str
    priority: int
    best_effort: bool
    batch_size: int
    latency_s: float
    """From when it was accepted until its last request ended; 0 for one without requests."""
    allowed_s: float
    """Until its deadline."""
    requests: int
    """Without those that were cancelled."""
    from_archive: int
    coalesced: int
    from_model: int
    failed: int
    timed_out: int
    model_calls: int
    attempts: int
    """Tries of batches that an executor started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaterWork:
    """What a rater had computed in a span."""

    rater_id: str
    worked: int
    """Requests that were rated or failed, archive hits apart."""
    call_s: float
    """Seconds of all calls together, waits in a server's queue included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Workflows of a span that figures of ended ones leave out."""

    cancelled: int
    open: int
    """Accepted, and not ended by the end of the span."""


def ended(
    since: datetime, until: datetime, *, without: Collection[str] = ()
) -> Iterator[EndedWorkflow]:
    """Yield workflows that ended after `since` and by `until`, in that order.

    Those that were cancelled, and those of owners in `without`, are left out.
    """
    after = since, 1 << 62
    while page := _page(after, until, without):
        yield from page
        after = page[-1].finished_at, page[-1].id


def left_out(since: datetime, until: datetime, *, without: Collection[str] = ()) -> LeftOut:
    """Count the workflows of a span that `ended` does not yield."""
    others = Workflow.objects.exclude(owner__in=without)
    ended_in = others.filter(finished_at__gt=since, finished_at__lte=until)
    unfinished = others.filter(finished_at__isnull=True, created_at__lte=until)
    return LeftOut(
        cancelled=ended_in.filter(state=WorkflowState.CANCELLED).count(),
        open=unfinished.exclude(state=WorkflowState.RECEIVING).count(),
    )


def work(since: datetime, until: datetime) -> list[RaterWork]:
    """Return what each rater had computed, as sampled with the queue."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT rater_id, sum(worked)::bigint, sum(accelerator_seconds)
            FROM fulfillment_queuesample JOIN fulfillment_rater r ON r.id = rater_id
            WHERE at > %s AND at <= %s GROUP BY 1 ORDER BY 1
            """,
            [since, until],
        )
        return [
            RaterWork(rater_id=rater_id, worked=worked, call_s=call_s)
            for rater_id, worked, call_s in cursor.fetchall()
        ]


def calls_by_hour(since: datetime, until: datetime) -> dict[datetime, int]:
    """Return the model calls of each hour of the clock (UTC) that was sampled."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT date_trunc('hour', at, 'UTC'), sum(model_calls)::bigint
            FROM fulfillment_queuesample WHERE at > %s AND at <= %s GROUP BY 1
            """,
            [since, until],
        )
        return dict(cursor.fetchall())


def models() -> dict[str, str]:
    """Return the model that each rater is bound to."""
    return dict(Rater.objects.values_list("id", "model_id"))


def _page(
    after: tuple[datetime, int], until: datetime, without: Collection[str]
) -> list[EndedWorkflow]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT w.id, w.finished_at, coalesce(w.round_at, w.created_at), w.rater_id, w.owner,
                   w.priority, w.best_effort, w.batch_size,
                   coalesce(extract(epoch FROM s.last_result_at
                                               - coalesce(w.round_at, w.created_at)), 0)::float8,
                   extract(epoch FROM w.deadline_at - coalesce(w.round_at, w.created_at))::float8,
                   s.received - s.cancelled, s.from_archive, s.coalesced, s.from_model, s.failed,
                   s.timed_out, s.model_calls, s.attempts
            FROM fulfillment_workflow w JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
            WHERE (w.finished_at, w.id) > (%s, %s) AND w.finished_at <= %s
              AND w.state <> %s AND w.owner <> ALL(%s)
            ORDER BY w.finished_at, w.id LIMIT %s
            """,
            [*after, until, WorkflowState.CANCELLED, list(without), _PAGE],
        )
        return [EndedWorkflow(*row) for row in cursor.fetchall()]
