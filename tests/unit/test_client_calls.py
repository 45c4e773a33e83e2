"""`Client` and `AsyncClient` against a real HTTP server."""

import asyncio
import io
import json
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
from airs_client import (
    AirsError,
    AsyncClient,
    AuthError,
    Client,
    Conflict,
    Estimate,
    InvalidInput,
    Move,
    NotFound,
    RateLimited,
    Retries,
    UnexpectedAnswer,
    Unreachable,
    UnusableId,
    WaitTimedOut,
    WorkflowNotCompleted,
)

from tests import fake_api
from tests.fake_api import TOKEN, Answer, FakeApi, problem, rating, workflow

QUICK = Retries(max_retries=3, base_s=0.001)


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with fake_api.serving() as api:
        yield api


@pytest.fixture
def client(api: FakeApi) -> Iterator[Client]:
    with Client(api.url, TOKEN, retries=QUICK) as client:
        yield client


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query_text": "a"}\n' * 3)
    return path


def test_a_file_is_sent_as_it_is_with_its_length_and_parameters(
    api: FakeApi, client: Client, rows: Path
) -> None:
    sent = client.workflows.submit(
        rows, rater="needs_met", priority=70, deadline=timedelta(hours=2)
    )

    (call,) = api.calls("POST", "/workflows")
    assert call.params == {
        "rater": "needs_met",
        "name": "rows.jsonl",
        "priority": "70",
        "deadline_s": "7200",
    }
    assert call.size == rows.stat().st_size
    assert not call.chunked
    assert sent.workflow.id == "wf_1"
    assert sent.accepted == 3


def test_the_same_file_twice_is_one_workflow(api: FakeApi, client: Client, rows: Path) -> None:
    first = client.workflows.submit(rows, rater="needs_met")
    second = client.workflows.submit(rows, rater="needs_met")
    other = client.workflows.submit(rows, rater="needs_met", name="again")

    assert (first.replayed, second.replayed, other.replayed) == (False, True, False)
    assert first.workflow.id == second.workflow.id
    assert first.workflow.id != other.workflow.id


def test_the_same_key_with_another_body_is_a_conflict(
    client: Client, rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("{}\n")
    client.workflows.submit(rows, rater="needs_met", idempotency_key="k")

    with pytest.raises(Conflict) as refused:
        client.workflows.submit(tmp_path / "other", rater="needs_met", idempotency_key="k")

    assert refused.value.code == "idempotency_conflict"


def test_an_upload_takes_the_same_memory_whatever_its_size(
    api: FakeApi, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for _ in range(32):
            file.write(b'{"query_text": "%s"}\n' % (b"x" * 1_000_000))
    client.workflows.submit([{"query_text": "warm"}], rater="needs_met")

    tracemalloc.start()
    client.workflows.submit(path, rater="needs_met")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert api.received[-1].size == path.stat().st_size
    assert peak_bytes < 4_000_000


def test_an_upload_that_breaks_off_is_sent_again_whole_under_the_same_key(
    api: FakeApi, client: Client, rows: Path
) -> None:
    api.faults = deque([Answer(hang_up=True), problem(409, "upload_in_progress", "wait")])

    sent = client.workflows.submit(rows, rater="needs_met")

    calls = api.calls("POST", "/workflows")
    assert len({(call.headers["idempotency-key"], call.digest) for call in calls}) == 1
    assert len(calls) == 3
    assert sent.accepted == 3


def test_retry_after_is_honoured(api: FakeApi) -> None:
    waits: list[float] = []
    api.faults = deque(
        [
            problem(429, "rate_limited", "slow down", headers={"Retry-After": "0.3"}),
            problem(503, "not_ready", "starting"),
        ]
    )

    with Client(
        api.url, TOKEN, retries=QUICK, on_retry=lambda _, delay_s: waits.append(delay_s)
    ) as client:
        started_s = time.monotonic()
        client.raters.list()
        waited_s = time.monotonic() - started_s

    assert len(api.received) == 3
    assert waited_s >= 0.3
    assert waits[0] == pytest.approx(0.3)
    assert waits[1] < 0.01


def test_patience_ends_with_the_last_refusal(api: FakeApi, client: Client) -> None:
    api.faults = deque([problem(429, "rate_limited", "no")] * 10)

    with pytest.raises(RateLimited):
        client.raters.list()

    assert len(api.received) == 1 + QUICK.max_retries


def test_a_refusal_that_will_not_change_is_not_repeated(api: FakeApi, client: Client) -> None:
    with pytest.raises(NotFound):
        client.workflows.get("wf_404")

    assert len(api.received) == 1


def test_a_wrong_token_is_an_auth_error_that_says_what_to_do(api: FakeApi) -> None:
    with Client(api.url, "wrong", retries=QUICK) as client, pytest.raises(AuthError) as refused:
        client.raters.list()

    assert "AIRS_API_TOKEN" in refused.value.remedy


def test_nobody_there_is_unreachable() -> None:
    with (
        Client("http://127.0.0.1:9", TOKEN, retries=QUICK) as client,
        pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"),
    ):
        client.raters.list()


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body=b"<html>hello</html>", headers={"Content-Type": "text/html"}),
        Answer(body=b"{", headers={"Content-Type": "application/json"}),
        Answer(body=b"[]", headers={"Content-Type": "application/json"}),
        Answer(body=b"{}", headers={"Content-Type": "application/json"}),
        Answer(status=302, headers={"Location": "https://login.example.org"}),
        Answer(),
    ],
)
def test_another_service_at_the_address_is_noticed(
    api: FakeApi, client: Client, answer: Answer
) -> None:
    api.faults.append(answer)

    with pytest.raises(UnexpectedAnswer):
        client.raters.list()


def test_faulty_lines_of_a_refused_file_come_with_the_error(
    api: FakeApi, client: Client, rows: Path
) -> None:
    errors = [{"line": 2, "code": "duplicate_request_id", "detail": "also on line 1"}]
    api.faults.append(problem(422, "duplicate_request_id", "ids repeat", errors=errors))

    with pytest.raises(InvalidInput) as refused:
        client.workflows.submit(rows, rater="needs_met")

    assert [(item.line, item.code) for item in refused.value.items] == [(2, "duplicate_request_id")]


def test_all_pages_of_ratings_are_read_in_order(api: FakeApi, client: Client) -> None:
    api.ratings = [rating(n, state="FAILED" if n == 3 else "COMPLETED") for n in range(5)]

    ratings = list(client.workflows.ratings("wf_1"))

    assert [found.request_id for found in ratings] == [f"row-{n}" for n in range(5)]
    assert [found.score for found in ratings] == [0.0, 0.1, 0.2, None, 0.4]
    assert ratings[0].label == "Fully meets\u2028\x85"


def test_a_page_link_is_followed_on_the_same_server_only(api: FakeApi, client: Client) -> None:
    api.ratings = [rating(n) for n in range(3)]

    list(client.workflows.ratings("wf_1"))

    assert [call.params.get("cursor") for call in api.received] == [None, "2"]


def test_a_broken_page_is_read_again_and_no_record_comes_twice(
    api: FakeApi, client: Client
) -> None:
    api.ratings = [rating(n) for n in range(4)]
    ratings = client.workflows.ratings("wf_1")
    first = [next(ratings), next(ratings)]
    api.faults.append(Answer(hang_up=True))

    rest = list(ratings)

    assert [found.request_id for found in first + rest] == [f"row-{n}" for n in range(4)]


def test_pages_that_go_in_a_circle_are_an_error(api: FakeApi, client: Client) -> None:
    api.faults = deque([Answer(headers={"X-Next-Cursor": "c"})] * 2)

    with pytest.raises(UnexpectedAnswer, match="successor"):
        list(client.workflows.ratings("wf_1"))


def test_waiting_shows_each_look_and_ends_with_the_workflow(api: FakeApi, client: Client) -> None:
    api.looks = deque(
        [workflow(state="RUNNING", completed=100), workflow(state="COMPLETED", completed=300)]
    )
    seen: list[int] = []

    ended = client.workflows.wait(
        "wf_1", on_progress=lambda look: seen.append(look.counts.completed)
    )

    assert ended.state == "COMPLETED"
    assert seen == [100, 300]


def test_waiting_can_be_limited(api: FakeApi, client: Client) -> None:
    api.looks = deque([workflow(state="RUNNING", completed=7)])

    with pytest.raises(WaitTimedOut) as late:
        client.workflows.wait("wf_1", timeout=timedelta(0))

    assert late.value.workflow.counts.completed == 7


def test_waiting_can_insist_on_completion(api: FakeApi, client: Client) -> None:
    api.looks = deque([workflow(state="PARTIAL", completed=299, failed=1)])

    with pytest.raises(WorkflowNotCompleted, match="299 of 300"):
        client.workflows.wait("wf_1", check=True)


@pytest.mark.parametrize("identifier", ["", " ", ".", ".."])
def test_an_id_that_names_nothing_is_not_sent(
    api: FakeApi, client: Client, identifier: str
) -> None:
    with pytest.raises(UnusableId):
        client.workflows.get(identifier)

    assert api.received == []


def test_an_id_never_leaves_its_place_in_the_path(api: FakeApi, client: Client) -> None:
    with pytest.raises(NotFound):
        client.workflows.get("../raters?x=1#y")

    assert api.received[0].path == "/api/v1/workflows/..%2Fraters%3Fx%3D1%23y"


def test_events_are_typed(api: FakeApi, client: Client) -> None:
    event = {
        "id": "evt_1", "type": "workflow.completed", "round": 2, "data": {"completed": 3},
        "created_at": "2026-11-30T12:00:00Z",
    }  # fmt: skip
    api.events = [event]

    (read,) = client.workflows.events("wf_1")

    assert (read.id, read.type, read.round) == ("evt_1", "workflow.completed", 2)
    assert read.data == {"completed": 3}
    assert read.created_at is not None
    assert read.raw == event


def test_raters_and_models_are_typed_and_keep_what_is_new(client: Client) -> None:
    rater, model = client.raters.get("needs_met"), client.models.get("minilm")

    assert (rater.autorater, rater.score_max) == ("needs_met", 1.0)
    assert (model.kind, model.raw["protocol"]) == ("hosted", "oip")
    assert [item.id for item in client.models.list().items] == ["minilm"]


def test_pools_are_read_with_their_decisions_and_rebalanced(api: FakeApi, client: Client) -> None:
    move = {"model": "north", "before": 2, "after": 3}
    decision = {"id": 8, "at": "2026-11-30T15:02:00Z", "applied": True, "moves": [move]}
    api.decisions = [decision | {"mode": "on", "outcome": "moves", "reason": "because"}]

    (listed,) = client.pools.list().items
    assert listed == client.pools.get("box")
    assert (listed.devices_used, listed.rebalancing, listed.found) == (3, "off", "all are met")
    page = client.pools.decisions("box")
    assert page.items[0].moves == (Move(model="north", before=2, after=3),)
    assert (page.items[0].applied, page.items[0].reason, page.next) == (True, "because", "7")
    assert client.pools.rebalance("box", "dry_run").rebalancing == "dry_run"

    async def use() -> tuple[Any, ...]:
        async with AsyncClient(api.url, TOKEN) as other:
            return (
                (await other.pools.list()).items,
                await other.pools.get("box"),
                await other.pools.decisions("box"),
                (await other.pools.rebalance("box", "on")).rebalancing,
            )

    assert asyncio.run(use()) == ((listed,), listed, page, "on")


def test_models_and_pools_are_managed_alike_by_both_clients(api: FakeApi, client: Client) -> None:
    api.versions = [{"version": "v1"}]
    api.trial = {"version": "v1", "error": None}

    made = client.models.register("mini", kind="hosted", checkpoint="tiny:0")
    acts = client.models.start("mini"), client.models.stop("mini"), client.models.restart("mini")
    tried = client.models.try_rows("mini", [("q", "t")])
    client.models.remove("mini")
    pool = client.pools.register("new", devices=2)
    grown = client.pools.change("new", devices=4)
    client.pools.remove("new")

    assert (made.id, made.state, [act.state for act in acts]) == (
        "mini",
        "STOPPED",
        ["STARTING", "DRAINING", "READY"],
    )
    assert tried == client.models.try_message("minilm", "hello")
    assert client.models.resize("minilm", 2).raw["replicas"] == 2
    assert client.models.versions("minilm").items == ({"version": "v1"},)
    assert (pool.devices, grown.devices) == (2, 4)

    async def use() -> tuple[Any, ...]:
        async with AsyncClient(api.url, TOKEN) as other:
            model = await other.models.register("mini", kind="hosted", checkpoint="tiny:0")
            states = (
                await other.models.start("mini"),
                await other.models.stop("mini"),
                await other.models.restart("mini"),
            )
            answered = await other.models.try_rows("mini", [("q", "t")])
            await other.models.remove("mini")
            devices = await other.pools.register("new", devices=2)
            more = await other.pools.change("new", devices=4)
            await other.pools.remove("new")
            return model, states, answered, devices, more

    assert asyncio.run(use()) == (made, acts, tried, pool, grown)


def test_the_asynchronous_client_does_the_same(api: FakeApi, rows: Path) -> None:
    api.looks = deque([workflow(state="RUNNING"), workflow(state="COMPLETED", completed=3)])
    api.ratings = [rating(n) for n in range(3)]
    api.faults = deque([Answer(hang_up=True), problem(503, "not_ready", "starting")])

    async def use() -> tuple[str, list[str], str]:
        async with AsyncClient(api.url, TOKEN, retries=QUICK) as client:
            sent = await client.workflows.submit(rows, rater="needs_met")
            ended = await client.workflows.wait(sent.workflow.id)
            found = [item.request_id async for item in client.workflows.ratings("wf_1")]
            with pytest.raises(NotFound):
                await client.raters.get("absent")
            return sent.workflow.id, found, ended.state

    assert asyncio.run(use()) == ("wf_1", ["row-0", "row-1", "row-2"], "COMPLETED")
    with Client(api.url, TOKEN) as client:
        client.workflows.submit(rows, rater="needs_met")
    assert len({call.headers["idempotency-key"] for call in api.calls("POST", "/workflows")}) == 1


def test_an_estimate_is_typed_for_both_clients(api: FakeApi, client: Client, rows: Path) -> None:
    api.estimate = {
        "rater": "needs_met", "accepted": 3, "rows": 30, "hits": 10, "items": 20, "feasible": False,
        "share_in_time": 0.5, "eta": {"seconds": 9, "low": 8, "high": 11},
        "remedies": [{"change": "replicas", "to": 2, "detail": "so many replicas, all in all"}],
    }  # fmt: skip
    api.faults = deque([problem(503, "not_ready", "starting")])

    async def use() -> Estimate:
        async with AsyncClient(api.url, TOKEN, retries=QUICK) as client:
            return await client.workflows.estimate(rows, rater="needs_met", sample_of=30)

    found = asyncio.run(use())

    assert (found.rows, found.hits, found.items, found.model_calls) == (30, 10, 20, 0)
    assert (found.feasible, found.share_in_time, found.accelerator_seconds) == (False, 0.5, None)
    assert [(each.change, each.to) for each in found.remedies] == [("replicas", 2)]
    assert client.workflows.estimate(rows, rater="needs_met", sample_of=30) == found


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_download_has_all_records_whatever_breaks(
    api: FakeApi, tmp_path: Path, kind: Any
) -> None:
    api.ratings = [rating(n) for n in range(5)]
    parts = {"jsonl": b'"row-4"', "csv": b"row-4,", "parquet": b"of 5 records"}

    async def use(file: IO[bytes]) -> None:
        async with AsyncClient(api.url, TOKEN, retries=QUICK) as client:
            await client.workflows.download("wf_1", file, format=kind)

    for name in ("sync", "async"):
        api.faults = deque(
            [Answer(body=b"half", withheld=9), Answer(hang_up=True), problem(503, "x", "starting")]
        )
        with (tmp_path / name).open("wb") as file:
            if name == "async":
                asyncio.run(use(file))
            else:
                with Client(api.url, TOKEN, retries=QUICK) as client:
                    client.workflows.download("wf_1", file, format=kind)

    found = (tmp_path / "sync").read_bytes()
    assert found == (tmp_path / "async").read_bytes()
    assert parts[kind] in found
    assert b"half" not in found


def test_a_stream_that_broke_off_in_a_pipe_is_an_error(api: FakeApi) -> None:
    api.faults = deque([Answer(body=b"half", withheld=9)])
    pipe = Pipe()

    with Client(api.url, TOKEN, retries=QUICK) as client, pytest.raises(Unreachable):
        client.workflows.download("wf_1", pipe, format="parquet")

    assert pipe.getvalue() == b"half"


class Pipe(io.BytesIO):
    """Bytes that have gone cannot be taken back."""

    def seekable(self) -> bool:
        return False


def test_rows_may_be_given_as_mappings(api: FakeApi, client: Client) -> None:
    rows = [{"query_text": "a"}, {"query_text": "b"}]

    client.workflows.submit(rows, rater="needs_met", name="two")

    assert api.received[0].size == len("".join(json.dumps(row) + "\n" for row in rows))


def test_every_error_can_be_caught_as_one_kind(client: Client) -> None:
    with pytest.raises(AirsError):
        client.workflows.submit("absent.jsonl", rater="needs_met")
