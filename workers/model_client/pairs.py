"""What an OpenAI-compatible server is sent that scores pairs of texts, and what its answers hold.

It takes the same calls as an Open Inference Protocol model with inputs `query` and `text` and the
output `score`, so that the same plug-ins use it. `/v1/score` takes all pairs of a call at once,
`/v1/embeddings` all its texts (the cosine is computed here), `/rerank` one query with its texts: a
call with several queries is sent as several requests.

Answers are sorted by what the server thinks of them: only `index` tells whose a number is.
"""

import base64
import binascii
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, isfinite, nan
from operator import mul
from typing import Any, Final

import orjson

from workers.autoraters.protocol import OipCall
from workers.model_client.answers import (
    error_in_200,
    error_text,
    other_version,
    parse,
    unusable,
)
from workers.model_client.chat import reported_version
from workers.model_client.endpoint import PATHS
from workers.model_client.outcomes import CallOutcome, Verdict

SCORE: Final = "score"
RERANK: Final = "rerank"
TEI_RERANK: Final = "tei_rerank"
EMBEDDINGS: Final = "embeddings"

_INPUTS: Final = {"query", "text"}
_OUTPUTS: Final = {"score"}
_ITEM: Final = "f"
"""Base64 holds 32-bit floats, little-endian as all machines are that we run on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a call."""

    document: Mapping[str, Any]
    rows: Sequence[int]
    """The call's rows that it scores, in the order in which it names them."""
    texts: int
    """How many numbers or vectors have to come back."""
    places: Sequence[tuple[int, int]] = ()
    """Of embeddings: where each row's query and text stand among the texts that were sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What one request came to: a score for each of its rows, and what answered."""

    scores: Sequence[float]
    version: str


def unsupported(call: OipCall, *, endpoint: str) -> Verdict | None:
    """Return why such a server cannot be asked this, None where it can."""
    if call.inputs.keys() == _INPUTS and _OUTPUTS.issuperset(call.outputs):
        return None
    wanted = ", ".join([*call.inputs, *call.outputs])
    return Verdict(
        outcome=CallOutcome.PAUSE,
        code="unsupported_call",
        detail=f"{PATHS[endpoint]} scores a query and a text; the autorater wants {wanted}",
    )


def requests_of(
    call: OipCall, *, endpoint: str, model_name: str, priority: int | None
) -> list[Request]:
    """Return the requests that a call is made of; `priority` is the server's own number."""
    queries, texts = call.inputs["query"], call.inputs["text"]
    common: dict[str, Any] = {"model": model_name}
    if priority is not None:
        common["priority"] = priority
    if endpoint == SCORE:
        document = {**common, "text_1": queries, "text_2": texts}
        return [Request(document=document, rows=range(len(texts)), texts=len(texts))]
    if endpoint == EMBEDDINGS:
        return [_embedding(common, queries, texts)]
    return [_ranking(common, endpoint, query, texts, rows) for query, rows in _by_query(queries)]


def requests_in(call: OipCall, *, endpoint: str) -> int:
    """Return how many requests a call is made of."""
    if endpoint not in (RERANK, TEI_RERANK):
        return 1
    return max(1, len(set(call.inputs.get("query", ()))))


def body_of(request: Request) -> bytes:
    """Return what is sent; raise orjson.JSONEncodeError for text that is no Unicode."""
    return orjson.dumps(request.document)


def read_scores(
    body: bytes, request: Request, *, endpoint: str, rows: int, expected_version: str
) -> Scored | Verdict:
    """Return the scores of a 200, or why none of them can be used.

    `rows` is how many the call has, of which this request may be a part. With `expected_version` an
    answer that names another version, or none, is refused, whatever is in it.
    """
    document = parse(body)
    if not isinstance(document, dict | list):
        return unusable("bad_answer", "no JSON document: " + error_text(body))
    found = _found(document)
    version = ""
    if isinstance(document, dict):
        if document.get("error") and found is None:
            return error_in_200(error_text(body), rows=rows)
        version = reported_version(document)
    if expected_version and version != expected_version:
        return other_version(version, expected_version)
    if found is None:
        return unusable("incomplete_response", "no list of results")
    ordered = _in_order(found, request.texts)
    if isinstance(ordered, Verdict):
        return ordered
    scores = (_cosines if endpoint == EMBEDDINGS else _numbers)(ordered, request)
    if isinstance(scores, Verdict):
        return scores
    if not all(map(isfinite, scores)):
        return unusable("not_finite", "a score is NaN or infinity, or a vector has no direction")
    return Scored(scores=scores, version=version)


def _by_query(queries: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return each query with its rows, in the order in which they come."""
    rows: dict[str, list[int]] = {}
    for row, query in enumerate(queries):
        rows.setdefault(query, []).append(row)
    return list(rows.items())


def _ranking(
    common: Mapping[str, Any], endpoint: str, query: str, texts: Sequence[str], rows: list[int]
) -> Request:
    documents = [texts[row] for row in rows]
    if endpoint == TEI_RERANK:
        # It has one model and knows no priorities.
        document: dict[str, Any] = {"query": query, "texts": documents}
    else:
        document = {**common, "query": query, "documents": documents, "top_n": len(documents)}
    return Request(document=document, rows=rows, texts=len(documents))


def _embedding(common: Mapping[str, Any], queries: Sequence[str], texts: Sequence[str]) -> Request:
    """Return the request for all texts of a call, each of them once."""
    place = {text: number for number, text in enumerate(dict.fromkeys([*queries, *texts]))}
    return Request(
        document={**common, "input": list(place), "encoding_format": "float"},
        rows=range(len(texts)),
        texts=len(place),
        places=[(place[query], place[text]) for query, text in zip(queries, texts, strict=True)],
    )


def _found(document: Any) -> list[Any] | None:
    """Return the results of an answer: `data`, `results`, or a list as SGLang and TEI give it."""
    if isinstance(document, dict):
        document = document.get("results", document.get("data"))
    return document if isinstance(document, list) else None


def _in_order(found: Sequence[Any], wanted: int) -> list[Mapping[str, Any]] | Verdict:
    """Return the results in the order of what was sent."""
    if len(found) != wanted:
        return unusable("count_mismatch", f"{len(found)} results for {wanted} texts")
    ordered: dict[int, Mapping[str, Any]] = {}
    for result in found:
        index = result.get("index") if isinstance(result, dict) else None
        if type(index) is not int:
            return unusable("bad_index", "a result has no whole number as its index")
        if not 0 <= index < wanted:
            return unusable("bad_index", f"a result has index {str(index)[:20]} of {wanted} texts")
        if index in ordered:
            return unusable("bad_index", f"two results have index {index}")
        ordered[index] = result
    return [ordered[index] for index in range(wanted)]


def _numbers(ordered: Sequence[Mapping[str, Any]], request: Request) -> list[float] | Verdict:
    scores = [result.get("relevance_score", result.get("score")) for result in ordered]
    if not {float, int}.issuperset(map(type, scores)):
        return unusable("bad_type", "a score is something else than a number")
    return _floats(scores)


def _cosines(ordered: Sequence[Mapping[str, Any]], request: Request) -> list[float] | Verdict:
    vectors = [_vector(result.get("embedding")) for result in ordered]
    usable = [vector for vector in vectors if vector]
    if len(usable) != len(vectors):
        return unusable("bad_type", "an embedding is no vector of numbers")
    if len(set(map(len, usable))) > 1:
        return unusable("bad_shape", "embeddings of different lengths")
    lengths = [hypot(*vector) for vector in usable]
    return [
        _cosine(usable[query], usable[text], lengths[query] * lengths[text])
        for query, text in request.places
    ]


def _cosine(one: Sequence[float], other: Sequence[float], lengths: float) -> float:
    """Return the cosine; NaN where a vector has no direction."""
    cosine = sum(map(mul, one, other)) / lengths if lengths else nan
    # Rounding can leave 1.0000000000000002, which a rater with a scale to 1 would have to refuse.
    return min(max(cosine, -1.0), 1.0) if isfinite(cosine) else nan


def _vector(embedding: Any) -> Sequence[float] | None:
    """Return a vector that came as numbers or as Base64, None where it is neither."""
    if isinstance(embedding, str):
        try:
            return array(_ITEM, base64.b64decode(embedding, validate=True))
        except (binascii.Error, ValueError):
            return None
    if not isinstance(embedding, list) or not {float, int}.issuperset(map(type, embedding)):
        return None
    return _floats(embedding)


def _floats(numbers: Sequence[float]) -> list[float]:
    try:
        return list(map(float, numbers))
    except OverflowError:
        return [inf] * len(numbers)
