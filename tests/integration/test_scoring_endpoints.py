"""Servers that score by `/v1/score`, `/rerank` or `/v1/embeddings`, through the raters for rows.

What they answer is in tests/fake_scorers.py.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from fulfillment import bell
from fulfillment.models import Rater, Workflow
from tests.executor_stage import Stage, staged
from tests.fake_scorers import SCORERS, Scorer, scoring, vector
from tests.fake_servers import MODEL, Life, Server
from tests.fakes import ScriptedServer, Step, scripted
from tests.rating_queue import batches, check_all, requests, states, submit
from workers.autoraters import OipAnswer, OipCall
from workers.model_client import CallOutcome, CallResult, Endpoint, ModelClient
from workers.model_client.pairs import requests_in

ROWS = ["tea|green tea", "tea|black tea", "rocks|granite", "tea|", "rocks|green tea"]


@contextmanager
def rating(make: str, **how: Any) -> Iterator[tuple[Stage, Server, Scorer]]:
    """Set a stage for a server of this make."""
    with staged(score_min=0, score_max=1) as stage, scoring(make) as (server, scorer):
        bell.listen(timeout_s=0.01)
        more = {"model_name": MODEL, "version": "", "managed": False, **how}
        stage.serve(server.url, scoring=scorer.endpoint, **more)
        yield stage, server, scorer
        check_all()


def pairs(rows: list[str]) -> Workflow:
    def item(row: str) -> dict[str, str]:
        query, _, text = row.partition("|")
        return {"query_text": query, "text": text}

    return submit(rows, item=item)


def overloaded() -> int:
    return sum(s.get("overloaded", 0) for s in bell.listen(timeout_s=1))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", SCORERS)
def test_each_row_gets_the_score_of_its_own_pair(make: str) -> None:
    with rating(make) as (stage, _server, scorer):
        workflow = pairs(ROWS)
        stage.rate()

        assert [request.score for request in requests(workflow)] == [
            pytest.approx(scorer.value(*row.split("|")), abs=1e-12) for row in ROWS
        ]
        assert stage.directory.reports == ([scorer.version] if scorer.version else [])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", ["vllm score", "llama.cpp rerank", "tei rerank"])
def test_a_text_that_is_too_long_fails_alone(make: str) -> None:
    with rating(make) as (stage, server, _scorer):
        server.life = Life.TOO_LONG
        workflow = pairs(["tea|green", "tea|long", "rocks|granite"])
        stage.rate(times=4)

        failed = [request.error for request in requests(workflow)]
        assert failed == [None, "context_length_exceeded", None]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", ["vllm rerank", "llama.cpp embeddings", "tei rerank"])
def test_a_server_that_loads_its_model_costs_no_try(make: str) -> None:
    with rating(make) as (stage, server, _scorer):
        server.life = Life.LOADING
        workflow = pairs(["tea|green"])
        stage.rate(times=2)
        (batch,) = batches(workflow)
        assert (states(workflow), batch.attempts) == (["PENDING"], 0)
        server.life = Life.READY
        stage.dispatcher.memory.resting.clear()
        stage.rate()

    assert states(workflow) == ["COMPLETED"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("life", "tries", "paused", "less"),
    [
        (Life.OVERLOADED, 1, "", 1),
        (Life.BROKEN, 1, "", 0),
        (Life.NO_KEY, 0, "unauthorized", 0),
        (Life.NO_MODEL, 0, "not_found", 0),
        (Life.NO_PRIORITY, 0, "priority_not_enabled", 0),
    ],
)
@pytest.mark.parametrize("make", ["vllm score", "vllm rerank", "vllm embeddings"])
def test_trouble_is_told_apart(make: str, life: Life, tries: int, paused: str, less: int) -> None:
    with rating(make, sends_priority=life is Life.NO_PRIORITY) as (stage, server, _scorer):
        server.life = life
        workflow = pairs(["tea|green"])
        stage.rate()

        (batch,) = batches(workflow)
        found = (states(workflow), batch.attempts, Rater.objects.get().paused_code)
        assert found == (["PENDING"], tries, paused)
        assert overloaded() == less


# Calls


def call(url: str, endpoint: str, rows: list[str], **how: Any) -> CallResult[OipAnswer]:
    """Make one call, by the client alone."""

    async def run() -> CallResult[OipAnswer]:
        client = ModelClient(clock=lambda: datetime.now(UTC))
        changes = {name: how.pop(name) for name in ("sends_priority", "style") if name in how}
        of = Endpoint(
            url=url,
            model_name=MODEL,
            scoring=endpoint,
            sends_priority=changes.get("sends_priority", False),
            priority_style=changes.get("style", ""),
        )
        asked = how.pop("call", None) or OipCall(
            inputs={
                "query": [row.partition("|")[0] for row in rows],
                "text": [row.partition("|")[2] for row in rows],
            },
            outputs=("score",),
        )
        settings: dict[str, Any] = {"expected_version": "", "priority": 50, "timeout_s": 5.0, **how}
        try:
            return await client.infer(of, asked, rows=len(rows), **settings)
        finally:
            await client.close()

    return asyncio.run(run())


def test_pairs_go_together_in_one_request() -> None:
    with scoring("vllm score") as (server, _scorer):
        call(server.url, "score", ROWS)

    (seen,) = server.seen
    assert seen.path == "/v1/score"
    assert seen.json() == {
        "model": MODEL,
        "text_1": ["tea", "tea", "rocks", "tea", "rocks"],
        "text_2": ["green tea", "black tea", "granite", "", "green tea"],
    }


def test_documents_go_with_their_query() -> None:
    with scoring("vllm rerank") as (server, _scorer):
        call(server.url, "rerank", ROWS)

    assert [seen.json() for seen in server.seen] == [
        {
            "model": MODEL,
            "query": query,
            "documents": documents,
            "top_n": len(documents),
        }
        for query, documents in (
            ("tea", ["green tea", "black tea", ""]),
            ("rocks", ["granite", "green tea"]),
        )
    ]


def test_each_text_is_embedded_once() -> None:
    with scoring("vllm embeddings") as (server, _scorer):
        result = call(server.url, "embeddings", [*ROWS, "tea|tea"])

    (seen,) = server.seen
    texts = ["tea", "rocks", "green tea", "black tea", "granite", ""]
    assert seen.json() == {"model": MODEL, "input": texts, "encoding_format": "float"}
    assert result.answer is not None
    assert result.answer.outputs["score"][-1] == 1.0


@pytest.mark.parametrize(
    ("make", "style", "told"),
    [
        ("vllm score", "", 30),
        ("vllm rerank", "vllm", 30),
        ("vllm embeddings", "", 30),
        ("sglang rerank", "sglang", 70),
        ("tei rerank", "vllm", None),
    ],
)
def test_urgency_is_told_where_the_server_knows_it(make: str, style: str, told: int) -> None:
    with scoring(make) as (server, scorer):
        call(server.url, scorer.endpoint, ["q|t"], priority=70, sends_priority=True, style=style)
        call(server.url, scorer.endpoint, ["q|t"], priority=70)

    assert [seen.json().get("priority") for seen in server.seen] == [told, None]


@pytest.mark.parametrize("make", SCORERS)
def test_an_answer_of_another_version_is_refused(make: str) -> None:
    with scoring(make) as (server, scorer):
        result = call(server.url, scorer.endpoint, ["q|t"], expected_version="other")

    code = "wrong_version" if scorer.version else "version_missing"
    assert (result.outcome, result.code) == (CallOutcome.WRONG_VERSION, code)


def test_one_call_is_answered_by_one_version() -> None:
    with scripted(
        ranking([1.0], model="a"), ranking([0.5], model="b"), ranking([0.5], model="b")
    ) as server:
        result = call(server.url, "rerank", ["tea|green", "rocks|granite"])

    assert (result.outcome, result.code) == (CallOutcome.WRONG_VERSION, "wrong_version")
    assert len(server.seen) == 2


@pytest.mark.parametrize("of_second", [{"model": "b"}, {}])
def test_one_call_is_answered_by_one_version_or_by_none_that_is_told(
    of_second: dict[str, Any],
) -> None:
    with scripted(ranking([1.0]), ranking([0.5], **of_second)) as server:
        result = call(server.url, "rerank", ["tea|green", "rocks|granite"])

    wanted = CallOutcome.WRONG_VERSION if of_second else CallOutcome.SUCCESS
    assert result.outcome == wanted, result.code


@pytest.mark.django_db(transaction=True)
def test_each_request_counts_for_the_pace_of_a_rater() -> None:
    """A call by `/rerank` is a request a query."""
    with rating("cohere") as (stage, server, _scorer):
        Rater.objects.update(max_qps=50)
        pairs(ROWS)
        bell.listen(timeout_s=0.01)
        stage.rate()

        assert len(server.seen) == 2
        assert [s["further"] for s in bell.listen(timeout_s=1) if "further" in s] == [1]


@pytest.mark.parametrize(
    ("endpoint", "requests"), [("", 1), ("score", 1), ("rerank", 2), ("tei_rerank", 2)]
)
def test_requests_of_a_call_are_counted(endpoint: str, requests: int) -> None:
    asked = OipCall(inputs={"query": ["a", "b", "a"], "text": ["1", "2", "3"]}, outputs=("score",))
    assert requests_in(asked, endpoint=endpoint) == requests
    assert requests_in(OipCall(inputs={"text": ["1"]}, outputs=()), endpoint=endpoint) == 1


def test_a_plug_in_that_wants_more_than_a_score_pauses_the_rater() -> None:
    wanted = OipCall(inputs={"query": ["q"], "text": ["t"]}, outputs=("score", "risk"))
    with scoring("vllm score") as (server, _scorer):
        result = call(server.url, "score", ["q|t"], call=wanted)

    assert (result.outcome, result.code) == (CallOutcome.PAUSE, "unsupported_call")
    assert "risk" in result.detail
    assert not server.seen


def test_text_that_is_no_unicode_is_a_fault_of_its_row() -> None:
    with scoring("vllm score") as (server, _scorer):
        alone = call(server.url, "score", ["q|\ud800"])
        among = call(server.url, "score", ["q|\ud800", "q|t"])

    assert (alone.outcome, among.outcome) == (CallOutcome.PERMANENT, CallOutcome.SPLIT)


def ranking(scores: list[Any], *, indices: list[Any] | None = None, **more: Any) -> Step:
    """A ranking of these scores."""
    places = range(len(scores)) if indices is None else indices
    results = [
        {"index": index, "relevance_score": score}
        for index, score in zip(places, scores, strict=True)
    ]
    return Step(body=json.dumps({"results": results, **more}).encode())


def embedding(*vectors: Any) -> Step:
    data = [{"index": index, "embedding": each} for index, each in enumerate(vectors)]
    return Step(body=json.dumps({"data": data, "model": MODEL}).encode())


UNUSABLE = [
    ("rerank", ranking([0.5]), "count_mismatch"),
    ("rerank", ranking([0.5, 0.4, 0.3]), "count_mismatch"),
    ("rerank", ranking([0.5, 0.4], indices=[0, 0]), "bad_index"),
    ("rerank", ranking([0.5, 0.4], indices=[0, 2]), "bad_index"),
    ("rerank", ranking([0.5, 0.4], indices=[0, -1]), "bad_index"),
    ("rerank", ranking([0.5, 0.4], indices=[1, None]), "bad_index"),
    ("rerank", ranking([0.5, 0.4], indices=["0", "1"]), "bad_index"),
    ("rerank", ranking([0.5, 0.4], indices=[False, True]), "bad_index"),
    # Nearly as deep as JSON is read; Python cannot show it.
    ("rerank", Step(body=b'{"data":[{"index":%b},{}]}' % (b"[" * 1000 + b"]" * 1000)), "bad_index"),
    ("rerank", ranking([0.5, math.nan]), "not_finite"),
    ("rerank", ranking([0.5, -math.inf]), "not_finite"),
    ("rerank", ranking([0.5, 10**400]), "not_finite"),
    ("rerank", ranking([0.5, "0.4"]), "bad_type"),
    ("rerank", ranking([0.5, True]), "bad_type"),
    ("rerank", ranking([0.5, None]), "bad_type"),
    ("rerank", Step(body=b'{"results": {"0": 0.5}}'), "incomplete_response"),
    ("rerank", Step(body=b'{"choices": []}'), "incomplete_response"),
    ("rerank", Step(body=b"[0.5, 0.4]"), "bad_index"),
    ("rerank", Step(body=b"<html>Welcome</html>"), "bad_answer"),
    ("rerank", Step(body=b""), "bad_answer"),
    ("rerank", Step(body=b'{"error": "engine died"}'), "bad_answer"),
    ("score", Step(body=b'{"data": [{"index": 0, "score": 1}]}'), "count_mismatch"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0]), "count_mismatch"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], [1.0]), "bad_shape"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], [0.0, 0.0]), "not_finite"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], [math.nan, 0.0]), "not_finite"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], [1e300, 1e300]), ""),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], []), "bad_type"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], ["1", "0"]), "bad_type"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], "AAA"), "bad_type"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], "§§§§"), "bad_type"),
    ("embeddings", embedding([1.0, 0.0], [1.0, 0.0], None), "bad_type"),
]


@pytest.mark.parametrize(("endpoint", "step", "code"), UNUSABLE)
def test_an_answer_that_cannot_be_used_is_thrown_away_whole(
    endpoint: str, step: Step, code: str
) -> None:
    with scripted(step) as server:
        result = call(server.url, endpoint, ["q|a", "q|b"])

    outcome = CallOutcome.INCOMPLETE if code else CallOutcome.SUCCESS
    assert (result.outcome, result.code) == (outcome, code), result.detail
    assert (result.answer is None) == bool(code)


def test_the_addresses_are_what_makers_write() -> None:
    wanted = {
        ("score", ""): "/v1/score",
        ("score", "/v1"): "/v1/score",
        ("rerank", ""): "/rerank",
        ("rerank", "/v1/"): "/v1/rerank",
        ("rerank", "/v2"): "/v2/rerank",
        ("tei_rerank", ""): "/rerank",
        ("embeddings", "/proxy/v1"): "/proxy/v1/embeddings",
    }
    found = {}
    for endpoint, base in wanted:
        with scripted(Step(status=500)) as server:
            call(server.url + base, endpoint, ["q|t"])
            found[endpoint, base] = paths(server)

    assert found == {key: [path] for key, path in wanted.items()}


def paths(server: ScriptedServer) -> list[str]:
    return [seen.path for seen in server.seen]


def test_vectors_differ_between_texts() -> None:
    assert len({tuple(vector(text)) for text in ("tea", "rocks", "green tea")}) == 3
