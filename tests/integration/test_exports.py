"""Results as files: whole exports in constant memory, Parquet, compression, formulas."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from django.db import connection

from fulfillment import results
from fulfillment.exports import text
from fulfillment.exports.parquet import GROUP_ROWS, parquet
from fulfillment.models import Side, Workflow
from fulfillment.policy.lifecycle import RequestState
from fulfillment.results import Page
from tests import builders
from tests.builders import NOW, Api

pytestmark = pytest.mark.django_db

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
ROWS = 200_000
WRITERS: dict[str, Callable[[Iterable[Page]], Iterator[bytes]]] = {
    "jsonl": text.jsonl,
    "csv": lambda pages: text.delimited(pages, header=True),
    "parquet": parquet,
}


def whole(workflow: Workflow, *, state: str | None = None) -> Iterator[Page]:
    return results.everything(workflow, after=None, state=state)


def table(workflow: Workflow) -> pa.Table:
    return pq.read_table(io.BytesIO(b"".join(parquet(whole(workflow)))))


def rated_workflow(rows: int = 3) -> Workflow:
    workflow = builders.workflow(owner="alice")
    for position in range(rows):
        builders.request(
            workflow,
            position,
            state=RequestState.COMPLETED,
            score=position - 0.5,
            query_id="=q",
            side=Side.TEST,
            output={"why": "wörk"},
            warnings=["nul_replaced"],
        )
    return workflow


def test_parquet_has_typed_columns() -> None:
    workflow = rated_workflow(1)
    builders.request(workflow, 1)

    found = table(workflow)

    assert found.column_names == list(results.FIELDS)
    assert {n: str(found.schema.field(n).type) for n in ("score", "rated_at", "warnings")} == {
        "score": "double",
        "rated_at": "timestamp[us, tz=UTC]",
        "warnings": "list<element: string>",
    }
    first, second = found.to_pylist()
    assert (first["request_id"], first["score"], first["side"]) == ("row-1", -0.5, "test")
    assert first["query_id"] == "=q"
    assert json.loads(first["output"]) == {"why": "wörk"}
    assert first["rated_at"] == NOW.astimezone(UTC)
    assert first["warnings"] == ["nul_replaced"]
    assert (second["state"], second["score"], second["rated_at"]) == ("PENDING", None, None)


def test_parquet_of_nothing_has_its_columns() -> None:
    found = table(builders.workflow())

    assert (found.num_rows, found.column_names) == (0, list(results.FIELDS))


def test_all_formats_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_PAGE", 4)
    monkeypatch.setattr(results, "STEP_ROWS", 3)
    workflow = rated_workflow(10)

    lines = [orjson.loads(x) for x in b"".join(text.jsonl(whole(workflow))).splitlines()]
    cells = list(
        csv.DictReader(io.StringIO(b"".join(WRITERS["csv"](whole(workflow))).decode(), newline=""))
    )
    columns = table(workflow).to_pylist()

    assert [line["request_id"] for line in lines] == [f"row-{n}" for n in range(1, 11)]
    for line, cell, column in zip(lines, cells, columns, strict=True):
        assert line["request_id"] == cell["request_id"] == column["request_id"]
        assert line["score"] == float(cell["score"]) == column["score"]
        assert line["query_id"] == text_of(cell["query_id"]) == column["query_id"]
        assert line["output"] == json.loads(cell["output"]) == json.loads(column["output"])
        assert datetime.fromisoformat(line["rated_at"]) == column["rated_at"]


def text_of(cell: str) -> str:
    """Return what a safe cell was."""
    return cell.removeprefix("'")


def test_a_whole_export_goes_on_where_a_cursor_says() -> None:
    workflow = rated_workflow(5)
    api = Api("alice")
    path = f"/workflows/{workflow.public_id}/ratings"
    cursor = api.get(f"{path}?limit=2")["X-Next-Cursor"]

    every, rest = api.get(f"{path}?all=true"), api.get(f"{path}?all=true&cursor={cursor}")

    assert "X-Next-Cursor" not in every
    assert [r["request_id"] for r in builders.records(every)] == [f"row-{n}" for n in range(1, 6)]
    assert [r["request_id"] for r in builders.records(rest)] == ["row-3", "row-4", "row-5"]


def test_parquet_is_served_as_a_file() -> None:
    workflow = rated_workflow(5)
    path = f"/workflows/{workflow.public_id}/ratings?format=parquet"

    response = Api("alice").get(f"{path}&all=true", Accept_Encoding="gzip")

    assert response["Content-Type"] == "application/vnd.apache.parquet"
    assert response["Content-Disposition"] == (
        f'attachment; filename="{workflow.public_id}.parquet"'
    )
    assert "Content-Encoding" not in response
    assert pq.read_table(io.BytesIO(response.getvalue())).num_rows == 5
    page = Api("alice").get(f"{path}&limit=2")
    assert pq.read_table(io.BytesIO(page.getvalue())).num_rows == 2
    assert page["X-Next-Cursor"]


@pytest.mark.parametrize(
    ("asked", "zipped"),
    [
        ("gzip, deflate, br", True),
        ("br;q=1.0, gzip;q=0.8", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, br", False),
        ("identity", False),
        ("", False),
    ],
)
def test_text_is_compressed_for_those_who_take_it(asked: str, zipped: bool) -> None:
    workflow = rated_workflow()
    path = f"/workflows/{workflow.public_id}/ratings"

    response = Api("alice").get(path, Accept_Encoding=asked)

    body = response.getvalue()
    assert response.get("Content-Encoding") == ("gzip" if zipped else None)
    assert response["Vary"] == "Accept-Encoding"
    assert (gzip.decompress(body) if zipped else body).count(b"\n") == 3


def test_a_state_is_found_span_by_span(
    monkeypatch: pytest.MonkeyPatch, django_assert_max_num_queries: Any
) -> None:
    monkeypatch.setattr(results, "SPAN", 3)
    workflow = builders.workflow()
    for position in range(10):
        failed = position in {1, 2, 8}
        state = RequestState.FAILED if failed else RequestState.COMPLETED
        builders.request(workflow, position, state=state)

    def ids(limit: int, after: int | None = None) -> tuple[list[int], int | None]:
        page = results.page(workflow, after=after, limit=limit, state="FAILED")
        return [key & 0xFF for key in page.ids], page.next

    assert ids(2) == ([1, 2], 2)
    assert ids(2, after=2) == ([8], None)
    assert ids(3) == ([1, 2, 8], None)
    with django_assert_max_num_queries(3):
        assert ids(1) == ([1], 1)


# Formulas


def test_the_collected_formula_cells_come_out_as_expected() -> None:
    case = CASES / "X-04" / "expected.json"
    if not case.is_file():
        pytest.skip("the collected cases are not beside this repository")
    expect = json.loads(case.read_text())["expect"]
    workflow = builders.workflow()
    for position, (name, cell) in enumerate(expect["cells"].items()):
        builders.request(
            workflow, position, request_id=name, query_id=cell["in"],
            state=RequestState.COMPLETED, score=-1.0,
        )  # fmt: skip

    rows = list(
        csv.DictReader(io.StringIO(b"".join(WRITERS["csv"](whole(workflow))).decode(), newline=""))
    )

    assert {row["request_id"]: row["query_id"] for row in rows} == {
        name: cell["out"] for name, cell in expect["cells"].items()
    }
    assert {row["score"] for row in rows} == {expect["score_cell"]}
    texts = [cell["in"] for cell in expect["cells"].values()]
    assert [text_of(row["query_id"]) for row in rows] == texts
    lines = [orjson.loads(x) for x in b"".join(text.jsonl(whole(workflow))).splitlines()]
    assert [line["query_id"] for line in lines] == texts
    assert [row["query_id"] for row in table(workflow).to_pylist()] == texts


# Memory


@pytest.fixture
def large() -> Workflow:
    workflow = builders.workflow()
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO fulfillment_ratingrequest
                (id, workflow_id, request_id, request_digest, query_id, fingerprint, state, source,
                 score, label, output, rated_at, attempts)
            SELECT (%(id)s::bigint << 31) | n, %(id)s, 'request-' || n, gen_random_uuid(),
                   'q' || n / 10, gen_random_uuid(), 1, 2, n %% 5, 'fairly relevant',
                   '{"why": "the page answers the question in its second paragraph"}', now(), 1
            FROM generate_series(0, %(rows)s - 1) AS n
            """,
            {"id": workflow.pk, "rows": ROWS},
        )
        cursor.execute("ANALYZE fulfillment_ratingrequest")
    return workflow


def test_a_large_export_needs_the_memory_of_a_step(large: Workflow) -> None:
    process = psutil.Process()
    for name, writer in WRITERS.items():
        first = results.page(large, after=None, limit=5_000, state=None)
        list(writer([first]))  # what is loaded and kept once is not counted
        before, most, size = process.memory_info().rss, 0, 0
        parts: list[bytes] = []
        for part in writer(whole(large)):
            most = max(most, process.memory_info().rss - before)
            size += len(part)
            if name == "parquet":
                parts.append(part)  # small: one text compresses well
        assert most < 30 << 20, f"{name}: {most >> 20} MiB more for {size >> 20} MiB"
    file = pq.ParquetFile(io.BytesIO(b"".join(parts)))
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert (sum(groups), max(groups)) == (ROWS, GROUP_ROWS)
    ids = file.read(["request_id"]).column(0).to_pylist()
    assert ids == [f"request-{n}" for n in range(ROWS)]
