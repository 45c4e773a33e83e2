"""Trying a model: one real call, by REST and in the admin."""

import json
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from fulfillment import tokens
from models_admin import services, trial
from models_admin.asking import Question
from models_admin.models import AuditEntry, ModelServer
from models_admin.policy.replicas import ServerState
from tests.fakes import Step, instant_oip, refusal, scripted, stub_score

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = "sk-qa-0123456789abcdef"
ROWS = [{"query": "tea", "text": "green tea"}, {"query": "tea", "text": "rocks"}]
CHAT = {
    "model": "judge-7b",
    "choices": [{"message": {"content": "Score: 3"}, "finish_reason": "length"}],
}


@pytest.fixture
def api() -> Client:
    _, secret = tokens.issue(user="op", role="operator", expires_at=None, now=NOW)
    return Client(headers={"Authorization": f"Bearer {secret}"})


def ask(api: Client, body: Any, model_id: str = "ext") -> Any:
    response = api.post(f"/api/v1/models/{model_id}/try", body, content_type="application/json")
    return response.status_code, response.json()


def external(url: str, **fields: Any) -> None:
    services.register_model(
        "ext", now=NOW, **({"kind": "external", "url": url, "model_name": "m"} | fields)
    )


def test_rows_are_scored_and_the_answer_says_by_what_and_how_fast(api: Client) -> None:
    with instant_oip(version="7") as url:
        external(url)
        status, tried = ask(api, {"rows": ROWS})

    assert status == 200
    assert [row["score"] for row in tried["rows"]] == [
        stub_score("tea", "green tea"),
        stub_score("tea", "rocks"),
    ]
    assert (tried["model"], tried["address"], tried["version"]) == ("ext", url, "7")
    assert (tried["error"], tried["truncated"]) == (None, False)
    assert 0 < tried["latency_s"] < trial.LONGEST_S
    entry = AuditEntry.objects.get(action="model_tried")
    assert (entry.actor, entry.detail) == ("op", {"rows": 2, "code": "answered"})


def test_who_dies_before_the_answer_has_asked_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Died(BaseException):
        pass

    def die(*args: Any) -> Any:
        raise Died

    external("http://127.0.0.1:9")
    monkeypatch.setattr(trial, "import_string", lambda name: die)

    with pytest.raises(Died):
        trial.try_model("ext", Question(rows=[("tea", "green tea")]), now=NOW, actor="op")

    entry = AuditEntry.objects.get(action="model_tried")
    assert (entry.actor, entry.detail) == ("op", {"rows": 1, "code": "asked"})


def test_what_the_model_cut_is_told(api: Client) -> None:
    answer = {
        "model_name": "m",
        "model_version": "1",
        "parameters": {"max_tokens": 4},
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 1], "data": [value]}
            for name, value in (("score", 0.5), ("tokens", 9.0))
        ],
    }
    with scripted(Step(body=json.dumps(answer).encode())) as server:
        external(server.url)
        _, tried = ask(api, {"rows": ROWS[:1]})

    assert tried["truncated"]
    assert tried["rows"][0]["truncated"] == {"tokens": {"original": 9, "used": 4}}


def test_a_chat_model_answers_a_message(api: Client) -> None:
    with scripted(Step(body=json.dumps(CHAT).encode())) as server:
        external(server.url, protocol="openai")
        _, tried = ask(api, {"message": "Rate this."})
        sent = server.seen[-1].json()

    assert (tried["content"], tried["finish_reason"]) == ("Score: 3", "length")
    assert (tried["version"], tried["truncated"]) == ("judge-7b", True)
    assert sent["messages"] == [{"role": "user", "content": "Rate this."}]


def test_an_error_is_told_in_the_servers_words_without_secrets(api: Client) -> None:
    hashed = sha256(KEY.encode()).hexdigest()
    with scripted(refusal(401, f"Invalid key {KEY}, hash {hashed}")) as server:
        external(server.url, api_key=KEY)
        status, tried = ask(api, {"rows": ROWS})

    assert status == 200
    assert tried["rows"] == []
    assert "Invalid key" in tried["error"]["detail"]
    assert KEY not in json.dumps(tried)
    assert hashed not in json.dumps(tried)


def test_a_server_that_hangs_is_waited_for_as_long_as_a_call_may_take(api: Client) -> None:
    with scripted(Step(status=404), Step(hang=True)) as server:
        external(server.url, timeout_s=0.2)
        _, tried = ask(api, {"rows": ROWS})

    assert tried["error"]["code"] == "timeout"


@pytest.mark.parametrize(
    ("protocol", "body", "field", "code"),
    [
        ("oip", {}, "rows", "out_of_range"),
        ("oip", {"rows": ROWS * 5}, "rows", "out_of_range"),
        ("oip", {"rows": [{}] * 1_000}, "rows", "out_of_range"),
        ("oip", {"message": "hello"}, "message", "not_allowed"),
        ("oip", {"colour": 1}, "colour", "unknown_field"),
        ("openai", {"rows": ROWS}, "rows", "not_allowed"),
        ("openai", {"message": "  \n"}, "message", "empty_field"),
        ("openai", {"message": "x" * 20_001}, "message", "field_too_long"),
    ],
)
def test_a_question_that_it_cannot_be_asked_is_refused(
    api: Client, protocol: str, body: Any, field: str, code: str
) -> None:
    external("http://127.0.0.1:9", protocol=protocol)

    status, problem = ask(api, body)

    assert status == 422
    assert [(error["field"], error["code"]) for error in problem["errors"]] == [(field, code)]


def test_a_hosted_model_without_a_ready_replica_cannot_be_tried(api: Client) -> None:
    model, _ = services.register_model("mini", now=NOW, kind="hosted", checkpoint="tiny:0")
    ModelServer.objects.create(model=model, agent="a", ordinal=0, state=ServerState.WARMING)

    status, problem = ask(api, {"rows": ROWS}, "mini")

    assert (status, problem["code"]) == (409, "not_ready")
    assert ask(api, {"rows": ROWS}, "none")[0] == 404


def test_the_page_of_a_model_has_a_box_and_shows_what_came_of_it() -> None:
    User.objects.create(username="op", is_staff=True, is_superuser=True)
    browser = Client()
    browser.force_login(User.objects.get())
    page = "/admin/models_admin/modelconfig/ext/"
    with instant_oip(version="7") as url:
        external(url)
        box = browser.get(f"{page}change/").content.decode()
        texts = "green tea\n\n<b>rocks</b>\n"
        answered = browser.post(f"{page}try/", {"try-query": "tea", "try-texts": texts})
        refused = browser.post(f"{page}try/", {"try-query": "tea", "try-texts": "x\n" * 9})

    assert f'action="{page}try/"' in box
    shown = answered.content.decode()
    assert f"score {stub_score('tea', 'green tea'):.6g}" in shown
    assert "version 7" in shown
    assert "<b>rocks" not in shown
    assert "1 to 8 rows" in refused.content.decode()
    assert browser.get("/admin/models_admin/modelconfig/none/try/").status_code == 404


def test_the_page_of_a_chat_model_takes_a_message_and_shows_errors() -> None:
    User.objects.create(username="op", is_staff=True, is_superuser=True)
    browser = Client()
    browser.force_login(User.objects.get())
    page = "/admin/models_admin/modelconfig/ext/try/"
    with scripted(refusal(401, f"bad key {KEY}")) as server:
        external(server.url, protocol="openai", api_key=KEY)
        shown = browser.post(page, {"try-message": "hello"}).content.decode()

    assert "bad key ***" in shown
    assert "No answer" in shown
    assert KEY not in shown
