"""Uploads in every format: what is equal, what is resumed, what is refused, who collides."""

import csv
import gzip
import io
import json
import random
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import airs_client
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from django.db import connection
from pytest_django import Settings

from fulfillment import intake, raters, spool
from fulfillment.clock import database_now
from fulfillment.formats import Format
from fulfillment.intake import Body, WorkflowForm
from fulfillment.models import (
    Batch,
    Rater,
    RaterVersion,
    Rating,
    RatingRequest,
    Upload,
    Workflow,
    request_key,
)
from fulfillment.policy.lifecycle import WorkflowState
from tests import builders
from tests.builders import MODEL, RATER, Api, ndjson, row
from tests.rating_queue import PATIENCE_S, counts_add_up, threads

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

CREATE = f"/workflows?rater={RATER}"
NDJSON = "application/x-ndjson"
CSV = "text/csv"
PARQUET = "application/vnd.apache.parquet"
JSON = "application/json"


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


def as_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(
        {n: json.dumps(v) if isinstance(v, dict) else v for n, v in row.items()} for row in rows
    )
    return file.getvalue().encode()


def as_parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def as_json(rows: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"rater": RATER, "requests": rows}).encode()


WRITERS: dict[str, Callable[[Sequence[dict[str, Any]]], bytes]] = {
    NDJSON: ndjson,
    JSON: as_json,
    CSV: as_csv,
    PARQUET: as_parquet,
}


def create(body: bytes, kind: str = NDJSON, **headers: str) -> Any:
    return Api().post("/workflows" if kind == JSON else CREATE, body, kind=kind, **headers)


def zipped(body: bytes, kind: str = NDJSON, **headers: str) -> Any:
    return create(body, kind, Content_Encoding="gzip", **headers)


def problem(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


AWKWARD = [
    row(1, query_text='say "hi", now', text="a\r\nb\nc\td", context={"k": "v", "n": [1, 2]}),
    row(2, query_text="味噌汁 \u2028 e\u0301", html="<p>😀</p>", market="de"),
    row(3, query_text="007", title="NA", text="null", result_weight=0.5, side="test"),
    row(4, query_text=" 1e5 ", text="2024-01-02", query_id="00042", query_weight=2.0, side="base"),
    {"request_id": "r5", "query_text": "no page at all"},
    row(6, query_text="nul \0 here", text="\ufeffmark"),
    row(7, query_text="=1+1", text="'quoted'", context={"n": None, "deep": {"x": True}}),
]


def kept(workflow: Workflow) -> list[tuple[Any, ...]]:
    names = ("request_id", "query_id", "side", "result_weight", "query_weight", "fingerprint",
             "warnings", "extra")  # fmt: skip
    found = RatingRequest.objects.filter(workflow=workflow).order_by("id")
    return [tuple(getattr(request, name) for name in names) for request in found]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_equal_rows_are_equal_in_every_format_and_the_second_upload_is_all_hits(
    kind: str, compressed: bool
) -> None:
    # A struct column cannot tell a null member from an absent one: that row goes as JSON text.
    sent = [
        {**r, "context": json.dumps(r["context"])} if kind == PARQUET and "context" in r else r
        for r in AWKWARD
    ]
    create(ndjson(AWKWARD))
    (first,) = Workflow.objects.all()
    now = database_now()
    version = RaterVersion.objects.get()
    Rating.objects.bulk_create(
        Rating(
            fingerprint=fingerprint, rater_version=version, score=1.0, workflow_id=first.pk,
            produced_at=now - timedelta(hours=1),
        )
        for fingerprint in RatingRequest.objects.values_list("fingerprint", flat=True)
    )  # fmt: skip
    body = WRITERS[kind](sent)

    answer = (zipped(gzip.compress(body), kind) if compressed else create(body, kind)).json()

    assert (answer["accepted"], answer["hits"], answer["rejected"]) == (7, 7, [])
    assert kept(Workflow.objects.get(public_id=answer["id"])) == kept(first)
    assert [w["request_id"] for w in answer["warnings"]] == ["r6"]


def test_a_parquet_struct_gives_the_same_context_as_an_object() -> None:
    sent = [row(1, context={"b": 1, "a": ["x"]}), row(2, context={"b": 2, "a": []}), row(3)]

    made = [create(WRITERS[kind](sent), kind).json()["id"] for kind in (NDJSON, PARQUET)]

    one, other = (kept(Workflow.objects.get(public_id=public_id)) for public_id in made)
    assert one == other


def test_parquet_ids_are_exact() -> None:
    table = pa.table({"query_text": ["a", "b"], "request_id": [2**53 + 1, 7], "n": [1, None]})
    file = io.BytesIO()
    pq.write_table(table, file)

    answer = create(file.getvalue(), PARQUET).json()

    assert answer["accepted"] == 2
    assert [r[0] for r in kept(Workflow.objects.get())] == ["9007199254740993", "7"]
    assert [r[-1] for r in kept(Workflow.objects.get())] == [{"n": 1}, None]


# Appending, keys, resuming


@pytest.mark.parametrize("kind", [NDJSON, CSV, PARQUET, JSON])
@pytest.mark.parametrize("compressed", [False, True])
def test_any_format_may_be_appended(kind: str, compressed: bool) -> None:
    workflow = create_empty()
    body = (
        json.dumps(AWKWARD).encode()
        if kind == JSON
        else WRITERS[kind]([{k: v for k, v in r.items() if k != "context"} for r in AWKWARD])
    )
    path = f"/workflows/{workflow.public_id}/requests"
    headers = {"Idempotency_Key": "k"} | ({"Content_Encoding": "gzip"} if compressed else {})
    body = gzip.compress(body) if compressed else body

    first, again = (Api().post(path, body, kind=kind, **headers) for _ in range(2))

    assert first.json()["accepted"] == 7
    assert "Idempotency-Replayed" not in first.headers
    assert (again.json(), again.headers["Idempotency-Replayed"]) == (first.json(), "true")
    counts_add_up(workflow)


def create_empty() -> Workflow:
    return intake.create_empty(
        form=WorkflowForm(rater=RATER), owner="alice", idempotency_key=None
    ).workflow


@pytest.mark.parametrize("kind", [NDJSON, CSV, PARQUET])
def test_the_key_is_of_what_the_body_says_not_of_how_it_was_compressed(kind: str) -> None:
    body, other = WRITERS[kind](AWKWARD[3:5]), WRITERS[kind](AWKWARD[4:5])

    answers = [
        create(body, kind, Idempotency_Key="k"),
        zipped(gzip.compress(body, 1, mtime=1), kind, Idempotency_Key="k"),
        zipped(gzip.compress(body[:5]) + gzip.compress(body[5:]), kind, Idempotency_Key="k"),
    ]

    assert len({answer.json()["id"] for answer in answers}) == 1
    assert [answer.headers.get("Idempotency-Replayed") for answer in answers[1:]] == ["true"] * 2
    assert problem(create(other, kind, Idempotency_Key="k")) == (409, "idempotency_conflict")
    assert Workflow.objects.count() == 1


def test_the_same_bytes_in_another_format_are_another_body() -> None:
    body = b"query_text\n"

    create(b'{"query_text":"q"}\n' + body, Idempotency_Key="k")

    sent = create(b'{"query_text":"q"}\n' + body, CSV, Idempotency_Key="k")
    assert sent.status_code == 422 or problem(sent) == (409, "idempotency_conflict")


class Killed(BaseException):
    """kill -9, as far as PostgreSQL can tell."""


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize(("before", "after"), [(4, 7), (7, 4), (3, 100)])
def test_a_release_may_cut_chunks_elsewhere_between_a_kill_and_the_resume(
    format: Format, appends: bool, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {Format.NDJSON: NDJSON, Format.CSV: CSV, Format.PARQUET: PARQUET}
    sent = [row(n, market="de") for n in range(20)]
    workflow = create_empty()

    def send() -> intake.Submission:
        body = Body(chunks=[WRITERS[kinds[format]](sent)], format=format)
        if appends:
            return intake.append(workflow=workflow, body=body, owner="a", idempotency_key="k")
        return intake.submit(
            form=WorkflowForm(rater=RATER), body=body, owner="a", idempotency_key="k", close=True
        )

    begun = 0

    def dies(execute: Any, sql: str, *rest: Any) -> Any:
        nonlocal begun
        begun += sql.startswith("SELECT holder")
        if begun == 3:
            raise Killed
        return execute(sql, *rest)

    monkeypatch.setattr(spool, "CHUNK_ROWS", before)
    with pytest.raises(Killed), connection.execute_wrapper(dies):
        send()
    assert Upload.objects.get(key="k").rows_done == 2 * before
    monkeypatch.setattr(spool, "CHUNK_ROWS", after)

    done = send()

    assert done.answer["accepted"] == 20
    assert [r[0] for r in kept(done.workflow)] == [f"r{n}" for n in range(20)]
    counts_add_up(done.workflow)
    positions = [p for batch in Batch.objects.all() for p in batch.positions]
    assert sorted(positions) == list(range(20))


@pytest.mark.parametrize("kind", [NDJSON, CSV, PARQUET])
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_client_that_dies_half_way_leaves_nothing_or_its_open_workflow(
    kind: str, appends: bool, share: float
) -> None:
    workflow = create_empty() if appends else None
    path = f"/workflows/{workflow.public_id}/requests" if workflow else CREATE
    body = gzip.compress(WRITERS[kind]([row(n) for n in range(100)]))

    response = Api().post(
        path, body[: int(len(body) * share) + 2], kind=kind, Content_Encoding="gzip"
    )

    assert problem(response) == (400, "truncated_upload")
    assert not RatingRequest.objects.exists()
    assert [w.state for w in Workflow.objects.all()] == [WorkflowState.OPEN] * appends
    assert Upload.objects.filter(rows__gt=0).count() == 0
    if workflow:
        again = Api().post(path, body, kind=kind, Content_Encoding="gzip")
        assert again.json()["accepted"] == 100


@with_commits
def test_eight_clients_append_different_and_common_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool, "CHUNK_ROWS", 10)
    workflow = create_empty()
    chance = random.Random(7)
    uploads = []
    for client in range(8):
        own = [row(n, request_id=f"own-{client}-{n}") for n in range(25)]
        common = [row(n, request_id=f"common-{n}") for n in chance.sample(range(40), 20)]
        unnamed = [{"query_text": f"unnamed {client} {n}"} for n in range(5)]
        rows = own + common + unnamed
        chance.shuffle(rows)
        uploads.append(rows)
    formats = [Format.NDJSON, Format.CSV, Format.PARQUET, Format.NDJSON] * 2
    writers = {Format.NDJSON: ndjson, Format.CSV: as_csv, Format.PARQUET: as_parquet}
    together = threading.Barrier(8)

    def append(client: int) -> dict[str, Any]:
        body = writers[formats[client]](uploads[client])
        together.wait(PATIENCE_S)
        return intake.append(
            workflow=Workflow.objects.get(pk=workflow.pk),
            body=Body(chunks=[body], format=formats[client]),
            owner=f"client {client}",
            idempotency_key="k",
        ).answer

    with threads(8) as pool:
        answers = [done.result(PATIENCE_S) for done in [pool.submit(append, n) for n in range(8)]]

    requests = list(RatingRequest.objects.filter(workflow=workflow))
    names = [request.request_id for request in requests]
    sent = {r["request_id"] for rows in uploads for r in rows if "request_id" in r}
    assert len(set(names)) == len(names)
    assert sent <= set(names)
    assert len(names) == len(sent) + 8 * 5
    assert sum(answer["accepted"] for answer in answers) == len(names)
    for answer, rows in zip(answers, uploads, strict=True):
        assert answer["accepted"] + answer["rejected_count"] == len(rows)
        assert {refused["code"] for refused in answer["rejected"]} <= {"duplicate_request_id"}
    # Each upload has a range of positions of its own, and a position is one row or none.
    ranges = sorted(Upload.objects.filter(rows__gt=0).values_list("first_position", "rows"))
    assert [first for first, _ in ranges] == [50 * n for n in range(8)]
    assert {request.pk for request in requests} <= {request_key(workflow.pk, n) for n in range(400)}
    batched = [p for batch in Batch.objects.filter(workflow=workflow) for p in batch.positions]
    assert sorted(request_key(workflow.pk, p) for p in batched) == sorted(r.pk for r in requests)
    counts_add_up(workflow)


@with_commits
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("name", "write"), [("a.jsonl", ndjson), ("a.csv", as_csv), ("a.parquet", as_parquet)]
)
def test_the_client_sends_files_of_every_format(
    live_server: Any, tmp_path: Path, name: str, write: Callable[[Any], bytes], compressed: bool
) -> None:
    body = write([row(n) for n in range(50)])
    path = tmp_path / (f"{name}.gz" if compressed else name)
    path.write_bytes(gzip.compress(body) if compressed else body)

    with airs_client.Client(live_server.url, builders.token()) as airs:
        sent, again = (airs.workflows.submit(path, rater=RATER) for _ in range(2))

    assert (sent.accepted, sent.workflow.id) == (50, again.workflow.id)
    assert RatingRequest.objects.count() == 50


# Refusals


@pytest.mark.parametrize(
    ("kind", "headers", "code"),
    [
        ("text/tab-separated-values", {}, "unsupported_media_type"),
        ("application/xml", {}, "unsupported_media_type"),
        ("text/csv; charset=iso-8859-1", {}, "unsupported_media_type"),
        (CSV, {"Content_Encoding": "zstd"}, "unsupported_content_encoding"),
        (NDJSON, {"Content_Encoding": "gzip, gzip"}, "unsupported_content_encoding"),
        (PARQUET, {"Content_Encoding": "br"}, "unsupported_content_encoding"),
    ],
)
def test_other_types_and_encodings_are_415(kind: str, headers: Any, code: str) -> None:
    response = create(b"query_text\nq\n", kind, **headers)

    assert problem(response) == (415, code)
    accepted = response.json()["accepted"]
    assert accepted == (
        ["gzip", "identity"]
        if "encoding" in code
        else [JSON, NDJSON, "application/ndjson", "application/jsonl", CSV, PARQUET]
    )


@pytest.mark.parametrize("kind", ["text/csv; header=present", 'TEXT/CSV; charset="utf-8"'])
def test_parameters_of_the_content_type_are_understood(kind: str) -> None:
    assert create(b"query_text\nq\n", kind).json()["accepted"] == 1


def test_bodies_are_limited_before_and_after_decompression(settings: Settings) -> None:
    rows = [row(n, text="same text " * 50) for n in range(100)]
    body = ndjson(rows)
    settings.AIRS_MAX_UPLOAD_BYTES = len(body)
    assert create(body).status_code == 202
    assert zipped(gzip.compress(body)).status_code == 202

    settings.AIRS_MAX_UPLOAD_BYTES = len(body) - 1

    assert problem(create(body)) == (413, "payload_too_large")
    assert problem(zipped(gzip.compress(body))) == (413, "decompressed_too_large")
    table = as_csv(rows)
    settings.AIRS_MAX_UPLOAD_BYTES = len(table) - 1
    assert problem(create(table, CSV)) == (413, "payload_too_large")
    assert problem(zipped(gzip.compress(table), CSV)) == (413, "decompressed_too_large")
    small = as_parquet(rows)
    settings.AIRS_MAX_UPLOAD_BYTES = len(small)
    assert problem(create(small, PARQUET)) == (413, "decompressed_too_large")
    settings.AIRS_MAX_UPLOAD_BYTES = len(small) - 1
    assert problem(create(small, PARQUET)) == (413, "payload_too_large")
    assert Workflow.objects.count() == 2


@pytest.mark.parametrize(
    ("body", "kind", "encoding", "expected"),
    [
        (b"not gzip", NDJSON, "gzip", (400, "bad_encoding")),
        (gzip.compress(b'{"query_text":"q"}', mtime=0)[:-3], NDJSON, "gzip",
         (400, "truncated_upload")),
        (gzip.compress(b"query_text\n", mtime=0), CSV, "gzip", (422, "empty_file")),
        (gzip.compress(b"", mtime=0), NDJSON, "gzip", (422, "empty_file")),
        (b"query_text\nq\n", PARQUET, "identity", (422, "invalid_parquet")),
        (as_parquet([{"query_text": "q"}])[:-9], PARQUET, "identity", (422, "invalid_parquet")),
        (as_parquet([{"url": "u"}]), PARQUET, "identity", (422, "missing_column")),
        (as_parquet([{"query_text": 5}]), PARQUET, "identity", (422, "bad_column_type")),
        (as_parquet([{"query_text": "q", "request_id": 1}] * 2), PARQUET, "identity",
         (422, "duplicate_request_id")),
        (as_parquet([{"query_text": ""}]), PARQUET, "identity", (422, "no_valid_rows")),
        (as_csv([{"query_text": "q", "side": "x"}]), CSV, "identity", (422, "no_valid_rows")),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_whole_and_leaves_nothing(
    body: bytes, kind: str, encoding: str, expected: tuple[int, str]
) -> None:
    workflow = create_empty()
    upload = Upload.objects.count()
    path = f"/workflows/{workflow.public_id}/requests"

    for response in (
        create(body, kind, Content_Encoding=encoding),
        Api().post(path, body, kind=kind, Content_Encoding=encoding),
    ):
        assert problem(response) == expected

    assert Upload.objects.count() == upload
    assert Workflow.objects.get().state == WorkflowState.OPEN
    assert not RatingRequest.objects.exists()


def test_a_missing_column_names_the_header_and_the_delimiter() -> None:
    document = create(b"request_id;query_text\n1;q\n", CSV).json()

    assert document["header"] == ["request_id;query_text"]
    assert "semicolons" in document["detail"]
    assert [e["field"] for e in document["errors"]] == ["query_text"]


def test_bad_rows_of_parquet_are_refused_by_their_number() -> None:
    body = as_parquet(
        [{"query_text": q, "result_weight": w} for q, w in
         [("a", 1.0), (None, 1.0), ("b", float("nan")), ("", None), ("c", None)]]
    )  # fmt: skip

    answer = create(body, PARQUET).json()

    assert answer["accepted"] == 2
    assert [(r["line"], r["code"]) for r in answer["rejected"]] == [
        (2, "missing_field"),
        (3, "bad_number"),
        (4, "empty_field"),
    ]


def test_the_openapi_document_lists_every_form_of_rows() -> None:
    document = orjson.loads(
        Api().client.get("/api/schema", headers={"Accept": "application/json"}).content
    )

    for path in ("/api/v1/workflows", "/api/v1/workflows/{public_id}/requests"):
        call = document["paths"][path]["post"]
        assert set(call["requestBody"]["content"]) == {JSON, NDJSON, CSV, PARQUET}
        headers = {p["name"] for p in call["parameters"] if p["in"] == "header"}
        assert headers == {"Idempotency-Key", "Content-Encoding"}
