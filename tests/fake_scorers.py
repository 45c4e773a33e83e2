"""External servers that score pairs, for tests: like `fake_servers`, by other endpoints.

Each puts its results into an order of its own, the best first where it ranks. A pair is worth what
`worth` says, and texts have the vectors of `vector`.
"""

import base64
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import hypot
from typing import Any
from zlib import crc32

from tests.fake_servers import MODEL, Life, Server, listed, running, said, typed
from tests.fakes import Seen, Step

DIMENSIONS = 4


def worth(query: str, text: str) -> float:
    """What a reranker says of a pair, 0 to 1."""
    return crc32(text.encode(), crc32(query.encode())) / 0xFFFFFFFF


def vector(text: str) -> list[float]:
    """The embedding of a text; exact in 32 bits."""
    return [float((crc32(text.encode()) >> 8 * n) & 0xFF) + 1 for n in range(DIMENSIONS)]


def cosine(query: str, text: str) -> float:
    """What the embeddings of a pair come to."""
    one, other = vector(query), vector(text)
    return sum(a * b for a, b in zip(one, other, strict=True)) / hypot(*one) / hypot(*other)


def vllm(server: Server, seen: Seen) -> Step:
    """vLLM: all three endpoints with errors of one form, priorities where it was started so."""
    match server.life, seen.path:
        case Life.LOADING, "/health":
            return said(503)
        case _, "/health":
            return said(200)
        case Life.NO_KEY, _:
            return said(401, {"error": "Unauthorized"})
        case _, "/v1/models":
            return listed(MODEL)
        case Life.LOADING, _:
            return said(503, {"error": {"message": "The model is still loading", "code": 503}})
        case Life.NO_MODEL, _:
            return typed(404, "NotFoundError", f"The model `{MODEL}` does not exist.")
        case Life.OVERLOADED, _:
            return said(429, {"error": {"message": "Too many requests"}}, Retry_After="7")
        case Life.BROKEN, _:
            return typed(500, "InternalServerError", "EngineCore encountered an issue.")
        case Life.TOO_LONG, _ if "long" in seen.body.decode():
            words = "This model's maximum context length is 512 tokens. However, you requested 600"
            return typed(400, "BadRequestError", words)
        case Life.NO_PRIORITY, _ if seen.json().get("priority"):
            words = "Got priority 50 but Priority scheduling is not enabled."
            return typed(400, "BadRequestError", words)
        case _, "/v1/score":
            return _vllm_score(seen)
        case _, "/rerank" | "/v1/rerank" | "/v2/rerank":
            ranked = [
                {"index": index, "document": {"text": text}, "relevance_score": score}
                for index, text, score in _ranked(seen, "documents")
            ]
            return said(200, {"id": "rerank-1", "model": MODEL, "usage": {}, "results": ranked})
        case _, "/v1/embeddings":
            return _embeddings(seen, model=MODEL)
    return said(404, {"detail": "Not Found"})


def sglang(server: Server, seen: Seen) -> Step:
    """SGLang: a bare list that names no model, at /v1/rerank alone."""
    match seen.path:
        case "/health":
            return said(200)
        case "/v1/models":
            return listed(MODEL)
        case "/v1/rerank":
            ranked = [
                {"score": score, "document": text, "index": index, "meta_info": {"id": "x"}}
                for index, text, score in _ranked(seen, "documents")
            ]
            return said(200, ranked)
    return said(404, {"detail": "Not Found"})


def llama_cpp(server: Server, seen: Seen) -> Step:
    """llama.cpp's server: what is too long for it is an error of its own, with 500."""
    match server.life, seen.path:
        case _, "/health":
            return said(200, {"status": "ok"})
        case _, "/v1/models":
            return listed(MODEL)
        case Life.LOADING, _:
            error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
            return said(503, {"error": error})
        case Life.TOO_LONG, _ if "long" in seen.body.decode():
            words = (
                "input (600 tokens) is too large to process. increase the physical batch size "
                "(current batch size: 512)"
            )
            return said(500, {"error": {"code": 500, "message": words, "type": "server_error"}})
        case _, "/v1/rerank" | "/rerank":
            ranked = [
                {"index": index, "relevance_score": score}
                for index, _, score in _ranked(seen, "documents")
            ]
            return said(200, {"model": MODEL, "object": "list", "usage": {}, "results": ranked})
        case _, "/v1/embeddings":
            return _embeddings(seen, packed=True, model=MODEL)
    return said(404, {"error": {"message": "File Not Found"}})


def tei(server: Server, seen: Seen) -> Step:
    """Text Embeddings Inference: no list of models, 413 for what it finds invalid, few at once."""
    match server.life, seen.path:
        case Life.LOADING, _:
            return said(503, {"error": "unhealthy", "error_type": "unhealthy"})
        case _, "/health":
            return said(200)
        case Life.TOO_LONG, _ if "long" in seen.body.decode():
            words = "Input validation error: `inputs` must have less than 512 tokens. Given: 600"
            return said(413, {"error": words, "error_type": "Validation"})
        case _, "/rerank":
            texts = seen.json()["texts"]
            if len(texts) > 2:
                words = f"batch size {len(texts)} > maximum allowed batch size 2"
                return said(413, {"error": words, "error_type": "Validation"})
            ranked = [
                {"index": index, "score": score} for index, _, score in _ranked(seen, "texts")
            ]
            return said(200, ranked)
        case _, "/v1/embeddings":
            return _embeddings(seen, model="BAAI/bge-m3")
    return said(404)


def hosted(server: Server, seen: Seen) -> Step:
    """A hosted service as Cohere (`/v2`) and Jina (`/v1`) write them: a key, no health."""
    match seen.path:
        case "/v1/models":
            return listed(MODEL)
        case "/v1/rerank" | "/v2/rerank":
            ranked = [
                {"index": index, "relevance_score": score}
                for index, _, score in _ranked(seen, "documents")
            ]
            more: dict[str, Any] = (
                {"model": MODEL} if seen.path == "/v1/rerank" else {"meta": {"warnings": []}}
            )
            return said(200, {"id": "1", "results": ranked, **more})
    return said(404, {"message": "not found"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """A make of server, and how it is registered."""

    endpoint: str
    answers: Callable[[Server, Seen], Step]
    base: str = ""
    """What an operator writes behind the host."""
    version: str = MODEL
    """What its answers call the model."""
    value: Callable[[str, str], float] = worth


SCORERS: Mapping[str, Scorer] = {
    "vllm score": Scorer(endpoint="score", answers=vllm),
    "vllm rerank": Scorer(endpoint="rerank", answers=vllm),
    "vllm embeddings": Scorer(endpoint="embeddings", answers=vllm, base="/v1", value=cosine),
    "sglang rerank": Scorer(endpoint="rerank", answers=sglang, base="/v1", version=""),
    "llama.cpp rerank": Scorer(endpoint="rerank", answers=llama_cpp, base="/v1"),
    "llama.cpp embeddings": Scorer(endpoint="embeddings", answers=llama_cpp, value=cosine),
    "tei rerank": Scorer(endpoint="tei_rerank", answers=tei, version=""),
    "tei embeddings": Scorer(
        endpoint="embeddings", answers=tei, version="BAAI/bge-m3", value=cosine
    ),
    "cohere": Scorer(endpoint="rerank", answers=hosted, base="/v2", version=""),
    "jina": Scorer(endpoint="rerank", answers=hosted, base="/v1"),
}


@contextmanager
def scoring(make: str) -> Iterator[tuple[Server, Scorer]]:
    """Run a server of this make in a thread; its `url` is as an operator writes it."""
    scorer = SCORERS[make]
    with running(make, scorer.answers) as server:
        server.url += scorer.base
        yield server, scorer


def _vllm_score(seen: Seen) -> Step:
    request = seen.json()
    pairs = list(zip(request["text_1"], request["text_2"], strict=True))
    data = [
        {"index": index, "object": "score", "score": worth(query, text)}
        for index, (query, text) in enumerate(pairs)
    ]
    usage = {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0}
    answer = {"id": "score-1", "object": "list", "created": 1, "model": request["model"]}
    return said(200, {**answer, "data": data, "usage": usage})


def _ranked(seen: Seen, name: str) -> Sequence[tuple[int, str, float]]:
    """Place, text and worth of each document, the best first."""
    request = seen.json()
    ranked = [
        (index, text, worth(request["query"], text)) for index, text in enumerate(request[name])
    ]
    return sorted(ranked, key=lambda each: -each[2])


def _embeddings(seen: Seen, *, packed: bool = False, **more: Any) -> Step:
    """The vectors of the inputs, the last one first."""

    def written(text: str) -> Any:
        if not packed:
            return vector(text)
        return base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *vector(text))).decode()

    data = [
        {"object": "embedding", "index": index, "embedding": written(text)}
        for index, text in enumerate(seen.json()["input"])
    ]
    return said(200, {"object": "list", "data": data[::-1], "usage": {"prompt_tokens": 1}, **more})
