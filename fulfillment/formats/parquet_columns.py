"""What Parquet columns may be: their types, and how their values become those of a row.

Types are checked before any row: text columns hold text, ids may be whole numbers or decimals (they
become their exact decimal strings), weights are numbers, `context` is a struct, a map with text
keys, or the text of a JSON object. A null is an absent field, inside a struct too. Other columns
are kept with the row as JSON; dates, times and decimals as their text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import types

from fulfillment.errors import BadUpload
from fulfillment.formats.rows import ID_FIELDS, QUERY_FIELDS, TEXT_FIELDS, WEIGHT_FIELDS, Refusal
from fulfillment.formats.values import MAX_DEPTH, too_deep

_Convert = Callable[[Any], Any]


class _Unfit(Exception):
    """A type that a column may not have; says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column's name, and how an Arrow array and then each value of it is made ready for a row.

    `is_json`: its values are the texts of JSON objects.
    """

    name: str
    prepare: Callable[[Any], Any] | None = None
    convert: _Convert | None = None
    is_json: bool = False


def columns_of(schema: Any) -> list[Column]:
    columns, errors = [], []
    for field in schema:
        try:
            columns.append(_column(field.name, field.type))
        except _Unfit as unfit:
            errors.append(
                {"field": field.name[:64], "code": "bad_column_type", "detail": str(unfit)}
            )
    if errors:
        raise BadUpload(
            f"column {errors[0]['field']!r} {errors[0]['detail']}",
            code="bad_column_type",
            errors=errors,
        )
    return columns


def _column(name: str, type_: Any) -> Column:
    storage, unwrap = _storage(type_)
    if types.is_null(storage):
        return Column(name=name)
    if name in QUERY_FIELDS or name in TEXT_FIELDS or name == "side":
        _require(_is_text(storage), type_, "cast it to text")
        return Column(name=name, prepare=unwrap)
    if name in ID_FIELDS:
        return _id_column(name, type_, storage, unwrap)
    if name in WEIGHT_FIELDS:
        number = types.is_integer(storage) or types.is_floating(storage)
        _require(number or types.is_decimal(storage), type_, "weights are numbers")
        return Column(name=name, prepare=unwrap, convert=lambda value: _finite(name, float(value)))
    if name == "context":
        if _is_text(storage):
            return Column(name=name, prepare=unwrap, is_json=True)
        _require(
            types.is_struct(storage) or types.is_map(storage),
            type_,
            "it must be a struct, a map, or the text of a JSON object",
        )
        return Column(name=name, prepare=unwrap, convert=_plain(name, storage, depth=2))
    if types.is_temporal(storage) or types.is_decimal(storage):
        return Column(name=name, prepare=lambda array: _as_text(unwrap(array) if unwrap else array))
    return Column(name=name, prepare=unwrap, convert=_plain(name, storage, depth=2))


def _id_column(name: str, type_: Any, storage: Any, unwrap: Any) -> Column:
    if _is_text(storage):
        return Column(name=name, prepare=unwrap)
    if types.is_integer(storage):
        return Column(name=name, prepare=unwrap, convert=str)
    if types.is_decimal(storage):
        return Column(name=name, prepare=unwrap, convert=lambda value: format(value, "f"))
    raise _unfit(type_, "ids are text or whole numbers; cast it to text")


def _require(fits: bool, type_: Any, remedy: str) -> None:
    if not fits:
        raise _unfit(type_, remedy)


def _unfit(type_: Any, remedy: str) -> _Unfit:
    return _Unfit(f"has type {str(type_)[:80]}: {remedy}")


def _storage(type_: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the type of the values below a dictionary or JSON type, and how to get there."""
    if types.is_dictionary(type_):
        return type_.value_type, lambda array: array.dictionary_decode()
    if isinstance(type_, pa.JsonType):
        return type_.storage_type, lambda array: array.storage
    return type_, None


def _is_text(type_: Any) -> bool:
    return bool(
        types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_)
    )


def _plain(name: str, type_: Any, *, depth: int) -> _Convert | None:
    """Return what makes JSON of a value, None where it is JSON already; raise _Unfit.

    `depth` counts as in a JSON row: the row is level 1.
    """
    if depth > MAX_DEPTH:
        raise _Unfit(too_deep().detail)
    if types.is_dictionary(type_):
        return _plain(name, type_.value_type, depth=depth)
    if types.is_floating(type_):
        return lambda value: _finite(name, float(value))
    if types.is_boolean(type_) or types.is_integer(type_) or types.is_null(type_):
        return None
    if _is_text(type_):
        return None
    if types.is_struct(type_):
        return _plain_struct(name, type_, depth)
    if types.is_map(type_):
        _require(_is_text(type_.key_type), type_, "keys of a map must be text")
        inner = _plain(name, type_.item_type, depth=depth + 1)
        return lambda value: {k: _kept(inner, v) for k, v in _pairs(name, value)}
    if any(is_kind(type_) for is_kind in _LISTS):
        inner = _plain(name, type_.value_type, depth=depth + 1)
        return lambda value: [_kept(inner, element) for element in value]
    raise _unfit(type_, "JSON has no such values; cast it to text, or leave it out")


_LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)


def _plain_struct(name: str, type_: Any, depth: int) -> _Convert:
    fields = [type_.field(n) for n in range(type_.num_fields)]
    names = [field.name for field in fields]
    _require(len(set(names)) == len(names), type_, "a name of the struct stands twice")
    inner = {field.name: _plain(name, field.type, depth=depth + 1) for field in fields}
    return lambda value: {k: _kept(inner[k], v) for k, v in value.items() if v is not None}


def _kept(convert: _Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _pairs(name: str, value: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
    if len({key for key, _ in value}) < len(value):
        raise Refusal("bad_type", f"{name}: a key of the map stands twice")
    return value


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise Refusal("bad_number", f"{name} holds {value}; write null instead")
    return value


def _as_text(array: Any) -> Any:
    """Return the text of dates, times and decimals; of instants in UTC."""
    if types.is_timestamp(array.type) and array.type.tz is not None:
        # Casting the zone away leaves UTC; casting with it would need a database of zones.
        naive = array.cast(pa.timestamp(array.type.unit)).cast(pa.string())
        return pa.array([None if text is None else f"{text}Z" for text in naive.to_pylist()])
    return array.cast(pa.string())
