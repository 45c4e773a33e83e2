"""A whole stack of real processes in a home of its own, as `make up` starts it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import httpx
import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812

from airs_site import embedded
from airs_site.processes import read_pid
from tests.fakes import Tally, read_tally

REPOSITORY = Path(__file__).resolve().parent.parent.parent
START_S = 120.0


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def until(
    condition: Callable[[], Any], *, timeout_s: float, what: str, every_s: float = 0.05
) -> Any:
    """Poll a condition of other processes; fail with `what` when it stays false."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError, psycopg2.OperationalError):
            if value := condition():
                return value
        time.sleep(every_s)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def rows(count: int, *, prefix: str = "r", words: int = 30, start: int = 0) -> list[dict[str, Any]]:
    """Return distinct request rows."""
    return [
        {
            "request_id": f"{prefix}{i}",
            "query_id": f"q{i // 10}",
            "query_text": f"question {prefix} {i // 10}",
            "result_id": f"d{i}",
            "text": f"answer {prefix} {i} " + "word " * words,
            "side": "test" if i % 2 else "base",
        }
        for i in range(start, start + count)
    ]


def ndjson(documents: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as an NDJSON body."""
    return b"".join(json.dumps(d).encode() + b"\n" for d in documents)


class Served(Protocol):
    """A model server of whatever kind."""

    @property
    def url(self) -> str: ...


@dataclass(kw_only=True)
class Stub:
    """An external OIP server in a process of its own, with a tally that survives kills."""

    port: int
    tally_path: Path
    process: "subprocess.Popen[str]"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tally(self) -> Tally:
        return read_tally(self.tally_path)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_stub(directory: Path, *, delay_s: float = 0.0) -> Stub:
    """Start the stub server."""
    port, tally_path = free_port(), directory / f"tally-{os.urandom(4).hex()}"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tests.fakes", "oip", "--port", str(port), "--tally",
            str(tally_path), "--delay", str(delay_s),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("READY")
    return Stub(port=port, tally_path=tally_path, process=process)


@dataclass(kw_only=True)
class Stack:
    """A running `manage.py up`."""

    home: Path
    port: int
    flower_port: int
    environment: dict[str, str]
    process: "subprocess.Popen[bytes]"
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def credentials(self) -> dict[str, str]:
        document: dict[str, str] = json.loads((self.home / "credentials.json").read_text())
        return document

    def wait_ready(self) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"`up` ended: {self.log('up')[-3000:]}")
            return self.client.get("/readyz").status_code == 200

        until(ready, timeout_s=START_S, what="the stack is ready", every_s=0.3)
        self.client.headers["Authorization"] = f"Bearer {self.credentials['api_token']}"

    def log(self, name: str) -> str:
        path = self.home / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pid(self, name: str) -> int | None:
        return read_pid(self.home, name)

    def signal(self, name: str, number: int) -> int:
        """Send a signal to one supervised process (its own process only)."""
        pid = self.pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)
        return pid

    def kill(self, name: str) -> int:
        """SIGKILL one supervised process and its children (a worker with its threads)."""
        import psutil

        pid = self.pid(name)
        assert pid is not None, f"{name} does not run"
        process = psutil.Process(pid)
        for victim in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        return pid

    @contextlib.contextmanager
    def database(self) -> Iterator[Connection]:
        """A database connection in autocommit mode."""
        servers = json.loads((self.home / "run" / "servers.json").read_text())
        connection = psycopg2.connect(servers["database_url"])
        connection.autocommit = True
        try:
            yield connection
        finally:
            connection.close()

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.database() as connection, connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall()

    def register(
        self, stub: Served, *, rater: str, max_concurrency: int = 16, **fields: Any
    ) -> None:
        """Register an external model and an `oip_score` rater for it."""
        model = {
            "id": f"model-{rater}", "kind": "external", "protocol": "oip", "url": stub.url,
            "model_name": "stub", "max_concurrency": max_concurrency,
        }  # fmt: skip
        answer = self.client.post("/api/v1/models", json=model)
        assert answer.status_code == 201, answer.text
        answer = self.client.post(
            "/api/v1/raters",
            json={
                "id": rater, "autorater": "oip_score", "model": f"model-{rater}",
                "mode": "isolated", "score_min": 0, "score_max": 4, **fields,
            },
        )  # fmt: skip
        assert answer.status_code == 201, answer.text

    def submit(
        self, rater: str, body: bytes, *, key: str = "", **parameters: Any
    ) -> dict[str, Any]:
        """Submit an NDJSON workflow; return the answer."""
        headers = {"Content-Type": "application/x-ndjson"}
        if key:
            headers["Idempotency-Key"] = key
        answer = self.client.post(
            "/api/v1/workflows",
            params={"rater": rater, **parameters},
            content=body,
            headers=headers,
        )
        assert answer.status_code == 202, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def workflow(self, workflow_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/api/v1/workflows/{workflow_id}")
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def wait_finished(self, workflow_id: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        def finished() -> dict[str, Any] | None:
            answer = self.client.get(f"/api/v1/workflows/{workflow_id}")
            if answer.status_code != 200:
                return None
            document: dict[str, Any] = answer.json()
            return document if document["finished_at"] else None

        result: dict[str, Any] = until(
            finished, timeout_s=timeout_s, what=f"{workflow_id} finishes"
        )
        return result

    def ratings(self, workflow_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            answer = self.client.get(
                f"/api/v1/workflows/{workflow_id}/ratings",
                params={"format": "jsonl", **({"cursor": cursor} if cursor else {})},
            )
            assert answer.status_code == 200, answer.text
            found += (json.loads(line) for line in answer.text.splitlines())
            cursor = answer.headers.get("X-Next-Cursor", "")
            if not cursor:
                return found

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start_stack(*, without: Sequence[str] = ("flower", "host-agent"), **environment: str) -> Stack:
    """Start a stack in a fresh home; the caller stops it and removes the home."""
    home = Path(tempfile.mkdtemp(prefix="airs-stack-"))
    home.chmod(0o711)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"DATABASE_URL", "REDIS_URL", "AIRS_HOME"}
    }
    port, flower_port = free_port(), free_port()
    full = inherited | {
        "AIRS_HOME": str(home),
        "AIRS_PORT": str(port),
        "FLOWER_PORT": str(flower_port),
        "AIRS_SHADOW_REFRESH": "0",  # predictions are counted
        **environment,
    }
    (home / "logs").mkdir()
    with (home / "logs" / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "manage.py",
                "up",
                *(("--without", ",".join(without)) if without else ()),
            ],
            cwd=REPOSITORY,
            env=full,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return Stack(home=home, port=port, flower_port=flower_port, environment=full, process=process)


def remove(stack: Stack) -> None:
    """Stop a stack for good and remove its home."""
    stack.stop()
    embedded.remove(stack.home)
