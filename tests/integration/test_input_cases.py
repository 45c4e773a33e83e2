"""Awkward inputs over HTTP: small samples that always run, then the collected cases if at hand.

The cases lie beside the repository (`../shared/cases`); their files are not part of it.
"""

import csv
import gzip
import hashlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from fulfillment import documents, raters
from fulfillment.clock import database_now
from fulfillment.models import (
    Batch,
    BatchPayload,
    Rater,
    RatingRequest,
    Workflow,
    request_key,
)
from tests import builders
from tests.builders import MODEL, Api

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
CREATE = f"/workflows?rater={builders.RATER}"


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None) -> None:
    builders.use_plugins(settings)
    raters.register(Rater(id=builders.RATER, autorater="stub", model_id=MODEL), now=database_now())


def stored_rows() -> dict[str, dict[str, Any]]:
    """Return the key fields of every stored row by its request id."""
    rows = {}
    for batch in Batch.objects.all():
        items = documents.unpack(bytes(BatchPayload.objects.get(batch_id=batch.pk).data))
        for position, item in zip(batch.positions, batch.item_of, strict=True):
            request = RatingRequest.objects.get(pk=request_key(batch.workflow_id, position))
            rows[request.request_id] = items[item][0]
    return rows


def table(rows: list[list[str]]) -> bytes:
    """Return rows as CSV."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue().encode()


def send(body: bytes, file: str = "rows.csv") -> Any:
    """Upload a file as what its name says."""
    kind = {"csv": "text/csv", "jsonl": "application/x-ndjson"}[file.rpartition(".")[2]]
    return Api().post(CREATE, body, kind=kind, Content_Type=kind)


def refusals(document: dict[str, Any]) -> list[tuple[int, str]]:
    return [(row["line"], row["code"]) for row in document["rejected"]]


# Samples of our own


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"query_text": ""}', "empty_field"),
        ('{"query_text": " \\t "}', "empty_field"),
        ('{"query_text": "\\u200b\\ufeff"}', "empty_field"),
        ('{"query_text": null}', "missing_field"),
        ('{"url": "https://x.example"}', "missing_field"),
        ('{"query_text": 7}', "bad_type"),
        ('{"query_text": "q", "html": ["x"]}', "bad_type"),
        ('{"query_text": "q", "context": "x"}', "bad_type"),
        ('{"query_text": "q", "side": "left"}', "bad_type"),
        ('{"query_text": "q", "result_weight": NaN}', "bad_number"),
        ('{"query_text": "q", "other": -Infinity}', "bad_number"),
        ('{"query_text": "q", "other": 1e999}', "bad_number"),
        ('["q"]', "not_an_object"),
        ('"q"', "not_an_object"),
        ('{"query_text": "q"', "invalid_json"),
        ('{"query_text": "q", "x": ' + "[" * 101 + "]" * 101 + "}", "too_deep"),
        ('{"query_text": "q", "x": ' + "[" * 20_000 + "]" * 20_000 + "}", "too_deep"),
        ('{"query_text": "q", "request_id": "' + "x" * 513 + '"}', "field_too_long"),
        ('{"query_text": "q", "url": "' + "x" * 16_385 + '"}', "field_too_long"),
        (b'{"query_text": "\xff"}', "invalid_utf8"),
    ],
)
def test_a_bad_row_is_refused_alone(line: Any, code: str) -> None:
    response = Api().upload(CREATE, [builders.row(1), line, builders.row(2)])

    assert response.status_code == 202
    assert response.json()["accepted"] == 2
    assert refusals(response.json()) == [(2, code)]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"\xef\xbb\xbf", "empty_file"),
        ('{"query_text": "q"}'.encode("utf-16"), "unsupported_encoding"),
        ('{"query_text": "q"}'.encode("utf-16-be"), "unsupported_encoding"),
        ('{"query_text": "q"}'.encode("utf-32"), "unsupported_encoding"),
    ],
)
def test_a_bad_file_is_refused_whole(body: bytes, code: str) -> None:
    api = Api()
    response = api.client.generic(
        "POST",
        f"/api/v1{CREATE}",
        body,
        headers={**api.headers, "Content-Type": "application/x-ndjson"},
    )

    assert (response.status_code, response.json()["code"]) == (422, code)
    assert not Workflow.objects.exists()


def test_a_file_of_bad_rows_only_is_no_success() -> None:
    response = Api().upload(CREATE, ["x", "[]"])

    assert response.status_code == 422
    assert [(e["line"], e["code"]) for e in response.json()["errors"]] == [
        (1, "invalid_json"),
        (2, "not_an_object"),
    ]
    assert not Workflow.objects.exists()


def test_an_id_that_stands_twice_refuses_the_file_naming_both_lines() -> None:
    rows = [builders.row(1), builders.row(2), builders.row(2, query_text="other")]

    response = Api().upload(CREATE, rows)

    assert (response.status_code, response.json()["code"]) == (422, "duplicate_request_id")
    (error,) = response.json()["errors"]
    assert (error["line"], error["first_line"]) == (3, 2)
    assert not Workflow.objects.exists()


def test_equal_rows_become_one_item_and_keep_their_ids() -> None:
    rows = [builders.row(n % 3, request_id=f"id{n}") for n in range(9)]

    document = Api().upload(CREATE, rows).json()

    assert (document["accepted"], document["pending"], document["coalesced"]) == (9, 3, 6)
    (batch,) = Batch.objects.all()
    assert len(batch.fingerprints) == 3
    assert RatingRequest.objects.count() == 9


def test_what_postgresql_cannot_store_is_replaced_with_a_warning() -> None:
    lines = [
        '{"request_id": "nul", "query_text": "a\\u0000b"}',
        '{"request_id": "literal", "query_text": "a\\\\u0000b"}',
        '{"request_id": "half", "query_text": "a\\ud800b"}',
    ]

    document = Api().upload(CREATE, lines).json()

    assert {(w["request_id"], w["code"]) for w in document["warnings"]} == {
        ("nul", "nul_replaced"),
        ("half", "surrogate_replaced"),
    }
    assert {name: row["query_text"] for name, row in stored_rows().items()} == {
        "nul": "a\ufffdb",
        "literal": "a\\u0000b",
        "half": "a\ufffdb",
    }


def test_a_byte_order_mark_is_dropped_at_the_start_only() -> None:
    body = b"\xef\xbb\xbf" + builders.ndjson([builders.row(1, query_text="in\ufeffside")])

    assert Api().upload(CREATE, body).json()["accepted"] == 1
    assert stored_rows()["r1"]["query_text"] == "in\ufeffside"


def test_a_csv_file_is_taken_with_its_awkward_cells() -> None:
    body = table(
        [
            ["request_id", "query_text", "html", "context", "result_weight"],
            ["a", '{"q": "who, when?"}', "<p>\r\n</p>", '{"k": 1}', "0.5"],
            ["b", "two\nlines", "", "", ""],
            ["c", 'he said "hi"', "x" * 200_000, "", "1e2"],
        ]
    )

    answer = send(b"\xef\xbb\xbf" + body).json()

    assert (answer["accepted"], answer["rejected"], answer["warnings"]) == (3, [], [])
    assert stored_rows() == {
        "a": {"query_text": '{"q": "who, when?"}', "html": "<p>\r\n</p>", "context": {"k": 1}},
        "b": {"query_text": "two\nlines"},
        "c": {"query_text": 'he said "hi"', "html": "x" * 200_000},
    }


def test_a_bad_csv_record_is_refused_alone_by_the_line_where_it_starts() -> None:
    body = (
        b'request_id,query_text\n1,"a\nb"\n2,c,d\n3,\n4,\xff\n5,"x"y\n6,nul\0\n'
        + f"{'7' * 513},long\n8,last".encode()
    )

    answer = send(body).json()

    assert answer["accepted"] == 3
    assert refusals(answer) == [
        (4, "wrong_field_count"),
        (5, "empty_field"),
        (6, "invalid_utf8"),
        (7, "bad_quoting"),
        (9, "field_too_long"),
    ]
    assert [(w["line"], w["code"]) for w in answer["warnings"]] == [(8, "nul_replaced")]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "empty_file"),
        (b"request_id,query_text\n", "empty_file"),
        (b"request_id;query_text\na;b\n", "missing_column"),
        (b"query_text,query_text\na,b\n", "duplicate_column"),
        (b"request_id,query_text\na,b\na,c\n", "duplicate_request_id"),
        (b'query_text\n"open\n', "unclosed_quote"),
        ("query_text\na\n".encode("utf-16"), "unsupported_encoding"),
    ],
)
def test_a_bad_csv_file_is_refused_whole(body: bytes, code: str) -> None:
    response = send(body)

    assert (response.status_code, response.json()["code"]) == (422, code)
    assert not Workflow.objects.exists()


# The collected cases


def case(name: str, file: str) -> bytes:
    if not CASES.is_dir():
        pytest.skip(f"{CASES} is not there: the collected cases are no part of the repository")
    return (CASES / name / file).read_bytes()


def described(row: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row has of the fields; long ones by their length and digest."""
    measured = {f"{name}_len": len(text) for name, text in row.items()} | {
        f"{name}_sha256": hashlib.sha256(text.encode()).hexdigest()
        for name, text in row.items()
        if isinstance(text, str)
    }
    return {name: {**row, **measured}.get(name) for name in fields}


def expectation(name: str, file: str) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads(case(name, "expected.json"))["expect"][file]
    return expected


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("IN-01", "bom.jsonl"),
        ("IN-01", "utf16.jsonl"),
        ("IN-01", "bom_quoted.csv"),
        ("IN-03", "nul.jsonl"),
        ("IN-03", "nul.csv"),
        ("IN-05", "bigcell.csv"),
        ("IN-06", "quotes.csv"),
        ("IN-06", "semicolon.csv"),
        ("IN-08", "dup.jsonl"),
        ("IN-09", "same30.jsonl"),
        ("IN-11", "empty.jsonl"),
        ("IN-12", "long.jsonl"),
        ("IN-13", "odd.jsonl"),
    ],
)
def test_a_collected_file_is_taken_as_expected(name: str, file: str) -> None:
    expected = expectation(name, file)

    response = send(case(name, file), file)

    document = response.json()
    assert response.status_code == expected.get("http_status", 202)
    if "code" in expected:
        assert document["code"] == expected["code"]
        assert not Workflow.objects.exists()
    if detail := expected.get("detail"):
        (error,) = document["errors"]
        assert error.items() >= detail.items()
    if response.status_code != 202:
        return
    assert document["accepted"] == expected["accepted"]
    if "rejected" in expected:
        assert refusals(document) == [(r["line"], r["code"]) for r in expected["rejected"]]
    if "warnings" in expected:
        assert [
            {"request_id": w["request_id"], "code": w["code"]} for w in document["warnings"]
        ] == expected["warnings"]
    rows = stored_rows()
    for request_id, fields in expected.get("rows", {}).items():
        assert described(rows[request_id], fields) == fields
    if "row_ids" in expected:
        assert list(rows) == expected["row_ids"]
    if "accepted_ids" in expected:
        assert sorted(rows) == sorted(expected["accepted_ids"])
    assert len(rows) == expected.get("distinct_ids", len(rows))
    if "model_items" in expected:
        assert document["pending"] == expected["model_items"]
        assert document["coalesced"] == expected["served_from_cache"]
        assert Batch.objects.count() == expected["model_requests"]


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_ten_megabytes_are_taken_whole(tmp_path: Path, compressed: bool) -> None:
    case("IN-05", "make_big.py")
    maker = CASES / "IN-05" / "make_big.py"
    subprocess.run([sys.executable, maker], cwd=tmp_path, check=True, timeout=60)
    expected = expectation("IN-05", "big.jsonl")
    body = (tmp_path / "big.jsonl").read_bytes()

    answer = (
        Api().upload(CREATE, gzip.compress(body, 1), Content_Encoding="gzip")
        if compressed
        else Api().upload(CREATE, body)
    ).json()

    assert (answer["accepted"], answer["rejected"]) == (expected["accepted"], expected["rejected"])
    rows = {json.loads(line)["request_id"]: json.loads(line) for line in body.splitlines()}
    assert {name: row["html"] for name, row in stored_rows().items()} == {
        name: row["html"] for name, row in rows.items()
    }
    assert RatingRequest.objects.values("fingerprint").distinct().count() == len(
        expected["fingerprints_distinct"]
    )


def test_the_same_id_in_two_workflows_is_two_requests() -> None:
    bodies = [case("IN-08", file) for file in ("job_a.jsonl", "job_b.jsonl")]

    answers = [Api().upload(CREATE, body).json() for body in bodies]

    assert [answer["accepted"] for answer in answers] == [1, 1]
    one, other = RatingRequest.objects.all()
    assert one.request_id == other.request_id
    assert one.fingerprint != other.fingerprint


def test_a_deep_json_body_is_refused_at_once_and_the_server_goes_on() -> None:
    body, expected = case("IN-13", "deep.json"), expectation("IN-13", "deep.json")
    api = Api()

    before = time.perf_counter()
    response = api.post("/workflows", body)
    took_s = time.perf_counter() - before

    assert (response.status_code, response.json()["code"]) == (400, expected["code"])
    assert took_s < expected["max_seconds"]
    assert api.get("/workflows").status_code == 200
