"""Intake: what a body becomes in the database, whatever kills it when and whoever else sends."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from django.db import connection, transaction
from pytest_django import Settings

from fulfillment import (
    backlog,
    completion,
    control,
    copying,
    documents,
    ingest,
    intake,
    raters,
    retention,
    spool,
)
from fulfillment.clock import database_now
from fulfillment.errors import BacklogFull, BadUpload, Conflict, FulfillmentError, InvalidFields
from fulfillment.intake import Body, Submission, WorkflowForm
from fulfillment.models import (
    POSITION_BITS,
    Batch,
    BatchPayload,
    Event,
    Rater,
    RaterVersion,
    Rating,
    RatingRequest,
    StatsDelta,
    Upload,
    Workflow,
    WorkflowStats,
)
from fulfillment.policy.fingerprint import fingerprint, request_digest, url_digest
from fulfillment.policy.lifecycle import BatchState, RequestState, Source, WorkflowState
from tests import builders
from tests.builders import DIRECTORY, MODEL, RATER, ndjson, row
from tests.rating_queue import PATIENCE_S, Plans, boot, counts_add_up, queue, threads, until_blocked

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

CHUNK = 4
KEY_FIELDS = ("query_text", "url", "title", "html", "text", "context")


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(
        Rater(id=RATER, autorater="stub", model_id=MODEL, batch_size=3), now=database_now()
    )
    monkeypatch.setattr(spool, "CHUNK_ROWS", CHUNK)


def rows(*numbers: int, **changes: Any) -> list[dict[str, Any]]:
    return [row(number, **changes) for number in numbers]


def body(of: Sequence[Any] | bytes) -> Body:
    return Body(chunks=[of if isinstance(of, bytes) else ndjson(of)])


def submit(
    of: Sequence[Any] | bytes,
    *,
    key: str | None = None,
    owner: str = "alice",
    close: bool = True,
    rater: str = RATER,
    **form: Any,
) -> Submission:
    return intake.submit(
        form=WorkflowForm(rater=rater, **form),
        body=body(of),
        owner=owner,
        idempotency_key=key,
        close=close,
    )


def opened(of: Sequence[Any] = (), **form: Any) -> Workflow:
    """Return an OPEN workflow that has these rows."""
    if of:
        return submit(of, close=False, **form).workflow
    return intake.create_empty(
        form=WorkflowForm(rater=RATER, **form), owner="alice", idempotency_key=None
    ).workflow


def append(
    to: Workflow, of: Sequence[Any] | bytes, *, key: str | None = None, owner: str = "alice"
) -> Submission:
    return intake.append(
        workflow=Workflow.objects.get(pk=to.pk), body=body(of), owner=owner, idempotency_key=key
    )


def refused(call: Callable[[], Any], error: type[FulfillmentError]) -> Any:
    with pytest.raises(error) as caught:
        call()
    return caught.value


def requests(of: Workflow) -> list[RatingRequest]:
    return list(RatingRequest.objects.filter(workflow=of).order_by("id"))


def batches(of: Workflow) -> list[Batch]:
    return list(Batch.objects.filter(workflow=of).order_by("position"))


def payload(of: Batch) -> Any:
    return documents.unpack(bytes(BatchPayload.objects.get(batch=of).data))


def key_of(item: dict[str, Any], version: RaterVersion | None = None) -> str:
    version = version or RaterVersion.objects.get(rater_id=RATER, number=1)
    named = {name: item[name] for name in KEY_FIELDS if item.get(name) is not None}
    return fingerprint(version_digest=version.digest.bytes, item=named, key_fields=KEY_FIELDS).hex()


def rate(item: dict[str, Any], *, age: timedelta = timedelta(hours=1), **fields: Any) -> Rating:
    """Put a rating of a row into the archive."""
    version = RaterVersion.objects.get(rater_id=RATER, number=1)
    fields = {"score": 1.5, "produced_at": database_now() - age, "workflow_id": 0, **fields}
    return Rating.objects.create(fingerprint=key_of(item), rater_version=version, **fields)


def snapshot(of: Workflow) -> dict[str, Any]:
    """Return all that intake wrote for a workflow, but for the ids that the database gives."""
    workflow = Workflow.objects.get(pk=of.pk)
    return {
        "state": WorkflowState(workflow.state).name,
        "next_position": workflow.next_position,
        "version": workflow.rater_version_id,
        "requests": [
            (
                r.pk & (1 << POSITION_BITS) - 1,
                r.request_id,
                r.fingerprint,
                r.state,
                r.score,
                r.extra,
            )
            for r in requests(workflow)
        ],
        "batches": [
            (b.position, b.positions, b.item_of, b.fingerprints, b.open_mask, b.state, payload(b))
            for b in batches(workflow)
        ],
        "progress": counts_add_up(workflow),
        "events": Event.objects.filter(workflow=workflow).count(),
    }


class Killed(BaseException):
    """kill -9, as far as PostgreSQL can tell: the transaction is gone, and no code runs after."""


@contextmanager
def killed_at(statement: int) -> Iterator[list[str]]:
    """Let the process die instead of sending its n-th statement; yield those that were sent."""
    sent: list[str] = []

    def wrapper(execute: Any, sql: str, *rest: Any) -> Any:
        if len(sent) == statement:
            raise Killed
        sent.append(sql)
        return execute(sql, *rest)

    with connection.execute_wrapper(wrapper):
        yield sent


def killed_after_chunks(count: int, call: Callable[[], Any]) -> None:
    """Let the process die as it begins the chunk after `count` of them."""
    begun = 0

    def wrapper(execute: Any, sql: str, *rest: Any) -> Any:
        nonlocal begun
        if sql.startswith("SELECT holder"):
            if begun == count:
                raise Killed
            begun += 1
        return execute(sql, *rest)

    with pytest.raises(Killed), connection.execute_wrapper(wrapper):
        call()


class Pause:
    """Stops a thread before a statement, n-th of its kind, until it may go on."""

    def __init__(self, prefix: str, occurrence: int) -> None:
        self.reached, self._go_on = threading.Event(), threading.Event()
        self._prefix, self._left = prefix, occurrence

    def __call__(self, execute: Any, sql: str, *rest: Any) -> Any:
        if sql.lstrip().startswith(self._prefix):
            self._left -= 1
            if self._left == 0:
                self.reached.set()
                assert self._go_on.wait(PATIENCE_S)
        return execute(sql, *rest)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S)

    def end(self) -> None:
        self._go_on.set()

    def during(self, call: Callable[[], Any]) -> Any:
        """Run a call that stops here; return its result, or the refusal it met."""
        try:
            with connection.execute_wrapper(self):
                return call()
        except FulfillmentError as error:
            return error


# What a body becomes


def test_rows_become_requests_with_all_that_they_said() -> None:
    sent = [
        row(
            1, query_id="q1", result_id="d1", side="test", result_weight=2, query_weight=0.5,
            market="de", nested={"n": [1]},
        ),
        {"query": "no id", "side": "base", "text": "nul \0"},
    ]  # fmt: skip

    done = submit(sent)

    first, second = requests(done.workflow)
    assert first.pk == done.workflow.pk << POSITION_BITS
    assert second.pk == first.pk + 1
    assert (first.request_id, first.query_id, first.result_id) == ("r1", "q1", "d1")
    assert (second.request_id, second.query_id, second.result_id) == ("row-2", None, None)
    assert [r.request_digest.bytes for r in (first, second)] == [
        request_digest("r1"),
        request_digest("row-2"),
    ]
    assert (first.side, first.result_weight, first.query_weight) == (1, 2.0, 0.5)
    assert (second.side, second.result_weight, second.query_weight) == (2, None, None)
    assert first.extra == {"market": "de", "nested": {"n": [1]}}
    assert second.extra is None
    assert first.fingerprint.hex == key_of(sent[0])
    assert second.fingerprint.hex == key_of({"query_text": "no id", "text": "nul \ufffd"})
    assert (first.warnings, second.warnings) == (None, ["nul_replaced"])
    assert {r.state for r in (first, second)} == {RequestState.PENDING}
    assert {r.attempts for r in (first, second)} == {0}
    assert done.answer == {
        "accepted": 2,
        "hits": 0,
        "coalesced": 0,
        "pending": 2,
        "rejected": [],
        "rejected_count": 0,
        "warnings": [{"line": 2, "request_id": "row-2", "code": "nul_replaced"}],
    }


def test_the_archive_is_never_scanned_whatever_its_statistics_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool, "CHUNK_ROWS", 4_000)
    with connection.cursor() as cursor:  # not analysed: the planner takes it for almost empty
        cursor.execute(
            """
            INSERT INTO fulfillment_rating
                (fingerprint, rater_version_id, workflow_id, score, produced_at)
            SELECT gen_random_uuid(), 1, 0, 1.0, now() FROM generate_series(1, 20000)
            """
        )
    known = rows(*range(50))
    for item in known:
        rate(item)

    with Plans() as plans:
        answer = submit([*known, *rows(*range(50, 3_000))]).answer

    assert (answer["hits"], answer["pending"]) == (50, 2_950)
    assert plans.scans == []


def test_items_become_batches_with_their_payload() -> None:
    sent = rows(*range(CHUNK))

    done = submit(sent)

    first, second = batches(done.workflow)
    assert (first.positions, first.item_of, first.open_mask) == ([0, 1, 2], [0, 1, 2], 0b111)
    assert (second.positions, second.item_of, second.open_mask) == ([3], [0], 0b1)
    assert [f.hex for f in first.fingerprints] == [key_of(r) for r in sent[:3]]
    for batch in (first, second):
        assert (batch.state, batch.round, batch.attempts, batch.lost) == (BatchState.READY, 1, 0, 0)
        assert (batch.fence, batch.sent_mask, batch.replica) == (0, 0, "")
        assert (batch.boot_id, batch.lease_until, batch.not_before) == (None, None, None)
        assert BatchPayload.objects.get(batch=batch).workflow_id == done.workflow.pk
    assert payload(first) == [
        [
            {name: r[name] for name in ("query_text", "url", "text")},
            url_digest(r["url"]).hex(),
        ]
        for r in sent[:3]
    ]
    assert payload(second)[0][0]["query_text"] == "query 3"


def test_an_item_without_url_has_no_digest_and_only_key_fields_are_in_the_payload() -> None:
    sent = {"query": "q", "context": {"n": 2**70}, "market": "de", "query_id": "x"}

    done = submit(json.dumps(sent).encode())

    (batch,) = batches(done.workflow)
    assert payload(batch) == [[{"query_text": "q", "context": {"n": 2**70}}, None]]


def test_equal_rows_of_a_chunk_are_one_item() -> None:
    page = {"query_text": "same", "text": "page"}
    sent = [row(1), {**page, "request_id": "a"}, row(2), {**page, "request_id": "b", "x": 1}]

    done = submit(sent)

    (batch,) = batches(done.workflow)
    assert batch.positions == [0, 1, 3, 2]
    assert batch.item_of == [0, 1, 1, 2]
    assert batch.open_mask == 0b111
    assert len(payload(batch)) == len(batch.fingerprints) == 3
    assert (done.answer["pending"], done.answer["coalesced"], done.answer["accepted"]) == (3, 1, 4)
    assert [r.extra for r in requests(done.workflow)] == [None, None, None, {"x": 1}]


def test_batches_never_reach_over_a_chunk_and_equal_rows_meet_only_inside_one() -> None:
    page = {"query_text": "same"}

    done = submit([*rows(1, 2, 3), page, page, *rows(4, 5, 6, 7)])

    assert [(b.position, b.positions) for b in batches(done.workflow)] == [
        (0, [0, 1, 2]),
        (3, [3]),
        (4, [4, 5, 6]),
        (7, [7]),
        (8, [8]),
    ]
    assert done.answer["coalesced"] == 0
    assert done.answer["pending"] == 9


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1] * 4), (2, [2, 2]), (60, [4])])
def test_a_workflow_may_choose_its_batch_size(batch_size: int, sizes: list[int]) -> None:
    done = submit(rows(*range(4)), batch_size=batch_size)

    assert [len(b.positions) for b in batches(done.workflow)] == sizes


def test_a_batch_size_over_the_mask_is_refused() -> None:
    error = refused(lambda: submit(rows(1), batch_size=61), InvalidFields)

    assert error.errors[0]["field"] == "batch_size"
    assert not Workflow.objects.exists()


def test_bad_rows_are_left_out_and_positions_close_up() -> None:
    sent = ["no json", row(1), "", "[]", {"query": "q"}, {"query": ""}]

    done = submit(sent)

    assert [r.request_id for r in requests(done.workflow)] == ["r1", "row-2"]
    assert [(r["line"], r["code"]) for r in done.answer["rejected"]] == [
        (1, "invalid_json"),
        (4, "not_an_object"),
        (6, "empty_field"),
    ]
    assert (done.answer["accepted"], done.answer["rejected_count"]) == (2, 3)


def test_refusals_and_warnings_are_listed_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spool, ingest):
        monkeypatch.setattr(module, "MOST_LISTED", 3)

    done = submit(["x"] * 5 + [row(n, text="\0") for n in range(6)])

    assert (len(done.answer["rejected"]), done.answer["rejected_count"]) == (3, 5)
    assert [w["request_id"] for w in done.answer["warnings"]] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("sent", [b"", ndjson(["x"]), ndjson([row(1), row(1)]), b"\xff\xfe"])
def test_a_refused_file_leaves_nothing_behind(sent: bytes) -> None:
    refused(lambda: submit(sent, key="k"), BadUpload)

    assert not Workflow.objects.exists()
    assert not Upload.objects.exists()
    assert not StatsDelta.objects.exists()
    assert submit(rows(1), key="k").answer["accepted"] == 1


def test_an_id_that_another_row_gets_by_its_position_refuses_the_file() -> None:
    error = refused(lambda: submit([{"query": "a"}, row(1, request_id="row-1")]), BadUpload)

    assert error.code == "duplicate_request_id"
    assert not Workflow.objects.exists()


def test_numbers_that_only_python_holds_are_stored_exactly() -> None:
    number = "1" + "0" * 399 + "1"

    done = submit(f'{{"query_text":"q","context":{{"n":{number}}},"x":{number}}}\n'.encode())

    (request,) = requests(done.workflow)
    assert request.extra == {"x": int(number)}
    assert payload(batches(done.workflow)[0])[0][0]["context"] == {"n": int(number)}


def test_awkward_text_is_stored_as_sent() -> None:
    text = 'é e\u0301 😀 \u2028 \ufeff \x7f "quoted" \\ \t'

    done = submit([row(1, request_id=text, query_text=text, text=text, note=text)])

    (request,) = requests(done.workflow)
    assert (request.request_id, request.extra) == (text, {"note": text})
    item, _ = payload(batches(done.workflow)[0])[0]
    assert (item["query_text"], item["text"]) == (text, text)


# The archive


def test_rows_that_the_archive_has_are_completed_with_its_values() -> None:
    sent = rows(1, 2, 3)
    entry = rate(
        sent[1],
        score=3.25,
        label="Highly meets",
        output={"why": ["ü", 1.5]},
        produced_at=database_now() - timedelta(days=3, microseconds=7),
    )

    done = submit(sent)

    hit = requests(done.workflow)[1]
    assert (hit.state, hit.source) == (RequestState.COMPLETED, Source.ARCHIVE)
    assert (hit.score, hit.label, hit.output) == (3.25, "Highly meets", {"why": ["ü", 1.5]})
    assert (hit.rating_id, hit.rated_at) == (entry.pk, entry.produced_at)
    assert (hit.attempts, hit.error) == (0, None)
    (batch,) = batches(done.workflow)
    assert batch.positions == [0, 2]
    assert (done.answer["hits"], done.answer["pending"], done.answer["accepted"]) == (1, 2, 3)
    progress = counts_add_up(done.workflow)
    assert (progress["from_archive"], progress["score_sum"]) == (1, 3.25)


def test_equal_rows_are_all_hits() -> None:
    page = {"query_text": "same"}
    rate(page, score=2.0, label=None, output=None)

    done = submit([page, row(1), page])

    assert [r.score for r in requests(done.workflow)] == [2.0, None, 2.0]
    assert (done.answer["hits"], done.answer["coalesced"], done.answer["pending"]) == (2, 0, 1)
    assert counts_add_up(done.workflow)["score_sum"] == 4.0


def test_a_workflow_of_hits_only_is_completed_at_once() -> None:
    rate(row(1))

    done = submit(rows(1))

    assert done.workflow.state == WorkflowState.COMPLETED
    assert not batches(done.workflow)
    (event,) = Event.objects.all()
    assert event.kind == "workflow.completed"


def test_another_version_of_the_rater_is_no_hit() -> None:
    rate(row(1))
    DIRECTORY.models[MODEL].version = "v2"

    assert submit(rows(1)).answer["hits"] == 0


def test_bypass_takes_nothing_from_the_archive() -> None:
    rate(row(1), age=timedelta(0))

    assert submit(rows(1), bypass=True).answer["hits"] == 0


def test_max_age_narrows_what_is_taken() -> None:
    rate(row(1), age=timedelta(seconds=90))

    assert submit(rows(1), max_age_s=60).answer["hits"] == 0
    assert submit(rows(1), max_age_s=120).answer["hits"] == 1


@pytest.mark.parametrize(("ahead_s", "hits"), [(200, 1), (400, 0)])
def test_ratings_of_the_far_future_are_not_taken(ahead_s: int, hits: int) -> None:
    rate(row(1), age=-timedelta(seconds=ahead_s))

    assert submit(rows(1)).answer["hits"] == hits


# Raters, forms


def test_an_unknown_rater_is_refused() -> None:
    error = refused(lambda: submit(rows(1), rater="nobody"), InvalidFields)

    assert [(e["field"], e["code"]) for e in error.errors] == [("rater", "unknown_rater")]


def test_the_raters_defaults_fill_the_form() -> None:
    Rater.objects.update(deadline_s=600, batch_size=2)

    workflow = submit(rows(1)).workflow

    assert workflow.batch_size == 2
    assert workflow.deadline_at - workflow.created_at == timedelta(seconds=600)
    assert workflow.ends_at - workflow.deadline_at == intake.CALL_LIMIT_MARGIN


def test_a_workflow_keeps_the_version_it_was_made_with() -> None:
    first = opened(rows(1))
    DIRECTORY.models[MODEL].version = "v2"

    append(first, rows(2))
    second = opened(rows(2))

    old, new = RaterVersion.objects.order_by("number")
    assert (first.rater_version_id, second.rater_version_id) == (old.pk, new.pk)
    assert requests(first)[1].fingerprint.hex == key_of(row(2), old)
    assert requests(second)[0].fingerprint.hex == key_of(row(2), new)


def test_a_full_backlog_refuses_new_work_but_not_what_was_taken_before(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "BELIEVED_S", 0)
    monkeypatch.setattr(backlog, "_counted", backlog._Count())
    workflow = opened()
    first = submit(rows(1), key="k")
    settings.AIRS_MAX_BACKLOG_BYTES = 1

    for call in (lambda: submit(rows(2)), lambda: append(workflow, rows(2)), opened):
        assert refused(call, BacklogFull).status == 507
    assert Workflow.objects.count() == 2
    again = submit(rows(1), key="k")

    assert again.replayed
    assert again.workflow == first.workflow


# Idempotency


def test_the_same_key_and_body_answer_the_same_workflow() -> None:
    sent = [*rows(*range(9)), "bad"]

    first = submit(sent, key="k")
    again = submit(sent, key="k")

    assert (first.replayed, again.replayed) == (False, True)
    assert again.workflow == first.workflow
    assert again.answer == first.answer
    assert RatingRequest.objects.count() == 9
    assert Workflow.objects.count() == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: submit(rows(2), key="k"),
        lambda: submit(ndjson(rows(1)) + b"\n", key="k"),
        lambda: submit(rows(1), key="k", priority=51),
        lambda: submit(rows(1), key="k", close=False),
        lambda: append(opened(), rows(1), key="k"),
        lambda: intake.create_empty(
            form=WorkflowForm(rater=RATER), owner="alice", idempotency_key="k"
        ),
    ],
)
def test_the_same_key_with_anything_else_is_a_conflict(other: Callable[[], Any]) -> None:
    submit(rows(1), key="k")

    error = refused(other, Conflict)

    assert (error.status, error.code) == (409, "idempotency_conflict")
    assert RatingRequest.objects.count() == 1


def test_a_release_may_add_fields_between_a_kill_and_the_resume() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class WiderForm(WorkflowForm):
        added: str = "as before"

    def send(form: WorkflowForm) -> Submission:
        return intake.submit(
            form=form, body=body(SENT), owner="alice", idempotency_key="k", close=True
        )

    killed_after_chunks(1, lambda: send(WorkflowForm(rater=RATER, priority=70)))

    assert send(WiderForm(rater=RATER, priority=70)).answer["accepted"] == 12
    error = refused(lambda: send(WiderForm(rater=RATER, priority=70, added="new")), Conflict)
    assert error.code == "idempotency_conflict"


def test_keys_belong_to_their_owner_and_no_key_is_no_key() -> None:
    made = [
        submit(rows(1), key="k", owner="alice"),
        submit(rows(1), key="k", owner="bob"),
        submit(rows(1)),
        submit(rows(1)),
    ]

    assert len({done.workflow.pk for done in made}) == 4


def test_an_empty_workflow_is_made_once_a_key() -> None:
    def create(key: str) -> Submission:
        return intake.create_empty(
            form=WorkflowForm(rater=RATER), owner="alice", idempotency_key=key
        )

    first, again, other = create("k"), create("k"), create("l")

    assert first.workflow == again.workflow != other.workflow
    assert (first.replayed, again.replayed) == (False, True)
    assert first.workflow.state == WorkflowState.OPEN


def test_an_append_is_done_once_a_key() -> None:
    workflow = opened(rows(1))

    first = append(workflow, rows(2, 3), key="k")
    again = append(workflow, rows(2, 3), key="k")

    assert (first.replayed, again.replayed) == (False, True)
    assert first.answer == again.answer
    assert len(requests(workflow)) == 3


# Killed


SENT = [*rows(*range(6)), row(1, request_id="same as r1"), "bad", *rows(*range(6, 11))]


@with_commits
@pytest.mark.parametrize("close", [True, False])
def test_killed_before_any_statement_the_same_key_goes_on(close: bool) -> None:
    control = submit(SENT, close=close)
    expected = snapshot(control.workflow)
    assert len(expected["batches"]) == 6
    died = 0
    for statement in range(1_000):
        key = f"killed at {statement}"
        try:
            with killed_at(statement):
                done = submit(SENT, key=key, close=close)
        except Killed:
            died += 1
            done = submit(SENT, key=key, close=close)
            found = snapshot(done.workflow)

            assert found == expected, statement
            assert done.answer == control.answer
            assert Upload.objects.filter(key=key).count() == 1
        else:
            assert snapshot(done.workflow) == expected
            break
    # One workflow each: also those that died just before their first row was written.
    assert Workflow.objects.count() == died + 2
    assert died > 30


@with_commits
def test_killed_before_any_statement_an_append_goes_on() -> None:
    def begun() -> Workflow:
        return opened(rows(100, 101), batch_size=3)

    control = begun()
    answer = append(control, SENT, key="control").answer
    expected = snapshot(control)
    for statement in range(1_000):
        workflow, key = begun(), f"killed at {statement}"
        try:
            with killed_at(statement):
                append(workflow, SENT, key=key)
        except Killed:
            done = append(workflow, SENT, key=key)

            assert done.answer == answer
            assert snapshot(workflow) == expected, statement
        else:
            assert snapshot(workflow) == expected
            break
    assert statement > 25


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("copy", ["requests", "batches", "payloads"])
def test_killed_inside_a_copy_nothing_of_its_chunk_stays(
    chunks: int, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = snapshot(submit(SENT).workflow)
    dies_at = 3 * chunks + ["requests", "batches", "payloads"].index(copy)
    real, calls = copying.copy, 0

    def torn(cursor: Any, table: str, columns: Any, records: Any) -> int:
        nonlocal calls
        if calls == dies_at:
            real(cursor, table, columns, list(records)[:1])
            raise Killed
        calls += 1
        return real(cursor, table, columns, records)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "copy", torn)
        with pytest.raises(Killed):
            submit(SENT, key="k")
    half = Upload.objects.get(key="k")
    assert half.rows_done == CHUNK * chunks
    assert RatingRequest.objects.filter(workflow=half.workflow).count() == CHUNK * chunks

    done = submit(SENT, key="k")

    assert snapshot(done.workflow) == expected
    assert done.workflow == half.workflow


def test_what_was_killed_stays_hidden_and_is_never_dispatched() -> None:
    boot()
    killed_after_chunks(2, lambda: submit(SENT, key="k"))
    dispatcher = queue()

    (workflow,) = Workflow.objects.all()
    assert workflow.state == WorkflowState.RECEIVING
    assert len(requests(workflow)) == 2 * CHUNK
    assert dispatcher.run().sent == 0
    assert builders.Api().get("/workflows").json()["items"] == []
    assert builders.Api().get(f"/workflows/{workflow.public_id}").status_code == 404

    submit(SENT, key="k")

    assert dispatcher.run().sent == 6


def test_the_version_stays_when_the_rater_changes_between_kill_and_resume() -> None:
    killed_after_chunks(1, lambda: submit(SENT, key="k"))
    DIRECTORY.models[MODEL].version = "v2"
    submit(rows(99))

    done = submit(SENT, key="k")

    assert done.workflow.rater_version.number == 1
    assert {r.fingerprint.hex for r in requests(done.workflow)} == {
        key_of(r) for r in SENT if isinstance(r, dict)
    }


def test_a_changed_archive_between_kill_and_resume_changes_only_what_is_still_to_come() -> None:
    rate(row(0))
    rate(row(4))
    killed_after_chunks(1, lambda: submit(SENT, key="k"))
    Rating.objects.all().delete()

    done = submit(SENT, key="k")

    assert done.answer["hits"] == 1
    assert [r.state for r in requests(done.workflow)].count(RequestState.COMPLETED) == 1
    assert done.answer["accepted"] == 12
    counts_add_up(done.workflow)


def test_each_chunk_is_a_heartbeat() -> None:
    beats = []

    def watch(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("SELECT holder"):
            beats.append(Upload.objects.get().heartbeat_at)
            Upload.objects.update(heartbeat_at=builders.NOW - timedelta(days=9_999))
        return execute(sql, *rest)

    before = database_now()
    with connection.execute_wrapper(watch):
        submit(SENT)

    assert len(beats) == 3
    assert before < beats[0] < beats[1] < beats[2]


def test_another_body_does_not_take_a_killed_upload_over() -> None:
    killed_after_chunks(1, lambda: submit(SENT, key="k"))
    (before,) = Upload.objects.all()

    error = refused(lambda: submit(rows(1), key="k"), Conflict)

    assert error.code == "idempotency_conflict"
    assert Upload.objects.get().holder == before.holder


def test_what_the_janitor_removed_while_the_body_came_in_again_starts_afresh() -> None:
    expected = snapshot(submit(SENT).workflow)
    killed_after_chunks(2, lambda: submit(SENT, key="k"))
    Upload.objects.filter(finished_at=None).update(heartbeat_at=database_now() - timedelta(hours=1))

    def slow() -> Iterator[bytes]:
        yield ndjson(SENT[:3])
        Workflow.objects.filter(state=WorkflowState.RECEIVING).update(
            created_at=database_now() - timedelta(hours=1)
        )
        assert retention.run_once(database_now())
        yield ndjson(SENT[3:])

    done = intake.submit(
        form=WorkflowForm(rater=RATER),
        body=Body(chunks=slow()),
        owner="alice",
        idempotency_key="k",
        close=True,
    )

    assert not done.replayed
    assert snapshot(done.workflow) == expected
    assert Workflow.objects.count() == 2


def test_an_upload_that_was_removed_while_it_stood_still_is_told_so() -> None:
    def removed(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.lstrip().startswith("UPDATE") and '"finished_at"' in sql:
            Upload.objects.all().delete()
        return execute(sql, *rest)

    with connection.execute_wrapper(removed):
        error = refused(lambda: submit(rows(1)), Conflict)

    assert error.code == "upload_superseded"
    assert Workflow.objects.get().state == WorkflowState.RECEIVING


# Two at a time


@with_commits
def test_the_same_key_while_the_first_is_still_spooling_is_in_progress() -> None:
    def body_with_a_guest() -> Iterator[bytes]:
        yield ndjson(rows(1))
        submit(rows(1, 2), key="k")
        yield ndjson(rows(2))

    error = refused(
        lambda: intake.submit(
            form=WorkflowForm(rater=RATER),
            body=Body(chunks=body_with_a_guest()),
            owner="alice",
            idempotency_key="k",
            close=True,
        ),
        Conflict,
    )

    assert error.code == "upload_in_progress"
    assert Workflow.objects.count() == 1


@with_commits
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_who_is_overtaken_between_chunks_stops_and_nothing_is_doubled(chunk: int) -> None:
    expected = snapshot(submit(SENT).workflow)
    pause = Pause("SELECT holder", chunk)

    with threads(1) as pool:
        first = pool.submit(pause.during, lambda: submit(SENT, key="k"))
        pause.wait()
        second = submit(SENT, key="k")
        pause.end()
        stopped = first.result(PATIENCE_S)

    assert isinstance(stopped, Conflict)
    assert stopped.code == "upload_superseded"
    assert snapshot(second.workflow) == expected
    assert not second.replayed
    assert Workflow.objects.count() == 2


@with_commits
def test_who_is_overtaken_inside_a_chunk_commits_it_and_stops() -> None:
    control = submit(SENT)
    expected = snapshot(control.workflow)
    inside_the_second = Pause('INSERT INTO "fulfillment_statsdelta"', 2)
    before_the_third = Pause("SELECT holder", 3)

    with threads(2) as pool:
        first = pool.submit(
            inside_the_second.during,
            lambda: before_the_third.during(lambda: submit(SENT, key="k")),
        )
        inside_the_second.wait()
        second = pool.submit(submit, SENT, key="k")
        until_blocked(second)
        inside_the_second.end()
        before_the_third.wait()
        done = second.result(PATIENCE_S)
        before_the_third.end()
        stopped = first.result(PATIENCE_S)

    assert isinstance(stopped, Conflict)
    assert stopped.code == "upload_superseded"
    assert snapshot(done.workflow) == expected
    assert done.answer == control.answer


@with_commits
def test_who_is_overtaken_after_its_last_chunk_has_done_its_work() -> None:
    expected = snapshot(submit(SENT).workflow)
    pause = Pause('SELECT "fulfillment_workflow"."state"', 1)  # of the finish

    with threads(1) as pool:
        first = pool.submit(pause.during, lambda: submit(SENT, key="k"))
        pause.wait()
        second = submit(SENT, key="k")
        pause.end()
        done = first.result(PATIENCE_S)

    assert isinstance(done, Submission)
    assert done.workflow == second.workflow
    assert done.answer == second.answer
    assert snapshot(second.workflow) == expected


@with_commits
def test_two_appends_with_a_common_id_have_one_winner() -> None:
    workflow = opened()
    has_its_positions = Pause("SELECT holder", 1)
    has_looked_for_known_ids = Pause("SELECT DISTINCT ON (fingerprint)", 1)

    with threads(2) as pool:
        quick = pool.submit(has_its_positions.during, lambda: append(workflow, rows(1, 2, 3)))
        has_its_positions.wait()
        slow = pool.submit(has_looked_for_known_ids.during, lambda: append(workflow, rows(5, 2, 6)))
        has_looked_for_known_ids.wait()
        has_its_positions.end()
        until_blocked(quick)  # its rows are committed, its last step waits for the other's chunk
        has_looked_for_known_ids.end()
        won, lost = quick.result(PATIENCE_S), slow.result(PATIENCE_S)

    assert (won.answer["accepted"], won.answer["rejected"]) == (3, [])
    assert lost.answer["accepted"] == 2
    assert [(r["line"], r["code"]) for r in lost.answer["rejected"]] == [
        (2, "duplicate_request_id")
    ]
    assert [r.request_id for r in requests(workflow)] == ["r1", "r2", "r3", "r5", "r6"]
    counts_add_up(workflow)


@with_commits
def test_appends_with_common_ids_in_another_order_do_not_end_in_a_deadlock() -> None:
    workflow = opened()

    with threads(1) as pool, transaction.atomic():
        with connection.cursor() as cursor:  # the other one shall notice
            cursor.execute("SET LOCAL deadlock_timeout = '60s'")
        builders.request(workflow, 100, request_id="r1")
        second = pool.submit(append, workflow, rows(2, 3, 1))
        until_blocked(second)
        builders.request(workflow, 101, request_id="r2")
    with threads(1):
        done = second.result(PATIENCE_S)

    assert [r["line"] for r in done.answer["rejected"]] == [1, 3]
    assert [r.request_id for r in requests(workflow)] == ["r3", "r1", "r2"]


@with_commits
def test_a_close_waits_for_a_chunk_and_then_says_that_rows_are_coming_in() -> None:
    workflow = opened()
    in_chunk = Pause('INSERT INTO "fulfillment_statsdelta"', 1)
    # Before the append's last step: it was looked up, its positions were reserved.
    finishing = Pause('SELECT "fulfillment_workflow"."id"', 3)

    def adding() -> Any:
        return finishing.during(lambda: in_chunk.during(lambda: append(workflow, rows(*range(6)))))

    with threads(2) as pool:
        added = pool.submit(adding)
        in_chunk.wait()
        closing = pool.submit(refused, lambda: control.close(workflow_id=workflow.pk), Conflict)
        until_blocked(closing)
        in_chunk.end()
        error = closing.result(PATIENCE_S)
        finishing.end()
        done = added.result(PATIENCE_S)

    assert error.code == "upload_in_progress"
    assert done.answer["accepted"] == 6


# Appending


def test_appended_rows_follow_in_position_and_name() -> None:
    workflow = opened([{"query": "a"}, {"query": "b"}])

    done = append(workflow, [{"query": "c"}, row(7), "bad", {"query": "d"}])

    assert [r.request_id for r in requests(workflow)] == ["row-1", "row-2", "row-3", "r7", "row-5"]
    assert [(b.position, b.positions) for b in batches(workflow)] == [
        (0, [0, 1]),
        (2, [2, 3, 4]),
    ]
    assert done.answer["accepted"] == 3
    workflow.refresh_from_db()
    assert (workflow.state, workflow.next_position) == (WorkflowState.OPEN, 5)
    counts_add_up(workflow)


def test_a_row_with_an_id_of_an_earlier_upload_is_refused_alone() -> None:
    workflow = opened(rows(*range(6)))
    append(workflow, rows(10))

    done = append(workflow, [*rows(3, 20, 10), *rows(21, 5, 22)])

    assert [(r["line"], r["code"]) for r in done.answer["rejected"]] == [
        (1, "duplicate_request_id"),
        (3, "duplicate_request_id"),
        (5, "duplicate_request_id"),
    ]
    assert (done.answer["accepted"], done.answer["rejected_count"]) == (3, 3)
    assert [r.request_id for r in requests(workflow)][-3:] == ["r20", "r21", "r22"]
    counts_add_up(workflow)


def test_ids_are_unique_in_a_workflow_only() -> None:
    opened(rows(1))

    assert append(opened(rows(2)), rows(1)).answer["accepted"] == 1


def test_an_append_of_known_rows_only_adds_nothing() -> None:
    workflow = opened(rows(1, 2))

    done = append(workflow, rows(2, 1))

    assert (done.answer["accepted"], done.answer["rejected_count"]) == (0, 2)
    assert len(requests(workflow)) == 2
    assert len(batches(workflow)) == 1


def test_the_ids_of_its_own_earlier_chunks_do_not_hinder_a_resumed_append() -> None:
    workflow = opened(rows(3))
    killed_after_chunks(2, lambda: append(workflow, SENT, key="k"))
    assert len(requests(workflow)) == 1 + 2 * CHUNK - 1

    done = append(workflow, SENT, key="k")

    assert [r["code"] for r in done.answer["rejected"]] == ["invalid_json", "duplicate_request_id"]
    assert done.answer["accepted"] == 11
    assert len(requests(workflow)) == 12


def test_an_append_that_repeats_an_id_in_itself_is_refused_whole() -> None:
    workflow = opened(rows(1))

    error = refused(lambda: append(workflow, rows(2, 3, 2)), BadUpload)

    assert error.code == "duplicate_request_id"
    assert len(requests(workflow)) == 1
    assert Workflow.objects.get().next_position == 1


@pytest.mark.parametrize(
    ("sent", "taken", "line"),
    [
        ([{"query": "a"}, row(1, request_id="row-3")], ["row-3"], 2),
        ([row(1, request_id="row-4"), {"query": "a"}], ["row-4"], 2),
        ([row(1, request_id="row-8"), *rows(2, 3, 4, 5), {"query": "a"}],
         ["row-8", "r2", "r3", "r4", "r5"], 6),
        ([{"query": "a"}, row(1, request_id="row-1")], ["row-3"], 2),
    ],
)  # fmt: skip
def test_an_appended_row_may_not_take_the_name_of_another(
    sent: list[Any], taken: list[str], line: int
) -> None:
    workflow = opened([{"query": "x"}, {"query": "y"}])

    done = append(workflow, sent)

    assert [(r["line"], r["code"]) for r in done.answer["rejected"]] == [
        (line, "duplicate_request_id")
    ]
    assert [r.request_id for r in requests(workflow)] == ["row-1", "row-2", *taken]
    counts_add_up(workflow)


def test_committed_chunks_of_a_killed_append_stay_and_may_be_dispatched() -> None:
    boot()
    workflow = opened()
    killed_after_chunks(1, lambda: append(workflow, SENT, key="k"))

    assert len(requests(workflow)) == CHUNK
    assert queue().run().sent == 2


def test_close_during_an_append_is_in_progress_until_it_is_silent_for_a_minute() -> None:
    workflow = opened(rows(50))
    killed_after_chunks(1, lambda: append(workflow, SENT, key="k"))

    def close() -> Workflow:
        return control.close(workflow_id=workflow.pk)

    assert refused(close, Conflict).code == "upload_in_progress"
    Upload.objects.filter(finished_at=None).update(
        heartbeat_at=database_now() - timedelta(seconds=61)
    )
    assert close().state == WorkflowState.RUNNING
    error = refused(lambda: append(workflow, SENT, key="k"), Conflict)

    assert error.code == "workflow_not_open"
    assert len(requests(workflow)) == 1 + CHUNK


@pytest.mark.parametrize("end", [control.close, control.cancel])
def test_a_workflow_that_is_closed_or_cancelled_takes_no_more_rows(
    end: Callable[..., Workflow],
) -> None:
    workflow = opened(rows(1))
    end(workflow_id=workflow.pk)

    error = refused(lambda: append(workflow, rows(2)), Conflict)

    assert (error.status, error.code) == (409, "workflow_not_open")
    assert Upload.objects.count() == 1
    assert len(requests(workflow)) == 1


def test_a_finished_append_is_answered_again_after_the_close() -> None:
    workflow = opened()
    first = append(workflow, rows(1), key="k")
    control.close(workflow_id=workflow.pk)

    again = append(workflow, rows(1), key="k")

    assert again.replayed
    assert again.answer == first.answer


def test_a_cancel_between_chunks_stops_an_append() -> None:
    workflow = opened()
    killed_after_chunks(1, lambda: append(workflow, SENT, key="k"))
    control.cancel(workflow_id=workflow.pk)

    error = refused(lambda: append(workflow, SENT, key="k"), Conflict)

    assert error.code == "workflow_not_open"
    assert [r.state for r in requests(workflow)] == [RequestState.CANCELLED] * CHUNK


@pytest.mark.parametrize("closed", [True, False])
def test_a_paused_workflow_takes_rows_unless_it_is_closed(closed: bool) -> None:
    workflow = opened()
    Workflow.objects.update(
        state=WorkflowState.PAUSED, closed_at=database_now() if closed else None
    )

    if closed:
        assert refused(lambda: append(workflow, rows(1)), Conflict).code == "workflow_not_open"
    else:
        assert append(workflow, rows(1)).answer["accepted"] == 1


def test_a_workflow_closed_and_paused_between_chunks_takes_no_more() -> None:
    workflow = opened()
    killed_after_chunks(1, lambda: append(workflow, SENT, key="k"))
    Workflow.objects.update(state=WorkflowState.PAUSED, closed_at=database_now())

    error = refused(lambda: append(workflow, SENT, key="k"), Conflict)

    assert error.code == "workflow_not_open"
    assert len(requests(workflow)) == CHUNK


def test_a_workflow_that_is_not_closed_stays_open_and_is_dispatched() -> None:
    boot()
    workflow = opened(rows(1, 2, 3, 4))

    assert (workflow.state, workflow.closed_at) == (WorkflowState.OPEN, None)
    assert queue().run().sent == 2
    completion.check(workflow.pk)
    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.OPEN


def test_an_open_workflow_of_hits_only_waits_for_its_close() -> None:
    rate(row(1))
    workflow = opened(rows(1))
    completion.run_once(database_now())
    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.OPEN

    assert control.close(workflow_id=workflow.pk).state == WorkflowState.COMPLETED


# Progress


def test_progress_counts_each_chunk_once() -> None:
    rate(row(1), score=2.0)

    done = submit(SENT)

    assert WorkflowStats.objects.get().received == 0
    assert StatsDelta.objects.count() == 3
    found = counts_add_up(done.workflow)
    assert (found["received"], found["completed"], found["from_archive"]) == (12, 2, 2)


def test_an_answer_is_json_without_surprises() -> None:
    done = submit(['{"query_text":"\\ud800"}', '{"query_text":"q","request_id":1e400}'])

    assert orjson.loads(orjson.dumps(done.answer)) == done.answer
    assert Upload.objects.get().answer == done.answer
