"""What is erased of the archive: by time, a stretch at a time, and by an operator's order."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from fulfillment import expiry, purging, raters
from fulfillment.errors import InvalidFields
from fulfillment.models import Purge, PurgeStage, Rater, RaterVersion, Rating
from fulfillment.policy.freshness import BUFFER
from fulfillment.purging import Criteria
from tests import builders
from tests.builders import NOW

pytestmark = pytest.mark.django_db

A = UUID(int=1)
DAY = timedelta(days=1)
MICROSECOND = timedelta(microseconds=1)
HOUR_DUE = NOW - timedelta(hours=1) - BUFFER
DAY_DUE = NOW - DAY - BUFFER


def rating(of: RaterVersion, *, at: datetime = NOW, **fields: Any) -> Rating:
    return Rating.objects.create(
        **{
            "fingerprint": A,
            "rater_version": of,
            "workflow_id": 0,
            "score": 1.0,
            "produced_at": at,
            **fields,
        }
    )


def kept() -> list[int]:
    return list(Rating.objects.order_by("id").values_list("id", flat=True))


@pytest.fixture
def versions() -> list[RaterVersion]:
    """Two versions of one rater (an hour fresh) and one of another (a day)."""
    one, other = builders.rater("one"), builders.rater("other")
    Rater.objects.filter(pk="one").update(freshness_s=3_600)
    Rater.objects.filter(pk="other").update(freshness_s=86_400)
    return [
        builders.version(one),
        builders.version(one, number=2, model_version="v2"),
        builders.version(other),
    ]


# By time


@pytest.mark.parametrize("chunk", [2, 100])
def test_ratings_are_erased_after_their_raters_freshness_and_the_buffer(
    chunk: int, versions: list[RaterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "CHUNK", chunk)
    due = [rating(versions[2], at=DAY_DUE - MICROSECOND)]
    stays = [rating(versions[2], at=DAY_DUE), rating(versions[0], at=HOUR_DUE)]
    due += [rating(v, at=HOUR_DUE - MICROSECOND, reusable=False) for v in versions[:2]]
    stays += [rating(versions[2], at=HOUR_DUE - MICROSECOND)]
    stays += [rating(versions[1], at=NOW) for _ in range(5)]

    assert expiry.retain(now=NOW) == len(due)
    assert kept() == [r.pk for r in stays]
    assert expiry.retain(now=NOW) == 0


def looked_at(monkeypatch: pytest.MonkeyPatch, now: datetime) -> int:
    """Return the chunks of two ratings that a run reads."""
    monkeypatch.setattr(expiry, "CHUNK", 2)
    statements = 0

    def count(execute: Any, sql: str, *rest: Any) -> Any:
        nonlocal statements
        statements += "FROM fulfillment_rating\n" in sql
        return execute(sql, *rest)

    with connection.execute_wrapper(count):
        expiry.retain(now=now)
    return statements


def test_a_run_reads_what_has_become_due_and_not_what_lives_longer(
    versions: list[RaterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    for age in range(100, 0, -1):
        rating(versions[0], at=NOW - BUFFER - age * timedelta(minutes=10))
        rating(versions[2], at=NOW - BUFFER - age * timedelta(minutes=10))

    first = looked_at(monkeypatch, NOW)
    again = looked_at(monkeypatch, NOW)
    an_hour_later = looked_at(monkeypatch, NOW + timedelta(hours=1))

    assert first > 90  # all that is due of the hour-fresh rater, and one look for the other
    assert again <= 3
    assert an_hour_later <= 6 + 3
    assert not Rating.objects.filter(rater_version=versions[0]).exists()
    assert Rating.objects.filter(rater_version=versions[2]).count() == 100


def test_a_rating_stored_after_younger_ones_goes_when_the_frontier_is_there(
    versions: list[RaterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "CHUNK", 2)
    for _ in range(4):
        rating(versions[0], at=HOUR_DUE + timedelta(minutes=20))
    late = rating(versions[0], at=HOUR_DUE - MICROSECOND)

    expiry.retain(now=NOW)
    assert late.pk in kept()
    expiry.retain(now=NOW + timedelta(minutes=21))

    assert kept() == []


def test_one_that_is_not_due_yet_is_not_forgotten_behind_the_frontier(
    versions: list[RaterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "CHUNK", 2)
    for at in (HOUR_DUE - DAY, HOUR_DUE + timedelta(minutes=5), *[HOUR_DUE - DAY] * 5):
        rating(versions[0], at=at)

    assert expiry.retain(now=NOW) == 6
    assert expiry.retain(now=NOW + timedelta(minutes=6)) == 1


def test_one_from_the_future_goes_with_its_neighbours(versions: list[RaterVersion]) -> None:
    rating(versions[0], at=HOUR_DUE - DAY)
    rating(versions[0], at=NOW + 400 * DAY)

    assert expiry.retain(now=NOW) == 2


def test_a_clock_that_went_back_erases_nothing(versions: list[RaterVersion]) -> None:
    rating(versions[0], at=NOW)

    assert expiry.retain(now=NOW - 400 * DAY) == 0
    assert expiry.retain(now=NOW + BUFFER + timedelta(hours=2)) == 1


@pytest.mark.parametrize("freshness_s", [60, 30 * 86_400])
def test_another_freshness_holds_for_what_is_stored(
    versions: list[RaterVersion], freshness_s: int
) -> None:
    rating(versions[2], at=NOW - timedelta(hours=12) - BUFFER)
    for at in (DAY_DUE - DAY, DAY_DUE - 40 * DAY):
        rating(versions[2], at=at)
    expiry.retain(now=NOW)
    Rater.objects.filter(pk="other").update(freshness_s=freshness_s)
    rating(versions[2], at=NOW - 10 * DAY - BUFFER)

    expiry.retain(now=NOW)

    assert len(kept()) == (0 if freshness_s == 60 else 2)


def test_a_new_version_need_not_be_looked_for_in_what_is_older_than_it(
    versions: list[RaterVersion], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders.use_plugins(settings)
    for _ in range(10):
        rating(versions[2], at=DAY_DUE + timedelta(hours=5))
    one = Rater.objects.get(pk="one")
    one.prompt_template = "a new one"
    one.save()
    looked_at(monkeypatch, NOW)

    made = raters.current_version(one, NOW)

    assert made.erased_to == kept()[-1]
    assert looked_at(monkeypatch, NOW) <= 3


def test_a_run_is_bounded_and_the_next_goes_on(
    versions: list[RaterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "CHUNK", 2)
    monkeypatch.setattr(expiry, "MOST_CHUNKS", 2)
    for _ in range(7):
        rating(versions[0], at=HOUR_DUE - DAY)

    assert [expiry.retain(now=NOW) for _ in range(3)] == [4, 3, 0]


def test_an_archive_without_raters_has_nothing_to_erase() -> None:
    assert expiry.retain(now=NOW) == 0


# By order


def purged(criteria: Criteria, *, dry_run: bool = False) -> Purge:
    purge = purging.begin(criteria, dry_run=dry_run, actor="op", now=NOW)
    return purging.advance(purge.pk, now=NOW, most_steps=1_000)


@pytest.mark.parametrize(
    ("criteria", "left"),
    [
        (Criteria(rater="one"), [4, 5]),
        (Criteria(rater="other"), [0, 1, 2, 3]),
        (Criteria(rater="one", version=2), [0, 1, 4, 5]),
        (Criteria(before=NOW), [1, 3, 5]),
        (Criteria(before=NOW + MICROSECOND), []),
        (Criteria(rater="one", before=NOW), [1, 3, 4, 5]),
        (Criteria(rater="one", version=1, before=NOW), [1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_purge_erases_what_meets_all_its_criteria(
    criteria: Criteria,
    left: list[int],
    chunk: int,
    versions: list[RaterVersion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(purging, "CHUNK", chunk)
    ids = [rating(v, at=at).pk for v in versions for at in (NOW - MICROSECOND, NOW)]

    counted = purged(criteria, dry_run=True)
    assert kept() == ids
    purge = purged(criteria)

    assert kept() == [ids[place] for place in left]
    assert (purge.stage, purge.finished_at) == (PurgeStage.DONE, NOW)
    assert counted.ratings == purge.ratings == len(ids) - len(left)


@pytest.mark.parametrize(
    ("criteria", "field", "code"),
    [
        (Criteria(), "rater", "missing_field"),
        (Criteria(version=1), "version", "missing_field"),
        (Criteria(rater="nobody"), "rater", "unknown_rater"),
        (Criteria(rater="one", version=9), "version", "unknown_version"),
    ],
)
def test_a_purge_that_makes_no_sense_is_refused(
    criteria: Criteria, field: str, code: str, versions: Sequence[RaterVersion]
) -> None:
    rating(versions[0])

    with pytest.raises(InvalidFields) as refused:
        purged(criteria)

    assert [(e["field"], e["code"]) for e in refused.value.errors] == [(field, code)]
    assert Rating.objects.count() == 1
    assert not Purge.objects.exists()


def test_a_purge_goes_on_where_it_died(
    versions: list[RaterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "CHUNK", 2)
    for _ in range(7):
        rating(versions[0])
    purge = purging.begin(Criteria(rater="one"), dry_run=False, actor="op", now=NOW)
    purging.advance(purge.pk, now=NOW, most_steps=2)
    step: Callable[..., bool] = purging._walk_ratings

    def dies(*args: Any) -> bool:
        step(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(purging, "_walk_ratings", dies)
        with pytest.raises(KeyboardInterrupt):
            purging.advance(purge.pk, now=NOW, most_steps=1)
    assert len(kept()) == 3

    assert purging.run_once(NOW) == 1

    purge.refresh_from_db()
    assert (kept(), purge.ratings, purge.stage) == ([], 7, PurgeStage.DONE)
    assert purging.run_once(NOW) == 0


def test_what_is_stored_after_the_order_stays(versions: list[RaterVersion]) -> None:
    rating(versions[0])
    purge = purging.begin(Criteria(rater="one"), dry_run=False, actor="op", now=NOW)
    later = rating(versions[0])

    purging.advance(purge.pk, now=NOW, most_steps=10)

    assert kept() == [later.pk]


def test_a_purge_by_time_stops_where_all_are_younger(
    versions: list[RaterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "CHUNK", 2)
    for age in range(10, 0, -1):
        rating(versions[0], at=NOW - age * DAY)
    purge = purging.begin(Criteria(before=NOW - 9 * DAY), dry_run=False, actor="op", now=NOW)

    done = purging.advance(purge.pk, now=NOW, most_steps=3)

    assert (done.stage, done.ratings) == (PurgeStage.DONE, 1)


def test_records_of_purges_are_kept_a_year(versions: list[RaterVersion]) -> None:
    purged(Criteria(rater="one"))

    purging.run_once(NOW + 364 * DAY)
    assert Purge.objects.exists()
    purging.run_once(NOW + 366 * DAY)
    assert not Purge.objects.exists()
