"""JSON documents of our own making: rows in the spool, payloads of batches.

orjson, except where `context` may hold integers beyond 64 bits, which it would round.
"""

import json
import zlib
from typing import Any

import orjson

_COMPRESS_FROM = 1_024


def dump(value: Any) -> bytes:
    """Return the JSON of a value, numbers exact."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def load(document: bytes) -> Any:
    """Return the value of a document that `dump` made."""
    return json.loads(document) if b'"context"' in document else orjson.loads(document)


def pack(value: Any) -> bytes:
    """Return the JSON of a value, compressed where that pays."""
    document = dump(value)
    if len(document) < _COMPRESS_FROM:
        return document
    compressed = zlib.compress(document, 1)
    return compressed if len(compressed) < len(document) else document


def unpack(data: bytes) -> Any:
    """Return the value of what `pack` made; a zlib stream starts with 0x78, JSON never does."""
    return load(zlib.decompress(data) if data[:1] == b"\x78" else data)
