"""Forecasts: how much of each open workflow is expected in time.

A workflow is forecast when it comes, right after its upload is taken in, and then each minute with
all others that its model serves. What does not fit before the deadlines is cut (as decided in
policy.commitments): the dispatcher serves it as best effort. A forecast is advice: nothing waits
for one, nothing is refused for one, and where nothing was measured yet there is none.

What a batch takes is learned in `costs`; what was said is kept in `promises`.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from django.db import DatabaseError, connection, transaction

from fulfillment import blocked, costs, demands, promises
from fulfillment.board import Standing
from fulfillment.costs import Servers
from fulfillment.demands import Line, Open, Takes
from fulfillment.forecast import Forecaster
from fulfillment.model_directory import model_directory
from fulfillment.models import (
    Rater,
    RaterCost,
    RaterVersion,
    Workflow,
    WorkflowForecast,
    WorkflowStats,
)
from fulfillment.policy import commitments as policy
from fulfillment.policy.eta import Forecast
from fulfillment.policy.lifecycle import DISPATCHED, BatchState
from fulfillment.policy.priority import priority_class
from fulfillment.promises import Statement

logger = logging.getLogger(__name__)

SERVICE = "commitments"
PERIOD = timedelta(seconds=60)
MOST_ADMITTED = 300
"""Where more workflows are open, a newcomer is forecast within the minute, not at once: planning
anew costs more with each."""
_CHUNK = 1_000

Looked = tuple[Standing, Forecast | None]
Etas = Mapping[bool, Mapping[str, int] | None]


def run_once(now: datetime) -> int:
    """Learn what work takes, settle what ended and forecast what is open; return rows written."""
    servers = Servers(model_directory(), now)
    learned = costs.learn(servers, now)
    return learned + promises.settle(now) + _renew(servers, now)


def admit(
    workflow: Workflow, *, pending: int, accepted: int, etas: Etas, now: datetime
) -> WorkflowForecast | None:
    """Forecast a workflow that has just come with so many items to rate, of rows accepted.

    `etas` has its ETA by whether some of it is given up. None if nothing is known or nothing is
    open; also if the database fails: the workflow is there, and the next minute has its forecast.
    """
    if not pending or workflow.state not in DISPATCHED:
        return None
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            # The client waits, and what is lost comes again within the minute.
            cursor.execute("SET LOCAL synchronous_commit = off")
            _admit(workflow, pending, accepted, etas, now)
            return promises.of([workflow.pk]).get(workflow.pk)
    except DatabaseError as error:
        logger.warning("no forecast", extra={"id": workflow.public_id, "error": str(error)})
        return None


def cost_of(rater: Rater, now: datetime) -> RaterCost | None:
    """Return what a rater's work takes, with servers counted of late; None if that is unknown."""
    return RaterCost.objects.filter(pk=rater.pk, looked_at__gt=now - promises.BELIEVED).first()


def _admit(
    workflow: Workflow,
    pending: int,
    accepted: int,
    etas: Etas,
    now: datetime,
) -> None:
    rater = workflow.rater
    cost = cost_of(rater, now)
    if cost is None or not cost.servers or rater.paused_at is not None:
        return
    if blocked.is_blocked(workflow, blocked.blocking(now)):
        return
    takes = Takes(rater, cost, servers=cost.servers, is_chat=is_chat(rater))
    name = demands.served_by(workflow.rater_version)
    others = demands.forecast_open(
        name,
        made_after=now - promises.BELIEVED,
        now=now,
        without=workflow.pk,
        most=MOST_ADMITTED + 1,
    )
    if len(others) > MOST_ADMITTED:
        return
    newcomer = Open(
        workflow_id=workflow.pk,
        owner=workflow.owner,
        priority_class=priority_class(workflow.priority, best_effort=workflow.best_effort),
        deadline_at=workflow.due_at,
        batch_size=workflow.batch_size,
        batch_s=takes.batch_s(workflow.batch_size),
        received=accepted,
        unsent=pending / workflow.batch_size,
    )
    line = Line(
        opens=[*others, newcomer], servers=cost.servers, unit_s=takes.batch_s(rater.batch_size)
    )
    *of_others, ours = demands.say(
        line, lambda wanted, capacity: policy.admit(wanted, workflow.pk, capacity, now), now
    )
    promises.cut([said for said in of_others if said.cut > said.of.cut])
    statement = Statement(
        said=ours,
        served_by=name,
        round=workflow.round,
        is_closed=workflow.closed_at is not None,
        eta=etas[ours.cut > 0] or {},
    )
    promises.store([statement], now)


def is_chat(rater: Rater) -> bool:
    """Say whether each item of a batch is a call, where that matters to what a batch takes."""
    if rater.max_qps is None:
        return False
    model = model_directory().describe(rater.model_id)
    return model is not None and model.protocol == "openai"


def _renew(servers: Servers, now: datetime) -> int:
    """Forecast all that is open; return how many."""
    known = {cost.pk: cost for cost in RaterCost.objects.select_related("rater")}
    kept_out = blocked.workflows(now)
    outlook = [
        (standing, eta)
        for standing, eta in Forecaster().outlook(now)
        if standing.rater_id in known
        and standing.open_requests
        and standing.due_at > now
        and standing.workflow_id not in kept_out
    ]
    versions = RaterVersion.objects.in_bulk({standing.version_id for standing, _ in outlook})
    groups: dict[str, list[Looked]] = defaultdict(list)
    for standing, eta in outlook:
        groups[demands.served_by(versions[standing.version_id])].append((standing, eta))
    stored = 0
    for name, members in groups.items():
        spec = versions[members[0][0].version_id].spec
        reach = servers.reachable(spec["model_id"], spec["model_version"])
        if reach > 0:
            chat = servers.protocol(spec["model_id"]) == "openai"
            takes = {
                cost.pk: Takes(cost.rater, cost, servers=reach, is_chat=chat)
                for cost in known.values()
            }
            own = dict.fromkeys((standing.workflow_id for standing, _ in members), 1.0)
            if servers.are_calls(spec["model_id"]):
                own |= _own(members, known)
            stored += _renew_group(name, members, takes, own, reach, now)
    return stored


def _renew_group(
    name: str,
    members: Sequence[Looked],
    takes: Mapping[str, Takes],
    own: Mapping[int, float],
    servers: float,
    now: datetime,
) -> int:
    before = promises.of(standing.workflow_id for standing, _ in members)
    opens = [
        _open(
            standing,
            before.get(standing.workflow_id),
            takes[standing.rater_id].batch_s(standing.batch_size) * own[standing.workflow_id],
        )
        for standing, _ in members
    ]
    first = members[0][0]
    line = Line(
        opens=opens, servers=servers, unit_s=takes[first.rater_id].batch_s(first.batch_size)
    )
    said = demands.say(line, lambda wanted, capacity: policy.renew(wanted, capacity, now), now)
    statements = [
        Statement(
            said=each,
            served_by=name,
            round=standing.round,
            is_closed=standing.closed_at is not None,
            eta={"seconds": eta.seconds, "low": eta.low, "high": eta.high} if eta else {},
        )
        for each, (standing, eta) in zip(said, members, strict=True)
    ]
    for start in range(0, len(statements), _CHUNK):
        promises.store(statements[start : start + _CHUNK], now)
    return len(statements)


def _own(members: Sequence[Looked], known: Mapping[str, RaterCost]) -> dict[int, float]:
    """Return what the requests of workflows of an external model take in times of their rater's."""
    standings = {standing.workflow_id: standing for standing, _ in members}
    rows = WorkflowStats.objects.filter(pk__in=standings).values_list(
        "pk", "accelerator_seconds", "completed", "from_archive", "failed"
    )
    return {
        pk: costs.own(
            known[standings[pk].rater_id],
            call_seconds=call_seconds,
            requests=completed - from_archive + failed,
            batch_size=standings[pk].batch_size,
        )
        for pk, call_seconds, completed, from_archive, failed in rows
    }


def _open(standing: Standing, before: WorkflowForecast | None, batch_s: float) -> Open:
    leased = standing.out.get(BatchState.LEASED, 0)
    return Open(
        workflow_id=standing.workflow_id,
        owner=standing.owner,
        priority_class=standing.priority_class,
        deadline_at=standing.due_at,
        batch_size=standing.batch_size,
        batch_s=batch_s,
        received=standing.received,
        unsent=max(0.0, standing.open_requests / standing.batch_size - leased),
        in_flight=leased,
        cut=before.cut_batches if before and before.round == standing.round else 0.0,
    )
