"""A purge by url: what it blanks, what it ends, and what it leaves as it is (I13)."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from pytest_django import Settings

from fulfillment import documents, intake, leases, purging, raters
from fulfillment.clock import database_now
from fulfillment.leases import Finish
from fulfillment.models import (
    Batch,
    BatchPayload,
    Flight,
    Purge,
    Rater,
    Rating,
    RatingRequest,
    ShadowSample,
    Workflow,
)
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from fulfillment.purging import Criteria
from fulfillment.scores import Scored
from tests import builders
from tests.builders import MODEL, PLUGINS, RATER, Api, Plugin, ndjson, row
from tests.rating_queue import (
    Message,
    Queue,
    boot,
    check_all,
    counts_add_up,
    queue,
    rate_all,
    rows_are_sound,
    sent_items,
    states,
    take,
    threads,
)

pytestmark = pytest.mark.django_db

URL = "https://shop.example/1"


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    settings.AIRS_SHADOW_REFRESH = 0.0
    builders.use_plugins(settings)
    raters.register(
        Rater(id=RATER, autorater="stub", model_id=MODEL, batch_size=3), now=database_now()
    )


def submit(rows: Sequence[Any], **form: Any) -> Workflow:
    return intake.submit(
        form=intake.WorkflowForm(**{"rater": RATER, **form}),
        body=intake.Body(chunks=[ndjson(rows)]),
        owner="alice",
        idempotency_key=None,
        close=True,
    ).workflow


def told(taken: leases.Taken) -> Finish:
    return Finish(
        taken=taken,
        scored={
            i: Scored(
                score=2.5, label="Meets", output='{"raw": "text"}', url_digest=_digest(taken, i)
            )
            for i in sent_items(taken)
        },
        calls=1,
    )


def _digest(taken: leases.Taken, item: int) -> str | None:
    digest: str | None = documents.unpack(taken.payload)[item][1]
    return digest


def rate(rows: Sequence[Any], **form: Any) -> Workflow:
    workflow = submit(rows, **form)
    run(queue())
    check_all()
    workflow.refresh_from_db()
    return workflow


def run(running: Queue) -> None:
    executor = boot()
    for _ in range(10):
        running.wake_and_run()
        for message in running.take_sent():
            leases.finish([told(t) for t in take(message, by=executor)])


def purge(*, dry_run: bool = False, **criteria: Any) -> Purge:
    now = database_now()
    begun = purging.begin(Criteria(url=URL, **criteria), dry_run=dry_run, actor="op", now=now)
    done = purging.advance(begun.pk, now=now, most_steps=100)
    assert done.finished_at is not None
    return done


def counts(of: Purge) -> dict[str, int]:
    return {name: getattr(of, name) for name in ("ratings", "requests", "failed", "payloads")}


def everything_stored() -> str:
    """Return all text that the tables hold."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT string_agg(r::text, '') FROM fulfillment_ratingrequest r"
            " UNION ALL SELECT string_agg(r::text, '') FROM fulfillment_rating r"
        )
        rows = "".join(part or "" for (part,) in cursor.fetchall())
    payloads = [documents.unpack(bytes(p.data)) for p in BatchPayload.objects.all()]
    samples = [documents.unpack(bytes(s.data)) for s in ShadowSample.objects.all()]
    return rows + str(payloads) + str(samples)


def records(of: Workflow) -> list[dict[str, Any]]:
    return builders.records(Api("alice").get(f"/workflows/{of.public_id}/ratings"))


ROWS = [{**row(n), "note": f"private {n}"} for n in (1, 2, 3, 4)]


def test_it_blanks_what_a_finished_workflow_kept_and_leaves_what_it_answered() -> None:
    finished, hit = rate(ROWS), submit(ROWS)
    before = records(finished)

    counted = purge(dry_run=True)
    assert records(finished) == before
    assert Rating.objects.count() == 4
    done = purge()

    assert counts(done) == counts(counted) == {
        "ratings": 1, "requests": 2, "failed": 0, "payloads": 1,
    }  # fmt: skip
    for workflow in (finished, hit):
        blanked, *others = records(workflow)
        assert (blanked["output"], blanked["extra"]) == (None, None)
        assert [blanked[name] for name in ("state", "score", "label")] == [
            "COMPLETED",
            2.5,
            "Meets",
        ]
        assert all(record["output"] and record["extra"] for record in others)
        counts_add_up(workflow)
    assert records(finished)[1:] == before[1:]
    stored = everything_stored()
    assert "page 1" not in stored
    assert "private 1" not in stored
    assert "page 2" in stored
    assert states(submit(ROWS[:1])) == ["PENDING"]


def test_open_items_end_as_failed_and_their_neighbours_are_rated() -> None:
    workflow = submit(ROWS)

    done = purge()

    assert counts(done) == {"ratings": 0, "requests": 1, "failed": 1, "payloads": 1}
    assert states(workflow) == ["FAILED", "PENDING", "PENDING", "PENDING"]
    rows_are_sound()
    run(queue())
    check_all()
    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.PARTIAL
    assert [record["error"] for record in records(workflow)] == ["purged", None, None, None]
    counts_add_up(workflow)


def test_a_workflow_whose_last_open_item_it_was_ends() -> None:
    workflow = submit(ROWS[:1])

    purge()

    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.FAILED


def test_what_an_executor_holds_is_taken_back_and_its_answer_thrown_away() -> None:
    workflow = submit(ROWS)
    dispatcher, executor = queue(), boot()
    dispatcher.run()
    held = [t for message in dispatcher.take_sent() for t in take(message, by=executor)]

    purge()
    assert set(Batch.objects.values_list("fence", flat=True)) == {held[0].fence, held[0].fence + 1}
    leases.finish([told(t) for t in held])

    assert "page 1" not in everything_stored()
    assert Rating.objects.count() == 1  # of the batch that had nothing of the url
    assert not Flight.objects.exists()
    rows_are_sound()
    run(dispatcher)
    assert states(workflow) == ["FAILED", "COMPLETED", "COMPLETED", "COMPLETED"]
    counts_add_up(workflow)


def test_what_is_computed_for_a_workflow_that_has_ended_is_taken_back_too() -> None:
    workflow = submit(ROWS[:3])
    dispatcher, executor = queue(), boot()
    dispatcher.run()
    held = [t for message in dispatcher.take_sent() for t in take(message, by=executor)]
    Api("alice").post(f"/workflows/{workflow.public_id}/cancel")

    purge()
    leases.finish([told(t) for t in held])

    assert not Rating.objects.exists()
    assert [batch.state for batch in Batch.objects.all()] == [BatchState.DONE]
    assert states(workflow) == ["CANCELLED"] * 3


def test_a_rating_that_came_before_the_walk_reached_its_request_goes_too() -> None:
    workflow = submit(ROWS[:3])
    dispatcher, executor = queue(), boot()
    dispatcher.run()
    held = [t for message in dispatcher.take_sent() for t in take(message, by=executor)]
    Api("alice").post(f"/workflows/{workflow.public_id}/cancel")
    begun = purging.begin(Criteria(url=URL), dry_run=False, actor="op", now=database_now())
    purging.advance(begun.pk, now=database_now(), most_steps=1)
    leases.finish([told(t) for t in held])
    assert Rating.objects.count() == 3

    purging.advance(begun.pk, now=database_now(), most_steps=10)

    assert Rating.objects.count() == 2
    assert states(workflow) == ["CANCELLED"] * 3


def test_an_item_goes_with_all_rows_that_share_its_text() -> None:
    PLUGINS["stub"] = Plugin(name="stub", key_fields=("query_text", "text"))
    one = {"query_text": "q", "text": "the page"}
    workflow = rate([{**one, "url": "https://else.example"}, {**one, "url": URL}])
    waiting = submit([{**one, "url": "https://else.example"}, {**one, "url": URL}], bypass=True)

    done = purge()

    assert counts(done) == {"ratings": 1, "requests": 2, "failed": 2, "payloads": 2}
    assert [record["output"] for record in records(workflow)] == [None, None]
    assert states(waiting) == ["FAILED", "FAILED"]
    assert "the page" not in everything_stored()


def test_other_criteria_narrow_it() -> None:
    workflow = rate(ROWS)

    assert counts(purge(before=workflow.created_at)) == {
        "ratings": 0, "requests": 0, "failed": 0, "payloads": 0,
    }  # fmt: skip
    assert counts(purge(rater=RATER, version=1))["requests"] == 1


def test_samples_of_shadow_refresh_go_too(settings: Settings) -> None:
    rate(ROWS)
    settings.AIRS_SHADOW_REFRESH = 1.0
    submit(ROWS)
    assert ShadowSample.objects.count() == 4

    purge()

    assert ShadowSample.objects.count() == 3


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_killed_half_way_it_is_done_by_whoever_goes_on(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "CHUNK", chunk)
    workflows = [rate(ROWS), submit([*ROWS, row(1, request_id="twin")], bypass=True)]
    begun = purging.begin(Criteria(url=URL), dry_run=False, actor="op", now=database_now())
    steps = 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(Purge, "save", _dies)
            with pytest.raises(KeyboardInterrupt):
                purging.advance(begun.pk, now=database_now(), most_steps=1)
        steps += 1
        if purging.advance(begun.pk, now=database_now(), most_steps=1).finished_at:
            break

    begun.refresh_from_db()
    assert counts(begun) == {"ratings": 1, "requests": 3, "failed": 2, "payloads": 2}
    assert steps >= 3
    assert "page 1" not in everything_stored()
    for workflow in workflows:
        counts_add_up(workflow)
    rows_are_sound()


def _dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_second_purge_finds_its_traces_and_changes_nothing() -> None:
    rate(ROWS)
    purge()
    before = everything_stored()

    again = purge()

    assert counts(again) == {"ratings": 0, "requests": 1, "failed": 0, "payloads": 0}
    assert everything_stored() == before


def test_the_order_does_not_keep_the_url() -> None:
    purge()

    with connection.cursor() as cursor:
        cursor.execute("SELECT string_agg(p::text, '') FROM fulfillment_purge p")
        (text,) = cursor.fetchone()
    assert URL not in text


def test_a_dispatcher_goes_on_beside_it() -> None:
    workflow = submit(ROWS)
    purge()

    assert rate_all(queue(), boot()) == 3
    assert RatingRequest.objects.filter(workflow=workflow, error="purged").count() == 1


@pytest.mark.django_db(transaction=True)
def test_executors_and_a_purge_at_the_same_time() -> None:
    rows = [row(n, url=URL, text="the page") if n % 3 else row(n) for n in range(60)]
    workflows = [submit(rows), submit(rows, bypass=True), submit(rows)]
    dispatcher, executors = queue(), [boot() for _ in range(3)]

    def work(messages: Sequence[Message], executor: UUID) -> None:
        for message in messages:
            leases.finish([told(t) for t in take(message, by=executor)])

    with threads(4) as pool:
        dispatcher.wake_and_run()
        sent = dispatcher.take_sent()
        working = [pool.submit(work, sent[i::3], executor) for i, executor in enumerate(executors)]
        purging_ = pool.submit(purge)
        for _ in range(20):
            dispatcher.wake_and_run()
            work(dispatcher.take_sent(), executors[0])
        for future in working:
            future.result(20)
        purging_.result(20)
    run(dispatcher)
    check_all()

    assert "the page" not in everything_stored()
    assert not Flight.objects.exists()
    rows_are_sound()
    for workflow in workflows:
        counts_add_up(workflow)
        workflow.refresh_from_db()
        assert workflow.finished_at is not None
        by_state = Counter(states(workflow))
        assert by_state["COMPLETED"] + by_state["FAILED"] == 60
        assert by_state["COMPLETED"] >= 20
