"""Servers of each make through the raters that ship: `oip_score` and `llm_judge`.

What they answer is in tests/fake_servers.py, how they are checked in test_external_health.py.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from fulfillment import bell
from fulfillment.models import Rater, Workflow
from fulfillment.policy.lifecycle import BatchState
from tests.builders import Api
from tests.executor_stage import Stage, staged
from tests.fake_servers import CHAT, MAKES, OIP, Life, Server, running
from tests.rating_queue import batches, check_all, requests, states, submit
from workers.autoraters import ChatCall, OipCall
from workers.model_client import CallOutcome, Endpoint, ModelClient

TEMPLATE = "{query_text}: {text}"


@contextmanager
def rating(
    make: str, *, sends_priority: bool = False, **how: Any
) -> Iterator[tuple[Stage, Server]]:
    """Set a stage for a server of this make, and the rater for its protocol."""
    chats = {"autorater": "llm_judge", "protocol": "openai", "prompt_template": TEMPLATE}
    rater: dict[str, Any] = {} if make in OIP else chats
    with staged(**rater) as stage, running(make) as server:
        bell.listen(timeout_s=0.01)
        stage.serve(
            server.url,
            model_name=server.model,
            version="",
            managed=False,
            sends_priority=sends_priority,
            **how,
        )
        yield stage, server
        check_all()


def overloaded() -> int:
    return sum(s.get("overloaded", 0) for s in bell.listen(timeout_s=1))


def left(workflow: Workflow) -> tuple[list[str], int, str]:
    """Return what is to be tried again: states, tries so far, and why its rater is paused."""
    (batch,) = batches(workflow)
    assert batch.state == BatchState.DELAYED
    return states(workflow), batch.attempts, Rater.objects.get().paused_code


REPORTS = {
    "triton": ["1"],
    "kserve": [],
    "mlserver": ["1"],
    "vllm": ["org/judge-7b"],
    "sglang": ["org/judge-7b"],
    "llama.cpp": ["org/judge-7b/b6500-0a1b2c3d"],
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", MAKES)
def test_a_server_of_each_make_is_rated_with(make: str) -> None:
    with rating(make) as (stage, server):
        workflow = submit(["a", "b"])
        stage.rate()

        assert [request.score for request in requests(workflow)] == [3.0, 3.0]
        assert len(server.seen) == (1 if make in OIP else 2)
        assert stage.directory.reports == REPORTS[make]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", MAKES)
def test_a_server_that_loads_its_model_costs_no_try(make: str) -> None:
    with rating(make) as (stage, server):
        server.life = Life.LOADING
        workflow = submit(["a"])
        stage.rate(times=2)
        assert left(workflow) == (["PENDING"], 0, "")
        assert overloaded() == 0
        server.life = Life.READY
        stage.dispatcher.memory.resting.clear()
        stage.rate()

    assert states(workflow) == ["COMPLETED"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", MAKES)
def test_an_overloaded_server_is_sent_less_and_asked_again(make: str) -> None:
    with rating(make) as (stage, server):
        server.life = Life.OVERLOADED
        workflow = submit(["a"])
        stage.rate()

        assert left(workflow) == (["PENDING"], 1, "")
        assert overloaded() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", MAKES)
def test_a_server_that_fails_is_asked_again_and_not_sent_less(make: str) -> None:
    with rating(make) as (stage, server):
        server.life = Life.BROKEN
        workflow = submit(["a"])
        stage.rate()

        assert left(workflow) == (["PENDING"], 1, "")
        assert overloaded() == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("make", MAKES)
def test_a_row_that_is_too_long_fails_alone(make: str) -> None:
    with rating(make) as (stage, server):
        server.life = Life.TOO_LONG
        workflow = submit(["a"])
        stage.rate()

        assert [request.error for request in requests(workflow)] == ["context_length_exceeded"]
        assert (len(server.seen), overloaded()) == (1, 0)


PAUSES = [
    *((make, Life.NO_KEY, "forbidden" if make == "kserve" else "unauthorized") for make in MAKES),
    *((make, Life.NO_MODEL, "not_found") for make in MAKES if make != "llama.cpp"),
    *((make, Life.NO_PRIORITY, "priority_not_enabled") for make in ("vllm", "sglang")),
]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("make", "life", "code"), PAUSES)
def test_what_the_operator_must_mend_pauses_the_rater_and_keeps_its_items(
    make: str, life: Life, code: str
) -> None:
    style = "sglang" if make == "sglang" else ""
    with rating(make, sends_priority=life is Life.NO_PRIORITY, priority_style=style) as (
        stage,
        server,
    ):
        server.life = life
        workflow = submit(["a"])
        stage.rate()

        assert left(workflow) == (["PENDING"], 0, code)
        assert overloaded() == 0


# Priorities


def ask(server: Server, *, score: int, **endpoint: Any) -> Any:
    """Make one call of this API priority; return what the server was told of it."""

    async def run() -> CallOutcome:
        client = ModelClient(clock=lambda: datetime.now(UTC))
        of = Endpoint(url=server.url, model_name=server.model, **endpoint)
        how: Any = {"expected_version": "", "priority": score, "timeout_s": 2.5}
        try:
            if server.make in CHAT:
                chat = ChatCall(messages=[{"role": "user", "content": "x"}])
                return (await client.chat(of, chat, **how)).outcome
            call = OipCall(inputs={"query": ["q"], "text": ["t"]}, outputs=("score",))
            return (await client.infer(of, call, rows=1, **how)).outcome
        finally:
            await client.close()

    assert asyncio.run(run()) is CallOutcome.SUCCESS
    body = server.seen[-1].json()
    assert "priority" not in (body if server.make in OIP else body.get("parameters", {}))
    return body.get("parameters") if server.make in OIP else body.get("priority")


def in_triton_terms(priority: int) -> dict[str, int]:
    return {"priority": priority, "timeout": 2_500_000}


TOLD = [
    # make, style, what is told of 100 (most urgent), 50 and 0
    ("triton", "", [in_triton_terms(p) for p in (1, 51, 101)]),
    ("triton", "triton", [in_triton_terms(p) for p in (1, 51, 101)]),
    ("triton", "vllm", [None, None, None]),
    ("vllm", "", [0, 50, 100]),
    ("vllm", "vllm", [0, 50, 100]),
    ("sglang", "sglang", [100, 50, 0]),
    ("vllm", "triton", [None, None, None]),
]


@pytest.mark.parametrize(("make", "style", "told"), TOLD)
def test_each_server_is_told_priorities_in_its_own_direction(
    make: str, style: str, told: list[Any]
) -> None:
    with running(make) as server:
        for score, said in zip((100, 50, 0), told, strict=True):
            assert ask(server, score=score, sends_priority=True, priority_style=style) == said


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("style", ["", "triton", "vllm", "sglang"])
def test_a_server_that_knows_no_priorities_is_told_none(make: str, style: str) -> None:
    with running(make) as server:
        assert ask(server, score=90, sends_priority=False, priority_style=style) is None


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("protocol", "steps", "shown"),
    [
        ("oip", [{}], (False, "none")),
        ("oip", [{"sends_priority": True}], (True, "triton")),
        ("openai", [{"sends_priority": True}], (True, "vllm")),
        ("openai", [{"priority_style": "sglang"}], (True, "sglang")),
        ("openai", [{"priority_style": "vllm", "sends_priority": False}], (False, "none")),
        ("openai", [{"priority_style": "none", "sends_priority": True}], (False, "none")),
        ("openai", [{"priority_style": "sglang"}, {"priority_style": "none"}], (False, "none")),
        ("openai", [{"priority_style": "sglang"}, {"sends_priority": False}], (False, "none")),
        (
            "openai",
            [{"priority_style": "sglang"}, {"sends_priority": False}, {"sends_priority": True}],
            (True, "sglang"),
        ),
    ],
)
def test_the_direction_is_a_setting_and_the_switch_an_alias(
    protocol: str, steps: list[dict[str, Any]], shown: tuple[bool, str]
) -> None:
    operator = Api("olga", "operator")
    url = "http://127.0.0.1:9"
    first, *later = steps
    model = {"id": "ext", "kind": "external", "protocol": protocol, "url": url, "model_name": "m"}
    answer = operator.post("/models", {**model, **first})
    assert answer.status_code == 201, answer.json()
    for fields in later:
        answer = operator.patch("/models/ext", fields)
        assert answer.status_code == 200, answer.json()

    assert (answer.json()["sends_priority"], answer.json()["priority_style"]) == shown


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("protocol", "style", "code"),
    [("oip", "vllm", "bad_choice"), ("openai", "triton", "bad_choice"), ("oip", "x", "bad_choice")],
)
def test_a_direction_that_its_servers_do_not_know_is_refused(
    protocol: str, style: str, code: str
) -> None:
    model = {"id": "ext", "kind": "external", "protocol": protocol, "url": "http://127.0.0.1:9"}
    answer = Api("olga", "operator").post(
        "/models", {**model, "model_name": "m", "priority_style": style}
    )

    assert answer.status_code == 422
    errors = [(e["field"], e["code"]) for e in answer.json()["errors"]]
    assert [field for field, _ in errors] == ["priority_style"]
