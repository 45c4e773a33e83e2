"""What happens to queues, as people report it: the collected cases Q-05, Q-09, Q-12, Q-13, CA-05.

Samples of our own always run, on services in process; the cases' rows and numbers where at hand.
"""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pytest_django import Settings

from fulfillment import (
    clock_steps,
    completion,
    dispatch,
    leases,
    notify,
    raters,
    recovery,
    retention,
    webhooks,
)
from fulfillment.clock import database_now
from fulfillment.leases import Finish
from fulfillment.management.commands import dispatch as dispatch_command
from fulfillment.models import (
    Batch,
    Delivery,
    Event,
    ExecutorBoot,
    Rater,
    RatingRequest,
    Upload,
    Workflow,
)
from fulfillment.policy import quota
from fulfillment.policy.lifecycle import BatchState, RequestState, WorkflowState
from fulfillment.webhooks import WebhookForm
from tests import builders
from tests.builders import MODEL, RATER, Api
from tests.chaos.fail_points import FailPoints, watched
from tests.collected_cases import case, load, rows
from tests.rating_queue import (
    Queue,
    Replica,
    boot,
    check_all,
    end_pauses,
    finished,
    queue,
    rate_all,
    rated,
    requests,
    sent_items,
    states,
    submit,
    take,
    threads,
)

pytestmark = pytest.mark.django_db(transaction=True)

CREATE = f"/workflows?rater={RATER}"


@pytest.fixture(autouse=True)
def _rater(settings: Settings, transactional_db: None, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    settings.AIRS_ALLOWED_PRIVATE_HOSTS = ("127.0.0.1",)
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


def shuffled(of: Sequence[str], prefix: str) -> list[str]:
    return [f"{prefix} {name}" for name in of]


# the last two batches end together


def both_end_at_once(jobs: int, names: Sequence[str]) -> None:
    """Let the two batches of each job end at the same instant, in two sessions."""
    webhooks.register(owner="alice", form=WebhookForm(url="http://127.0.0.1:9/x"), now=_now())
    executor = boot(slots=10_000)
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    made = [submit(shuffled(names, str(job)), of=of) for job in range(jobs)]
    running = queue(Replica(window=10_000))
    rated_of: dict[int, list[Finish]] = {}
    while running.run().sent:
        for message in running.take_sent():
            for taken in take(message, by=executor):
                rated_of.setdefault(taken.workflow_id, []).append(rated(taken))
    together = threading.Barrier(2)

    def end(place: int) -> None:
        for workflow in made:
            together.wait(20)
            for emptied in leases.finish([rated_of[workflow.pk][place]]):
                completion.check(emptied)

    with threads(2) as pool:
        for future in [pool.submit(end, place) for place in range(2)]:
            future.result(60)

    assert {finished(workflow) for workflow in made[:5]} == {"COMPLETED"}
    assert set(Workflow.objects.values_list("state", flat=True)) == {WorkflowState.COMPLETED}
    assert Counter(Event.objects.values_list("workflow_id", flat=True)) == {
        workflow.pk: 1 for workflow in made
    }
    before = list(RatingRequest.objects.order_by("pk").values())
    leases.finish([finish for finishes in rated_of.values() for finish in finishes])
    assert list(RatingRequest.objects.order_by("pk").values()) == before
    while notify.run_once(_now()):
        pass
    notify.run_once(_now())
    assert Delivery.objects.values("event", "endpoint").distinct().count() == jobs
    assert Delivery.objects.count() == jobs


def _now() -> datetime:
    return database_now()


def test_two_last_batches_that_end_together_make_one_event() -> None:
    both_end_at_once(15, [f"row {number}" for number in range(24)])


def test_q_05_200_jobs_whose_last_batches_end_together() -> None:
    folder = case("Q-05")
    expected = load(folder / "expected.json")["expect"]

    both_end_at_once(expected["jobs"], list(rows(folder / "rows.jsonl")))


# the client asks again after a lost answer; the worker is quicker than the commit


def ten_at_once(body: bytes) -> str:
    """Send the same body under one key ten times at once, until each is answered; the id."""
    clients = [Api() for _ in range(10)]

    def send(api: Api) -> str:
        for _ in range(200):
            answer = api.upload(CREATE, body, Idempotency_Key="the key")
            if answer.status_code == 202:
                return str(answer.json()["id"])
            assert answer.status_code == 409, answer.content
            assert answer.json()["code"] in {"upload_in_progress", "upload_superseded"}
        raise AssertionError("it was never answered")

    with threads(10) as pool:
        (found,) = {future.result(60) for future in [pool.submit(send, c) for c in clients]}
    assert Workflow.objects.count() == 1
    return found


def the_key_means_that_body(body: bytes, other: bytes) -> None:
    made = ten_at_once(body)
    api = Api()

    refused = api.upload(CREATE, other, Idempotency_Key="the key")
    assert (refused.status_code, refused.json()["code"]) == (409, "idempotency_conflict")
    retention.run_once(_now() + timedelta(hours=24))
    again = api.upload(CREATE, body, Idempotency_Key="the key")
    assert (again.status_code, again.json()["id"]) == (202, made)
    assert RatingRequest.objects.count() == len(body.splitlines())


def test_a_key_sent_ten_times_at_once_makes_one_workflow() -> None:
    the_key_means_that_body(
        builders.ndjson([builders.row(n) for n in range(6)]), builders.ndjson([builders.row(9)])
    )


def test_q_09_the_same_key_ten_times_then_another_body() -> None:
    folder = case("Q-09")

    the_key_means_that_body(
        (folder / "rows.jsonl").read_bytes(), (folder / "other.jsonl").read_bytes()
    )


def test_a_worker_finds_the_rows_of_every_batch_it_is_sent() -> None:
    """Dispatcher and executor run beside 60 quick submits: nothing is sent before its commit."""
    executor = boot(slots=1_000)
    running = queue()
    over = threading.Event()
    missing: list[int] = []

    def work() -> None:
        while not over.is_set():
            running.wake_and_run()
            for message in running.take_sent():
                taken = take(message, by=executor)
                missing.extend(set(message.ids) - {t.batch_id for t in taken})
                missing.extend(
                    t.batch_id
                    for t in taken
                    if RatingRequest.objects.filter(workflow_id=t.workflow_id).count() != 2
                )
                leases.finish([rated(t) for t in taken])

    def send(number: int) -> None:
        api = Api()
        for turn in range(20):
            some = [builders.row(2 * turn), builders.row(2 * turn + 1)]
            answer = api.upload(f"{CREATE}&name=n{number}-{turn}", some)
            assert answer.status_code == 202, answer.content

    with threads(4) as pool:
        worker = pool.submit(work)
        try:
            for future in [pool.submit(send, number) for number in range(3)]:
                future.result(60)
        finally:
            over.set()
            worker.result(20)
    rate_all(running, executor)
    check_all()

    assert missing == []
    assert {finished(workflow) for workflow in Workflow.objects.all()} == {"COMPLETED"}


def test_a_submit_that_is_rolled_back_sends_nothing() -> None:
    boot()
    running = queue()
    points = FailPoints(how="breaks")
    points.at_each = lambda: (
        setattr(points, "at", len(points.passed))
        if points.at is None and any("COPY" in name for name in points.passed)
        else None
    )

    with watched(points):
        answer = Api().upload(CREATE, [builders.row(1)])
        assert answer.status_code in {500, 503}
    running.wake_and_run()

    assert running.take_sent() == []
    assert not Batch.objects.exists()
    assert not RatingRequest.objects.exists()
    assert list(Workflow.objects.values_list("state", flat=True)) == [WorkflowState.RECEIVING]
    Upload.objects.update(heartbeat_at=_now() - timedelta(seconds=90))
    Workflow.objects.update(created_at=_now() - timedelta(seconds=90))
    retention.run_once(_now())
    assert not Workflow.objects.exists()


# one huge job does not starve a small one


def a_small_job_beside_a_huge_one(names: Sequence[str]) -> tuple[int, int]:
    """Two executors are busy with a huge job when a small one of another owner comes.

    Return how many batches of the huge one were sent before the first of the small one, and how
    many batches in all until the small one is done.
    """
    executor = boot(slots=64)
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    running = queue(Replica(window=2))
    huge = submit([f"a {number}" for number in range(2_400)], of=of, owner="anna")
    held = _go_on(running, executor, [], turns=10)
    small = submit(list(names), of=of, owner="bert")
    order: list[int] = []
    while small.finished_at is None:
        held = _go_on(running, executor, held, turns=1, order=order)
        check_all()
        small.refresh_from_db()
        assert len(order) < 200
    assert set(order[: order.index(small.pk)]) <= {huge.pk}
    return order.index(small.pk), len(order)


def _go_on(
    running: Queue,
    executor: uuid.UUID,
    held: Sequence[Finish],
    *,
    turns: int,
    order: list[int] | None = None,
) -> list[Finish]:
    """Let the batches that are out end, and send the next ones; return what is out then."""
    out = list(held)
    for _ in range(turns):
        leases.finish(out)
        running.wake_and_run()
        taken = [t for message in running.take_sent() for t in take(message, by=executor)]
        out = [rated(t) for t in taken]
        if order is not None:
            order += [t.workflow_id for t in taken]
    return out


def test_a_small_job_of_another_owner_soon_has_its_turn() -> None:
    before, _ = a_small_job_beside_a_huge_one([f"b {number}" for number in range(24)])

    assert before <= 2


def test_q_12_a_huge_job_does_not_starve_a_small_one() -> None:
    folder = case("Q-12")
    expected = load(folder / "expected.json")["expect"]
    steps = load(folder / "fault.json")["routes"]["/v2/models/stub/infer"]["steps"]

    before, until_done = a_small_job_beside_a_huge_one(list(rows(folder / "b.jsonl")))

    assert before <= expected["b_first_batch_after_a_batches_max"]
    # Two workers, a fifth of a second a batch.
    assert until_done / 2 * steps[0]["delay_s"] < expected["b_done_s_max"]


def test_low_work_goes_on_under_a_stream_of_urgent_work() -> None:
    executor = boot(slots=64)
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    running = queue(Replica(window=2))
    low = submit([f"low {number}" for number in range(60)], of=of, priority=5, owner="low")
    submit([f"high {number}" for number in range(2_400)], of=of, priority=90, owner="high")
    order: list[int] = []

    _go_on(running, executor, [], turns=50, order=order)

    # At two workers and 0.2 s a batch a minute is 600 batches; of 100 at least one is low.
    assert len(order) == 100
    assert order.count(low.pk) >= 1


# the clock is set, and the hour changes


def _clock_case() -> tuple[list[str], list[str], int]:
    try:
        found = load(case("Q-13") / "clock.json")
    except pytest.skip.Exception:
        return ["America/New_York"], ["2026-11-01T05:30:00Z"], 7_200
    return found["zones"], found["starts_utc"], found["run_s"]


@pytest.fixture
def zone() -> Iterator[Callable[[str], None]]:
    """Let this process live in a time zone."""
    with pytest.MonkeyPatch.context() as patch:

        def live_in(name: str) -> None:
            patch.setenv("TZ", name)
            time.tzset()

        yield live_in
    time.tzset()


def test_daylight_saving_runs_nothing_twice_and_nothing_an_hour_late(
    zone: Callable[[str], None],
) -> None:
    names, starts, run_s = _clock_case()
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    step = timedelta(minutes=5)
    for name in names:
        zone(name)
        assert database_now().utcoffset() == timedelta(0)
        for start in starts:
            began = datetime.fromisoformat(start.replace("Z", "+00:00"))
            waits = submit([f"{name} {start}"], of=of, state=WorkflowState.PAUSED)
            ends = submit([f"late {name} {start}"], of=of, state=WorkflowState.PAUSED)
            due = began + timedelta(seconds=run_s) / 2 + timedelta(seconds=30)
            Workflow.objects.exclude(pk=ends.pk).update(
                deadline_at=began + timedelta(days=99), ends_at=began + timedelta(days=99)
            )
            Workflow.objects.filter(pk=ends.pk).update(
                deadline_at=due, ends_at=began + timedelta(days=99)
            )
            Batch.objects.filter(workflow=waits).update(
                state=BatchState.DELAYED, not_before=due, attempts=1
            )
            woken: list[datetime] = []
            bucket = None
            for turn in range(run_s // int(step.total_seconds())):
                now = began + turn * step
                if leases.wake(now=now):
                    woken.append(now)
                leases.expire(now=now, trust_heartbeats=True)
                bucket = quota.fill(bucket, 1.0, now)
                assert bucket.calls == 1.0  # five minutes fill it
                bucket = quota.spend(bucket, 1)
                completion.run_once(now)
                recovery.mark("completion", now)
                assert "completion" not in recovery.late(now + timedelta(seconds=1))
                ends.refresh_from_db()
                has_ended = states(ends) == ["TIMED_OUT"]
                assert has_ended == (now >= due), (name, start, now)

            assert [now - due < step for now in woken] == [True]
            stored = Batch.objects.get(workflow=waits)
            assert stored.state == BatchState.READY
            stats = Workflow.objects.get(pk=ends.pk)
            assert stats.deadline_at.utcoffset() == timedelta(0)


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> "SteppedLeader":
    return SteppedLeader(monkeypatch)


class SteppedLeader:
    """A leading dispatcher on a clock that can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.elapsed_s = _now(), 0.0
        self.queue = queue()
        monkeypatch.setattr(dispatch_command, "database_now", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.elapsed_s)
        monkeypatch.setattr(dispatch_command, "model_directory", lambda: self.queue.fleet)
        self.leading = dispatch_command._Leader()
        self.leading._publish = self.queue._publish  # type: ignore[assignment]
        self.leading._pass([])

    def pass_time(self, seconds: float, *, step: timedelta = timedelta(0)) -> None:
        """Let time pass, and the clock be set by a step; executors go on beating."""
        self.wall += timedelta(seconds=seconds) + step
        self.elapsed_s += seconds
        ExecutorBoot.objects.update(heartbeat_at=self.wall)
        self.leading._pass([])


@pytest.mark.parametrize("step", [timedelta(hours=-1), timedelta(hours=1)])
def test_a_step_of_the_clock_moves_neither_calls_nor_back_offs(
    leader: SteppedLeader, step: timedelta
) -> None:
    executor = boot()
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    far = {"deadline_in": timedelta(days=1), "ends_in": timedelta(days=1)}
    running = submit(["runs"], of=of, **far)  # type: ignore[arg-type]
    delayed = submit(["waits"], of=of, **far)  # type: ignore[arg-type]
    Batch.objects.filter(workflow=delayed).update(
        state=BatchState.DELAYED, not_before=leader.wall + timedelta(seconds=60), attempts=1
    )
    leader.pass_time(1)
    (message,) = leader.queue.take_sent()
    (call,) = take(message, by=executor)
    lease = Batch.objects.get(workflow=running).lease_until
    assert lease is not None

    leader.pass_time(1, step=step)
    for _ in range(4):
        leader.pass_time(10)

    # 42 s after it was taken over, a call of up to 60 s still runs under its lease.
    assert Batch.objects.get(workflow=running).fence == call.fence
    assert Batch.objects.get(workflow=delayed).state == BatchState.DELAYED
    leader.pass_time(20)
    (again,) = leader.queue.take_sent()
    assert Batch.objects.get(workflow=delayed).pk in again.ids
    assert leases.finish([rated(call)]) == [running.pk]
    assert states(running) == ["COMPLETED"]


def test_a_lost_message_comes_again_at_once_although_the_clock_was_set_back(
    leader: SteppedLeader,
) -> None:
    boot()
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    submit(["lost"], of=of)
    leader.pass_time(1)
    assert len(leader.queue.take_sent()) == 1

    leader.pass_time(1, step=timedelta(hours=-1))
    for _ in range(4):
        leader.pass_time(10)

    assert len(leader.queue.take_sent()) == 1


def test_a_step_back_does_not_let_a_replica_rest_until_the_clock_catches_up() -> None:
    memory = dispatch.Memory()
    now = _now()

    dispatch.observe(memory, [{"replica": "r1", "away": 1, "cls": 1, "succeeded": 0,
                               "overloaded": 0}], now)  # fmt: skip
    assert "r1" in memory.resting
    dispatch.observe(memory, [], now - timedelta(hours=1))

    assert memory.resting == {}


def test_what_was_written_after_a_step_is_not_moved_by_it() -> None:
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    now = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
    hour = timedelta(hours=1)
    for name, at in (("old", now - hour + timedelta(seconds=60)), ("new", now + hour / 60)):
        made = submit([name], of=of)
        Batch.objects.filter(workflow=made).update(
            state=BatchState.DELAYED, not_before=at, attempts=1
        )

    assert clock_steps.follow(before=now - hour, now=now) == 1

    assert set(Batch.objects.values_list("not_before", flat=True)) == {now + hour / 60}


# CA-05: two jobs want the same rows at the same moment


def pair(names: Sequence[str]) -> tuple[Queue, uuid.UUID, Workflow, Workflow]:
    of = raters.current_version(Rater.objects.get(pk=RATER), _now())
    with threads(2) as pool:
        first, second = (
            future.result(20)
            for future in [pool.submit(submit, list(names), of=of) for _ in range(2)]
        )
    return queue(Replica(window=8)), boot(slots=1_000), first, second


@pytest.fixture
def pair_names() -> list[str]:
    try:
        return list(rows(case("CA-05") / "pair.jsonl"))
    except pytest.skip.Exception:
        return [f"p{number}" for number in range(120)]


def test_ca_05_two_jobs_of_the_same_rows_cost_one_prediction_each(pair_names: list[str]) -> None:
    running, executor, first, second = pair(pair_names)

    computed = rate_all(running, executor)
    check_all()

    assert computed == len(pair_names)
    assert [finished(first), finished(second)] == ["COMPLETED", "COMPLETED"]
    scores = [[r.score for r in requests(workflow)] for workflow in (first, second)]
    assert scores[0] == scores[1]


def test_ca_05_what_fails_for_the_first_runs_for_the_second(pair_names: list[str]) -> None:
    running, executor, first, second = pair(pair_names)
    running.wake_and_run()
    failing, *others = [t for m in running.take_sent() for t in take(m, by=executor)]
    tried = len(sent_items(failing)) + sum(len(sent_items(t)) for t in others)

    leases.finish(
        [
            Finish(taken=failing, not_before=_now() + timedelta(minutes=20), calls=1),
            *(rated(t) for t in others),
        ]
    )
    computed = tried + rate_all(running, executor)
    follower = second if failing.workflow_id == first.pk else first
    check_all()
    assert finished(follower) == "COMPLETED"
    end_pauses()
    computed += rate_all(running, executor)
    check_all()

    assert [finished(first), finished(second)] == ["COMPLETED", "COMPLETED"]
    assert computed <= len(pair_names) + 12


def test_ca_05_a_leader_that_is_cancelled_at_once_holds_nobody_up(pair_names: list[str]) -> None:
    running, executor, first, second = pair(pair_names)
    running.wake_and_run()

    answer = Api().post(f"/workflows/{first.public_id}/cancel")
    assert answer.status_code == 200
    for message in running.take_sent():
        leases.finish([rated(t) for t in take(message, by=executor)])
    leases.expire(now=_now() + leases.PICK_UP, trust_heartbeats=True)
    rate_all(running, executor)
    check_all()

    assert finished(second) == "COMPLETED"
    assert set(states(second)) == {RequestState.COMPLETED.name}
