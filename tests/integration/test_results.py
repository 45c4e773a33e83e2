import csv
import io
from datetime import timedelta
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment import results
from fulfillment.exports import text
from fulfillment.models import Side, Workflow
from fulfillment.policy.freshness import Look
from fulfillment.policy.lifecycle import BatchState, RequestState, Source
from tests import builders
from tests.builders import NOW

pytestmark = pytest.mark.django_db


def pages(workflow: Workflow, *, limit: int, state: str | None = None) -> list[list[str]]:
    found, after = [], None
    while True:
        page = results.page(workflow, after=after, limit=limit, state=state)
        found.append([record["request_id"] for record in results.records(page)])
        if page.next is None:
            return found
        after = page.next


def lines(workflow: Workflow, *, state: str | None = None) -> list[dict[str, Any]]:
    page = results.page(workflow, after=None, limit=100, state=state)
    return [orjson.loads(line) for line in b"".join(text.jsonl([page])).splitlines()]


def test_pages_run_in_input_order_and_hold_each_request_once() -> None:
    workflow, other = builders.workflow(), builders.workflow()
    for position in (4, 0, 3, 1, 2):
        builders.request(workflow, position)
        builders.request(other, position, request_id=f"other-{position}")

    assert pages(workflow, limit=2) == [["row-1", "row-2"], ["row-3", "row-4"], ["row-5"]]
    assert pages(workflow, limit=5) == [["row-1", "row-2", "row-3", "row-4", "row-5"]]


def test_a_workflow_without_requests_has_one_empty_page() -> None:
    assert pages(builders.workflow(), limit=2) == [[]]


def test_a_record_says_where_its_score_came_from_and_how_old_it_was() -> None:
    workflow, earlier = builders.workflow(), builders.workflow()
    builders.request(
        workflow,
        0,
        state=RequestState.COMPLETED,
        source=Source.ARCHIVE,
        rated_at=NOW - timedelta(days=3),
        score=-1.0,
        label="Fails to meet",
        output={"why": "wörk"},
        side=Side.BASE,
        query_id="q1",
        result_id="d1",
        attempts=0,
        warnings=["nul_replaced"],
        look=Look.HIT,
        rated_by_id=earlier.pk,
        extra={"shelf": 7},
    )

    (record,) = lines(workflow)

    assert record == {
        "request_id": "row-1",
        "query_id": "q1",
        "result_id": "d1",
        "side": "base",
        "state": "COMPLETED",
        "score": -1.0,
        "label": "Fails to meet",
        "output": {"why": "wörk"},
        "source": "archive",
        "error": None,
        "attempts": 0,
        "rated_at": "2026-11-27T12:00:00Z",
        "age_s": 3 * 86_400,
        "look": "hit",
        "rated_by": earlier.public_id,
        "rater_version": "stub-rater@1",
        "warnings": ["nul_replaced"],
        "extra": {"shelf": 7},
    }


@pytest.mark.parametrize(
    ("source", "rated_at", "age_s"),
    [
        (Source.ARCHIVE, NOW - timedelta(seconds=90), 90),
        (Source.ARCHIVE, NOW + timedelta(minutes=5), 0),
        (Source.MODEL, NOW + timedelta(minutes=5), None),
        (Source.COALESCED, NOW + timedelta(minutes=5), None),
    ],
)
def test_only_archive_ratings_have_an_age(source: Source, rated_at: Any, age_s: int | None) -> None:
    workflow = builders.workflow()
    builders.request(workflow, 0, state=RequestState.COMPLETED, source=source, rated_at=rated_at)

    assert lines(workflow)[0]["age_s"] == age_s


def test_running_and_retrying_are_read_off_the_open_batches() -> None:
    workflow = builders.workflow()
    for position in range(8):
        builders.request(workflow, position)
    builders.batch(workflow, [0, 1], state=BatchState.LEASED, open_mask=0b10)
    builders.batch(workflow, [2, 3], state=BatchState.DELAYED)
    builders.batch(workflow, [4], state=BatchState.READY)
    builders.batch(workflow, [5], state=BatchState.WAITING)
    builders.batch(workflow, [6], state=BatchState.LEASED, started_at=None)
    builders.batch(builders.workflow(), [7], state=BatchState.LEASED)

    states = {record["request_id"]: record["state"] for record in lines(workflow)}

    assert states == {
        "row-1": "PENDING",
        "row-2": "RUNNING",
        "row-3": "RETRYING",
        "row-4": "RETRYING",
        **{f"row-{n}": "PENDING" for n in (5, 6, 7, 8)},
    }
    assert pages(workflow, limit=10, state="RUNNING") == [["row-2"]]
    assert pages(workflow, limit=1, state="RETRYING") == [["row-3"], ["row-4"]]
    assert pages(workflow, limit=10, state="PENDING") == [
        ["row-1", "row-5", "row-6", "row-7", "row-8"]
    ]


def test_equal_rows_share_the_state_of_their_item() -> None:
    workflow = builders.workflow()
    for position in range(3):
        builders.request(workflow, position)
    builders.batch(workflow, [0, 2, 1], state=BatchState.LEASED, item_of=[0, 0, 1], open_mask=0b01)

    assert [record["state"] for record in lines(workflow)] == ["RUNNING", "PENDING", "RUNNING"]


def test_a_state_filter_shows_only_that_state() -> None:
    workflow = builders.workflow()
    for position, state in enumerate(RequestState):
        builders.request(workflow, position, state=state)

    for position, state in enumerate(RequestState):
        assert pages(workflow, limit=10, state=state.name) == [[f"row-{position + 1}"]]


def test_a_request_that_ends_between_look_and_read_is_shown_as_it_is() -> None:
    workflow = builders.workflow()
    row = builders.request(workflow, 0)
    page = results.page(workflow, after=None, limit=10, state=None)
    filtered = results.page(workflow, after=None, limit=10, state="PENDING")
    row.state, row.error = RequestState.FAILED, "invalid_request"
    row.save()

    assert [record["state"] for record in results.records(page)] == ["FAILED"]
    assert list(results.records(filtered)) == []


def csv_rows(workflow: Workflow) -> list[list[str]]:
    page = results.page(workflow, after=None, limit=100, state=None)
    table = b"".join(text.delimited([page], header=True)).decode()
    return list(csv.reader(io.StringIO(table, newline="")))


def test_csv_keeps_numbers_numbers_and_guards_texts() -> None:
    workflow = builders.workflow()
    builders.request(
        workflow,
        0,
        request_id="=1+1",
        state=RequestState.COMPLETED,
        score=-1.0,
        label='-1, "stär"\n',
        output={"a": 1},
        warnings=["nul_replaced"],
    )
    builders.request(workflow, 1, state=RequestState.COMPLETED, score=0.1)

    header, first, second = csv_rows(workflow)

    assert header == list(results.FIELDS)
    assert dict(zip(header, first, strict=True)) == {
        "request_id": "'=1+1",
        "query_id": "",
        "result_id": "",
        "side": "",
        "state": "COMPLETED",
        "score": "-1",
        "label": '\'-1, "stär"\n',
        "output": '{"a": 1}',
        "source": "model",
        "error": "",
        "attempts": "1",
        "rated_at": "2026-11-30T12:00:00Z",
        "age_s": "",
        "look": "",
        "rated_by": workflow.public_id,
        "rater_version": "stub-rater@1",
        "warnings": '["nul_replaced"]',
        "extra": "",
    }
    assert second[header.index("score")] == "0.1"


def test_csv_of_later_pages_has_no_header_and_an_empty_one_only_that() -> None:
    workflow = builders.workflow()
    page = results.page(workflow, after=None, limit=10, state=None)

    assert b"".join(text.delimited([page], header=False)) == b""
    table = b"".join(text.delimited([page], header=True)).decode()
    assert table.strip() == ",".join(results.FIELDS)


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+49 30 1", "'+49 30 1"),
        ("-1 star", "'-1 star"),
        ("@sum(1)", "'@sum(1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("＝1+1", "'＝1+1"),  # noqa: RUF001
        (" =1", "' =1"),
        ("'=1", "''=1"),
        ("a=1", "a=1"),
        ('"q", x', '"q", x'),
        ("plain", "plain"),
        (" plain", " plain"),
        ("", ""),
    ],
)
def test_text_that_could_start_a_formula_gets_an_apostrophe(value: str, cell: str) -> None:
    assert text.safe_text(value) == cell


@given(st.text())
def test_taking_one_apostrophe_away_gives_the_text_back(value: str) -> None:
    assert text.safe_text(value).removeprefix("'") == value


def test_a_page_is_read_in_steps_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    monkeypatch.setattr(results, "STEP_ROWS", 2)
    workflow = builders.workflow()
    for position in range(5):
        builders.request(workflow, position, state=RequestState.COMPLETED)
    page = results.page(workflow, after=None, limit=10, state=None)

    with django_assert_num_queries(3):
        parts = list(text.jsonl([page]))

    assert [part.count(b"\n") for part in parts] == [2, 2, 1]
