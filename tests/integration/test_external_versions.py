"""Versions of external models: which rows share a rating, and which are sent to what is served."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from fulfillment.models import Rater, Rating, Workflow
from models_admin import services
from models_admin.directory import directory
from models_admin.models import ModelConfig, ModelLabel
from tests.fakes import scripted
from tests.judge_stage import Judge, judging, row, says
from tests.rating_queue import threads

pytestmark = pytest.mark.django_db(transaction=True)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
A, B = "judge-7b", "judge-70b"


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judging() as made:
        yield made


def register(model_id: str) -> None:
    services.register_model(
        model_id,
        now=NOW,
        kind="external",
        protocol="openai",
        url="http://127.0.0.1:9",
        model_name="m",
    )


def pinned(*workflows: str) -> list[int]:
    """Return the numbers of the rater versions that workflows were made with."""
    of = {str(w.public_id): w.rater_version.number for w in Workflow.objects.all()}
    return [of[workflow] for workflow in workflows]


def scores(judge: Judge, workflow: str) -> list[tuple[float | None, str | None]]:
    return [(r["score"], r["source"]) for r in judge.ratings(workflow)]


def change(judge: Judge, **fields: Any) -> None:
    """Change the model, and let the rater go on if it is paused."""
    assert judge.operator.patch("/models/gpt", fields).status_code == 200
    assert judge.operator.patch("/raters/judge", {"paused": False}).status_code == 200
    judge.generator._endpoints.clear()  # it would believe the old one for a while


def paused() -> str:
    return Rater.objects.get().paused_code


@pytest.mark.parametrize("label", ["", "spring"])
def test_when_a_server_first_reports_does_not_matter(judge: Judge, label: str) -> None:
    with scripted(says("3")) as server:
        judge.register(server)
        change(judge, version_label=label)
        before = judge.submit(row("boots"))
        directory.report_version("gpt", A, NOW)
        waiting = judge.submit(row("boots"))
        judge.work(passes=2)
        after = judge.submit(row("boots"))

    assert len(set(pinned(before, waiting, after))) == 1
    assert scores(judge, before) == [(3, "model")]
    assert scores(judge, waiting) == [(3, "coalesced")]
    assert scores(judge, after) == [(3, "archive")]
    assert len(server.seen) == Rating.objects.count() == 1
    shown = judge.operator.get("/models/gpt").json()
    assert (shown["version"], shown["version_label"]) == (A, label)


def test_another_version_waits_for_the_operator_and_is_another_key(judge: Judge) -> None:
    with scripted(says("3"), says("1", model=B), says("2", model=B)) as server:
        judge.register(server)
        judge.submit(row("boots"))
        judge.work()
        old = judge.submit(row("hats"))
        judge.work()

        assert paused() == "model_version_changed"
        change(judge, version=B)
        judge.work()
        assert len(server.seen) == 2, "what was made for A is not sent to B"
        new = judge.submit(row("hats"), row("boots"))
        judge.work()

    assert pinned(old, new) == [1, 2]
    assert scores(judge, old) == [(None, None)]
    assert scores(judge, new) == [(2, "model"), (2, "model")]
    assert judge.operator.get("/models/gpt").json()["version"] == B


def test_a_version_that_is_accepted_again_finds_its_ratings_and_its_work_again(
    judge: Judge,
) -> None:
    with scripted(says("3"), says("4")) as server:
        judge.register(server)
        first = judge.submit(row("boots"))
        judge.work()
        left = judge.submit(row("hats"))
        change(judge, version=B)
        other = judge.submit(row("boots"))
        change(judge, version=A)
        again = judge.submit(row("boots"))
        judge.work()

    assert pinned(first, left, other, again) == [1, 1, 2, 1]
    assert scores(judge, left) == [(4, "model")]
    assert scores(judge, other) == [(None, None)]
    assert scores(judge, again) == [(3, "archive")]


def test_a_label_is_a_key_of_its_own_whose_first_version_is_the_next_one_reported(
    judge: Judge,
) -> None:
    with scripted(says("3"), says("2", model=B)) as server:
        judge.register(server)
        spring = judge.submit(row("boots"))
        judge.work()
        change(judge, version_label="summer")
        before = judge.submit(row("boots"))
        judge.work()
        after = judge.submit(row("boots"))
        assert paused() == ""
        assert judge.operator.get("/models/gpt").json()["version"] == B
        change(judge, version_label="")
        back = judge.submit(row("boots"))

    assert pinned(spring, before, after, back) == [1, 2, 2, 1]
    assert scores(judge, before) == [(2, "model")]
    assert scores(judge, after) == [(2, "archive")]
    assert scores(judge, back) == [(3, "archive")]
    assert judge.operator.get("/models/gpt").json()["version"] == A, "what the label stands for"


def test_a_model_that_is_registered_anew_does_not_inherit_the_ratings_of_another(
    judge: Judge,
) -> None:
    with scripted(says("3")) as server:
        judge.register(server)
        old = judge.submit(row("boots"))
        judge.work()
        services.remove_model("gpt")
        register("gpt")
        assert directory.report_version("gpt", B, NOW).changed
        services.accept_version("gpt", now=NOW)
        new = judge.submit(row("boots"))

    assert pinned(old, new) == [1, 2]
    assert scores(judge, new) == [(None, None)]


@pytest.mark.parametrize("remembered", [True, False], ids=["old endpoint", "new endpoint"])
def test_what_was_sent_before_another_version_was_accepted_is_not_rated_by_it(
    judge: Judge, remembered: bool
) -> None:
    with scripted(says("3"), says("1", model=B)) as server:
        judge.register(server)
        judge.submit(row("boots"))
        judge.work()
        old = judge.submit(row("hats"))
        sent = judge.send()
        services.update_model("gpt", now=NOW, version=B)
        if not remembered:
            judge.generator._endpoints.clear()
        judge.generator.rate(sent, task_id=uuid4())

    assert len(server.seen) == 1 + remembered
    assert scores(judge, old) == [(None, None)]
    assert Rating.objects.count() == 1
    assert paused() == "", "the server serves what was accepted"


def test_an_answer_that_comes_after_a_new_label_belongs_to_the_old_one(judge: Judge) -> None:
    with scripted(says("3")) as server:
        judge.register(server)
        judge.generator._endpoint("ext-gpt")
        old = judge.submit(row("boots"))
        sent = judge.send()
        services.update_model("gpt", now=NOW, version_label="summer")
        judge.generator.rate(sent, task_id=uuid4())

    assert scores(judge, old) == [(None, None)]
    assert not Rating.objects.exists()


def test_of_two_first_reports_at_once_one_counts() -> None:
    register("ext")

    with threads(2) as pool:
        reports = list(pool.map(lambda v: directory.report_version("ext", v, NOW), ["a", "b"]))

    (first,) = ModelLabel.objects.values_list("version", flat=True)
    model = ModelConfig.objects.get()
    assert model.version == model.first_version == first
    assert sorted(report.changed for report in reports) == [False, True]
    assert {(report.version, report.key_version) for report in reports} == {(first, "")}
