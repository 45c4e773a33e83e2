"""A model server of one slot and a fixed pace, started as the host agent starts the real one.

    python -m tests.benchmarks.paced_server host NAME    # the agent NAME, whose servers are these

A call computes for AIRS_BENCH_SERVICE_S, whatever its rows; which one is next, the scheduler of the
real server says. Nothing else of a model is in it. Each call is a line of JSON in a file of its
server in AIRS_BENCH_CALLS: what it was for, and when it came, began and ended.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import orjson

from tests.fakes import Seen, receive, stub_score
from workers.model_server import scheduler
from workers.model_server.scheduler import Shaping, Waiting

SERVICE_S, CALLS = "AIRS_BENCH_SERVICE_S", "AIRS_BENCH_CALLS"
VERSION = "paced-1"
ONE_CALL = Shaping(steps=(1,), batch_tokens=1, fill_tokens=1)
"""Whoever waited longest is passed over nine times in a row at most, as by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call; instants are the machine's, in seconds."""

    model: str
    server: int
    tag: str
    """The first word of the first text."""
    rows: int
    came_s: float
    began_s: float
    ended_s: float


def read_calls(directory: Path) -> list[Call]:
    """Return the calls of all servers, in the order in which they began."""
    lines = itertools.chain.from_iterable(
        path.read_text().splitlines() for path in directory.glob("*.jsonl")
    )
    return sorted((Call(**json.loads(line)) for line in lines), key=lambda call: call.began_s)


@dataclass(kw_only=True, slots=True)
class _Turn:
    """A call's time in the slot."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    began_s: float = 0.0
    ended_s: float = 0.0


class PacedServer:
    """One slot, and a queue of calls."""

    def __init__(self, model: str, *, service_s: float, log: TextIO) -> None:
        self._model = model
        self._service_s = service_s
        self._log = log
        self._keys: Iterator[int] = itertools.count()
        self._waiting: dict[int, tuple[Waiting, _Turn]] = {}
        self._came = asyncio.Event()
        self._running: _Turn | None = None
        self._busy_s = 0.0
        self._rows = 0

    async def compute(self) -> None:
        """Let one call after another have the slot."""
        passed = 0
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            waiting = [waiting for waiting, _ in self._waiting.values()]
            batch = scheduler.next_batch(waiting, now=0.0, passed=passed, shaping=ONE_CALL)
            passed = batch.passed
            _, running = self._waiting.pop(batch.rows[0])
            await self._compute(running)

    async def _compute(self, turn: _Turn) -> None:
        self._running = turn
        turn.began_s = time.time()
        await asyncio.sleep(self._service_s)
        turn.ended_s = time.time()
        self._busy_s += turn.ended_s - turn.began_s
        self._running = None
        turn.over.set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the calls of a connection."""
        try:
            while (seen := await receive(reader, 0)) is not None:
                body = orjson.dumps(await self._answer(seen))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, seen: Seen) -> dict[str, object]:
        if seen.path.endswith("/infer"):
            return await self._infer(seen.json())
        running_s = time.time() - self._running.began_s if self._running else 0.0
        return {
            "ready": True,
            "live": True,
            "model_version": VERSION,
            "busy_seconds": self._busy_s + running_s,
            "rows_total": self._rows,
            "queue_rows": len(self._waiting),
        }

    async def _infer(self, request: dict[str, Any]) -> dict[str, object]:
        came_s = time.time()
        columns = {tensor["name"]: tensor["data"] for tensor in request["inputs"]}
        queries, texts = columns["query"], columns["text"]
        priority = request.get("parameters", {}).get("priority", 0)
        turn, key = _Turn(), next(self._keys)
        self._waiting[key] = Waiting(key=key, priority=priority, step=1), turn
        self._came.set()
        await turn.over.wait()
        self._rows += len(texts)
        call = Call(
            model=self._model, server=os.getpid(), tag=texts[0].split(" ", 1)[0], rows=len(texts),
            came_s=came_s, began_s=turn.began_s, ended_s=turn.ended_s,
        )  # fmt: skip
        self._log.write(json.dumps(asdict(call)) + "\n")
        self._log.flush()
        scores = [stub_score(q, t) for q, t in zip(queries, texts, strict=True)]
        tensor = {"name": "score", "datatype": "FP32", "shape": [len(texts), 1], "data": scores}
        return {
            "model_name": self._model,
            "model_version": VERSION,
            "id": request.get("id"),
            "outputs": [tensor],
        }


async def _serve(model: str, port: int) -> None:
    with (Path(os.environ[CALLS]) / f"{model}-{os.getpid()}.jsonl").open("a") as log:
        server = PacedServer(model, service_s=float(os.environ[SERVICE_S]), log=log)
        listening = await asyncio.start_server(server.converse, "127.0.0.1", port, backlog=256)
        bound = listening.sockets[0].getsockname()[1]
        print(json.dumps({"event": "listening", "url": f"http://127.0.0.1:{bound}"}), flush=True)
        await server.compute()


def _host(name: str) -> None:
    """Run the product's own host agent, with these servers instead of the real ones."""
    import django
    from django.core.management import call_command

    django.setup()
    from models_admin.management.commands.host_models import Command

    Command.server_command = (sys.executable, "-m", "tests.benchmarks.paced_server")
    call_command(Command(), agent=name)


def main() -> None:
    if sys.argv[1] == "host":
        _host(sys.argv[2])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    chosen, _ = parser.parse_known_args()
    asyncio.run(_serve(chosen.model_name, chosen.port))


if __name__ == "__main__":
    main()
