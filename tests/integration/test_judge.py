"""An LLM judge from registration to ratings, by the API and the real directory and plug-in."""

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
from django.db import connection

from fulfillment import dispatch, leases
from fulfillment.clock import database_now
from fulfillment.models import Batch, Rater, Rating
from models_admin.directory import directory
from models_admin.models import ModelConfig
from tests.builders import Api, records
from tests.fakes import ScriptedServer, Seen, Step, scripted
from tests.rating_queue import boot, check_all, end_pauses
from workers.rating_generator import RatingGenerator

pytestmark = pytest.mark.django_db(transaction=True)

TEMPLATE = 'Query: {query_text}\nPage: {text}\nAnswer {"score": 0 to 4} only.'


class Judge:
    """The API, a dispatcher and an executor, over a model that a test scripts."""

    def __init__(self) -> None:
        self.operator = Api("olga", "operator")
        self.user = Api("alice")
        self.memory = dispatch.Memory()
        self.generator = RatingGenerator(
            boot_id=boot(plugins={"llm_judge": "1"}),
            directory=directory,
            utc_now=lambda: datetime.now(UTC),
            ring_completion=lambda ended: None,
        )

    def register(self, server: ScriptedServer, **rater: Any) -> Any:
        """Register model and rater; return the answer of the second."""
        model = self.operator.post(
            "/models",
            {
                "id": "gpt",
                "kind": "external",
                "protocol": "openai",
                "url": server.url + "/v1",
                "model_name": "org/judge-7b",
                "api_key": "sk-qa-0123456789",
                "max_concurrency": 4,
                "sends_priority": True,
            },
        )
        assert model.status_code == 201, model.json()
        settings = {
            "id": "judge",
            "autorater": "llm_judge",
            "model": "gpt",
            "score_min": 0,
            "score_max": 4,
            "prompt_template": TEMPLATE,
        }
        return self.operator.post("/raters", {**settings, **rater})

    def submit(self, *rows: dict[str, Any], **fields: Any) -> str:
        """Submit a workflow; return its id."""
        body = {"name": "w", "rater": "judge", "requests": rows, **fields}
        made = self.user.post("/workflows", body)
        assert made.status_code == 202, made.json()
        identifier: str = made.json()["id"]
        return identifier

    def work(self, *, passes: int = 1) -> None:
        """Send what may be sent, and rate it."""
        for _ in range(passes):
            end_pauses()
            leases.wake(now=database_now())
            sent = self.send()
            if sent:
                self.generator.rate(sent, task_id=uuid.uuid4())
        check_all()

    def send(self) -> list[tuple[int, int, str]]:
        """Claim what may be sent."""
        sent: list[tuple[int, int, str]] = []
        dispatch.run_once(
            database_now(),
            memory=self.memory,
            directory=directory,
            publish=lambda batches, priority: sent.extend(batches),
        )
        return sent

    def ratings(self, workflow: str) -> list[dict[str, Any]]:
        return records(self.user.get(f"/workflows/{workflow}/ratings"))


@pytest.fixture
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.generator.close()
    with connection.cursor() as cursor:  # sessions of its threads would keep the test database
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def says(text: str, *, model: str = "judge-7b", finish_reason: str = "stop") -> Step:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return Step(body=orjson.dumps({"model": model, "choices": [choice]}))


def by_query(**texts: str) -> Step:
    """A step that answers by what the prompt asks about."""

    def body(seen: Seen) -> bytes:
        prompt = seen.json()["messages"][-1]["content"]
        text = next(answer for query, answer in texts.items() if query in prompt)
        answer = says(text).body
        assert isinstance(answer, bytes)
        return answer

    return Step(body=body)


def row(query: str, **fields: Any) -> dict[str, Any]:
    return {"query_text": query, "text": "a page", **fields}


def test_a_judge_rates_rows_and_the_archive_answers_the_next_time(judge: Judge) -> None:
    with scripted(by_query(boots='{"score": 3}', hats="1")) as server:
        assert judge.register(server).status_code == 201
        first = judge.submit(row("boots"), priority=90)
        judge.work()
        # The first answer told which version of the model rates; that is another archive key.
        second = judge.submit(row("boots"), row("hats"))
        judge.work()
        again = judge.submit(row("hats"))

    assert [r["score"] for r in judge.ratings(first)] == [3]
    assert [r["score"] for r in judge.ratings(second)] == [3, 1]
    assert judge.ratings(first)[0]["output"]["answer"] == '{"score": 3}'
    assert [(r["score"], r["source"]) for r in judge.ratings(again)] == [(1, "archive")]
    assert len(server.seen) == 3
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
