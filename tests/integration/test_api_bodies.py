import gzip
import io
import json
import tracemalloc
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from django.http import HttpRequest
from django.test import RequestFactory
from hypothesis import given
from hypothesis import strategies as st

from fulfillment import api_bodies, decompression
from fulfillment.errors import (
    BadUpload,
    FulfillmentError,
    InvalidFields,
    MalformedBody,
    UploadTooLarge,
)

# Text with all that JSON can spell: halves of surrogate pairs, noncharacters, backslashes.
texts = st.text(
    st.characters() | st.sampled_from(["\ud800", "\udfff", "\ufdd0", "\\", '"', "\n", "\0"])
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def request(body: bytes, **environ: Any) -> HttpRequest:
    return RequestFactory().generic("POST", "/", body, content_type="application/json", **environ)


def one_surrogate(value: Any) -> Any:
    """Return a value with every half of a pair replaced by the same one."""
    if isinstance(value, str):
        return "".join("\ud800" if "\ud800" <= c <= "\udfff" else c for c in value)
    if isinstance(value, list):
        return [one_surrogate(v) for v in value]
    if isinstance(value, dict):
        return {one_surrogate(k): one_surrogate(v) for k, v in value.items()}
    return value


@given(rows=st.lists(values, max_size=4), indent=st.sampled_from([None, 2]), ascii_=st.booleans())
def test_each_element_of_a_list_becomes_one_line_that_says_the_same(
    rows: list[Any], indent: int | None, ascii_: bool
) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_)
    # Raw text cannot hold half a pair, an escape can.
    body = "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text).encode()

    lines = list(api_bodies.json_rows(request(body), limit=1 << 20))

    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in lines)
    assert [one_surrogate(json.loads(line)) for line in lines] == one_surrogate(json.loads(text))


@given(st.binary(max_size=200))
def test_whatever_is_sent_is_read_or_refused(body: bytes) -> None:
    with suppress(BadUpload, InvalidFields, MalformedBody):
        list(api_bodies.json_rows(request(body), limit=1 << 20))
    with suppress(BadUpload, InvalidFields, MalformedBody):
        api_bodies.json_object(request(body), limit=1 << 20).values()


def test_number_tokens_reach_the_rows_untouched() -> None:
    body = (
        b'{"requests": [{"context": {"a": 1.10, "b": 1e2, "c": 123456789012345678901234567890}}]}'
    )

    (line,) = api_bodies.json_rows(request(body), limit=1 << 20)

    assert line == b'{"context": {"a": 1.10, "b": 1e2, "c": 123456789012345678901234567890}}\n'


def test_text_that_looks_like_a_stand_in_survives_beside_half_a_pair() -> None:
    body = rb'[{"a": "\ufdd0 \ud800 \\ufdd0"}]'

    (line,) = api_bodies.json_rows(request(body), limit=1 << 20)

    assert line == rb'{"a": "\ufdd0 \ud800 \\ufdd0"}' + b"\n"


def test_a_body_that_uses_every_stand_in_is_refused_rather_than_changed() -> None:
    spellings = rb"\ufdd0\ufdD0\ufDd0\ufDD0\uFdd0\uFdD0\uFDd0\uFDD0"

    with pytest.raises(MalformedBody):
        api_bodies.json_rows(request(b'["' + spellings + rb'\ud800"]'), limit=1 << 20)


class Pieces(io.RawIOBase):
    """A body that remembers how it was read, and may die."""

    def __init__(self, data: bytes, *, dies: bool = False) -> None:
        self.data, self.dies, self.asked = io.BytesIO(data), dies, list[int]()

    def read(self, size: int = -1) -> bytes:
        self.asked.append(size)
        piece = self.data.read(size)
        if not piece and self.dies:
            raise ConnectionResetError
        return piece


def streamed(body: Pieces, length: int | None, *, limit: int = 1 << 30) -> list[bytes]:
    sent = request(b"")
    sent.META |= {"wsgi.input": body, "wsgi.input_terminated": True}
    sent.META["CONTENT_LENGTH"] = "" if length is None else str(length)
    return list(api_bodies.stream(sent, limit=limit))


def test_a_stream_is_read_in_bounded_pieces_and_never_beyond_its_length() -> None:
    data = b"x" * (3 * api_bodies.PIECE + 5)
    body = Pieces(data + b"the next request")

    assert b"".join(streamed(body, len(data))) == data
    assert max(body.asked) == api_bodies.PIECE


@pytest.mark.parametrize("dies", [False, True])
def test_a_stream_that_ends_early_is_refused(dies: bool) -> None:
    with pytest.raises(MalformedBody) as refusal:
        streamed(Pieces(b"12345", dies=dies), 6)

    assert refusal.value.code == "truncated_upload"


def test_a_chunked_stream_is_stopped_at_the_limit() -> None:
    body = Pieces(b"x" * (10 * api_bodies.PIECE))

    with pytest.raises(FulfillmentError) as refusal:
        streamed(body, None, limit=2 * api_bodies.PIECE)

    assert refusal.value.code == "payload_too_large"
    assert len(body.asked) == 3


def test_draining_stops_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_bodies, "DRAINED", 3 * api_bodies.PIECE)
    body = Pieces(b"x" * (10 * api_bodies.PIECE))
    sent = request(b"")
    sent.META |= {"wsgi.input": body, "wsgi.input_terminated": True}

    api_bodies.drain(sent)

    assert len(body.asked) == 3


# gzip


def gunzipped(body: bytes, places: Sequence[int] = (), *, limit: int = 1 << 30) -> bytes:
    ends = sorted(place % (len(body) + 1) for place in places)
    pieces = [body[a:b] for a, b in zip([0, *ends], [*ends, len(body)], strict=True)]
    return b"".join(decompression.gunzipped(pieces, limit=limit))


def refused(body: bytes, *, limit: int = 1 << 30) -> tuple[int, str]:
    with pytest.raises(FulfillmentError) as refusal:
        gunzipped(body, limit=limit)
    return refusal.value.status, refusal.value.code


@given(
    members=st.lists(st.binary(max_size=300) | st.just(b"x" * 200_000), max_size=3),
    places=st.lists(st.integers(0, 100_000), max_size=6),
    level=st.sampled_from([0, 1, 9]),
    padding=st.sampled_from([b"", bytes(100)]),
)
def test_members_of_gzip_are_one_stream_wherever_it_is_cut(
    members: list[bytes], places: list[int], level: int, padding: bytes
) -> None:
    body = b"".join(gzip.compress(member, level) for member in members)

    assert gunzipped(body + (padding if body else b""), places) == b"".join(members)


@given(st.binary(max_size=200))
def test_any_bytes_are_gzip_or_are_refused(body: bytes) -> None:
    with suppress(MalformedBody):
        gunzipped(body)
    with suppress(MalformedBody):
        gunzipped(gzip.compress(b"x") + body)
    with suppress(MalformedBody):
        gunzipped(gzip.compress(b"x" * 1000)[: len(body)] + body)


WHOLE = gzip.compress(b"some text " * 1000, mtime=0)


@pytest.mark.parametrize("end", [1, 9, 10, 20, len(WHOLE) - 8, len(WHOLE) - 1])
def test_gzip_that_breaks_off_is_truncated(end: int) -> None:
    assert refused(WHOLE[:end]) == (400, "truncated_upload")
    assert refused(WHOLE + WHOLE[:end]) == (400, "truncated_upload")


@pytest.mark.parametrize(
    "body",
    [
        b"no gzip",
        zlib.compress(b"zlib is not gzip"),
        WHOLE + b"rubbish",
        WHOLE[:-8] + bytes([WHOLE[-8] ^ 1]) + WHOLE[-7:],
        WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]),
        WHOLE[:12] + bytes([WHOLE[12] ^ 255]) + WHOLE[13:],
    ],
)
def test_broken_gzip_is_told_apart(body: bytes) -> None:
    assert refused(body) == (400, "bad_encoding")


def test_what_comes_out_is_limited_to_the_byte() -> None:
    assert len(gunzipped(WHOLE, limit=10_000)) == 10_000
    assert refused(WHOLE, limit=9_999) == (413, "decompressed_too_large")


def test_a_bomb_does_not_fill_memory() -> None:
    bomb = gzip.compress(bytes(64 << 20))

    sizes: list[int] = []

    tracemalloc.start()
    try:
        with pytest.raises(UploadTooLarge):
            sizes.extend(map(len, decompression.gunzipped([bomb], limit=32 << 20)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert max(sizes) <= decompression.PIECE
    assert peak < 1 << 20


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
def test_a_json_body_may_be_gzip_too(encoding: str) -> None:
    sent = request(gzip.compress(b'[{"a": 1}]'), HTTP_CONTENT_ENCODING=encoding)

    assert list(api_bodies.json_rows(sent, limit=100)) == [b'{"a": 1}\n']
    with pytest.raises(UploadTooLarge) as refusal:
        api_bodies.json_object(
            request(gzip.compress(b" " * 1000), HTTP_CONTENT_ENCODING="gzip"), limit=100
        )
    assert refusal.value.code == "decompressed_too_large"
