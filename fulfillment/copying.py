"""Binary COPY: rows as PostgreSQL reads them, packed by `struct` and sent through `copy_expert`.

About three times the rate of text COPY and twelve times bulk_create. (The pgcopy package does the
same but needs source psycopg2 and a compiler.) Encoders return a field with its length in front.
"""

import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from django.db.backends.utils import CursorWrapper

_HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0)
_TRAILER = struct.pack("!h", -1)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

_PIECE = 1 << 16
"""Bytes handed to libpq at a time."""

_UUID_OID, _INT4_OID, _INT2_OID, _TEXT_OID = 2950, 23, 21, 25

NULL = struct.pack("!i", -1)
_length = struct.Struct("!i").pack
_int2 = struct.Struct("!ih").pack
_int4 = struct.Struct("!ii").pack
_int8 = struct.Struct("!iq").pack
_float8 = struct.Struct("!id").pack
_array = struct.Struct("!iiiiii").pack


def int2(value: int | None) -> bytes:
    """Encode a smallint."""
    return NULL if value is None else _int2(2, value)


def int4(value: int | None) -> bytes:
    """Encode an integer."""
    return NULL if value is None else _int4(4, value)


def int8(value: int | None) -> bytes:
    """Encode a bigint."""
    return NULL if value is None else _int8(8, value)


def float8(value: float | None) -> bytes:
    """Encode a double."""
    return NULL if value is None else _float8(8, value)


def text(value: str | None) -> bytes:
    """Encode text; it must not contain NUL."""
    if value is None:
        return NULL
    data = value.encode()
    return _length(len(data)) + data


def binary(value: bytes) -> bytes:
    """Encode bytea."""
    return _length(len(value)) + value


def jsonb(document: bytes | None) -> bytes:
    """Encode jsonb from its text."""
    return NULL if document is None else _length(len(document) + 1) + b"\x01" + document


def uuid(value: bytes) -> bytes:
    """Encode a uuid from its 16 bytes."""
    return b"\0\0\0\x10" + value


def timestamp(value: datetime | None) -> bytes:
    """Encode timestamptz."""
    return NULL if value is None else _int8(8, microseconds(value))


def microseconds(value: datetime) -> int:
    """Return the number that a timestamptz is."""
    since = value - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _one_dimension(oid: int, count: int, elements: bytes) -> bytes:
    if not count:
        return _length(12) + struct.pack("!iii", 0, 0, oid)
    return _array(20 + len(elements), 1, 0, oid, count, 1) + elements


def int4_array(values: Sequence[int]) -> bytes:
    """Encode integer[]."""
    return _one_dimension(_INT4_OID, len(values), b"".join(_int4(4, v) for v in values))


def int2_array(values: Sequence[int]) -> bytes:
    """Encode smallint[]."""
    return _one_dimension(_INT2_OID, len(values), b"".join(_int2(2, v) for v in values))


def uuid_array(values: Sequence[bytes]) -> bytes:
    """Encode uuid[] from the 16 bytes of each."""
    return _one_dimension(_UUID_OID, len(values), b"".join(b"\0\0\0\x10" + v for v in values))


def text_array(values: Sequence[str] | None) -> bytes:
    """Encode text[]."""
    if values is None:
        return NULL
    return _one_dimension(_TEXT_OID, len(values), b"".join(text(v) for v in values))


def copy(
    cursor: CursorWrapper, table: str, columns: Sequence[str], records: Iterable[bytes]
) -> int:
    """COPY records, each the encoded fields of `columns` in their order; return their bytes.

    They are taken as they are sent: PostgreSQL stores the first while the next are being made.
    """
    names = ", ".join(f'"{column}"' for column in columns)
    raw: Any = cursor.cursor
    pieces = _Pieces(struct.pack("!h", len(columns)), records)
    # Django wraps only the errors of its own methods: callers expect its IntegrityError here too.
    with cursor.db.wrap_database_errors:
        raw.copy_expert(f'COPY "{table}" ({names}) FROM STDIN WITH (FORMAT binary)', pieces, _PIECE)
    return pieces.sent


class _Pieces:
    """Records as a file to be read from."""

    def __init__(self, count: bytes, records: Iterable[bytes]) -> None:
        self._count = count
        self._records = iter(records)
        self._first, self._is_over = _HEADER, False
        self.sent = 0

    def read(self, size: int) -> bytes:
        """Return about `size` bytes of whole records, nothing after the last."""
        if self._is_over:
            return b""
        parts, length = [self._first], 0
        self._first = b""
        for record in self._records:
            parts += (self._count, record)
            length += len(record)
            if length >= size:
                break
        else:
            parts.append(_TRAILER)
            self._is_over = True
        piece = b"".join(parts)
        self.sent += len(piece)
        return piece
