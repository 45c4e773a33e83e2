"""The archive over REST: explaining a row, ordering a purge, the staleness report."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from pytest_django import Settings

from fulfillment import intake, purging, raters
from fulfillment.api import archive
from fulfillment.clock import database_now
from fulfillment.models import (
    FailedFlight,
    Purge,
    Rater,
    RaterVersion,
    Rating,
    RatingRequest,
    Role,
    ShadowScore,
    Workflow,
)
from tests import builders
from tests.builders import MODEL, NOW, RATER, Api, ndjson, row
from tests.rating_queue import boot, queue, rate_all

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _rater(settings: Settings, db: None, tmp_path: Path) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())


def submit(rows: Sequence[Any], **form: Any) -> Workflow:
    return intake.submit(
        form=intake.WorkflowForm(rater=RATER, **form),
        body=intake.Body(chunks=[ndjson(rows)]),
        owner="alice",
        idempotency_key=None,
        close=True,
    ).workflow


def rate(rows: Sequence[Any], **form: Any) -> Workflow:
    workflow = submit(rows, **form)
    rate_all(queue(), boot())
    return workflow


KEY = {name: value for name, value in row(1).items() if name != "request_id"}


def explained(api: Api | None = None, **fields: Any) -> Any:
    asked = urlencode({"rater": RATER, **KEY, **fields})
    response = (api or Api(role=Role.VIEWER)).get(f"/archive/explain?{asked}")
    assert response.status_code == 200, response.content
    return response.json()


def test_a_row_that_nobody_has_rated_is_a_miss() -> None:
    workflow = submit([row(1)])

    found = explained()

    assert found["look"] == "miss"
    assert found["entries"] == []
    assert found["fingerprint"] == RatingRequest.objects.get(workflow=workflow).fingerprint.hex
    assert (found["rater_version"], found["key_level"]) == (f"{RATER}@1", "result")
    assert found["entered"] == ["query_text", "url", "text"]
    assert found["absent"] == ["title", "html", "context"]
    assert (found["ignored"], found["prompt"]) == ([], None)
    assert (found["in_flight"], found["failed"]) == (False, None)


def test_a_rated_row_is_a_hit_and_shows_where_it_comes_from() -> None:
    workflow = rate([row(1)])

    found = explained()

    assert found["look"] == "hit"
    (entry,) = found["entries"]
    assert entry["workflow"] == workflow.public_id
    assert (entry["refused"], entry["fresh"], entry["reusable"]) == (None, True, True)
    assert (entry["score"], entry["rater_version"]) == (2.5, f"{RATER}@1")
    assert 0 <= entry["age_s"] < 60


def test_entries_say_why_they_would_not_be_taken() -> None:
    rate([row(1)])
    (old,) = Rating.objects.all()
    for change in (
        {"produced_at": database_now() - timedelta(days=91)},
        {"produced_at": database_now() + timedelta(hours=1)},
        {"reusable": False},
        {"produced_at": database_now() - timedelta(days=2)},
    ):
        rating = Rating.objects.get(pk=old.pk)
        rating.pk = None
        for name, value in change.items():
            setattr(rating, name, value)
        rating.save()

    reasons = [entry["refused"] for entry in explained()["entries"]]

    assert reasons == ["in_the_future", "not_reusable", None, "not_the_newest", "stale"] or (
        reasons == ["in_the_future", None, "not_reusable", "not_the_newest", "stale"]
    )
    strict = explained(max_age_s=0)
    assert strict["look"] == "stale"
    assert [entry["refused"] for entry in strict["entries"]].count("too_old") == 2
    assert explained(bypass="true")["look"] == "bypassed"


def test_a_miss_by_a_new_version_shows_what_the_old_one_had() -> None:
    rate([row(1)])
    builders.DIRECTORY.models[MODEL].version = "v2"

    found = explained()

    assert (found["look"], found["rater_version"]) == ("miss", f"{RATER}@2")
    (entry,) = found["entries"]
    assert (entry["rater_version"], entry["refused"]) == (f"{RATER}@1", "other_version")


def test_it_says_that_an_equal_item_is_being_computed_or_has_failed() -> None:
    submit([row(1)])
    boot()
    queue().run()
    fingerprint = explained()["fingerprint"]
    FailedFlight.objects.create(fingerprint=fingerprint, code="invalid_request", failed_at=NOW)

    found = explained()

    assert (found["in_flight"], found["failed"]) == (True, "invalid_request")


def test_context_is_the_text_of_an_object_and_its_order_does_not_matter() -> None:
    one = explained(context='{"locale": "de", "device": "mobile"}')
    same = explained(context='{"device":"mobile","locale":"de"}')

    assert one["fingerprint"] == same["fingerprint"]
    assert "context" in one["entered"]


def test_a_long_row_may_be_sent_as_a_body() -> None:
    html = "<p>" + "x" * 20_000
    response = Api(role=Role.VIEWER).post(
        "/archive/explain", {"rater": RATER, **KEY, "html": html, "context": {"a": 1}}
    )

    assert response.status_code == 200
    assert response.json()["entered"] == ["query_text", "url", "html", "text", "context"]
    assert not Workflow.objects.exists()


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"rater": "nobody"}, 404, "not_found"),
        ({"context": "{"}, 422, "invalid_json"),
        ({"context": "[]"}, 422, "bad_type"),
        ({"query_text": "  "}, 422, "empty_field"),
        ({"colour": "red"}, 422, "unknown_field"),
        ({"max_age_s": "-1"}, 422, None),
    ],
)
def test_what_cannot_be_explained_is_refused(
    changes: dict[str, str], status: int, code: str | None
) -> None:
    asked = urlencode({"rater": RATER, **KEY, **changes})

    response = Api().get(f"/archive/explain?{asked}")

    assert response.status_code == status, response.content
    if code:
        assert response.json()["code"] == code


# Purging


def test_a_purge_only_counts_unless_it_is_told_to_erase() -> None:
    rate([row(1), row(2)])
    api = Api("olga", Role.OPERATOR)

    counted = api.post("/archive/purge", {"rater": RATER})
    assert Rating.objects.count() == 2
    done = api.post("/archive/purge", {"rater": RATER, "dry_run": False})

    assert (counted.status_code, done.status_code) == (200, 200)
    document = done.json()
    assert document | {"id": "", "created_at": "", "finished_at": ""} == {
        "id": "",
        "state": "done",
        "dry_run": False,
        "rater": RATER,
        "version": None,
        "by_url": False,
        "before": None,
        "counts": {"ratings": 2, "requests": 0, "failed": 0, "payloads": 0},
        "blanks": None,
        "ordered_by": "olga",
        "created_at": "",
        "finished_at": "",
    }
    assert counted.json()["counts"] == document["counts"]
    assert done["Location"] == f"/api/v1/archive/purges/{document['id']}"
    assert api.get(f"/archive/purges/{document['id']}").json() == document
    assert not Rating.objects.exists()


def test_a_purge_by_url_says_what_it_blanks() -> None:
    rate([row(1), row(2)])

    response = Api(role=Role.OPERATOR).post(
        "/archive/purge", {"url": row(1)["url"], "dry_run": False}
    )

    document = response.json()
    assert "page text" in document["blanks"]
    assert (document["by_url"], document["counts"]["requests"]) == (True, 1)
    assert row(1)["url"] not in response.content.decode()


def test_a_large_purge_goes_on_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    rate([row(n) for n in range(5)])
    monkeypatch.setattr(purging, "CHUNK", 1)
    monkeypatch.setattr(purging, "STEPS_IN_CALL", 2)
    api = Api(role=Role.OPERATOR)

    response = api.post("/archive/purge", {"rater": RATER, "dry_run": False})

    assert response.status_code == 202
    assert response.json()["state"] == "running"
    assert response.json()["counts"]["ratings"] == 2
    purging.run_once(database_now())
    assert api.get(f"/archive/purges/{response.json()['id']}").json()["state"] == "done"
    assert not Rating.objects.exists()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "missing_field"),
        ({"version": 1}, "missing_field"),
        ({"rater": "nobody"}, "unknown_rater"),
        ({"rater": RATER, "version": 7}, "unknown_version"),
        ({"rater": RATER, "dry_run": "no"}, None),
        ({"urls": ["x"]}, "unknown_field"),
        ({"before": "yesterday"}, None),
    ],
)
def test_a_purge_that_makes_no_sense_is_refused(body: dict[str, Any], code: str | None) -> None:
    response = Api(role=Role.OPERATOR).post("/archive/purge", body)

    assert response.status_code == 422, response.content
    if code:
        assert response.json()["code"] == code
    assert not Purge.objects.exists()


def test_purges_are_for_operators() -> None:
    api = Api(role=Role.SUBMITTER)
    for answer in (
        api.post("/archive/purge", {"rater": RATER}),
        api.get("/archive/purges"),
        api.get("/archive/purges/prg_" + "0" * 32),
    ):
        assert answer.status_code == 403
    assert Api(role=Role.OPERATOR).get("/archive/purges/prg_" + "0" * 32).status_code == 404
    assert Api(role=Role.OPERATOR).get("/archive/purges/x").status_code == 404


def test_purges_are_listed_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MOST_LISTED", 2)
    api = Api(role=Role.OPERATOR)
    ids = [api.post("/archive/purge", {"rater": RATER}).json()["id"] for _ in range(3)]

    page = api.get("/archive/purges").json()
    rest = api.get(f"/archive/purges?cursor={page['next']}").json()

    assert [p["id"] for p in page["items"] + rest["items"]] == ids[::-1]
    assert rest["next"] is None


# Staleness


def test_the_report_tells_the_differences_by_age() -> None:
    version = RaterVersion.objects.get()
    for age_s, old, new in (
        (60, 1.0, 1.0),
        (8 * 86_400, 1.0, 1.0),
        (9 * 86_400, 1.0, 1.1),
        (10 * 86_400, 2.0, 1.0),
        (100 * 86_400, 0.0, 4.0),
    ):
        ShadowScore.objects.create(
            rater_version=version, old_score=old, new_score=new, age_s=age_s, recorded_at=NOW
        )

    report = Api(role=Role.VIEWER).get(f"/archive/staleness?rater={RATER}").json()

    assert report["rater"] == RATER
    first, week, old = report["buckets"]
    assert (first["age_from_s"], first["age_to_s"], first["n"]) == (0, 3_600, 1)
    assert first["mean_difference_interval"] is None
    assert (week["age_from_s"], week["age_to_s"], week["n"]) == (7 * 86_400, 30 * 86_400, 3)
    assert week["mean_difference"] == pytest.approx(-0.3)
    assert week["mean_absolute_difference"] == pytest.approx(1.1 / 3)
    assert week["changed_1_percent"] == pytest.approx(2 / 3)
    assert week["changed_10_percent"] == pytest.approx(1 / 3)
    assert week["mean_difference_interval"]["low"] < -0.3 < week["mean_difference_interval"]["high"]
    assert (old["age_to_s"], old["changed_10_percent"]) == (None, 1.0)


def test_a_rater_without_samples_has_an_empty_report() -> None:
    api = Api(role=Role.VIEWER)

    assert api.get(f"/archive/staleness?rater={RATER}").json()["buckets"] == []
    assert api.get("/archive/staleness?rater=nobody").status_code == 404
    assert api.get("/archive/staleness").status_code == 422
