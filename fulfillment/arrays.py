"""Array literals: many values as one string parameter, as set-based statements want them.

psycopg2 adapts a list value by value and PostgreSQL then parses, analyses and plans each as an
expression. One literal costs a quarter of that on both sides.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime


def integers(values: Iterable[int | None]) -> str:
    """Return integers or members of an IntEnum; the statement casts, as in `%s::bigint[]`."""
    # `str` of a list is one step in C; members of an enum would write their names.
    return _numbers([None if v is None else int(v) for v in values])


def floats(values: Iterable[float | None]) -> str:
    """Return floats, exact to the last bit."""
    return _numbers([None if v is None else float(v) for v in values])


def uuids(values: Iterable[str | None]) -> str:
    """Return uuids given as hex digits."""
    return f"{{{','.join([v or 'NULL' for v in values])}}}"


def instants(values: Iterable[datetime | None]) -> str:
    """Return timestamps."""
    # Few differ: rows of one call have one time.
    text: dict[datetime | None, str] = {None: "NULL"}
    parts = []
    for value in values:
        part = text.get(value)
        if part is None:
            part = text[value] = f'"{value}"'
        parts.append(part)
    return f"{{{','.join(parts)}}}"


def booleans(values: Iterable[bool]) -> str:
    """Return booleans."""
    return f"{{{','.join(['t' if v else 'f' for v in values])}}}"


def texts(values: Iterable[str | None]) -> str:
    """Return any strings, JSON among them."""
    return f"{{{','.join([_text(v) for v in values])}}}"


def _numbers(values: Sequence[float | None]) -> str:
    return f"{{{str(values)[1:-1]}}}".replace("None", "NULL")


def _text(value: str | None) -> str:
    if value is None:
        return "NULL"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
