import gzip
import hashlib
import io
import json
import os
from pathlib import Path

import pytest
from airs_client import SourceChanged, SourceUnreadable
from airs_client.calls import content_key
from airs_client.files import whole_file
from airs_client.uploads import open_upload

ROWS = b'{"query_text": "a"}\n{"query_text": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "content_type", "gzipped"),
    [
        ("rows.jsonl", ROWS, "application/x-ndjson", False),
        ("rows.ndjson", ROWS, "application/x-ndjson", False),
        ("rows.json", ROWS, "application/x-ndjson", False),
        ("rows", ROWS, "application/x-ndjson", False),
        ("rows.CSV", b"query_text\na\n", "text/csv", False),
        ("rows.csv.gz", gzip.compress(b"query_text\na\n", mtime=0), "text/csv", True),
        ("rows.jsonl.gz", gzip.compress(ROWS, mtime=0), "application/x-ndjson", True),
        ("compressed", gzip.compress(ROWS, mtime=0), "application/x-ndjson", True),
        ("named.gz", ROWS, "application/x-ndjson", False),
        ("rows.parquet", b"PAR1....PAR1", "application/vnd.apache.parquet", False),
        ("unnamed", b"PAR1....PAR1", "application/vnd.apache.parquet", False),
        (
            "rows.parquet.gz",
            gzip.compress(b"PAR1.PAR1", mtime=0),
            "application/vnd.apache.parquet",
            True,
        ),
        ("unnamed", gzip.compress(b"PAR1.PAR1", mtime=0), "application/vnd.apache.parquet", True),
        ("unnamed", b'\xef\xbb\xbf"request_id","query_text"\r\n1,a\r\n', "text/csv", False),
        ("rows.txt", b"query\na\n", "text/csv", False),
        ("unnamed", gzip.compress(b"url,query\nu,a\n", mtime=0), "text/csv", True),
        ("rows.jsonl", b"query\na\n", "application/x-ndjson", False),
        ("unnamed", b'{"a": 1,"query":1}\n', "application/x-ndjson", False),
        ("unnamed", b"url;query\n", "application/x-ndjson", False),
        ("unnamed", b"\x1f\x8b broken", "application/x-ndjson", True),
        ("empty.jsonl", b"", "application/x-ndjson", False),
    ],
)
def test_a_file_is_sent_as_what_it_is(
    tmp_path: Path, name: str, content: bytes, content_type: str, gzipped: bool
) -> None:
    (tmp_path / name).write_bytes(content)

    with open_upload(tmp_path / name) as upload:
        assert upload.headers["Content-Type"] == content_type
        assert upload.headers["Content-Length"] == str(len(content))
        assert upload.headers.get("Content-Encoding") == ("gzip" if gzipped else None)
        assert b"".join(upload.chunks()) == content
        assert upload.digest == hashlib.sha256(content).hexdigest()


def test_an_upload_can_be_sent_again_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROWS * 50_000)

    with open_upload(tmp_path / "rows.jsonl") as upload:
        first_try = upload.chunks()
        next(first_try)

        assert b"".join(upload.chunks()) == ROWS * 50_000


def test_a_stream_that_can_be_read_once_is_kept_for_a_second_try() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(ROWS)

    with os.fdopen(read_end, "rb") as stream, open_upload(stream) as upload:
        assert b"".join(upload.chunks()) == ROWS
        assert b"".join(upload.chunks()) == ROWS


def test_a_named_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(ROWS)

    with (
        os.fdopen(read_end, "rb"),
        open_upload(f"/proc/self/fd/{read_end}", name="pipe") as upload,
    ):
        assert upload.size == len(ROWS)


def test_rows_become_one_json_object_a_line() -> None:
    rows = [{"query_text": "味噌汁"}, {"query_text": "line\nbreak\u2028"}, {"query_text": "\ud800"}]

    with open_upload(rows) as upload:
        sent = b"".join(upload.chunks())

    assert [json.loads(line) for line in sent.removesuffix(b"\n").split(b"\n")] == rows
    assert "味噌汁".encode() in sent


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_a_row_that_json_cannot_hold_is_refused_by_its_number(value: object) -> None:
    with pytest.raises(SourceUnreadable, match="row 2"):
        open_upload([{"query_text": "a"}, {"query_text": value}])


def test_a_json_list_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b'\xef\xbb\xbf\n [{"query_text": "a"}]')

    with pytest.raises(SourceUnreadable) as refused:
        open_upload(tmp_path / "rows.json")

    assert "jq" in refused.value.remedy


@pytest.mark.parametrize("missing", ["absent.jsonl", "."])
def test_what_cannot_be_read_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(SourceUnreadable, match="cannot read"):
        open_upload(tmp_path / missing)


@pytest.mark.parametrize("change", [b"more\n", None])
def test_a_file_that_changes_while_it_is_sent_is_never_sent_to_its_end(
    tmp_path: Path, change: bytes | None
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS * 10_000)

    with open_upload(path) as upload:
        sent = upload.chunks()
        next(sent)
        if change:
            with path.open("ab") as file:
                file.write(change)
        else:
            os.truncate(path, 10)

        with pytest.raises(SourceChanged):
            list(sent)


def test_the_key_of_an_upload_is_stable_and_depends_on_content_and_arguments() -> None:
    def key(content: bytes = ROWS, **params: str) -> str:
        with open_upload(io.BytesIO(content)) as upload:
            return content_key(upload, params)

    same = key(rater="a", name="n")

    assert same == key(name="n", rater="a")
    assert same != key(rater="b", name="n")
    assert same != key(rater="a", name="other")
    assert same != key(ROWS + b"\n", rater="a", name="n")
    # Pinned: a new release must not rate again what an old one has sent.
    assert same == "airs-0732e0f1dcf6d7ff950a90a0d2705ed2f69825f61edcc766d8dc396a538395fe"


def test_a_result_file_appears_whole_or_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    path.write_text("old")

    def write_and_break_off() -> None:
        with whole_file(path) as file:
            file.write(b"half of the ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_break_off()

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"

    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_written_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with whole_file(tmp_path / "link") as file:
        file.write(b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_device_is_written_to_and_not_replaced() -> None:
    with whole_file(Path("/dev/null")) as file:
        file.write(b"gone")

    assert Path("/dev/null").is_char_device()
