"""Forecasts of workflows: made when they come, renewed each minute, and remembered at their end."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from fulfillment import (
    commitments,
    control,
    costs,
    erasing,
    leases,
    promises,
    queue_history,
    recovery,
)
from fulfillment.api_schema import forecast_as_json
from fulfillment.clock import database_now
from fulfillment.costs import Servers
from fulfillment.models import (
    Flow,
    QueueSample,
    Rater,
    RaterCost,
    SendWindow,
    Workflow,
    WorkflowForecast,
    WorkflowStats,
)
from fulfillment.policy.commitments import NEW_MARGIN
from fulfillment.policy.lifecycle import BatchState, EndingReason, WorkflowState
from fulfillment.policy.priority import PriorityClass
from tests import builders
from tests.builders import DIRECTORY, MODEL, NOW, RATER, Api
from tests.rating_queue import Replica, boot, check_all, queue, rate_all, rated, submit, take

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _fleet(settings: Settings, tmp_path: Path) -> Iterator[None]:
    """One live replica, and a rater of batches of ten."""
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    DIRECTORY.live = [Replica()]
    builders.version(builders.rater(batch_size=10))
    yield
    DIRECTORY.live = []


def cost(seconds_a_batch: float = 1.0, *, rater_id: str = RATER, **changes: Any) -> RaterCost:
    """Store what a batch of ten takes."""
    return RaterCost.objects.create(
        **{
            "rater_id": rater_id,
            "seconds_a_request": seconds_a_batch / 10,
            "call_seconds_a_request": seconds_a_batch,
            "requests": 1_000,
            "exact": True,
            "measured_at": NOW,
            "read_to": NOW,
            "servers": 1,
            "looked_at": database_now(),
            **changes,
        }
    )


def workflow(batches: float, *, deadline: timedelta = HOUR, **changes: Any) -> Workflow:
    """Store a workflow with so many open batches of ten."""
    return builders.workflow(
        stats={"received": round(batches * 10)},
        **{"deadline_at": NOW + deadline, "batch_size": 10, "started_at": NOW, **changes},
    )


def said(of: Workflow) -> WorkflowForecast:
    return WorkflowForecast.objects.get(pk=of.pk)


def sample(
    at: datetime, *, ready: int = 0, worked: int = 0, call_seconds: float = 0.0, **changes: Any
) -> None:
    """Store what a rater did in the half minute before."""
    zero = dict.fromkeys(("leased", "delayed", "waiting", "workflows", "paused_requests"), 0)
    fields: dict[str, Any] = {
        "rater_id": RATER,
        "priority_class": PriorityClass.MIDDLE,
        "period_s": 30,
        "oldest_s": 60 if ready else None,
        "open_requests": ready * 10,
        "ended": worked,
        "model_calls": worked // 10,
        **changes,
    }
    QueueSample.objects.create(
        at=at, ready=ready, worked=worked, accelerator_seconds=call_seconds, **zero, **fields
    )


def learned(now: datetime = NOW) -> RaterCost | None:
    costs.learn(Servers(DIRECTORY, now), now)
    return RaterCost.objects.filter(pk=RATER).first()


class TestWhatABatchTakes:
    """Learned from the samples of the queue."""

    def test_nothing_is_known_before_anything_was_rated(self) -> None:
        sample(NOW, ready=5)

        assert learned() is None

    def test_a_busy_replica_is_measured_by_the_clock(self) -> None:
        DIRECTORY.live = [Replica(key="r1"), Replica(key="r2")]
        sample(NOW - MINUTE / 2, ready=90)
        # 60 batches of ten in half a minute, each held for eight seconds, by two replicas.
        sample(NOW, ready=30, worked=600, call_seconds=480, device_seconds=54)

        found = learned()

        assert found is not None
        assert 10 * found.seconds_a_request == pytest.approx(1.0)
        assert 10 * found.device_seconds_a_request == pytest.approx(0.9)
        assert 10 * found.call_seconds_a_request == pytest.approx(8.0)
        assert (found.exact, found.servers, found.requests) == (True, 2, 600)
        assert (found.measured_at, found.read_to) == (NOW, NOW)

    def test_work_that_came_between_two_samples_did_not_wait_all_the_time(self) -> None:
        DIRECTORY.live = [Replica(key="r1"), Replica(key="r2")]
        sample(NOW - MINUTE / 2, ready=1, oldest_s=29)
        sample(NOW, ready=1, worked=20, call_seconds=16, oldest_s=2)

        found = learned()

        assert found is not None
        assert not found.exact

    def test_a_sample_is_learned_from_once(self) -> None:
        sample(NOW, worked=600, call_seconds=6)
        first = learned()

        again = learned(NOW + MINUTE)

        assert first is not None
        assert again is not None
        assert again.requests == first.requests == 600
        assert not again.exact

    def test_classes_are_summed_up_and_raters_share_what_is_not_waiting(self) -> None:
        other = builders.rater("other", batch_size=10)
        builders.version(other)
        sample(NOW - MINUTE / 2, ready=9)
        for cls in (PriorityClass.HIGH, PriorityClass.LOW):
            sample(NOW, ready=9, worked=150, call_seconds=150, priority_class=cls)
        sample(NOW, worked=100, call_seconds=100, rater_id="other")

        found = learned()

        # 400 call seconds in 30 s of one replica, three quarters of them of the first rater.
        assert found is not None
        assert 300 * found.seconds_a_request == pytest.approx(22.5)
        assert found.exact
        second = RaterCost.objects.get(pk="other")
        assert 100 * second.seconds_a_request == pytest.approx(7.5)
        # Its replica was busy with what waited for the other.
        assert second.exact

    def test_an_external_model_counts_the_calls_that_it_may_hold_now(self) -> None:
        DIRECTORY.live = [Replica(key="ext", managed=False, window=64, protocol="openai")]
        SendWindow.objects.create(
            replica="ext", model_id=MODEL, ceiling=64, limits=[16.0, 8, 4, 1],
            dropped_at=[None] * 4, reason="external", written_at=NOW,
        )  # fmt: skip
        sample(NOW, ready=9, worked=480, call_seconds=480)

        found = learned()

        assert found is not None
        assert found.servers == 16
        assert found.seconds_a_request == pytest.approx(1.0)

    def test_without_a_replica_nothing_is_learned(self) -> None:
        DIRECTORY.live = []
        sample(NOW, ready=9, worked=480, call_seconds=480)

        assert learned() is None

    def test_who_serves_another_version_is_not_reached(self) -> None:
        cost()
        DIRECTORY.live = [Replica(), Replica(key="r2", version="v2")]

        found = learned()

        assert found is not None
        assert found.servers == 1


class TestRenewal:
    """Each minute, all that is open."""

    def test_what_fits_is_said_to_be_in_time(self) -> None:
        cost(1.0)
        of = workflow(1_000)

        commitments.run_once(NOW)

        found = said(of)
        assert (found.share, found.cut_batches) == (1.0, 0.0)
        assert found.reason == "all is expected in time"
        assert (found.made_at, found.first_at, found.first_share) == (NOW, NOW, 1.0)
        assert found.settled_at is None

    def test_what_does_not_fit_is_cut_and_as_much_expected_as_is_left(self) -> None:
        cost(1.0)
        high, low = workflow(2_000, priority=90), workflow(2_000, priority=10)

        commitments.run_once(NOW)

        left = NEW_MARGIN * 3_600 - 2_000
        assert said(high).share == 1.0
        assert said(low).cut_batches == 2_000
        assert said(low).share == pytest.approx(left / 2_000)
        assert f"{2_000 - left:.1f} of 2000.0 batches" in said(low).reason

    def test_slack_is_given_back(self) -> None:
        cost(1.0)
        of = workflow(4_000)
        commitments.run_once(NOW)
        assert said(of).share < 1

        DIRECTORY.live = [Replica(), Replica(key="r2")]
        commitments.run_once(NOW + MINUTE)

        assert said(of).share == 1.0
        assert said(of).first_share < 1  # type: ignore[operator]
        assert said(of).first_at == NOW

    def test_batches_count_by_the_size_and_the_rater_that_they_have(self) -> None:
        cost(1.0)
        slow = builders.version(builders.rater("slow", batch_size=10))
        cost(4.0, rater_id="slow")
        # 500 batches of twenty take 1,000 s, 100 slow ones 400 s.
        big = builders.workflow(
            stats={"received": 10_000}, batch_size=20, deadline_at=NOW + HOUR, priority=90
        )
        slow_one = builders.workflow(
            slow, stats={"received": 1_000}, batch_size=10, deadline_at=NOW + HOUR, priority=90
        )
        rest = workflow(2_200, priority=10)

        commitments.run_once(NOW)

        assert said(big).share == said(slow_one).share == 1.0
        assert said(rest).share == pytest.approx((NEW_MARGIN * 3_600 - 1_400) / 2_200)

    def test_what_is_out_counts_half_and_is_not_cut(self) -> None:
        cost(100.0)
        of = workflow(40, deadline=timedelta(seconds=1_000))
        for number in range(4):
            builders.batch(of, list(range(10 * number, 10 * number + 10)), state=BatchState.LEASED)

        commitments.run_once(NOW)

        assert (said(of).unsent_batches, said(of).in_flight_batches) == (36, 4)
        assert said(of).cut_batches == 36
        assert said(of).share == pytest.approx(1 - (36 - (NEW_MARGIN * 10 - 2)) / 40)

    def test_a_limit_of_calls_a_second_bounds_what_fits(self) -> None:
        cost(0.001)
        Rater.objects.filter(pk=RATER).update(max_qps=0.5)
        of = workflow(3_600)

        commitments.run_once(NOW)

        assert said(of).share == pytest.approx(NEW_MARGIN / 2)

    def test_a_workflow_of_an_external_model_is_planned_by_what_its_own_calls_took(self) -> None:
        DIRECTORY.live = [Replica(key="ext", managed=False, window=1)]
        cost(1.0, call_seconds_a_request=0.1)
        of = builders.workflow(
            stats={"received": 2_100, "completed": 100, "from_model": 100,
                   "accelerator_seconds": 30},
            batch_size=10, deadline_at=NOW + HOUR, started_at=NOW,
        )  # fmt: skip

        commitments.run_once(NOW)

        # Ten batches of three seconds, and ten of one that its rater's mean counts for.
        assert said(of).seconds_a_batch == pytest.approx(2.0)

    def test_its_eta_is_not_past_its_max_duration_and_says_what_is_not_in_time(self) -> None:
        cost(1.0)
        later = NOW + MINUTE
        ends_at = later + MINUTE
        of = builders.workflow(
            stats={"received": 2_600, "completed": 600, "from_model": 600},
            batch_size=10, started_at=NOW, deadline_at=NOW + HOUR, ends_at=ends_at,
        )  # fmt: skip
        Flow.objects.create(
            workflow_id=of.pk, at=later, ended=600, worked=600, model_calls=60,
            accelerator_seconds=60,
        )  # fmt: skip

        commitments.run_once(later)

        assert forecast_as_json(said(of))["eta"] == {
            "seconds": 60,
            "low": 60,
            "high": 60,
            "in_time": False,
        }

    def test_a_max_duration_before_the_deadline_is_what_is_planned_for(self) -> None:
        cost(1.0)
        of = workflow(2_000, ends_at=NOW + HOUR / 2)

        commitments.run_once(NOW)

        assert said(of).deadline_at == NOW + HOUR / 2
        assert said(of).share == pytest.approx(NEW_MARGIN * 1_800 / 2_000)

    def test_what_is_paused_late_or_served_by_nobody_is_not_forecast(self) -> None:
        cost(1.0)
        running = workflow(10)
        for changes in (
            {"state": WorkflowState.PAUSED},
            {"deadline": -MINUTE},
            {"state": WorkflowState.ENDING, "ending_reason": EndingReason.FORCED},
        ):
            workflow(10, **changes)
        old = builders.version(Rater.objects.get(pk=RATER), number=2, model_version="v0")
        builders.workflow(old, stats={"received": 10}, deadline_at=NOW + HOUR)

        commitments.run_once(NOW)

        assert [f.pk for f in WorkflowForecast.objects.all()] == [running.pk]

    def test_no_replica_no_forecast(self) -> None:
        cost(1.0)
        DIRECTORY.live = []
        workflow(10)

        commitments.run_once(NOW)

        assert not WorkflowForecast.objects.exists()

    def test_a_paused_rater_is_not_forecast(self) -> None:
        cost(1.0)
        Rater.objects.filter(pk=RATER).update(paused_at=NOW, paused_code="unauthorized")
        workflow(10)

        commitments.run_once(NOW)

        assert not WorkflowForecast.objects.exists()

    def test_a_promise_is_made_when_all_rows_are_known(self) -> None:
        cost(1.0)
        of = workflow(10, state=WorkflowState.OPEN)
        commitments.run_once(NOW)
        assert said(of).first_at is None

        Workflow.objects.filter(pk=of.pk).update(state=WorkflowState.RUNNING, closed_at=NOW)
        commitments.run_once(NOW + MINUTE)

        assert said(of).first_at == NOW + MINUTE

    @pytest.mark.parametrize("changes", [{"deadline_at": NOW + 2 * HOUR}, {"priority": 90}])
    def test_another_deadline_or_class_is_another_promise(self, changes: dict[str, Any]) -> None:
        cost(1.0)
        of = workflow(10)
        commitments.run_once(NOW)
        commitments.run_once(NOW + MINUTE)
        assert said(of).first_at == NOW

        Workflow.objects.filter(pk=of.pk).update(**changes)
        commitments.run_once(NOW + 2 * MINUTE)

        assert said(of).first_at == NOW + 2 * MINUTE

    def test_the_service_runs_by_the_recovery_table(self) -> None:
        cost(1.0)
        of = workflow(10)

        assert recovery.run(commitments.SERVICE, NOW)

        assert said(of).share == 1.0

    def test_many_workflows_cost_the_statements_of_few(
        self, django_assert_max_num_queries: Any
    ) -> None:
        cost(1.0)
        for _ in range(30):
            workflow(10)

        with django_assert_max_num_queries(40):
            commitments.run_once(NOW)


class TestAtSubmission:
    """The answer to an upload."""

    def test_it_has_a_forecast_that_the_workflow_keeps_showing(self) -> None:
        cost(1.0)
        api = Api()
        rows = [builders.row(n) for n in range(50)]

        answer = api.upload(f"/workflows?rater={RATER}&deadline_s=600", rows).json()

        assert answer["forecast"]["share_in_time"] == 1.0
        assert answer["forecast"]["cut"] == 0
        assert answer["forecast"]["first"]["share_in_time"] == 1.0
        assert answer["forecast"]["kept"] is None
        shown = api.get(f"/workflows/{answer['id']}").json()
        assert shown["forecast"] == answer["forecast"]
        (listed,) = api.get("/workflows").json()["items"]
        assert listed["forecast"] == answer["forecast"]

    def test_what_does_not_fit_is_told_and_cut(self) -> None:
        cost(100.0)
        rows = [builders.row(n) for n in range(50)]

        answer = Api().upload(f"/workflows?rater={RATER}&deadline_s=200", rows).json()

        share = NEW_MARGIN * 2 / 5
        assert answer["forecast"]["share_in_time"] == pytest.approx(share, abs=0.001)
        assert "of 5.0 batches that wait do not fit" in answer["forecast"]["reason"]
        of = Workflow.objects.get()
        assert promises.cuts(database_now()) == {of.pk: 5.0}

    def test_what_is_cut_has_the_eta_of_best_effort(self) -> None:
        cost(1.0)
        now = database_now()
        busy = builders.workflow(
            stats={"received": 2_600, "completed": 600, "from_model": 600},
            batch_size=10, started_at=now - MINUTE, deadline_at=now + HOUR, ends_at=now + HOUR,
        )  # fmt: skip
        Flow.objects.create(
            workflow_id=busy.pk, at=now, ended=600, worked=600, model_calls=60,
            accelerator_seconds=60,
        )  # fmt: skip
        url = f"/workflows?rater={RATER}&priority=90&deadline_s="
        api = Api()

        fits = api.upload(f"{url}900", [builders.row(n) for n in range(50)]).json()
        cut = api.upload(f"{url}2", [builders.row(n) for n in range(50, 100)]).json()

        assert (fits["forecast"]["cut"], cut["forecast"]["cut"] > 0) == (0, True)
        assert cut["eta"]["seconds"] > 10 * fits["eta"]["seconds"]
        assert cut["forecast"]["eta"]["seconds"] == cut["eta"]["seconds"]

    def test_a_newcomer_of_a_higher_class_takes_from_a_lower_one(self) -> None:
        cost(100.0)
        api = Api()
        url = f"/workflows?rater={RATER}&deadline_s=1000"
        low = api.upload(f"{url}&priority=10", [builders.row(n) for n in range(50)]).json()
        assert low["forecast"]["share_in_time"] == 1.0

        high = api.upload(f"{url}&priority=90", [builders.row(n) for n in range(50, 100)]).json()

        assert high["forecast"]["share_in_time"] == 1.0
        shown = api.get(f"/workflows/{low['id']}").json()["forecast"]
        assert shown["share_in_time"] == pytest.approx((NEW_MARGIN * 10 - 5) / 5, abs=0.01)
        assert "of 5.0 batches" in shown["reason"]
        assert shown["first"]["share_in_time"] == 1.0

    def test_before_anything_was_measured_there_is_none(self) -> None:
        answer = Api().upload(f"/workflows?rater={RATER}", [builders.row()]).json()

        assert answer["forecast"] is None

    @pytest.mark.parametrize(
        "changes", [{"servers": 0}, {"looked_at": NOW - timedelta(days=1)}], ids=str
    )
    def test_without_a_recent_look_at_replicas_there_is_none(self, changes: dict[str, Any]) -> None:
        cost(1.0, **changes)

        answer = Api().upload(f"/workflows?rater={RATER}", [builders.row()]).json()

        assert answer["forecast"] is None

    def test_an_open_workflow_is_forecast_without_a_promise(self) -> None:
        cost(1.0)

        answer = Api().upload(f"/workflows?rater={RATER}&close=false", [builders.row()]).json()

        assert answer["forecast"]["share_in_time"] == 1.0
        assert answer["forecast"]["first"] is None

    def test_a_workflow_without_work_has_none(self) -> None:
        cost(1.0)

        answer = Api().post("/workflows", {"rater": RATER}).json()

        assert answer["forecast"] is None

    def test_a_repeated_upload_is_told_what_was_said(self) -> None:
        cost(1.0)
        api = Api()
        first, second = (
            api.upload(f"/workflows?rater={RATER}", [builders.row()], Idempotency_Key="k").json()
            for _ in range(2)
        )

        assert second["forecast"] == first["forecast"]

    def test_an_upload_does_not_fail_for_its_forecast(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cost(1.0)

        def fail(*_: Any, **__: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")

        monkeypatch.setattr(promises, "store", fail)

        answer = Api().upload(f"/workflows?rater={RATER}", [builders.row()])

        assert answer.status_code == 202
        assert answer.json()["forecast"] is None
        assert Workflow.objects.get().state == WorkflowState.RUNNING

    def test_beside_very_many_it_waits_for_the_minute(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cost(1.0)
        monkeypatch.setattr(commitments, "MOST_ADMITTED", 1)
        api = Api()

        answers = [
            api.upload(f"/workflows?rater={RATER}", [builders.row(n)]).json() for n in range(3)
        ]

        assert [answer["forecast"] is None for answer in answers] == [False, False, True]

    def test_it_costs_a_handful_of_statements(self) -> None:
        cost(1.0)
        of, now = submit([f"a{n}" for n in range(30)], batch_size=10), database_now()

        with connection.execute_wrapper(counting := Counting()):
            commitments.admit(of, pending=30, accepted=30, etas={False: None, True: None}, now=now)

        # Begin and end, a setting, what its work takes, who else is open, its row, that row again.
        assert counting.statements == 7
        assert said(of).share == 1.0


class Counting:
    """An execute wrapper that counts."""

    def __init__(self) -> None:
        self.statements = 0

    def __call__(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        self.statements += 1
        return execute(sql, params, many, context)


class TestCuts:
    """What ETAs take for best effort."""

    def test_only_forecasts_of_late_count(self) -> None:
        cost(1.0)
        of = workflow(4_000, deadline_at=database_now() + HOUR)
        now = database_now()
        commitments.run_once(now)
        assert promises.cuts(now) == {of.pk: 4_000}

        assert promises.cuts(now + promises.BELIEVED) == {}

    def test_only_forecasts_of_this_round_count(self) -> None:
        cost(1.0)
        of = workflow(4_000)
        commitments.run_once(NOW)

        WorkflowForecast.objects.update(round=of.round + 1)

        assert promises.cuts(NOW) == {}

    def test_reading_them_is_one_look_into_a_small_index(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute(
                "EXPLAIN SELECT workflow_id, cut_batches FROM fulfillment_workflowforecast"
                " WHERE settled_at IS NULL AND cut_batches > 0"
            )
            plan = " ".join(row[0] for row in cursor.fetchall())

        assert "Index Scan" in plan
        assert "Seq Scan" not in plan


class TestPromises:
    """What was said first, and what became of it."""

    def finished(self, *, at: datetime = NOW, **stats: int) -> Workflow:
        """Return a workflow that was said to be all in time and then ended."""
        of = workflow(10)
        commitments.run_once(at)
        self.end(of, WorkflowState.PARTIAL, **stats)
        commitments.run_once(at + MINUTE)
        return of

    def end(self, of: Workflow, state: WorkflowState = WorkflowState.PARTIAL, **stats: int) -> None:
        Workflow.objects.filter(pk=of.pk).update(state=state, finished_at=NOW + MINUTE / 2)
        WorkflowStats.objects.filter(pk=of.pk).update(**{"completed": 100, **stats})

    def test_all_in_time_was_kept_if_nothing_timed_out(self) -> None:
        cost(1.0)
        kept, broken = self.finished(), self.finished(completed=99, timed_out=1)
        failed = self.finished(completed=0, failed=100)

        assert [said(of).kept for of in (kept, broken, failed)] == [True, False, True]
        found = promises.kept_rate(NOW, NOW + HOUR)
        assert (found.promised, found.kept, found.doubted) == (3, 2, 0)
        assert found.rate == pytest.approx(2 / 3)

    def test_settling_twice_says_the_same(self) -> None:
        cost(1.0)
        of = self.finished()
        before = said(of)

        commitments.run_once(NOW + 5 * MINUTE)

        assert (said(of).settled_at, said(of).kept) == (before.settled_at, True)

    @pytest.mark.parametrize(
        ("state", "changes"),
        [
            (WorkflowState.CANCELLED, {"ending_reason": EndingReason.CANCELLED}),
            (WorkflowState.PARTIAL, {"ending_reason": EndingReason.FORCED}),
        ],
    )
    def test_what_the_client_ended_counts_neither_way(
        self, state: WorkflowState, changes: dict[str, Any]
    ) -> None:
        cost(1.0)
        of = workflow(10)
        commitments.run_once(NOW)
        Workflow.objects.filter(pk=of.pk).update(state=WorkflowState.ENDING, **changes)
        self.end(of, state)

        commitments.run_once(NOW + MINUTE)

        assert (said(of).settled_at, said(of).kept) == (NOW + MINUTE, None)
        assert promises.kept_rate(NOW, NOW + HOUR).rate is None

    def test_what_was_doubted_is_counted_apart(self) -> None:
        cost(1_000.0)
        first, second = workflow(10), workflow(10)
        commitments.run_once(NOW)
        assert max(said(first).share, said(second).share) < 1
        self.end(first)
        self.end(second, completed=50, timed_out=50)

        commitments.run_once(NOW + MINUTE)

        found = promises.kept_rate(NOW, NOW + HOUR)
        assert (found.promised, found.doubted, found.doubted_whole) == (0, 2, 1)

    def test_a_pause_takes_the_promise_back(self) -> None:
        cost(1.0)
        of = workflow(10)
        commitments.run_once(NOW)

        Workflow.objects.filter(pk=of.pk).update(state=WorkflowState.PAUSED)
        commitments.run_once(NOW + MINUTE)
        assert not WorkflowForecast.objects.exists()
        Workflow.objects.filter(pk=of.pk).update(state=WorkflowState.RUNNING)
        commitments.run_once(NOW + 2 * MINUTE)

        assert said(of).first_at == NOW + 2 * MINUTE

    def test_a_new_round_opens_a_settled_forecast_again(self) -> None:
        cost(1.0)
        of = self.finished(completed=50, timed_out=50)
        assert said(of).kept is False

        Workflow.objects.filter(pk=of.pk).update(
            state=WorkflowState.REOPENING, finished_at=None, round=2
        )
        Workflow.objects.filter(pk=of.pk).update(state=WorkflowState.RUNNING)
        WorkflowStats.objects.filter(pk=of.pk).update(timed_out=0)
        commitments.run_once(NOW + 2 * MINUTE)

        assert (said(of).settled_at, said(of).kept, said(of).round) == (None, None, 2)

    def test_the_whole_way_of_a_workflow(self) -> None:
        executor = boot()
        of = submit([f"a{n}" for n in range(40)], batch_size=10)
        cost(1.0)
        now = database_now()
        commitments.run_once(now)
        assert said(of).first_share == 1.0

        rate_all(queue(), executor)
        check_all()
        commitments.run_once(now + MINUTE)

        assert said(of).kept is True

    def test_the_queue_says_how_many_were_kept(self) -> None:
        cost(1.0)
        now = database_now()
        Workflow.objects.update(deadline_at=now + HOUR)
        of = workflow(10, deadline_at=now + HOUR)
        commitments.run_once(now - 2 * MINUTE)
        self.end(of)
        commitments.run_once(now - MINUTE)

        shown = Api().get("/queue").json()["forecasts"]

        assert {name: shown[name] for name in shown if name != "since"} == {
            "promised": 1,
            "kept": 1,
            "doubted": 0,
            "doubted_whole": 0,
            "kept_rate": 1.0,
        }

    def test_a_forecast_goes_with_its_workflow(self) -> None:
        cost(1.0)
        of = self.finished()

        erasing.begin_erasure(of.pk, NOW)
        erasing.go_on(erasing.Budget(1_000))

        assert not WorkflowForecast.objects.exists()


def test_the_admin_shows_what_is_expected(admin_client: Client) -> None:
    cost(1.0)
    of = workflow(4_000)
    page = reverse("admin:fulfillment_workflow_change", args=[of.pk])
    assert "nobody knows yet" in admin_client.get(page).content.decode()

    commitments.run_once(NOW)

    text = admin_client.get(page).content.decode()
    share = f"{NEW_MARGIN * 90:.3g} %"
    assert f"{share} in time" in text
    assert f"At first {share}" in text


def test_what_is_measured_of_a_running_queue_forecasts_the_next_workflow() -> None:
    """From the sampler through the service to the answer of an upload."""
    executor = boot()
    dispatcher = queue()
    of = submit([f"a{n}" for n in range(200)], batch_size=10)
    start = database_now()
    recovery.run(queue_history.SERVICE, start)
    dispatcher.run()
    for message in dispatcher.take_sent():
        leases.finish([rated(taken) for taken in take(message, by=executor)])
    check_all()
    recovery.run(queue_history.SERVICE, start + MINUTE / 2)

    commitments.run_once(start + MINUTE)

    found = RaterCost.objects.get(pk=RATER)
    # Sixteen calls of 0.25 s for ten requests each.
    assert found.seconds_a_request == pytest.approx(0.025)
    assert said(of).share == 1.0
    RaterCost.objects.update(looked_at=database_now())
    answer = Api().upload(f"/workflows?rater={RATER}", [builders.row()]).json()
    assert answer["forecast"]["share_in_time"] == 1.0


def test_changing_the_deadline_by_the_api_begins_a_new_promise() -> None:
    cost(1.0)
    answer = Api().upload(f"/workflows?rater={RATER}", [builders.row()]).json()
    of = Workflow.objects.get()

    control.change(workflow_id=of.pk, changes=control.Changes(deadline_s=9_000), now=database_now())
    commitments.run_once(now := database_now())

    assert answer["forecast"]["first"] is not None
    assert said(of).first_at == now
