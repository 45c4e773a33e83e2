"""What a row may be, whatever the form it came in: limits, types and every way of being refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_ROW_BYTES = 16 << 20
MAX_ID_CHARACTERS = 512
MAX_URL_CHARACTERS = 16_384

QUERY_FIELDS = ("query_text", "query")
"""The query and its alias: one of them must be there."""
TEXT_FIELDS = ("url", "title", "html", "text")
ID_FIELDS = ("request_id", "query_id", "result_id")
WEIGHT_FIELDS = ("result_weight", "query_weight")

_SIDES = {"test": 1, "base": 2}
_KNOWN = frozenset(("query_text", *TEXT_FIELDS, *ID_FIELDS, *WEIGHT_FIELDS, "side", "context"))
_BLANK = re.compile(r"[\s\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]*")


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


class Refusal(Exception):
    """Why a row is not taken; readers turn it into a `Refused` with its line."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def row_too_large(line: int) -> Refused:
    """Return the refusal of a row over the limit."""
    detail = f"a row may have at most {MAX_ROW_BYTES} bytes"
    return Refused(line=line, code="row_too_large", detail=detail)


def check(line: int, value: Any, warnings: tuple[str, ...]) -> Row:
    """Return the row that a JSON value is; raise Refusal."""
    if not isinstance(value, dict):
        raise Refusal("not_an_object", f"a row is a JSON object, not {_kind(value)}")
    get = value.get
    query = get("query_text")
    if query is None:
        query = get("query")
    if query is None:
        raise Refusal("missing_field", "query_text is missing; every row needs one")
    item: dict[str, Any] = {"query_text": query}
    for name in TEXT_FIELDS:
        field = get(name)
        if field is not None:
            item[name] = field
    for name, field in item.items():
        if type(field) is not str:
            raise Refusal("bad_type", f"{name} must be a string, not {_kind(field)}")
    if not query[:1].isalnum() and _BLANK.fullmatch(query):
        raise Refusal("empty_field", "query_text is blank")
    if len(item.get("url", "")) > MAX_URL_CHARACTERS:
        raise Refusal("field_too_long", f"url has more than {MAX_URL_CHARACTERS} characters")
    context = get("context")
    if context is not None:
        if type(context) is not dict:
            raise Refusal("bad_type", f"context must be an object, not {_kind(context)}")
        item["context"] = context
    # What is absent needs no call: this runs for every row.
    return Row(
        line,
        _identifier(value, "request_id") if "request_id" in value else None,
        _identifier(value, "query_id") if "query_id" in value else None,
        _identifier(value, "result_id") if "result_id" in value else None,
        _side(value["side"]) if "side" in value else None,
        _weight(value, "result_weight") if "result_weight" in value else None,
        _weight(value, "query_weight") if "query_weight" in value else None,
        item,
        None if value.keys() <= _KNOWN else _extra(value, query),
        warnings,
    )


def _extra(value: Mapping[str, Any], query: str) -> dict[str, Any] | None:
    """Return what is kept beside the row; `query` too, where it says something else."""
    extra = {name: field for name, field in value.items() if name not in _KNOWN}
    if extra.get("query") in (None, query):
        extra.pop("query", None)
    return extra or None


def _identifier(value: Mapping[str, Any], name: str) -> str | None:
    field = value.get(name)
    if field is None:
        return None
    if type(field) is not str:
        hint = f': write "{field}"' if type(field) is int and abs(field) < 1 << 64 else ""
        raise Refusal("bad_type", f"{name} must be a string, not {_kind(field)}{hint}")
    if len(field) > MAX_ID_CHARACTERS:
        raise Refusal("field_too_long", f"{name} has more than {MAX_ID_CHARACTERS} characters")
    if not field:
        raise Refusal("empty_field", f"{name} is empty; leave it out instead")
    return field


def _side(field: Any) -> int | None:
    if field is None:
        return None
    side = _SIDES.get(field) if type(field) is str else None
    if side is None:
        raise Refusal("bad_type", 'side must be "test" or "base"')
    return side


def _weight(value: Mapping[str, Any], name: str) -> float | None:
    field = value.get(name)
    if field is None:
        return None
    if type(field) is not float and type(field) is not int:
        raise Refusal("bad_type", f"{name} must be a number, not {_kind(field)}")
    try:
        return float(field)
    except OverflowError as error:
        raise Refusal("bad_number", f"{name} is beyond a double") from error


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return kinds.get(type(value), "an object" if isinstance(value, dict) else "null")
