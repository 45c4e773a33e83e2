"""What the same bytes cost without AIRS: the floors that figures are compared to.

Each takes no more than PostgreSQL, or the model, needs: one connection, one COPY, no queue, no
fingerprint, no state.
"""

import asyncio
import io
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from tests.acceptance.stack import Stack
from workers.autoraters.protocol import OipCall
from workers.model_client import CallOutcome, Endpoint, ModelClient

BATCH = 12
OPEN_CALLS = 16
RESULT_COLUMNS = (
    "request_id, query_id, result_id, side, state, score, label, output, source, error, attempts,"
    " rated_at, warnings"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Seconds of wall and CPU for `count` rows."""

    count: int
    wall_s: float
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.count / self.wall_s


def copy_bytes(stack: Stack, body: bytes) -> Floor:
    """COPY the lines into an ordinary table of one column."""
    lines = body.count(b"\n")
    with stack.database() as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS bench_floor")
        cursor.execute("CREATE TABLE bench_floor (line text)")
        began_at = time.perf_counter()
        cursor.copy_expert("COPY bench_floor FROM STDIN", io.BytesIO(body))
        wall_s = time.perf_counter() - began_at
        cursor.execute("DROP TABLE bench_floor")
    return Floor(count=lines, wall_s=wall_s)


def copy_outcome(stack: Stack, body: bytes) -> Floor:
    """COPY the lines, and a rating row for each: all that must be stored of a rated workflow."""
    lines = body.splitlines()
    now = datetime.now(UTC).isoformat()
    ratings = io.BytesIO(
        b"".join(
            b"%032x\t1\t%r\t%b\n" % (i, zlib.crc32(line) / 2**30, now.encode())
            for i, line in enumerate(lines)
        )
    )
    with stack.database() as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS bench_floor, bench_floor_ratings")
        cursor.execute("CREATE TABLE bench_floor (line text)")
        cursor.execute(
            "CREATE TABLE bench_floor_ratings"
            " (fingerprint uuid, version bigint, score float8, produced_at timestamptz)"
        )
        began_at = time.perf_counter()
        cursor.copy_expert("COPY bench_floor FROM STDIN", io.BytesIO(body))
        cursor.copy_expert("COPY bench_floor_ratings FROM STDIN", ratings)
        wall_s = time.perf_counter() - began_at
        cursor.execute("DROP TABLE bench_floor, bench_floor_ratings")
    return Floor(count=len(lines), wall_s=wall_s)


def copy_results(stack: Stack, workflow_key: int) -> Floor:
    """COPY what an export shows of a workflow as CSV to this process."""

    class Sink(io.RawIOBase):
        rows = 0

        def write(self, data: Any) -> int:
            self.rows += bytes(data).count(b"\n")
            return len(data)

    sink = Sink()
    with stack.database() as connection, connection.cursor() as cursor:
        began_at = time.monotonic()
        cursor.copy_expert(
            f"COPY (SELECT {RESULT_COLUMNS} FROM fulfillment_ratingrequest"
            f" WHERE id >= {workflow_key:d}::bigint << 31"
            f" AND id < {workflow_key + 1:d}::bigint << 31) TO STDOUT (FORMAT csv)",
            sink,
        )
        wall_s = time.monotonic() - began_at
    return Floor(count=sink.rows, wall_s=wall_s)


def bare_calls(url: str, body: bytes) -> Floor:
    """Call the stub for all rows in batches, by the executors' own client, 16 calls at a time."""
    rows = [orjson.loads(line) for line in body.splitlines()]
    began_at, cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(_call_all(url, rows))
    return Floor(
        count=len(rows),
        wall_s=time.perf_counter() - began_at,
        cpu_s=time.process_time() - cpu_s,
    )


async def _call_all(url: str, rows: Sequence[dict[str, str]]) -> None:
    client = ModelClient(clock=lambda: datetime.now(UTC))
    endpoint = Endpoint(url=url, model_name="stub")
    batches = iter([rows[i : i + BATCH] for i in range(0, len(rows), BATCH)])

    async def work() -> None:
        for batch in batches:
            call = OipCall(
                inputs={
                    "query": [row["query_text"] for row in batch],
                    "text": [row["text"] for row in batch],
                },
                outputs=("score",),
            )
            result = await client.infer(
                endpoint, call, rows=len(batch), expected_version="", priority=50, timeout_s=30.0
            )
            assert result.outcome is CallOutcome.SUCCESS, result

    await asyncio.gather(*(work() for _ in range(OPEN_CALLS)))
    await client.close()
