"""Writing what became of items: every kind of value arrives, in all rows, with its progress."""

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.db.backends.utils import CursorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

from fulfillment import outcomes
from fulfillment.clock import database_now
from fulfillment.models import FailedFlight, Rating, RatingRequest, StatsDelta
from fulfillment.outcomes import NewRating, Outcome
from fulfillment.policy.lifecycle import RequestState, Source
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


def new_rating(name: str, **changes: Any) -> NewRating:
    fields: dict[str, Any] = {
        "rater_version_id": 3,
        "workflow_id": 4,
        "score": 1.0,
        "label": None,
        "output": None,
        "url_digest": None,
        "produced_at": database_now(),
        "reusable": True,
        **changes,
    }
    return NewRating(fingerprint=key(name), **fields)


def test_positions_are_grouped_by_item() -> None:
    assert outcomes.positions_by_item([5, 9, 6, 7], [0, 0, 2, 1]) == {0: [5, 9], 2: [6], 1: [7]}


def test_no_outcomes_write_nothing(cursor: CursorWrapper) -> None:
    assert outcomes.add_ratings(cursor, []) == {}
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

    with connection.cursor() as cursor:
        ids = outcomes.add_ratings(
            cursor,
            [
                new_rating(f"n{n}", score=score, label=label, output=document)
                for n, ((score, label, _), document) in enumerate(
                    zip(values, documents, strict=True)
                )
            ],
        )
        outcomes.end_requests(
            cursor,
            [
                completed(
                    workflow.pk, n, score=score, label=label, output=document,
                    rating_id=ids[key(f"n{n}")],
                )
                for n, ((score, label, _), document) in enumerate(
                    zip(values, documents, strict=True)
                )
            ],
        )  # fmt: skip

    found = requests(workflow)
    assert [(r.score, r.label, r.output) for r in found] == values
    ratings = Rating.objects.in_bulk([r.rating_id for r in found])
    assert [
        (ratings[r.rating_id].score, ratings[r.rating_id].label, ratings[r.rating_id].output)
        for r in found
        if r.rating_id is not None
    ] == values


def test_many_attempts_fit_their_column(cursor: CursorWrapper) -> None:
    workflow = submit(["a"])

    outcomes.end_requests(cursor, [completed(workflow.pk, 0, attempts=70_000)])

    assert requests(workflow)[0].attempts == 32_767


def test_ratings_of_equal_fingerprints_all_stay(cursor: CursorWrapper) -> None:
    first = outcomes.add_ratings(cursor, [new_rating("a", url_digest=uuid.uuid4().hex)])
    second = outcomes.add_ratings(cursor, [new_rating("a", score=2.0, reusable=False)])

    assert first.keys() == second.keys() == {key("a")}
    assert list(Rating.objects.order_by("id").values_list("id", "score", "reusable")) == [
        (first[key("a")], 1.0, True),
        (second[key("a")], 2.0, False),
    ]


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
