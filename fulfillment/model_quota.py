"""What of a rater could leave now, and what stands against it (named by AIRS_QUOTA_SOURCE).

Model management shows it to people. It is found as the dispatcher would find it, from what is
stored: live replicas, windows as the leader last wrote them, batches that are out, traffic rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from fulfillment import executors, present, windows
from fulfillment.errors import InvalidFields
from fulfillment.models import Rater, RaterCost, RaterVersion, Workflow
from fulfillment.policy import limits
from fulfillment.policy.lifecycle import DISPATCHED, WorkflowState
from fulfillment.policy.priority import DEFAULT_SCORE, PriorityClass, priority_class
from fulfillment.present import Present
from fulfillment.windows import Room


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why it is no more."""

    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What could leave; counts are in batches."""

    rater: str
    model: str
    model_version: str
    priority_class: str
    replicas: int
    calls_a_batch: int
    window: int
    held: int
    kept_for_high: int
    free: int
    """For whoever is most urgent."""
    granted: int
    """What would leave now, if so much were READY."""
    service_s: float | None
    """That a replica takes for a batch, as measured; of a chat model, that a call takes."""
    wait_s: float | None
    """Until what is held is worked off."""
    reasons: tuple[Reason, ...]


def quota(
    name: str,
    *,
    priority: int | None,
    workflow: str | None,
    owner: str | None,
    now: datetime,
) -> Quota | None:
    """Return what of a rater, or of one of its workflows, could leave now; None for no rater.

    With `owner`, only workflows of theirs are known. Raises InvalidFields for no such workflow.
    """
    rater = Rater.objects.select_related("current_version").filter(pk=name).first()
    if rater is None or rater.current_version is None:
        return None
    asked = None if workflow is None else _workflow(rater, workflow, owner)
    version = rater.current_version if asked is None else asked.rater_version
    cls = _class(priority, asked)
    rules, directory = present.rules(now)
    moment = Present(now, rules, directory)
    room = moment.room(rater, version, rater.batch_size if asked is None else asked.batch_size)
    traffic = _traffic(rater, version, cls, asked)
    met = limits.matched(rules, traffic)
    free, granted = room.batches(PriorityClass.HIGH), room.batches(cls)
    stops = [*_stops(rater, version, asked, now)]
    slots, _ = executors.live(now)
    slots_left = max(0, slots - moment.held.total)
    if not slots:
        stops.append(Reason(code="no_executor", detail="no executor is alive"))
    most, held_back = moment.may_leave(room, met, granted)
    service_s = _service_s(rater, room)
    return Quota(
        rater=rater.pk,
        model=traffic.model,
        model_version=version.spec["model_version"],
        priority_class=cls.name.lower(),
        replicas=len(room.replicas),
        calls_a_batch=room.calls_a_batch,
        window=room.window,
        held=room.held,
        kept_for_high=free - granted,
        free=free,
        granted=0 if stops else min(most, slots_left),
        service_s=service_s,
        wait_s=room.calls_held * service_s / room.servers if service_s and room.servers else None,
        reasons=(
            *stops,
            *_narrows(moment, room, cls, free - granted, slots_left),
            *(Reason(code="traffic_rule", detail=rule.words) for rule in held_back),
            *_pace(rater),
        ),
    )


def _workflow(rater: Rater, public_id: str, owner: str | None) -> Workflow:
    found = Workflow.objects.filter(public_id=public_id, rater=rater)
    if owner is not None:
        found = found.filter(owner=owner)
    workflow = found.select_related("rater_version").first()
    if workflow is None:
        detail = f"is none of rater {rater.pk} that you may see"
        raise InvalidFields(
            f"workflow {detail}.",
            errors=[{"field": "workflow", "code": "unknown_workflow", "detail": detail}],
        )
    return workflow


def _class(priority: int | None, workflow: Workflow | None) -> PriorityClass:
    if priority is not None:
        return priority_class(priority)
    if workflow is None:
        return priority_class(DEFAULT_SCORE)
    return priority_class(workflow.priority, best_effort=workflow.best_effort)


def _traffic(
    rater: Rater, version: RaterVersion, cls: PriorityClass, workflow: Workflow | None
) -> limits.Traffic:
    """Return what rules ask; without a workflow, only those hold that name nothing of it."""
    if workflow is not None:
        return present.traffic(workflow, cls)
    return limits.Traffic(
        rater=rater.pk,
        model=version.spec["model_id"],
        priority_class=cls.name.lower(),
        trigger="",
        purpose="",
        owner="",
        workflow="",
    )


def _stops(
    rater: Rater, version: RaterVersion, workflow: Workflow | None, now: datetime
) -> Iterator[Reason]:
    """Yield why nothing at all is sent."""
    if rater.paused_at is not None:
        why = f"{rater.paused_code}: {rater.paused_detail}".strip(": ")
        yield Reason(code="paused", detail=f"the rater is paused, {why}")
    if version.retired_at is not None:
        yield Reason(code="version_retired", detail=f"version {version.number} is retired")
    if workflow is None:
        return
    if workflow.state not in DISPATCHED:
        state = WorkflowState(workflow.state).name
        yield Reason(code="not_sent", detail=f"the workflow is {state}")
    elif workflow.due_at <= now:
        detail = f"nothing starts after {workflow.due_at:%Y-%m-%d %H:%M:%SZ}"
        yield Reason(code="deadline", detail=detail)


def _narrows(
    moment: Present, room: Room, cls: PriorityClass, kept: int, slots_left: int
) -> Iterator[Reason]:
    """Yield what makes the room smaller than its replicas could have it."""
    if not room.replicas:
        yield Reason(code="no_replica", detail="no replica that serves this version is ready")
    elif not room.batches(PriorityClass.HIGH):
        yield Reason(code="window_full", detail="all that its replicas may hold is out")
    elif kept:
        detail = f"{kept} free places are kept for more urgent work"
        yield Reason(code="kept_for_high", detail=detail)
    if slots_left < room.batches(cls):
        yield Reason(code="executors_busy", detail=f"executors have {slots_left} free slots")
    for replica in room.replicas:
        window = moment.windows.open.get(replica.key)
        if window is None or window.limits[cls] >= window.ceiling:
            continue
        if windows.reason_to_adapt(replica, isolated=room.isolated, now=moment.now):
            detail = f"{replica.key} has {int(window.limits[cls])} of {window.ceiling} calls"
            at = window.dropped_at[cls]
            since = f" since it was overloaded at {at:%H:%M:%SZ}" if at else ""
            yield Reason(code="backed_off", detail=detail + since)


def _pace(rater: Rater) -> Iterator[Reason]:
    if rater.max_qps is not None:
        detail = f"the rater starts {rater.max_qps:g} calls a second at most, whatever is granted"
        yield Reason(code="max_qps", detail=detail)


def _service_s(rater: Rater, room: Room) -> float | None:
    seconds = RaterCost.objects.filter(rater=rater).values_list("seconds_a_request", flat=True)
    found = seconds.first()
    if found is None:
        return None
    return found if room.calls_a_batch > 1 else found * rater.batch_size
