"""A small real HTTP server that answers as AIRS's REST API does, for the tests of the client.

It rates nothing: the test lays out what a workflow looks like at each look (`looks`), and which
requests go wrong on the way (`faults`). Everything that arrives is in `received`.
"""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

TOKEN = "token-of-the-tests"
PREFIX = "/api/v1"
ROW_TYPES = ("application/x-ndjson", "text/csv", "application/vnd.apache.parquet")
STATES_BY_ACT = {
    "close": "RUNNING",
    "pause": "PAUSED",
    "resume": "RUNNING",
    "cancel": "CANCELLED",
    "complete": "PARTIAL",
    "retry": "RUNNING",
}
MODEL_STATES = {"start": "STARTING", "stop": "DRAINING", "restart": "READY", "resize": "READY"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """One request as it arrived; of a body only what tests look at."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    size: int
    digest: str
    chunked: bool
    beginning: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What is sent back. `hang_up` closes the connection instead, after reading the request.

    `withheld` bytes are promised beyond the body, and then the connection is closed.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_up: bool = False
    withheld: int = 0


@dataclass
class FakeApi:
    """The state behind the server; `url` is where it listens."""

    url: str = ""
    looks: deque[dict[str, Any]] = field(default_factory=deque)
    faults: deque[Answer] = field(default_factory=deque)
    received: list[Received] = field(default_factory=list)
    ratings: list[dict[str, Any]] = field(default_factory=list)
    page_rows: int = 2
    distributions: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    estimate: dict[str, Any] = field(default_factory=dict)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    bodies_by_key: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    raters: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {
            "needs_met": {
                "id": "needs_met",
                "autorater": "needs_met",
                "model": "minilm",
                "mode": "integrated",
                "score_min": 0.0,
                "score_max": 1.0,
            }
        }
    )
    models: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {
            "minilm": {"id": "minilm", "kind": "hosted", "protocol": "oip", "state": "READY"}
        }
    )

    pools: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {
            "box": {
                "id": "box",
                "kind": "gpu",
                "devices": 4,
                "devices_used": 3,
                "rebalancing": "off",
                "outlook": {"reason": "all are met", "needs": {"north": 2.4}},
            }
        }
    )
    decisions: list[dict[str, Any]] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    trial: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def calls(self, method: str, path: str) -> list[Received]:
        return [
            call
            for call in self.received
            if call.method == method and call.path == f"{PREFIX}{path}"
        ]

    def answer(self, call: Received) -> Answer:
        if self.faults:
            return self.faults.popleft()
        if call.headers.get("authorization") != f"Bearer {TOKEN}":
            return problem(401, "unauthorized", "a valid API token is needed")
        parts = [unquote(part) for part in call.path.removeprefix(PREFIX).strip("/").split("/")]
        match call.method, parts:
            case "POST", ["workflows"]:
                return self._submit(call)
            case "POST", ["estimates"]:
                return reply(self.estimate)
            case "GET", ["workflows"]:
                return reply({"items": [self.looks[0]] if self.looks else [], "next": None})
            case "GET", ["workflows", "wf_1"]:
                return reply(self.looks.popleft() if len(self.looks) > 1 else self.looks[0])
            case "POST", ["workflows", "wf_1", act] if act in STATES_BY_ACT:
                return reply(workflow(state=STATES_BY_ACT[act]))
            case "PATCH", ["workflows", "wf_1"]:
                return reply(workflow(state="RUNNING"))
            case "GET", ["workflows", "wf_1", "ratings"]:
                return self._ratings(call)
            case "GET", ["workflows", "wf_1", "distributions"] if self.distributions:
                return reply(self.distributions)
            case "GET", ["workflows", "wf_1", "events"]:
                return reply({"items": self.events, "next": None})
            case "POST", ["archive", "explain"]:
                return reply({"look": "hit", "fingerprint": "ab" * 16})
            case ("POST", ["archive", "purge"]) | ("GET", ["archive", "purges", "prg_1"]):
                return reply({"id": "prg_1", "state": "running", "counts": {"ratings": 7}})
            case "POST", ["models" | "pools" as kind]:
                return self._register(kind, json.loads(call.beginning))
            case "DELETE", ["models" | "pools" as kind, name] if name in self._things(kind):
                del self._things(kind)[name]
                return Answer(status=204)
            case "POST", ["models", name, "try"] if name in self.models:
                return reply(self.trial)
            case "POST", ["models", name, "versions", version, "retire"] if name in self.models:
                return reply({"version": version, "state": "retiring"})
            case "GET", ["models", name, "versions"] if name in self.models:
                return reply({"items": self.versions, "next": None})
            case "POST", ["models", name, act] if name in self.models:
                wanted = json.loads(call.beginning) if call.beginning else {}
                return reply(self.models[name] | {"state": MODEL_STATES[act]} | wanted)
            case "GET", ["pools", "box", "decisions"]:
                following = None if "cursor" in call.params else "7"
                return reply({"items": self.decisions, "next": following})
            case "PATCH", ["pools", name] if name in self.pools:
                return reply(self.pools[name] | json.loads(call.beginning))
            case "GET", ["raters" | "models" | "pools" as kind]:
                return reply({"items": list(self._things(kind).values()), "next": None})
            case "GET", ["raters" | "models" | "pools" as kind, name] if name in self._things(kind):
                return reply(self._things(kind)[name])
        return problem(404, "not_found", f"there is no {'/'.join(parts)}")

    def _register(self, kind: str, given: dict[str, Any]) -> Answer:
        made = given | {"state": "STOPPED", "warnings": self.warnings, "devices_used": 0}
        self._things(kind)[given["id"]] = made
        return reply(made)

    def _things(self, kind: str) -> dict[str, dict[str, Any]]:
        return {"raters": self.raters, "models": self.models, "pools": self.pools}[kind]

    def _submit(self, call: Received) -> Answer:
        if call.headers["content-type"] not in ROW_TYPES:
            return problem(415, "unsupported_media_type", f"{call.headers['content-type']} …")
        if call.params.get("rater") not in self.raters:
            return problem(404, "unknown_rater", f"there is no rater {call.params.get('rater')}")
        key, seen = call.headers["idempotency-key"], call.digest
        if key in self.bodies_by_key:
            body, made = self.bodies_by_key[key]
            if body != seen:
                return problem(409, "idempotency_conflict", "another body has this key")
            return reply(made, status=200)
        made = {
            **workflow(state="OPEN", id=f"wf_{len(self.bodies_by_key) + 1}"),
            "accepted": 3,
            "rejected": self.rejected,
            "warnings": [],
        }
        if url := call.params.get("webhook_url"):
            made["webhook"] = {"endpoint": "we_1", "url": url, "secret": "whsec_c2VjcmV0"}
        self.bodies_by_key[key] = seen, made
        return reply(made, status=202)

    def _ratings(self, call: Received) -> Answer:
        start = int(call.params.get("cursor", "0"))
        rows = self.ratings[start : start + self.page_rows]
        if call.params.get("format") == "parquet":
            assert call.params.get("all") == "true"
            return Answer(
                body=b"PAR1 of %d records PAR1" % len(self.ratings),
                headers={"Content-Type": "application/vnd.apache.parquet"},
            )
        if call.params.get("format") == "csv":
            lines = [f"{row['request_id']},{row['state']},{row['score']}" for row in rows]
            lines = ["request_id,state,score", *lines] if not start else lines
            kind = "text/csv"
        else:
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            kind = "application/x-ndjson"
        headers = {"Content-Type": kind}
        if start + self.page_rows < len(self.ratings):
            following = str(start + self.page_rows)
            headers["Link"] = (
                f'<https://elsewhere.example.org{call.path}?cursor={following}>; rel="next"'
            )
        return Answer(body="".join(f"{line}\n" for line in lines).encode(), headers=headers)


def workflow(
    *,
    state: str,
    id: str = "wf_1",
    total: int = 300,
    completed: int = 0,
    failed: int = 0,
    archive: int = 0,
    eta_s: float | None = None,
) -> dict[str, Any]:
    """A workflow as GET answers it."""
    return {
        "id": id,
        "name": "results.jsonl",
        "rater": "needs_met",
        "owner": "admin",
        "priority": 50,
        "state": state,
        "counts": {
            "total": total,
            "pending": total - completed - failed,
            "completed": completed,
            "failed": failed,
        },
        "sources": {"archive": archive, "coalesced": 0, "model": completed - archive},
        "mean_score": 0.5 if completed else None,
        "scored": completed,
        "eta": None if eta_s is None else {"seconds": eta_s, "low": eta_s / 2, "high": eta_s * 2},
        "created_at": "2026-01-02T03:04:05Z",
        "a_field_of_the_future": 1,
    }


def rating(number: int, *, state: str = "COMPLETED") -> dict[str, Any]:
    """A record as the ratings call answers it; its text has separators that are no line ends."""
    return {
        "request_id": f"row-{number}",
        "state": state,
        "score": number / 10 if state == "COMPLETED" else None,
        "label": "Fully meets\u2028\x85",
        "rated_at": "2026-01-02T03:04:05Z",
    }


def reply(value: Mapping[str, Any], *, status: int = 200) -> Answer:
    return Answer(
        status=status,
        body=json.dumps(value).encode(),
        headers={"Content-Type": "application/json"},
    )


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    errors: Sequence[Mapping[str, Any]] = (),
    headers: Mapping[str, str] | None = None,
) -> Answer:
    body = {"type": "about:blank", "status": status, "code": code, "detail": detail}
    return Answer(
        status=status,
        body=json.dumps({**body, "errors": list(errors)}).encode(),
        headers={"Content-Type": "application/problem+json", **(headers or {})},
    )


@contextmanager
def serving() -> Iterator[FakeApi]:
    """A fake API on a loopback port of its own, for as long as the block lasts."""
    api = FakeApi()
    with _Server(("127.0.0.1", 0), _handler_of(api)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        api.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests and no news."""


def _handler_of(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def do_PATCH(self) -> None:
            self._serve()

        def do_DELETE(self) -> None:
            self._serve()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _serve(self) -> None:
            call = self._receive()
            api.received.append(call)
            answer = api.answer(call)
            if answer.hang_up:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("X-Request-Id", f"req-{len(api.received)}")
            self.send_header("Content-Length", str(len(answer.body) + answer.withheld))
            self.end_headers()
            self.wfile.write(answer.body)
            self.close_connection = bool(answer.withheld)

        def _receive(self) -> Received:
            target = urlsplit(self.path)
            left = size = int(self.headers.get("Content-Length") or 0)
            digest, beginning = hashlib.sha256(), b""
            while left and (piece := self.rfile.read(min(65536, left))):
                digest.update(piece)
                beginning = beginning or piece
                left -= len(piece)
            if left:
                raise ConnectionError("the upload broke off")
            return Received(
                method=self.command,
                path=target.path,
                params=dict(parse_qsl(target.query)),
                headers={name.lower(): value for name, value in self.headers.items()},
                size=size,
                digest=digest.hexdigest(),
                chunked="Transfer-Encoding" in self.headers,
                beginning=beginning,
            )

    return Handler
