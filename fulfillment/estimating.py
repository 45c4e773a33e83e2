"""Estimates: what a submission would bring and cost, when it would end, whether in time.

The body is checked as a submission's is, with the same refusals, and nothing is stored but its
spool file, which goes with the call. A sample of a body is scaled up, which counts too many items:
where more rows are, more are equal.
"""

from datetime import datetime
from typing import Any

from fulfillment.clock import database_now
from fulfillment.costs import Servers
from fulfillment.demands import Takes
from fulfillment.errors import InvalidFields
from fulfillment.forecast import Forecaster
from fulfillment.intake import CALL_LIMIT_MARGIN, Body, Draft, WorkflowForm, drafted
from fulfillment.model_directory import model_directory
from fulfillment.models import RaterCost, RaterVersion, Role
from fulfillment.policy.eta import Job, Pace, rounded
from fulfillment.policy.priority import priority_class
from fulfillment.tally import Tally, count
from fulfillment.verdicts import Pool, Verdict, judge


def estimate(
    *,
    form: WorkflowForm,
    body: Body | None,
    owner: str,
    role: Role,
    forecaster: Forecaster,
    sample_of: int | None = None,
) -> dict[str, Any]:
    """Return what would become of a submission; refuse what would be refused.

    `sample_of` is how many rows the real one will have, of which these are a part.
    """
    with drafted(form=form, body=body, owner=owner, role=role) as draft:
        sent, refused, refused_count = Tally(), [], 0
        if (spool := draft.spool) is not None:
            sent = count(spool, draft, form)
            refused, refused_count = spool.refused, spool.refused_count
    tally = sent
    if sample_of is not None:
        tally = sent.scaled(_factor(sample_of, sent.rows + refused_count))
    now = database_now()
    model = model_directory().describe(draft.rater.model_id)
    is_chat = model is not None and model.protocol == "openai"
    pool = _pool(draft, Servers(model_directory(), now), is_chat=is_chat)
    verdict = judge(draft, form, owner, tally, pool, now)
    return {
        "rater": draft.rater.pk,
        "rater_version": _version_name(draft.version),
        "accepted": sent.rows,
        "rejected": [each.as_json() for each in refused],
        "rejected_count": refused_count,
        "warnings": sent.warnings,
        "sample_of": sample_of,
        "rows": tally.rows,
        "hits": tally.hits,
        "coalesced": tally.coalesced,
        "items": tally.items,
        "batches": tally.batches,
        "model_calls": tally.items if is_chat else tally.batches,
        "accelerator_seconds": _accelerator_seconds(tally, pool),
        "priority": draft.priority.score,
        "priority_reason": draft.priority.reason,
        "deadline_s": draft.deadline_s,
        "eta": _eta(draft, form, owner, tally, pool, verdict, forecaster, now),
        "feasible": verdict.feasible,
        "share_in_time": verdict.share,
        "reason": verdict.reason,
        "displaces": verdict.displaces,
        "remedies": list(verdict.remedies),
        "capacity": _capacity(pool),
        "at": now,
    }


def _factor(sample_of: int, sent: int) -> float:
    if sample_of < sent:
        detail = f"must be at least the {sent} rows that were sent"
        raise InvalidFields(
            f"sample_of {detail}.",
            errors=[{"field": "sample_of", "code": "out_of_range", "detail": detail}],
        )
    return sample_of / sent if sent else 0.0


def _version_name(version: RaterVersion) -> str | None:
    return f"{version.rater_id}@{version.number}" if version.number else None


def _pool(draft: Draft, servers: Servers, *, is_chat: bool) -> Pool | None:
    cost = RaterCost.objects.filter(pk=draft.rater.pk).first()
    if cost is None:
        return None
    spec = draft.version.spec
    reach = servers.reachable(spec["model_id"], spec["model_version"])
    takes = Takes(draft.rater, cost, servers=reach, is_chat=is_chat)
    batch_s = takes.batch_s(draft.batch_size)
    return Pool(
        cost=cost,
        servers=reach,
        are_calls=servers.are_calls(spec["model_id"]),
        batch_s=batch_s,
        unit_s=takes.batch_s(draft.rater.batch_size),
        can_grow=batch_s <= cost.seconds_a_request * draft.batch_size,
    )


def _accelerator_seconds(tally: Tally, pool: Pool | None) -> float | None:
    """Return what the workflow would count, None where nobody has told what a request takes."""
    if not tally.items:
        return 0.0
    a_request = pool.cost.device_seconds_a_request if pool else 0.0
    return round(tally.items * a_request, 3) if a_request else None


def _capacity(pool: Pool | None) -> dict[str, Any] | None:
    if pool is None:
        return None
    return {
        "servers": round(pool.servers, 2),
        "kind": "calls" if pool.are_calls else "replicas",
        "seconds_a_batch": round(pool.batch_s, 6),
        "batches_per_s": round(pool.servers / pool.batch_s, 3),
        "exact": pool.cost.exact,
        "measured_requests": pool.cost.requests,
        "measured_at": pool.cost.measured_at,
    }


def _eta(
    draft: Draft,
    form: WorkflowForm,
    owner: str,
    tally: Tally,
    pool: Pool | None,
    verdict: Verdict,
    forecaster: Forecaster,
    now: datetime,
) -> dict[str, int] | None:
    pace = None
    if pool and pool.servers:
        pace = Pace(
            per_s=pool.servers / pool.batch_s * draft.batch_size,
            seen=pool.cost.requests,
            lumps=pool.cost.requests / draft.batch_size,
        )
    # What does not fit is given up, and then all of it is served as best effort.
    is_cut = bool(pool and pool.servers) and verdict.feasible is False
    most_s = form.max_duration_s or draft.deadline_s + CALL_LIMIT_MARGIN.total_seconds()
    found = forecaster.would_end(
        Job(
            owner=owner,
            priority_class=priority_class(
                draft.priority.score, best_effort=form.best_effort or is_cut
            ),
            open_requests=tally.items,
        ),
        draft.rater.pk,
        otherwise=pace,
        most_s=most_s,
        now=now,
    )
    return None if found is None else dict(rounded(found, due_s=min(draft.deadline_s, most_s)))
