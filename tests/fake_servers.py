"""External model servers for tests, on real sockets: each answers as the one it is named for does.

What they say (paths, statuses, bodies, words of errors) is written after their documentation and
sources. A test sets `life` to what the server goes through; `seen` holds the calls, not the checks.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import orjson

from tests.fakes import ScriptedServer, Seen, Step, in_thread, perform, receive

MODEL = "org/judge-7b"
CHAT_PATH = "/v1/chat/completions"
NAMES = {"triton": "m", "kserve": "m", "mlserver": "m"}


class Life(StrEnum):
    """What a server goes through."""

    READY = "ready"
    LOADING = "loading"
    OVERLOADED = "overloaded"
    TOO_LONG = "too long"
    """It finds the text of a call longer than its model takes."""
    BROKEN = "broken"
    NO_MODEL = "no model"
    NO_KEY = "no key"
    NO_PRIORITY = "no priority"
    """It was not started for priorities, and refuses calls that have one."""


class Server(ScriptedServer):
    """A server of some make; `answers` is what its make says."""

    def __init__(self, make: str, answers: Callable[["Server", Seen], Step]) -> None:
        super().__init__([], Step())
        self.make, self.answers = make, answers
        self.life = Life.READY
        self.version = "1"
        self.score = 3.0
        self.asked: list[str] = []
        """Paths of checks."""

    @property
    def model(self) -> str:
        return NAMES.get(self.make, MODEL)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        self.writers.add(writer)
        try:
            while (seen := await receive(reader, connection)) is not None:
                if seen.method == "POST":
                    self.seen.append(seen)
                else:
                    self.asked.append(seen.path)
                if not await perform(self.answers(self, seen), seen, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()


@contextmanager
def running(make: str, answers: Callable[["Server", Seen], Step] | None = None) -> Iterator[Server]:
    """Run a server of this make in a thread, or one that answers so."""
    server = Server(make, answers or MAKES[make])
    with in_thread(server.serve, stop=server.hang_up) as port:
        server.url = f"http://127.0.0.1:{port}"
        yield server


def said(status: int, body: Any = None, **headers: str) -> Step:
    """A step that answers a JSON document, or nothing."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Step(status=status, headers=named, body=b"" if body is None else orjson.dumps(body))


def triton(server: Server, seen: Seen) -> Step:
    """NVIDIA Triton: health without bodies and with 400; its queue answers 503."""
    unknown = said(400, {"error": "Request for unknown model: 'm' is not found"})
    loading = said(400, {"error": "Request for unknown model: 'm' has no available versions"})
    match server.life, seen.path:
        case Life.NO_KEY, _:
            return said(401)
        case Life.LOADING, "/v2/health/ready" | "/v2/models/m/ready":
            return said(400)
        case Life.NO_MODEL, "/v2/models/m/ready":
            return said(400)
        case _, "/v2/health/ready" | "/v2/models/m/ready":
            return said(200)
        case Life.NO_MODEL, _:
            return unknown
        case Life.LOADING, _:
            return loading
        case Life.OVERLOADED, "/v2/models/m/infer":
            return said(503, {"error": "Exceeds maximum queue size"})
        case Life.BROKEN, "/v2/models/m/infer":
            return said(500, {"error": "onnx runtime error 6: Non-zero status code"})
        case Life.TOO_LONG, "/v2/models/m/infer":
            return said(400, {"error": "input is too long: 900 tokens exceed the context length"})
    return _oip(server, seen, version=server.version)


def kserve(server: Server, seen: Seen) -> Step:
    """KServe's Python server behind Knative: 503 while it loads, no versions, plain words."""
    match server.life, seen.path:
        case Life.NO_KEY, _:
            return said(403)
        case Life.LOADING, "/v2/health/ready":
            return said(200, {"ready": False})
        case _, "/v2/health/ready":
            return said(200, {"ready": True})
        case Life.LOADING, _:
            return said(503, {"error": "Model with name m is not ready."})
        case Life.NO_MODEL, _:
            return said(404, {"error": "Model with name m does not exist."})
        case _, "/v2/models/m/ready":
            return said(200, {"name": "m", "ready": True})
        case Life.OVERLOADED, "/v2/models/m/infer":
            return Step(status=503, body=b"pending request queue full")
        case Life.BROKEN, "/v2/models/m/infer":
            return said(500, {"error": "RuntimeError : CUDA error"})
        case Life.TOO_LONG, "/v2/models/m/infer":
            return said(400, {"error": "the sequence is too long: maximum sequence length is 512"})
    return _oip(server, seen, version=None)


def mlserver(server: Server, seen: Seen) -> Step:
    """MLServer: FastAPI, 400 while it loads."""
    match server.life, seen.path:
        case Life.NO_KEY, _:
            return said(401, {"error": "unauthorized"})
        case Life.LOADING, "/v2/models/m/ready":
            return said(400)
        case Life.LOADING, "/v2/models/m/infer":
            return said(400, {"error": "Model m is not ready yet."})
        case Life.NO_MODEL, path if path.startswith("/v2/models/"):
            return said(404, {"error": "Model m not found"})
        case _, "/v2/health/ready" | "/v2/models/m/ready":
            return said(200)
        case Life.OVERLOADED, "/v2/models/m/infer":
            return said(429, {"error": "too many requests"}, Retry_After="7")
        case Life.BROKEN, "/v2/models/m/infer":
            return said(500, {"error": "builtins.RuntimeError: CUDA out of memory"})
        case Life.TOO_LONG, "/v2/models/m/infer":
            return said(422, {"detail": "text was too long"})
    return _oip(server, seen, version=server.version)


def vllm(server: Server, seen: Seen) -> Step:
    """vLLM: errors with a type, a 400 for priorities it does not know, 503 once its engine died."""
    match server.life, seen.path:
        case Life.LOADING, "/health":
            return said(503)
        case Life.LOADING, path if path == CHAT_PATH:
            return said(503, {"error": {"message": "The model is still loading", "code": 503}})
        case _, "/health":
            return said(200)
        case Life.NO_KEY, _:
            return said(401, {"error": "Unauthorized"})
        case Life.NO_MODEL, "/v1/models":
            return listed("org/other")
        case _, "/v1/models":
            return listed(MODEL)
        case Life.NO_MODEL, _:
            return typed(404, "NotFoundError", f"The model `{MODEL}` does not exist.")
        case _, path if path != CHAT_PATH:
            return said(404, {"detail": "Not Found"})
        case Life.OVERLOADED, _:
            return said(429, {"error": {"message": "Too many requests"}}, Retry_After="7")
        case Life.BROKEN, _:
            return typed(500, "InternalServerError", "EngineCore encountered an issue.")
        case Life.TOO_LONG, _:
            words = (
                "This model's maximum context length is 4096 tokens. However, you requested 5000"
            )
            return typed(400, "BadRequestError", words)
        case Life.NO_PRIORITY, _ if seen.json().get("priority"):
            words = (
                f"Got priority {seen.json()['priority']} but Priority scheduling is not enabled."
            )
            return typed(400, "BadRequestError", words)
    return _chat(server, seen, service_tier=None, prompt_logprobs=None)


def sglang(server: Server, seen: Seen) -> Step:
    """SGLang: messages without `error` around them, its queue answers 503."""

    def refuses(status: int, words: str) -> Step:
        return said(status, {"object": "error", "message": words, "type": "x", "code": status})

    match server.life, seen.path:
        case Life.LOADING, "/health":
            return said(503)
        case Life.LOADING, path if path == CHAT_PATH:
            return refuses(503, "The server is not ready")
        case _, "/health":
            return said(200)
        case Life.NO_KEY, _:
            return said(401, {"error": "Unauthorized"})
        case Life.NO_MODEL, "/v1/models":
            return listed("org/other")
        case _, "/v1/models":
            return listed(MODEL)
        case Life.NO_MODEL, _:
            return refuses(404, "The model does not exist.")
        case _, path if path != CHAT_PATH:
            return said(404, {"detail": "Not Found"})
        case Life.OVERLOADED, _:
            return refuses(503, "The request queue is full.")
        case Life.BROKEN, _:
            return refuses(500, "Internal server error")
        case Life.TOO_LONG, _:
            return refuses(400, "The input (5000 tokens) is longer than the model's context length")
        case Life.NO_PRIORITY, _ if "priority" in seen.json():
            words = "Using priority is disabled for this server. Please send a new request without"
            return refuses(503, words)
    return _chat(server, seen, metadata={"weight_version": "default"})


def llama_cpp(server: Server, seen: Seen) -> Step:
    """llama.cpp's server: takes any model name, answers 503 to nearly all while it loads."""

    def refuses(status: int, kind: str, words: str) -> Step:
        return said(status, {"error": {"code": status, "message": words, "type": kind}})

    match server.life, seen.path:
        case _, "/v1/models":
            return listed(MODEL, models=[{"name": MODEL, "type": "model"}])
        case Life.LOADING, _:
            return refuses(503, "unavailable_error", "Loading model")
        case _, "/health":
            return said(200, {"status": "ok"})
        case Life.NO_KEY, _:
            return refuses(401, "authentication_error", "Invalid API Key")
        case _, path if path != CHAT_PATH:
            return refuses(404, "not_found_error", "File Not Found")
        case Life.OVERLOADED, _:
            return refuses(503, "unavailable_error", "no slot available")
        case Life.BROKEN, _:
            return refuses(500, "server_error", "failed to decode the batch")
        case Life.TOO_LONG, _:
            words = "request (9412 tokens) exceeds the available context size (8192 tokens)"
            return refuses(400, "exceed_context_size_error", words)
    return _chat(server, seen, system_fingerprint="b6500-0a1b2c3d", timings={})


MAKES: Mapping[str, Callable[[Server, Seen], Step]] = {
    "triton": triton,
    "kserve": kserve,
    "mlserver": mlserver,
    "vllm": vllm,
    "sglang": sglang,
    "llama.cpp": llama_cpp,
}
OIP = ("triton", "kserve", "mlserver")
CHAT = ("vllm", "sglang", "llama.cpp")


def _oip(server: Server, seen: Seen, *, version: str | None) -> Step:
    """Metadata, or one score a row."""
    tensor = {"datatype": "BYTES", "shape": [-1, 1]}
    if seen.method == "GET":
        document = {
            "name": "m",
            "platform": "x_y",
            "inputs": [{"name": "query", **tensor}, {"name": "text", **tensor}],
            "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1, 1]}],
        }
        return said(200, document | ({"versions": [version]} if version else {}))
    request = seen.json()
    rows = request["inputs"][0]["shape"][0]
    output = {"name": "score", "datatype": "FP32", "shape": [rows, 1]}
    answer = {
        "model_name": "m",
        "model_version": version,
        "id": request["id"],
        "parameters": None if version is None else {},
        "outputs": [{**output, "data": [server.score] * rows}],
    }
    return said(200, answer)


def listed(name: str, **more: Any) -> Step:
    each = {"id": name, "object": "model", "created": 1, "owned_by": "x"}
    return said(200, {"object": "list", "data": [each], **more})


def typed(status: int, kind: str, words: str) -> Step:
    return said(status, {"error": {"message": words, "type": kind, "param": None, "code": status}})


def _chat(server: Server, seen: Seen, **more: Any) -> Step:
    message = {"role": "assistant", "content": f'{{"score": {server.score}}}', "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": seen.json()["model"],
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1},
        **more,
    }
    return said(200, answer)
