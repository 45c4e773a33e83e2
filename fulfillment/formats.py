"""From bytes to checked rows: what a row may be, and every way in which one is refused.

A bad row is refused alone, with its physical line and a stable code; a file in the wrong encoding
is refused whole. Text is kept as sent, except NUL and lone surrogates, which PostgreSQL cannot
store: they become U+FFFD and the row carries a warning. Nothing is guessed, cut or normalised.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from fulfillment.errors import BadUpload

MAX_ROW_BYTES = 16 << 20
MAX_DEPTH = 100
MAX_ID_CHARACTERS = 512
MAX_URL_CHARACTERS = 16_384
MAX_DIGITS = 4_000
"""Of an integer; Python converts no more than 4,300."""

_TEXT_FIELDS = ("query_text", "url", "title", "html", "text")
_ID_FIELDS = ("request_id", "query_id", "result_id")
_WEIGHT_FIELDS = ("result_weight", "query_weight")
_SIDES = {"test": 1, "base": 2}
_KNOWN = frozenset((*_TEXT_FIELDS, *_ID_FIELDS, *_WEIGHT_FIELDS, "query", "side", "context"))
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[\s\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]*")
# The next bracket outside strings. Possessive, and content with the end of the line as the end of a
# string: no text makes it look at a byte twice, or remember more than where it stands.
_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z))*+([\[\]{}]|\Z)', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A row that is not taken: `line` is physical, counted from 1."""

    line: int
    code: str
    detail: str

    def as_json(self) -> dict[str, Any]:
        """Return what api clients get."""
        return {"line": self.line, "code": self.code, "detail": self.detail}


class Row(NamedTuple):
    """A checked row. `item` holds the fields that a rater may use, absent ones left out.

    A tuple, as a frozen dataclass takes three times as long to make: one is made for every row.
    """

    line: int
    request_id: str | None
    query_id: str | None
    result_id: str | None
    side: int | None
    result_weight: float | None
    query_weight: float | None
    item: dict[str, Any]
    extra: dict[str, Any] | None
    warnings: tuple[str, ...]


class _Refusal(Exception):
    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def lines(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield (physical line from 1, its bytes without LF); None for a line over the row limit.

    Records end at LF only. Memory is bounded by the row limit, whatever the file holds.
    """
    number, tail, size = 1, bytearray(), 0
    for chunk in _checked_start(chunks):
        start, *others = chunk.split(b"\n")
        size += len(start)
        if size <= MAX_ROW_BYTES:
            tail += start
        else:
            tail.clear()
        if not others:
            continue
        yield number, bytes(tail) if size <= MAX_ROW_BYTES else None
        *whole, rest = others
        for line in whole:
            number += 1
            yield number, line if len(line) <= MAX_ROW_BYTES else None
        number, size = number + 1, len(rest)
        tail = bytearray(rest[: MAX_ROW_BYTES + 1])
    if size:
        yield number, bytes(tail) if size <= MAX_ROW_BYTES else None


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


def read_ndjson(chunks: Iterable[bytes]) -> Iterator[Row | Refused]:
    """Yield a checked row or its refusal for each non-blank line."""
    for number, line in lines(chunks):
        if line is None:
            yield Refused(
                line=number,
                code="row_too_large",
                detail=f"a row may have at most {MAX_ROW_BYTES} bytes",
            )
        elif line and not line.isspace():
            yield read_row(number, line)


def read_row(number: int, line: bytes) -> Row | Refused:
    """Check one JSON line."""
    try:
        row = _check(number, *_parse(line))
        if _rounded(row.extra) or _rounded(row.item.get("context")):
            row = _check(number, *_parse_slowly(line))
        return row
    except _Refusal as refusal:
        return Refused(line=number, code=refusal.code, detail=refusal.detail)


def _parse(line: bytes) -> tuple[Any, tuple[str, ...]]:
    """Return the line's value and the warnings of what had to be replaced in it."""
    # Only what opens brackets can be deep: counting them is cheaper than walking the value.
    brackets = line.count(b"{") + line.count(b"[")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        if brackets > MAX_DEPTH:
            _refuse_deep_text(line)
        return _parse_slowly(line)
    if brackets > MAX_DEPTH:
        _refuse_deep_value(value)
    return _parse_slowly(line) if b"\\u0000" in line else (value, ())


def _rounded(value: Any) -> bool:
    """Say whether a number may be an integer beyond 64 bits: orjson makes floats of those.

    Two ids in a context would become one key.
    """
    if type(value) is float:
        return not -(2.0**63) < value < 2.0**63
    if type(value) is dict:
        return any(map(_rounded, value.values()))
    return type(value) is list and any(map(_rounded, value))


def _parse_slowly(line: bytes) -> tuple[Any, tuple[str, ...]]:
    """Parse a line exactly; repair what may be repaired, find out what is wrong with the rest."""
    try:
        text = line.decode()
    except UnicodeDecodeError as broken:
        raise _Refusal(
            "invalid_utf8", f"byte {broken.start + 1} of the line is not UTF-8"
        ) from broken
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole
        )
    except ValueError as broken:
        raise _Refusal("invalid_json", f"the line is not JSON: {broken}") from broken
    replaced = _replace(value, "\0")
    warnings = ("nul_replaced",) if replaced != value else ()
    whole = _replace(replaced, _SURROGATE)
    if whole != replaced:
        warnings = (*warnings, "surrogate_replaced")
    return whole, warnings


def _refuse_constant(token: str) -> float:
    raise _Refusal("bad_number", f"{token} is not a JSON number; leave the field out")


def _finite(token: str) -> float:
    if math.isinf(value := float(token)):
        raise _Refusal("bad_number", f"{token[:40]} is beyond a double; send a smaller number")
    return value


def _whole(token: str) -> int:
    if len(token) > MAX_DIGITS:
        raise _Refusal("bad_number", f"{token[:40]}… has more than {MAX_DIGITS} digits")
    return int(token)


def _refuse_deep_value(value: Any) -> None:
    level, depth = ([value] if isinstance(value, dict | list) else []), 1
    while level:
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        depth += 1


def _refuse_deep_text(line: bytes) -> None:
    """Tell depth apart from other faults in a line that the parser did not take."""
    depth = 0
    for found in _BRACKET.finditer(line):
        depth += 1 if found[1] in {b"{", b"["} else -1
        if depth > MAX_DEPTH:
            raise _too_deep()


def _too_deep() -> _Refusal:
    return _Refusal("too_deep", f"JSON may be nested {MAX_DEPTH} levels deep")


def _replace(value: Any, what: str | re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return value.replace(what, "\ufffd") if isinstance(what, str) else what.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_replace(k, what): _replace(v, what) for k, v in value.items()}
    if isinstance(value, list):
        return [_replace(element, what) for element in value]
    return value


def _check(number: int, value: Any, warnings: tuple[str, ...]) -> Row:
    if not isinstance(value, dict):
        raise _Refusal("not_an_object", f"a row is a JSON object, not {_kind(value)}")
    get = value.get
    query = get("query_text")
    if query is None:
        query = get("query")
    if query is None:
        raise _Refusal("missing_field", "query_text is missing; every row needs one")
    item: dict[str, Any] = {"query_text": query}
    for name in ("url", "title", "html", "text"):
        field = get(name)
        if field is not None:
            item[name] = field
    for name, field in item.items():
        if type(field) is not str:
            raise _Refusal("bad_type", f"{name} must be a string, not {_kind(field)}")
    if not query[:1].isalnum() and _BLANK.fullmatch(query):
        raise _Refusal("empty_field", "query_text is blank")
    if len(item.get("url", "")) > MAX_URL_CHARACTERS:
        raise _Refusal("field_too_long", f"url has more than {MAX_URL_CHARACTERS} characters")
    context = get("context")
    if context is not None:
        if type(context) is not dict:
            raise _Refusal("bad_type", f"context must be an object, not {_kind(context)}")
        item["context"] = context
    return Row(
        line=number,
        request_id=_identifier(value, "request_id"),
        query_id=_identifier(value, "query_id"),
        result_id=_identifier(value, "result_id"),
        side=_side(get("side")),
        result_weight=_weight(value, "result_weight"),
        query_weight=_weight(value, "query_weight"),
        item=item,
        extra=None
        if value.keys() <= _KNOWN
        else {name: field for name, field in value.items() if name not in _KNOWN},
        warnings=warnings,
    )


def _identifier(value: Mapping[str, Any], name: str) -> str | None:
    field = value.get(name)
    if field is None:
        return None
    if type(field) is not str:
        hint = f': write "{field}"' if type(field) is int and abs(field) < 1 << 64 else ""
        raise _Refusal("bad_type", f"{name} must be a string, not {_kind(field)}{hint}")
    if len(field) > MAX_ID_CHARACTERS:
        raise _Refusal("field_too_long", f"{name} has more than {MAX_ID_CHARACTERS} characters")
    if not field:
        raise _Refusal("empty_field", f"{name} is empty; leave it out instead")
    return field


def _side(field: Any) -> int | None:
    if field is None:
        return None
    side = _SIDES.get(field) if type(field) is str else None
    if side is None:
        raise _Refusal("bad_type", 'side must be "test" or "base"')
    return side


def _weight(value: Mapping[str, Any], name: str) -> float | None:
    field = value.get(name)
    if field is None:
        return None
    if type(field) is not float and type(field) is not int:
        raise _Refusal("bad_type", f"{name} must be a number, not {_kind(field)}")
    try:
        return float(field)
    except OverflowError as error:
        raise _Refusal("bad_number", f"{name} is beyond a double") from error


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return kinds.get(type(value), "an object" if isinstance(value, dict) else "null")
