"""Model servers for tests, on real sockets: one answers at once, one misbehaves by script.

`instant_oip()` and `scripted()` run in a thread of the test. The instant one is also a process of
its own, for tests that kill things and for benchmarks:

    python -m tests.fakes oip --port 9000 --tally rows.tally [--delay 0.05] [--version 1]

It prints `READY {"port": …}` and scores each (query, text) by CRC-32, so that every test knows the
right answer; `read_tally` says how often each pair was predicted, by all processes together.
"""

import argparse
import asyncio
import json
import os
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import orjson

MAX_SCORE = 4.0

Pair = tuple[int, int]
"""A (query, text) as the tally names it: the CRC-32 of each."""


def pair_of(query: str, text: str) -> Pair:
    return crc32(query.encode()), crc32(text.encode())


def stub_score(query: str, text: str) -> float:
    """The instant stub's score of a pair, 0 to 4."""
    return MAX_SCORE * crc32(text.encode(), crc32(query.encode())) / 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What instant stubs were asked, over all their lives."""

    predictions: Counter[Pair]
    calls: int
    priorities: Counter[int]
    """OIP priority parameter of each call; 0 where none was sent."""

    @property
    def rows(self) -> int:
        return self.predictions.total()


TALLY_ROW = struct.Struct("<IIHHI")
"""CRC of the query, CRC of the text, place in the call, rows of the call, priority."""


def read_tally(path: Path) -> Tally:
    """Read a tally file; a missing one is a server that was never asked."""
    data = path.read_bytes() if path.exists() else b""
    rows = list(TALLY_ROW.iter_unpack(data[: len(data) // TALLY_ROW.size * TALLY_ROW.size]))
    return Tally(
        predictions=Counter((query, text) for query, text, *_ in rows),
        calls=sum(place == 0 for _, _, place, *_ in rows),
        priorities=Counter(priority for _, _, place, _, priority in rows if place == 0),
    )


class InstantOip(asyncio.Protocol):
    """One connection to a stub that costs as little as a server in Python can."""

    def __init__(self, stub: "InstantStub") -> None:
        self.stub = stub
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own are no subclass
        self.stub.transports.add(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stub.transports.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.received[:end])
            length = content_length(head)
            if len(self.received) < end + 4 + length:
                return
            body = bytes(self.received[end + 4 : end + 4 + length])
            del self.received[: end + 4 + length]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"POST" and path.endswith(b"/infer"):
            status, payload = self.stub.infer(body)
        else:
            status, payload = self.stub.describe(path.decode())
        reply = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
            status,
            len(payload),
            payload,
        )
        if self.stub.delay_s:
            asyncio.get_running_loop().call_later(self.stub.delay_s, self.send, reply)
        else:
            self.transport.write(reply)

    def send(self, reply: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(reply)


def content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line[:15].lower() == b"content-length:":
            return int(line[15:])
    return 0


class InstantStub:
    """Scores pairs and writes down that it did, before it answers."""

    def __init__(
        self, *, tally: Path | None = None, delay_s: float = 0.0, version: str = "1"
    ) -> None:
        self.delay_s, self.version = delay_s, version
        self.transports: set[asyncio.Transport] = set()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self.tally = None if tally is None else os.open(tally, flags, 0o644)

    def infer(self, body: bytes) -> tuple[bytes, bytes]:
        try:
            request = orjson.loads(body)
            columns = {tensor["name"]: tensor["data"] for tensor in request["inputs"]}
            queries, texts = columns["query"], columns["text"]
            pairs = [pair_of(q, t) for q, t in zip(queries, texts, strict=True)]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as failure:
            return b"400 Bad Request", orjson.dumps({"error": f"no such input: {failure!r}"})
        rows = len(pairs)
        priority = request.get("parameters", {}).get("priority", 0)
        if self.tally is not None:
            record = b"".join(
                TALLY_ROW.pack(query, text, place, rows, priority)
                for place, (query, text) in enumerate(pairs)
            )
            os.write(self.tally, record)
        answer = {
            "model_name": "stub",
            "model_version": self.version,
            "outputs": [
                {
                    "name": "score",
                    "datatype": "FP32",
                    "shape": [rows, 1],
                    "data": [stub_score(q, t) for q, t in zip(queries, texts, strict=True)],
                }
            ],
        }
        if "id" in request:
            answer["id"] = request["id"]
        return b"200 OK", orjson.dumps(answer)

    def describe(self, path: str) -> tuple[bytes, bytes]:
        parts = path.strip("/").split("/")
        match parts:
            case ["v2", "health", "live" | "ready"] | ["v2", "models", _, "ready"]:
                return b"200 OK", b'{"live":true,"ready":true}'
            case ["v2", "models", name]:
                return b"200 OK", orjson.dumps(self.metadata(name))
            case ["v2"]:
                return b"200 OK", b'{"name":"instant-stub","version":"1","extensions":[]}'
        return b"404 Not Found", b'{"error":"no such path"}'

    def metadata(self, model: str) -> dict[str, Any]:
        tensor = {"datatype": "BYTES", "shape": [-1, 1]}
        return {
            "name": model,
            "versions": [self.version],
            "platform": "stub",
            "inputs": [{"name": "query", **tensor}, {"name": "text", **tensor}],
            "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1, 1]}],
        }

    async def serve(self, port: int) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: InstantOip(self), "127.0.0.1", port, backlog=1_024)

    async def hang_up(self) -> None:
        for transport in list(self.transports):
            transport.close()

    def close(self) -> None:
        if self.tally is not None:
            os.close(self.tally)


@contextmanager
def instant_oip(
    *, tally: Path | None = None, delay_s: float = 0.0, version: str = "1"
) -> Iterator[str]:
    """Run an instant stub in a thread; gives its URL."""
    stub = InstantStub(tally=tally, delay_s=delay_s, version=version)
    try:
        with in_thread(stub.serve, stop=stub.hang_up) as port:
            yield f"http://127.0.0.1:{port}"
    finally:
        stub.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One request as a scripted server received it; `connection` counts from 1."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a scripted server does with one request."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Callable[[Seen], bytes] = b""
    hang: bool = False
    """Never answer."""
    reset: bool = False
    """Break the connection before the first byte of an answer."""
    declared_length: int | None = None
    """Lie about the length of the body."""
    cut_after: int | None = None
    """Break the connection after so many bytes of head and body."""
    cut_by_reset: bool = False
    raw: bytes = b""
    """Send this instead of an answer and close."""
    piece: int | None = None
    """Send the body in pieces of so many bytes, `every_s` apart."""
    every_s: float = 0.0
    endless: bool = False
    """Send blanks until the client has enough; without a length unless one is declared."""
    close: bool = False
    """Close the connection after the answer, without a word."""


def oip(*data: Any, **overrides: Any) -> Step:
    """A step that answers these scores, echoing the id; overrides replace parts of the answer."""

    def body(seen: Seen) -> bytes:
        tensor = {"name": "score", "datatype": "FP32", "shape": [len(data), 1], "data": list(data)}
        answer = {
            "model_name": "stub",
            "model_version": "1",
            "id": seen.json().get("id"),
            "outputs": [tensor],
        } | overrides
        return json.dumps(answer).encode()  # writes NaN and Infinity, as Python servers do

    return Step(body=body)


def refusal(status: int, error: Any = "no", **headers: str) -> Step:
    """A step that refuses with an OIP error; header names with `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Step(status=status, headers=named, body=json.dumps({"error": error}).encode())


class ScriptedServer:
    """Takes the steps one after the other, repeats the last; health probes get `ready`."""

    def __init__(self, steps: Sequence[Step], ready: Step) -> None:
        self.steps, self.ready = list(steps), ready
        self.url = ""
        self.seen: list[Seen] = []
        self.probes = 0
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()

    async def serve(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self.converse, "127.0.0.1", port)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        self.writers.add(writer)
        try:
            while (seen := await receive(reader, connection)) is not None:
                if seen.path.startswith("/v2/health/"):
                    self.probes += 1
                    step = self.ready
                elif seen.method == "GET" and seen.path == "/v1/models":
                    step = Step(status=404)  # as a gateway that lists nothing: no part of a script
                else:
                    self.seen.append(seen)
                    step = self.steps[min(len(self.seen), len(self.steps)) - 1]
                if not await perform(step, seen, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def hang_up(self) -> None:
        for writer in list(self.writers):
            writer.close()


@contextmanager
def scripted(*steps: Step, ready: Step | None = None) -> Iterator[ScriptedServer]:
    """Run a scripted server in a thread."""
    server = ScriptedServer(steps, ready or Step(body=b'{"ready":true}'))
    with in_thread(server.serve, stop=server.hang_up) as port:
        server.url = f"http://127.0.0.1:{port}"
        yield server


async def receive(reader: asyncio.StreamReader, connection: int) -> Seen | None:
    """Read one request; None when the client closed the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method=method, path=path, headers=headers, body=body, connection=connection)


async def perform(step: Step, seen: Seen, writer: asyncio.StreamWriter) -> bool:
    """Do what the step says; False when the connection is over."""
    if step.hang:
        await asyncio.Event().wait()
    if step.reset:
        abort(writer)
        return False
    body = step.body(seen) if callable(step.body) else step.body
    headers = {"Content-Type": "application/json", **step.headers}
    if step.declared_length is not None or not step.endless:
        headers["Content-Length"] = str(step.declared_length or len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    whole = f"HTTP/1.1 {step.status} X\r\n{head}\r\n".encode("latin-1") + body
    if step.raw or step.cut_after is not None:
        writer.write(step.raw or whole[: step.cut_after])
        await writer.drain()
        if step.cut_by_reset:
            abort(writer)
        return False
    if step.piece is None:
        writer.write(whole)
    else:
        writer.write(whole[: -len(body)])
        for start in range(0, len(body), step.piece):
            writer.write(body[start : start + step.piece])
            await writer.drain()
            await asyncio.sleep(step.every_s)
    while step.endless:
        writer.write(b" " * 65_536)
        await writer.drain()
    await writer.drain()
    return not step.close


def abort(writer: asyncio.StreamWriter) -> None:
    """Break a connection with a reset."""
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextmanager
def in_thread(
    serve: Callable[[int], Awaitable[asyncio.Server]], *, stop: Callable[[], Awaitable[None]]
) -> Iterator[int]:
    """Run a server on a loop in a thread of its own; gives its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-server", daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await serve(0)

    async def end() -> None:
        server.close()
        await stop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # transports close themselves in the next turn

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _serve_for_ever(stub: InstantStub, port: int) -> None:
    server = await stub.serve(port)
    bound = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"READY {json.dumps({'port': bound})}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes")
    parser.add_argument("kind", choices=["oip"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tally", type=Path)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--version", default="1", help="model version in metadata and answers")
    chosen = parser.parse_args(arguments)
    stub = InstantStub(tally=chosen.tally, delay_s=chosen.delay, version=chosen.version)
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve_for_ever(stub, chosen.port))


if __name__ == "__main__":
    main()
