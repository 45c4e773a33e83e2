"""The report of a running system: figures from rows as the services leave them."""

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from airs_site import service_report
from airs_site.service_figures import History, figures_of
from airs_site.simulation.engine import World
from airs_site.simulation.metrics import Figures, measure
from fulfillment import promises, service_history, shadow
from fulfillment.clock import database_now
from fulfillment.models import QueueSample, Workflow
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.promises import KeptRate
from fulfillment.service_history import RaterWork
from models_admin.models import ModelConfig, UtilizationSample
from models_admin.utilisation import Slots, Use
from tests import builders
from tests.builders import MODEL, NOW, RATER
from tests.simulation.small import evaluation, run

pytestmark = pytest.mark.django_db

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)


def ended(
    after: timedelta = HOUR, *, state: WorkflowState = WorkflowState.COMPLETED,
    stats: Mapping[str, Any] | None = None, **fields: Any,
) -> Workflow:  # fmt: skip
    """Store a workflow of 24 requests, accepted at NOW, that ended so long after."""
    return builders.workflow(
        state=state,
        finished_at=NOW + after,
        stats={"received": 24, "last_result_at": NOW + after, **(stats or {})},
        **fields,
    )


def figures(until: timedelta = DAY) -> dict[str, Any]:
    found: dict[str, Any] = service_report.document(NOW - DAY, NOW + until)["policies"]["service"]
    return found


def test_without_history_every_figure_is_none_and_says_why() -> None:
    document = service_report.document(NOW - DAY, NOW)

    found = document["policies"]["service"]
    assert found.pop("duty") == {"mean": None, "peak_hour": None}
    assert set(found.values()) == {None}
    assert set(document["notes"]) == {*found, "duty"}
    assert "no workflow ended" in service_report.text(document)


def test_the_figures_are_those_of_a_simulation() -> None:
    ended()

    assert {*figures()} - {"priorities"} == set(Figures.__dataclass_fields__)
    document = service_report.document(NOW - DAY, NOW + DAY)
    assert document["published"]["amplification"] == 10.0


def test_a_run_that_was_served_has_the_figures_of_the_same_run_simulated() -> None:
    """The same evaluations, as a simulation's jobs and as rows of the service."""
    world = run(
        "fifo",
        evaluation(1, 1200, owner="ann"),
        evaluation(2, 4800, owner="bob", at_s=30.0, deadline_s=1000.0),
        evaluation(3, 1200, owner="bob", experiment=1, at_s=1500.0),
        evaluation(4, 36, owner="cleo", low=True, rater="big", at_s=60.0),
        evaluation(5, 24, owner="cleo", at_s=70.0, permanent=0.2),
        evaluation(6, 480, owner="dora", rater="third", at_s=99.0),
        replicas=(3, 2, 1),
    )
    store(world)

    expected, found = measure(world), figures(2 * DAY)

    for name in ("hit_rate", "whole_in_time", "requests_in_time", "low_whole",
                 "small_raters_whole", "low_to_high", "jain"):  # fmt: skip
        assert found[name] == pytest.approx(getattr(expected, name)), name
    assert expected.jain < 1
    for name in ("failure", "capacity_failure", "funnel", "peak_to_mean"):
        assert found[name] == pytest.approx(getattr(expected, name)), name
    assert found["failure"] != found["capacity_failure"]
    for rater, by_class in expected.latency_s.items():
        for priority, quantiles in by_class.items():
            assert found["latency_s"][rater][priority] == pytest.approx(quantiles), rater
    assert found["amplification"] == pytest.approx(expected.amplification)
    busy_s, replicas = sum(world.counts.busy_s), len(world.pool.replicas)
    assert found["duty"]["mean"] == pytest.approx(busy_s / (2 * 86_400 * replicas))


def test_a_workflow_counts_in_the_span_in_which_it_ended() -> None:
    for hours in (1, 2, 3):
        ended(hours * HOUR)

    def count(since: timedelta, until: timedelta) -> int:
        return len(list(service_history.ended(NOW + since, NOW + until)))

    assert [count(n * HOUR, (n + 1) * HOUR) for n in range(4)] == [1, 1, 1, 0]
    assert count(0 * HOUR, 3 * HOUR) == 3


def test_pages_miss_none_and_repeat_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [ended(timedelta(minutes=n // 4)).pk for n in range(11)]
    monkeypatch.setattr(service_history, "_PAGE", 3)

    found = [workflow.id for workflow in service_history.ended(NOW - HOUR, NOW + HOUR)]

    assert found == made


def test_what_was_cancelled_is_open_or_is_our_own_is_left_out_and_counted() -> None:
    ended()
    ended(state=WorkflowState.CANCELLED, stats={"cancelled": 12})
    ended(stats={"received": 0, "last_result_at": None})
    ended(owner=shadow.OWNER)
    builders.workflow(stats={"received": 24})
    builders.workflow(owner=shadow.OWNER)
    builders.workflow(state=WorkflowState.RECEIVING)

    document = service_report.document(NOW - DAY, NOW + DAY)

    assert document["workflows"] == {"ended": 1, "cancelled": 1, "open": 1}
    assert document["policies"]["service"]["funnel"]["received_batches"] == 2


def test_requests_that_nobody_awaits_any_more_are_no_failure() -> None:
    ended(
        state=WorkflowState.PARTIAL,
        stats={"cancelled": 12, "timed_out": 3, "failed": 3, "from_model": 6},
    )

    found = figures()

    assert (found["failure"]["p50"], found["capacity_failure"]["p50"]) == (0.5, 0.25)
    assert (found["whole_in_time"], found["requests_in_time"]) == (0.0, 0.75)


def test_a_late_workflow_took_until_its_deadline_and_a_retried_one_since_its_round() -> None:
    ended(3 * HOUR, stats={"timed_out": 1}, deadline_at=NOW + 2 * HOUR)
    ended(5 * HOUR, round=2, round_at=NOW + 4 * HOUR, priority=90)

    latency_s = figures()["latency_s"][RATER]

    assert (latency_s["middle"]["p50"], latency_s["high"]["p99"]) == (7200.0, 3600.0)


def test_classes_stand_apart() -> None:
    ended(priority=90, stats={"model_calls": 2})
    ended(priority=10, stats={"timed_out": 24})
    ended(2 * HOUR, priority=90, best_effort=True)

    found = figures()

    assert found["low_whole"] == 0.5
    assert list(found["priorities"]) == ["high", "low", "best_effort"]
    assert found["priorities"]["high"] == {
        "workflows": 1, "requests": 24, "model_calls": 2, "whole_in_time": 1.0,
        "latency_p50_s": 3600.0,
    }  # fmt: skip
    assert found["priorities"]["best_effort"]["latency_p50_s"] == 7200.0


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"from_model": 24, "model_calls": 2, "attempts": 2}, 1.0),
        # Refused once: a call of each of three tries.
        ({"from_model": 24, "model_calls": 3, "attempts": 3}, 1.5),
        # Of a chat rater each request is a call.
        ({"from_model": 24, "model_calls": 24, "attempts": 2}, 1.0),
        # Failed without a call, as of a version that was retired.
        ({"failed": 24}, None),
        ({"from_archive": 24}, None),
    ],
)
def test_attempts_are_tries_over_the_calls_that_were_needed(
    stats: dict[str, int], expected: float | None
) -> None:
    ended(stats=stats)

    document = service_report.document(NOW - DAY, NOW + DAY)

    assert document["policies"]["service"]["amplification"] == expected
    assert ("amplification" in document["notes"]) == (expected is None)


def test_forecasts_are_kept_at_the_rate_of_their_own_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended()
    kept = KeptRate(promised=4, kept=3, doubted=1, doubted_whole=0)
    monkeypatch.setattr(promises, "kept_rate", lambda since, until: kept)

    assert figures()["forecast_kept"] == 0.75


def history(**known: Any) -> History:
    nothing: dict[str, Any] = dict.fromkeys(("workflows", "work", "use"), ())
    nothing |= {name: {} for name in ("calls_by_hour", "models", "slots")}
    return History(**{"until": NOW + DAY, **nothing, **known})


def used(model: str, hour: int, busy_s: float, replica_s: float) -> Use:
    return Use(hour_at=NOW + hour * HOUR, model_id=model, busy_s=busy_s, replica_s=replica_s)


def test_the_duty_cycle_is_that_of_replicas_whose_servers_tell() -> None:
    models = {"a": "own", "b": "theirs", "c": "asleep"}
    work = [RaterWork(rater_id=r, worked=n, call_s=1.0) for r, n in
            (("a", 12), ("b", 12), ("c", 0))]  # fmt: skip
    use = [used("own", 0, 30, 100), used("own", 1, 50, 50), used("idle", 1, 0, 50),
           used("own", 2, 0, 0)]  # fmt: skip

    found = figures_of(history(work=work, models=models, use=use))

    assert found.figures["duty"] == {"mean": 0.4, "peak_hour": 0.5}
    assert found.notes["duty"].startswith("without theirs: ")


def test_of_servers_of_others_the_calls_tell_what_a_workflow_takes_alone() -> None:
    """A request takes 200 s, and four calls may be out: one owner has two batches, one eight."""
    work = [RaterWork(rater_id=RATER, worked=48, call_s=9_600.0)]
    slots = {MODEL: Slots(hosted=False, count=4)}
    builders.version()
    for owner, requests in (("ann", 24), ("bob", 96)):
        ended(owner=owner, stats={"received": requests})
    workflows = list(service_history.ended(NOW - DAY, NOW + DAY))

    found = figures_of(history(workflows=workflows, work=work, models={RATER: MODEL}, slots=slots))

    # Alone 2,400 and 4,800 s, with 3,600 s: slowdowns of 1.5 and, as it cannot be less, 1.
    assert found.figures["jain"] == pytest.approx(2.5**2 / (2 * (1.5**2 + 1)))


def test_a_hit_is_what_cost_no_call_of_its_own() -> None:
    ended(stats={"from_archive": 6, "coalesced": 3, "from_model": 15})

    assert figures()["hit_rate"] == 0.375
    assert figures()["funnel"] == {"received_batches": 2, "after_archive": 2, "model_calls": 0}


def test_a_page_is_read_by_its_index() -> None:
    with connection.cursor() as cursor, CaptureQueriesContext(connection) as queries:
        cursor.execute("SET LOCAL enable_seqscan = off")
        list(service_history.ended(NOW - DAY, NOW))
        cursor.execute("EXPLAIN " + queries[-1]["sql"])
        plan = " ".join(row[0] for row in cursor.fetchall())

    assert "workflow_finished" in plan
    assert "Seq Scan on fulfillment_workflow " not in plan


def test_the_command_prints_the_simulators_table_and_writes_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = database_now()
    host(MODEL)
    version = builders.version()
    builders.workflow(
        version, state=WorkflowState.COMPLETED, created_at=now - HOUR, finished_at=now,
        deadline_at=now + HOUR,
        stats={"received": 24, "from_model": 24, "model_calls": 2, "attempts": 2,
               "last_result_at": now - HOUR / 2},
    )  # fmt: skip
    UtilizationSample.objects.create(
        at=now, agent="local", model_id=MODEL, replicas=1, busy_s=24.0, replica_s=30.0
    )
    out = tmp_path / "report.json"

    call_command("service_report", "--days", "8", "--out", out)

    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "figure service published goal bound" in printed
    assert "attempts a model call 1.00 ✓ 10.00 ≤ 1.05 -" in printed
    assert "duty, mean 80.0 % - - -" in printed
    assert "batches received → after the archive → model calls: 2 → 2 → 2" in printed
    assert f"{RATER} middle 30.0 min 30.0 min 30.0 min 30.0 min" in printed
    assert "middle 1 24 2 100.0 % 30.0 min" in printed
    assert f"duty by model: {MODEL} 0.800" in printed
    written = json.loads(out.read_text())
    assert written["policies"]["service"]["whole_in_time"] == 1.0
    assert set(written["notes"]) == {
        "low_whole", "small_raters_whole", "low_to_high", "forecast_kept", "jain"
    }  # fmt: skip


@pytest.mark.parametrize("days", ["0", "-1", "nan", "soon", "1e9"])
def test_a_span_that_is_none_is_refused(days: str) -> None:
    with pytest.raises(CommandError, match="not a number of days"):
        call_command("service_report", f"--days={days}")


def store(world: World) -> None:
    """Write a simulated run as the services would have."""
    versions = {}
    for number, rater in enumerate(world.raters):
        host(rater.id, replicas=rater.default_replicas)
        versions[rater.id] = builders.version(builders.rater(rater.id, model_id=rater.id))
        jobs = [job for job in world.jobs if world.raters[job.rater].id == rater.id]
        sampled(rater.id, worked=sum(job.computed + job.failed for job in jobs))
        UtilizationSample.objects.create(
            at=NOW + HOUR, agent="local", model_id=rater.id, replicas=1,
            busy_s=world.busy_until_now(number), replica_s=2 * 86_400 * rater.default_replicas,
        )  # fmt: skip
    for hour, calls in enumerate(np.diff(world.hours.calls).tolist()):
        sampled("big", at=NOW + hour * HOUR + HOUR / 2, model_calls=calls)
    for job in world.jobs:
        needed = -(-(job.computed + job.failed) // world.batch)
        builders.workflow(
            versions[world.raters[job.rater].id],
            state=WorkflowState.PARTIAL,
            owner=job.evaluation.owner,
            priority=10 if job.evaluation.low else 90,
            created_at=NOW + timedelta(seconds=job.submitted_s),
            deadline_at=NOW + timedelta(seconds=job.deadline_s),
            finished_at=NOW + timedelta(seconds=max(job.last_s, job.deadline_s)),
            stats={
                "received": job.requests, "from_archive": job.hits, "coalesced": job.free,
                "from_model": job.computed, "failed": job.failed, "timed_out": job.late,
                "model_calls": needed, "attempts": needed,
                "last_result_at": NOW + timedelta(seconds=job.last_s),
            },
        )  # fmt: skip


def host(model: str, *, replicas: int = 1) -> None:
    """Store a hosted model."""
    ModelConfig.objects.create(
        id=model, kind="hosted", model_name=model, loader="l", checkpoint="c",
        replicas_default=replicas, replicas_max=replicas, created_at=NOW, updated_at=NOW,
    )  # fmt: skip


def sampled(rater: str, **changes: Any) -> None:
    """Store a sample of the queue."""
    depth = dict.fromkeys(
        ("ready", "leased", "delayed", "waiting", "workflows", "open_requests", "paused_requests"),
        0,
    )
    ended = {"ended": 0, "worked": 0, "model_calls": 0, "accelerator_seconds": 0.0}
    fields = {"at": NOW + HOUR, **depth, **ended, **changes}
    QueueSample.objects.create(rater_id=rater, priority_class=0, period_s=30.0, **fields)
