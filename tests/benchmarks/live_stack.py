"""A stack whose hosted models are paced servers, and the workflows that a run submits to it."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.stack import REPOSITORY, Stack, until
from tests.benchmarks import live_calls, paced_server, running
from tests.benchmarks.paced_server import Call

RATERS = ("north", "south")
OWNERS = ("ada", "ben", "cleo")
FILLER = "admin"
"""Owner of what fills the windows before the others come."""
REPLICAS = 2
"""Of each rater's model, with one slot each."""
SERVICE_S = 0.25
BATCH = 12
PRIORITIES: Mapping[str, Mapping[str, str]] = {
    "high": {"priority": "90"},
    "middle": {"priority": "50"},
    "low": {"priority": "10"},
    "best_effort": {"priority": "50", "best_effort": "true"},
}
AGENT = "bench"
_SAMPLED_WITHIN_S = 150.0
"""What the service notes of itself, it notes at least each minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A workflow of the run."""

    id: str
    group: str
    owner: str


@dataclass(kw_only=True)
class Run:
    """What was submitted, and what came of it."""

    stack: Stack
    calls_in: Path
    clients: Mapping[str, httpx.Client]
    window: int
    """Batches that a replica may hold, as the product has it."""
    submitted: list[Submitted] = field(default_factory=list)

    @property
    def held_s(self) -> float:
        """How long the servers are busy with what they hold when their windows are full."""
        return self.window * SERVICE_S

    def submit(
        self,
        group: str,
        owner: str,
        rater: str,
        priority: str,
        rows: int,
        *,
        deadline_s: int | None = None,
    ) -> str:
        """Submit a workflow of new rows; return its id. Its deadline is the rater's by default."""
        first_word = live_calls.tag(group, owner, priority)
        body = b"".join(
            b'{"query_text": "question %d", "text": "%b %d %d"}\n'
            % (i // 10, first_word.encode(), time.time_ns(), i)
            for i in range(rows)
        )
        answer = self.clients[owner].post(
            "/api/v1/workflows",
            params={
                "rater": rater,
                "name": first_word,
                **PRIORITIES[priority],
                **({} if deadline_s is None else {"deadline_s": deadline_s}),
            },
            content=body,
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert answer.status_code == 202, answer.text
        submitted = Submitted(id=str(answer.json()["id"]), group=group, owner=owner)
        self.submitted.append(submitted)
        return submitted.id

    def ids(self, *groups: str, without: str = "") -> list[str]:
        """Return the workflows of some scenes."""
        return [s.id for s in self.submitted if s.group in groups and s.owner != without]

    def calls(self, *groups: str) -> list[Call]:
        """Return the calls of some scenes, in the order in which they began."""
        found = paced_server.read_calls(self.calls_in)
        return [call for call in found if live_calls.group_of(call) in groups]

    def took_s(self, workflow_ids: Sequence[str]) -> list[float]:
        """Return how long ended workflows took from their acceptance."""
        rows = self.stack.query(
            "SELECT extract(epoch FROM finished_at - created_at)::float8"
            " FROM fulfillment_workflow WHERE public_id = ANY(%s) ORDER BY id",
            list(workflow_ids),
        )
        return [float(seconds) for (seconds,) in rows]

    def ready(self) -> int:
        """Return the batches that wait to be sent, of the rater that has fewest."""
        rows = self.stack.query(
            "SELECT w.rater_id, count(*) FROM fulfillment_batch b"
            " JOIN fulfillment_workflow w ON w.id = b.workflow_id WHERE b.state = 0 GROUP BY 1"
        )
        by_rater: dict[str, int] = dict(rows)
        return min(by_rater.get(rater, 0) for rater in RATERS)

    def wait(self, workflow_ids: Sequence[str]) -> None:
        """Wait until all of these have ended."""
        unfinished = (
            "SELECT count(*) FROM fulfillment_workflow"
            " WHERE public_id = ANY(%s) AND finished_at IS NULL"
        )
        until(
            lambda: self.stack.query(unfinished, list(workflow_ids)) == [(0,)],
            timeout_s=running.PATIENCE_S,
            what="the workflows end",
            every_s=0.2,
        )

    def report(self, to: Path) -> str:
        """Return the service's own report of the run, once it has sampled all of it."""
        sampled = """
            SELECT (SELECT max(at) FROM fulfillment_queuesample) > %s
               AND (SELECT max(at) FROM models_admin_utilizationsample) > %s
               AND (SELECT ran_at FROM fulfillment_servicerun WHERE name = 'commitments') > %s
        """
        ((now,),) = self.stack.query("SELECT clock_timestamp()")
        until(
            lambda: self.stack.query(sampled, now, now, now) == [(True,)],
            timeout_s=_SAMPLED_WITHIN_S,
            what="the run is sampled",
            every_s=0.5,
        )
        arguments = ["service_report", "--days", "0.02", "--out", str(to)]
        return subprocess.check_output(
            [sys.executable, "manage.py", *arguments],
            cwd=REPOSITORY,
            env=self.stack.environment,
            text=True,
        )


@contextlib.contextmanager
def live_stack() -> Iterator[Run]:
    """Start the stack, its models and a client for each owner."""
    with (
        tempfile.TemporaryDirectory(prefix="airs-bench-") as directory,
        running.stack(without=("flower", "host-agent")) as stack,
        paced_host(stack, Path(directory)),
        contextlib.ExitStack() as leave,
    ):
        window = _register(stack)
        clients = {owner: leave.enter_context(_client(stack, owner)) for owner in OWNERS}
        yield Run(
            stack=stack,
            calls_in=Path(directory),
            clients={FILLER: stack.client, **clients},
            window=window,
        )


@contextlib.contextmanager
def paced_host(stack: Stack, calls_in: Path) -> Iterator[None]:
    """Run the host agent of the paced servers."""
    environment = {
        **stack.environment,
        "DJANGO_SETTINGS_MODULE": "airs_site.settings",
        paced_server.SERVICE_S: str(SERVICE_S),
        paced_server.CALLS: str(calls_in),
    }
    command = [sys.executable, "-m", "tests.benchmarks.paced_server", "host", AGENT]
    with (stack.home / "logs" / "paced-host.log").open("wb") as log:
        host = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        host.terminate()
        host.wait(60)


def _register(stack: Stack) -> int:
    """Register pool, models and raters; return the window of a replica once all serve."""
    pool = {"id": "bench", "kind": "cpu", "devices": len(RATERS) * REPLICAS, "agent": AGENT}
    _post(stack, "/pools", pool)
    replicas = {"min": REPLICAS, "default": REPLICAS, "max": REPLICAS}
    for rater in RATERS:
        model = f"paced-{rater}"
        _post(
            stack, "/models",
            {"id": model, "kind": "hosted", "checkpoint": "tiny:0", "pool": "bench",
             "replicas": replicas},
        )  # fmt: skip
        _post(stack, f"/models/{model}/start", {})
        _post(
            stack, "/raters",
            {"id": rater, "autorater": "oip_score", "model": model, "mode": "integrated",
             "score_min": 0, "score_max": 4, "batch_size": BATCH},
        )  # fmt: skip
    models = [f"/api/v1/models/paced-{rater}" for rater in RATERS]

    def served() -> bool:
        found = [stack.client.get(model).json() for model in models]
        return all(
            model["replicas"]["ready"] == REPLICAS and model["version"] == paced_server.VERSION
            for model in found
        )

    until(served, timeout_s=60, what="all replicas serve", every_s=0.3)
    return int(stack.client.get(models[0]).json()["window"])


def _post(stack: Stack, path: str, body: Mapping[str, Any]) -> None:
    answer = stack.client.post(f"/api/v1{path}", json=body)
    assert answer.is_success, answer.text


def _client(stack: Stack, owner: str) -> httpx.Client:
    answer = stack.client.post("/api/v1/tokens", json={"user": owner, "role": "submitter"})
    assert answer.status_code == 201, answer.text
    headers = {"Authorization": f"Bearer {answer.json()['secret']}"}
    return httpx.Client(base_url=stack.client.base_url, headers=headers, timeout=60)
