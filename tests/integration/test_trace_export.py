import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command

from airs_site.management.commands import export_trace
from airs_site.simulation.trace import expand, read_parameters, read_trace
from airs_site.trace_export import Export, export, span_of
from fulfillment import request_history, shadow
from fulfillment.models import Rater, RaterVersion, Workflow
from fulfillment.policy.freshness import Look
from fulfillment.policy.lifecycle import RequestState, WorkflowState
from models_admin.models import ModelConfig, ModelKind, Protocol, UtilizationSample
from tests import builders

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
DAY_S = 86_400.0


def fingerprint(number: int) -> UUID:
    """Return one whose first 64 bits are far apart for neighbours."""
    return UUID(int=(number * 0x9E3779B97F4A7C15 % (1 << 64)) << 64)


def asked(
    numbers: Sequence[int],
    *,
    of: RaterVersion | None = None,
    at: datetime = NOW,
    look: Look = Look.MISS,
    states: Sequence[RequestState] = (),
    **changes: Any,
) -> Workflow:
    """Store a workflow that asked for these ratings."""
    stats = {"received": len(numbers), "from_model": len(numbers), **changes.pop("stats", {})}
    workflow = builders.workflow(
        of,
        state=WorkflowState.COMPLETED,
        stats=stats,
        created_at=at,
        finished_at=at,
        deadline_at=at + timedelta(hours=2),
        next_position=len(numbers),
        **changes,
    )
    for position, number in enumerate(numbers):
        state = states[position] if states else RequestState.COMPLETED
        builders.request(
            workflow, position, fingerprint=fingerprint(number), look=look, state=state
        )
    return workflow


def model(model_id: str = builders.MODEL, **changes: Any) -> ModelConfig:
    fields = {
        "kind": ModelKind.HOSTED,
        "model_name": model_id,
        "loader": "flax",
        "checkpoint": "pkg:somewhere/else",
        "replicas_min": 1,
        "replicas_default": 3,
        "replicas_max": 5,
        **changes,
    }
    return ModelConfig.objects.create(id=model_id, created_at=NOW, updated_at=NOW, **fields)


def exported(days: int = 2, **options: Any) -> Export:
    return export(span_of(NOW + timedelta(hours=1), days), **options)


def test_a_span_is_days_of_the_clock_up_to_now() -> None:
    span = span_of(NOW, 2)

    assert span.start == datetime(2026, 11, 29, tzinfo=UTC)
    assert (span.until, span.days) == (NOW, 2)


def test_workflows_become_evaluations_with_what_they_asked_for() -> None:
    asked(range(10), owner="ann")
    asked([5, 6, 7, 20, 21], owner="bob", at=NOW + timedelta(seconds=30), priority=10)

    first, second = exported().evaluations

    assert (first.at_s, first.rater, first.owner) == (1.5 * DAY_S, builders.RATER, "ann")
    assert (first.deadline_s, first.low, first.automatic) == (7200.0, False, False)
    assert first.ids == ((0, 10),)
    assert (second.at_s, second.low) == (1.5 * DAY_S + 30, True)
    assert second.ids == ((5, 3), (10, 2))


def test_what_the_archive_had_before_stands_in_a_row_before_the_first_day() -> None:
    asked([1, 2], look=Look.HIT)
    asked([2, 3], at=NOW + timedelta(seconds=1))
    asked([3], look=Look.HIT, at=NOW + timedelta(seconds=2))

    before, *evaluations = exported().evaluations

    assert before.at_s < 0
    # 3 was a hit, too, but of what the second workflow had rated.
    assert before.ids == ((0, 2),)
    assert [evaluation.ids for evaluation in evaluations] == [((0, 2),), ((1, 2),), ((2, 1),)]


def test_a_rating_that_had_gone_stale_or_was_not_looked_for_is_another_one() -> None:
    asked([1])
    asked([1], look=Look.STALE, at=NOW + timedelta(seconds=1))
    asked([1], look=Look.BYPASSED, at=NOW + timedelta(seconds=2))
    asked([1], look=Look.HIT, at=NOW + timedelta(seconds=3))

    assert [evaluation.ids for evaluation in exported().evaluations] == [
        ((0, 1),),
        ((1, 1),),
        ((2, 1),),
        ((1, 1),),
    ]


def test_what_was_cancelled_received_internal_or_earlier_is_left_out() -> None:
    asked(
        [1, 2],
        states=[RequestState.COMPLETED, RequestState.CANCELLED],
        stats={"received": 2, "cancelled": 1},
    )
    asked([4], owner=shadow.OWNER)
    asked([5], at=NOW - timedelta(days=3))
    asked([6], states=[RequestState.CANCELLED], stats={"cancelled": 1})
    builders.workflow(state=WorkflowState.RECEIVING, created_at=NOW, stats={"received": 1})

    (only,) = exported().evaluations

    assert only.ids == ((0, 1),)


def test_a_sample_has_the_same_ratings_of_every_workflow_and_one_at_least() -> None:
    asked(range(400))
    asked(range(400), at=NOW + timedelta(seconds=1))
    asked([401], at=NOW + timedelta(seconds=2))

    made = exported(sample=4)

    first, second, third = made.evaluations
    assert first.ids == second.ids == ((0, first.queries),)
    assert first.queries == pytest.approx(100, abs=40)
    assert third.queries == 1
    assert made.params["sample"] == 4


def test_requests_are_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_history, "_SPAN", 3)
    monkeypatch.setattr(request_history, "_PAGE", 2)
    for number in range(5):
        asked(range(7 * number, 7 * number + 7), at=NOW + timedelta(seconds=number))

    assert [evaluation.ids for evaluation in exported().evaluations] == [
        ((7 * number, 7),) for number in range(5)
    ]


def test_the_pool_and_what_a_batch_takes_are_measured() -> None:
    model()
    asked(range(24), stats={"from_model": 24, "model_calls": 2, "accelerator_seconds": 99.0})
    UtilizationSample.objects.create(
        at=NOW, agent="local", model_id=builders.MODEL, pool_id="p", replicas=3, busy_s=8.0,
        replica_s=90.0,
    )  # fmt: skip

    made = exported()

    (rater,) = made.params["raters"]
    assert (rater["default_replicas"], rater["min_replicas"]) == (3, 1)
    assert made.params["pool_replicas"] == 3
    # Two full batches in eight busy seconds; what calls took includes their waits.
    assert made.params["batch_service_s_full_scale"] == pytest.approx(4.0)
    assert made.notes == []


def test_an_external_model_is_measured_by_its_calls_and_said_to_be_one() -> None:
    model(
        kind=ModelKind.EXTERNAL,
        protocol=Protocol.OPENAI,
        url="https://models.example/v1",
        loader="",
        checkpoint="",
        max_concurrency=48,
    )
    asked(range(24), stats={"from_model": 24, "model_calls": 24, "accelerator_seconds": 36.0})

    made = exported()

    assert made.params["raters"][0]["default_replicas"] == 48 // 12
    assert made.params["batch_service_s_full_scale"] == pytest.approx(1.5)
    assert "an external model, taken as 4 replicas" in made.notes[0]


def test_what_nobody_measured_is_said_and_can_be_given() -> None:
    asked(range(3))

    made = exported(batch_s=2.5)

    assert made.params["batch_service_s_full_scale"] == 2.5
    assert [note.partition(": ")[2] for note in made.notes] == [
        "its model is no longer registered; taken as one replica",
        "nobody knows what a batch takes; taken as 2.5 s",
    ]


def test_raters_of_one_model_share_its_replicas() -> None:
    model()
    first = builders.version(builders.rater("first"))
    second = builders.version(builders.rater("second"))
    builders.version(builders.rater("alone", model_id="other"))
    asked([1], of=first)
    asked([2], of=second)
    asked([3], of=Rater.objects.get(pk="alone").current_version)

    made = exported()

    assert {evaluation.rater for evaluation in made.evaluations} == {builders.MODEL, "alone"}
    assert [rater["default_replicas"] for rater in made.params["raters"]] == [3, 1]


def test_what_is_exported_can_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_trace, "database_now", lambda: NOW + timedelta(hours=1))
    model()
    asked(range(40), owner="ann", stats={"failed": 4, "from_model": 36})
    asked(range(20, 50), owner="bob", at=NOW + timedelta(minutes=5), look=Look.HIT)
    trace = tmp_path / "trace.jsonl.gz"

    call_command("export_trace", "--days", "2", "--out", str(trace), "--batch-seconds", "10")
    call_command(
        *("simulate", "--trace", str(trace), "--policies", "fifo,airs", "--jobs", "1"),
        *("--no-plots", "--out", str(tmp_path / "simulation.json")),
    )

    assert "2 workflows, one in 1 requests, written to" in capsys.readouterr().out
    params = read_parameters(tmp_path / "params.json")
    workload = expand(params, read_trace(trace, params), scale=1)
    assert len(workload.evaluations) == 3
    written = json.loads((tmp_path / "simulation.json").read_text())
    assert (written["scale"], written["raters"]) == (1, [builders.RATER])
    for figures in written["policies"].values():
        # 20 ratings were asked for twice, ten more the archive had before.
        assert figures["hit_rate"] == pytest.approx(30 / 70, abs=0.1)
        assert figures["whole_in_time"] == 1.0


def test_a_system_without_history_says_so(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no workflow was submitted in the last 8 days"):
        call_command("export_trace", "--out", str(tmp_path / "trace.jsonl.gz"))
