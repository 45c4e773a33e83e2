"""The model client against real HTTP servers that do what servers do.

The scripted server repeats its last step, so a second, unexpected request shows in `seen`.
"""

import asyncio
import base64
import gzip
import hashlib
import json
import math
import socket
import subprocess
import sys
import zlib
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import fakes
from tests.fakes import Step, closed_port, instant_oip, oip, refusal, scripted
from workers.autoraters import ChatAnswer, ChatCall, OipAnswer, OipCall
from workers.model_client import CallOutcome, CallResult, Endpoint, ModelClient
from workers.model_client.answers import read_answer
from workers.model_client.endpoint import target_of
from workers.model_client.wire import MAX_ANSWER_BYTES

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
ROOT = Path(__file__).parent.parent.parent
T = TypeVar("T")


def with_client(use: Callable[[ModelClient], Awaitable[T]]) -> T:
    """Run `use` with a client of its own on a loop of its own."""

    async def run() -> T:
        client = ModelClient(clock=lambda: NOW)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def call_of(rows: int) -> OipCall:
    return OipCall(
        inputs={
            "query": [f"query {row}" for row in range(rows)],
            "text": [f"text {row}" for row in range(rows)],
        },
        outputs=("score",),
    )


async def send(client: ModelClient, endpoint: Endpoint, call: OipCall) -> CallResult[OipAnswer]:
    return await client.infer(
        endpoint, call, rows=call.rows, expected_version="", priority=50, timeout_s=5.0
    )


async def infer(
    client: ModelClient,
    url: str,
    *,
    rows: int = 1,
    expected_version: str = "",
    priority: int = 50,
    timeout_s: float = 5.0,
    own_timeout_s: float = 60.0,
    **endpoint: Any,
) -> CallResult[OipAnswer]:
    return await client.infer(
        Endpoint(url=url, model_name="m", timeout_s=own_timeout_s, **endpoint),
        call_of(rows),
        rows=rows,
        expected_version=expected_version,
        priority=priority,
        timeout_s=timeout_s,
    )


async def chat(
    client: ModelClient, url: str, *, priority: int = 50, timeout_s: float = 5.0, **endpoint: Any
) -> CallResult[ChatAnswer]:
    return await client.chat(
        Endpoint(url=url, model_name="org/m", **endpoint),
        ChatCall(
            messages=[{"role": "user", "content": "rate it"}],
            options={"temperature": 0},
            notes={"row": 7},
        ),
        expected_version="",
        priority=priority,
        timeout_s=timeout_s,
    )


def ask(url: str, **how: Any) -> CallResult[OipAnswer]:
    """One call by a fresh client."""
    return with_client(lambda client: infer(client, url, **how))


def answered(*steps: Step, ready: Step | None = None, **how: Any) -> CallResult[OipAnswer]:
    """What one call comes to when the server does this."""
    with scripted(*steps, ready=ready) as server:
        return ask(server.url, **how)


# What is sent


def test_a_good_answer_is_success() -> None:
    with scripted(oip(0.25, 0.5, 1)) as server:
        result = ask(server.url, rows=3, expected_version="1")

    assert result.outcome is CallOutcome.SUCCESS
    assert result.answer == OipAnswer(outputs={"score": [0.25, 0.5, 1.0]}, model_version="1")
    assert (result.code, result.detail, result.retry_after_s) == ("", "", None)
    assert 0 < result.seconds < 5
    (seen,) = server.seen
    assert (seen.method, seen.path) == ("POST", "/v2/models/m/infer")
    assert seen.json() == {
        "id": seen.json()["id"],
        "inputs": [
            {
                "name": name,
                "shape": [3, 1],
                "datatype": "BYTES",
                "data": [f"{name} {row}" for row in range(3)],
            }
            for name in ("query", "text")
        ],
        "outputs": [{"name": "score"}],
    }


def test_notes_come_back_with_the_answer_and_are_not_sent() -> None:
    call = OipCall(inputs={"text": ["a"]}, outputs=("score",), notes=[{"secret": "note"}])

    with scripted(oip(1.0)) as server:
        endpoint = Endpoint(url=server.url, model_name="m")
        result = with_client(lambda client: send(client, endpoint, call))

    assert result.answer is not None
    assert result.answer.notes == [{"secret": "note"}]
    assert b"note" not in server.seen[0].body


def test_the_choice_of_outputs_may_be_left_to_the_model() -> None:
    call = OipCall(inputs={"text": ["a"]}, outputs=("score",), all_outputs=True)
    with scripted(oip(1.0, parameters={"max_tokens": 256})) as server:
        endpoint = Endpoint(url=server.url, model_name="m")
        result = with_client(lambda client: send(client, endpoint, call))

    assert "outputs" not in server.seen[0].json()
    assert result.answer is not None
    assert result.answer.parameters == {"max_tokens": 256}


@pytest.mark.parametrize(("priority", "sent"), [(100, 1), (50, 51), (0, 101)])
def test_priority_and_time_are_sent_in_tritons_terms_where_it_is_known(
    priority: int, sent: int
) -> None:
    with scripted(oip(1.0)) as server:
        ask(server.url, priority=priority, timeout_s=2.5, sends_priority=True)

    assert server.seen[0].json()["parameters"] == {"priority": sent, "timeout": 2_500_000}


def test_the_address_may_have_a_path_a_query_and_a_login() -> None:
    with scripted(oip(1.0)) as server:
        host = server.url.removeprefix("http://")
        result = ask(f"http://me:pa%20ss@{host}/base/?key=k", headers={"X-Team": "search"})

    assert result.outcome is CallOutcome.SUCCESS
    (seen,) = server.seen
    assert seen.path == "/base/v2/models/m/infer?key=k"
    assert seen.headers["authorization"] == "Basic bWU6cGEgc3M="
    assert seen.headers["x-team"] == "search"


def test_a_model_name_cannot_leave_its_place_in_the_path() -> None:
    with scripted(oip(1.0)) as server:
        endpoint = Endpoint(url=server.url, model_name="../a/b?c#d")
        with_client(lambda client: send(client, endpoint, call_of(1)))

    assert server.seen[0].path == "/v2/models/..%2Fa%2Fb%3Fc%23d/infer"


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_port() as nobody, scripted(oip(1.0)) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{nobody}")
        monkeypatch.delenv("no_proxy", raising=False)

        assert ask(server.url).outcome is CallOutcome.SUCCESS


def test_cookies_are_not_kept() -> None:
    async def twice(client: ModelClient, url: str) -> None:
        await infer(client, url)
        await infer(client, url)

    step = oip(1.0)
    with scripted(Step(body=step.body, headers={"Set-Cookie": "a=b"})) as server:
        with_client(lambda client: twice(client, server.url))

    assert all("cookie" not in seen.headers for seen in server.seen)


# Refusals


@pytest.mark.parametrize(
    ("status", "one_row", "several_rows", "code"),
    [
        (400, "permanent", "split", "invalid_request"),
        (401, "pause", "pause", "unauthorized"),
        (402, "pause", "pause", "http_402"),
        (403, "pause", "pause", "forbidden"),
        (404, "pause", "pause", "not_found"),
        (405, "pause", "pause", "http_405"),
        (408, "transient", "transient", "http_408"),
        (409, "transient", "transient", "http_409"),
        (413, "permanent", "split", "payload_too_large"),
        (422, "permanent", "split", "invalid_request"),
        (425, "transient", "transient", "http_425"),
        (429, "overload", "overload", "rate_limited"),
        (500, "transient", "transient", "http_500"),
        (501, "permanent", "permanent", "not_implemented"),
        (502, "transient", "transient", "http_502"),
        (503, "overload", "overload", "unavailable"),
        (504, "transient", "transient", "http_504"),
        (529, "overload", "overload", "overloaded"),
        (204, "incomplete", "incomplete", "bad_answer"),
        (206, "incomplete", "incomplete", "bad_answer"),
        (301, "pause", "pause", "redirect_not_followed"),
        (307, "pause", "pause", "redirect_not_followed"),
    ],
)
def test_a_status_decides_what_happens_next(
    status: int, one_row: str, several_rows: str, code: str
) -> None:
    body = b"" if status == 204 else b'{"error":"no"}'
    step = Step(status=status, body=body, headers={"Location": "/v2/elsewhere"})

    async def each(
        client: ModelClient, url: str
    ) -> tuple[CallResult[OipAnswer], CallResult[OipAnswer], CallResult[ChatAnswer]]:
        return (
            await infer(client, url, rows=1),
            await infer(client, url, rows=12),
            await chat(client, url),
        )

    with scripted(step) as server:
        one, several, judged = with_client(lambda client: each(client, server.url))

    assert (one.outcome, several.outcome, judged.outcome) == (one_row, several_rows, one_row)
    assert one.code == several.code == judged.code == code
    assert one.answer is None
    assert judged.answer is None
    assert len(server.seen) == 3


@pytest.mark.parametrize("status", [400, 413, 422, 429, 500, 503, 200])
@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded", "message": "too long"},
        "This model's maximum context length is 512 tokens",
        "Token indices sequence length is longer than the specified maximum sequence length",
        "Input is too long for requested model",
    ],
    ids=["code", "openai", "transformers", "bedrock"],
)
def test_too_many_tokens_are_recognised_under_any_status(status: int, error: Any) -> None:
    one = answered(refusal(status, error))
    several = answered(refusal(status, error), rows=12)

    assert (one.outcome, one.code) == (CallOutcome.PERMANENT, "context_length_exceeded")
    assert (several.outcome, several.code) == (CallOutcome.SPLIT, "context_length_exceeded")


@pytest.mark.parametrize(
    "error",
    [
        "Rate limit reached on tokens per min (TPM): Limit 10000, Used 9000",
        "maximum number of tokens per minute reached",
        "queue is full",
    ],
)
def test_a_limit_of_the_rate_is_no_fault_of_a_row(error: str) -> None:
    assert answered(refusal(429, error)).outcome is CallOutcome.OVERLOAD


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ({"Retry-After": "2"}, 2.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"RETRY-AFTER": format_datetime(NOW.replace(second=30), usegmt=True)}, 30.0),
        ({"Retry-After": "99999999999"}, 1_800.0),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_read_in_all_its_forms(
    status: int, header: dict[str, str], wait_s: float | None
) -> None:
    result = answered(Step(status=status, headers=header, body=b"slow down"))

    assert result.outcome is CallOutcome.OVERLOAD
    assert result.retry_after_s == wait_s


# Warming up


def test_a_refused_connection_is_a_server_that_is_not_there_yet() -> None:
    with closed_port() as port:
        result = ask(f"http://127.0.0.1:{port}")

    assert (result.outcome, result.code) == (CallOutcome.WARMING, "connection_refused")
    assert f"127.0.0.1:{port}" in result.detail


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (503, "warming up"),
        (503, "Model bert is currently loading"),
        (503, "model is not ready"),
        (400, "Request for unknown model: 'm' has no available versions"),
        (404, "Model m is not ready"),
    ],
)
def test_a_server_that_says_it_is_not_ready_is_warming(status: int, error: str) -> None:
    result = answered(refusal(status, error, Retry_After="3"))

    assert (result.outcome, result.code) == (CallOutcome.WARMING, "model_warming")
    assert result.retry_after_s == 3.0


def test_a_wordless_503_is_asked_for_its_health_at_most_once_a_second() -> None:
    async def thrice(client: ModelClient, url: str) -> list[CallResult[OipAnswer]]:
        return [await infer(client, url) for _ in range(3)]

    with scripted(Step(status=503), ready=Step(status=503)) as server:
        results = with_client(lambda client: thrice(client, server.url))

    assert {result.outcome for result in results} == {CallOutcome.WARMING}
    assert server.probes == 1


@pytest.mark.parametrize(
    "ready", [Step(body=b"{}"), Step(status=404), Step(reset=True)], ids=["ready", "none", "reset"]
)
def test_a_503_of_a_server_that_does_not_call_itself_unready_is_overload(ready: Step) -> None:
    result = answered(Step(status=503, body=b"busy"), ready=ready)

    assert (result.outcome, result.code) == (CallOutcome.OVERLOAD, "unavailable")


def test_triton_without_the_model_pauses_the_rater_even_by_400() -> None:
    result = answered(refusal(400, "Request for unknown model: 'm' is not found"), rows=12)

    assert (result.outcome, result.code) == (CallOutcome.PAUSE, "not_found")


# Answers that cannot be used


def tensor(**parts: Any) -> dict[str, Any]:
    whole = {"name": "score", "datatype": "FP32", "shape": [3, 1], "data": [1.0, 2.0, 3.0]}
    return {name: part for name, part in (whole | parts).items() if part is not None}


DEEP = b'{"model_version":"1","outputs":[{"name":"score","data":[1,2,3],"shape":%b}]}' % (
    b"[" * 1000 + b"]" * 1000
)
"""Nearly as deep as JSON is read; Python cannot show it."""


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (Step(body=b"<html>welcome</html>"), "bad_answer"),
        (Step(body=b""), "bad_answer"),
        (Step(body=b"[1, 2, 3]"), "bad_answer"),
        (Step(body=b'{"outputs": ['), "bad_answer"),
        (Step(body=b"[" * 100_000), "bad_answer"),
        (Step(body=b"\xff\xfe\x00"), "bad_answer"),
        (refusal(200, "something broke"), "bad_answer"),
        (oip(outputs=None), "incomplete_response"),
        (oip(outputs=[]), "incomplete_response"),
        (oip(outputs=[tensor(name="other")]), "incomplete_response"),
        (oip(outputs=[tensor(data=None)]), "incomplete_response"),
        (oip(outputs=["score"]), "bad_answer"),
        (oip(outputs=[tensor(), tensor()]), "bad_answer"),
        (oip(1.0, 2.0), "count_mismatch"),
        (oip(1.0, 2.0, 3.0, 4.0), "count_mismatch"),
        (oip(), "count_mismatch"),
        (oip(*[1.0] * 6), "count_mismatch"),
        (oip(outputs=[tensor(shape=[3, 2], data=[1.0] * 6)]), "count_mismatch"),
        (oip(outputs=[tensor(data=[[1.0, 2.0, 3.0]])]), "count_mismatch"),
        (oip(outputs=[tensor(shape=[1, 3])]), "bad_shape"),
        (oip(outputs=[tensor(shape=[4, 1])]), "bad_shape"),
        (oip(outputs=[tensor(shape=[])]), "bad_shape"),
        (oip(outputs=[tensor(shape=3)]), "bad_shape"),
        (Step(body=DEEP), "bad_shape"),
        (oip(1.0, math.nan, 3.0), "not_finite"),
        (oip(1.0, math.inf, 3.0), "not_finite"),
        (oip(1.0, 10**400, 3.0), "not_finite"),
        (oip(1.0, None, 3.0), "bad_type"),
        (oip(1.0, "2.0", 3.0), "bad_type"),
        (oip(1.0, True, 3.0), "bad_type"),
        (oip(1.0, {"score": 2}, 3.0), "bad_type"),
        (oip(1.0, 2.0, 3.0, id="somebody else's"), "wrong_id"),
    ],
)
def test_an_unusable_200_is_thrown_away_whole(step: Step, code: str) -> None:
    result = answered(step, rows=3)

    assert (result.outcome, result.code) == (CallOutcome.INCOMPLETE, code)
    assert result.answer is None


PIECES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats()
    | st.sampled_from(["score", "1", "", "7"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["outputs", "name", "data", "shape", "id", "model_version", "error"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
TENSORS = st.fixed_dictionaries(
    {"name": st.just("score"), "data": st.lists(PIECES, max_size=4) | PIECES},
    optional={"shape": st.lists(st.integers(0, 4), max_size=3) | PIECES},
)


@given(
    st.binary(max_size=50)
    | PIECES.map(lambda document: json.dumps(document).encode())
    | st.fixed_dictionaries(
        {"outputs": st.lists(TENSORS | PIECES, max_size=3)},
        optional={"id": PIECES, "model_version": PIECES, "parameters": PIECES},
    ).map(lambda document: json.dumps(document).encode())
)
def test_no_answer_raises_or_gives_other_than_one_finite_number_a_row(body: bytes) -> None:
    read = read_answer(body, call=call_of(2), rows=2, request_id="7", expected_version="")

    if isinstance(read, OipAnswer):
        for numbers in read.outputs.values():
            assert [math.isfinite(number) for number in numbers] == [True, True]
        assert "score" in read.outputs
    else:
        assert read.outcome in {CallOutcome.INCOMPLETE, CallOutcome.SPLIT}


@pytest.mark.parametrize(
    "step",
    [
        oip(1.0, 2.0, 3.0, id=None),
        oip(outputs=[tensor(shape=[3])]),
        oip(outputs=[tensor(shape=None)]),
        oip(outputs=[tensor(data=[[1.0], [2.0], [3.0]])]),
        oip(outputs=[tensor(shape=[3, 1, 1], data=[[[1]], [[2]], [[3]]])]),
        oip(outputs=[tensor(name="embedding", shape=[3, 2], data=[0.0] * 6), tensor()]),
    ],
    ids=["no id", "flat shape", "no shape", "nested", "deeper", "other outputs first"],
)
def test_the_freedoms_of_the_protocol_are_taken(step: Step) -> None:
    result = answered(step, rows=3)

    assert result.answer is not None
    assert result.answer.outputs == {"score": [1.0, 2.0, 3.0]}


def test_outputs_are_told_apart_by_name_and_not_by_order() -> None:
    step = oip(outputs=[tensor(name="tokens", data=[7, 8, 9]), tensor()])

    result = answered(step, rows=3)

    assert result.answer is not None
    assert result.answer.outputs == {"score": [1.0, 2.0, 3.0], "tokens": [7.0, 8.0, 9.0]}


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (oip(1.0, model_version="2"), "wrong_version"),
        (oip(1.0, 2.0, model_version="2"), "wrong_version"),
        (oip(1.0, model_version=None), "version_missing"),
    ],
)
def test_an_answer_of_another_version_is_told_from_all_other_faults(step: Step, code: str) -> None:
    result = answered(step, expected_version="1")

    assert (result.outcome, result.code) == (CallOutcome.WRONG_VERSION, code)


@pytest.mark.parametrize(
    ("named", "kept"), [("2", "2"), ("v" * 300, "v" * 128), ("2\0", ""), (2, "")]
)
def test_any_version_will_do_where_none_is_expected(named: object, kept: str) -> None:
    result = answered(oip(1.0, model_version=named))

    assert result.answer is not None
    assert result.answer.model_version == kept


# Time and size


@pytest.mark.parametrize(
    "step",
    [
        Step(hang=True),
        Step(body=b" " * 1_000, piece=1, every_s=0.02),
        Step(body=b"{}", declared_length=1_000),
    ],
    ids=["hangs", "drips", "promises more"],
)
def test_the_limit_is_on_the_whole_call(step: Step) -> None:
    result = answered(step, timeout_s=0.3)

    assert (result.outcome, result.code) == (CallOutcome.OVERLOAD, "timeout")
    assert 0.3 <= result.seconds < 2.0


def test_the_smaller_limit_counts() -> None:
    with scripted(Step(hang=True)) as server:
        result = ask(server.url, timeout_s=60, own_timeout_s=0.2)

    assert result.seconds < 2.0


def test_no_call_is_made_without_time() -> None:
    with scripted(oip(1.0)) as server:
        result = ask(server.url, timeout_s=0.0)

    assert (result.outcome, result.code) == (CallOutcome.TRANSIENT, "no_time")
    assert server.seen == []


def test_a_call_that_hangs_holds_up_no_other() -> None:
    async def both(
        client: ModelClient, slow: str, good: str
    ) -> tuple[CallResult[OipAnswer], CallResult[OipAnswer]]:
        hanging = asyncio.create_task(infer(client, slow, timeout_s=0.7))
        quick = await infer(client, good)
        assert not hanging.done()
        return quick, await hanging

    with scripted(Step(hang=True)) as slow, scripted(oip(1.0)) as good:
        quick, hung = with_client(lambda client: both(client, slow.url, good.url))

    assert quick.outcome is CallOutcome.SUCCESS
    assert hung.code == "timeout"


def test_a_cancelled_call_leaves_the_client_fit_for_use() -> None:
    async def use(client: ModelClient, slow: str, good: str) -> CallResult[OipAnswer]:
        hanging = asyncio.create_task(infer(client, slow))
        await infer(client, good)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        return await infer(client, good)

    with scripted(Step(hang=True)) as slow, scripted(oip(1.0)) as good:
        result = with_client(lambda client: use(client, slow.url, good.url))

    assert result.outcome is CallOutcome.SUCCESS


BOMB = gzip.compress(b" " * (MAX_ANSWER_BYTES + 1))


@pytest.mark.parametrize(
    "step",
    [
        Step(endless=True),
        Step(hang=False, declared_length=10**12, body=b"{}"),
        Step(body=BOMB, headers={"Content-Encoding": "gzip"}),
    ],
    ids=["never ends", "is announced", "hides in an encoding"],
)
def test_an_answer_over_the_limit_is_refused(step: Step) -> None:
    result = answered(step, timeout_s=10)

    assert (result.outcome, result.code) == (CallOutcome.INCOMPLETE, "response_too_large")


def test_a_large_answer_below_the_limit_is_read() -> None:
    outputs = [tensor(), tensor(name="embedding", shape=[1_000_000], data=[0] * 1_000_000)]

    assert answered(oip(outputs=outputs), rows=3).outcome is CallOutcome.SUCCESS


def test_a_refusal_that_never_ends_counts_by_its_status() -> None:
    result = answered(Step(status=429, endless=True, headers={"Retry-After": "7"}))

    assert (result.outcome, result.retry_after_s) == (CallOutcome.OVERLOAD, 7.0)


def test_a_refusal_that_drips_counts_by_its_status_after_a_while() -> None:
    step = Step(status=422, body=b"no " * 1_000, piece=3, every_s=0.1)

    result = answered(step, timeout_s=10)

    assert (result.outcome, result.code) == (CallOutcome.PERMANENT, "invalid_request")
    assert result.seconds < 4


def packed(step: Step, pack: Callable[[bytes], bytes], encoding: str) -> Step:
    def body(seen: Any) -> bytes:
        assert callable(step.body)
        return pack(step.body(seen))

    return Step(body=body, headers={"Content-Encoding": encoding})


@pytest.mark.parametrize(
    ("pack", "encoding"), [(gzip.compress, "gzip"), (zlib.compress, "Deflate"), (bytes, "identity")]
)
def test_an_encoding_we_did_not_ask_for_is_read(
    pack: Callable[[bytes], bytes], encoding: str
) -> None:
    with scripted(packed(oip(1.0), pack, encoding)) as server:
        result = ask(server.url)

    assert result.outcome is CallOutcome.SUCCESS
    assert server.seen[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    "step",
    [
        packed(oip(1.0), bytes, "gzip"),
        packed(oip(1.0), lambda body: gzip.compress(body)[:-4], "gzip"),
        packed(oip(1.0), bytes, "br"),
    ],
    ids=["is none", "cut short", "unknown"],
)
def test_an_encoding_that_cannot_be_read_is_a_bad_answer(step: Step) -> None:
    result = answered(step)

    assert (result.outcome, result.code) == (CallOutcome.INCOMPLETE, "bad_answer")


# Connections


def test_one_connection_serves_calls_in_a_row() -> None:
    async def thrice(client: ModelClient, url: str) -> None:
        for _ in range(3):
            await infer(client, url)

    with scripted(oip(1.0)) as server:
        with_client(lambda client: thrice(client, server.url))

    assert [seen.connection for seen in server.seen] == [1, 1, 1]


def test_no_more_connections_are_opened_than_allowed() -> None:
    async def many(url: str) -> list[CallResult[OipAnswer]]:
        client = ModelClient(clock=lambda: NOW, max_connections_per_host=2)
        try:
            return await asyncio.gather(*[infer(client, url) for _ in range(12)])
        finally:
            await client.close()

    with scripted(oip(1.0)) as server:
        results = asyncio.run(many(server.url))

    assert {result.outcome for result in results} == {CallOutcome.SUCCESS}
    assert server.connections <= 2


def test_a_server_may_close_its_connections_between_calls() -> None:
    async def many(client: ModelClient, url: str) -> list[CallResult[OipAnswer]]:
        return [await infer(client, url) for _ in range(20)]

    good = oip(1.0)
    with scripted(Step(body=good.body, close=True)) as server:
        results = with_client(lambda client: many(client, server.url))

    assert {result.outcome for result in results} == {CallOutcome.SUCCESS}


def test_a_connection_that_breaks_before_an_answer_is_replaced_at_once() -> None:
    async def twice(
        client: ModelClient, url: str
    ) -> tuple[CallResult[OipAnswer], CallResult[OipAnswer]]:
        return await infer(client, url), await infer(client, url)

    with scripted(oip(1.0), Step(reset=True), oip(2.0)) as server:
        _, result = with_client(lambda client: twice(client, server.url))

    assert result.answer is not None
    assert result.answer.outputs == {"score": [2.0]}
    assert [seen.connection for seen in server.seen] == [1, 1, 2]


def test_a_connection_is_replaced_only_once() -> None:
    with scripted(Step(reset=True)) as server:
        result = ask(server.url)

    assert (result.outcome, result.code) == (CallOutcome.TRANSIENT, "connection_lost")
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("cut_after", "reset"),
    [(5, False), (30, False), (90, False), (90, True)],
    ids=["in the status line", "in the head", "in the body", "in the body by a reset"],
)
def test_an_answer_that_had_begun_is_not_asked_again(cut_after: int, reset: bool) -> None:
    step = Step(body=b"x" * 1_000, cut_after=cut_after, cut_by_reset=reset)
    with scripted(step) as server:
        result = ask(server.url)

    assert (result.outcome, result.code) == (CallOutcome.TRANSIENT, "connection_lost")
    assert len(server.seen) == 1


def test_a_server_that_goes_away_during_a_call_is_not_warming() -> None:
    """It may have died of these rows: were that free of charge, they would kill it for ever."""

    async def use(client: ModelClient, url: str, listener: socket.socket) -> CallResult[OipAnswer]:
        asking = asyncio.create_task(infer(client, url))
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener)
        await loop.sock_recv(connection, 65_536)
        listener.close()
        connection.close()
        return await asking

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = with_client(lambda client: use(client, url, listener))

    assert (result.outcome, result.code) == (CallOutcome.TRANSIENT, "connection_lost")


@pytest.mark.parametrize(
    "garbage", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000]
)
def test_what_is_no_http_is_a_transient_fault(garbage: bytes) -> None:
    with scripted(Step(raw=garbage)) as server:
        result = ask(server.url)

    assert result.outcome is CallOutcome.TRANSIENT
    assert result.code in {"protocol_error", "connection_lost"}


def test_a_name_that_does_not_exist_is_a_transient_fault() -> None:
    result = ask("http://no-such-host.invalid:1")

    assert (result.outcome, result.code) == (CallOutcome.TRANSIENT, "name_not_resolved")


# What the operator registered, and what of it may be repeated


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("ftp://models/", {}),
        ("models:9000", {}),
        ("", {}),
        ("http://", {}),
        ("http://[::1", {}),
        ("http://host:99999", {}),
        ("http://127.0.0.1:1", {"X-Key": "a\r\nX-Other: b"}),
        ("http://127.0.0.1:1", {"X Key": "a"}),
    ],
)
def test_an_address_or_header_that_cannot_be_used_pauses_the_rater(
    url: str, headers: dict[str, str]
) -> None:
    result = ask(url, headers=headers)

    assert (result.outcome, result.code) == (CallOutcome.PAUSE, "invalid_endpoint")


KEY = "sk-0123456789abcdef"


def test_no_secret_is_repeated() -> None:
    def echo(seen: Any) -> bytes:
        told = [seen.path, seen.headers["authorization"], seen.headers["x-key"]]
        return json.dumps({"error": {"message": f"{KEY} is bad: {told}"}}).encode()

    for status in (200, 400, 401, 429, 500):
        with scripted(Step(status=status, body=echo)) as server:
            port = server.url.rpartition(":")[2]
            url = f"http://user:{KEY}-url@127.0.0.1:{port}/?token={KEY}-query"
            headers = {"Authorization": f"Bearer {KEY}", "X-Key": f"{KEY}-own"}
            result = ask(url, headers=headers)

        assert f"from 127.0.0.1:{port}" in result.detail
        assert "is bad" in result.detail
        assert "0123456789" not in repr(result)


def forms_of(secret: str) -> Iterator[str]:
    """What servers write of a key in place of it."""
    data = secret.encode()
    for digest in ("md5", "sha1", "sha256"):
        hexadecimal = hashlib.new(digest, data, usedforsecurity=False).hexdigest()
        yield from (hexadecimal, hexadecimal.upper())
    yield base64.b64encode(data).decode()
    yield base64.urlsafe_b64encode(data).decode().rstrip("=")
    yield quote(secret, safe="")
    yield quote(secret, safe="").replace("%2F", "%2f")


SAMPLES = [
    "sk-0123456789abcdef",
    "p/a+s?s w=o&r<d>~~~",
    "\u00fc\u00ff-not-ascii-\u20ac",
]


@pytest.mark.parametrize("secret", SAMPLES)
def test_neither_digest_nor_encoding_of_a_secret_is_repeated(secret: str) -> None:
    target = target_of(Endpoint(url=f"http://h/?key={quote(secret)}", model_name="m"))

    for form in forms_of(secret):
        told = target.describe("unauthorized", f"Received API Key = x, Key Hash = {form}; see logs")
        assert form not in told
        assert told.startswith("unauthorized from h:80: Received API Key = x, Key Hash = ***")
        assert told.endswith("; see logs")


def test_of_a_secret_that_begins_like_another_nothing_is_left() -> None:
    headers = {"X-Team": "sk-team-1", "X-Key": "sk-team-1-0123456789"}
    target = target_of(Endpoint(url="http://h", model_name="m", headers=headers))

    assert target.redact("sk-team-1-0123456789 of sk-team-1") == "*** of ***"


def test_an_endpoint_shows_no_secret() -> None:
    endpoint = Endpoint(
        url=f"https://user:{KEY}@models.example/v1?key={KEY}",
        model_name="m",
        headers={"Authorization": f"Bearer {KEY}"},
    )

    assert repr(endpoint) == "Endpoint(host='models.example:443', model_name='m')"


def test_a_detail_is_one_short_line_for_people() -> None:
    page = b"<html><center><h1>413 Request\nEntity Too Large</h1>\x00" + b"pad " * 1_000

    result = answered(Step(status=413, body=page))

    assert "HTTP 413 413 Request Entity Too Large pad pad" in result.detail
    assert len(result.detail) <= 1_000
    assert result.detail.isprintable()


def test_text_that_is_no_unicode_is_a_fault_of_its_row() -> None:
    call = OipCall(inputs={"text": ["a\ud800"]}, outputs=("score",))
    with scripted(oip(1.0)) as server:
        endpoint = Endpoint(url=server.url, model_name="m")
        result = with_client(lambda client: send(client, endpoint, call))

    assert (result.outcome, result.code) == (CallOutcome.PERMANENT, "invalid_request")


# Metadata


def test_metadata_tells_the_version_and_the_tensors() -> None:
    with instant_oip(version="7") as url:
        told = with_client(lambda client: client.metadata(Endpoint(url=url, model_name="m")))

    assert told.outcome is CallOutcome.SUCCESS
    assert (told.version, told.inputs, told.outputs) == ("7", ("query", "text"), ("score",))


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (refusal(404), CallOutcome.PAUSE),
        (refusal(503, "warming up"), CallOutcome.WARMING),
        (Step(body=b"<html>"), CallOutcome.INCOMPLETE),
        (Step(body=b"{}"), CallOutcome.INCOMPLETE),
        (Step(hang=True), CallOutcome.OVERLOAD),
        (Step(reset=True), CallOutcome.TRANSIENT),
    ],
)
def test_metadata_that_is_not_to_be_had_says_why(step: Step, outcome: CallOutcome) -> None:
    with scripted(step) as server:
        endpoint = Endpoint(url=server.url, model_name="m")
        told = with_client(lambda client: client.metadata(endpoint, timeout_s=0.3))

    assert told.outcome is outcome
    assert told.version == ""


def test_several_versions_are_no_version() -> None:
    step = Step(body=b'{"name":"m","versions":["1","2"],"parameters":{"ready":true}}')
    with scripted(step) as server:
        endpoint = Endpoint(url=server.url, model_name="m")
        told = with_client(lambda client: client.metadata(endpoint))

    assert (told.version, told.versions) == ("", ("1", "2"))
    assert told.parameters == {"ready": True}


# The instant stub, which other tests count with


@pytest.fixture
def stub_process(tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], str]]]:
    running: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "tests.fakes", "oip", "--tally", str(tmp_path / "tally")]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        ready = process.stdout.readline().removeprefix("READY ")
        return process, f"http://127.0.0.1:{json.loads(ready)['port']}"

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_stub_counts_predictions_over_its_deaths(
    stub_process: Callable[[], tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    async def twice(client: ModelClient, url: str) -> list[CallResult[OipAnswer]]:
        return [await infer(client, url, rows=3, sends_priority=True) for _ in range(2)]

    first, url = stub_process()
    results = with_client(lambda client: twice(client, url))
    first.kill()
    _, url = stub_process()
    results += with_client(lambda client: twice(client, url))

    tally = fakes.read_tally(tmp_path / "tally")
    assert (tally.calls, tally.rows) == (4, 12)
    assert set(tally.predictions.values()) == {4}
    assert tally.predictions[fakes.pair_of("query 2", "text 2")] == 4
    assert tally.priorities == {51: 4}
    expected = [fakes.stub_score(f"query {row}", f"text {row}") for row in range(3)]
    assert all(0 <= score <= fakes.MAX_SCORE for score in expected)
    for result in results:
        assert result.answer is not None
        assert result.answer.outputs["score"] == pytest.approx(expected)


def test_the_stub_refuses_what_is_no_call() -> None:
    call = OipCall(inputs={"text": ["a"]}, outputs=("score",))
    with instant_oip() as url:
        endpoint = Endpoint(url=url, model_name="m")
        result = with_client(lambda client: send(client, endpoint, call))

    assert (result.outcome, result.code) == (CallOutcome.PERMANENT, "invalid_request")


# Chat


def chatted(*steps: Step, **how: Any) -> CallResult[ChatAnswer]:
    with scripted(*steps) as server:
        return with_client(lambda client: chat(client, server.url, **how))


def completion(message: Any, **parts: Any) -> Step:
    """A step that answers one choice; `parts` replace parts of the answer."""
    answer = {
        "object": "chat.completion",
        "model": "stub",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    } | parts
    return Step(body=json.dumps(answer).encode())


def says(content: Any) -> Step:
    return completion({"role": "assistant", "content": content})


def test_a_chat_call_is_sent_as_the_plug_in_made_it() -> None:
    with scripted(says("4")) as server:
        result = with_client(lambda client: chat(client, server.url))

    (seen,) = server.seen
    assert seen.path == "/v1/chat/completions"
    assert seen.json() == {
        "model": "org/m",
        "messages": [{"role": "user", "content": "rate it"}],
        "temperature": 0,
    }
    assert result.outcome is CallOutcome.SUCCESS
    assert result.answer == ChatAnswer(
        content="4", finish_reason="stop", model_version="stub", notes={"row": 7}
    )


@pytest.mark.parametrize(("priority", "said"), [(100, 0), (50, 50), (0, 100)])
def test_priority_is_sent_in_vllms_direction_where_it_is_known(priority: int, said: int) -> None:
    with scripted(says("4")) as server:
        with_client(lambda client: chat(client, server.url, priority=priority, sends_priority=True))

    assert server.seen[0].json()["priority"] == said


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/proxy/v1", "/proxy/v1/chat/completions"),
    ],
)
def test_the_base_of_a_chat_server_may_end_in_v1(base: str, path: str) -> None:
    with scripted(says("4")) as server:
        with_client(lambda client: chat(client, server.url + base))

    assert server.seen[0].path == path


@pytest.mark.parametrize(
    ("step", "content"),
    [
        (says("4"), "4"),
        (says(""), ""),
        (says(None), ""),
        (completion({"role": "assistant"}), ""),
        (says([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]), "42"),
    ],
    ids=["text", "empty", "null", "absent", "parts"],
)
def test_the_text_of_an_answer_is_handed_over_as_it_is(step: Step, content: str) -> None:
    answer = chatted(step).answer

    assert answer is not None
    assert answer.content == content


def test_the_fingerprint_of_a_server_is_part_of_its_version() -> None:
    answer = chatted(completion({"content": "4"}, system_fingerprint="fp_1")).answer

    assert answer is not None
    assert answer.model_version == "stub/fp_1"


def test_what_the_server_calls_a_refusal_is_handed_over() -> None:
    answer = chatted(completion({"content": None, "refusal": "unsafe"})).answer

    assert answer is not None
    assert (answer.content, answer.refusal) == ("", "unsafe")


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (Step(body=b"<html>"), "bad_answer"),
        (Step(body=b"[]"), "bad_answer"),
        (Step(body=b'{"error": {"code": 502, "message": "upstream"}}'), "bad_answer"),
        (Step(body=b"{}"), "incomplete_response"),
        (completion({}, choices=[]), "incomplete_response"),
        (completion({}, choices=None), "incomplete_response"),
        (completion({}, choices=[{}]), "incomplete_response"),
        (completion({}, choices=["x"]), "incomplete_response"),
        (completion({}, choices=[{"message": {}}] * 2), "count_mismatch"),
        (says(4), "bad_type"),
        (says([{"type": "image"}]), "bad_type"),
        (says(["x"]), "bad_type"),
    ],
)
def test_an_unusable_chat_answer_is_thrown_away(step: Step, code: str) -> None:
    result = chatted(step)

    assert (result.outcome, result.code) == (CallOutcome.INCOMPLETE, code)


def test_too_many_tokens_in_a_chat_are_permanent_even_with_a_200() -> None:
    result = chatted(Step(body=b'{"error": {"message": "maximum context length is 5 tokens"}}'))

    assert (result.outcome, result.code) == (CallOutcome.PERMANENT, "context_length_exceeded")


def test_a_chat_that_hangs_ends_at_its_limit() -> None:
    result = chatted(Step(hang=True), timeout_s=0.1)

    assert (result.outcome, result.code) == (CallOutcome.OVERLOAD, "timeout")


def test_a_prompt_that_is_no_unicode_is_a_fault_of_its_row() -> None:
    call = ChatCall(messages=[{"role": "user", "content": "\ud800"}])

    async def send_it(client: ModelClient, url: str) -> CallResult[ChatAnswer]:
        return await client.chat(
            Endpoint(url=url, model_name="m"), call, expected_version="", priority=1, timeout_s=5
        )

    with scripted(says("4")) as server:
        result = with_client(lambda client: send_it(client, server.url))

    assert (result.outcome, result.code) == (CallOutcome.PERMANENT, "invalid_request")
    assert not server.seen
