"""JSON text to values: exact numbers, bounded depth, and no character that cannot be stored."""

import json
import math
import re
from typing import Any

import orjson

from fulfillment.formats.rows import Refusal

MAX_DEPTH = 100
MAX_DIGITS = 4_000
"""Of an integer; Python converts no more than 4,300."""

# The next bracket outside strings. Possessive, and content with the end of the line as the end of a
# string: no text makes it look at a byte twice, or remember more than where it stands.
_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z))*+([\[\]{}]|\Z)', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(text: bytes, *, depth: int = MAX_DEPTH) -> tuple[Any, tuple[str, ...]]:
    """Return the value of a JSON text and the warnings of what had to be replaced in it.

    Raises Refusal. Integers beyond 64 bits come as floats: where `rounded` says so, `parse_slowly`
    has them exactly.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        if _brackets(text) > depth:
            _refuse_deep_text(text, depth)
        return parse_slowly(text)
    # What opens one bracket only, as most rows do, cannot be deep: finding no other is cheaper
    # than counting them, and that than walking the value.
    nested = text.find(b"{", 1) > 0 or b"[" in text
    if nested and _brackets(text) > depth:
        _refuse_deep_value(value, depth)
    # A lone backslash is found at a third of the time of six characters.
    return parse_slowly(text) if b"\\" in text and b"\\u0000" in text else (value, ())


def _brackets(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def rounded(value: Any) -> bool:
    """Say whether a number may be an integer beyond 64 bits: orjson makes floats of those.

    Two ids in a context would become one key.
    """
    if type(value) is float:
        return not -(2.0**63) < value < 2.0**63
    if type(value) is dict:
        return any(map(rounded, value.values()))
    return type(value) is list and any(map(rounded, value))


def parse_slowly(text: bytes) -> tuple[Any, tuple[str, ...]]:
    """Parse exactly; repair what may be repaired, find out what is wrong with the rest."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as broken:
        raise Refusal(
            "invalid_utf8", f"byte {broken.start + 1} of the line is not UTF-8"
        ) from broken
    try:
        value = json.loads(
            decoded, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole
        )
    except ValueError as broken:
        raise Refusal("invalid_json", f"the line is not JSON: {broken}") from broken
    return storable(value)


def storable(value: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a value without NUL and lone surrogates, and the warnings of what was replaced."""
    replaced = _replace(value, "\0")
    warnings = ("nul_replaced",) if replaced != value else ()
    whole = _replace(replaced, _SURROGATE)
    if whole != replaced:
        warnings = (*warnings, "surrogate_replaced")
    return whole, warnings


def context_in(name: str, text: str) -> tuple[Any, tuple[str, ...]]:
    """Return the value of a JSON text that stands in a cell, as if it stood in a JSON row."""
    data = text.encode()
    try:
        value, warnings = parse(data, depth=MAX_DEPTH - 1)
        return parse_slowly(data) if rounded(value) else (value, warnings)
    except Refusal as refusal:
        raise Refusal(
            refusal.code, f"{name}: {refusal.detail.removeprefix('the line ')}"
        ) from refusal


def _refuse_constant(token: str) -> float:
    raise Refusal("bad_number", f"{token} is not a JSON number; leave the field out")


def _finite(token: str) -> float:
    if math.isinf(value := float(token)):
        raise Refusal("bad_number", f"{token[:40]} is beyond a double; send a smaller number")
    return value


def _whole(token: str) -> int:
    if len(token) > MAX_DIGITS:
        raise Refusal("bad_number", f"{token[:40]}… has more than {MAX_DIGITS} digits")
    return int(token)


def _refuse_deep_value(value: Any, limit: int) -> None:
    level, depth = ([value] if isinstance(value, dict | list) else []), 1
    while level:
        if depth > limit:
            raise too_deep()
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        depth += 1


def _refuse_deep_text(text: bytes, limit: int) -> None:
    """Tell depth apart from other faults in a text that the parser did not take."""
    depth = 0
    for found in _BRACKET.finditer(text):
        depth += 1 if found[1] in {b"{", b"["} else -1
        if depth > limit:
            raise too_deep()


def too_deep() -> Refusal:
    """Return the refusal of a row that is nested too deeply."""
    return Refusal("too_deep", f"JSON may be nested {MAX_DEPTH} levels deep")


def _replace(value: Any, what: str | re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return value.replace(what, "\ufffd") if isinstance(what, str) else what.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_replace(k, what): _replace(v, what) for k, v in value.items()}
    if isinstance(value, list):
        return [_replace(element, what) for element in value]
    return value
