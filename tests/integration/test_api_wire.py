"""Uploads over real sockets to a real gunicorn: chunked bodies, dead clients, refusals."""

import gzip
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson
import pytest
from django.db import connection

from fulfillment.clock import database_now
from fulfillment.models import Event, RatingRequest, Upload, Workflow, WorkflowStats
from fulfillment.policy.lifecycle import WorkflowState
from tests import builders

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT = 1 << 20
CREATE = f"/api/v1/workflows?rater={builders.RATER}"
_CONFIG = """
def post_worker_init(worker):
    from django.conf import settings

    from tests import builders

    builders.use_plugins(settings)
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, django_db_setup: None) -> Iterator[int]:
    """Serve the test database by gunicorn as `make up` starts it."""
    config = tmp_path_factory.mktemp("web") / "gunicorn.py"
    config.write_text(_CONFIG)
    parts = urlsplit(os.environ["DATABASE_URL"])
    name = str(connection.settings_dict["NAME"])
    web = subprocess.Popen(
        [
            *(sys.executable, "-m", "gunicorn", "airs_site.wsgi", "--no-control-socket"),
            *("--worker-class", "gthread", "--workers", "1", "--threads", "4"),
            *("--bind", "127.0.0.1:0", "--config", str(config)),
        ],
        env={
            **os.environ,
            "DATABASE_URL": urlunsplit(parts._replace(path=f"/{name}")),
            "AIRS_MAX_UPLOAD_BYTES": str(LIMIT),
            "AIRS_EVENT_FOLLOWERS": "1",
            "PYTHONPATH": os.getcwd(),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert web.stdout is not None
    port = None
    while port is None and (line := web.stdout.readline()):
        if found := re.search(rb"http://127\.0\.0\.1:(\d+)", line):
            port = int(found[1])
    assert port is not None
    try:
        yield port
    finally:
        web.terminate()
        web.communicate(timeout=30)


class Wire:
    """A keep-alive connection that writes exactly what it is told."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.received = self.socket.makefile("rb")
        self.token = builders.token()

    def head(self, method: str, path: str, *headers: str, token: str | None = None) -> None:
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {token or self.token}",
            *headers,
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def chunk(self, data: bytes) -> None:
        self.socket.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self) -> tuple[int, Any] | None:
        """Read one answer, None if the server closed instead."""
        status = self.received.readline()
        if not status:
            return None
        headers = {}
        while line := self.received.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        body = self.received.read(int(headers.get(b"content-length", b"0")))
        return int(status.split()[1]), orjson.loads(body) if body else None

    def lives(self) -> bool:
        """Say whether the next request on this connection is answered as if it were the first."""
        self.head("GET", "/api/v1/raters")
        return (answer := self.answer()) is not None and answer[0] == 200


@pytest.fixture
def wire(port: int, transactional_db: None) -> Iterator[Wire]:
    builders.version()
    wire = Wire(port)
    with closing(wire.socket), closing(wire.received):
        yield wire


NDJSON = "Content-Type: application/x-ndjson"
CHUNKED = "Transfer-Encoding: chunked"


def refused(answer: tuple[int, Any] | None) -> tuple[int, str]:
    assert answer is not None
    return answer[0], answer[1]["code"]


def nothing_stored() -> bool:
    return not (Workflow.objects.exists() or Upload.objects.exists())


def test_uploads_over_real_sockets(wire: Wire, port: int) -> None:
    """One server for all: each step leaves the connection usable, or closed by its own choice."""
    rows = builders.ndjson([builders.row(n) for n in range(20)])

    # A chunked body, cut in the middle of rows.
    wire.head("POST", CREATE, NDJSON, CHUNKED)
    for start in range(0, len(rows), 97):
        wire.chunk(rows[start : start + 97])
    wire.socket.sendall(b"0\r\n\r\n")
    answer = wire.answer()
    assert answer is not None
    assert (answer[0], answer[1]["accepted"]) == (202, 20)
    assert RatingRequest.objects.count() == 20
    assert wire.lives()
    Workflow.objects.all().delete()
    Upload.objects.all().delete()

    # Gzip, cut in the middle of everything.
    zipped = gzip.compress(rows)
    wire.head("POST", CREATE, NDJSON, CHUNKED, "Content-Encoding: gzip")
    for start in range(0, len(zipped), 13):
        wire.chunk(zipped[start : start + 13])
    wire.socket.sendall(b"0\r\n\r\n")
    answer = wire.answer()
    assert answer is not None
    assert (answer[0], answer[1]["accepted"]) == (202, 20)
    assert wire.lives()
    Workflow.objects.all().delete()
    Upload.objects.all().delete()

    # A length in advance.
    wire.head("POST", CREATE, NDJSON, f"Content-Length: {len(rows)}", "Expect: 100-continue")
    assert wire.answer() == (100, None)
    wire.socket.sendall(rows)
    answer = wire.answer()
    assert answer is not None
    assert (answer[0], answer[1]["accepted"]) == (202, 20)
    assert wire.lives()
    Workflow.objects.all().delete()
    Upload.objects.all().delete()

    # Refusals before the body is read: the answer arrives, the connection goes on.
    for head, token, expected in (
        ([f"Content-Length: {LIMIT}", NDJSON], "nonsense", (401, "invalid_token")),
        (
            [f"Content-Length: {LIMIT}", "Content-Type: text/tab-separated-values"],
            None,
            (415, "unsupported_media_type"),
        ),
        ([f"Content-Length: {LIMIT + 1}", NDJSON], None, (413, "payload_too_large")),
    ):
        wire.head("POST", CREATE, *head, token=token)
        wire.socket.sendall(b"x" * int(head[0].split()[1]))
        assert refused(wire.answer()) == expected
        assert wire.lives()

    # Too much without saying so in advance.
    wire.head("POST", CREATE, NDJSON, CHUNKED)
    for _ in range(LIMIT // len(rows) + 1):
        wire.chunk(rows)
    wire.socket.sendall(b"0\r\n\r\n")
    assert refused(wire.answer()) == (413, "payload_too_large")
    assert wire.lives()

    # A small body that unfolds to too much.
    bomb = gzip.compress(rows * (LIMIT // len(rows) + 1))
    wire.head("POST", CREATE, NDJSON, "Content-Encoding: gzip", f"Content-Length: {len(bomb)}")
    wire.socket.sendall(bomb)
    assert refused(wire.answer()) == (413, "decompressed_too_large")
    assert wire.lives()

    # Clients that die: what they sent counts for nothing.
    for framing, sent in (
        (f"Content-Length: {len(rows)}", rows[:-1]),
        (f"Content-Length: {len(rows)}", b""),
        (CHUNKED, b"%x\r\n%b" % (len(rows), rows[:-5])),
        (CHUNKED, b"%x\r\n%b\r\n" % (len(rows), rows)),
        (CHUNKED, b"zz\r\n"),
    ):
        dying = Wire(port)
        with closing(dying.socket), closing(dying.received):
            dying.head("POST", CREATE, NDJSON, framing)
            dying.socket.sendall(sent)
            dying.socket.shutdown(socket.SHUT_WR)
            assert refused(dying.answer()) == (400, "truncated_upload"), sent[-20:]
            assert dying.answer() is None
    assert nothing_stored()
    assert wire.lives()


def test_an_upload_that_is_refused_while_gigabytes_are_on_their_way_is_closed(wire: Wire) -> None:
    wire.head("POST", CREATE, NDJSON, f"Content-Length: {1 << 34}")

    sent = 0
    with suppress(OSError):  # reset or broken pipe, by the kernel's choice
        while sent < 1 << 30:
            wire.socket.sendall(b"x" * (1 << 20))
            sent += 1 << 20

    assert sent < 1 << 27
    assert nothing_stored()


def follow(wire: Wire, workflow: Workflow) -> bytes:
    """Ask for the event stream of a workflow; return the status line."""
    wire.head("GET", f"/api/v1/workflows/{workflow.public_id}/events", "Accept: text/event-stream")
    return wire.received.readline()


def read_until(wire: Wire, text: bytes) -> bytes:
    read = b""
    while text not in read and (line := wire.received.readline()):
        read += line
    return read


def finish(workflow: Workflow) -> Event:
    now = database_now()
    Workflow.objects.filter(pk=workflow.pk).update(
        state=WorkflowState.COMPLETED, finished_at=now, closed_at=now
    )
    return Event.objects.create(
        workflow=workflow, round=1, kind="workflow.completed", data={}, created_at=now
    )


def test_a_stream_is_followed_to_its_event_while_others_are_served(wire: Wire, port: int) -> None:
    workflow = builders.workflow()
    assert b" 200 " in follow(wire, workflow)
    assert b'"state":"RUNNING"' in read_until(wire, b"progress") + read_until(wire, b"data:")

    beside = Wire(port)
    with closing(beside.socket), closing(beside.received):
        assert beside.lives()
        assert b" 503 " in follow(beside, workflow)
    event = finish(workflow)

    assert event.public_id.encode() in read_until(wire, b"event: workflow.completed")
    assert read_until(wire, b"0\r\n").endswith(b"0\r\n")


def test_a_follower_that_hangs_up_gives_its_place_back(wire: Wire, port: int) -> None:
    workflow = builders.workflow()
    gone = Wire(port)
    assert b" 200 " in follow(gone, workflow)
    read_until(gone, b"data:")
    gone.received.close()
    gone.socket.close()

    # Each change is a write, and a write finds out.
    for completed in range(1, 40):
        WorkflowStats.objects.update(received=40, completed=completed)
        again = Wire(port)
        with closing(again.socket), closing(again.received):
            if b" 200 " in follow(again, workflow):
                finish(workflow)
                # To its very end, when it gives its place back: another test wants it.
                assert read_until(again, b"0\r\n").endswith(b"0\r\n")
                break
        threading.Event().wait(0.25)
    else:
        pytest.fail("the place was never given back")
