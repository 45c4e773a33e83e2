"""AIRS in one process: a client, a dispatcher, an executor and a checker that can die anywhere.

Names of rows say what the model makes of them: `bad…` is refused for good, `flaky…` fails once and
then is rated, all others are rated; those called `secret…` are of one url. `settle` is the normal
recovery, as the surviving processes do it, until every workflow is finished; time passes by later
`now`s, never by waiting.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg2
from django.db import connection

from fulfillment import completion, documents, leases, retention
from fulfillment.clock import database_now
from fulfillment.leases import Finish, Taken
from fulfillment.models import (
    Batch,
    ExecutorBoot,
    Upload,
    Workflow,
)
from fulfillment.policy.batching import halves
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from fulfillment.scores import Scored
from tests.builders import RATER, Api
from tests.chaos import laws
from tests.chaos.fail_points import FailPoints
from tests.fakes import Seen, stub_score
from tests.rating_queue import Queue, Replica, boot, end_pauses, queue, sent_items

CALL = timedelta(seconds=60)
MOST_TURNS = 40
SECRET_URL = "https://private.example/"
FORGOTTEN = (
    "workflow", "workflowstats", "statsdelta", "ratingrequest", "batch", "batchpayload", "upload",
    "rating", "purge", "shadowsample", "shadowscore", "flow", "queuesample", "erasure", "flight",
    "failedflight", "batchwait",
)  # fmt: skip


@dataclass(kw_only=True)
class Model:
    """A model server with a script; what it has answered cannot be taken back."""

    predictions: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=Counter)
    """The same by fingerprint: an item has one for each version of its rater."""
    failures: Counter[str] = field(default_factory=Counter)
    """Calls of an item that gave it no score."""

    def ask(self, names: Sequence[str], fingerprints: Sequence[str]) -> list[float] | str:
        """Return a score for each item, or why there is none."""
        if any(name.startswith("bad") for name in names):
            self.failures.update(names)
            return "invalid_request"
        if any(name.startswith("flaky") and not self.failures[name] for name in names):
            self.failures.update(names)
            return "server_error"
        self.predictions.update(names)
        self.computed.update(fingerprints)
        return [stub_score(name, "") for name in names]

    def again(self, names: Iterable[str] | None = None) -> int:
        """Return the predictions beyond the first of each item."""
        asked = self.predictions if names is None else {n: self.predictions[n] for n in names}
        return sum(max(0, count - 1) for count in asked.values())


@dataclass(kw_only=True)
class Executor:
    """The Rating Generator's steps with a model in memory instead of an HTTP client."""

    model: Model
    points: FailPoints = field(default_factory=FailPoints)
    boot_id: UUID = field(default_factory=lambda: boot(slots=64))
    said: list[Finish] = field(default_factory=list)
    """Every finish that it, or one before it, ever tried to write."""

    def rate(self, batches: Sequence[tuple[int, int]], *, task_id: UUID | None = None) -> None:
        """Work on the batches of a message until each is written or lost."""
        taken = leases.take_over(
            list(batches), boot_id=self.boot_id, task_id=task_id or uuid.uuid4(), call_limit=CALL
        )
        finishes = [self.rated(batch) for batch in taken]
        self.said += finishes
        for workflow_id in leases.finish(finishes):
            completion.check(workflow_id)

    def rated(self, taken: Taken) -> Finish:
        """Ask the model for a batch, in halves where one item spoils the call."""
        rows = documents.unpack(taken.payload)
        finish = Finish(taken=taken)
        scored: dict[int, Scored] = {}
        failed: dict[int, str] = {}

        def ask(items: Sequence[int], *, alone: bool = False) -> None:
            if (alone or finish.calls) and not leases.extend(
                taken.batch_id, taken.fence, call_limit=CALL, probing=items[0] if alone else None
            ):
                return
            finish.calls += 1
            finish.device_seconds += 0.5
            self.points.reach("model call")
            answer = self.model.ask(
                [rows[i][0]["query_text"] for i in items], [taken.fingerprints[i] for i in items]
            )
            self.points.reach("model answer")
            if not isinstance(answer, str):
                scored.update(
                    (i, Scored(score=s, output=f'"{rows[i][0]["text"]}"', url_digest=rows[i][1]))
                    for i, s in zip(items, answer, strict=True)
                )
            elif answer == "server_error":
                finish.not_before = database_now() + timedelta(seconds=60)
            elif len(items) == 1:
                failed[items[0]] = answer
            else:
                for half in halves(items):
                    ask(half)

        items = sent_items(taken)
        if taken.lost >= leases.LOST_BEFORE_SINGLES:
            for item in items:
                ask([item], alone=True)
        else:
            ask(items)
        finish.scored, finish.failed, finish.for_good = scored, failed, frozenset(failed)
        return finish


@dataclass(kw_only=True)
class World:
    """All processes but PostgreSQL, and a session of its own that looks at what is committed."""

    look: Callable[..., list[tuple[Any, ...]]]
    api: Api
    operator: Api
    receiver: str = ""
    """Address of a webhook receiver that takes everything."""
    heard: list[Seen] = field(default_factory=list)
    """What it was sent."""
    model: Model = field(default_factory=Model)
    points: FailPoints = field(default_factory=FailPoints)
    dispatcher: Queue = field(default_factory=lambda: queue(Replica(window=64)))
    messages: list[list[tuple[int, int]]] = field(default_factory=list)
    """What the broker holds: (batch, fence) by message."""
    delivered: list[list[tuple[int, int]]] = field(default_factory=list)
    executor: Executor = field(init=False)

    def __post_init__(self) -> None:
        self.executor = Executor(model=self.model, points=self.points)
        self._listen()

    def _listen(self) -> None:
        """Let what a dispatcher publishes cross a fail point before it reaches the broker."""

        def publish(batches: Sequence[tuple[Any, ...]], priority: int) -> None:
            self.points.reach("publish")
            self.messages.append([(batch[0], batch[1]) for batch in batches])
            self.points.reach("published")

        self.dispatcher._publish = publish  # type: ignore[method-assign]

    def watch(self, points: FailPoints) -> None:
        """Count the steps outside the database at these points too."""
        self.points = self.executor.points = points

    def restart(self) -> None:
        """Start a dispatcher and an executor that remember nothing; old boots fall silent."""
        self.points = FailPoints()
        ExecutorBoot.objects.update(heartbeat_at=database_now() - 2 * leases.SILENCE)
        fleet = self.dispatcher.fleet
        self.dispatcher = Queue(fleet=fleet)
        self._listen()
        self.executor = Executor(model=self.model, said=self.executor.said)

    def dispatch(self) -> None:
        """Run one pass of the dispatcher."""
        self.dispatcher.wake_and_run()

    def deliver(self) -> None:
        """Let the executor work on all that the broker holds."""
        while self.messages:
            message = self.messages.pop(0)
            self.delivered.append(message)
            self.executor.rate(message)

    def check(self) -> None:
        """Run the completion checker."""
        completion.run_once(database_now())

    def submit(self, rows: Sequence[str], **parameters: Any) -> Workflow:
        """Submit rows by these names through the API; return the workflow."""
        answer = self.api.upload(path("/workflows", rater=RATER, **parameters), documents_of(rows))
        assert answer.status_code == 202, answer.content
        return Workflow.objects.get(public_id=answer.json()["id"])

    def act(self, workflow: Workflow, what: str) -> Any:
        """POST an act upon a workflow."""
        return self.api.post(f"/workflows/{workflow.public_id}/{what}")

    def poll(self) -> None:
        """Assert what holds at each instant of what is committed."""
        assert laws.broken(self.look, laws.ALWAYS) == []

    def settle(self) -> None:
        """Recover and go on until all is finished and every lease is over; poll all the while."""
        for _ in range(MOST_TURNS):
            self.poll()
            now = database_now()
            ExecutorBoot.objects.filter(pk=self.executor.boot_id).update(heartbeat_at=now)
            leases.expire(now=now, trust_heartbeats=True)
            # Messages that nobody will deliver: their pick-up leases have ended by then.
            if not self.messages:
                self.expire_leases()
            end_pauses()
            self.dispatch()
            self.deliver()
            self.check()
            if not self._unsettled():
                break
        # What was swept while it was computed ends when its lease does.
        self.expire_leases()
        leases.wake(now=database_now())
        self.poll()
        assert laws.broken(self.look, laws.AT_REST) == []

    def expire_leases(self) -> None:
        """Let all leases end, as they do when their time is over."""
        leases.expire(now=database_now() + timedelta(hours=1), trust_heartbeats=False)

    @staticmethod
    def _unsettled() -> bool:
        return (
            Workflow.objects.exclude(state=WorkflowState.OPEN).filter(finished_at=None).exists()
            or Batch.objects.exclude(state=BatchState.DONE).exists()
        )

    def janitor(self) -> None:
        """Let uploads that stand still be removed."""
        retention.run_once(database_now() + timedelta(seconds=120))

    def forget(self) -> None:
        """Erase all workflows and ratings, so that what walks through them has the same way."""
        tables = ", ".join(f"fulfillment_{name}" for name in FORGOTTEN)
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {tables}, chaos_move CASCADE")
        self.messages.clear()

    def silence_uploads(self) -> None:
        """Let the heartbeat of unfinished uploads be a minute old."""
        Upload.objects.filter(finished_at=None).update(
            heartbeat_at=database_now() - timedelta(seconds=90)
        )


def path(resource: str, **parameters: Any) -> str:
    """Return a path with a query."""
    given = "&".join(f"{name}={value}" for name, value in parameters.items())
    return f"{resource}?{given}" if given else resource


def documents_of(rows: Sequence[str], *, start: int = 0) -> list[dict[str, Any]]:
    """Return request rows; those of one name are equal but for their id."""
    return [
        {
            "request_id": f"r{number}",
            "query_text": name,
            "text": name,
            "note": name,
            **({"url": SECRET_URL} if name.startswith("secret") else {}),
        }
        for number, name in enumerate(rows, start)
    ]


@contextmanager
def looker() -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    """Give a session of its own that reads what is committed."""
    parameters: Mapping[str, Any] = connection.get_connection_params()
    session = psycopg2.connect(
        **{k: v for k, v in parameters.items() if k not in {"cursor_factory"}}
    )
    session.autocommit = True

    def look(sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with session.cursor() as cursor:
            cursor.execute(sql, values or None)
            return list(cursor.fetchall())

    try:
        yield look
    finally:
        session.close()
