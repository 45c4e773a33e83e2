"""Models that score by an endpoint of an OpenAI-compatible server: registering and looking after.

What their servers answer is in tests/fake_scorers.py.
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from models_admin import external
from models_admin.directory import directory
from models_admin.models import ExternalHealth, ModelConfig
from tests.builders import Api
from tests.fake_scorers import SCORERS, scoring, worth
from tests.fake_servers import MODEL, Life
from tests.fakes import Step, scripted

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EXTERNAL = {"id": "ext", "kind": "external", "protocol": "openai", "model_name": MODEL}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def api() -> Api:
    return Api("olga", "operator")


def registered(api: Api, url: str, endpoint: str, **fields: Any) -> Any:
    return api.post("/models", EXTERNAL | {"url": url, "endpoint": endpoint, **fields})


def errors(answer: Any) -> list[tuple[str, str]]:
    assert answer.status_code == 422, answer.json()
    return [(error["field"], error["code"]) for error in answer.json()["errors"]]


@pytest.mark.parametrize("make", SCORERS)
def test_a_server_is_asked_to_score_a_pair_when_it_is_registered(api: Api, make: str) -> None:
    with scoring(make) as (server, scorer):
        model = registered(api, server.url, scorer.endpoint).json()

    assert (model["protocol"], model["endpoint"]) == ("openai", scorer.endpoint)
    assert (model["version"], model["warnings"]) == (scorer.version, [])
    assert len(server.seen) == 1


def test_a_chat_model_is_the_default_and_another_protocol_has_none(api: Api) -> None:
    chat = api.post("/models", EXTERNAL | {"url": NOWHERE}).json()
    oip = api.post(
        "/models", EXTERNAL | {"id": "oip", "url": NOWHERE, "protocol": "oip", "model_name": "m"}
    ).json()

    assert (chat["endpoint"], oip["endpoint"]) == ("chat", None)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"endpoint": "classify"}, ("endpoint", "bad_choice")),
        ({"endpoint": ""}, ("endpoint", "bad_choice")),
        ({"protocol": "oip", "model_name": "m"}, ("endpoint", "not_allowed")),
        ({"endpoint": "tei_rerank", "priority_style": "vllm"}, ("priority_style", "bad_choice")),
        ({"priority_style": "triton"}, ("priority_style", "bad_choice")),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(
    api: Api, fields: dict[str, str], wrong: tuple[str, str]
) -> None:
    sent = EXTERNAL | {"url": NOWHERE, "endpoint": "rerank", **fields}
    answer = api.post("/models", sent)

    assert wrong[0] in answer.content.decode()
    assert answer.status_code in (400, 422)
    if answer.status_code == 422:
        assert errors(answer) == [wrong]
    assert not ModelConfig.objects.exists()


def test_a_hosted_model_has_no_endpoint(api: Api) -> None:
    hosted = {"id": "mini", "kind": "hosted", "checkpoint": "tiny:0", "endpoint": "score"}
    assert ("endpoint", "not_allowed") in errors(api.post("/models", hosted))


@pytest.mark.parametrize(
    "step",
    [
        Step(body=b"<html>Welcome to nginx!</html>"),
        Step(body=b'{"choices": [{"message": {"content": "nginx"}}]}'),
        Step(body=b'{"results": []}'),
        Step(status=307, headers={"Location": "http://127.0.0.1:9/nginx"}),
    ],
)
def test_what_is_no_such_endpoint_is_refused(api: Api, step: Step) -> None:
    with scripted(step) as server:
        answer = registered(api, server.url, "rerank")

    assert errors(answer) == [("url", "wrong_answer")]
    assert "POST /rerank" in (said := answer.json()["errors"][0]["detail"])
    assert "nginx" not in said


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (
            {"endpoint": "rerank"},
            {"results": [{"index": 0, "relevance_score": 0.5}], "model": "by sk-very-secret"},
        ),
        (
            {"protocol": "oip", "model_name": "m"},
            {"name": "m", "versions": ["sk-very-secret"], "inputs": [], "outputs": []},
        ),
    ],
)
def test_a_key_that_a_server_calls_its_model_by_is_not_kept(
    api: Api, fields: dict[str, str], answer: dict[str, Any]
) -> None:
    with scripted(Step(body=json.dumps(answer).encode())) as server:
        sent = EXTERNAL | {"url": server.url, "api_key": "sk-very-secret", **fields}
        registered = api.post("/models", sent)

    assert registered.status_code == 201, registered.json()
    assert "very-secret" not in registered.content.decode()
    assert "very-secret" not in api.get("/models/ext").content.decode()
    assert ModelConfig.objects.get().version in ("", "by ***")


@pytest.mark.parametrize(
    ("life", "said"),
    [
        (Life.LOADING, "model_warming"),
        (Life.NO_KEY, "unauthorized"),
        (Life.NO_MODEL, "not_found"),
        (Life.OVERLOADED, "rate_limited"),
    ],
)
def test_what_may_be_right_all_the_same_is_a_warning(api: Api, life: Life, said: str) -> None:
    with scoring("vllm score") as (server, _):
        server.life = life
        model = registered(api, server.url, "score").json()

    (warning,) = model["warnings"]
    assert warning.startswith(f"A pair sent to /v1/score gets no score: {said}.")


def test_another_endpoint_is_looked_at_and_is_another_key(api: Api) -> None:
    with scoring("vllm rerank") as (server, _):
        registered(api, server.url, "rerank", version_label="r1")
        before = directory.describe("ext")
        changed = api.patch("/models/ext", {"endpoint": "embeddings"}).json()
        after = directory.describe("ext")
        api.patch("/models/ext", {"endpoint": "rerank"})
        again = directory.describe("ext")

    assert [seen.path for seen in server.seen] == ["/rerank", "/v1/embeddings", "/rerank"]
    assert changed["endpoint"] == "embeddings"
    assert before is not None
    assert after is not None
    assert again is not None
    assert before.version != after.version
    assert again.version == before.version


def test_the_key_of_a_chat_model_is_its_label_alone(api: Api) -> None:
    api.post("/models", EXTERNAL | {"url": NOWHERE, "version_label": "c1"})
    (described,) = filter(None, [directory.describe("ext")])
    assert (described.version, described.protocol) == ("c1", "openai")


def test_raters_that_send_rows_use_it_and_judges_do_not(api: Api) -> None:
    registered(api, NOWHERE, "score")
    rater = {"id": "r", "model": "ext", "score_min": 0, "score_max": 1}

    judge = api.post("/raters", rater | {"autorater": "llm_judge", "prompt_template": "{text}"})
    rows = api.post("/raters", rater | {"autorater": "oip_score"})

    assert errors(judge) == [("model", "protocol_mismatch")]
    assert rows.status_code == 201, rows.json()
    (replica,) = directory.replicas(NOW)
    assert replica.protocol == "oip", "a batch is one call"


@pytest.mark.parametrize("make", ["vllm score", "tei rerank"])
def test_it_is_tried_with_rows(api: Api, make: str) -> None:
    rows = [{"query": "tea", "text": "green"}, {"query": "rocks", "text": "granite"}]
    with scoring(make) as (server, scorer):
        registered(api, server.url, scorer.endpoint)
        tried = api.post("/models/ext/try", {"rows": rows}).json()
        told = api.post("/models/ext/try", {"message": "Rate this."})

    assert [row["score"] for row in tried["rows"]] == [
        worth("tea", "green"),
        worth("rocks", "granite"),
    ]
    assert errors(told) == [("message", "not_allowed")]


def test_the_admin_registers_and_tries_it() -> None:
    browser = Client()
    browser.force_login(User.objects.create(username="op", is_staff=True, is_superuser=True))
    page = "/admin/models_admin/modelconfig/"
    form = EXTERNAL | {
        "endpoint": "tei_rerank",
        "timeout_s": "60",
        "max_concurrency": "16",
        "serving": "{}",
        "window": "16",
        "devices_per_replica": "1",
        "replicas_min": "0",
        "replicas_default": "1",
        "replicas_max": "1",
    }
    with scoring("tei rerank") as (server, _):
        browser.post(f"{page}add/", form | {"url": server.url})
        shown = browser.get(f"{page}ext/change/").content.decode()
        tried = browser.post(
            f"{page}ext/try/", {"try-query": "tea", "try-texts": "green"}
        ).content.decode()

    assert ModelConfig.objects.get().endpoint == "tei_rerank"
    assert "Text Embeddings Inference" in shown
    assert f"score {worth('tea', 'green'):.6g}" in tried


@pytest.mark.parametrize("make", SCORERS)
def test_its_health_is_asked_without_scoring_anything(make: str) -> None:
    with scoring(make) as (server, scorer):
        ModelConfig.objects.create(
            **EXTERNAL | {"url": server.url, "endpoint": scorer.endpoint},
            created_at=NOW,
            updated_at=NOW,
        )
        external.run_once(NOW + timedelta(seconds=10))

    assert ExternalHealth.objects.get().up is True, ExternalHealth.objects.get().detail
    assert not server.seen
