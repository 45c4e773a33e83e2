"""The server behind a real socket, over a device that computes when the test lets it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.model_server.gated import SERVING, GatedModel, vector
from workers.model_server.scheduler import Room
from workers.model_server.server import ModelServer

INFER = "/v2/models/m/infer"


@dataclass
class Reply:
    status: int
    headers: Any
    body: Any


@dataclass
class Clock:
    """Seconds that the test moves on."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A server that listens, and a client."""

    server: ModelServer
    session: aiohttp.ClientSession
    url: str
    clock: Clock
    model: GatedModel = field(default_factory=GatedModel)

    async def get(self, path: str) -> Reply:
        async with self.session.get(f"{self.url}{path}") as response:
            return Reply(response.status, response.headers, await read(response))

    async def post(self, path: str, **request: Any) -> Reply:
        async with self.session.post(f"{self.url}{path}", **request) as response:
            return Reply(response.status, response.headers, await read(response))

    def call(self, query: str, *texts: str, **fields: Any) -> "asyncio.Task[Reply]":
        return asyncio.create_task(self.post(INFER, json=call_body(query, *texts, **fields)))

    async def occupy(self, text: str = "occupied") -> "asyncio.Task[Reply]":
        """A call of one row and one sequence that holds the device until it is let go."""
        call = self.call(text, text)
        await self.model.device.started()
        return call

    async def until_open(self, rows: int) -> None:
        """Wait until the server has accepted so many rows and not answered them."""
        async with asyncio.timeout(20):
            while (await self.get("/v2/models/m/stats")).body["queue_rows"] != rows:
                await asyncio.sleep(0)

    async def until_waiting(self, sequences: int) -> None:
        """Wait until so many sequences have been read and wait for the device.

        A call is open (`until_open`) before its texts are read in a thread of their own.
        """
        assert self.server._scorer is not None
        async with asyncio.timeout(20):
            while len(self.server._scorer._batcher._entries) != sequences:
                await asyncio.sleep(0)


async def read(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.read()


def call_body(query: str, *texts: str, **fields: Any) -> dict[str, Any]:
    columns = {"query": [query] * len(texts), "text": list(texts)}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [len(texts), 1], "data": data}
        for name, data in columns.items()
    ]
    return {"inputs": inputs, **fields}


@asynccontextmanager
async def listening(*, warm: bool, rows: int, headroom: int) -> AsyncIterator[Bench]:
    clock = Clock()
    server = ModelServer(
        name="m",
        room=Room(rows=rows, headroom=headroom),
        largest_body=10_000,
        clock=clock,
    )
    runner = web.AppRunner(server.app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        bench = Bench(server, session, f"http://127.0.0.1:{runner.addresses[0][1]}", clock)
        if warm:
            server.serve(bench.model)
        try:
            yield bench
        finally:
            bench.model.device.let(100)
            await server.drain(20)
            await runner.cleanup()


def trial(
    scenario: Callable[[Bench], Awaitable[None]],
    *,
    warm: bool = True,
    rows: int = 8,
    headroom: int = 4,
) -> None:
    async def played() -> None:
        async with listening(warm=warm, rows=rows, headroom=headroom) as bench:
            await scenario(bench)

    asyncio.run(played())


def test_scores_are_the_cosines_of_the_rows() -> None:
    async def scenario(bench: Bench) -> None:
        bench.model.device.let(9)

        reply = await bench.call("ab", "cd", "ab", id="7", outputs=[{"name": "score"}])

        query, other = (vector(tokens.ids) for tokens in bench.model.reader.read(["ab", "cd"]))
        (score,) = reply.body["outputs"]
        assert (reply.status, reply.body["id"]) == (200, "7")
        assert (reply.body["model_name"], reply.body["model_version"]) == ("m", "gated-1")
        assert score["shape"] == [2, 1]
        assert score["data"] == pytest.approx([float(query @ other), 1.0], abs=1e-6)
        assert max(score["data"]) <= 1.0

    trial(scenario)


def test_an_answer_tells_what_was_cut() -> None:
    async def scenario(bench: Bench) -> None:
        bench.model.device.let(9)

        reply = await bench.call("q" * 50, "short", "t" * 40)

        data = {output["name"]: output["data"] for output in reply.body["outputs"]}
        assert reply.body["parameters"] == {"max_tokens": 32, "compute_us": 0}
        assert data["tokens"] == [7, 42]
        assert data["query_tokens"] == [52, 52]

    trial(scenario)


def test_the_texts_embedding_comes_when_asked_for() -> None:
    async def scenario(bench: Bench) -> None:
        bench.model.device.let(9)

        reply = await bench.call("ab", "cd", outputs=[{"name": "embedding"}])

        (tokens,) = bench.model.reader.read(["cd"])
        (embedding,) = reply.body["outputs"]
        assert embedding["shape"] == [1, 4]
        assert np.allclose(embedding["data"], vector(tokens.ids))

    trial(scenario)


@pytest.mark.parametrize(
    ("body", "text"),
    [(b"{", "body: not JSON"), (b'{"inputs": []}', "inputs.query: missing")],
)
def test_a_bad_request_is_400_and_names_the_field(body: bytes, text: str) -> None:
    async def scenario(bench: Bench) -> None:
        reply = await bench.post(INFER, data=body)

        assert reply.status == 400
        assert reply.body["error"].startswith(text)

    trial(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/other/infer",
        "/v2/models/m/versions/9/infer",
        "/v2/nothing",
    ],
)
def test_what_is_not_served_is_404_with_an_error(path: str) -> None:
    async def scenario(bench: Bench) -> None:
        reply = await bench.post(path, json=call_body("a", "b"))

        assert reply.status == 404
        assert isinstance(reply.body["error"], str)

    trial(scenario)


def test_the_version_may_be_named() -> None:
    async def scenario(bench: Bench) -> None:
        bench.model.device.let(9)

        reply = await bench.post("/v2/models/m/versions/gated-1/infer", json=call_body("a", "b"))

        assert reply.status == 200

    trial(scenario)


def test_too_much_is_413() -> None:
    async def scenario(bench: Bench) -> None:
        rows = await bench.call("a", *"bcdef")
        body = await bench.post(INFER, data=b"x" * 10_001)

        assert rows.status == body.status == 413
        assert "5 rows, at most 4" in rows.body["error"]
        assert isinstance(body.body["error"], str)

    trial(scenario)


def test_a_full_queue_refuses_low_priority_first() -> None:
    async def scenario(bench: Bench) -> None:
        accepted = [await bench.occupy(), bench.call("a", *"bcd")]
        await bench.until_open(4)

        low = await bench.call("low", "x", parameters={"priority": 101})
        middle = bench.call("middle", "x", "y")
        await bench.until_open(6)
        middle_more = await bench.call("more", "x")
        urgent = bench.call("urgent", "x", "y", parameters={"priority": 1})
        await bench.until_open(8)
        urgent_more = await bench.call("more", "x", parameters={"priority": 1})

        assert [low.status, middle_more.status, urgent_more.status] == [429, 429, 429]
        assert low.body["code"] == "overloaded"
        assert all(int(r.headers["Retry-After"]) >= 1 for r in (low, middle_more, urgent_more))
        bench.model.device.let(99)
        assert [r.status for r in await asyncio.gather(*accepted, middle, urgent)] == [200] * 4

    trial(scenario)


def test_retry_after_follows_the_measured_rate() -> None:
    async def scenario(bench: Bench) -> None:
        for text in "vw":  # one sequence in four seconds
            call = await bench.occupy(text)
            bench.clock.now += 4
            bench.model.device.let()
            await call
        full = [bench.call(text, *"abcd", parameters={"priority": 1}) for text in "xy"]
        await bench.until_open(8)

        refused = await bench.call("z", *"abc", parameters={"priority": 101})

        too_many = 8 + 3 - 4
        assert refused.headers["Retry-After"] == str(too_many * 4)
        bench.model.device.let(99)
        await asyncio.gather(*full)

    trial(scenario)


def test_urgent_calls_are_answered_first() -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.occupy()
        answered: list[int] = []

        async def note(priority: int) -> None:
            text = f"so long that it fills a batch {priority}"
            await bench.call(text, text, parameters={"priority": priority})
            answered.append(priority)

        calls = []
        for waiting, priority in ((1, 101), (2, 51), (3, 1)):
            calls.append(asyncio.create_task(note(priority)))
            await bench.until_waiting(waiting)
        bench.model.device.let()
        await first
        pending = set(calls)
        while pending:  # one batch at a time: replies on several connections overtake each other
            bench.model.device.let()
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

        assert answered == [1, 51, 101]

    trial(scenario, rows=16)


def test_a_call_past_its_timeout_is_503_expired() -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.occupy()
        late = bench.call("late", "late", parameters={"timeout": 2_000_000})
        await bench.until_open(2)

        bench.clock.now += 2.0
        bench.model.device.let()
        reply = await late

        assert (reply.status, reply.body["code"]) == (503, "expired")
        assert (await first).status == 200
        assert len(bench.model.device.batches) == 1

    trial(scenario)


def test_the_rows_of_a_client_that_hangs_up_leave_the_queue() -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.occupy()
        gone = bench.call("gone", "gone")
        await bench.until_open(2)

        gone.cancel()
        await bench.until_open(1)

        bench.model.device.let()
        assert (await first).status == 200
        assert len(bench.model.device.batches) == 1

    trial(scenario)


def test_while_warming_up_it_is_live_and_not_ready() -> None:
    async def scenario(bench: Bench) -> None:
        paths = ("/v2/health/live", "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m")
        before = [(await bench.get(path)).status for path in paths]
        refused = await bench.call("a", "b")
        stats = await bench.get("/v2/models/m/stats")
        bench.server.serve(bench.model)
        after = [(await bench.get(path)).status for path in paths]

        assert before == [200, 503, 503, 503]
        assert (refused.status, refused.body["code"]) == (503, "warming_up")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (stats.body["ready"], stats.body["model_version"]) == (False, None)
        assert after == [200, 200, 200, 200]

    trial(scenario, warm=False)


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    async def scenario(bench: Bench) -> None:
        accepted = [await bench.occupy(), bench.call("a", "b")]
        await bench.until_open(2)

        drained = asyncio.create_task(bench.server.drain(20))
        while (await bench.get("/v2/health/ready")).status != 503:
            await asyncio.sleep(0)
        refused = await bench.call("c", "d")
        waiting = not drained.done()
        bench.model.device.let(9)

        assert (refused.status, refused.body["code"]) == (503, "draining")
        assert "Retry-After" in refused.headers
        assert waiting
        assert await drained
        assert [reply.status for reply in await asyncio.gather(*accepted)] == [200, 200]

    trial(scenario)


def test_draining_ends_at_its_limit() -> None:
    async def scenario(bench: Bench) -> None:
        computing = await bench.occupy()
        waiting = bench.call("a", "b")
        await bench.until_open(2)

        finished = await bench.server.drain(0.01)
        bench.model.device.let(9)

        assert not finished
        assert (await waiting).body["code"] == "draining"
        assert (await computing).status == 200

    trial(scenario)


def test_the_metadata_describes_what_is_served() -> None:
    async def scenario(bench: Bench) -> None:
        server, model = await bench.get("/v2"), await bench.get("/v2/models/m")

        assert {"binary_tensor_data", "schedule_policy"} <= set(server.body["extensions"])
        assert model.body["versions"] == ["gated-1"]
        assert [tensor["name"] for tensor in model.body["inputs"]] == ["query", "text"]
        assert model.body["outputs"] == [
            {"name": "score", "datatype": "FP32", "shape": [-1, 1]},
            {"name": "tokens", "datatype": "INT32", "shape": [-1, 1]},
            {"name": "query_tokens", "datatype": "INT32", "shape": [-1, 1]},
            {"name": "embedding", "datatype": "FP32", "shape": [-1, 4]},
        ]
        assert model.body["parameters"]["max_tokens"] == 32

    trial(scenario)


async def metrics(bench: Bench) -> dict[tuple[str, str], float]:
    page = await bench.get("/metrics")
    assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(page.body.decode())
        for sample in family.samples
    }


def test_nothing_is_a_ratio_of_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        stats = (await bench.get("/v2/models/m/stats")).body

        assert (stats["batch_fill"], stats["padding_waste"]) == (None, None)
        assert (await metrics(bench))["airs_model_queue_wait_seconds_sum", ""] == 0

    trial(scenario)


def test_stats_tell_which_figures_serve_and_why() -> None:
    async def scenario(bench: Bench) -> None:
        stats = (await bench.get("/v2/models/m/stats")).body

        assert stats["figures"] == {**SERVING.figures, "reason": "a test's"}

    trial(scenario)


def test_an_answer_tells_what_it_took() -> None:
    async def scenario(bench: Bench) -> None:
        call = await bench.occupy()
        bench.clock.now += 0.25
        bench.model.device.let()

        assert (await call).body["parameters"]["compute_us"] == 250_000

    trial(scenario)


def test_metrics_and_stats_tell_the_same_account() -> None:
    async def scenario(bench: Bench) -> None:
        before = await metrics(bench)
        call = await bench.occupy()
        bench.clock.now += 6
        queued = (await metrics(bench))["airs_model_queue_rows", ""]
        bench.model.device.let(9)
        await call
        await bench.post(INFER, data=b"{")
        bench.clock.now += 4
        after = await metrics(bench)
        stats = (await bench.get("/v2/models/m/stats")).body

        assert before["airs_model_calls_total", "ok"] == 0.0
        assert queued == 1.0
        assert after["airs_model_calls_total", "ok"] == 1.0
        assert after["airs_model_calls_total", "invalid"] == 1.0
        assert after["airs_model_rows_total", ""] == stats["rows_total"] == 1
        assert after["airs_model_batches_total", ""] == stats["batches_total"] == 1
        assert after["airs_model_busy_seconds_total", ""] == stats["busy_seconds"] == 6.0
        assert after["airs_duty_cycle_ratio", ""] == stats["duty_cycle"] == pytest.approx(0.6)
        assert after["airs_model_batch_rows_count", ""] == 1.0
        assert after["airs_model_lane_seconds_total", ""] == stats["lane_seconds"] == 6.0
        assert stats["slot_occupancy"] == pytest.approx(0.6)
        assert after["airs_model_full_rows_total", ""] == 4.0
        assert stats["batch_fill"] == 0.25
        assert after["airs_model_real_tokens_total", ""] == stats["real_tokens_total"] == 10
        assert after["airs_model_padded_tokens_total", ""] == stats["padded_tokens_total"] == 16
        assert stats["padding_waste"] == pytest.approx(6 / 16)
        assert after["airs_model_queue_wait_seconds_count", ""] == 1.0
        assert stats["queue_wait_seconds_mean"] == 0
        assert after["airs_model_queue_rows", ""] == stats["queue_rows"] == 0
        assert stats["predictions_total"] == 1
        assert stats["uptime_seconds"] == 10.0

    trial(scenario)
