"""Gzip on its way in: undone piece by piece, so that no body fills memory, a bomb included."""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fulfillment.errors import MalformedBody, UploadTooLarge

PIECE: Final = 64 << 10
"""Bytes that come out at a time, at most."""
_GZIP_WINDOW = 31


def gunzipped(pieces: Iterable[bytes], *, limit: int) -> Iterator[bytes]:
    """Undo gzip in pieces of bounded size; several members are one stream, as `cat` makes them.

    Raises UploadTooLarge once more than `limit` bytes came out, MalformedBody for what is cut off
    or broken.
    """
    taken, members, member = 0, 0, None
    for piece in pieces:
        left = piece
        while left:
            if member is None:
                left = left.lstrip(b"\0") if members else left  # padding, as of tapes
                if not left:
                    break
                member = zlib.decompressobj(_GZIP_WINDOW)
            out = _inflated(member, left)
            taken += len(out)
            if taken > limit:
                raise UploadTooLarge(
                    f"The body has more than {limit} bytes when decompressed; send it in parts.",
                    code="decompressed_too_large",
                    limit_bytes=limit,
                )
            if out:
                yield out
            if member.eof:
                left, member, members = member.unused_data, None, members + 1
            else:
                left = member.unconsumed_tail
    if member is not None:
        raise MalformedBody(
            f"The gzip stream breaks off after {taken} decompressed bytes; nothing of it was "
            "stored.",
            code="truncated_upload",
        )


def _inflated(member: Any, data: bytes) -> bytes:
    try:
        out: bytes = member.decompress(data, PIECE)
    except zlib.error as error:
        raise MalformedBody(
            f"The body is not gzip, or damaged ({error}); compress it again, or leave the "
            "Content-Encoding out.",
            code="bad_encoding",
        ) from error
    return out
