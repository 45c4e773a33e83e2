"""Bytes to physical lines: what NDJSON and CSV have in common."""

from collections.abc import Callable, Iterable, Iterator

from fulfillment.errors import BadUpload
from fulfillment.formats import rows

_BOM = b"\xef\xbb\xbf"


def lines(
    chunks: Iterable[bytes], *, dropped: Callable[[bytes | bytearray], None] = lambda piece: None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield (physical line from 1, its bytes without LF); None for a line over the row limit.

    Lines end at LF only. Memory is bounded by the row limit, whatever the file holds; `dropped`
    gets the pieces of a line that is too long before the line is yielded.
    """
    limit = rows.MAX_ROW_BYTES
    number, tail, size = 1, bytearray(), 0
    for chunk in _checked_start(chunks):
        start, *others = chunk.split(b"\n")
        size += len(start)
        tail += start
        if size > limit:
            dropped(tail)
            tail.clear()
        if not others:
            continue
        yield number, bytes(tail) if size <= limit else None
        *whole, rest = others
        for line in whole:
            number += 1
            if len(line) > limit:
                dropped(line)
            yield number, line if len(line) <= limit else None
        number, size, tail = number + 1, len(rest), bytearray(rest)
    if size:
        if size > limit:
            dropped(tail)
        yield number, bytes(tail) if size <= limit else None


def _checked_start(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks without a UTF-8 byte-order mark; refuse UTF-16 and UTF-32, marked or not."""
    start, rest = b"", iter(chunks)
    while len(start) < 4 and (chunk := next(rest, None)) is not None:
        start += chunk
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start[:2]:
        raise BadUpload(
            "the file is UTF-16 or UTF-32; save it as UTF-8 and send it again",
            code="unsupported_encoding",
        )
    yield start.removeprefix(_BOM)
    yield from rest
