"""Writing what became of items: every kind of value arrives, in all rows, with its progress."""

import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.db.backends.utils import CursorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

from fulfillment import outcomes, scores
from fulfillment.clock import database_now
from fulfillment.models import FailedFlight, Rating, RatingRequest, StatsDelta
from fulfillment.outcomes import Outcome
from fulfillment.policy.lifecycle import RequestState, Source
from fulfillment.scores import Scored, ScoredBatch
from tests import builders
from tests.rating_queue import key, requests, submit

pytestmark = pytest.mark.django_db


@pytest.fixture
def cursor() -> Iterator[CursorWrapper]:
    with connection.cursor() as cursor:
        yield cursor


def completed(workflow_id: int, *positions: int, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "state": RequestState.COMPLETED,
        "source": Source.MODEL,
        "score": 1.5,
        "rating_id": 7,
        "rated_at": database_now(),
        **changes,
    }
    return Outcome(workflow_id=workflow_id, positions=positions, **fields)


def scored_batch(
    workflow_id: int, scores_of: Sequence[Scored], *, rows: bool = True, reusable: bool = True
) -> ScoredBatch:
    return ScoredBatch(
        batch_id=1,
        workflow_id=workflow_id,
        rater_version_id=3,
        reusable=reusable,
        fingerprints=[key(f"n{n}") for n in range(len(scores_of))],
        items=[(n, s, [n] if rows else (), 1) for n, s in enumerate(scores_of)],
    )


def test_positions_are_grouped_by_item() -> None:
    assert outcomes.positions_by_item([5, 9, 6, 7], [0, 0, 2, 1]) == {0: [5, 9], 2: [6], 1: [7]}


def test_no_outcomes_write_nothing(cursor: CursorWrapper) -> None:
    scores.write(cursor, [], now=database_now(), progress={})
    assert outcomes.end_requests(cursor, []) == {}
    outcomes.add_progress(cursor, {})
    outcomes.remember_failures(cursor, {}, failed_at=database_now())

    assert not StatsDelta.objects.exists()
    assert not FailedFlight.objects.exists()


def test_outcomes_of_several_workflows_reach_their_own_rows(cursor: CursorWrapper) -> None:
    one, two = submit(["a", "b", "c"]), submit(["a", "b", "c"])

    progress = outcomes.end_requests(
        cursor,
        [
            completed(one.pk, 2, 0),
            Outcome(
                workflow_id=two.pk, positions=[1], state=RequestState.FAILED, error="x", attempts=3
            ),
            Outcome(workflow_id=two.pk, positions=[0], state=RequestState.CANCELLED, error="y"),
        ],
    )

    assert [r.state for r in requests(one)] == [
        RequestState.COMPLETED, RequestState.PENDING, RequestState.COMPLETED,
    ]  # fmt: skip
    assert [r.source for r in requests(one)] == [Source.COALESCED, None, Source.MODEL]
    assert [(r.error, r.attempts) for r in requests(two)] == [("y", 0), ("x", 3), (None, 0)]
    assert {w: dict(p) for w, p in progress.items()} == {
        one.pk: {"completed": 2, "from_model": 1, "coalesced": 1, "score_sum": 3.0},
        two.pk: {"failed": 1, "cancelled": 1},
    }


def test_copies_of_an_archive_entry_keep_its_source_in_all_rows(cursor: CursorWrapper) -> None:
    workflow = submit(["a", "a"])

    outcomes.end_requests(cursor, [completed(workflow.pk, 0, 1, source=Source.ARCHIVE)])

    assert {r.source for r in requests(workflow)} == {Source.ARCHIVE}


def test_a_score_is_never_written_without_completion(cursor: CursorWrapper) -> None:
    workflow = submit(["a"])

    with pytest.raises(IntegrityError):
        outcomes.end_requests(cursor, [completed(workflow.pk, 0, state=RequestState.FAILED)])


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25)
@given(
    values=st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False),
            st.none() | texts,
            st.none() | _json,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_written_is_what_was_said(values: list[tuple[float, str | None, Any]]) -> None:
    import json

    workflow = submit([f"n{number}" for number in range(len(values))])
    documents = [None if output is None else json.dumps(output) for _, _, output in values]

    now = database_now()
    progress = outcomes.no_progress()
    with connection.cursor() as cursor:
        scores.write(
            cursor,
            [
                scored_batch(
                    workflow.pk,
                    [
                        Scored(score=score, label=label, output=document, age_s=2.5)
                        for (score, label, _), document in zip(values, documents, strict=True)
                    ],
                )
            ],
            now=now,
            progress=progress,
        )

    found = requests(workflow)
    assert [(r.score, r.label, r.output) for r in found] == values
    ratings = Rating.objects.in_bulk([r.rating_id for r in found])
    assert [
        (ratings[r.rating_id].score, ratings[r.rating_id].label, ratings[r.rating_id].output)
        for r in found
        if r.rating_id is not None
    ] == values
    produced_at = now - timedelta(seconds=2.5)
    assert {r.rated_at for r in found} == {produced_at}
    assert {rating.produced_at for rating in ratings.values()} == {produced_at}
    assert progress[workflow.pk]["from_model"] == progress[workflow.pk]["completed"] == len(values)


def test_many_attempts_fit_their_column(cursor: CursorWrapper) -> None:
    workflow = submit(["a"])

    outcomes.end_requests(cursor, [completed(workflow.pk, 0, attempts=70_000)])

    assert requests(workflow)[0].attempts == 32_767


def test_ratings_of_equal_fingerprints_all_stay(cursor: CursorWrapper) -> None:
    workflow = submit(["n0"])
    digest = uuid.uuid4()
    writes = [
        scored_batch(workflow.pk, [Scored(score=1.0, url_digest=digest.hex)]),
        scored_batch(workflow.pk, [Scored(score=2.0)], rows=False, reusable=False),
    ]

    for batch in writes:
        scores.write(cursor, [batch], now=database_now(), progress=outcomes.no_progress())

    found = Rating.objects.order_by("id")
    assert [(r.score, r.reusable, r.url_digest) for r in found] == [
        (1.0, True, digest),
        (2.0, False, None),
    ]
    assert [(r.score, r.rating_id) for r in requests(workflow)] == [(1.0, found[0].pk)]


def test_rows_of_an_item_share_its_score_and_only_the_first_was_computed(
    cursor: CursorWrapper,
) -> None:
    workflow = submit(["n0", "n0", "other", "n0"])
    batch = scored_batch(workflow.pk, [Scored(score=2.0, warnings=("cut", "long"))])
    progress = outcomes.no_progress()

    scores.write(
        cursor,
        [batch._replace(items=[(0, batch.items[0][1], [0, 1, 3], 70_000)])],
        now=database_now(),
        progress=progress,
    )

    found = requests(workflow)
    assert [r.source for r in found] == [
        Source.MODEL, Source.COALESCED, None, Source.COALESCED,
    ]  # fmt: skip
    assert [r.warnings for r in found] == [["cut", "long"], ["cut", "long"], None, ["cut", "long"]]
    assert found[0].attempts == 32_767
    assert dict(progress[workflow.pk]) == {
        "completed": 3, "from_model": 1, "coalesced": 2, "score_sum": 6.0,
    }  # fmt: skip


def test_progress_becomes_one_delta_a_workflow(cursor: CursorWrapper) -> None:
    one, two = submit(["a"]), submit(["a"])

    outcomes.add_progress(
        cursor,
        {one.pk: {"completed": 2, "score_sum": 0.25}, two.pk: {"accelerator_seconds": 1.5}},
    )

    deltas = {delta.workflow_id: delta for delta in StatsDelta.objects.all()}
    assert (deltas[one.pk].completed, deltas[one.pk].score_sum) == (2, 0.25)
    assert (deltas[two.pk].completed, deltas[two.pk].accelerator_seconds) == (0, 1.5)


def test_a_later_failure_replaces_an_earlier_one(cursor: CursorWrapper) -> None:
    now = database_now()
    outcomes.remember_failures(cursor, {key("b"): "x", key("a"): "x"}, failed_at=now)
    later = now + timedelta(seconds=5)

    outcomes.remember_failures(cursor, {key("a"): "y"}, failed_at=later)

    assert {f.fingerprint.hex: (f.code, f.failed_at) for f in FailedFlight.objects.all()} == {
        key("a"): ("y", later),
        key("b"): ("x", now),
    }


def test_a_request_that_does_not_exist_is_no_error(cursor: CursorWrapper) -> None:
    workflow = builders.workflow()

    outcomes.end_requests(cursor, [completed(workflow.pk, 5)])

    assert not RatingRequest.objects.exists()
