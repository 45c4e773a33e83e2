"""JSON documents of our own making: rows in the spool, payloads of batches.

orjson, except for integers beyond 64 bits, which it would round: a document with one starts with a
blank, so that the reader knows.
"""

import json
from collections.abc import Sequence
from typing import Any

import orjson

try:
    # The same format at a quarter of zlib's time, where there is a wheel for the platform.
    from isal.isal_zlib import compress as _compress
    from isal.isal_zlib import decompress as _decompress
except ImportError:
    from zlib import compress as _compress
    from zlib import decompress as _decompress

_COMPRESS_FROM = 1_024
_BLANK = 0x20


def dump(value: Any) -> bytes:
    """Return the JSON of a value, numbers exact."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return b" " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def load(document: bytes) -> Any:
    """Return the value of a document that `dump` made."""
    return json.loads(document) if document[:1] == b" " else orjson.loads(document)


def pairs(documents: Sequence[tuple[bytes, str | None]]) -> bytes:
    """Return the document of [[value, hex digits], …] from the document of each value."""
    # By hand: values are large, and neither parsed nor written again.
    parts = [
        b'[%b,"%b"]' % (value, digits.encode()) if digits else b"[%b,null]" % value
        for value, digits in documents
    ]
    marked = [value for value, _ in documents if value[0] == _BLANK]
    return b"%b[%b]" % (b" " if marked else b"", b",".join(parts))


def pack(value: Any) -> bytes:
    """Return the JSON of a value, compressed where that pays."""
    return compressed(dump(value))


def compressed(document: bytes) -> bytes:
    """Return a document, compressed where that pays."""
    if len(document) < _COMPRESS_FROM:
        return document
    shorter = _compress(document, 1)
    return shorter if len(shorter) < len(document) else document


def expanded(data: bytes) -> bytes:
    """Return the document that `compressed` had; a zlib stream starts with 0x78, JSON never."""
    return _decompress(data) if data[:1] == b"\x78" else data


def unpack(data: bytes) -> Any:
    """Return the value of what `pack` made."""
    return load(expanded(data))
