"""The ETA of workflows: what policy.eta makes of the queue as it stands.

A process looks at the queue once in two seconds for all who ask; the counts of the workflow itself
are those that the caller has just read. What was given up counts as best effort: so it is served.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from fulfillment import board, promises
from fulfillment.board import Fold, Standing
from fulfillment.models import QueueSample, Rater, Workflow
from fulfillment.policy import eta
from fulfillment.policy.eta import Field, Forecast, Job, Pace
from fulfillment.policy.lifecycle import DISPATCHED
from fulfillment.policy.priority import PriorityClass, priority_class

LOOK_EVERY = timedelta(seconds=2)
WORKFLOWS_A_SECOND = 1_000
"""A look at so many workflows serves a second longer: looking must not become the load."""
_REMEMBERED = 20
"""Samples of a rater at work that tell its pace when nothing of it moves now."""


@dataclass(kw_only=True, slots=True)
class _Look:
    """The queue at a moment, by rater, and what was asked about it since."""

    at: datetime
    until: datetime
    standings: Mapping[int, Standing]
    by_rater: Mapping[str, Sequence[Standing]]
    folds: Mapping[str, Sequence[Fold]]
    paused: frozenset[str]
    cuts: Container[int]
    """Workflows of which some is given up."""
    fields: dict[str, Field] = field(default_factory=dict)
    paces: dict[str, Pace | None] = field(default_factory=dict)


class Forecaster:
    """Answers for one process; keeps its last look at the queue."""

    def __init__(self) -> None:
        self._look: _Look | None = None

    def eta(
        self,
        workflow: Workflow,
        progress: Mapping[str, Any],
        *,
        now: datetime,
        is_cut: bool | None = None,
    ) -> dict[str, int] | None:
        """Return when a workflow ends, None while nothing is known or nothing of it is sent.

        `progress` is the document of fulfillment.progress. `is_cut`: whether some of it is given
        up, where the caller knows that better than the last look at the queue.
        """
        if workflow.state not in DISPATCHED:
            return None
        look = self._look_at(now)
        if workflow.rater_id in look.paused:
            return None
        counts, retry_at = progress["counts"], progress["retry_at"]
        if is_cut is None:
            is_cut = workflow.pk in look.cuts
        cls = priority_class(workflow.priority, best_effort=workflow.best_effort or is_cut)
        mine = look.standings.get(workflow.pk)
        found = eta.forecast(
            Job(
                owner=workflow.owner,
                priority_class=cls,
                open_requests=counts["pending"] + counts["running"] + counts["retrying"],
            ),
            _field(look, workflow.rater_id),
            listed=_job(mine, look) if mine and not mine.paused else None,
            own_pace=_own_pace(mine, look.at) if mine else None,
            rater_pace=_rater_pace(look, workflow.rater_id),
            retry_in_s=(retry_at - now).total_seconds() if retry_at else 0.0,
            most_s=(workflow.ends_at - now).total_seconds(),
        )
        if found is None:
            return None
        return dict(eta.rounded(found, due_s=(workflow.due_at - now).total_seconds()))

    def would_end(
        self, job: Job, rater_id: str, *, otherwise: Pace | None, most_s: float, now: datetime
    ) -> Forecast | None:
        """Return when work ends that is not there yet.

        `otherwise` is the pace where nothing is seen or remembered of the rater's.
        """
        look = self._look_at(now)
        if rater_id in look.paused:
            return None
        pace = _rater_pace(look, rater_id)
        return eta.forecast(
            job,
            _field(look, rater_id),
            own_pace=None,
            rater_pace=pace if pace and pace.seen >= eta.LEAST_SEEN else otherwise,
            most_s=most_s,
        )

    def outlook(self, now: datetime) -> list[tuple[Standing, Forecast | None]]:
        """Return all workflows that are sent, with when they end; those of paused raters apart.

        Planned retries, which the queue does not know, are not looked at.
        """
        look = self._look_at(now)
        return [
            (
                standing,
                eta.forecast(
                    _job(standing, look),
                    _field(look, standing.rater_id),
                    listed=_job(standing, look),
                    own_pace=_own_pace(standing, look.at),
                    rater_pace=_rater_pace(look, standing.rater_id),
                    most_s=(standing.ends_at - now).total_seconds(),
                ),
            )
            for standing in look.standings.values()
            if not standing.paused and standing.rater_id not in look.paused
        ]

    def _look_at(self, now: datetime) -> _Look:
        look = self._look
        if look is None or not look.at <= now < look.until:
            found = board.standings(now)
            by_rater: dict[str, list[Standing]] = {}
            for standing in found:
                by_rater.setdefault(standing.rater_id, []).append(standing)
            paused = Rater.objects.filter(paused_at__isnull=False).values_list("pk", flat=True)
            look = self._look = _Look(
                at=now,
                until=now + LOOK_EVERY + timedelta(seconds=len(found) / WORKFLOWS_A_SECOND),
                standings={standing.workflow_id: standing for standing in found},
                by_rater=by_rater,
                folds=board.folds(now),
                paused=frozenset(paused),
                cuts=promises.cuts(now),
            )
        return look


def _field(look: _Look, rater_id: str) -> Field:
    if rater_id not in look.fields:
        standings = look.by_rater.get(rater_id, ())
        look.fields[rater_id] = eta.arrange(_job(s, look) for s in standings if not s.paused)
    return look.fields[rater_id]


def _rater_pace(look: _Look, rater_id: str) -> Pace | None:
    if rater_id not in look.paces:
        standings = look.by_rater.get(rater_id, ())
        pace = _pace(standings, look.folds.get(rater_id, ()), look.at)
        if pace is None or pace.seen < eta.LEAST_SEEN:
            pace = _remembered_pace(rater_id)
        look.paces[rater_id] = pace
    return look.paces[rater_id]


def _job(standing: Standing, look: _Look) -> Job:
    is_cut = standing.workflow_id in look.cuts
    return Job(
        owner=standing.owner,
        priority_class=PriorityClass.BEST_EFFORT if is_cut else standing.priority_class,
        open_requests=standing.open_requests,
    )


def _own_pace(of: Standing, now: datetime) -> Pace | None:
    """Return how fast work of a workflow ended since its first dispatch, within the window."""
    if of.started_at is None or of.started_at >= now:
        return None
    elapsed_s = min(now - of.started_at, board.PACE_WINDOW).total_seconds()
    seen = of.worked + of.worked_since
    return Pace(per_s=seen / elapsed_s, seen=seen, lumps=seen / of.batch_size)


def _pace(of: Sequence[Standing], folds: Sequence[Fold], now: datetime) -> Pace | None:
    """Return how fast a rater works since the oldest of what it works on was dispatched.

    Before that it may have been idle, which says nothing of what it can do.
    """
    started = [standing.started_at for standing in of if standing.started_at]
    if not started:
        return None
    start = max(min(started), now - board.PACE_WINDOW)
    if start >= now:
        return None
    counted = [fold for fold in folds if fold.at > start]
    since = sum(standing.worked_since for standing in of)
    seen = since + sum(fold.worked for fold in counted)
    return Pace(
        per_s=seen / (now - start).total_seconds(),
        seen=seen,
        lumps=sum(fold.batches for fold in counted)
        + sum(standing.worked_since / standing.batch_size for standing in of),
    )


def _remembered_pace(rater_id: str) -> Pace | None:
    """Return the pace of a rater when it last had more to do than it could."""
    rows = QueueSample.objects.filter(rater_id=rater_id, ready__gt=0, worked__gt=0).order_by("-at")
    samples = list(rows.values_list("worked", "period_s", "model_calls")[:_REMEMBERED])
    seconds = sum(period_s for _, period_s, _ in samples)
    if not seconds:
        return None
    seen = sum(worked for worked, _, _ in samples)
    return Pace(
        per_s=seen / seconds, seen=seen, lumps=float(max(1, sum(calls for *_, calls in samples)))
    )
