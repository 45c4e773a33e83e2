import json
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import DataError, IntegrityError, connection, transaction
from hypothesis import given
from hypothesis import strategies as st

from fulfillment import copying

pytestmark = pytest.mark.django_db

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
uuids = st.binary(min_size=16, max_size=16)
offsets = st.integers(-720, 720).map(lambda minutes: timezone(timedelta(minutes=minutes)))
instants = st.datetimes(timezones=st.just(UTC)) | st.datetimes(
    EPOCH.replace(tzinfo=None), timezones=offsets
)


def lists(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, max_size=6)


COLUMNS: dict[str, tuple[str, Callable[[Any], bytes], st.SearchStrategy[Any]]] = {
    "i2": ("smallint", copying.int2, st.integers(-(2**15), 2**15 - 1)),
    "i4": ("integer", copying.int4, st.integers(-(2**31), 2**31 - 1)),
    "i8": ("bigint", copying.int8, st.integers(-(2**63), 2**63 - 1)),
    "f8": ("double precision", copying.float8, st.floats(allow_nan=False)),
    "t": ("text", copying.text, texts),
    "u": ("uuid", copying.uuid, uuids),
    "b": ("bytea", copying.binary, st.binary()),
    "ts": ("timestamptz", copying.timestamp, instants),
    "a2": ("smallint[]", copying.int2_array, lists(st.integers(-(2**15), 2**15 - 1))),
    "a4": ("integer[]", copying.int4_array, lists(st.integers(-(2**31), 2**31 - 1))),
    "au": ("uuid[]", copying.uuid_array, lists(uuids)),
    "at": ("text[]", copying.text_array, lists(texts)),
}


@pytest.fixture(autouse=True)
def _table(db: None) -> Iterator[None]:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _, _) in COLUMNS.items())
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TEMP TABLE copied (nr serial, {columns}, j jsonb)")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS copied")


def copied(columns: Sequence[str], rows: Sequence[bytes]) -> list[tuple[Any, ...]]:
    """COPY rows into an empty table and return what the database has."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("TRUNCATE copied")
        copying.copy(cursor, "copied", columns, rows)
        cursor.execute(f"SELECT {', '.join(columns)} FROM copied ORDER BY nr")
        return list(cursor.fetchall())


def plain(value: Any) -> Any:
    """Return a value as it went in: bytea comes as a memoryview, uuid as a UUID."""
    match value:
        case memoryview():
            return bytes(value)
        case uuid.UUID():
            return value.bytes
        case list():
            return list(map(plain, value))
        case _:
            return value


@given(st.lists(st.tuples(*(values for _, _, values in COLUMNS.values())), max_size=5))
def test_every_type_comes_back_as_it_went_in(rows: list[tuple[Any, ...]]) -> None:
    encoders = [encode for _, encode, _ in COLUMNS.values()]
    encoded = [b"".join(e(v) for e, v in zip(encoders, row, strict=True)) for row in rows]

    found = copied(list(COLUMNS), encoded)

    assert [tuple(map(plain, row)) for row in found] == rows


@pytest.mark.parametrize("name", ["i2", "i4", "i8", "f8", "t", "ts", "at"])
def test_none_becomes_null(name: str) -> None:
    assert copied([name], [COLUMNS[name][1](None)]) == [(None,)]


def test_a_document_that_is_none_becomes_null() -> None:
    assert copied(["j"], [copying.jsonb(None)]) == [(None,)]


@pytest.mark.parametrize("name", ["a2", "a4", "au", "at"])
def test_an_empty_array_is_empty_and_not_null(name: str) -> None:
    copied([name], [COLUMNS[name][1]([])])

    with connection.cursor() as cursor:
        cursor.execute(f"SELECT cardinality({name}), {name} = '{{}}' FROM copied")
        assert cursor.fetchall() == [(0, True)]


@pytest.mark.parametrize(
    "value", [[""], ["", "NULL", "{}", 'a"b', "a,b", "\\", "é😀"], ["x" * 9_000]]
)
def test_texts_in_arrays_need_no_quoting(value: list[str]) -> None:
    assert copied(["at"], [copying.text_array(value)]) == [(value,)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**40), 10**40) | texts,
        lambda inner: lists(inner) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=8,
    )
)
def test_a_document_comes_back_as_it_went_in(value: Any) -> None:
    document = json.dumps(value, ensure_ascii=False).encode()

    copied(["j"], [copying.jsonb(document), copying.jsonb(b" " + document)])

    with connection.cursor() as cursor:
        cursor.execute("SELECT j::text FROM copied")
        assert [json.loads(text) for (text,) in cursor.fetchall()] == [value, value]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2000, 1, 1, tzinfo=UTC), "2000-01-01 00:00:00.000000"),
        (datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "1999-12-31 23:59:59.999999"),
        (datetime(2026, 11, 30, 12, 0, 0, 1, tzinfo=UTC), "2026-11-30 12:00:00.000001"),
        (datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=-5))), "2024-02-29 05:00:00.000000"),
        (datetime(1, 1, 1, tzinfo=UTC), "0001-01-01 00:00:00.000000"),
    ],
)
def test_an_instant_is_exact_to_the_microsecond(value: datetime, text: str) -> None:
    copied(["ts"], [copying.timestamp(value)])

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT to_char(ts AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') FROM copied"
        )
        assert cursor.fetchall() == [(text,)]


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1, 3])
def test_doubles_keep_every_bit(value: float) -> None:
    ((found,),) = copied(["f8"], [copying.float8(value)])

    assert struct.pack("!d", found) == struct.pack("!d", value)


def test_columns_take_the_order_given_and_the_rest_their_defaults() -> None:
    with connection.cursor() as cursor:
        copying.copy(cursor, "copied", ["t", "i4"], [copying.text("x") + copying.int4(5)])
        cursor.execute("SELECT nr, i4, t, i8 FROM copied")

        assert cursor.fetchall() == [(1, 5, "x", None)]


def test_no_records_are_no_rows() -> None:
    assert copied(["i4"], []) == []


def test_a_copy_larger_than_its_buffers_arrives_whole() -> None:
    big = bytes(range(256)) * 4_096

    found = copied(["b", "t"], [copying.binary(big) + copying.text(str(n)) for n in range(8)])

    assert [(bytes(b) == big, t) for b, t in found] == [(True, str(n)) for n in range(8)]


@pytest.mark.parametrize(
    ("name", "value"), [("i2", 2**15), ("i4", 2**31), ("i8", 2**63), ("i2", -(2**15) - 1)]
)
def test_a_number_too_large_for_its_column_is_not_cut(name: str, value: int) -> None:
    with pytest.raises(struct.error):
        COLUMNS[name][1](value)


def test_what_the_database_refuses_stores_nothing() -> None:
    with connection.cursor() as cursor:
        with pytest.raises(DataError), transaction.atomic():
            copying.copy(cursor, "copied", ["t"], [copying.text("fine"), copying.text("a\0b")])

        cursor.execute("SELECT count(*) FROM copied")
        assert cursor.fetchall() == [(0,)]


def test_a_broken_constraint_is_an_error_that_callers_of_django_know() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE UNIQUE INDEX ON copied (i4)")

        with pytest.raises(IntegrityError), transaction.atomic():
            copying.copy(cursor, "copied", ["i4"], [copying.int4(1), copying.int4(1)])
