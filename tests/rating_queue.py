"""A rating queue for tests: workflows with real batches, a fleet of replicas, and what is sent.

Times are the database's own, as the services read them. `counts_add_up` is the law that every test
of the queue ends with: progress says what the request rows say.
"""

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, TypeVar
from uuid import UUID

from django.db import connection
from django.db.models import F, Sum

from fulfillment import claim, completion, dispatch, documents, leases
from fulfillment.clock import database_now
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
    PROGRESS_FIELDS,
    Batch,
    BatchPayload,
    BatchWait,
    Event,
    ExecutorBoot,
    Flight,
    Rater,
    RaterVersion,
    Rating,
    RatingRequest,
    StatsDelta,
    Workflow,
    WorkflowForecast,
    WorkflowStats,
    request_key,
)
from fulfillment.policy.batching import cut, merge_equal
from fulfillment.policy.fingerprint import request_digest
from fulfillment.policy.lifecycle import BatchState, RequestState, Source, WorkflowState
from fulfillment.policy.priority import priority_class
from fulfillment.scores import Scored
from tests import builders
from tests.builders import MODEL

T = TypeVar("T")

CALL = timedelta(seconds=60)
PATIENCE_S = 20.0
SCORE = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A replica as a directory lists it."""

    key: str = "r1"
    model_id: str = MODEL
    version: str = "v1"
    window: int = 16
    protocol: str = "oip"
    managed: bool = True
    seen_at: datetime | None = None


@dataclass(kw_only=True, slots=True)
class Fleet:
    """A model directory in memory."""

    live: list[Replica] = field(default_factory=list)

    def describe(self, model_id: str) -> None:
        return None

    def replicas(self, now: datetime) -> Sequence[Replica]:
        return list(self.live)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What was published."""

    batches: list[tuple[int, int, str]]
    priority: int

    @property
    def leases(self) -> list[tuple[int, int]]:
        return [(batch_id, fence) for batch_id, fence, _ in self.batches]

    @property
    def ids(self) -> list[int]:
        return [batch_id for batch_id, _, _ in self.batches]


@dataclass(kw_only=True)
class Queue:
    """A dispatcher with its memory, its fleet, and the messages it has sent."""

    fleet: Fleet
    memory: dispatch.Memory = field(default_factory=dispatch.Memory)
    sent: list[Message] = field(default_factory=list)

    def run(self) -> claim.Pass:
        """Run one pass of the dispatcher."""
        return dispatch.run_once(
            database_now(), memory=self.memory, directory=self.fleet, publish=self._publish
        )

    def wake_and_run(self) -> claim.Pass:
        """Run a pass as the dispatcher's loop does."""
        leases.wake(now=database_now())
        claim.look_again(database_now())
        return self.run()

    def take_sent(self) -> list[Message]:
        """Return what was sent since the last look."""
        sent, self.sent = self.sent, []
        return sent

    def _publish(self, batches: Sequence[tuple[int, int, str]], priority: int) -> None:
        self.sent.append(Message(batches=list(batches), priority=priority))


def queue(*replicas: Replica) -> Queue:
    """Return a dispatcher over these replicas, by default one of 16 batches."""
    return Queue(fleet=Fleet(live=list(replicas or (Replica(),))))


def boot(*, slots: int = 64, plugins: Mapping[str, str] | None = None, age_s: float = 0) -> UUID:
    """Store a live executor that has the plug-in `stub` in version 1."""
    now = database_now()
    made = ExecutorBoot.objects.create(
        boot_id=uuid.uuid4(),
        host="test",
        pid=1,
        slots=slots,
        plugins={"stub": "1"} if plugins is None else plugins,
        started_at=now,
        heartbeat_at=now - timedelta(seconds=age_s),
    )
    return made.boot_id


def rater(rater_id: str = builders.RATER, **changes: Any) -> RaterVersion:
    """Store a rater of the stub model and its version."""
    return builders.version(builders.rater(rater_id, **changes))


def key(name: str) -> str:
    """Return the fingerprint of rows called `name`."""
    return blake2b(name.encode(), digest_size=16).hexdigest()


def submit(
    rows: Sequence[str],
    *,
    of: RaterVersion | None = None,
    batch_size: int = 12,
    deadline_in: timedelta = timedelta(hours=2),
    ends_in: timedelta = timedelta(hours=3),
    item: Callable[[str], Mapping[str, Any]] = lambda name: {"query_text": name, "text": name},
    **changes: Any,
) -> Workflow:
    """Store a workflow of one chunk as intake does; rows of one name are equal."""
    now = database_now()
    workflow = builders.workflow(
        of or RaterVersion.objects.first() or rater(),
        stats={"received": len(rows)},
        **{
            "created_at": now,
            "closed_at": None if changes.get("state") == WorkflowState.OPEN else now,
            "deadline_at": now + deadline_in,
            "ends_at": now + ends_in,
            "batch_size": batch_size,
            "next_position": len(rows),
            **changes,
        },
    )
    RatingRequest.objects.bulk_create(
        RatingRequest(
            id=request_key(workflow.pk, position),
            workflow=workflow,
            request_id=f"row-{position + 1}",
            request_digest=UUID(bytes=request_digest(f"row-{position + 1}")),
            fingerprint=UUID(key(name)),
        )
        for position, name in enumerate(rows)
    )
    items = merge_equal([bytes.fromhex(key(name)) for name in rows])
    batches = Batch.objects.bulk_create(
        Batch(
            workflow=workflow,
            position=part[0][0],
            round=workflow.round,
            positions=[position for positions in part for position in positions],
            item_of=[number for number, positions in enumerate(part) for _ in positions],
            fingerprints=[UUID(key(rows[positions[0]])) for positions in part],
            open_mask=(1 << len(part)) - 1,
        )
        for part in cut(items, batch_size)
    )
    BatchPayload.objects.bulk_create(
        BatchPayload(
            batch=batch,
            workflow=workflow,
            data=documents.pack([[item(rows[positions[0]]), None] for positions in part]),
        )
        for batch, part in zip(batches, cut(items, batch_size), strict=True)
    )
    return workflow


def give_up(workflow: Workflow, **changes: Any) -> WorkflowForecast:
    """Store a forecast by which nothing that is left of a workflow is committed."""
    return WorkflowForecast.objects.create(
        workflow=workflow,
        **{
            "served_by": "",
            "round": workflow.round,
            "priority_class": priority_class(workflow.priority, best_effort=workflow.best_effort),
            "deadline_at": workflow.deadline_at,
            "seconds_a_batch": 1.0,
            "received": workflow.next_position,
            "unsent_batches": 1.0,
            "in_flight_batches": 0.0,
            "cut_batches": 1.0,
            "share": 0.0,
            "reason": "too much",
            "made_at": database_now(),
            **changes,
        },
    )


def archived(
    name: str, *, age: timedelta = timedelta(hours=1), score: float = 1.5, reusable: bool = True
) -> int:
    """Store a rating and return its id."""
    return Rating.objects.create(
        fingerprint=UUID(key(name)),
        rater_version_id=1,
        workflow_id=0,
        score=score,
        produced_at=database_now() - age,
        reusable=reusable,
    ).pk


def batches(workflow: Workflow) -> list[Batch]:
    """Return the batches of a workflow in their order."""
    return list(Batch.objects.filter(workflow=workflow).order_by("position"))


def requests(workflow: Workflow) -> list[RatingRequest]:
    """Return the request rows of a workflow in their order."""
    return list(RatingRequest.objects.filter(workflow=workflow).order_by("id"))


def states(workflow: Workflow) -> list[str]:
    """Return the state of each request in input order."""
    return [RequestState(request.state).name for request in requests(workflow)]


def flights() -> dict[str, int]:
    """Return the batch of each flight."""
    return {flight.fingerprint.hex: flight.batch_id for flight in Flight.objects.all()}


def take(
    message: Message | Sequence[tuple[int, int]], *, by: UUID, task: UUID | None = None
) -> list[Taken]:
    """Take the batches of a message over, in the order of the message."""
    pairs = message.leases if isinstance(message, Message) else list(message)
    taken = leases.take_over(pairs, boot_id=by, task_id=task or uuid.uuid4(), call_limit=CALL)
    order = {batch_id: place for place, (batch_id, _) in enumerate(pairs)}
    return sorted(taken, key=lambda t: order[t.batch_id])


def sent_items(taken: Taken) -> list[int]:
    """Return the items that a batch was sent for."""
    return [i for i in range(len(taken.fingerprints)) if taken.sent >> i & 1]


def rated(taken: Taken, *items: int, score: float = SCORE, **more: Any) -> Finish:
    """Return a finish with a score for these items, by default for all that were sent."""
    return Finish(
        taken=taken,
        scored={i: Scored(score=score) for i in (items or sent_items(taken))},
        calls=1,
        accelerator_seconds=0.25,
        device_seconds=0.125,
        **more,
    )


def rate_all(running: Queue, by: UUID, *, passes: int = 50) -> int:
    """Claim, take over and finish until nothing is sent; return the items that were computed."""
    computed = 0
    for _ in range(passes):
        running.wake_and_run()
        messages = running.take_sent()
        if not messages:
            break
        for message in messages:
            taken = take(message, by=by)
            leases.finish([rated(t) for t in taken])
            computed += sum(len(sent_items(t)) for t in taken)
    return computed


def progress(workflow: Workflow) -> dict[str, float]:
    """Return stats plus deltas, read plainly."""
    stats = WorkflowStats.objects.get(workflow=workflow)
    added = StatsDelta.objects.filter(workflow=workflow).aggregate(
        **{f"sum_{name}": Sum(F(name)) for name in PROGRESS_FIELDS}
    )
    return {name: getattr(stats, name) + (added[f"sum_{name}"] or 0) for name in PROGRESS_FIELDS}


def counts_add_up(workflow: Workflow) -> dict[str, float]:
    """Assert that progress equals a recount of the request rows; return it."""
    found = progress(workflow)
    rows = requests(workflow)
    by_state = Counter(RequestState(row.state) for row in rows)
    by_source = Counter(row.source for row in rows)
    recount = {
        "received": len(rows),
        "completed": by_state[RequestState.COMPLETED],
        "failed": by_state[RequestState.FAILED],
        "timed_out": by_state[RequestState.TIMED_OUT],
        "cancelled": by_state[RequestState.CANCELLED],
        "from_archive": by_source[Source.ARCHIVE],
        "coalesced": by_source[Source.COALESCED],
        "from_model": by_source[Source.MODEL],
    }
    assert {name: found[name] for name in recount} == recount
    assert abs(found["score_sum"] - sum(row.score or 0.0 for row in rows)) < 1e-6
    open_rows = {
        position
        for batch in batches(workflow)
        for position, item in zip(batch.positions, batch.item_of, strict=True)
        if batch.open_mask >> item & 1
    }
    pending = {row.pk & (1 << 31) - 1 for row in rows if row.state == RequestState.PENDING}
    assert open_rows == pending
    return found


def rows_are_sound() -> None:
    """Assert what holds of batches, flights and waits at rest, whatever happened before (I4)."""
    held = {batch.pk: batch for batch in Batch.objects.all()}
    flying = {
        flight.fingerprint: (flight.batch_id, flight.fence) for flight in Flight.objects.all()
    }
    # Two current leases cannot both own the flight of a fingerprint.
    for batch in held.values():
        if batch.state == BatchState.LEASED:
            for item, fingerprint in enumerate(batch.fingerprints):
                if batch.sent_mask >> item & 1:
                    assert flying.get(fingerprint) == (batch.pk, batch.fence)
        else:
            assert (batch.boot_id, batch.started_at, batch.probing) == (None, None, None)
            assert batch.state == BatchState.DONE or batch.sent_mask == 0
    for wait in BatchWait.objects.all():
        assert wait.fingerprint in held[wait.batch_id].fingerprints
        assert held[wait.batch_id].open_mask


def finished(workflow: Workflow) -> str:
    """Assert that a workflow ended, with one event a round and the last saying how; return that."""
    workflow.refresh_from_db()
    state = WorkflowState(workflow.state)
    assert workflow.finished_at is not None, state.name
    *earlier, event = Event.objects.filter(workflow=workflow).order_by("round")
    assert [e.round for e in (*earlier, event)] == list(range(1, workflow.round + 1))
    assert event.kind == f"workflow.{state.name.lower()}"
    assert event.data["state"] == state.name
    found = counts_add_up(workflow)
    for name in ("completed", "failed", "timed_out", "cancelled"):
        assert event.data[name] == found[name]
    assert event.data["total"] == found["received"]
    assert RequestState.PENDING.name not in states(workflow)
    return state.name


def check_all() -> int:
    """Run the completion checker at the database's time."""
    return completion.run_once(database_now())


def end_pauses() -> None:
    """Let every retry be due now."""
    Batch.objects.filter(state=BatchState.DELAYED).update(
        not_before=database_now() - timedelta(seconds=1)
    )


@contextmanager
def threads(count: int = 4) -> Iterator[ThreadPoolExecutor]:
    """Give threads with a database connection each, closed at the end."""
    barrier = threading.Barrier(count)

    def leave() -> None:
        connection.close()
        barrier.wait(PATIENCE_S)

    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        finally:
            for future in [pool.submit(leave) for _ in range(count)]:
                future.result(PATIENCE_S)


def until(condition: Callable[[], T], *, what: str) -> T:
    """Poll a condition that other threads bring about."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if value := condition():
            return value
        pause.wait(0.005)
    raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")


def until_blocked(waiting: "Future[Any]") -> None:
    """Wait until a statement of another session of this database waits for a lock."""

    def blocked() -> bool:
        if waiting.done():
            waiting.result()
            raise AssertionError("it ended instead of waiting for a lock")
        with connection.cursor() as cursor:
            # Inside a transaction the view stands still without this.
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(
                """
                SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND wait_event_type = 'Lock'
                """
            )
            (count,) = cursor.fetchone()
        return bool(count)

    until(blocked, what="a session waits for a lock")


def refreshed(of: Rater) -> Rater:
    """Return a rater as it is stored now."""
    return Rater.objects.get(pk=of.pk)


class Plans:
    """An execute wrapper that explains each statement first and notes what it scans.

    With scans off where an index can do it, as on the connections of dispatcher and executors:
    statistics that neighbours left of an empty table say nothing.
    """

    TABLES = ("batch", "ratingrequest", "batchpayload", "rating")

    def __init__(self) -> None:
        self.count = 0
        self.scans: list[tuple[str, str, str]] = []

    def __enter__(self) -> "Plans":
        self._installed = connection.execute_wrapper(self)
        self._installed.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._installed.__exit__(*error)

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().upper().startswith(("SELECT", "UPDATE", "DELETE", "WITH")):
            self.count += 1
            with connection.connection.cursor() as cursor:
                cursor.execute("SET LOCAL enable_seqscan = off")
                cursor.execute("EXPLAIN " + sql, params)
                plan = "\n".join(line for (line,) in cursor.fetchall())
                cursor.execute("SET LOCAL enable_seqscan = on")
            for table in self.TABLES:
                if f"Seq Scan on fulfillment_{table} " in plan:
                    self.scans.append((table, " ".join(sql.split()), plan))
        return execute(sql, params, many, context)
