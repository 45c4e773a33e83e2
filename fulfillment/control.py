"""Acts of clients upon a workflow; each may be repeated, and each survives a kill half-way.

An act is one row, written under the workflow's lock: what it leads to from which state says
`lifecycle.act_upon`. What has to be done to requests and batches then is done in chunks, some of
it within the call, so that small workflows are over when it answers, and the rest by the checker.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction

from fulfillment import bell, completion, ending, priority_rules, rounds
from fulfillment.clock import database_now
from fulfillment.errors import Conflict, InvalidFields
from fulfillment.models import RaterVersion, Role, Upload, Workflow
from fulfillment.policy.lifecycle import (
    STARTED,
    Act,
    EndingReason,
    Refusal,
    WorkflowState,
    act_upon,
)

logger = logging.getLogger(__name__)

DONE_IN_CALL = 5_000
"""Items that an act ends or opens within the call; the checker does the rest."""
UPLOAD_SILENCE = timedelta(seconds=60)

_REFUSALS = {
    Refusal.FINISHED: "has ended as {state}",
    Refusal.ENDING: "is being wound up ({reason}); wait until it has ended",
    Refusal.UNFINISHED: "is {state}; it can be retried when it has ended",
    Refusal.REOPENING: "is being opened for round {round}; try again in a moment",
}


def close(*, workflow_id: int, actor: str = "") -> Workflow:
    """Take no more rows; complete at once if nothing is open. Closing twice is harmless."""
    with transaction.atomic():
        workflow = ending.locked(workflow_id)
        if workflow.closed_at is None:
            now = database_now()
            if _has_upload(workflow, now):
                raise Conflict(
                    "rows are being taken in; close it when that upload has ended",
                    code="upload_in_progress",
                )
            workflow.closed_at = now
            if workflow.state == WorkflowState.OPEN:
                workflow.state = WorkflowState.RUNNING
            workflow.save(update_fields=["closed_at", "state"])
            _audit("closed", workflow, actor)
    completion.check(workflow_id)
    return _shown(workflow_id)


def pause(*, workflow_id: int, actor: str = "") -> Workflow:
    """Send nothing of a workflow until it is resumed; what was started ends.

    Deadline and max duration go on. Raises Conflict `already_finished`, `workflow_ending`,
    `workflow_reopening`.
    """
    with transaction.atomic():
        workflow = ending.locked(workflow_id)
        if _move(workflow, Act.PAUSE):
            workflow.save(update_fields=["state"])
            _audit("paused", workflow, actor)
    bell.ring()
    return _shown(workflow_id)


def resume(*, workflow_id: int, actor: str = "") -> Workflow:
    """Send of a workflow again. Raises Conflict `already_finished`, `workflow_ending`."""
    with transaction.atomic():
        workflow = ending.locked(workflow_id)
        if _move(workflow, Act.RESUME):
            workflow.save(update_fields=["state"])
            _audit("resumed", workflow, actor)
    bell.ring()
    return _shown(workflow_id)


def cancel(*, workflow_id: int, actor: str = "") -> Workflow:
    """End a workflow now; finished work is kept. Cancelling twice is harmless.

    Raises Conflict `already_finished` when it had ended by itself.
    """
    return _end(workflow_id, Act.CANCEL, EndingReason.CANCELLED, actor)


def complete(*, workflow_id: int, actor: str = "") -> Workflow:
    """End a workflow now, as what its requests say; those that are open are not awaited.

    Completing twice is harmless, and so is completing what has ended by itself. Raises Conflict
    `already_finished` when it was cancelled.
    """
    return _end(workflow_id, Act.COMPLETE, EndingReason.FORCED, actor)


def retry(*, workflow_id: int, key: str | None = None, actor: str = "") -> Workflow:
    """Rate in a new round what did not complete, with the time that the workflow had at first.

    While a round made by a retry runs, another one changes nothing; nor does, at any time, one with
    the Idempotency-Key of the last. Raises Conflict `already_finished`, `workflow_unfinished`,
    `workflow_ending`, `version_retired`, `payload_gone`; then nothing is changed.
    """
    with transaction.atomic():
        workflow = ending.locked(workflow_id)
        replayed = bool(key) and workflow.retry_key == key
        state = WorkflowState(workflow.state)
        if not replayed and _target(workflow, Act.RETRY) is not state:
            rounds.begin(workflow, now=database_now(), key=key or "")
            _audit("retried", workflow, actor)
    rounds.reopen(workflow_id, most_rows=DONE_IN_CALL)
    completion.check(workflow_id)
    bell.ring()
    return _shown(workflow_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What may be changed while a workflow is worked on; None leaves it."""

    name: str | None = None
    priority: int | None = None
    deadline_s: int | None = None
    """From when the round was accepted, as in the form."""


def change(
    *,
    workflow_id: int,
    changes: Changes,
    now: datetime,
    actor: str = "",
    role: Role = Role.SUBMITTER,
) -> Workflow:
    """Change name, priority or deadline: one row, which the dispatcher's next pass goes by.

    A priority is what the rules give to the actor's `role`, whoever owns the workflow.
    What has been sent stays sent. The max duration keeps its distance to the deadline unless it was
    chosen below it. Raises Conflict `already_finished`, `workflow_ending` (a name may always be
    changed), InvalidFields `deadline_passed`.
    """
    with transaction.atomic():
        workflow = ending.locked(workflow_id)
        if changes.priority is not None or changes.deadline_s is not None:
            _refuse_unless_worked_on(workflow)
        if changes.name is not None:
            workflow.name = changes.name
        if changes.priority is not None:
            _set_priority(workflow, changes.priority, role, now)
        if changes.deadline_s is not None:
            _move_deadline(workflow, timedelta(seconds=changes.deadline_s), now)
        workflow.save(
            update_fields=[
                *("name", "priority", "priority_asked", "priority_reason"),
                *("deadline_at", "ends_at"),
            ]
        )
        _audit("changed", workflow, actor)
    bell.ring()
    return _shown(workflow_id)


def retire(*, version: RaterVersion, now: datetime, actor: str = "") -> RaterVersion:
    """End what waits for an old rater version: FAILED `version_retired`; started tries go on.

    Retiring twice is harmless. Raises Conflict `version_current`: new workflows would be pinned to
    it. What is not ended within the call is ended by the checker.
    """
    with transaction.atomic():
        locked = RaterVersion.objects.select_for_update().select_related("rater").get(pk=version.pk)
        if locked.rater.current_version_id == locked.pk:
            raise Conflict(
                f"{locked} is the current version; change the rater first, or pause it",
                code="version_current",
            )
        if locked.retired_at is None:
            locked.retired_at = now
            locked.save(update_fields=["retired_at"])
            logger.info("rater_version_retired id=%s by=%s", locked, actor or "system")
    unfinished = Workflow.objects.filter(
        rater_version=locked, finished_at=None, state__in=STARTED
    ).values_list("pk", flat=True)
    left = DONE_IN_CALL
    for workflow_id in list(unfinished):
        if left > 0:
            left -= ending.pass_retirement(workflow_id, now=now, most_items=left)
            completion.check(workflow_id)
    return locked


def _end(workflow_id: int, act: Act, reason: EndingReason, actor: str) -> Workflow:
    with transaction.atomic():
        workflow = ending.locked(workflow_id)
        if _target(workflow, act) is not WorkflowState(workflow.state):
            ending.begin_locked(workflow, reason, database_now())
            _audit(reason.value, workflow, actor)
    # Its room is for others now, also where the dispatcher believes what it read before.
    bell.ring()
    ending.sweep(workflow_id, most_items=DONE_IN_CALL)
    completion.check(workflow_id)
    return _shown(workflow_id)


def _target(workflow: Workflow, act: Act) -> WorkflowState:
    """Return the state that an act leads to; raise Conflict where it is refused."""
    target = act_upon(
        act,
        WorkflowState(workflow.state),
        is_closed=workflow.closed_at is not None,
        round=workflow.round,
    )
    if isinstance(target, Refusal):
        raise _refused(workflow, target)
    return target


def _refused(workflow: Workflow, refusal: Refusal) -> Conflict:
    detail = _REFUSALS[refusal].format(
        state=WorkflowState(workflow.state).name,
        reason=workflow.ending_reason,
        round=workflow.round,
    )
    return Conflict(f"workflow {workflow.public_id} {detail}", code=refusal.value)


def _move(workflow: Workflow, act: Act) -> bool:
    """Set the state that an act leads to; say whether it is another one."""
    before, workflow.state = workflow.state, _target(workflow, act)
    return workflow.state != before


def _refuse_unless_worked_on(workflow: Workflow) -> None:
    if workflow.finished_at is not None:
        raise _refused(workflow, Refusal.FINISHED)
    if workflow.state == WorkflowState.ENDING:
        raise _refused(workflow, Refusal.ENDING)


def _set_priority(workflow: Workflow, asked: int, role: Role, now: datetime) -> None:
    decision = priority_rules.decide(
        asked=asked,
        trigger=workflow.trigger,
        purpose=workflow.purpose,
        role=role,
        owner=workflow.owner,
        version=workflow.rater_version,
        now=now,
    )
    workflow.priority = decision.score
    workflow.priority_asked = decision.asked
    workflow.priority_reason = decision.reason


def _move_deadline(workflow: Workflow, span: timedelta, now: datetime) -> None:
    deadline_at = workflow.accepted_at + span
    if deadline_at <= now:
        detail = "is over already; complete or cancel the workflow to end it"
        accepted_at = f"{workflow.accepted_at:%Y-%m-%d %H:%M:%SZ}"
        raise InvalidFields(
            f"deadline_s: {span.total_seconds():.0f} s after {accepted_at} {detail}.",
            code="deadline_passed",
            errors=[{"field": "deadline_s", "code": "deadline_passed", "detail": detail}],
        )
    if workflow.ends_at >= workflow.deadline_at:
        workflow.ends_at += deadline_at - workflow.deadline_at
    workflow.deadline_at = deadline_at


def _has_upload(workflow: Workflow, now: datetime) -> bool:
    return Upload.objects.filter(
        workflow=workflow,
        finished_at=None,
        heartbeat_at__gt=now - UPLOAD_SILENCE,
    ).exists()


def _shown(workflow_id: int) -> Workflow:
    return Workflow.objects.select_related("rater", "rater_version").get(pk=workflow_id)


def _audit(action: str, workflow: Workflow, actor: str) -> None:
    logger.info("workflow_%s id=%s by=%s", action, workflow.public_id, actor or "system")
