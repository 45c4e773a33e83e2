"""The archive: which rating is taken, which are erased, and that finished workflows do not care."""

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from pytest_django import Settings

from fulfillment import archive, expiry, intake, leases, purging, raters
from fulfillment.clock import database_now
from fulfillment.models import Rater, RaterVersion, Rating, Workflow
from fulfillment.policy.freshness import BUFFER, fresh_after
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.purging import Criteria
from tests import builders
from tests.builders import DIRECTORY, MODEL, NOW, RATER, Api, ndjson, row
from tests.rating_queue import Replica, boot, check_all, counts_add_up, queue, rated, take

pytestmark = pytest.mark.django_db

A, B = UUID(int=1), UUID(int=2)
DAY = timedelta(days=1)
MICROSECOND = timedelta(microseconds=1)


def rating(of: UUID = A, *, at: datetime = NOW, **fields: Any) -> Rating:
    version = fields.pop("version", None) or RaterVersion.objects.first() or builders.version()
    return Rating.objects.create(
        **{
            "fingerprint": of,
            "rater_version": version,
            "workflow_id": 0,
            "score": 1.0,
            "produced_at": at,
            **fields,
        }
    )


def looked_up(
    *fingerprints: UUID, after: datetime = NOW - DAY, now: datetime | None = None
) -> dict[str, archive.Entry]:
    with connection.cursor() as cursor:
        return archive.look_up(cursor, [f.hex for f in fingerprints], produced_after=after, now=now)


def kept() -> list[int]:
    return list(Rating.objects.order_by("id").values_list("id", flat=True))


# What is taken


def test_an_entry_is_the_rating_as_it_was_stored() -> None:
    stored = rating(
        score=-0.25,
        label="Fully meets",
        output={"why": "wörk", "n": [1, 2.5]},
        at=NOW - timedelta(microseconds=123_457),
    )

    found = looked_up(A)

    assert found == {
        A.hex: archive.Entry(
            rating_id=stored.pk,
            workflow_id=0,
            score=-0.25,
            label="Fully meets",
            output='{"n": [1, 2.5], "why": "wörk"}',
            produced_at=stored.produced_at,
        )
    }


def test_only_what_is_asked_for_is_found() -> None:
    for fingerprint in (A, B):
        rating(fingerprint)

    assert set(looked_up(A, UUID(int=3))) == {A.hex}
    assert set(looked_up(A, B)) == {A.hex, B.hex}
    assert looked_up() == {}


@pytest.mark.parametrize(
    ("age", "fresh"),
    [
        (timedelta(0), True),
        (timedelta(seconds=100) - MICROSECOND, True),
        (timedelta(seconds=100), False),
        (timedelta(seconds=101), False),
        (-timedelta(minutes=5), True),
        (-timedelta(minutes=5) - MICROSECOND, False),
        (-timedelta(days=400), False),
    ],
)
def test_a_rating_is_fresh_while_its_age_is_below_the_freshness(
    age: timedelta, fresh: bool
) -> None:
    rating(at=NOW - age)
    after = fresh_after(now=NOW, freshness_s=100, max_age_s=None, accepted_at=NOW, bypass=False)

    assert bool(looked_up(A, after=after, now=NOW)) == fresh


@pytest.mark.parametrize(
    ("max_age_s", "bypass", "expected"),
    [
        (None, False, NOW - timedelta(seconds=100)),
        (60, False, NOW - timedelta(seconds=60)),
        (1_000, False, NOW - timedelta(seconds=100)),
        (0, False, NOW),
        (None, True, NOW - timedelta(seconds=10)),
        (5, True, NOW - timedelta(seconds=5)),
    ],
)
def test_what_is_taken_must_be_younger_than_all_limits(
    max_age_s: int | None, bypass: bool, expected: datetime
) -> None:
    after = fresh_after(
        now=NOW,
        freshness_s=100,
        max_age_s=max_age_s,
        accepted_at=NOW - timedelta(seconds=10),
        bypass=bypass,
    )

    assert after == expected


def test_the_newest_rating_wins_and_of_two_at_once_the_last() -> None:
    for score, minutes in enumerate([5, 1, 3, 1, 9]):
        rating(at=NOW - timedelta(minutes=minutes), score=score)

    assert looked_up(A)[A.hex].score == 3


def test_one_that_may_not_be_reused_does_not_hide_an_older_one() -> None:
    rating(at=NOW, score=1, reusable=False)
    assert looked_up(A) == {}
    rating(at=NOW - timedelta(hours=1), score=2)

    assert looked_up(A)[A.hex].score == 2


def test_a_rating_of_the_far_future_does_not_hide_a_fresh_one() -> None:
    rating(at=NOW + DAY, score=1)
    rating(at=NOW, score=2)

    assert looked_up(A, now=NOW)[A.hex].score == 2


def test_looking_up_a_chunk_reads_the_index_and_not_the_archive() -> None:
    version = builders.version()
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO fulfillment_rating (fingerprint, rater_version_id, workflow_id, score,
                                            produced_at, reusable)
            SELECT md5(n::text)::uuid, %s, 0, 1, %s, true FROM generate_series(1, 20000) n
            """,
            [version.pk, NOW],
        )
        cursor.execute("ANALYZE fulfillment_rating")
        plans: list[str] = []

        def explain(execute: Any, sql: str, params: Any, *rest: Any) -> Any:
            execute("EXPLAIN " + sql, params, *rest)
            plans.extend(line for (line,) in cursor.fetchall())
            return execute(sql, params, *rest)

        with connection.execute_wrapper(explain):
            archive.look_up(cursor, [uuid.uuid4().hex for _ in range(500)], produced_after=NOW)

    assert any("rating_fingerprint" in line for line in plans), plans
    assert not any("Seq Scan" in line for line in plans), plans


# I13: what a finished workflow answers never changes


@pytest.fixture
def _rater(settings: Settings, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(
        Rater(id=RATER, autorater="stub", model_id=MODEL, batch_size=3), now=database_now()
    )


ROWS = [row(n) for n in range(7)]


def submit(rows: Sequence[Any], **form: Any) -> Workflow:
    return intake.submit(
        form=intake.WorkflowForm(rater=RATER, **form),
        body=intake.Body(chunks=[ndjson(rows)]),
        owner="alice",
        idempotency_key=None,
        close=True,
    ).workflow


def rated_with(score: float, rows: Sequence[Any], **form: Any) -> Workflow:
    """Submit rows and let a model give them all this score."""
    workflow = submit(rows, **form)
    executor = boot()
    dispatcher = queue(Replica(version=workflow.rater_version.spec["model_version"]))
    for _ in range(5):
        dispatcher.wake_and_run()
        for message in dispatcher.take_sent():
            leases.finish([rated(t, score=score) for t in take(message, by=executor)])
    check_all()
    workflow.refresh_from_db()
    assert workflow.state == WorkflowState.COMPLETED, WorkflowState(workflow.state).name
    return workflow


def everything_said(of: Workflow) -> list[bytes]:
    api = Api("alice")
    path = f"/workflows/{of.public_id}"
    return [
        api.get(f"{path}/ratings").getvalue(),
        api.get(f"{path}/ratings?format=csv").getvalue(),
        api.get(f"{path}/ratings?state=COMPLETED&limit=2").getvalue(),
        api.get(path).content,
    ]


def scores(of: Workflow) -> set[float]:
    answer = Api("alice").get(f"/workflows/{of.public_id}/ratings")
    return {record["score"] for record in builders.records(answer)}


def purged(**criteria: Any) -> None:
    now = database_now()
    purge = purging.begin(Criteria(**criteria), dry_run=False, actor="op", now=now)
    assert purging.advance(purge.pk, now=now, most_steps=10).ratings == 7


def purged_by_rater() -> None:
    purged(rater=RATER)


def purged_by_version() -> None:
    purged(rater=RATER, version=1)


def purged_by_time() -> None:
    purged(before=database_now())


def expired() -> None:
    expiry.retain(now=database_now() + timedelta(days=90) + BUFFER + DAY)
    assert not Rating.objects.exists()


def a_new_version() -> None:
    DIRECTORY.models[MODEL].version = "v2"
    assert scores(rated_with(3.5, ROWS)) == {3.5}


def bypassed_with_other_scores() -> None:
    assert scores(rated_with(0.5, ROWS, bypass=True)) == {0.5}
    assert scores(submit(ROWS)) == {0.5}


def not_stored_with_other_scores() -> None:
    assert scores(rated_with(0.5, ROWS, bypass=True, no_store=True)) == {0.5}
    assert scores(submit(ROWS)) == {2.5}


def a_changed_scale() -> None:
    raters.change(rater_id=RATER, changes={"score_max": 9.0, "freshness_s": 1}, now=database_now())


def a_new_rating_beside_it() -> None:
    for old in Rating.objects.all():
        rating(old.fingerprint, version=old.rater_version, at=database_now(), score=4.0)
    assert scores(submit(ROWS)) == {4.0}


CHANGES = [
    purged_by_rater,
    purged_by_version,
    purged_by_time,
    expired,
    a_new_version,
    bypassed_with_other_scores,
    not_stored_with_other_scores,
    a_changed_scale,
    a_new_rating_beside_it,
]


@pytest.mark.usefixtures("_rater")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("source", ["model", "archive"])
def test_what_a_finished_workflow_answers_stays_byte_by_byte(
    source: str, change: Callable[[], None]
) -> None:
    finished = rated_with(2.5, [*ROWS, {**ROWS[0], "request_id": "an equal one"}])
    if source == "archive":
        finished = submit(ROWS)
        assert finished.state == WorkflowState.COMPLETED
    before = everything_said(finished)
    assert before[0].count(b'"score":2.5') == (8 if source == "model" else 7)

    change()

    assert everything_said(finished) == before
    counts_add_up(finished)


@pytest.mark.usefixtures("_rater")
def test_a_workflow_that_may_not_store_leaves_nothing_to_reuse() -> None:
    rated_with(2.5, ROWS, no_store=True)

    assert {r.reusable for r in Rating.objects.all()} == {False}
    assert submit(ROWS).state == WorkflowState.RUNNING
