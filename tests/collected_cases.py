"""The collected cases that lie beside the repository (`../shared/cases`), and their stub server.

They are not part of it: a test that needs one is skipped where they are not at hand.
"""

import asyncio
import importlib.util
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import in_thread

ROOT = Path(__file__).resolve().parents[2] / "shared" / "cases"


def case(name: str) -> Path:
    """Return a case's folder; skip the test where there is none."""
    folder = ROOT / name
    if not folder.is_dir():
        pytest.skip(f"the collected cases are not beside the repository: {folder}")
    return folder


def load(path: Path) -> Any:
    """Return a JSON file of a case."""
    return json.loads(path.read_text())


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a JSONL file by their request id, without it."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["request_id"]: {k: v for k, v in row.items() if k != "request_id"} for row in found}


@dataclass(kw_only=True)
class Stub:
    """A running stub: its address, and what it was asked."""

    url: str = ""
    log: io.StringIO = field(default_factory=io.StringIO)

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Return the model calls so far; health probes are none."""
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["method"] == "POST"]

    @property
    def items(self) -> list[int]:
        """Return the items of each call."""
        return [call["items"] for call in self.calls]


@contextmanager
def stub(fault: Mapping[str, Any]) -> Iterator[Stub]:
    """Run the cases' own scripted server in a thread."""
    source = importlib.util.spec_from_file_location("case_stub", case("_tools") / "stub.py")
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    running = Stub()
    scripted = module.Stub(fault, running.log)

    async def serve(port: int) -> asyncio.Server:
        return await asyncio.start_server(scripted.serve, "127.0.0.1", port, limit=1 << 26)

    async def stop() -> None:
        pass

    with in_thread(serve, stop=stop) as port:
        running.url = f"http://127.0.0.1:{port}"
        yield running
