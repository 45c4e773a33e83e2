"""An LLM judge from registration to ratings, by the API and the real directory and plug-in."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from fulfillment import dispatch
from fulfillment.clock import database_now
from fulfillment.models import Batch, Rater, Rating
from models_admin.models import ModelConfig
from tests.fakes import Step, scripted
from tests.judge_stage import TEMPLATE, Judge, by_query, judging, row, says

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judging() as made:
        yield made


def test_a_judge_rates_rows_and_the_archive_answers_the_next_time(judge: Judge) -> None:
    with scripted(by_query(boots='{"score": 3}', hats="1")) as server:
        assert judge.register(server).status_code == 201
        first = judge.submit(row("boots"), priority=90)
        judge.work()
        # By now the model has told its version; that must not matter.
        second = judge.submit(row("boots"), row("hats"))
        judge.work()
        again = judge.submit(row("hats"))

    assert [r["score"] for r in judge.ratings(first)] == [3]
    assert [r["score"] for r in judge.ratings(second)] == [3, 1]
    assert judge.ratings(first)[0]["output"]["answer"] == '{"score": 3}'
    assert [(r["score"], r["source"]) for r in judge.ratings(again)] == [(1, "archive")]
    assert len(server.seen) == 2
    seen = server.seen[0]
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == "Bearer sk-qa-0123456789"
    sent = seen.json()
    assert (sent["model"], sent["temperature"], sent["priority"]) == ("org/judge-7b", 0, 10)
    assert ModelConfig.objects.get().version == "judge-7b"


def test_an_unclear_answer_is_asked_for_once_more_and_then_failed(judge: Judge) -> None:
    steps = [says("It depends."), says("Well, hm."), says("9"), says("4")]
    with scripted(*steps) as server:
        judge.register(server)
        lost, found = judge.submit(row("boots")), None
        judge.work()
        found = judge.submit(row("hats"))
        judge.work()

    (failed,) = judge.ratings(lost)
    assert (failed["state"], failed["score"], failed["error"]) == ("FAILED", None, "unparseable")
    assert failed["output"]["answer"] == "Well, hm."
    assert [r["score"] for r in judge.ratings(found)] == [4]
    assert len(server.seen) == 4
    assert Rating.objects.count() == 1, "what has no score is not archived"


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (says("5"), "out_of_range"),
        (says('{"score": true}'), "bad_type"),
        (says('{"score": NaN}'), "not_finite"),
        (says(""), "empty_output"),
        (says('{"score": 3', finish_reason="length"), "truncated_output"),
        (says("", finish_reason="content_filter"), "content_filter"),
        (says("I'm sorry, but I can't rate this."), "refusal"),
    ],
)
def test_outcomes_of_a_judge_are_typed_and_final_after_two_answers(
    judge: Judge, step: Step, code: str
) -> None:
    with scripted(step) as server:
        judge.register(server)
        workflow = judge.submit(row("boots"))
        judge.work(passes=2)

    (rating,) = judge.ratings(workflow)
    assert (rating["state"], rating["score"], rating["error"]) == ("FAILED", None, code)
    assert len(server.seen) == 2


def test_a_fraction_is_refused_where_the_rater_wants_whole_numbers(judge: Judge) -> None:
    with scripted(says("3.5")) as server:
        judge.register(server, integer_scores=True)
        workflow = judge.submit(row("boots"))
        judge.work()

    assert judge.ratings(workflow)[0]["error"] == "not_integer"


def test_one_bad_row_does_not_keep_its_neighbours_from_their_scores(judge: Judge) -> None:
    with scripted(by_query(boots="2", hats="It depends.", coats="4")) as server:
        judge.register(server)
        workflow = judge.submit(row("boots"), row("hats"), row("coats"))
        judge.work()

    assert [r["score"] for r in judge.ratings(workflow)] == [2, None, 4]


def test_another_model_behind_the_address_pauses_the_rater(judge: Judge) -> None:
    with scripted(says("3"), says("4", model="judge-70b")) as server:
        judge.register(server)
        judge.submit(row("boots"))
        judge.work()
        later = judge.submit(row("hats"))
        judge.work()
        shown = judge.operator.get("/raters/judge").json()

    assert shown["paused"]["code"] == "model_version_changed"
    assert "judge-70b" in shown["paused"]["detail"]
    assert [r["state"] for r in judge.ratings(later)] == ["PENDING"] or [
        r["state"] for r in judge.ratings(later)
    ] == ["RETRYING"]
    assert Rating.objects.count() == 1


@pytest.mark.parametrize(
    ("template", "code"),
    [("Query: {querytext}", "unknown_placeholder"), ("Rate it.", "missing_placeholder")],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_saved(
    judge: Judge, template: str, code: str
) -> None:
    with scripted(says("3")) as server:
        refused = judge.register(server, prompt_template=template)

    assert (refused.status_code, refused.json()["code"]) == (422, code)
    assert refused.json()["errors"][0]["field"] == "prompt_template"
    assert not Rater.objects.exists()


def test_a_judge_needs_a_chat_model(judge: Judge) -> None:
    made = judge.operator.post(
        "/models",
        {"id": "oip", "kind": "external", "url": "http://127.0.0.1:9", "model_name": "m"},
    )
    assert made.status_code == 201
    refused = judge.operator.post(
        "/raters",
        {
            "id": "judge",
            "autorater": "llm_judge",
            "model": "oip",
            "score_min": 0,
            "score_max": 4,
            "prompt_template": TEMPLATE,
        },
    )

    assert (refused.status_code, refused.json()["code"]) == (422, "protocol_mismatch")


def test_a_limit_of_the_rate_sends_the_rest_of_the_batch_later(judge: Judge) -> None:
    """What was not asked after the refusal has used no try."""
    limited = Step(status=429, headers={"Retry-After": "30"})
    with scripted(says("1"), limited, says("2")) as server:
        judge.register(server)
        ModelConfig.objects.update(max_concurrency=1)
        workflow = judge.submit(*(row(f"q{n}") for n in range(4)))
        judge.work()
        batch = Batch.objects.get()
        assert len(server.seen) == 2
        assert batch.tries == [0, 1, 0, 0]
        assert batch.not_before is not None
        assert batch.not_before > database_now() + timedelta(seconds=25)
        judge.memory = dispatch.Memory()  # its window has cooled
        judge.work()

    assert [r["score"] for r in judge.ratings(workflow)] == [1, 2, 2, 2]
    assert [r["attempts"] for r in judge.ratings(workflow)] == [1, 2, 1, 1]
