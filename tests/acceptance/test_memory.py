"""Memory of our processes does not grow with the workflow."""

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.acceptance.stack import Stack, Stub, ndjson, remove, rows, start_stack, start_stub

pytestmark = pytest.mark.acceptance

WARM_ROWS = 20_000
ROWS = 200_000
GROWTH_BYTES = 40 << 20
"""Allocators and statement caches settle within this; one byte a row kept would be little, but a
list of request objects or bodies would pass it several times over."""
PROCESSES = ("web", "executors", "dispatcher-1", "dispatcher-2", "control")


@pytest.fixture
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    server = start_stub(tmp_path_factory.mktemp("stub"))
    yield server
    server.stop()


@pytest.fixture
def stack() -> Iterator[Stack]:
    with start_stack() as running:
        try:
            running.wait_ready()
            yield running
        finally:
            remove(running)


def test_memory_is_flat_for_200_000_requests(stack: Stack, stub: Stub) -> None:
    stack.register(stub, rater="stub", max_concurrency=64)
    warm = stack.submit("stub", ndjson(rows(WARM_ROWS, prefix="warm-", words=5)))
    stack.wait_finished(warm["id"], timeout_s=120)
    before = _resident(stack)

    answer = stack.submit("stub", ndjson(rows(ROWS, words=5)))
    peak = dict(before)
    for _ in range(1_200):
        workflow = stack.workflow(answer["id"])
        for name, size in _resident(stack).items():
            peak[name] = max(peak[name], size)
        if workflow["finished_at"]:
            break
        time.sleep(0.25)

    assert workflow["state"] == "COMPLETED", workflow
    grown = {name: peak[name] - before[name] for name in PROCESSES}
    assert max(grown.values()) < GROWTH_BYTES, grown


def _resident(stack: Stack) -> dict[str, int]:
    """Return the resident memory of each process and its children."""
    found = {}
    for name in PROCESSES:
        pid = stack.pid(name)
        assert pid is not None
        process = psutil.Process(pid)
        found[name] = sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
    return found
