"""CSV: what a record, a cell and a header may be, and where a record begins after a bad one."""

import csv
import io
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fulfillment.errors import BadUpload
from fulfillment.formats import Refused, Row, rows
from fulfillment.formats.delimited import read_csv
from fulfillment.formats.ndjson import read_row

BOM = b"\xef\xbb\xbf"


def read(body: bytes | str) -> list[Row | Refused]:
    return list(read_csv([body.encode() if isinstance(body, str) else body]))


def cell(name: str, text: str) -> Row | Refused:
    """Return what becomes of a row with one more cell."""
    found = read(written([["query_text", name], ["q", text]]))
    return found[0]


def written(table: Sequence[Sequence[Any]], **options: Any) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, **options).writerows(table)
    return file.getvalue()


def taken(found: Sequence[Row | Refused]) -> list[tuple[int, str]]:
    return [(row.line, row.item["query_text"]) for row in found if isinstance(row, Row)]


def refused(found: Sequence[Row | Refused]) -> list[tuple[int, str]]:
    return [(row.line, row.code) for row in found if isinstance(row, Refused)]


def refusal(body: bytes | str) -> BadUpload:
    with pytest.raises(BadUpload) as caught:
        read(body)
    assert caught.value.status == 422
    return caught.value


# Records


def test_a_record_is_called_by_the_line_where_it_starts() -> None:
    body = (
        "request_id,query_text\r\n"
        'a,"two\r\nlines"\r\n'
        "\r\n"
        'b,"a\n\nb"\r\n'
        "c,too,many\n"
        'd,"x\ny",z\n'
        'e,"said ""hi"""\n'
        'f,5 inch "pipe" it\'s'
    )

    found = read(body)

    assert taken(found) == [
        (2, "two\r\nlines"),
        (5, "a\n\nb"),
        (11, 'said "hi"'),
        (12, '5 inch "pipe" it\'s'),
    ]
    assert refused(found) == [(8, "wrong_field_count"), (9, "wrong_field_count")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_where_the_body_is_cut_changes_nothing(size: int) -> None:
    body = BOM + '"query_text",url\r\n"é\r\nx",u\r\nb,"v"\r\n'.encode()

    found = list(read_csv(body[i : i + size] for i in range(0, len(body), size)))

    assert taken(found) == [(2, "é\r\nx"), (4, "b")]


def test_text_keeps_its_line_separators_and_blanks() -> None:
    text = " a\u2028b\u2029c\x85d\x0be\x0cf\rg\t "

    (found,) = read(written([["query_text"], [text]]))

    assert isinstance(found, Row)
    assert found.item == {"query_text": text}


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\r\r\n", "\n\n\n"])
def test_the_last_record_needs_no_line_end(ending: str) -> None:
    assert taken(read("query_text\na" + ending)) == [(2, "a")]


@pytest.mark.parametrize("body", ["", "\n\r\n", "query_text", "query_text\r\n\r\n", BOM.decode()])
def test_a_file_without_records_has_no_rows(body: str) -> None:
    assert read(body) == []


# Bad records


@pytest.mark.parametrize(
    "bad",
    [
        'x,"a"b',
        'x,"a" ',
        "x,a\rb",
        'x,"a"b,"more\nlines, of\nthe bad one"',
        '"x\ny"z,"a\n,b\n"',
        'x,"a"b,"c\rd\ne"',
    ],
)
def test_a_record_with_stray_quotes_or_cr_is_refused_alone_with_all_its_lines(bad: str) -> None:
    found = read(f"request_id,query_text\n1,a\n{bad}\n2,b\n")

    assert [query for _, query in taken(found)] == ["a", "b"]
    assert refused(found) == [(3, "bad_quoting")]
    assert found[-1].line == 4 + bad.count("\n")


@pytest.mark.parametrize("rest", ["", "2,b\n3,c\n"])
@pytest.mark.parametrize("start", ['1,"', '1,"a"b,"', 'x,y\n1,"a ""'])
def test_a_quote_that_is_never_closed_refuses_the_file(start: str, rest: str) -> None:
    error = refusal(f"request_id,query_text\n0,good\n{start}\n{rest}")

    assert error.code == "unclosed_quote"
    assert error.errors[0]["line"] == 3 + start.count("\n")


@pytest.mark.parametrize(
    "bad", [b"x,caf\xe9", b'x,"\xff\nb"', b'x,"a\n\xed\xa0\x80"', b"\xfe\xff,a"]
)
def test_a_record_that_is_not_utf_8_is_refused_alone(bad: bytes) -> None:
    found = read(b"request_id,query_text\n1,a\n" + bad + b"\n2,\xc3\xa9\n")

    assert [query for _, query in taken(found)] == ["a", "é"]
    assert refused(found) == [(3, "invalid_utf8")]


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "empty_field"), (" ", "empty_field"), ("\u200b", "empty_field")],
)
def test_a_blank_query_is_refused(text: str, code: str) -> None:
    found = read(written([["query_text", "url"], [text, "u"], ["q", "u"]]))

    assert refused(found) == [(2, code)]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("result_weight", "abc", "bad_type"),
        ("result_weight", "1,5", "bad_type"),
        ("result_weight", " 1", "bad_type"),
        ("result_weight", "1_000", "bad_type"),
        ("result_weight", "٣", "bad_type"),
        ("result_weight", "NaN", "bad_number"),
        ("query_weight", "-Infinity", "bad_number"),
        ("query_weight", "1e999", "bad_number"),
        ("side", "left", "bad_type"),
        ("request_id", "x" * 513, "field_too_long"),
        ("url", "x" * 16_385, "field_too_long"),
        ("context", "{", "invalid_json"),
        ("context", "[]", "bad_type"),
        ("context", '"x"', "bad_type"),
        ("context", '{"a": NaN}', "bad_number"),
        ("context", '{"a": 1e999}', "bad_number"),
        ("context", '{"a":' * 101 + "1" + "}" * 101, "too_deep"),
    ],
)
def test_a_cell_that_cannot_be_what_its_column_is_refuses_its_row(
    name: str, text: str, code: str
) -> None:
    found = cell(name, text)

    assert isinstance(found, Refused)
    assert (found.line, found.code) == (2, code)
    assert name in found.detail or code == "too_deep"


@pytest.mark.parametrize("depth", [99, 100])
def test_a_context_may_be_as_deep_as_in_json(depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth

    found, in_json = (
        cell("context", text),
        read_row(1, b'{"query":"q","context":%b}' % text.encode()),
    )

    assert isinstance(found, Row) == isinstance(in_json, Row) == (depth == 99)


def test_a_record_over_the_row_limit_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 40)
    long = "x" * 60
    body = (
        "request_id,query_text\n"
        f"1,{long}\n"
        f'2,"{long}"\n'
        f'3,"a\n{long}\n b"\n'
        f'4,"{"b" * 15}\n{"c" * 15}\n{"d" * 15}, ""\ne",x\n'
        f'5,"{long}, ""\n"\n'
        "6,good\n"
    )

    for size in (1, 7, 64, 1000):
        found = list(read_csv(body[i : i + size].encode() for i in range(0, len(body), size)))

        assert taken(found) == [(13, "good")]
        assert refused(found) == [(n, "row_too_large") for n in (2, 3, 4, 7, 11)]
    assert refusal(f'query_text\n"{long}').code == "unclosed_quote"
    assert refusal(f"query_text,{long}\na,b").code == "row_too_large"


def test_a_cell_of_megabytes_is_taken_whole() -> None:
    text = "<p>x</p>" * 200_000

    found = cell("html", text)

    assert isinstance(found, Row)
    assert found.item["html"] == text


def test_a_quote_that_is_never_closed_does_not_fill_memory() -> None:
    def endless() -> Iterator[bytes]:
        yield b'query_text\n"'
        for _ in range(64 << 20 >> 16):
            yield b"x" * (64 << 10)

    tracemalloc.start()
    try:
        with pytest.raises(BadUpload):
            list(read_csv(endless()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 3 * rows.MAX_ROW_BYTES


# Cells


def test_cells_stay_text_but_for_weights_and_context() -> None:
    odd = ["007", "1e5", "NA", "null", "None", "nan", "TRUE", "2024-01-02", "=1+1", " x "]
    names = ["query_text", *(f"c{n}" for n in range(len(odd))), "result_weight", "context"]

    (found,) = read(written([names, ["0123", *odd, "0.50", '{"n": 1.0}']]))

    assert isinstance(found, Row)
    assert found.item == {"query_text": "0123", "context": {"n": 1.0}}
    assert list((found.extra or {}).values()) == odd
    assert found.result_weight == 0.5


def test_an_empty_cell_is_an_absent_field() -> None:
    names = ["query_text", "request_id", "query_id", "url", "title", "text", "html", "context",
             "side", "result_weight", "query_weight", "market"]  # fmt: skip

    (found,) = read(written([names, ["q", *[""] * 11]]))

    assert found == Row(2, None, None, None, None, None, None, {"query_text": "q"}, None, ())


def test_a_full_row_says_the_same_as_in_json() -> None:
    sent = {
        "request_id": "1", "query_id": "2", "result_id": "3", "query_text": "q, \"x\"\n",
        "url": "u", "title": "t", "text": "x", "html": "<p>", "side": "base", "market": "de",
    }  # fmt: skip
    context = '{"big": 36893488147419103233, "b": [1, 2.50, null, true]}'

    (found,) = read(
        written([[*sent, "context", "result_weight"], [*sent.values(), context, "-1.5e2"]])
    )

    in_json = (
        orjson.dumps(sent)[:-1] + f', "context": {context}, "result_weight": -150.0}}'.encode()
    )
    assert found == read_row(2, in_json)


@pytest.mark.parametrize(
    ("header", "cells", "query", "extra"),
    [
        ("query", "a", "a", None),
        ("query_text,query", "a,b", "a", {"query": "b"}),
        ("query_text,query", "a,a", "a", None),
        ("query_text,query", ",b", "b", None),
        ("query_text,query", "a,", "a", None),
    ],
)
def test_query_is_an_alias(header: str, cells: str, query: str, extra: Any) -> None:
    (found,) = read(f"{header}\n{cells}\n")

    assert isinstance(found, Row)
    assert (found.item, found.extra) == ({"query_text": query}, extra)


@pytest.mark.parametrize(
    ("name", "text", "kept", "warnings"),
    [
        ("text", "a\0b", "a\ufffdb", ("nul_replaced",)),
        ("text", "a\\u0000b", "a\\u0000b", ()),
        ("context", '{"k": "\\u0000"}', {"k": "\ufffd"}, ("nul_replaced",)),
        ("context", '{"k": "a\0b\\ud800"}', {"k": "a\ufffdb\ufffd"},
         ("nul_replaced", "surrogate_replaced")),
    ],
)  # fmt: skip
def test_what_postgresql_cannot_store_is_replaced_with_a_warning(
    name: str, text: str, kept: Any, warnings: tuple[str, ...]
) -> None:
    found = cell(name, text)

    assert isinstance(found, Row)
    assert (found.item[name], found.warnings) == (kept, warnings)


# The header


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("request_id;query_text;url\nx;y;z\n", "semicolons"),
        ("request_id\tquery_text\nx\ty\n", "tabs"),
        ("id|query\nx|y\n", "bars"),
        ("request_id,Query_Text\nx,y\n", "letter by letter"),
        ("request_id, query_text\nx,y\n", "' query_text'"),
        ("request_id,url\nx,y\n", "'request_id', 'url'"),
        ("sep=,\nquery_text\nx\n", "'sep='"),
        ("just text", "'just text'"),
        ('{"query_text": "q"}\n', "query_text"),
    ],
)
def test_a_file_without_a_query_column_is_refused_with_the_header_found(
    body: str, says: str
) -> None:
    error = refusal(body)

    assert error.code == "missing_column"
    assert says in error.detail
    assert error.extra["header"]


def test_a_file_whose_lines_end_in_cr_alone_is_refused() -> None:
    error = refusal("request_id,query_text\r1,a\r2,b\r")

    assert error.code == "bad_quoting"
    assert "carriage return" in error.detail


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("query_text,url,url\na,b,c\n", "duplicate_column"),
        ("query_text,,\na,b,c\n", "duplicate_column"),
        (b"query_text,caf\xe9\na,b\n", "unsupported_encoding"),
        (b"query_text,a\0\na,b\n", "unsupported_encoding"),
        ("query_text\na\n".encode("utf-16"), "unsupported_encoding"),
        ("query_text\na\n".encode("utf-16-le"), "unsupported_encoding"),
        ("query_text\na\n".encode("utf-32-be"), "unsupported_encoding"),
        ('"query_text"x\na\n', "bad_quoting"),
        ('"query_text\na\n', "unclosed_quote"),
    ],
)
def test_a_header_that_cannot_be_is_refused(body: bytes | str, code: str) -> None:
    assert refusal(body).code == code


def test_a_byte_order_mark_before_a_quoted_header_is_dropped() -> None:
    found = read(BOM + '"request_id","query_text"\n"b,1","in\ufeffside"\n'.encode())

    assert isinstance(found[0], Row)
    assert (found[0].request_id, found[0].item) == ("b,1", {"query_text": "in\ufeffside"})


# Laws


@given(
    st.lists(
        st.sampled_from([b'"', b",", b"\n", b"\r", b"\0", b"a", b" ", b"\xff", "é".encode(), b"1"]),
        max_size=40,
    ).map(b"".join)
    | st.binary(max_size=60)
)
@example(b'"a"b,"\n\r"\n1,2')
@example(b'a,"\n"\r""b"\n')
def test_any_bytes_are_taken_or_refused_and_every_record_is_one_or_the_other(tail: bytes) -> None:
    try:
        found = read(b"query_text,x\n" + tail)
    except BadUpload:  # a quote that is never closed
        return

    numbers = [row.line for row in found]
    assert numbers == sorted(set(numbers))
    if b"\r" not in tail:
        lines = tail.decode(errors="surrogateescape").split("\n")
        records = [cells for cells in csv.reader(f"{line}\n" for line in lines) if cells]
        assert len(found) == len(records)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8"), max_size=12).map(lambda text: "q" + text),
            st.text(st.characters(codec="utf-8") | st.sampled_from('",\r\n\0 '), max_size=12),
            st.text(st.characters(codec="utf-8"), max_size=12),
        ),
        max_size=6,
    ),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_a_csv_writer_writes_comes_back_character_by_character(
    table: list[tuple[str, ...]], quoting: Any, ending: str
) -> None:
    # Python before 3.13 leaves a CR unquoted that is not its line end; nobody could read that.
    if ending == "\n":
        quoting = csv.QUOTE_ALL

    found = read(
        written([["query_text", "text", "note"], *table], quoting=quoting, lineterminator=ending)
    )

    for sent, row in zip(table, found, strict=True):
        assert isinstance(row, Row)
        kept = (row.item["query_text"], row.item.get("text", ""), (row.extra or {}).get("note", ""))
        assert kept == tuple(text.replace("\0", "\ufffd") for text in sent)
        assert row.warnings == (("nul_replaced",) if any("\0" in text for text in sent) else ())


def test_a_header_that_no_other_delimiter_can_read_is_refused_like_any_other() -> None:
    assert refusal(',"\r"\n').code == refusal(",b\n").code
