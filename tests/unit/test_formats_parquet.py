"""Parquet: which types a column may have, what its values become, and what files are refused."""

import io
import random
import tracemalloc
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.errors import BadUpload, FulfillmentError, UploadTooLarge
from fulfillment.formats import Refused, Row, parquet, rows
from fulfillment.formats.ndjson import read_row
from fulfillment.formats.parquet import read_parquet

LIMIT = 1 << 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spool")


def written(table: Mapping[str, Any] | pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(table) if isinstance(table, dict) else table, file, **options)
    return file.getvalue()


def read(body: bytes, directory: Path, *, limit: int = LIMIT) -> list[Row | Refused]:
    pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
    found = list(read_parquet(pieces, directory=directory, limit=limit))
    assert list(directory.iterdir()) == []
    return found


def column(name: str, values: list[Any], type_: Any, directory: Path) -> list[Row | Refused]:
    """Return what becomes of rows with one more column."""
    table = {"query_text": [f"q{n}" for n in range(len(values))], name: pa.array(values, type_)}
    return read(written(table), directory)


def kept(found: list[Row | Refused], name: str) -> list[Any]:
    values = []
    for row in found:
        assert isinstance(row, Row), row
        values.append(
            getattr(row, name)
            if name in Row._fields
            else row.item.get(name, (row.extra or {}).get(name))
        )
    return values


def refused(found: list[Row | Refused]) -> list[tuple[int, str]]:
    return [(row.line, row.code) for row in found if isinstance(row, Refused)]


def refusal(body: bytes, directory: Path, **options: Any) -> FulfillmentError:
    with pytest.raises(FulfillmentError) as caught:
        read(body, directory, **options)
    return caught.value


# Columns


@pytest.mark.parametrize("name", ["query_text", "url", "title", "html", "text", "request_id"])
@pytest.mark.parametrize(
    "type_",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()),
     pa.dictionary(pa.int32(), pa.large_string())],
)  # fmt: skip
def test_text_columns_hold_text_of_any_storage(name: str, type_: Any, directory: Path) -> None:
    values = ["é\u2028\r\n😀", "NA", "007"]
    table = {"query_text": pa.array(["a", "b", "c"]), name: pa.array(values, type_)}

    found = read(written(table), directory)

    assert kept(found, name) == values


@pytest.mark.parametrize(
    ("values", "type_", "expected"),
    [
        ([9007199254740993, -1, None], pa.int64(), ["9007199254740993", "-1", None]),
        ([2**64 - 1], pa.uint64(), ["18446744073709551615"]),
        ([7], pa.int8(), ["7"]),
        ([7, 7], pa.dictionary(pa.int8(), pa.int64()), ["7", "7"]),
        ([Decimal("1" + "0" * 36 + "1")], pa.decimal128(38, 0), ["1" + "0" * 36 + "1"]),
        ([Decimal("1.50"), Decimal("0.00")], pa.decimal128(10, 2), ["1.50", "0.00"]),
        (["007", "1.0", " x "], pa.string(), ["007", "1.0", " x "]),
        ([None], pa.null(), [None]),
    ],
)
@pytest.mark.parametrize("name", ["request_id", "query_id", "result_id"])
def test_ids_become_their_exact_decimal_strings(
    name: str, values: list[Any], type_: Any, expected: list[Any], directory: Path
) -> None:
    assert kept(column(name, values, type_, directory), name) == expected


@pytest.mark.parametrize(
    ("values", "type_", "expected"),
    [
        ([0.5, -2.0, None], pa.float64(), [0.5, -2.0, None]),
        ([0.5], pa.float32(), [0.5]),
        ([0.5], pa.float16(), [0.5]),
        ([3], pa.uint8(), [3.0]),
        ([Decimal("0.25")], pa.decimal128(5, 2), [0.25]),
    ],
)
def test_weights_are_numbers(
    values: list[Any], type_: Any, expected: list[Any], directory: Path
) -> None:
    assert kept(column("result_weight", values, type_, directory), "result_weight") == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["result_weight", "query_weight", "a_column_of_theirs"])
def test_what_is_no_number_refuses_its_row(name: str, value: float, directory: Path) -> None:
    found = column(name, [1.0, value, 2.0], pa.float64(), directory)

    assert refused(found) == [(2, "bad_number")]
    assert len(found) == 3


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("query_text", pa.int64()),
        ("query_text", pa.binary()),
        ("text", pa.timestamp("us")),
        ("title", pa.date32()),
        ("html", pa.list_(pa.string())),
        ("url", pa.struct({"a": pa.string()})),
        ("side", pa.int8()),
        ("request_id", pa.float64()),
        ("query_id", pa.bool_()),
        ("result_id", pa.timestamp("ns", "UTC")),
        ("request_id", pa.binary(16)),
        ("result_weight", pa.string()),
        ("query_weight", pa.bool_()),
        ("context", pa.int64()),
        ("context", pa.list_(pa.string())),
        ("context", pa.struct({"at": pa.timestamp("us")})),
        ("context", pa.struct({"raw": pa.binary()})),
        ("context", pa.map_(pa.int64(), pa.string())),
        ("a_column_of_theirs", pa.binary()),
        ("a_column_of_theirs", pa.list_(pa.date32())),
    ],
)
def test_a_column_of_the_wrong_type_refuses_the_file(
    name: str, type_: Any, directory: Path
) -> None:
    table = pa.table({"query_text": ["q"]}).drop(["query_text"] if name == "query_text" else [])
    table = table.append_column(name, pa.nulls(1, type_))

    error = refusal(written(table), directory)

    assert (error.status, error.code) == (422, "bad_column_type")
    assert [e["field"] for e in error.errors] == [name]
    assert " has type " in error.detail


def test_all_columns_of_wrong_types_are_named(directory: Path) -> None:
    error = refusal(written({"query_text": [1], "url": [True], "title": ["t"]}), directory)

    assert [e["field"] for e in error.errors] == ["query_text", "url"]


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"request_id": ["a"], "Query": ["b"]}, "missing_column"),
        ({"url": [1]}, "missing_column"),
        (
            pa.table([["a"], ["b"], ["c"]], names=["query_text", "url", "url"]),
            "duplicate_column",
        ),
    ],
)
def test_names_of_columns_are_checked(table: Any, code: str, directory: Path) -> None:
    error = refusal(written(table), directory)

    assert (error.status, error.code) == (422, code)


# Contexts and other columns


@pytest.mark.parametrize(
    ("values", "type_", "expected"),
    [
        (
            [{"b": 1, "a": [1.5, None]}, {"b": None, "a": None}, None],
            pa.struct({"b": pa.int64(), "a": pa.list_(pa.float64())}),
            [{"b": 1, "a": [1.5, None]}, {}, None],
        ),
        (
            [{"k": {"deep": True, "other": None}}],
            pa.struct({"k": pa.struct({"deep": pa.bool_(), "other": pa.string()})}),
            [{"k": {"deep": True}}],
        ),
        (
            [[("k", "v"), ("n", None)], []],
            pa.map_(pa.string(), pa.string()),
            [{"k": "v", "n": None}, {}],
        ),
        (['{"n": 36893488147419103232, "x": 1.0}', None], pa.string(),
         [{"n": 2**65, "x": 1.0}, None]),
        (['{"n": 1}'], pa.dictionary(pa.int8(), pa.string()), [{"n": 1}]),
        (['{"n": 1}'], pa.json_(), [{"n": 1}]),
    ],
)  # fmt: skip
def test_a_context_is_a_struct_a_map_or_the_text_of_an_object(
    values: list[Any], type_: Any, expected: list[Any], directory: Path
) -> None:
    assert kept(column("context", values, type_, directory), "context") == expected


@pytest.mark.parametrize(
    ("value", "type_", "code"),
    [
        ("[1]", pa.string(), "bad_type"),
        ("{", pa.string(), "invalid_json"),
        ('{"a": NaN}', pa.string(), "bad_number"),
        ('{"a":' * 100 + "1" + "}" * 100, pa.string(), "too_deep"),
        ({"x": float("nan")}, pa.struct({"x": pa.float64()}), "bad_number"),
        ([("a", 1), ("a", 2)], pa.map_(pa.string(), pa.int64()), "bad_type"),
    ],
)
def test_a_context_that_cannot_be_refuses_its_row(
    value: Any, type_: Any, code: str, directory: Path
) -> None:
    assert refused(column("context", [None, value], type_, directory)) == [(2, code)]


def test_other_columns_are_kept_as_json(directory: Path) -> None:
    berlin = pa.timestamp("ns", "Europe/Berlin")
    table = pa.table(
        {
            "query_text": ["q", "r"],
            "market": ["de", None],
            "n": [2**60, None],
            "ok": [True, None],
            "tags": pa.array([["a", None], None], pa.list_(pa.string())),
            "who": pa.array([{"a": 1, "b": None}, None]),
            "kind": pa.array(["x", None]).dictionary_encode(),
            "day": pa.array([date(2026, 1, 2), None]),
            "at": pa.array([datetime(2026, 1, 2, 3, 4, 5, 6, UTC), None], berlin),
            "clock": pa.array([time(1, 2, 3), None], pa.time64("us")),
            "price": pa.array([Decimal("1.50"), None]),
            "nothing": pa.nulls(2),
        }
    )

    first, second = read(written(table), directory)

    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert first.extra == {
        "market": "de",
        "n": 2**60,
        "ok": True,
        "tags": ["a", None],
        "who": {"a": 1},
        "kind": "x",
        "day": "2026-01-02",
        "at": "2026-01-02 03:04:05.000006000Z",
        "clock": "01:02:03.000000",
        "price": "1.50",
    }
    assert second.extra is None


# Rows


def test_a_full_row_says_the_same_as_in_json(directory: Path) -> None:
    sent = {
        "request_id": "1", "query_id": "2", "result_id": "3", "query_text": "q", "url": "u",
        "title": "t", "text": "x", "html": "", "side": "base", "market": "de",
        "context": {"b": [1, 2], "a": {"c": "d"}}, "result_weight": 0.5, "query_weight": 2.0,
    }  # fmt: skip

    (found,) = read(written(pa.Table.from_pylist([sent])), directory)

    assert found == read_row(1, orjson.dumps(sent))


def test_rows_are_numbered_across_row_groups(directory: Path) -> None:
    queries = [None if n in (3, 150) else "" if n == 75 else f"q{n}" for n in range(1, 201)]

    found = read(written({"query_text": queries}, row_group_size=70), directory)

    assert [row.line for row in found] == list(range(1, 201))
    assert refused(found) == [(3, "missing_field"), (75, "empty_field"), (150, "missing_field")]


def test_ids_too_long_refuse_their_row(directory: Path) -> None:
    found = column("request_id", ["x" * 512, "x" * 513, ""], pa.string(), directory)

    assert refused(found) == [(2, "field_too_long"), (3, "empty_field")]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("name", ["query_text", "text", "a_column_of_theirs"])
def test_bytes_that_are_not_utf_8_refuse_their_row_alone(
    name: str, type_: Any, directory: Path
) -> None:
    raw = pa.array([b"a", b"caf\xe9", b"c"], pa.large_binary() if "large" in str(type_) else None)
    bad = pa.Array.from_buffers(type_, 3, raw.buffers())
    table = {"query_text": pa.array(["a", "b", "c"]), "z": pa.array([1, 2, 3]), name: bad}

    found = read(written(table), directory)

    assert refused(found) == [(2, "invalid_utf8")]
    assert len(found) == 3


def test_nul_is_replaced_with_a_warning(directory: Path) -> None:
    table = pa.Table.from_pylist(
        [
            {"query_text": "a", "text": "x\0y", "context": {"k": "v"}},
            {"query_text": "b", "text": "xy", "context": {"k": "\0"}},
            {"query_text": "c", "text": "\\u0000", "context": None},
        ]
    )

    found = read(written(table), directory)

    assert kept(found, "text") == ["x\ufffdy", "xy", "\\u0000"]
    assert kept(found, "context") == [{"k": "v"}, {"k": "\ufffd"}, None]
    assert kept(found, "warnings") == [("nul_replaced",), ("nul_replaced",), ()]


def test_a_row_over_the_limit_is_refused_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 100)
    texts = ["x" * 90, "x" * 99, "é" * 50, "short"]

    assert refused(column("text", texts, pa.string(), directory)) == [
        (2, "row_too_large"),
        (3, "row_too_large"),
    ]
    found = column("context", [{"k": "x" * 120}, {"k": "y"}], None, directory)
    assert refused(found) == [(1, "row_too_large")]


# Files


def test_files_without_rows_have_none(directory: Path) -> None:
    assert read(b"", directory) == []
    assert read(written({"query_text": pa.array([], pa.string())}), directory) == []


@pytest.mark.parametrize("options", [
    {"compression": "zstd"}, {"compression": "gzip"}, {"compression": "brotli"},
    {"compression": "lz4"}, {"compression": "none"}, {"use_dictionary": False},
    {"data_page_version": "2.0"}, {"version": "1.0"}, {"store_schema": False},
    {"row_group_size": 1}, {"write_page_index": True},
])  # fmt: skip
def test_any_way_of_writing_gives_the_same_rows(options: Any, directory: Path) -> None:
    table = pa.table({"query_text": [f"q{n % 7}" for n in range(100)], "request_id": range(100)})

    found = read(written(table, **options), directory)

    assert found == read(written(table), directory)
    assert len(kept(found, "request_id")) == 100


GOOD = written({"query_text": ["a", "b"], "text": ["x" * 50, "y" * 50]})


@pytest.mark.parametrize(
    "body", [b"query_text\na\n", b"PAR1", b"PAR1PAR1", GOOD[:-1], GOOD[1:], GOOD[: len(GOOD) // 2],
             b"PAR1" + GOOD[50:], GOOD[:-8] + b"\xff\xff\xff\x7fPAR1"],
)  # fmt: skip
def test_what_is_no_whole_parquet_file_is_refused(body: bytes, directory: Path) -> None:
    error = refusal(body, directory)

    assert (error.status, error.code) == (422, "invalid_parquet")
    assert len(error.detail) < 400


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4))
def test_a_damaged_file_is_read_or_refused_and_never_raises(
    directory: Path, damage: list[tuple[int, int]]
) -> None:
    body = bytearray(GOOD)
    for place, byte in damage:
        body[place] = byte

    try:
        found = read(bytes(body), directory, limit=1 << 20)
    except (BadUpload, UploadTooLarge):
        return

    assert all(isinstance(row, Row | Refused) for row in found)


def test_a_file_that_unfolds_beyond_the_limit_is_refused(directory: Path) -> None:
    body = written({"query_text": ["x" * 1000 + str(n) for n in range(1000)]}, compression="zstd")
    assert len(body) < 100_000

    error = refusal(body, directory, limit=500_000)

    assert (error.status, error.code) == (413, "decompressed_too_large")


def test_a_file_that_says_so_itself_is_refused_before_it_is_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = written({"query_text": ["x" * 1000 + str(n) for n in range(1000)]})
    monkeypatch.setattr(parquet, "_batches", None)

    assert refusal(body, directory, limit=500_000).code == "decompressed_too_large"


def test_a_dictionary_that_unfolds_beyond_the_limit_is_refused(directory: Path) -> None:
    body = written({"query_text": ["x" * 10_000] * 1000})
    assert len(body) < 20_000

    error = refusal(body, directory, limit=500_000)

    assert (error.status, error.code) == (413, "decompressed_too_large")


def test_memory_is_that_of_a_few_rows(directory: Path) -> None:
    chance = random.Random(7)
    texts = [chance.randbytes(500).hex() for _ in range(30_000)]
    big = written({"query_text": texts}, compression="none", use_dictionary=False)

    def peak() -> Iterator[int]:
        for _ in range(2):  # the first run pays for what is loaded once
            before = pa.total_allocated_bytes()
            tracemalloc.start()
            most = 0
            for _ in read_parquet([big], directory=directory, limit=LIMIT):
                most = max(most, pa.total_allocated_bytes() - before)
            yield most + tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()

    *_, used = peak()

    assert used < 8 << 20  # the one row group has 30 MB


def test_a_uuid_column_says_how_to_send_it(directory: Path) -> None:
    table = {"query_text": ["q"], "request_id": pa.array([uuid.uuid4().bytes], pa.uuid())}

    error = refusal(written(table), directory)

    assert error.code == "bad_column_type"
    assert "cast it to text" in error.detail
