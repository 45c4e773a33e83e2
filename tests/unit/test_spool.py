import json
import tracemalloc
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fulfillment import documents, spool
from fulfillment.errors import BadUpload
from fulfillment.formats import Format
from fulfillment.policy.fingerprint import request_digest, url_digest
from fulfillment.spool import Record, Spool, take_in
from tests.builders import ndjson, row

KEY_FIELDS = ("query_text", "url", "title", "html", "text", "context")


def by_query(item: Mapping[str, Any]) -> bytes:
    return request_digest(item["query_text"])


@pytest.fixture(params=[0, 2_000, spool.KEPT_BYTES], autouse=True)
def kept_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a spool says does not depend on how much of it is kept in memory."""
    monkeypatch.setattr(spool, "KEPT_BYTES", request.param)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there yet"


def spooled(
    body: bytes | Iterable[bytes],
    directory: Path,
    *,
    key_fields: tuple[str, ...] = KEY_FIELDS,
    **options: Any,
) -> Spool:
    return take_in(
        [body] if isinstance(body, bytes) else body,
        directory=directory,
        fingerprint=by_query,
        key_fields=key_fields,
        **options,
    )


def records(of: Spool) -> list[Record]:
    return [record for chunk in of.chunks() for record in chunk]


def refusal(body: bytes, directory: Path, **options: Any) -> BadUpload:
    with pytest.raises(BadUpload) as caught:
        spooled(body, directory, **options)
    return caught.value


def test_good_rows_come_back_whole_and_in_order(directory: Path) -> None:
    context = {"ü": [2**70, 1.0, 1]}
    full = row(
        7, query_id="q", result_id="d", title="t", html="<p>", side="base",
        result_weight=2, query_weight=0.5, market="de", nul="\0",
    )  # fmt: skip
    line = json.dumps({**full, "context": context, "n": 2**66}).encode()

    with spooled(line + b"\n\n" + ndjson([{"query": "b"}]), directory) as taken:
        first, second = records(taken)

    assert first == Record(
        line=1,
        request_id="r7",
        request_digest=request_digest("r7").hex(),
        query_id="q",
        result_id="d",
        side=2,
        result_weight=2.0,
        query_weight=0.5,
        fingerprint=by_query({"query_text": "query 7"}).hex(),
        url_digest=url_digest("https://shop.example/7").hex(),
        extra={"market": "de", "nul": "\ufffd", "n": 2**66},
        warnings=["nul_replaced"],
        item=first.item,
    )
    assert documents.load(first.item) == {
        "query_text": "query 7",
        "url": "https://shop.example/7",
        "title": "t",
        "html": "<p>",
        "text": "page 7",
        "context": context,
    }
    assert (second.line, second.request_id, second.item) == (3, None, b'{"query_text":"b"}')
    assert second.url_digest is None
    assert taken.rows == 2


@pytest.mark.parametrize("number", ["1" + "0" * 400, "18446744073709551616", "1" * 30])
@pytest.mark.parametrize("field", ["context", "extra"])
def test_integers_that_no_float_holds_pass_through(
    field: str, number: str, directory: Path
) -> None:
    body = f'{{"query_text":"q","{field}":{{"n":{number}}}}}'.encode()

    with spooled(body, directory) as taken:
        (record,) = records(taken)

    kept = documents.load(record.item) if field == "context" else record.extra
    assert kept is not None
    assert kept[field] == {"n": int(number)}


def test_only_key_fields_go_on_to_the_rater(directory: Path) -> None:
    with spooled(
        ndjson([row(1, title="t")]), directory, key_fields=("query_text", "text")
    ) as taken:
        (record,) = records(taken)

    assert documents.load(record.item) == {"query_text": "query 1", "text": "page 1"}
    assert record.url_digest == url_digest("https://shop.example/1").hex()


def test_a_row_without_id_is_called_by_its_position(directory: Path) -> None:
    with spooled(ndjson([{"query": "a"}, row(5)]), directory) as taken:
        unnamed, named = records(taken)

    assert [unnamed.name(0), unnamed.name(9), named.name(9)] == ["row-1", "row-10", "r5"]


def test_refused_rows_are_counted_and_the_first_are_listed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MOST_LISTED", 3)

    with spooled(ndjson(["x", row(1), *["x"] * 5]), directory) as taken:
        assert [refused.line for refused in taken.refused] == [1, 3, 4]
        assert (taken.rows, taken.refused_count) == (1, 6)


@pytest.mark.parametrize("body", [b"", b"\n \n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_rows_is_refused(body: bytes, directory: Path) -> None:
    assert (refusal(body, directory).code, refusal(body, directory).status) == ("empty_file", 422)


def test_a_file_without_a_good_row_is_refused_naming_the_bad_ones(directory: Path) -> None:
    error = refusal(ndjson(["x", "[]"]), directory)

    assert (error.code, error.status) == ("no_valid_rows", 422)
    assert [(e["line"], e["code"]) for e in error.errors] == [
        (1, "invalid_json"),
        (2, "not_an_object"),
    ]


# Ids


def test_an_id_that_stands_twice_refuses_the_file_and_names_both_lines(directory: Path) -> None:
    body = ndjson([row(1), "", row(2), "no json", row(3), {**row(2), "text": "other"}])

    error = refusal(body, directory)

    assert (error.code, error.status) == ("duplicate_request_id", 422)
    assert [(e["line"], e["first_line"], e["request_id"]) for e in error.errors] == [(6, 3, "r2")]
    assert "line 6 " in error.detail
    assert "'r2' of line 3;" in error.detail


def test_each_repeat_is_named_with_the_first_line_of_its_id(directory: Path) -> None:
    body = ndjson([row(n) for n in (1, 2, 1, 3, 2, 1, 4)])

    error = refusal(body, directory)

    assert [(e["line"], e["first_line"]) for e in error.errors] == [(3, 1), (5, 2), (6, 1)]


def test_the_first_repeats_of_a_file_are_listed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MOST_LISTED", 3)

    error = refusal(ndjson([row(n) for n in [*range(40), *range(40)]]), directory)

    assert [e["line"] for e in error.errors] == [41, 42, 43]


@given(st.lists(st.sampled_from("abcdef")))
def test_exactly_repeated_ids_are_found(ids: list[str]) -> None:
    expected = [
        (number, ids.index(name) + 1)
        for number, name in enumerate(ids, 1)
        if ids.index(name) + 1 < number
    ]
    digests = bytearray(b"".join(map(request_digest, ids)))
    lines = array("Q", range(1, len(ids) + 1))

    assert spool._repeated(digests, lines) == expected


def test_ids_that_differ_in_case_or_form_are_different(directory: Path) -> None:
    names = ["a", "A", "a ", " a", "é", "e\u0301", "a\u200b"]

    with spooled(ndjson([{**row(), "request_id": n} for n in names]), directory) as taken:
        assert taken.rows == len(names)


@pytest.mark.parametrize(
    ("names", "first_position", "expected"),
    [
        ([None, "row-1"], 0, (2, 1)),
        (["row-2", None], 0, (2, 1)),
        (["row-3", None], 0, None),
        (["row-1", None], 0, None),
        (["row-1", "row-2"], 0, None),
        ([None, None], 0, None),
        (["row-12", None], 10, (2, 1)),
        (["row-2", None], 10, None),
        (["row-02", None], 0, None),
        (["row-2", None], None, None),
        ([None, "x", "row-4", "y", None, None], 0, None),
        ([None, "x", "row-5", "y", None, None], 0, (5, 3)),
    ],
)
def test_no_row_may_take_the_name_that_another_gets_by_its_position(
    names: list[str | None],
    first_position: int | None,
    expected: tuple[int, int] | None,
    directory: Path,
) -> None:
    body = ndjson([{"query": "q"} | ({"request_id": name} if name else {}) for name in names])

    if expected is None:
        with spooled(body, directory, first_position=first_position) as taken:
            assert len(records(taken)) == len(names)
        return
    error = refusal(body, directory, first_position=first_position)

    assert error.code == "duplicate_request_id"
    assert [(e["line"], e["first_line"]) for e in error.errors] == [expected]


# Chunks


def test_chunks_end_at_their_row_limit(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "CHUNK_ROWS", 3)

    with spooled(ndjson([row(n) for n in range(7)]), directory) as taken:
        sizes = [len(chunk) for chunk in taken.chunks()]

    assert sizes == [3, 3, 1]


@given(done=st.integers(0, 8), before=st.integers(1, 4), after=st.integers(1, 4))
def test_chunks_go_on_after_any_row_however_they_were_cut_before(
    done: int, before: int, after: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    body = ndjson([row(n) for n in range(7)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "CHUNK_ROWS", before)
        with spooled(body, tmp_path_factory.getbasetemp()) as taken:
            whole = records(taken)
            patch.setattr(spool, "CHUNK_ROWS", after)

            assert [r for chunk in taken.chunks(skip=done) for r in chunk] == whole[done:]


def test_chunks_end_when_they_are_big(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "CHUNK_BYTES", 5_000)
    monkeypatch.setattr(spool, "KEPT_BYTES", 0)
    body = ndjson([row(n, text="x" * (6_000 if n == 2 else 10)) for n in range(5)])

    with spooled(body, directory) as taken:
        sizes = [len(chunk) for chunk in taken.chunks()]

    assert sizes == [3, 2]


@hypothesis_settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    places=st.lists(st.integers(0, 4_000), max_size=6),
)
def test_how_a_body_arrives_changes_neither_its_digest_nor_its_rows(
    sizes: list[int], places: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    body = ndjson([row(n, text="x" * size) for n, size in enumerate(sizes)])
    ends = sorted(min(place, len(body)) for place in places)
    pieces = [body[a:b] for a, b in zip([0, *ends], [*ends, len(body)], strict=True)]
    directory = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "CHUNK_ROWS", 4)
        patch.setattr(spool, "CHUNK_BYTES", 900)

        with spooled(body, directory) as whole, spooled(pieces, directory) as cut:
            assert whole.digest == cut.digest
            assert records(whole) == records(cut) == records(whole)


# Any bytes


@given(
    body=st.binary(max_size=80)
    | st.lists(
        st.sampled_from(
            [b'{"query_text":"q"}', b'{"query":1}', b"\n", b"\r", b" ", b'"', b"{", b",", b"\xff"]
        ),
        max_size=20,
    ).map(b"".join),
    format=st.sampled_from(Format),
    size=st.integers(1, 90),
)
def test_any_body_is_taken_or_refused_and_every_line_is_accounted_for(
    body: bytes, format: Format, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    directory = tmp_path_factory.getbasetemp()
    try:
        with spooled(pieces, directory, format=format) as taken:
            found = taken.rows + taken.refused_count
    except BadUpload as error:
        if error.code != "no_valid_rows":
            return
        found = len(error.errors)

    if format is Format.NDJSON:
        lines = body.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        assert found == sum(1 for line in lines if line.strip())


# Same or not


def test_the_digest_tells_bodies_and_seeds_apart(directory: Path) -> None:
    def digest(body: bytes, seed: bytes = b"") -> bytes:
        with spooled(body, directory, seed=seed) as taken:
            return taken.digest

    one = ndjson([row(1)])
    digests = [
        digest(one),
        digest(one, b"[1]"),
        digest(one, b"[2]"),
        digest(one + b"\n"),
        digest(ndjson([row(2)])),
        digest(one + b"refused\n"),
        digest(b"\xef\xbb\xbf" + one),
    ]

    assert len(set(digests)) == len(digests)
    assert digest(one, b"[1]") == digests[1]
    assert {len(d) for d in digests} == {16}


# Resources


def test_memory_grows_by_the_digests_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "CHUNK_ROWS", 200)
    rows = 10_000

    def body() -> Iterable[bytes]:
        for start in range(0, rows, 100):
            yield ndjson([row(n, text="x" * 400) for n in range(start, start + 100)])

    def peak(of: Iterable[bytes]) -> int:
        tracemalloc.start()
        try:
            with spooled(of, directory) as taken:
                for _ in taken.chunks():
                    pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    one_row = peak([ndjson([row(1)])])

    # The rows themselves have 500 bytes; as objects, those that are kept take more.
    most = spool.CHUNK_ROWS * 2_000 + 64 * rows + 3 * spool.KEPT_BYTES
    assert peak(body()) - one_row < most


@pytest.mark.parametrize("body", [b"", b"\xff\xfe{", ndjson([row(1), row(1)])])
def test_a_refused_body_leaves_no_file_open(body: bytes, directory: Path) -> None:
    before = psutil.Process().num_fds()

    refusal(body, directory)

    assert psutil.Process().num_fds() == before
    assert list(directory.iterdir()) == []


def test_a_client_that_goes_away_leaves_nothing(directory: Path) -> None:
    def torn() -> Iterable[bytes]:
        yield ndjson([row(1)])
        raise ConnectionError

    with pytest.raises(ConnectionError):
        spooled(torn(), directory)

    assert list(directory.iterdir()) == []
