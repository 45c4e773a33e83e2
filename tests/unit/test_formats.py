import json
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fulfillment.errors import BadUpload
from fulfillment.formats import Refused, Row
from fulfillment.formats import rows as formats
from fulfillment.formats.lines import lines
from fulfillment.formats.ndjson import read_ndjson, read_row

BOM = b"\xef\xbb\xbf"
GOOD = b'{"query_text":"q"}'


def taken(line: bytes | str) -> Row:
    row = read_row(1, line.encode() if isinstance(line, str) else line)
    assert isinstance(row, Row), row
    return row


def refused(line: bytes | str) -> Refused:
    row = read_row(1, line.encode() if isinstance(line, str) else line)
    assert isinstance(row, Refused), row
    return row


def row(**fields: Any) -> bytes:
    return json.dumps({"query_text": "q", **fields}, ensure_ascii=False).encode()


def cut(body: bytes, places: Sequence[int]) -> list[bytes]:
    """Cut a body at the places, some of which may be equal: then a piece is empty."""
    ends = sorted(place % (len(body) + 1) for place in places)
    return [body[a:b] for a, b in zip([0, *ends], [*ends, len(body)], strict=True)]


# Records


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a\r", b"b\r"]),
        (b"\n\na\n\n", [b"", b"", b"a", b""]),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\n".encode(), ["a\u2028b\u2029c\x85d\x0be\x0cf".encode()]),
        (b"a\rb\n", [b"a\rb"]),
        (BOM + b"a\n" + BOM + b"b\n", [b"a", BOM + b"b"]),
        (BOM, []),
    ],
)
def test_a_record_ends_at_lf_and_nowhere_else(body: bytes, expected: list[bytes]) -> None:
    assert list(lines([body])) == list(enumerate(expected, 1))


@given(
    pieces=st.lists(
        st.sampled_from([b"\n", b"\r", b"a", b"bc", b"\xef", b"\xef\xbb", BOM, b"\xff", b"\xfe"])
    ),
    places=st.lists(st.integers(0, 60), max_size=20),
)
@example(pieces=[b"aaaaaaaa"], places=[4])
def test_where_a_body_is_cut_into_chunks_changes_nothing(
    pieces: list[bytes], places: list[int]
) -> None:
    body = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "MAX_ROW_BYTES", 5)

        found = outcome(cut(body, places))

    if body.startswith((b"\xff\xfe", b"\xfe\xff")):
        assert found == "unsupported_encoding"
        return
    records = body.removeprefix(BOM).split(b"\n")
    if not records[-1]:
        records.pop()
    assert found == [(n, r if len(r) <= 5 else None) for n, r in enumerate(records, 1)]


def outcome(chunks: Sequence[bytes]) -> object:
    try:
        return list(lines(chunks))
    except BadUpload as error:
        return error.code


def test_rows_keep_their_physical_line_across_blank_lines_and_crlf() -> None:
    body = (
        b'\n{"query_text":"a"}\r\n \t\r\n{"query_text":"b"}\r\nno\r\n{"query_text":"c\\r\\u2028"}'
    )

    found = list(read_ndjson([body]))

    assert [(r.line, r.item["query_text"]) for r in found if isinstance(r, Row)] == [
        (2, "a"),
        (4, "b"),
        (6, "c\r\u2028"),
    ]
    assert [(r.line, r.code) for r in found if isinstance(r, Refused)] == [(5, "invalid_json")]


def test_line_separators_of_unicode_stay_inside_their_text() -> None:
    text = "a\u2028b\u2029c\x85d"

    (found,) = read_ndjson([row(text=text) + b"\n"])

    assert isinstance(found, Row)
    assert found.item["text"] == text


@pytest.mark.parametrize(
    ("length", "fits"), [(formats.MAX_ROW_BYTES, True), (formats.MAX_ROW_BYTES + 1, False)]
)
@pytest.mark.parametrize("ending", [b"", b"\n", b"\n" + GOOD + b"\n"])
def test_the_row_limit_is_exact(length: int, fits: bool, ending: bytes) -> None:
    body = b"x" * length + ending

    found = list(lines(body[i : i + (1 << 20)] for i in range(0, len(body), 1 << 20)))

    assert [(n, None if line is None else len(line)) for n, line in found[:1]] == [
        (1, length if fits else None)
    ]
    assert found[1:] == ([(2, GOOD)] if len(ending) > 1 else [])


def test_a_row_over_the_limit_is_refused_alone() -> None:
    too_long = b'{"query_text":"' + b"a" * formats.MAX_ROW_BYTES + b'"}'

    first, second, third = read_ndjson([GOOD + b"\n" + too_long + b"\n" + GOOD])

    assert isinstance(first, Row)
    assert isinstance(second, Refused)
    assert (second.line, second.code) == (2, "row_too_large")
    assert isinstance(third, Row)
    assert third.line == 3


def test_an_endless_line_does_not_fill_memory() -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(64 << 20 >> 16):
            yield bytes(64 << 10).replace(b"\0", b"x")
        yield b"\n" + GOOD

    tracemalloc.start()
    try:
        found = list(lines(endless()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found == [(1, None), (2, GOOD)]
    assert peak < 2 * formats.MAX_ROW_BYTES


# Encodings


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_byte_order_mark_is_dropped_at_the_start_only(size: int) -> None:
    body = BOM + '{"query_text":"\ufeffq"}\n'.encode() + BOM + GOOD

    found = list(read_ndjson(body[i : i + size] for i in range(0, len(body), size)))

    assert isinstance(found[0], Row)
    assert found[0].item == {"query_text": "\ufeffq"}
    assert isinstance(found[1], Refused)
    assert (found[1].line, found[1].code) == (2, "invalid_json")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_utf_16_and_utf_32_are_refused_whole_marked_or_not(encoding: str, size: int) -> None:
    body = GOOD.decode().encode(encoding)

    with pytest.raises(BadUpload) as caught:
        list(read_ndjson(body[i : i + size] for i in range(0, len(body), size)))

    assert (caught.value.code, caught.value.status) == ("unsupported_encoding", 422)


@pytest.mark.parametrize("body", [b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"\xff\xfe\0\0"])
def test_a_file_of_a_few_bytes_in_the_wrong_encoding_is_refused(body: bytes) -> None:
    with pytest.raises(BadUpload, match="UTF-16"):
        list(lines([body]))


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"caf\xe9"]
)
def test_bytes_that_are_not_utf_8_refuse_their_row_alone(text: bytes) -> None:
    bad = b'{"query_text":"' + text + b'"}'

    first, second = read_ndjson([bad + b"\n" + GOOD])

    assert isinstance(first, Refused)
    assert (first.line, first.code) == (1, "invalid_utf8")
    assert isinstance(second, Row)


# What a row may not be


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("no json", "invalid_json"),
        ("{", "invalid_json"),
        ('{"query_text":"a"}}', "invalid_json"),
        ('{"query_text":"a"} {"query_text":"b"}', "invalid_json"),
        ("{'query_text':'a'}", "invalid_json"),
        ('{"query_text":"a",}', "invalid_json"),
        ('{"query_text":"raw\ttab"}', "invalid_json"),
        ('{"query_text":"raw\0nul"}', "invalid_json"),
        ('{"query_text":"a","query_weight":01}', "invalid_json"),
        ('{"query_text":"a","query_weight":.5}', "invalid_json"),
        ('{"query_text":"a","query_weight":\u0661}', "invalid_json"),
        ("[]", "not_an_object"),
        ("[{}]", "not_an_object"),
        ('"text"', "not_an_object"),
        ("1", "not_an_object"),
        ("null", "not_an_object"),
        ("true", "not_an_object"),
        ("{}", "missing_field"),
        ('{"query_text":null}', "missing_field"),
        ('{"query":null}', "missing_field"),
        ('{"query_text":null,"query":null}', "missing_field"),
        ('{"QUERY_TEXT":"a"}', "missing_field"),
        ('{"query_text":5}', "bad_type"),
        ('{"query_text":true}', "bad_type"),
        ('{"query":["a"]}', "bad_type"),
        ('{"query_text":"a","html":5}', "bad_type"),
        ('{"query_text":"a","text":{}}', "bad_type"),
        ('{"query_text":"a","url":[]}', "bad_type"),
        ('{"query_text":"a","title":false}', "bad_type"),
        ('{"query_text":"a","context":"x"}', "bad_type"),
        ('{"query_text":"a","context":[1]}', "bad_type"),
        ('{"query_text":"a","side":"left"}', "bad_type"),
        ('{"query_text":"a","side":"TEST"}', "bad_type"),
        ('{"query_text":"a","side":1}', "bad_type"),
        ('{"query_text":"a","side":["test"]}', "bad_type"),
        ('{"query_text":"a","request_id":7}', "bad_type"),
        ('{"query_text":"a","query_id":7.5}', "bad_type"),
        ('{"query_text":"a","result_id":false}', "bad_type"),
        ('{"query_text":"a","request_id":""}', "empty_field"),
        ('{"query_text":"a","query_id":""}', "empty_field"),
        ('{"query_text":"a","result_weight":true}', "bad_type"),
        ('{"query_text":"a","query_weight":"1"}', "bad_type"),
        ('{"query_text":"a","query_weight":[]}', "bad_type"),
        ('{"query_text":"a","result_weight":NaN}', "bad_number"),
        ('{"query_text":"a","result_weight":Infinity}', "bad_number"),
        ('{"query_text":"a","result_weight":-Infinity}', "bad_number"),
        ('{"query_text":"a","result_weight":1e999}', "bad_number"),
        ('{"query_text":"a","result_weight":-1e999}', "bad_number"),
        ('{"query_text":"a","result_weight":1' + "0" * 309 + "}", "bad_number"),
        ('{"query_text":"a","other":[{"deep":NaN}]}', "bad_number"),
        ('{"query_text":"a","context":{"x":1e999}}', "bad_number"),
        ('{"query_text":"a","context":{"x":1' + "0" * 4_000 + "}}", "bad_number"),
    ],
)
def test_a_bad_row_is_refused_with_its_code(line: str, code: str) -> None:
    found = refused(line)

    assert found.code == code
    assert found.line == 1
    assert found.detail


@pytest.mark.parametrize(
    "query",
    ["", "   ", "\t\n", "\u200b", "\u200b\u200d \u2060", "\ufeff", "\u00a0", "\u3000", "\u202e",
     "\u2066\u2069", "\u00ad", "\u180e"],
)  # fmt: skip
@pytest.mark.parametrize("field", ["query_text", "query"])
def test_a_query_of_blanks_and_zero_width_characters_is_empty(field: str, query: str) -> None:
    assert refused(json.dumps({field: query})).code == "empty_field"


@pytest.mark.parametrize("query", ["0", ".", "\u200bx", " é", "😀", "\u200b?\u200b", "字", "-"])
def test_a_query_with_anything_visible_is_taken_as_sent(query: str) -> None:
    assert taken(row(query_text=query)).item["query_text"] == query


@pytest.mark.parametrize("field", ["url", "title", "text", "html"])
def test_empty_texts_other_than_the_query_are_taken(field: str) -> None:
    assert taken(row(**{field: ""})).item == {"query_text": "q", field: ""}


@pytest.mark.parametrize("field", ["request_id", "query_id", "result_id"])
def test_ids_may_have_512_characters_and_no_more(field: str) -> None:
    longest = "é😀" * 256

    assert getattr(taken(row(**{field: longest})), field) == longest
    found = refused(row(**{field: longest + "x"}))
    assert found.code == "field_too_long"
    assert field in found.detail


def test_urls_may_have_16384_characters_and_no_more() -> None:
    longest = "é" * 16_384

    assert taken(row(url=longest)).item["url"] == longest
    assert refused(row(url=longest + "x")).code == "field_too_long"


def test_only_a_number_that_is_known_exactly_is_offered_as_an_id() -> None:
    assert (
        '"18446744073709551615"'
        in refused('{"query_text":"q","query_id":18446744073709551615}').detail
    )
    for value in ("18446744073709551616", "1e30", "0.1", "1" * 400, "true"):
        found = refused(f'{{"query_text":"q","query_id":{value}}}')
        assert (found.code, '"' in found.detail) == ("bad_type", False)


@pytest.mark.parametrize("field", ["request_id", "query_text", "side", "context", "query_weight"])
def test_what_is_said_of_a_huge_field_is_short(field: str) -> None:
    for value in (["x" * 100_000], [{"x": "y"}] * 10_000):
        found = refused(row(**{field: value}))
        assert (found.code, len(found.detail) < 200) == ("bad_type", True)


@pytest.mark.parametrize("depth", [100, 101, 1_000, 20_000])
@pytest.mark.parametrize("kind", ["[]", "{}"])
@pytest.mark.parametrize("spoilt", ["", ',"n":1e999', ',"n":"\\ud800"'])
def test_json_may_be_nested_100_levels_deep(depth: int, kind: str, spoilt: str) -> None:
    opening, closing = ("[", "]") if kind == "[]" else ('{"a":', "}")
    inner = "1" if kind == "[]" else "{}"
    levels = depth - (1 if kind == "[]" else 2)  # the row itself is the first
    line = f'{{"query_text":"q","x":{opening * levels}{inner}{closing * levels}{spoilt}}}'

    found = read_row(1, line.encode())

    if depth > 100:
        assert isinstance(found, Refused)
        assert found.code == "too_deep"
    elif "1e999" in spoilt:
        assert isinstance(found, Refused)
        assert found.code == "bad_number"
    else:
        assert isinstance(found, Row)


@pytest.mark.parametrize("spoilt", ["", ',"n":1e999', ',"n":"\\ud800"'])
def test_brackets_inside_text_and_beside_each_other_are_not_depth(spoilt: str) -> None:
    text = json.dumps("function(){" * 500 + '"\\[[{' * 500)
    line = f'{{"query_text":"q","text":{text},"x":[{"[]," * 300}{{}}]{spoilt}}}'

    found = read_row(1, line.encode())

    assert isinstance(found, Refused) == ("1e999" in spoilt)
    assert not isinstance(found, Refused) or found.code == "bad_number"


@pytest.mark.parametrize(
    "tail", [b'"' + b'\\"' * 200_000, b'"' + b'\\"' * 200_000 + b"\\", b'"' + b"a" * 1_000_000,
             b'"' * 400_000, b"x" * 1_000_000],
)  # fmt: skip
def test_telling_depth_apart_takes_time_and_memory_in_proportion(tail: bytes) -> None:
    line = b'{"query_text":"q","x":' + b"[" * 60 + b"]" * 60 + b"[" * 60 + tail

    tracemalloc.start()
    try:
        found = refused(line)  # would take minutes if each quote were tried as a beginning
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found.code == "invalid_json"
    assert peak < 20 * len(line)


# What is replaced


@pytest.mark.parametrize(
    ("sent", "stored", "warnings"),
    [
        (r"a\u0000b", "a\ufffdb", ("nul_replaced",)),
        (r"\u0000\u0000", "\ufffd\ufffd", ("nul_replaced",)),
        (r"a\\u0000b", r"a\u0000b", ()),
        (r"a\\\u0000b", "a\\\ufffdb", ("nul_replaced",)),
        (r"\ud83d", "\ufffd", ("surrogate_replaced",)),
        (r"\ude00\ud83d", "\ufffd\ufffd", ("surrogate_replaced",)),
        (r"\ud83d\ude00", "😀", ()),
        (r"\ud83d\\ude00", "\ufffd\\ude00", ("surrogate_replaced",)),
        (r"\u0000\uDC00", "\ufffd\ufffd", ("nul_replaced", "surrogate_replaced")),
        (r"\ufffd", "\ufffd", ()),
    ],
)
@pytest.mark.parametrize("where", ["text", "context", "context key", "extra", "request_id"])
def test_nul_and_half_surrogates_become_u_fffd_with_a_warning(
    where: str, sent: str, stored: str, warnings: tuple[str, ...]
) -> None:
    field = {
        "text": f'"text":"{sent}"',
        "context": f'"context":{{"k":["{sent}"]}}',
        "context key": f'"context":{{"{sent}":1}}',
        "extra": f'"other":{{"k":"{sent}"}}',
        "request_id": f'"request_id":"{sent}"',
    }[where]

    found = taken(f'{{"query_text":"q",{field}}}')

    kept = {
        "text": found.item.get("text"),
        "context": (found.item.get("context") or {}).get("k", [None])[0],
        "context key": next(iter(found.item.get("context") or {}), None),
        "extra": ((found.extra or {}).get("other") or {}).get("k"),
        "request_id": found.request_id,
    }[where]
    assert kept == stored
    assert found.warnings == warnings


@pytest.mark.parametrize("beside", ["", r',"text":"\u0000"', r',"text":"\ud800"'])
@pytest.mark.parametrize(
    "number",
    ["1180591620717411303424", "-9223372036854775809", "18446744073709551617", "9" * 400],
)
@pytest.mark.parametrize("where", ["context", "extra"])
def test_integers_of_any_length_stay_exact(where: str, number: str, beside: str) -> None:
    field = "context" if where == "context" else "other"

    found = taken(f'{{"query_text":"q","{field}":{{"n":[{number}],"f":1.5e300}}{beside}}}')

    kept = (found.item if where == "context" else found.extra or {})[field]
    assert kept == {"n": [int(number)], "f": 1.5e300}


# What is kept


def test_a_full_row_is_taken_apart_into_its_fields() -> None:
    context = {"b": [1, 2.5, None, True], "a": {"ü": "x"}}

    found = taken(
        row(
            request_id="r1",
            query_id="q1",
            result_id="d1",
            url="https://x.example",
            title="t",
            text="body",
            html="<p>",
            context=context,
            side="base",
            result_weight=2,
            query_weight=0.25,
            market="de",
            n=5,
        )
    )

    assert found == Row(
        line=1,
        request_id="r1",
        query_id="q1",
        result_id="d1",
        side=2,
        result_weight=2.0,
        query_weight=0.25,
        item={
            "query_text": "q",
            "url": "https://x.example",
            "title": "t",
            "html": "<p>",
            "text": "body",
            "context": context,
        },
        extra={"market": "de", "n": 5},
        warnings=(),
    )


def test_absent_and_null_fields_are_the_same() -> None:
    nulls = dict.fromkeys(
        ["request_id", "query_id", "result_id", "url", "title", "text", "html", "context", "side",
         "result_weight", "query_weight", "query"]
    )  # fmt: skip

    assert taken(row(**nulls)) == taken(row())
    assert taken(row()).item == {"query_text": "q"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"query": "alias"}, "alias"),
        ({"query_text": None, "query": "alias"}, "alias"),
        ({"query_text": "own", "query": "alias"}, "own"),
    ],
)
def test_query_is_an_alias_of_query_text(fields: dict[str, Any], expected: str) -> None:
    assert taken(json.dumps(fields)).item == {"query_text": expected}


@pytest.mark.parametrize(
    ("query", "extra"),
    [("q", None), (None, None), ("other", {"query": "other"}), ({"a": 1}, {"query": {"a": 1}})],
)
def test_an_alias_that_says_something_else_is_kept(query: Any, extra: Any) -> None:
    found = taken(row(query=query))

    assert found.item == {"query_text": "q"}
    assert found.extra == extra
    assert taken(row(query=query, n=1)).extra == {**(extra or {}), "n": 1}


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("0", 0.0), ("-3", -3.0), ("1e308", 1e308), ("9007199254740993", 9007199254740992.0),
     ("36893488147419103232", 2.0**65), ("1e-400", 0.0)],
)  # fmt: skip
def test_weights_become_doubles(sent: str, kept: float) -> None:
    found = taken(f'{{"query_text":"q","result_weight":{sent},"query_weight":{sent}}}')

    assert (found.result_weight, found.query_weight) == (kept, kept)
    assert type(found.result_weight) is float


keys = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(
    query=texts.map(lambda text: "q" + text),
    text=texts,
    context=st.dictionaries(texts, values, max_size=3),
    extra=st.dictionaries(texts.map(lambda text: "x_" + text), values, max_size=3),
    ascii_only=st.booleans(),
)
def test_what_a_row_says_is_kept_exactly(
    query: str, text: str, context: dict[str, Any], extra: dict[str, Any], ascii_only: bool
) -> None:
    sent = {"query_text": query, "text": text, "context": context, **extra}

    found = taken(json.dumps(sent, ensure_ascii=ascii_only))

    assert orjson_free(found.item) == orjson_free(
        {"query_text": query, "text": text, "context": context}
    )
    assert orjson_free(found.extra) == orjson_free(extra or None)
    assert found.warnings == ()


def orjson_free(value: Any) -> str:
    """Return a text that tells 1, 1.0 and True apart."""
    return json.dumps(value, sort_keys=True)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_taken_or_refused_and_never_raise(line: bytes) -> None:
    found = read_row(3, line)

    assert found.line == 3
    if isinstance(found, Refused):
        assert orjson.dumps(found.as_json())
