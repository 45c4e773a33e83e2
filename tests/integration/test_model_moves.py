"""External servers that move: another address under the same name, or another URL."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from tests.fakes import ScriptedServer, Step, in_thread, oip, scripted
from tests.judge_stage import judging, row, says
from workers import rating_generator
from workers.autoraters import OipCall
from workers.model_client import CallOutcome, Endpoint, ModelClient
from workers.model_client.pools import FOLLOW_S, Pools
from workers.rating_generator import ENDPOINT_MEMORY_S

NAME = "model.test"
CALL = OipCall(inputs={"query": ["q"], "text": ["t"]}, outputs=("score",))


class Names(AbstractResolver):
    """Leads one name to where a test says."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.fails = False
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked += 1
        if self.fails:
            raise OSError("no such name")
        return [
            ResolveResult(
                hostname=host, host=each, port=port, family=socket.AF_INET, proto=0, flags=0
            )
            for each in self.addresses
        ]

    async def close(self) -> None:
        pass


class At(ScriptedServer):
    """A scripted server at an address of its own."""

    def __init__(self, host: str, port: int, *steps: Step) -> None:
        super().__init__(steps, Step())
        self.host, self.port = host, port

    async def serve(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self.converse, self.host, self.port)


@contextmanager
def two_servers(*steps: Step) -> Iterator[tuple[At, At, str]]:
    """Run two servers of one port; the URL names both."""
    first = At("127.0.0.1", 0, *steps or (oip(1.0),))
    with in_thread(first.serve, stop=first.hang_up) as port:
        second = At("127.0.0.2", port, oip(2.0))
        with in_thread(second.serve, stop=second.hang_up):
            yield first, second, f"http://{NAME}:{port}"


def with_client(use: Callable[[ModelClient], Awaitable[None]], names: Names) -> None:
    async def run() -> None:
        client = ModelClient(clock=lambda: datetime.now(UTC), resolver=names, follow_s=0.0)
        try:
            await use(client)
        finally:
            await client.close()

    asyncio.run(run())


async def score(client: ModelClient, url: str) -> float:
    result = await client.infer(
        Endpoint(url=url, model_name="m"),
        CALL,
        rows=1,
        expected_version="",
        priority=50,
        timeout_s=5.0,
    )
    assert result.outcome is CallOutcome.SUCCESS, result
    assert result.answer is not None
    return result.answer.outputs["score"][0]


async def scores(client: ModelClient, url: str, calls: int = 5) -> list[float]:
    found = []
    for _ in range(calls):
        found.append(await score(client, url))
        await asyncio.sleep(0.005)  # look-ups run beside the calls
    return found


async def closed(server: At) -> None:
    """Wait until nothing is kept open to a server."""
    async with asyncio.timeout(2):
        while server.writers:
            await asyncio.sleep(0.005)


def test_a_name_that_leads_elsewhere_is_followed_though_the_old_server_still_answers() -> None:
    names = Names("127.0.0.1")
    with two_servers() as (first, second, url):

        async def use(client: ModelClient) -> None:
            assert await scores(client, url) == [1.0] * 5
            assert first.connections == 1
            names.addresses = ["127.0.0.2"]
            assert (await scores(client, url))[2:] == [2.0] * 3
            assert second.connections == 1
            await closed(first)

        with_client(use, names)


def test_a_pool_that_was_just_left_is_closed_with_the_others() -> None:
    async def use() -> None:
        pools = Pools(max_connections=1, max_connections_per_host=1)
        with pools.session(NAME) as session:
            pass
        pools._leave(NAME)  # as a look-up does
        await pools.close()
        assert session.closed

    asyncio.run(use())


def test_look_ups_that_hang_do_not_pile_up() -> None:
    class Hanging(Names):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            self.asked += 1
            await asyncio.Event().wait()
            return []

    async def use() -> None:
        names = Hanging()
        pools = Pools(max_connections=1, max_connections_per_host=1, resolver=names, follow_s=0.0)
        for _ in range(5):
            with pools.session(NAME):
                await asyncio.sleep(0)
        assert names.asked == 1
        await pools.close()

    asyncio.run(use())


def test_what_cannot_be_a_name_is_looked_up_without_a_stir() -> None:
    async def use() -> None:
        stirs: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, stir: stirs.append(stir))
        pools = Pools(max_connections=1, max_connections_per_host=1, follow_s=0.0)
        with pools.session(f"{'a' * 70}.test"):
            pass
        await asyncio.gather(*pools._tasks)
        await pools.close()
        assert stirs == []

    asyncio.run(use())


def test_a_call_that_runs_ends_where_it_began() -> None:
    slow = Step(body=oip(1.0).body, piece=20, every_s=0.02)
    names = Names("127.0.0.1")
    with two_servers(slow) as (first, _, url):

        async def use(client: ModelClient) -> None:
            running = asyncio.create_task(score(client, url))
            while not first.seen:
                await asyncio.sleep(0.005)
            names.addresses = ["127.0.0.2"]
            while await score(client, url) != 2.0:
                pass
            assert await running == 1.0
            await closed(first)

        with_client(use, names)


def test_further_addresses_and_a_name_that_cannot_be_looked_up_change_nothing() -> None:
    names = Names("127.0.0.1")
    with two_servers() as (first, second, url):

        async def use(client: ModelClient) -> None:
            await score(client, url)
            names.addresses = ["127.0.0.2", "127.0.0.1"]
            await scores(client, url)
            names.fails = True
            await scores(client, url)

        with_client(use, names)

    assert (first.connections, second.connections) == (1, 0)


def test_a_server_that_is_named_by_number_is_never_looked_up() -> None:
    names = Names()
    with scripted(oip(1.0)) as server:

        async def use(client: ModelClient) -> None:
            await scores(client, server.url)

        with_client(use, names)

    assert (names.asked, server.connections) == (0, 1)


def test_a_move_is_followed_within_ten_seconds() -> None:
    assert 2 * FOLLOW_S <= 10
    assert ENDPOINT_MEMORY_S < 10


@pytest.mark.django_db(transaction=True)
def test_an_executor_follows_a_changed_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rating_generator, "ENDPOINT_MEMORY_S", 0.0)
    with judging() as judge, scripted(says("3")) as old, scripted(says("4")) as new:
        judge.register(old)
        before = judge.submit(row("boots"))
        judge.work()
        changed = judge.operator.patch("/models/gpt", {"url": new.url})
        after = judge.submit(row("hats"))
        judge.work()

    assert changed.status_code == 200
    assert [r["score"] for r in judge.ratings(before)] == [3]
    assert [r["score"] for r in judge.ratings(after)] == [4]
    assert (len(old.seen), len(new.seen)) == (1, 1)


def test_pools_of_names_that_came_and_went_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.model_client.pools.MAX_POOLS", 3)

    async def run() -> None:
        used = Pools(max_connections=8, max_connections_per_host=8, resolver=Names("127.0.0.1"))
        with used.session("first.test") as running:
            for number in range(7):
                with used.session(f"n{number}.test"):
                    pass

            assert len(used._pools) <= 3
            assert not running.closed
        await used.close()
        assert running.closed

    asyncio.run(run())
