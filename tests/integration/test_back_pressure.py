"""Case S-11: a model that refuses for half a minute is sent less, and soon as much as before.

The dispatcher, two executors and the database are real, and so are the model directory and the
windows; calls and the clock are not: a minute passes in a second. The course of one window alone
is in tests/unit/test_window_course.py.
"""

import heapq
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from fulfillment import bell, dispatch, leases
from fulfillment.clock import database_now
from fulfillment.models import ExecutorBoot, Rater, RaterVersion
from fulfillment.policy.priority import PriorityClass
from fulfillment.scores import Scored
from models_admin.directory import directory
from models_admin.models import ModelConfig
from tests import builders
from tests.collected_cases import case, load
from tests.rating_queue import boot, submit
from workers import settling
from workers.autoraters import RaterSpec, Unusable
from workers.model_client import CallOutcome, CallResult
from workers.work import Work

pytestmark = pytest.mark.django_db(transaction=True)

CALLS = 10
"""That each model may hold."""
SERVICE_S = 2.0
REFUSAL_S = 0.01
TICK_S = 0.5
FULL = CALLS / SERVICE_S
"""Calls a second while a model refuses nothing."""

STEADY_S, BURSTS_S = 15, 30
ROWS = 700
SUCCESS: CallResult[Any] = CallResult(outcome=CallOutcome.SUCCESS, seconds=SERVICE_S)
REFUSED: CallResult[Any] = CallResult(
    outcome=CallOutcome.OVERLOAD, code="rate_limited", seconds=REFUSAL_S
)
BAD_ROW: CallResult[Any] = CallResult(
    outcome=CallOutcome.PERMANENT, code="invalid_request", seconds=REFUSAL_S
)
UNCLEAR = "unclear"

Answer = CallResult[Any] | str
Server = Callable[[float, int], Answer]
"""What a call comes to, by when it is sent and its number."""


@dataclass
class Model:
    """A model, and what became of its calls by second."""

    answers: Server
    calls: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    served: Counter[int] = field(default_factory=Counter)
    limits: dict[int, float] = field(default_factory=dict)

    def rate(self, start_s: int, end_s: int) -> float:
        """Return the calls served a second between two instants."""
        return sum(self.served[s] for s in range(start_s, end_s)) / (end_s - start_s)


class Run:
    """A dispatcher and two executors in virtual time."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models = models
        self.began_at = database_now()
        self.now_s = 0.0
        self.memory = dispatch.Memory()
        self.executors = [boot(slots=100), boot(slots=100)]
        self.sent: list[list[tuple[int, int, str]]] = []
        self.running: list[tuple[float, int, uuid.UUID, Work, Answer]] = []
        self.out: Counter[str] = Counter()
        self.taken_by: Counter[uuid.UUID] = Counter()
        self.specs: dict[int, RaterSpec] = {}

    @property
    def now(self) -> datetime:
        return self.began_at + timedelta(seconds=self.now_s)

    def until(self, end_s: float) -> None:
        """Let the time pass."""
        while self.now_s < end_s:
            self.end_calls()
            ExecutorBoot.objects.update(heartbeat_at=self.now)
            dispatch.observe(self.memory, bell.listen(timeout_s=0), self.now)
            leases.wake(now=self.now)
            dispatch.run_once(
                self.now,
                memory=self.memory,
                directory=directory,
                publish=lambda batches, step: self.sent.append(list(batches)),
            )
            self.take()
            for name, model in self.models.items():
                model.limits[int(self.now_s)] = self.limit(name)
            self.now_s += TICK_S

    def limit(self, name: str) -> float:
        window = self.memory.windows.open.get(f"ext-{name}")
        return window.limits[PriorityClass.MIDDLE] if window else CALLS

    def take(self) -> None:
        """Let the executors take what was sent by turns, and call the models."""
        for message in self.sent:
            executor = min(self.executors, key=lambda each: self.taken_by[each])
            taken = leases.take_over(
                [(batch_id, fence) for batch_id, fence, _ in message],
                boot_id=executor,
                task_id=uuid.uuid4(),
                call_limit=timedelta(seconds=60),
            )
            self.taken_by[executor] += len(taken)
            for each in taken:
                self.call(each, executor)
        self.sent = []

    def call(self, taken: leases.Taken, executor: uuid.UUID) -> None:
        name = taken.replica.removeprefix("ext-")
        model = self.models[name]
        self.out[name] += 1
        assert self.out[name] <= self.limit(name) + 1, "two executors share one limit"
        model.calls += 1
        model.sent[int(self.now_s)] += 1
        answer = model.answers(self.now_s, model.calls)
        took = answer.seconds if isinstance(answer, CallResult) else SERVICE_S
        work = Work(taken=taken, spec=self.spec(taken.rater_version_id))
        heapq.heappush(self.running, (self.now_s + took, taken.batch_id, executor, work, answer))

    def spec(self, version_id: int) -> RaterSpec:
        if version_id not in self.specs:
            stored = RaterVersion.objects.get(pk=version_id).spec
            self.specs[version_id] = RaterSpec(**stored)
        return self.specs[version_id]

    def end_calls(self) -> None:
        """Do with the calls that have ended what an executor does."""
        ended: dict[uuid.UUID, list[Work]] = {executor: [] for executor in self.executors}
        while self.running and self.running[0][0] <= self.now_s:
            at_s, _, executor, work, answer = heapq.heappop(self.running)
            name = work.taken.replica.removeprefix("ext-")
            self.out[name] -= 1
            self.settle(work, answer)
            if not work.troubles:
                self.models[name].served[int(at_s)] += 1
            ended[executor].append(work)
        for works in filter(None, ended.values()):
            leases.finish([settling.finish_of(work, now=self.now) for work in works])
            settling.ring(works)

    @staticmethod
    def settle(work: Work, answer: Answer) -> None:
        items = work.unsettled()
        if not isinstance(answer, CallResult):
            work.count(SUCCESS, cut=False)
            work.settle(items, [Unusable(code="unparseable", detail="x") for _ in items])
            return
        work.count(answer, cut=False)
        if answer.outcome is CallOutcome.SUCCESS:
            work.settle(items, [Scored(score=1.0) for _ in items])
        elif answer.outcome is CallOutcome.PERMANENT:
            for item in items:
                work.fail(item, answer.code)
        else:
            work.postpone(items, answer)


def refusing_in_bursts(at_s: float, number: int) -> Answer:
    """Refuse six calls in ten, one after the other, for half a minute."""
    refuses = STEADY_S <= at_s < STEADY_S + BURSTS_S and number % 10 < 6
    return REFUSED if refuses else SUCCESS


def register(name: str) -> None:
    now = database_now()
    ModelConfig.objects.create(
        id=name,
        kind="external",
        protocol="oip",
        url=f"http://{name}.example",
        model_name="m",
        max_concurrency=CALLS,
        created_at=now,
        updated_at=now,
    )
    of = builders.version(builders.rater(name, model_id=name, max_attempts=1_000), model_version="")
    rows = [f"{name}-{number}" for number in range(ROWS)]
    submit(rows, of=of, batch_size=1, deadline_in=timedelta(hours=10), ends_in=timedelta(hours=11))


def test_s_11_a_burst_halves_the_rate_of_its_rater_alone_and_it_comes_back() -> None:
    expected = load(case("S-11") / "expected.json")["expect"]
    bell.listen(timeout_s=0.01)
    register("a")
    register("b")

    def a(at_s: float, number: int) -> Answer:
        if at_s < bothered_from or number % 10:
            return refusing_in_bursts(at_s, number)
        return BAD_ROW if number % 20 else UNCLEAR

    bothered_from = float("inf")
    models = {"a": Model(a), "b": Model(lambda at_s, number: SUCCESS)}
    run = Run(models)
    first, second = models["a"], models["b"]

    run.until(STEADY_S)
    full, beside = first.rate(5, STEADY_S), second.rate(5, STEADY_S)
    assert full == pytest.approx(FULL, rel=0.15)

    down_by = STEADY_S + int(expected["down_within_s"])
    end = STEADY_S + BURSTS_S
    run.until(end)
    assert run.limit("a") <= (1 - expected["down_at_least"]) * CALLS
    assert first.rate(down_by, end) <= (1 - expected["down_at_least"]) * full
    assert min(first.limits.values()) >= 1
    assert run.limit("b") == CALLS
    assert abs(second.rate(STEADY_S, end) - beside) <= expected["rater_b_change_max"] * beside
    by_second = [first.limits[s] for s in range(STEADY_S, end)]
    cuts = [after / before for before, after in pairwise(by_second)]
    assert min(cuts) >= 0.7 - 1e-9, "at most one cut a burst"

    while run.limit("a") < expected["back_to"] * CALLS:
        assert run.now_s - end < expected["back_within_s"]
        run.until(run.now_s + 5)
    back_s = int(run.now_s)
    run.until(back_s + 12)
    assert first.rate(back_s + 4, back_s + 12) >= expected["back_to"] * full

    bothered_from = run.now_s
    before = run.limit("a")
    run.until(bothered_from + 15)
    assert run.limit("a") >= before, "bad rows and unclear answers are no overload"
    assert not expected["wrong_reason_cut"]

    assert min(run.taken_by.values()) > 50, "both executors work"
    assert not Rater.objects.exclude(paused_code="").exists()
