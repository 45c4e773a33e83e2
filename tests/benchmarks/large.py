"""Workflows of a million and of ten million requests: what grows with them, how they end early.

One upload of a million, and twenty appended to one workflow while it is rated, 40 % archive hits;
the memory of every process is watched meanwhile, and while all results are exported in one stream.
A third workflow stays open, its rater paused: what acts upon all of its requests take.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pyarrow.parquet as pq

from tests.acceptance.stack import Stack, Stub
from tests.benchmarks import feeder, floors, memory, running, stub_model
from tests.benchmarks.costs import Meter
from tests.benchmarks.report import Figure, number, parts
from tests.benchmarks.storing import PAUSED

HITS, ROWS = 0.4, 4_000
HELD = "held"
APPENDS = 20
POLL_S = 1.0
PATIENCE_S = 4 * 3600.0
NDJSON = {"Content-Type": "application/x-ndjson"}
FORMATS = ("jsonl", "csv", "parquet")
GIB = 2**30
RATED = """
    SELECT coalesce(sum(completed - from_archive), 0)::bigint FROM (
        SELECT completed, from_archive, workflow_id FROM fulfillment_workflowstats
        UNION ALL SELECT completed, from_archive, workflow_id FROM fulfillment_statsdelta
    ) AS of WHERE workflow_id > %s
"""
KEY = "SELECT id FROM fulfillment_workflow WHERE public_id = %s"
NEWEST = "SELECT max(id) FROM fulfillment_workflow"
STATES = """
    SELECT state, count(*) FROM fulfillment_ratingrequest
    WHERE id >= %s::bigint << 31 AND id < (%s::bigint + 1) << 31 GROUP BY state
"""
AGE_S = """
    SELECT extract(epoch FROM clock_timestamp() - coalesce(round_at, created_at))::int
    FROM fulfillment_workflow WHERE id = %s
"""
COUNTED = ("", "completed", "failed", "timed_out", "cancelled")
"""State of a request -> where it is counted; what is PENDING shows in three counts."""


def large(stack: Stack, stub: Stub, *, upload: int, appended: int) -> Iterator[Figure]:
    """Measure all three."""
    stub_model.register(stack, stub)
    stack.register(stub, rater=HELD)
    with stack.database() as connection, connection.cursor() as cursor:
        cursor.execute(PAUSED, [HELD])
    rater = stub_model.rater_of(16)
    warm = running.rate(stack, rater, feeder.body(ROWS, hits=1.0)).workflow_id
    stack.client.timeout = httpx.Timeout(PATIENCE_S)
    yield from acts(stack, rows=upload)
    _load_writers(stack, warm)
    for label, rows, send in (
        ("upload", upload, _upload),
        ("appended", appended, partial(_append, each=appended // APPENDS, behind=upload)),
    ):
        yield from rated(stack, rater, label=label, rows=rows, send=send)
    size = _size(stack.home.resolve())
    yield Figure(
        name="large_disk_gib",
        value=size / GIB,
        unit="GiB",
        n=2 * upload + appended,
        note=f"home of the stack at the end, WAL included: {size / (2 * upload + appended):.0f}"
        " bytes a request",
    )


Send = Callable[[Stack, str, int], dict[str, Any]]
"""Sends so many rows to a rater and closes the workflow; returns it."""


def rated(stack: Stack, rater: str, *, label: str, rows: int, send: Send) -> Iterator[Figure]:
    """Measure a workflow from its first byte to COMPLETED, and its exports."""
    name = f"large_{label}"
    ((before,),) = stack.query(NEWEST)
    to_rate = rows - rows // ROWS * int(ROWS * HITS)

    def done() -> float:
        return float(stack.query(RATED, before)[0][0]) / to_rate

    meter = Meter(stack.home)
    with memory.watching(stack, done) as looks:
        began_at = time.monotonic()
        taken = send(stack, rater, rows)
        taken_s = time.monotonic() - began_at
        ((key,),) = stack.query(KEY, taken["id"])
        _wait(stack, taken["id"], key, "COMPLETED", rows)
        wall_s = time.monotonic() - began_at
    cost = meter.read()
    yield Figure(
        name=f"{name}_cpu_us_per_request",
        value=cost.us(rows),
        unit="us CPU",
        n=rows,
        note=f"{parts(cost.us_each(rows))}; {number(rows / wall_s)} requests/s, taken in after"
        f" {taken_s:.0f} of {wall_s:.0f} s; foreign load {cost.foreign_cores:.1f} cores",
    )
    yield Figure(
        name=f"{name}_web_peak_mib",
        value=memory.peak(looks, "web"),
        unit="MiB",
        n=rows,
        note=f"above {number(looks[0].mib['web'])} MiB before, upload included",
    )
    yield from memory.growth(looks, name=name, rows=rows)
    yield from _exports(stack, taken["id"], key, name=name, rows=rows)


def acts(stack: Stack, *, rows: int) -> Iterator[Figure]:
    """Measure the acts upon a workflow all of whose requests are open, one after the other."""
    workflow_id = _upload(stack, HELD, rows)["id"]
    ((key,),) = stack.query(KEY, workflow_id)
    for number_, (act, state, counted) in enumerate(
        (
            ("cancel", "CANCELLED", "cancelled"),
            ("retry", "RUNNING", "pending"),
            ("complete", "FAILED", "cancelled"),
            ("retry", "RUNNING", "pending"),
            ("deadline", "FAILED", "timed_out"),
        )
    ):
        meter = Meter(stack.home)
        with memory.watching(stack) as looks:
            began_at = time.monotonic()
            _act(stack, workflow_id, key, act)
            call_s = time.monotonic() - began_at
            slowest_s = _wait(stack, workflow_id, key, state, rows)
            wall_s = time.monotonic() - began_at
        counts = stack.workflow(workflow_id)["counts"]
        assert counts[counted] == rows, counts
        cost = meter.read()
        grown = {role: memory.peak(looks, role) for role in ("web", "control", "dispatcher")}
        yield Figure(
            name=f"large_open_{number_ + 1}_{act}_s",
            value=wall_s,
            unit="s",
            n=rows,
            note=f"to {state}, {rows:,} {counted}; the call {call_s:.1f} s, a look at most"
            f" {slowest_s:.1f} s; CPU {cost.us(rows):.0f} us a request"
            f" ({parts(cost.us_each(rows))}); MiB at most: {parts(grown)}; foreign load"
            f" {cost.foreign_cores:.1f} cores",
        )


def _act(stack: Stack, workflow_id: str, key: int, act: str) -> None:
    address = f"/api/v1/workflows/{workflow_id}"
    if act == "deadline":
        ((age_s,),) = stack.query(AGE_S, key)
        answer = stack.client.patch(address, json={"deadline_s": age_s + 3})
    else:
        answer = stack.client.post(f"{address}/{act}")
    assert answer.status_code == 200, answer.text


def _wait(stack: Stack, workflow_id: str, key: int, state: str, rows: int) -> float:
    """Wait for a state; the counts add up at each look. Return the seconds of the slowest look."""
    slowest_s, until_s = 0.0, time.monotonic() + PATIENCE_S
    while True:
        began_at = time.monotonic()
        document = stack.workflow(workflow_id)
        slowest_s = max(slowest_s, time.monotonic() - began_at)
        _add_up(document, rows)
        if document["state"] == state:
            break
        assert document["finished_at"] is None, document
        assert time.monotonic() < until_s, document
        time.sleep(POLL_S)
    ended = dict(stack.query(STATES, key, key))
    assert all(ended.get(n, 0) == document["counts"][c] for n, c in enumerate(COUNTED) if c), ended
    return slowest_s


def _add_up(document: dict[str, Any], rows: int) -> None:
    counts = dict(document["counts"])
    assert counts.pop("total") == sum(counts.values()) == rows, document


def _rows(first: int, count: int) -> Iterator[bytes]:
    """Yield NDJSON of rows whose ids are never used twice; those not in HITS are new each time."""
    template = feeder.body(ROWS, hits=HITS)
    template = template.replace(b'"request_id":"', b'"request_id":"' + feeder.MARK + b"-")
    for n in range(first, first + count, ROWS):
        yield template.replace(feeder.MARK, b"%08d" % (n // ROWS))


def _upload(stack: Stack, rater: str, rows: int) -> dict[str, Any]:
    """Send all in one body, of which the client has a piece at a time."""
    answer = stack.client.post(
        "/api/v1/workflows",
        params={"rater": rater, "deadline_s": int(PATIENCE_S)},
        content=_rows(0, rows),
        headers=NDJSON,
    )
    return _taken(answer, 202, rows)


def _append(stack: Stack, rater: str, rows: int, *, each: int, behind: int) -> dict[str, Any]:
    """Append while it is rated: the next is sent when half of one is still open."""
    form = {"rater": rater, "deadline_s": int(PATIENCE_S)}
    answer = stack.client.post("/api/v1/workflows", json=form)
    assert answer.status_code == 202, answer.text
    address = f"/api/v1/workflows/{answer.json()['id']}"
    for first in range(0, rows, each):
        while (document := stack.client.get(address).json())["counts"]["pending"] > each // 2:
            _add_up(document, first)
            time.sleep(POLL_S)
        # Other numbers than the upload's: its texts are in the archive.
        content = _rows(behind + first, each)
        answer = stack.client.post(f"{address}/requests", content=content, headers=NDJSON)
        _taken(answer, 200, each)
    answer = stack.client.post(f"{address}/close")
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert isinstance(document, dict)
    return document


def _taken(answer: httpx.Response, status: int, rows: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    document: dict[str, Any] = answer.json()
    assert document["accepted"] == rows, document
    return document


def _exports(stack: Stack, workflow_id: str, key: int, *, name: str, rows: int) -> Iterator[Figure]:
    floor = floors.copy_results(stack, key)
    assert floor.count == rows
    for kind in FORMATS:
        meter = Meter(stack.home)
        with TemporaryDirectory(prefix="airs-bench-") as directory:
            path = Path(directory) / "ratings"
            with memory.watching(stack) as looks:
                began_at = time.monotonic()
                _download(stack, workflow_id, kind, path)
                wall_s = time.monotonic() - began_at
            found, size = _count(path, kind), path.stat().st_size
        assert found == rows, f"{found} records of {rows} as {kind}"
        cost = meter.read()
        yield Figure(
            name=f"{name}_export_{kind}_web_peak_mib",
            value=memory.peak(looks, "web"),
            unit="MiB",
            n=rows,
            note=f"above {number(looks[0].mib['web'])} MiB before; {number(rows / wall_s)} rows/s,"
            f" {rows / wall_s / floor.rate:.2f} of the COPY; {size / rows:.0f} bytes a row; CPU"
            f" {cost.us(rows):.0f} us a row ({parts(cost.us_each(rows))}); foreign load"
            f" {cost.foreign_cores:.1f} cores",
        )


def _download(stack: Stack, workflow_id: str, kind: str, path: Path) -> None:
    address = f"/api/v1/workflows/{workflow_id}/ratings"
    params, headers = {"all": "true", "format": kind}, {"Accept-Encoding": "identity"}
    with (
        path.open("wb") as file,
        stack.client.stream("GET", address, params=params, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            file.write(piece)


def _count(path: Path, kind: str) -> int:
    if kind == "parquet":
        return int(pq.read_metadata(path).num_rows)
    with path.open("rb") as file:
        return sum(1 for _ in file) - (kind == "csv")


def _load_writers(stack: Stack, workflow_id: str) -> None:
    """Let both web workers write each format once: what a library takes is no growth."""

    def load(kind: str) -> None:
        with TemporaryDirectory(prefix="airs-bench-") as directory:
            _download(stack, workflow_id, kind, Path(directory) / "ratings")

    threads = [threading.Thread(target=load, args=[kind]) for kind in FORMATS * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _size(home: Path) -> int:
    """Return the bytes of a home on disk."""
    size = 0
    for directory, _, names in os.walk(home, followlinks=True):
        for name in names:
            try:
                size += os.stat(os.path.join(directory, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return size
