"""Services decide what the pure policies decide for the same values.

A shadow reads plain facts with the ORM, keeps a memory of its own and asks the policies; after each
pass, what the service has done must be what the shadow said. So whatever else calls the policies,
a simulator say, behaves as the service does.
"""

import random
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.db.models import Sum
from pytest_django import Settings

from fulfillment import backlog, dispatch, leases, raters
from fulfillment.clock import database_now
from fulfillment.leases import Taken
from fulfillment.models import (
    Batch,
    ExecutorBoot,
    Rater,
    RaterVersion,
    StatsDelta,
    Workflow,
    WorkflowStats,
)
from fulfillment.policy import admission, ordering, traffic
from fulfillment.policy.lifecycle import DISPATCHED, BatchState
from fulfillment.policy.lines import Load
from fulfillment.policy.priority import PriorityClass, priority_class
from tests import builders
from tests.builders import MODEL, RATER, Api, row
from tests.executor_stage import staged
from tests.fakes import refusal, scripted
from tests.rating_queue import (
    Queue,
    Replica,
    batches,
    boot,
    queue,
    rated,
    rater,
    states,
    submit,
    take,
)
from workers import settling

pytestmark = pytest.mark.django_db(transaction=True)

PASSES = 25
SEED = 20_261_130


def loads() -> list[Load]:
    """Return what waits, read row by row."""
    found = []
    for workflow in Workflow.objects.filter(state__in=DISPATCHED):
        ready = Batch.objects.filter(workflow=workflow, state=BatchState.READY).count()
        stats = WorkflowStats.objects.get(pk=workflow.pk)
        ended = stats.completed + stats.failed + stats.timed_out + stats.cancelled
        if ready:
            found.append(
                Load(
                    workflow_id=workflow.pk,
                    owner=workflow.owner,
                    priority_class=_class(workflow),
                    ready_batches=ready,
                    open_requests=max(1, workflow.next_position - ended),
                    submitted_at=workflow.created_at,
                    deadline_at=workflow.deadline_at,
                    batch_size=workflow.batch_size,
                )
            )
    return found


def _class(workflow: Workflow) -> PriorityClass:
    return priority_class(workflow.priority, best_effort=workflow.best_effort)


class Shadowed:
    """A dispatcher whose passes are foretold."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.queue: Queue = queue(replica)
        self.executor = boot(slots=1_000)
        self.order = ordering.Memory()
        self.out: list[Taken] = []
        self.chance = random.Random(SEED)
        self.now = database_now()
        self.made = 0

    def come(self, of: RaterVersion) -> None:
        """Let workflows of several owners and classes come."""
        for _ in range(self.chance.randrange(3)):
            self.made += 1
            rows = [f"{self.made} {number}" for number in range(self.chance.randrange(1, 12))]
            submit(
                rows,
                of=of,
                batch_size=2,
                owner=self.chance.choice(["anna", "bert", "carl"]),
                priority=self.chance.choice([10, 50, 50, 90]),
                best_effort=self.chance.random() < 0.2,
            )

    def end_some(self) -> list[Taken]:
        """Let some of what is out end; return it."""
        ended = [taken for taken in self.out if self.chance.random() < 0.6]
        self.out = [taken for taken in self.out if taken not in ended]
        leases.finish([rated(taken) for taken in ended])
        return ended

    def run(self) -> Counter[int]:
        """Run a pass; return the batches it sent, by workflow."""
        self.now += timedelta(seconds=1)
        dispatch.run_once(
            self.now,
            memory=self.queue.memory,
            directory=self.queue.fleet,
            publish=self.queue._publish,
        )
        sent = [t for m in self.queue.take_sent() for t in take(m, by=self.executor)]
        self.out += sent
        return Counter(taken.workflow_id for taken in sent)

    def beat(self) -> None:
        ExecutorBoot.objects.update(heartbeat_at=self.now)


def test_what_is_sent_is_what_the_order_says() -> None:
    of = rater()
    shadowed = Shadowed(Replica(window=5))
    sent_in_all = 0
    for _ in range(PASSES):
        shadowed.come(of)
        shadowed.end_some()
        shadowed.beat()
        decision = ordering.next_batches(
            loads(),
            room=5 - len(shadowed.out),
            now=shadowed.now + timedelta(seconds=1),
            memory=shadowed.order,
        )

        sent = shadowed.run()

        assert sent == {pick.workflow_id: pick.batches for pick in decision.picks}
        if decision.picks:
            shadowed.order = decision.memory
        sent_in_all += sent.total()
    assert sent_in_all > 2 * PASSES


def test_a_window_is_what_the_signals_make_of_it() -> None:
    of = rater()
    replica = Replica(window=8, managed=False)
    shadowed = Shadowed(replica)
    window = traffic.open_window(8)
    shrunk = False
    for _ in range(PASSES):
        shadowed.come(of)
        submit([f"more {uuid.uuid4()}" for _ in range(8)], of=of, batch_size=2, priority=50)
        ended = shadowed.end_some()
        shadowed.beat()
        signals = _met(ended, shadowed.chance)
        if signals:
            window = traffic.adapt(
                window, [_signal(s, shadowed.now) for s in signals], shadowed.now
            )
        dispatch.observe(shadowed.queue.memory, signals, shadowed.now)
        held = Counter(_class_of(taken) for taken in shadowed.out)
        room = {
            cls: traffic.room(window, held, cls, now=shadowed.now + timedelta(seconds=1))
            for cls in PriorityClass
        }

        sent = shadowed.run()

        assert shadowed.queue.memory.windows.open.get("r1", window) == window
        by_class: Counter[PriorityClass] = Counter()
        for workflow_id, count in sent.items():
            by_class[_class(Workflow.objects.get(pk=workflow_id))] += count
        for cls, count in by_class.items():
            assert count <= max(room[cls], 0), (cls, room, window)
        shrunk = shrunk or window.limits[PriorityClass.LOW] < 8
    assert shrunk


def _class_of(taken: Taken) -> PriorityClass:
    return priority_class(taken.priority, best_effort=taken.best_effort)


def _met(ended: Sequence[Taken], chance: random.Random) -> list[dict[str, Any]]:
    """Return what executors would tell of these batches; a fifth met overload."""
    return [
        {
            "replica": "r1",
            "cls": int(_class_of(taken)),
            "succeeded": int(not overloaded),
            "overloaded": int(overloaded),
        }
        for taken in ended
        for overloaded in [chance.random() < 0.2]
    ]


def _signal(told: dict[str, Any], now: datetime) -> traffic.Signal:
    return traffic.Signal(
        priority_class=PriorityClass(told["cls"]),
        succeeded=told["succeeded"],
        overloaded=told["overloaded"],
        refused_at=now,
    )


@pytest.mark.parametrize("retry_after", [None, "30"])
def test_a_retry_is_what_the_policy_decides(
    monkeypatch: pytest.MonkeyPatch, retry_after: str | None
) -> None:
    asked: list[tuple[dict[str, Any], traffic.RetryDecision]] = []

    def listen(**values: Any) -> traffic.RetryDecision:
        decision = traffic.decide_retry(**values)
        asked.append((values, decision))
        return decision

    monkeypatch.setattr(settling, "decide_retry", listen)
    headers = {} if retry_after is None else {"Retry_After": retry_after}
    with staged(max_attempts=3) as stage, scripted(refusal(429, **headers)) as server:
        stage.serve(server.url)
        workflow = submit(["a"])
        for attempt in (1, 2):
            stage.rate()
            (batch,) = batches(workflow)
            values, decision = asked[-1]

            assert len(asked) == attempt
            assert values["attempt"] == attempt
            assert values["max_attempts"] == Rater.objects.get().max_attempts
            assert values["deadline_at"] == workflow.deadline_at
            assert (values["retry_after_s"] or None) == (retry_after and float(retry_after))
            assert decision == traffic.decide_retry(**values)
            assert (batch.state, batch.not_before) == (BatchState.DELAYED, decision.not_before)
        stage.rate()

        last = traffic.decide_retry(**{**asked[-1][0], "attempt": 3})
        assert (last.retry, last.code) == (False, "attempts_exhausted")
        assert states(workflow) == ["FAILED"]


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def uploading(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())
    monkeypatch.setattr(backlog, "BELIEVED_S", 0.0)
    monkeypatch.setattr(backlog, "_counted", backlog._Count())


def stored() -> int:
    """Return the bytes of the backlog, added up table by table."""
    return sum(
        table._default_manager.aggregate(found=Sum("stored_bytes"))["found"] or 0
        for table in (WorkflowStats, StatsDelta)
    )


@pytest.mark.usefixtures("uploading")
def test_an_upload_is_let_in_as_the_policy_decides(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(SEED)
    api = Api()
    refused: Counter[bool] = Counter()
    for turn in range(PASSES):
        settings.AIRS_MAX_BACKLOG_BYTES = max(1, stored() + chance.randrange(-500, 900))
        settings.AIRS_MIN_FREE_BYTES = chance.randrange(1_000)
        settings.AIRS_DATA_DIRECTORY = chance.choice([None, tmp_path])
        free = chance.randrange(1_500)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, f=free: Usage(total=f, used=0, free=f))
        disk = admission.Disk(free_bytes=free, floor_bytes=settings.AIRS_MIN_FREE_BYTES)
        decision = admission.admit(
            stored_bytes=stored(),
            limit_bytes=settings.AIRS_MAX_BACKLOG_BYTES,
            disk=disk if settings.AIRS_DATA_DIRECTORY else None,
        )

        answer = api.upload(f"/workflows?rater={RATER}", [row(10 * turn + n) for n in range(3)])

        refused[not decision.admitted] += 1
        if decision.admitted:
            assert answer.status_code == 202, answer.content
            continue
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (507, decision.code)
        assert problem["detail"] == decision.reason
        assert float(answer.headers["Retry-After"]) == decision.retry_after_s
    assert min(refused[True], refused[False]) > PASSES // 5, refused
