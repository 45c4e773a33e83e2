"""Reading a workflow's progress: stats plus the deltas not yet folded, in one snapshot."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import connection

from fulfillment.models import PROGRESS_FIELDS, Workflow
from fulfillment.policy.lifecycle import WorkflowState

_ENDED = "completed + failed + timed_out + cancelled > 0"
_ADDED = ", ".join(
    (
        *(f"sum({name}) AS {name}" for name in PROGRESS_FIELDS),
        f"min(added_at) FILTER (WHERE {_ENDED}) AS first_result_at",
        f"max(added_at) FILTER (WHERE {_ENDED}) AS last_result_at",
    )
)
_SUMS = ", ".join(
    (
        *(f"s.{name} + coalesce(d.{name}, 0)" for name in PROGRESS_FIELDS),
        "least(s.first_result_at, d.first_result_at)",
        "greatest(s.last_result_at, d.last_result_at)",
    )
)
_READ_BESIDE = ("first_result_at", "last_result_at", "running", "retrying", "retry_at")


def read(workflow: Workflow) -> dict[str, Any]:
    """Return counts, sources and means; the counts always add up to the total.

    RUNNING requests are those of started batches, RETRYING those that wait for their next try; they
    are read off the batches that are out, which are few.
    """
    values = _read([workflow.pk], in_flight=True)[workflow.pk]
    return _document(workflow, values)


def read_many(workflows: Iterable[Workflow]) -> list[dict[str, Any]]:
    """Return the same for a page of workflows, without telling RUNNING and RETRYING apart."""
    listed = list(workflows)
    found = _read([workflow.pk for workflow in listed], in_flight=False)
    return [_document(workflow, found.get(workflow.pk, {})) for workflow in listed]


def _read(workflow_ids: Sequence[int], *, in_flight: bool) -> dict[int, dict[str, Any]]:
    # One statement, one snapshot: a fold moves deltas into stats in one transaction, and an item
    # ends in the same transaction that frees its batch.
    out = (
        """
        SELECT count(*) FROM fulfillment_batch b
        CROSS JOIN LATERAL unnest(b.item_of) AS item
        WHERE b.workflow_id = s.workflow_id AND b.state <> 4 AND {} AND b.open_mask >> item & 1 = 1
        """
        if in_flight
        else "SELECT 0 WHERE {}"
    )
    running = out.format("b.state = 1 AND b.started_at IS NOT NULL" if in_flight else "true")
    retrying = out.format("b.state = 3" if in_flight else "true")
    retry_at = (
        """
        SELECT max(b.not_before) FROM fulfillment_batch b
        WHERE b.workflow_id = s.workflow_id AND b.state = 3
        """
        if in_flight
        else "NULL"
    )
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH d AS (
                SELECT workflow_id, {_ADDED} FROM fulfillment_statsdelta
                WHERE workflow_id = ANY(%s) GROUP BY workflow_id
            )
            SELECT s.workflow_id, {_SUMS}, ({running}), ({retrying}), ({retry_at})
            FROM fulfillment_workflowstats s LEFT JOIN d ON d.workflow_id = s.workflow_id
            WHERE s.workflow_id = ANY(%s)
            """,
            [list(workflow_ids), list(workflow_ids)],
        )
        names = (*PROGRESS_FIELDS, *_READ_BESIDE)
        return {row[0]: dict(zip(names, row[1:], strict=True)) for row in cursor.fetchall()}


def _document(workflow: Workflow, values: Mapping[str, Any]) -> dict[str, Any]:
    def get(name: str) -> int:
        return int(values.get(name, 0))

    ended = sum(get(name) for name in ("completed", "failed", "timed_out", "cancelled"))
    total = get("received")
    finished = workflow.state in {
        WorkflowState.COMPLETED,
        WorkflowState.PARTIAL,
        WorkflowState.FAILED,
        WorkflowState.CANCELLED,
    }
    open_ = 0 if finished else max(0, total - ended)
    running = min(get("running"), open_)
    retrying = min(get("retrying"), open_ - running)
    scored = get("completed")
    return {
        "counts": {
            "total": total,
            "pending": open_ - running - retrying,
            "running": running,
            "retrying": retrying,
            "completed": scored,
            "failed": get("failed"),
            "timed_out": get("timed_out"),
            "cancelled": get("cancelled"),
        },
        "sources": {
            "archive": get("from_archive"),
            "coalesced": get("coalesced"),
            "model": get("from_model"),
        },
        "mean_score": float(values["score_sum"]) / scored if scored else None,
        "scored": scored,
        "model_calls": get("model_calls"),
        "attempts": get("attempts"),
        "accelerator_seconds": round(float(values.get("device_seconds", 0.0)), 3),
        "retry_at": values.get("retry_at"),
        "timeline": _timeline(workflow, values),
    }


def _timeline(workflow: Workflow, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the instants of a workflow in their order, and how long its stretches took."""
    last = values.get("last_result_at")
    return {
        "accepted_at": workflow.created_at,
        "closed_at": workflow.closed_at,
        "first_dispatch_at": workflow.started_at,
        "first_result_at": values.get("first_result_at"),
        "last_result_at": last,
        "finished_at": workflow.finished_at,
        "queued_s": _seconds(workflow.created_at, workflow.started_at),
        "working_s": _seconds(workflow.started_at, last),
        "total_s": _seconds(workflow.created_at, workflow.finished_at),
    }


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    """Return the seconds between two instants that have both passed."""
    if start is None or end is None:
        return None
    return max(0.0, round((end - start).total_seconds(), 3))
