"""Shadow refresh: a share of hits is computed again where that is in nobody's way."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import intake, leases, raters, sampling, shadow
from fulfillment.clock import database_now
from fulfillment.models import (
    ExecutorBoot,
    Rater,
    Rating,
    RatingRequest,
    Role,
    ShadowSample,
    ShadowScore,
    Workflow,
)
from fulfillment.policy.lifecycle import Source, WorkflowState
from tests import builders
from tests.builders import DIRECTORY, MODEL, RATER, Api, Model, ndjson, row
from tests.rating_queue import Replica, boot, check_all, queue, rated, take

pytestmark = pytest.mark.django_db

ROWS = [row(n) for n in range(6)]
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    settings.AIRS_SHADOW_REFRESH = 1.0
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


def submit(rows: Sequence[Any], **form: Any) -> Workflow:
    return intake.submit(
        form=intake.WorkflowForm(**{"rater": RATER, **form}),
        body=intake.Body(chunks=[ndjson(rows)]),
        owner="alice",
        idempotency_key=None,
        close=True,
    ).workflow


def run(score: float) -> None:
    """Rate all that is open."""
    dispatcher, executor = queue(), boot()
    for _ in range(5):
        dispatcher.wake_and_run()
        for message in dispatcher.take_sent():
            leases.finish([rated(t, score=score) for t in take(message, by=executor)])
    check_all()


def hits(age: timedelta = timedelta()) -> Workflow:
    """Have the rows rated with 1, let that grow old, and ask again."""
    submit(ROWS)
    run(1.0)
    for rating in Rating.objects.all():
        rating.produced_at -= age
        rating.save()
    return submit(ROWS)


def shadows() -> list[Workflow]:
    return list(Workflow.objects.filter(owner=shadow.OWNER))


def refresh() -> int:
    return shadow.run_once(database_now())


def test_old_and_new_score_are_recorded_by_age() -> None:
    hits(40 * DAY)
    assert ShadowSample.objects.count() == 6

    assert refresh() == 6
    (workflow,) = shadows()
    run(1.5)
    assert refresh() == 6

    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.COMPLETED
    assert {(s.old_score, s.new_score) for s in ShadowScore.objects.all()} == {(1.0, 1.5)}
    assert {s.age_s // 86_400 for s in ShadowScore.objects.all()} == {40}
    assert not ShadowSample.objects.exists()
    report = Api(role=Role.VIEWER).get(f"/archive/staleness?rater={RATER}").json()
    assert [(b["n"], b["mean_difference"]) for b in report["buckets"]] == [(6, 0.5)]
    assert refresh() == 0


def test_the_workflow_is_the_last_in_every_order_and_its_ratings_refresh_the_archive() -> None:
    hits(40 * DAY)
    refresh()
    (workflow,) = shadows()

    assert (workflow.best_effort, workflow.bypass, workflow.no_store) == (True, True, False)
    assert workflow.priority == 0
    assert {r.url_digest is None for r in RatingRequest.objects.filter(workflow=workflow)} == {
        False
    }
    run(1.5)
    assert set(
        RatingRequest.objects.filter(workflow=workflow).values_list("source", flat=True)
    ) == {Source.MODEL}
    again = submit(ROWS[:1])
    assert RatingRequest.objects.get(workflow=again).score == 1.5


@pytest.mark.parametrize("state", ["ready", "leased", "delayed", "of another rater"])
def test_nothing_is_made_while_the_model_has_anything_to_do(state: str) -> None:
    hits()
    rater = RATER
    if state == "of another rater":
        rater = "neighbour"
        raters.register(Rater(id=rater, autorater="stub", model_id=MODEL), now=database_now())
    submit([row(99)], rater=rater)
    executor = boot()
    if state in {"leased", "delayed"}:
        dispatcher = queue()
        dispatcher.run()
        (message,) = dispatcher.take_sent()
        (taken,) = take(message, by=executor)
        if state == "delayed":
            leases.finish([leases.Finish(taken=taken, not_before=database_now() + DAY)])

    assert refresh() == 0
    assert shadows() == []


def test_another_models_work_is_no_hindrance_unless_it_fills_the_executors() -> None:
    hits()
    DIRECTORY.models["other-model"] = Model(id="other-model")
    raters.register(
        Rater(id="other", autorater="stub", model_id="other-model", batch_size=1),
        now=database_now(),
    )
    submit([row(n) for n in range(100, 104)], rater="other")
    ExecutorBoot.objects.all().delete()
    boot(slots=8)
    dispatcher = queue(Replica(), Replica(key="r2", model_id="other-model"))
    dispatcher.run()
    assert len([b for m in dispatcher.take_sent() for b in m.batches]) == 4

    assert refresh() == 0
    boot(slots=8)
    assert refresh() == 6


def test_without_executors_or_with_a_paused_rater_nothing_is_made() -> None:
    hits()
    ExecutorBoot.objects.all().delete()
    assert refresh() == 0
    boot()
    raters.pause(rater_id=RATER, code="operator", detail="", now=database_now())
    assert refresh() == 0
    raters.resume(rater_id=RATER)
    assert refresh() == 6


def test_one_workflow_at_a_time_and_few_samples_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "MOST_SAMPLES", 4)
    hits()

    assert refresh() == 4
    assert refresh() == 0
    run(1.0)
    assert refresh() == 4 + 2


def test_samples_of_an_older_version_are_not_compared() -> None:
    hits()
    DIRECTORY.models[MODEL].version = "v2"
    raters.current_version(Rater.objects.get(), database_now())

    assert refresh() == 0
    shadow.run_once(database_now() + shadow.SAMPLES_KEPT + DAY)
    assert not ShadowSample.objects.exists()


def test_a_version_that_changes_at_that_moment_is_left_alone() -> None:
    hits()
    DIRECTORY.models[MODEL].version = "v2"  # nobody has noticed yet

    assert refresh() == 0
    assert shadows() == []


def test_what_did_not_complete_is_dropped_with_its_samples() -> None:
    hits()
    refresh()
    (workflow,) = shadows()
    check_all()
    Workflow.objects.filter(pk=workflow.pk).update(
        deadline_at=database_now(), ends_at=database_now()
    )
    check_all()

    refresh()

    assert not ShadowScore.objects.exists()
    assert not ShadowSample.objects.exists()


def test_killed_before_the_samples_knew_of_it_they_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hits()

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(intake, "_finish", dies)
        with pytest.raises(KeyboardInterrupt):
            refresh()
    assert [w.state for w in shadows()] == [WorkflowState.RECEIVING]
    shadows()[0].uploads.all().delete()
    Workflow.objects.filter(owner=shadow.OWNER).update(state=WorkflowState.RUNNING)
    run(1.5)

    assert refresh() == 6


def test_only_hits_are_drawn_and_each_item_once(settings: Settings) -> None:
    submit(ROWS)
    assert not ShadowSample.objects.exists()
    hits()
    submit(ROWS)
    submit(ROWS, bypass=True)

    assert ShadowSample.objects.count() == 6


def test_the_share_is_kept_and_the_draw_depends_on_the_workflow(settings: Settings) -> None:
    many = [row(n) for n in range(400)]
    submit(many)
    run(1.0)
    settings.AIRS_SHADOW_REFRESH = 0.2

    drawn = []
    for _ in range(2):
        submit(many)
        drawn.append(set(ShadowSample.objects.values_list("fingerprint", flat=True)))
        ShadowSample.objects.all().delete()

    assert all(40 <= len(found) <= 130 for found in drawn), [len(found) for found in drawn]
    assert drawn[0] != drawn[1]


def test_turned_off_nothing_is_drawn_nor_made(settings: Settings) -> None:
    hits()
    settings.AIRS_SHADOW_REFRESH = 0.0

    assert refresh() == 0
    ShadowSample.objects.all().delete()
    submit(ROWS)
    assert not ShadowSample.objects.exists()


def test_the_tables_are_bounded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_BYTES", 200)
    huge = row(50, text="incompressible" * 40)
    submit([huge])
    run(1.0)
    submit([huge])
    assert not ShadowSample.objects.exists()
    hits()
    boot()
    raters.pause(rater_id=RATER, code="operator", detail="", now=database_now())
    monkeypatch.setattr(shadow, "MOST_KEPT", 4)
    newest = list(ShadowSample.objects.order_by("-pk").values_list("pk", flat=True)[:4])

    refresh()

    assert list(ShadowSample.objects.order_by("-pk").values_list("pk", flat=True)) == newest
    ShadowScore.objects.create(
        rater_version_id=1, old_score=0, new_score=0, age_s=0, recorded_at=database_now() - 91 * DAY
    )
    refresh()
    assert not ShadowScore.objects.exists()


def test_its_workflows_are_seen_by_operators_only() -> None:
    hits()
    refresh()
    (workflow,) = shadows()

    assert [w["owner"] for w in Api("alice").get("/workflows").json()["items"]] == ["alice"] * 2
    assert Api("alice").get(f"/workflows/{workflow.public_id}").status_code == 404
    owners = [w["owner"] for w in Api("olga", Role.OPERATOR).get("/workflows").json()["items"]]
    assert shadow.OWNER in owners
