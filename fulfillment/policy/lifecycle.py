"""States of workflows, requests and batches, and the moves between them.

One enum and one table a kind; the database repeats them as check constraints (models.py) and
docs/architecture.md draws them. The numbers are stored: append, never renumber.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class WorkflowState(IntEnum):
    """Where a workflow stands, and who moves it on."""

    RECEIVING = 0
    """An upload is being taken in; nothing is sent. Intake opens it or the janitor removes it."""
    OPEN = 1
    """Takes more rows; what it has may already be rated. The client closes it."""
    RUNNING = 2
    """Closed, some items are open. The completion checker ends it."""
    PAUSED = 3
    """Nothing new is sent until the client resumes it."""
    ENDING = 4
    """Being wound up for a reason; nothing new is sent. The sweep ends its open items."""
    COMPLETED = 5
    """Every request is COMPLETED."""
    PARTIAL = 6
    """Ended with some requests not COMPLETED."""
    FAILED = 7
    """Ended with no request COMPLETED."""
    CANCELLED = 8
    """Ended because the client cancelled it."""


class RequestState(IntEnum):
    """State of one rating request as stored; RUNNING and RETRYING are read off its batch."""

    PENDING = 0
    COMPLETED = 1
    FAILED = 2
    TIMED_OUT = 3
    CANCELLED = 4


class Source(IntEnum):
    """Where a score came from."""

    ARCHIVE = 0
    """Rated before the request was accepted."""
    COALESCED = 1
    """Rated for an equal request, after this one was accepted."""
    MODEL = 2
    """Rated by a model call for this request."""


class BatchState(IntEnum):
    """State of a batch: what happens next to its open items."""

    READY = 0
    """May be claimed by the dispatcher."""
    LEASED = 1
    """Claimed: on its way to an executor or being computed, until its lease ends."""
    WAITING = 2
    """All open items wait for flights of other batches; the dispatcher wakes it."""
    DELAYED = 3
    """Tries again at `not_before`."""
    DONE = 4
    """No open item."""


class EndingReason(StrEnum):
    """Why a workflow is ENDING; decides the state its open requests get."""

    CANCELLED = "cancelled"
    MAX_DURATION = "max_duration"
    COMPLETE_WHEN = "complete_when"
    FORCED = "forced"


WORKFLOW_MOVES: dict[WorkflowState, frozenset[WorkflowState]] = {
    WorkflowState.RECEIVING: frozenset({WorkflowState.OPEN, WorkflowState.RUNNING}),
    WorkflowState.OPEN: frozenset(
        {WorkflowState.RUNNING, WorkflowState.PAUSED, WorkflowState.ENDING}
    ),
    WorkflowState.RUNNING: frozenset(
        {
            WorkflowState.PAUSED,
            WorkflowState.ENDING,
            WorkflowState.COMPLETED,
            WorkflowState.PARTIAL,
            WorkflowState.FAILED,
        }
    ),
    WorkflowState.PAUSED: frozenset(
        {WorkflowState.OPEN, WorkflowState.RUNNING, WorkflowState.ENDING}
    ),
    WorkflowState.ENDING: frozenset(
        {
            WorkflowState.CANCELLED,
            WorkflowState.COMPLETED,
            WorkflowState.PARTIAL,
            WorkflowState.FAILED,
        }
    ),
    WorkflowState.COMPLETED: frozenset(),
    WorkflowState.PARTIAL: frozenset(),
    WorkflowState.FAILED: frozenset(),
    WorkflowState.CANCELLED: frozenset(),
}

DISPATCHED = frozenset({WorkflowState.OPEN, WorkflowState.RUNNING})
"""Workflows whose batches may be claimed."""

UNFINISHED = frozenset(
    {
        WorkflowState.RECEIVING,
        WorkflowState.OPEN,
        WorkflowState.RUNNING,
        WorkflowState.PAUSED,
        WorkflowState.ENDING,
    }
)

FINISHED = frozenset(WorkflowState) - UNFINISHED

BATCH_MOVES: dict[BatchState, frozenset[BatchState]] = {
    BatchState.READY: frozenset({BatchState.LEASED, BatchState.WAITING, BatchState.DONE}),
    BatchState.LEASED: frozenset(
        {BatchState.READY, BatchState.WAITING, BatchState.DELAYED, BatchState.DONE}
    ),
    BatchState.WAITING: frozenset({BatchState.READY, BatchState.DONE}),
    BatchState.DELAYED: frozenset({BatchState.READY, BatchState.DONE}),
    BatchState.DONE: frozenset(),
}


def may_move(before: WorkflowState, after: WorkflowState) -> bool:
    """Say whether a workflow may go from one state to the other."""
    return after in WORKFLOW_MOVES[before]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """How many requests of a workflow stand in each terminal state."""

    total: int
    completed: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the open requests of an ENDING workflow end."""

    state: RequestState
    code: str


ENDINGS: dict[EndingReason, Ending] = {
    EndingReason.CANCELLED: Ending(state=RequestState.CANCELLED, code="cancelled"),
    EndingReason.MAX_DURATION: Ending(state=RequestState.TIMED_OUT, code="max_duration"),
    EndingReason.COMPLETE_WHEN: Ending(state=RequestState.CANCELLED, code="not_awaited"),
    EndingReason.FORCED: Ending(state=RequestState.CANCELLED, code="not_awaited"),
}


def outcome(tally: Tally, reason: EndingReason | None) -> WorkflowState:
    """Return the final state of a workflow none of whose items is open.

    Cancelling wins over what was rated before, so that the client finds the word it said.
    """
    if reason is EndingReason.CANCELLED:
        return WorkflowState.CANCELLED
    if tally.completed == tally.total:
        return WorkflowState.COMPLETED
    if tally.completed == 0:
        return WorkflowState.FAILED
    return WorkflowState.PARTIAL
