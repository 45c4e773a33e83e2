"""Reading request bodies: files of rows as a stream, JSON whole and bounded, without Django's own.

`request.body` would hold an upload in memory, and Django's stream knows no chunked encoding, so
bodies are read from `wsgi.input` in pieces, and gzip is undone piece by piece: every limit holds
for the bytes that come out. Rows inside a JSON body are not decoded here: each
element goes on as the very bytes that were sent, one a line, so that both forms of a workflow
give equal rows, equal fingerprints and equal refusals.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from django.conf import settings
from django.http import HttpRequest
from rest_framework.request import Request

from fulfillment.decompression import gunzipped
from fulfillment.errors import (
    BadUpload,
    InvalidFields,
    MalformedBody,
    UnsupportedMediaType,
    UploadTooLarge,
)
from fulfillment.formats import Format

PIECE: Final = 64 << 10
DRAINED: Final = 16 << 20
"""Bytes read off after a refusal, so that a client that is still sending gets to see it."""
MAX_DEPTH: Final = 100
JSON_TYPE: Final = "application/json"
NDJSON_TYPES: Final = ("application/x-ndjson", "application/ndjson", "application/jsonl")
CSV_TYPE: Final = "text/csv"
PARQUET_TYPE: Final = "application/vnd.apache.parquet"
FILE_TYPES: Final[Mapping[str, Format]] = {
    **dict.fromkeys(NDJSON_TYPES, Format.NDJSON),
    CSV_TYPE: Format.CSV,
    PARQUET_TYPE: Format.PARQUET,
}
"""Media types of files of rows, which are streamed; rows may also come in JSON."""
ENCODINGS: Final = ("gzip", "x-gzip", "identity", "")
MAX_KEY_CHARACTERS: Final = 255
MAX_SMALL_BYTES: Final = 1 << 20
"""Bytes of a JSON body without rows."""

_BOM = b"\xef\xbb\xbf"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
# A pair of surrogate escapes, a lone one, or any other escape.
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.",
    re.DOTALL,
)
_LONE_SURROGATE = rb"\ud800"
_STAND_INS = tuple(
    rb"\u" + f + d + e + b"0" for f in (b"f", b"F") for d in (b"d", b"D") for e in (b"d", b"D")
)
"""Spellings of U+FDD0, which is no character."""
# Possessive, an open string to the end: a hostile body must not make it go back and try again.
_NOT_FINITE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|(-?(?:NaN|Infinity))', re.DOTALL)


def content_type(request: HttpRequest, *, taken: Iterable[str]) -> str:
    """Return the body's media type; raise UnsupportedMediaType naming what is taken."""
    taken = tuple(taken)
    kind, _, parameters = request.headers.get("Content-Type", "").partition(";")
    kind = kind.strip().lower()
    charset = re.search(r'charset\s*=\s*"?([^\s";]+)', parameters, re.IGNORECASE)
    if kind not in taken:
        raise UnsupportedMediaType(
            f"Content-Type {kind or 'is missing'}: this takes {', '.join(taken)}.",
            accepted=list(taken),
        )
    if charset and charset[1].lower() not in {"utf-8", "utf8", "us-ascii"}:
        raise UnsupportedMediaType(
            f"charset {charset[1]}: text must be UTF-8.", accepted=list(taken)
        )
    encoding = _encoding(request)
    if encoding not in ENCODINGS:
        raise UnsupportedMediaType(
            f"Content-Encoding {encoding} is not taken; send gzip, or the body as it is.",
            code="unsupported_content_encoding",
            accepted=["gzip", "identity"],
        )
    return kind


def idempotency_key(request: HttpRequest) -> str | None:
    """Return the client's Idempotency-Key, None without one."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not key or len(key) > MAX_KEY_CHARACTERS or not (key.isascii() and key.isprintable()):
        detail = f"1 to {MAX_KEY_CHARACTERS} printable ASCII characters"
        raise InvalidFields(
            f"Idempotency-Key must have {detail}.",
            errors=[{"field": "Idempotency-Key", "code": "bad_key", "detail": detail}],
        )
    return key


def stream(request: HttpRequest, *, limit: int | None = None) -> Iterator[bytes]:
    """Yield the body in pieces, decompressed.

    Raises UploadTooLarge, or MalformedBody if it ends too early or is no gzip where it says so.
    """
    limit = settings.AIRS_MAX_UPLOAD_BYTES if limit is None else limit
    expected = _expected(request)
    if expected is not None and expected > limit:
        raise _too_large(limit)
    pieces = _pieces(_reader(request), expected, limit)
    return gunzipped(pieces, limit=limit) if "gzip" in _encoding(request) else pieces


def _encoding(request: HttpRequest) -> str:
    return request.headers.get("Content-Encoding", "").strip().lower()


def drain(request: HttpRequest) -> None:
    """Read what is left of a refused body, up to a bound; the server closes on what is beyond.

    A server that closes a connection with unread bytes resets it, and the client may lose the
    answer that says why.
    """
    if not request.META.get("wsgi.input_terminated"):
        return  # reading beyond the body would wait for the next request
    read = _reader(request)
    left = DRAINED
    try:
        while left > 0 and (piece := read(PIECE)):
            left -= len(piece)
    except Exception:  # the client is gone, or sends rubbish: the server closes
        return


class JsonBody:
    """A JSON object whose members are decoded one by one, when asked for."""

    def __init__(self, members: Mapping[str, msgspec.Raw], stand_in: bytes | None) -> None:
        self._members = members
        self._stand_in = stand_in

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def values(self, *, leaving: Iterable[str] = ()) -> dict[str, Any]:
        """Return all members but those in `leaving` as Python values."""
        left = frozenset(leaving)
        return {
            name: _value(name, bytes(raw), self._stand_in)
            for name, raw in self._members.items()
            if name not in left
        }

    def lines(self, name: str) -> Iterator[bytes]:
        """Yield the elements of a list as NDJSON lines, byte for byte as sent."""
        try:
            elements = _LIST.decode(self._members[name])
        except msgspec.ValidationError as error:
            raise _bad_member(name, "bad_type", "must be a list") from error
        return _lines(elements, self._stand_in)


def json_object(request: HttpRequest, *, limit: int) -> JsonBody:
    """Read a body that must be a JSON object."""
    return JsonBody(*_decoded(_whole(request, limit), _OBJECT.decode, "an object"))


def json_rows(request: HttpRequest, *, limit: int) -> Iterator[bytes]:
    """Read a body that is a list of rows, or `{"requests": [...]}`; yield NDJSON lines."""
    text = _whole(request, limit)
    if text.lstrip().startswith(b"["):
        return _lines(*_decoded(text, _LIST.decode, "a list"))
    body = JsonBody(*_decoded(text, _OBJECT.decode, "a list of rows"))
    refuse_unknown(body.values(leaving=["requests"]), known=["requests"])
    if "requests" not in body:
        raise _bad_member("requests", "missing_field", "is missing")
    return body.lines("requests")


def _lines(elements: Iterable[msgspec.Raw], stand_in: bytes | None) -> Iterator[bytes]:
    """Yield raw JSON values as lines: line n is element n.

    A line break can only stand between JSON tokens, where a blank serves as well.
    """
    for element in elements:
        line = bytes(element).replace(b"\n", b" ") + b"\n"
        yield line if stand_in is None else line.replace(stand_in, _LONE_SURROGATE)


def refuse_unknown(given: Iterable[str], *, known: Iterable[str]) -> None:
    """Raise InvalidFields naming every name that is not known."""
    known = sorted(known)
    unknown = sorted(set(given) - set(known))
    if unknown:
        detail = f"known are {', '.join(known)}" if known else "this takes none"
        raise InvalidFields(
            f"Unknown: {', '.join(name[:64] for name in unknown)}.",
            code="unknown_field" if len(unknown) == 1 else None,
            errors=[
                {"field": name[:64], "code": "unknown_field", "detail": detail} for name in unknown
            ],
        )


def query(request: Request, *, known: Iterable[str]) -> dict[str, str]:
    """Return the query parameters; raise InvalidFields for unknown or repeated ones."""
    parameters = request.query_params
    refuse_unknown(parameters, known=known)
    for name in parameters:
        values = parameters.getlist(name)
        if len(values) > 1:
            raise _bad_member(name, "repeated", "given more than once")
        if "\0" in values[0]:
            raise _bad_member(name, "bad_character", "holds a NUL")
    return {name: parameters[name] for name in parameters}


def _whole(request: HttpRequest, limit: int) -> bytes:
    text = b"".join(stream(request, limit=limit)).removeprefix(_BOM)
    if text.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in text[:2]:
        raise BadUpload("The body is UTF-16 or UTF-32; send UTF-8.", code="unsupported_encoding")
    return text


def _decoded(text: bytes, decode: Callable[[bytes], Any], what: str) -> tuple[Any, bytes | None]:
    """Decode the outer level of a JSON text; return it with the stand-in of lone surrogates.

    Lone surrogates spoil a row, not a body, but the decoder takes none: it gets a text with an
    escape in their place that the body does not use, and `_lines` puts one back.
    """
    try:
        return _outer_level(text, decode, what), None
    except MalformedBody:
        for token in _NOT_FINITE.finditer(text):
            if token[1]:
                raise MalformedBody(
                    f"{token[1].decode()} is not a JSON number; leave the field out.",
                    code="bad_number",
                ) from None
        stand_in = next((escape for escape in _STAND_INS if escape not in text), None)
        if stand_in is None:
            raise
        repaired = _ESCAPES.sub(
            lambda escape: stand_in if len(escape[0]) == len(stand_in) else escape[0], text
        )
        if repaired == text:
            raise
    return _outer_level(repaired, decode, what), stand_in


def _outer_level(text: bytes, decode: Callable[[bytes], Any], what: str) -> Any:
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise MalformedBody(f"The body must be {what}.") from error
    except RecursionError as error:
        raise MalformedBody(f"JSON may be nested {MAX_DEPTH} levels deep.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"The body is not JSON: {error}.") from error


def _value(name: str, raw: bytes, stand_in: bytes | None) -> Any:
    if stand_in is not None and stand_in in raw:
        raise _bad_member(name, "bad_character", "holds half a surrogate pair")
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError as error:  # 1e999
        raise _bad_member(name, "bad_number", "a number is beyond a double") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_member(name, "bad_character", "holds what is no UTF-8 text") from error
    if _depth(value) > MAX_DEPTH:
        raise _bad_member(name, "too_deep", f"nested more than {MAX_DEPTH} levels deep")
    return value


def _bad_member(name: str, code: str, detail: str) -> InvalidFields:
    return InvalidFields(
        f"{name}: {detail}.",
        code=code,
        errors=[{"field": name, "code": code, "detail": detail}],
    )


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _expected(request: HttpRequest) -> int | None:
    """Return the announced length, None for a body that ends by itself (chunked)."""
    text = request.META.get("CONTENT_LENGTH") or ""
    if text.isdecimal():
        return int(text)
    return None if request.META.get("wsgi.input_terminated") else 0


def _reader(request: HttpRequest) -> Callable[[int], bytes]:
    read: Callable[[int], bytes] = request.META["wsgi.input"].read
    return read


def _pieces(read: Callable[[int], bytes], expected: int | None, limit: int) -> Iterator[bytes]:
    taken = 0
    while expected is None or taken < expected:
        try:
            piece = read(PIECE if expected is None else min(PIECE, expected - taken))
        except Exception as error:  # whatever the server raises when the client is gone
            raise _truncated(taken, expected) from error
        if not piece:
            break
        taken += len(piece)
        if taken > limit:
            raise _too_large(limit)
        yield piece
    if expected is not None and taken < expected:
        raise _truncated(taken, expected)


def _truncated(taken: int, expected: int | None) -> MalformedBody:
    of = "" if expected is None else f" of {expected}"
    return MalformedBody(
        f"The upload ended after {taken}{of} bytes; nothing of it was stored.",
        code="truncated_upload",
    )


def _too_large(limit: int) -> UploadTooLarge:
    return UploadTooLarge(f"The body has more than {limit} bytes.", limit_bytes=limit)
