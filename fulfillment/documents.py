"""JSON documents of our own making: rows in the spool, payloads of batches.

orjson, except for integers beyond 64 bits, which it would round: a document with one starts with a
blank, so that the reader knows.
"""

import json
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


def dump(value: Any) -> bytes:
    """Return the JSON of a value, numbers exact."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return b" " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def load(document: bytes) -> Any:
    """Return the value of a document that `dump` made."""
    return json.loads(document) if document[:1] == b" " else orjson.loads(document)


def pack(value: Any) -> bytes:
    """Return the JSON of a value, compressed where that pays."""
    document = dump(value)
    if len(document) < _COMPRESS_FROM:
        return document
    compressed = _compress(document, 1)
    return compressed if len(compressed) < len(document) else document


def unpack(data: bytes) -> Any:
    """Return the value of what `pack` made; a zlib stream starts with 0x78, JSON never does."""
    return load(_decompress(data) if data[:1] == b"\x78" else data)
