"""Ending early: what becomes of the open items of a workflow that waits for them no more.

Cancel, forced completion, `complete_when` and max duration set ENDING with its reason, from where
no claim, take-over or append goes on; a sweep then ends the open items in chunks under each batch's
row lock. At the deadline, and when the rater version is retired, only what nobody has started is
ended. A LEASED batch keeps its lease: what comes back enters the archive only.

Each chunk looks at the workflow and its round again: whoever stood still while the workflow ended
and a new round began finds no batch of that round.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from fulfillment import archive, outcomes
from fulfillment.errors import NotFound
from fulfillment.models import Workflow
from fulfillment.outcomes import Outcome
from fulfillment.policy.freshness import fresh_after
from fulfillment.policy.lifecycle import (
    DEADLINE,
    ENDINGS,
    STARTED,
    VERSION_RETIRED,
    Ending,
    EndingReason,
    RequestState,
    Source,
    WorkflowState,
)

MOST_ITEMS = 250_000
"""Items of one workflow that a tick of the checker ends at most: others must not wait for it."""
_BATCHES = 400


def locked(workflow_id: int) -> Workflow:
    """Lock a workflow against intake (FOR SHARE) but not against foreign-key checks."""
    workflow = (
        Workflow.objects.select_for_update(no_key=True)
        .exclude(state=WorkflowState.RECEIVING)
        .filter(pk=workflow_id)
        .first()
    )
    if workflow is None:
        raise NotFound("there is no such workflow")
    return workflow


def begin(workflow_id: int, reason: EndingReason, now: datetime) -> None:
    """Set a workflow ENDING unless it is, or has ended; what is open is left to `sweep`."""
    with transaction.atomic():
        workflow = locked(workflow_id)
        if workflow.state in STARTED | {WorkflowState.REOPENING}:
            begin_locked(workflow, reason, now)


def begin_locked(workflow: Workflow, reason: EndingReason, now: datetime) -> None:
    """Set ENDING a workflow that the caller has locked."""
    workflow.state = WorkflowState.ENDING
    workflow.ending_reason = reason
    workflow.closed_at = workflow.closed_at or now
    workflow.save(update_fields=["state", "ending_reason", "closed_at"])


def sweep(workflow_id: int, *, most_items: int | None = None) -> int:
    """End open items of an ENDING workflow, in chunks; return how many."""

    def chunk(cursor: CursorWrapper, after: int) -> tuple[int, int]:
        workflow = _in_state(workflow_id, frozenset({WorkflowState.ENDING}))
        if workflow is None:
            return 0, 0
        batches = _open_batches(cursor, workflow, after=after, started_too=True)
        ending = ENDINGS[EndingReason(workflow.ending_reason)]
        return _end_items(cursor, batches, lambda *item: _ended(workflow, ending, *item))

    return _in_chunks(chunk, most_items)


def pass_deadline(workflow_id: int, *, now: datetime, most_items: int | None = None) -> int:
    """End what has not been started by the deadline, after a last look into the archive."""
    return _end_unstarted(
        workflow_id, lambda w: w.deadline_at <= now, DEADLINE, now=now, most_items=most_items
    )


def pass_retirement(workflow_id: int, *, now: datetime, most_items: int | None = None) -> int:
    """End what has not been started of a retired rater version, after the same last look."""
    return _end_unstarted(
        workflow_id,
        lambda w: w.rater_version.retired_at is not None,
        VERSION_RETIRED,
        now=now,
        most_items=most_items,
    )


def _end_unstarted(
    workflow_id: int,
    is_due: Callable[[Workflow], bool],
    ending: Ending,
    *,
    now: datetime,
    most_items: int | None,
) -> int:
    def chunk(cursor: CursorWrapper, after: int) -> tuple[int, int]:
        workflow = _in_state(workflow_id, STARTED)
        if workflow is None or not is_due(workflow):
            return 0, 0
        batches = _open_batches(cursor, workflow, after=after, started_too=False)
        entries = _archived(cursor, workflow, batches, now)
        return _end_items(
            cursor, batches, lambda *item: _copied_or_ended(workflow, ending, entries, *item)
        )

    return _in_chunks(chunk, most_items)


def _in_chunks(
    chunk: Callable[[CursorWrapper, int], tuple[int, int]], most_items: int | None
) -> int:
    """Run chunks, a transaction each, until one ends nothing; return the items ended.

    A chunk is told the last batch of the one before, so that it need not step over what that left.
    """
    ended = after = 0
    while ended < (MOST_ITEMS if most_items is None else most_items):
        with transaction.atomic(), connection.cursor() as cursor:
            # All that a chunk touches has an index. For some thousand rows of a large workflow the
            # planner would rather read all of its requests, once a chunk.
            cursor.execute("SET LOCAL enable_seqscan = off")
            count, after = chunk(cursor, after)
        if not count:
            break
        ended += count
    return ended


def _in_state(workflow_id: int, states: frozenset[WorkflowState]) -> Workflow | None:
    found = Workflow.objects.select_related("rater", "rater_version")
    return found.filter(pk=workflow_id, state__in=states).first()


class _OpenBatch:
    """A locked batch with open items."""

    def __init__(self, row: Sequence[Any]) -> None:
        self.id, self.positions, self.item_of, self.fingerprints = row[:4]
        self.open_mask, self.attempts, self.accepted_at = row[4:]

    def open_items(self) -> list[tuple[int, list[int]]]:
        items = outcomes.positions_by_item(self.positions, self.item_of)
        return [(i, positions) for i, positions in items.items() if self.open_mask >> i & 1]


def _open_batches(
    cursor: CursorWrapper, workflow: Workflow, *, after: int, started_too: bool
) -> list[_OpenBatch]:
    cursor.execute(
        """
        SELECT id, positions, item_of, fingerprints::text[], open_mask, attempts, accepted_at
        FROM fulfillment_batch
        WHERE workflow_id = %s AND id > %s AND state <> 4 AND open_mask <> 0 AND round <= %s
          AND (%s OR state <> 1 OR boot_id IS NULL)
        ORDER BY id LIMIT %s FOR UPDATE
        """,
        [workflow.pk, after, workflow.round, started_too, _BATCHES],
    )
    return [_OpenBatch(row) for row in cursor.fetchall()]


def _end_items(
    cursor: CursorWrapper,
    batches: Sequence[_OpenBatch],
    end: Callable[[_OpenBatch, int, Sequence[int]], Outcome],
) -> tuple[int, int]:
    """Write terminal states of all open items of the batches and clear their open masks.

    Return the items ended and the last batch.
    """
    if not batches:
        return 0, 0
    ended = [
        end(batch, item, positions) for batch in batches for item, positions in batch.open_items()
    ]
    progress = outcomes.end_requests(cursor, ended)
    outcomes.add_progress(cursor, progress)
    ids = [batch.id for batch in batches]
    # A started batch keeps fence, lease and flights until its finish or expiry; one whose message
    # is still on its way loses them, so that nobody starts it.
    cursor.execute(
        """
        UPDATE fulfillment_batch
        SET open_mask = 0, not_before = NULL,
            state = CASE WHEN boot_id IS NOT NULL THEN 1 ELSE 4 END,
            lease_until = CASE WHEN boot_id IS NOT NULL THEN lease_until END,
            fence = CASE WHEN boot_id IS NOT NULL THEN fence ELSE fence + 1 END
        WHERE id = ANY(%s)
        """,
        [ids],
    )
    cursor.execute(
        """
        DELETE FROM fulfillment_flight f USING fulfillment_batch b
        WHERE f.batch_id = ANY(%s) AND b.id = f.batch_id AND b.state = 4
        """,
        [ids],
    )
    cursor.execute("DELETE FROM fulfillment_batchwait WHERE batch_id = ANY(%s)", [ids])
    return len(ended), ids[-1]


def _ended(
    workflow: Workflow, ending: Ending, batch: _OpenBatch, item: int, positions: Sequence[int]
) -> Outcome:
    return Outcome(
        workflow_id=workflow.pk,
        positions=positions,
        state=ending.state,
        error=ending.code,
        attempts=batch.attempts,
    )


def _archived(
    cursor: CursorWrapper, workflow: Workflow, batches: Sequence[_OpenBatch], now: datetime
) -> dict[str, archive.Entry]:
    """Return what the archive has for these batches: for `bypass`, what came after the oldest."""
    return archive.look_up(
        cursor,
        [f for batch in batches for f in batch.fingerprints],
        produced_after=fresh_after(
            now=now,
            freshness_s=workflow.rater.freshness_s,
            max_age_s=workflow.max_age_s,
            accepted_at=min((batch.accepted_at for batch in batches), default=now),
            bypass=workflow.bypass,
        ),
        now=now,
    )


def _copied_or_ended(
    workflow: Workflow,
    ending: Ending,
    entries: dict[str, archive.Entry],
    batch: _OpenBatch,
    item: int,
    positions: Sequence[int],
) -> Outcome:
    entry = entries.get(batch.fingerprints[item].replace("-", ""))
    if entry is None or (workflow.bypass and entry.produced_at <= batch.accepted_at):
        return _ended(workflow, ending, batch, item, positions)
    return copied(workflow.pk, batch.accepted_at, positions, entry, attempts=batch.attempts)


def copied(
    workflow_id: int,
    accepted_at: datetime,
    positions: Sequence[int],
    entry: archive.Entry,
    *,
    attempts: int,
) -> Outcome:
    """Return the outcome of an item that the archive answers after it was accepted."""
    return Outcome(
        workflow_id=workflow_id,
        positions=positions,
        state=RequestState.COMPLETED,
        source=Source.COALESCED if entry.produced_at > accepted_at else Source.ARCHIVE,
        score=entry.score,
        label=entry.label,
        output=entry.output,
        rating_id=entry.rating_id,
        rated_by_id=entry.workflow_id if entry.workflow_id != workflow_id else None,
        rated_at=entry.produced_at,
        attempts=attempts,
    )
