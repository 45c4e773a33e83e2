"""Whether a submission would be in time beside what is open, and what would make it so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fulfillment import demands
from fulfillment.commitments import MOST_ADMITTED
from fulfillment.demands import Line, Open
from fulfillment.intake import Draft, WorkflowForm
from fulfillment.models import RaterCost
from fulfillment.policy import commitments as policy
from fulfillment.policy import feasibility
from fulfillment.policy.priority import priority_class
from fulfillment.promises import BELIEVED
from fulfillment.raters import MAX_DEADLINE_S
from fulfillment.tally import Tally

MOST_LOOKED_AT = 5_000
"""Open workflows that a verdict is made beside."""
_NEWCOMER = 0
"""No workflow has that id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """What would serve a draft."""

    cost: RaterCost
    servers: float
    are_calls: bool
    """Whether servers are calls of an external model, not replicas."""
    batch_s: float
    """Replica-seconds of one of its batches."""
    unit_s: float
    """Of one of the rater's."""
    can_grow: bool
    """Whether more servers would do more: not where `max_qps` holds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether it would be in time."""

    feasible: bool | None
    """None: nobody knows."""
    share: float | None
    """Of its rows."""
    reason: str
    displaces: int = 0
    """Workflows that would be promised less for it."""
    remedies: Sequence[Mapping[str, Any]] = ()
    """Changes of which each alone makes it feasible."""


def judge(
    draft: Draft,
    form: WorkflowForm,
    owner: str,
    tally: Tally,
    pool: Pool | None,
    now: datetime,
) -> Verdict:
    """Return what would be forecast of a draft that came now."""
    rater = draft.rater
    if not tally.items:
        return Verdict(feasible=True, share=1.0, reason="no item is left for the model")
    if rater.paused_at is not None:
        return Verdict(
            feasible=False,
            share=tally.hits / tally.rows,
            reason=f"{rater.pk} is paused ({rater.paused_code}): nothing is sent until it resumes",
        )
    if pool is None:
        return Verdict(
            feasible=None,
            share=None,
            reason=f"{rater.pk} has rated nothing of late: nobody knows what a batch takes",
        )
    line = _line(draft, form, owner, tally, pool, now)
    share, reason, displaces = _said(line, now)
    return Verdict(
        feasible=share >= 1,
        share=share,
        reason=reason if pool.servers else f"nobody serves {rater.model_id} now",
        displaces=displaces,
        remedies=[] if share >= 1 else _remedies(draft, form, tally.rows, pool, line, now),
    )


def _line(
    draft: Draft, form: WorkflowForm, owner: str, tally: Tally, pool: Pool, now: datetime
) -> Line:
    """Return what is open, and behind it the draft."""
    others = demands.forecast_open(
        demands.served_by(draft.version), made_after=now - BELIEVED, now=now, most=MOST_LOOKED_AT
    )
    newcomer = Open(
        workflow_id=_NEWCOMER,
        owner=owner,
        priority_class=priority_class(draft.priority.score, best_effort=form.best_effort),
        deadline_at=now + timedelta(seconds=min(draft.deadline_s, _lasts_s(form))),
        batch_size=draft.batch_size,
        batch_s=pool.batch_s,
        received=tally.rows,
        unsent=tally.items / draft.batch_size,
    )
    return Line(opens=[*others, newcomer], servers=pool.servers, unit_s=pool.unit_s)


def _said(line: Line, now: datetime) -> tuple[float, str, int]:
    """Return the share, why, and how many others are cut, as the last of a line would hear it."""
    if len(line.opens) <= MOST_ADMITTED + 1:
        *others, ours = demands.say(
            line, lambda wanted, capacity: policy.admit(wanted, _NEWCOMER, capacity, now), now
        )
        return ours.share, ours.reason, sum(said.cut > said.of.cut for said in others)
    # Planning anew would take long: what surely fits.
    *wanted, newcomer = line.demands
    of = line.opens[-1]
    late = max(0.0, newcomer.wanted - feasibility.fitting(wanted, newcomer, line.capacity, now))
    share = demands.share_in_time(late=late * of.batch_size, rows=of.received)
    return share, f"{late:.1f} batches do not fit beside {len(wanted)} open workflows", 0


def _remedies(
    draft: Draft, form: WorkflowForm, rows: int, pool: Pool, line: Line, now: datetime
) -> list[dict[str, Any]]:
    *wanted, newcomer = line.demands
    few = len(wanted) <= MOST_ADMITTED
    found = feasibility.remedies(
        wanted,
        newcomer,
        line.capacity,
        now,
        rows=rows,
        longest_s=_lasts_s(form),
        can_grow=pool.can_grow,
        promised=feasibility.is_promised if few else feasibility.fits,
    )
    changes: list[dict[str, Any]] = []
    if found.deadline_s is not None:
        changes.append(_change("deadline_s", found.deadline_s, "a later deadline"))
    if found.servers is not None and pool.are_calls:
        changes.append(_change("calls", found.servers, "so many calls of its model at a time"))
    elif found.servers is not None:
        changes.append(_change("replicas", found.servers, "so many replicas, all in all"))
    if found.rows is not None:
        changes.append(_change("rows", found.rows, "fewer rows of this kind"))
    # What a rule would clip is no help.
    if found.priority is not None and found.priority <= draft.priority.ceiling:
        if form.best_effort and found.priority <= draft.priority.score:
            changes.append(_change("best_effort", False, "the class of its priority"))
        else:
            also = ", and not best effort" if form.best_effort else ""
            changes.append(_change("priority", found.priority, f"a higher class{also}"))
    return changes


def _lasts_s(form: WorkflowForm) -> int:
    """Return after how long it ends however late its deadline is."""
    return min(form.max_duration_s or MAX_DEADLINE_S, MAX_DEADLINE_S)


def _change(name: str, to: float, detail: str) -> dict[str, Any]:
    return {"change": name, "to": to, "detail": detail}
