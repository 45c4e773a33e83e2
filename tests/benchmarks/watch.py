"""Watching a stack twice a second: who lives, what they computed, what waits, what is done.

How busy a replica was is told by its own server, together with how long that has run. A replica
counts while it is READY: it serves, and is sent to. Drains and starts are looked at, too.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import quote

import httpx
from psycopg2.extensions import cursor as Cursor  # noqa: N812

from tests.acceptance.stack import Stack

EVERY_S = 0.5
READY = "READY"
_SERVERS = """
    SELECT s.model_id, s.ordinal, s.starts, s.state, s.address, m.model_name
    FROM models_admin_modelserver s JOIN models_admin_modelconfig m ON m.id = s.model_id
    WHERE s.pid IS NOT NULL
"""
_WAITING = """
    SELECT w.rater_id, count(*) FROM fulfillment_batch b
    JOIN fulfillment_workflow w ON w.id = b.workflow_id WHERE b.state = 0 GROUP BY 1
"""
_COMPLETED = """
    SELECT w.rater_id, sum(p.completed)::bigint FROM (
        SELECT workflow_id, completed FROM fulfillment_workflowstats
        UNION ALL SELECT workflow_id, completed FROM fulfillment_statsdelta
    ) AS p JOIN fulfillment_workflow w ON w.id = p.workflow_id GROUP BY 1
"""

Run = tuple[str, int, int]
"""Model, ordinal and start of a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What a server says of itself, in seconds."""

    busy_s: float
    up_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look at the stack."""

    at_s: float
    """Of a monotonic clock."""
    states: Mapping[Run, str]
    """Of all servers whose process lives."""
    accounts: Mapping[Run, Account]
    waiting: Mapping[str, int]
    """Batches that were not sent yet, by rater."""
    completed: Mapping[str, int]
    """Requests, by rater."""

    def ready(self, model: str) -> int:
        """Return the replicas of a model that serve."""
        return sum(run[0] == model and state == READY for run, state in self.states.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What replicas did in a stretch of time, in seconds."""

    busy_s: float
    lived_s: float

    @property
    def duty(self) -> float:
        """Busy over lived."""
        return self.busy_s / self.lived_s if self.lived_s else 0.0


class Watch:
    """All looks so far."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch")
        self.looks: list[Look] = []

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    @property
    def last(self) -> Look:
        """The last look."""
        return self.looks[-1]

    def _look_on(self) -> None:
        with (
            self._stack.database() as connection,
            connection.cursor() as cursor,
            httpx.Client(timeout=2.0) as client,
        ):
            due_s = time.monotonic()
            while not self._stop.wait(max(0.0, due_s - time.monotonic())):
                due_s += EVERY_S
                self.looks.append(_look(cursor, client))


@contextlib.contextmanager
def watching(stack: Stack) -> Iterator[Watch]:
    """Watch a stack."""
    watch = Watch(stack)
    watch.start()
    try:
        while not watch.looks:
            time.sleep(EVERY_S / 5)
        yield watch
    finally:
        watch.stop()


def _look(cursor: Cursor, client: httpx.Client) -> Look:
    cursor.execute(_SERVERS)
    servers = cursor.fetchall()
    cursor.execute(_WAITING)
    waiting = dict(cursor.fetchall())
    cursor.execute(_COMPLETED)
    completed = dict(cursor.fetchall())
    at_s = time.monotonic()
    accounts = {}
    for model, ordinal, starts, _, address, name in servers:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            answer = client.get(f"{address}/v2/models/{quote(name, safe='')}/stats").json()
            accounts[model, ordinal, starts] = Account(
                busy_s=answer["busy_seconds"], up_s=answer["uptime_seconds"]
            )
    return Look(
        at_s=at_s,
        states={(model, ordinal, starts): state for model, ordinal, starts, state, *_ in servers},
        accounts=accounts,
        waiting=waiting,
        completed=completed,
    )


def use(
    looks: Iterable[Look],
    *,
    counts: Callable[[Run, str], bool] = lambda run, state: state == READY,
    backlog: Callable[[Look], bool] = lambda look: True,
) -> Use:
    """Return what replicas did between looks at which they counted and there was a backlog."""
    of_runs: dict[Run, list[tuple[Account, bool]]] = defaultdict(list)
    for look in looks:
        has_backlog = backlog(look)
        for run, account in look.accounts.items():
            of_runs[run].append((account, has_backlog and counts(run, look.states[run])))
    busy_s = lived_s = 0.0
    for told in of_runs.values():
        for (before, counted_before), (after, counted_after) in pairwise(told):
            if counted_before and counted_after:
                busy_s += after.busy_s - before.busy_s
                lived_s += after.up_s - before.up_s
    return Use(busy_s=busy_s, lived_s=lived_s)


def within(looks: Iterable[Look], from_s: float, until_s: float) -> list[Look]:
    """Return the looks of a stretch of time."""
    return [look for look in looks if from_s <= look.at_s < until_s]


def rates(looks: Sequence[Look], rater: str, *, every_s: float) -> list[tuple[float, float]]:
    """Return completed requests a second, step by step from the first look on: (since, rate).

    Read off between the looks around each instant.
    """
    first_s = looks[0].at_s
    steps = int((looks[-1].at_s - first_s) / every_s)
    edges = [first_s + n * every_s for n in range(steps + 1)]
    done = [_completed_at(looks, rater, edge) for edge in edges]
    return [
        (edge - first_s, (after - before) / every_s)
        for edge, (before, after) in zip(edges, pairwise(done), strict=False)
    ]


def _completed_at(looks: Sequence[Look], rater: str, at_s: float) -> float:
    before = looks[0]
    for look in looks:
        if look.at_s > at_s:
            part = (at_s - before.at_s) / (look.at_s - before.at_s)
            had = before.completed.get(rater, 0)
            return had + part * (look.completed.get(rater, 0) - had)
        before = look
    return float(before.completed.get(rater, 0))
