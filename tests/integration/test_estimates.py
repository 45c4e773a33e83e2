"""Estimates: what a submission would bring and cost, and what a new version of a rater would."""

import gzip
from collections.abc import Iterator, Sequence
from datetime import timedelta
from math import ceil, floor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.apps import apps
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from fulfillment import backlog, commitments, promotion, spool, verdicts
from fulfillment.clock import database_now
from fulfillment.models import PriorityRule, Rater, RaterCost, RaterVersion, Rating, Role, Workflow
from fulfillment.policy.commitments import NEW_MARGIN
from tests import builders
from tests.builders import DIRECTORY, MODEL, NOW, RATER, Api, Model, ndjson, row
from tests.rating_queue import Replica, boot, check_all, queue, rate_all

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _fleet(settings: Settings, tmp_path: Path) -> Iterator[None]:
    """One live replica, and a rater of batches of ten."""
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    DIRECTORY.live = [Replica()]
    builders.version(builders.rater(batch_size=10))
    yield
    DIRECTORY.live = []


def cost(seconds_a_batch: float = 1.0, **changes: Any) -> RaterCost:
    """Store what a batch of ten takes: eight times as long in calls as of its replica."""
    now = database_now()
    return RaterCost.objects.create(
        **{
            "rater_id": RATER,
            "seconds_a_request": seconds_a_batch / 10,
            "call_seconds_a_request": 4.0 * seconds_a_batch,
            "device_seconds_a_request": 0.8 * seconds_a_batch,
            "requests": 1_000,
            "exact": True,
            "measured_at": now,
            "read_to": now,
            "servers": 1,
            "looked_at": now,
            **changes,
        }
    )


def rows(*numbers: int) -> list[dict[str, Any]]:
    """Return rows that are equal where their numbers are."""
    return [row(n, request_id=f"r{place}") for place, n in enumerate(numbers)]


def estimate(of: Sequence[Any], query: str = "", *, api: Api | None = None) -> dict[str, Any]:
    answer = (api or Api()).upload(f"/estimates?rater={RATER}{query}", of)
    assert answer.status_code == 200, answer.content
    document: dict[str, Any] = answer.json()
    return document


def change(answer: dict[str, Any], name: str) -> Any:
    """Return to what something would have to be changed, None if that is not told."""
    return next((r["to"] for r in answer["remedies"] if r["change"] == name), None)


def counts(answer: dict[str, Any]) -> tuple[int, ...]:
    names = ("rows", "hits", "coalesced", "items", "batches", "model_calls")
    return tuple(answer[name] for name in names)


def table_sizes() -> dict[str, int]:
    return {
        model.__name__: model._default_manager.count()
        for model in apps.get_app_config("fulfillment").get_models()
    }


class TestCounts:
    """What becomes of the rows."""

    def test_a_first_body_is_work_for_the_model_and_nothing_of_it_is_stored(self) -> None:
        cost()
        api = Api()
        before = table_sizes()

        answer = estimate(rows(*range(25)), api=api)

        assert counts(answer) == (25, 0, 0, 25, 3, 3)
        assert (answer["accepted"], answer["rejected_count"], answer["sample_of"]) == (25, 0, None)
        assert answer["accelerator_seconds"] == 20.0
        assert answer["rater_version"] == f"{RATER}@1"
        assert table_sizes() == before

    def test_what_was_rated_is_a_hit_and_equal_rows_are_one_item(self) -> None:
        api = Api()
        api.upload(f"/workflows?rater={RATER}", rows(1, 2, 3))
        rate_all(queue(), boot())

        answer = estimate(rows(1, 2, 4, 5, 5, 5, 1), api=api)

        assert counts(answer) == (7, 3, 2, 2, 1, 1)

    def test_it_says_what_the_submission_then_becomes(self) -> None:
        api = Api()
        api.upload(f"/workflows?rater={RATER}", rows(*range(7)))
        rate_all(queue(), boot())
        body = rows(*range(5, 40), 20, 20)

        told = estimate(body, api=api)
        became = api.upload(f"/workflows?rater={RATER}", body).json()

        assert (told["hits"], told["coalesced"], told["items"]) == (
            became["hits"],
            became["coalesced"],
            became["pending"],
        )
        rate_all(queue(), boot())
        after = api.get(f"/workflows/{became['id']}").json()
        assert after["attempts"] == told["batches"]

    def test_equal_rows_of_different_chunks_are_one_item(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(spool, "CHUNK_ROWS", 12)

        answer = estimate(rows(*range(12), *range(2, 14)))

        # Of the second chunk, two of whose twelve items are new, both batches have one.
        assert counts(answer) == (24, 0, 10, 14, 3, 3)

    @pytest.mark.parametrize(
        ("query", "hits"),
        [("", 3), ("&bypass=true", 0), ("&max_age_s=60", 0), ("&no_store=true", 3)],
    )
    def test_hits_are_those_that_the_archive_may_give(self, query: str, hits: int) -> None:
        api = Api()
        api.upload(f"/workflows?rater={RATER}", rows(1, 2, 3))
        rate_all(queue(), boot())
        Rating.objects.update(produced_at=database_now() - timedelta(seconds=61))

        assert estimate(rows(1, 2, 3), query, api=api)["hits"] == hits

    def test_a_sample_is_scaled(self) -> None:
        cost()
        api = Api()
        api.upload(f"/workflows?rater={RATER}", rows(1, 2))
        rate_all(queue(), boot())

        answer = estimate([*rows(1, 2, 3, 3, 4), "{"], "&sample_of=6000", api=api)

        assert counts(answer) == (5_000, 2_000, 1_000, 2_000, 1_000, 1_000)
        assert (answer["accepted"], answer["rejected_count"]) == (5, 1)
        assert answer["accelerator_seconds"] == 1_600.0

    def test_a_sample_of_less_than_itself_is_refused(self) -> None:
        answer = Api().upload(f"/estimates?rater={RATER}&sample_of=2", rows(1, 2, 3))

        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "sample_of"

    def test_a_chat_model_takes_an_item_a_call(self) -> None:
        DIRECTORY.models[MODEL] = Model(id=MODEL, protocol="openai")
        Rater.objects.filter(pk=RATER).update(autorater="chat")

        answer = estimate(rows(*range(25)))

        assert (answer["batches"], answer["model_calls"]) == (3, 25)
        # It would be the first of that version, which is not made for it.
        assert answer["rater_version"] is None
        assert RaterVersion.objects.count() == 1

    def test_the_spool_file_is_gone(self, tmp_path: Path) -> None:
        estimate(rows(1))

        assert list((tmp_path / "spool").iterdir()) == []


class TestForms:
    """Files, JSON, dry runs: one answer, and the refusals of a submission."""

    def test_all_forms_give_the_same_estimate(self) -> None:
        cost()
        api, body = Api(), rows(1, 2, 2)
        file = ndjson(body)
        json = {"rater": RATER, "requests": body}
        answers = [
            api.upload(f"/estimates?rater={RATER}", file),
            api.upload(f"/workflows?rater={RATER}&dry_run=true", file),
            api.upload(f"/estimates?rater={RATER}", gzip.compress(file), Content_Encoding="gzip"),
            api.post("/estimates", json),
            api.post("/workflows", {**json, "dry_run": True}),
            api.post("/workflows", {**json, "dry_run": True}, Idempotency_Key="k"),
        ]

        assert [answer.status_code for answer in answers] == [200] * 6
        documents = [{**answer.json(), "at": None} for answer in answers]
        assert all(document == documents[0] for document in documents)
        assert not Workflow.objects.exists()

    def test_a_dry_run_that_is_none_is_a_submission(self) -> None:
        api = Api()

        answers = [
            api.upload(f"/workflows?rater={RATER}&dry_run=false", rows(1)),
            api.post("/workflows", {"rater": RATER, "requests": rows(1), "dry_run": False}),
        ]

        assert [answer.status_code for answer in answers] == [202, 202]

    def test_a_workflow_without_rows_costs_nothing(self) -> None:
        answer = Api().post("/workflows", {"rater": RATER, "dry_run": True}).json()

        assert counts(answer) == (0, 0, 0, 0, 0, 0)
        assert (answer["feasible"], answer["share_in_time"]) == (True, 1.0)

    @pytest.mark.parametrize(
        ("query", "body"),
        [
            ("rater=nobody", [row(1)]),
            ("", [row(1)]),
            (f"rater={RATER}&priority=101", [row(1)]),
            (f"rater={RATER}&batch_size=61", [row(1)]),
            (f"rater={RATER}&webhook_url=http://127.0.0.1/x", [row(1)]),
            (f"rater={RATER}", []),
            (f"rater={RATER}", ["nonsense"]),
            (f"rater={RATER}", [row(1), row(1)]),
        ],
    )
    def test_what_would_be_refused_is_refused_alike(self, query: str, body: Sequence[Any]) -> None:
        api = Api()
        submitted = api.upload(f"/workflows?{query}", body)

        tried = [
            api.upload(f"/workflows?{query}&dry_run=true", body),
            api.upload(f"/estimates?{query}", body),
        ]

        for answer in tried:
            assert answer.status_code == submitted.status_code >= 400
            theirs, ours = ({**a.json(), "instance": None} for a in (submitted, answer))
            assert ours == theirs

    def test_a_full_backlog_refuses_it_too(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backlog, "_counted", backlog._Count())
        monkeypatch.setattr(backlog, "BELIEVED_S", 0.0)
        settings.AIRS_MAX_BACKLOG_BYTES = 1
        builders.workflow(stats={"received": 1, "stored_bytes": 2})

        answer = Api().upload(f"/estimates?rater={RATER}", rows(1))

        assert (answer.status_code, answer.json()["code"]) == (507, "backlog_full")

    def test_refused_rows_are_told_and_repaired_ones_too(self) -> None:
        answer = estimate([row(1), "{", row(2, text="a\0b")])

        assert [(r["line"], r["code"]) for r in answer["rejected"]] == [(2, "invalid_json")]
        assert [(w["line"], w["code"]) for w in answer["warnings"]] == [(3, "nul_replaced")]

    def test_who_may_not_submit_may_not_ask(self) -> None:
        assert Api(role=Role.VIEWER).upload(f"/estimates?rater={RATER}", rows(1)).status_code == 403


class TestFeasibility:
    """Whether in time, and what would make it so."""

    def test_what_fits_is_feasible(self) -> None:
        cost(1.0)

        answer = estimate(rows(*range(50)), "&deadline_s=600")

        assert (answer["feasible"], answer["share_in_time"]) == (True, 1.0)
        assert answer["remedies"] == []
        assert answer["eta"]["low"] <= 5 <= answer["eta"]["high"]
        assert answer["eta"]["in_time"]
        capacity = answer["capacity"]
        assert (capacity["servers"], capacity["kind"]) == (1, "replicas")
        assert (capacity["seconds_a_batch"], capacity["batches_per_s"]) == (1.0, 1.0)
        assert capacity["measured_requests"] == 1_000

    def test_what_would_be_given_up_ends_as_best_effort(self) -> None:
        cost(1.0)
        builders.workflow(stats={"received": 2_000}, owner="other", priority=50)

        fits = estimate(rows(*range(50)), "&deadline_s=600&priority=90")
        cut = estimate(rows(*range(50)), "&deadline_s=3&max_duration_s=600&priority=90")

        assert (fits["feasible"], cut["feasible"]) == (True, False)
        assert cut["eta"]["seconds"] > 10 * fits["eta"]["seconds"]

    def test_a_max_duration_before_the_deadline_counts_as_one(self) -> None:
        cost(100.0)

        answer = estimate(rows(*range(50)), "&deadline_s=7200&max_duration_s=200")

        assert (answer["eta"]["seconds"], answer["eta"]["in_time"]) == (200, False)
        assert answer["share_in_time"] == pytest.approx(NEW_MARGIN * 2 / 5)
        assert change(answer, "deadline_s") is None
        assert change(answer, "replicas") == ceil(5 / (NEW_MARGIN * 2))

    def test_what_does_not_fit_says_how_much_and_what_would_help(self) -> None:
        cost(100.0)

        answer = estimate(rows(*range(50)), "&deadline_s=200")

        assert answer["feasible"] is False
        assert (answer["eta"]["seconds"], answer["eta"]["in_time"]) == (200 + 120, False)
        fit = NEW_MARGIN * 2
        assert answer["share_in_time"] == pytest.approx(fit / 5)
        assert f"{5 - fit:.1f} of 5.0 batches" in answer["reason"]
        assert change(answer, "deadline_s") == ceil(500 / NEW_MARGIN)
        assert change(answer, "replicas") == ceil(5 / fit)
        assert change(answer, "rows") == floor(10 * fit)
        assert change(answer, "priority") is None

    def test_each_change_it_names_makes_it_feasible(self) -> None:
        cost(100.0)
        api = Api()
        held = f"/workflows?rater={RATER}&deadline_s=1000&priority=50"
        assert api.upload(held, rows(*range(100, 150))).json()["forecast"]["share_in_time"] == 1.0
        body = rows(*range(50))
        answer = estimate(body, "&deadline_s=1000&priority=20", api=api)
        assert answer["feasible"] is False

        deadline_s, n, score = (change(answer, c) for c in ("deadline_s", "rows", "priority"))
        again = [
            estimate(body, f"&deadline_s={deadline_s}&priority=20", api=api),
            estimate(body[:n], "&deadline_s=1000&priority=20", api=api),
            estimate(body, f"&deadline_s=1000&priority={score}", api=api),
        ]
        DIRECTORY.live = [Replica(key=f"r{i}") for i in range(change(answer, "replicas"))]
        again.append(estimate(body, "&deadline_s=1000&priority=20", api=api))

        assert [a["feasible"] for a in again] == [True] * 4
        # A higher class takes from a lower one; who asks is told.
        assert [a["displaces"] for a in again] == [0, 0, 1, 0]

    def test_it_says_what_the_submission_is_then_told(self) -> None:
        cost(100.0)
        api = Api()
        for n in range(3):
            api.upload(
                f"/workflows?rater={RATER}&deadline_s=2000", rows(*range(60 * n, 60 * n + 50))
            )
        body = rows(*range(1_000, 1_100))

        told = estimate(body, "&deadline_s=2500", api=api)
        became = api.upload(f"/workflows?rater={RATER}&deadline_s=2500", body).json()

        assert told["feasible"] is False
        assert told["share_in_time"] == pytest.approx(
            became["forecast"]["share_in_time"], abs=0.001
        )

    def test_beside_very_many_it_is_counted_from_the_safe_side(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cost(100.0)
        api = Api()
        api.upload(f"/workflows?rater={RATER}&deadline_s=2000", rows(*range(50)))
        monkeypatch.setattr(verdicts, "MOST_ADMITTED", 0)

        answer = estimate(rows(*range(100, 200)), "&deadline_s=1000", api=api)

        assert answer["share_in_time"] == pytest.approx(NEW_MARGIN)
        assert "beside 1 open workflows" in answer["reason"]

    def test_a_priority_that_a_rule_would_clip_is_not_named(self) -> None:
        cost(100.0)
        api = Api()
        api.upload(f"/workflows?rater={RATER}&deadline_s=1000", rows(*range(100, 160)))
        PriorityRule.objects.create(position=1, name="modest", ceiling=60)

        answer = estimate(rows(*range(50)), "&deadline_s=1000&priority=90", api=api)

        assert answer["priority"] == 60
        assert "modest" in answer["priority_reason"]
        assert change(answer, "priority") is None

    def test_best_effort_is_told_to_drop_it(self) -> None:
        cost(100.0)
        api = Api()
        api.upload(f"/workflows?rater={RATER}&deadline_s=1000&best_effort=true",
                   rows(*range(100, 140)))  # fmt: skip

        answer = estimate(rows(*range(60)), "&deadline_s=1000&best_effort=true", api=api)

        assert change(answer, "best_effort") is False

    def test_a_limit_of_calls_a_second_is_no_matter_of_replicas(self) -> None:
        cost(0.001)
        Rater.objects.filter(pk=RATER).update(max_qps=0.01)

        answer = estimate(rows(*range(50)), "&deadline_s=200")

        assert answer["feasible"] is False
        assert answer["capacity"]["batches_per_s"] == 0.01
        assert change(answer, "replicas") is None
        assert change(answer, "deadline_s") == ceil(500 / NEW_MARGIN)

    def test_an_external_model_is_told_its_calls(self) -> None:
        DIRECTORY.live = [Replica(key="ext", managed=False, window=4)]
        cost(100.0)

        answer = estimate(rows(*range(200)), "&deadline_s=200")

        assert (answer["capacity"]["servers"], answer["capacity"]["kind"]) == (4, "calls")
        assert change(answer, "calls") == ceil(20 / (NEW_MARGIN * 2))
        assert change(answer, "replicas") is None

    def test_before_anything_was_rated_nobody_knows(self) -> None:
        answer = estimate(rows(1))

        assert (answer["feasible"], answer["share_in_time"], answer["eta"]) == (None, None, None)
        assert (answer["accelerator_seconds"], answer["capacity"]) == (None, None)
        assert "nobody knows" in answer["reason"]

    def test_without_a_replica_it_says_how_many_are_needed(self) -> None:
        cost(100.0)
        DIRECTORY.live = []

        answer = estimate(rows(*range(50)), "&deadline_s=1000")

        assert (answer["feasible"], answer["share_in_time"]) == (False, 0.0)
        assert answer["reason"] == f"nobody serves {MODEL} now"
        assert change(answer, "replicas") == 1

    def test_a_paused_rater_is_not_in_time(self) -> None:
        cost(1.0)
        Rater.objects.filter(pk=RATER).update(paused_at=NOW, paused_code="unauthorized")

        answer = estimate(rows(*range(50)))

        assert (answer["feasible"], answer["share_in_time"], answer["eta"]) == (False, 0.0, None)
        assert "is paused (unauthorized)" in answer["reason"]

    def test_what_the_archive_answers_needs_nobody(self) -> None:
        api = Api()
        api.upload(f"/workflows?rater={RATER}", rows(1, 2))
        rate_all(queue(), boot())
        DIRECTORY.live = []

        answer = estimate(rows(1, 2), api=api)

        assert (answer["feasible"], answer["share_in_time"]) == (True, 1.0)
        assert answer["accelerator_seconds"] == 0
        assert answer["eta"] == {"seconds": 0, "low": 0, "high": 0, "in_time": True}


class TestPromotion:
    """What a new version would cost."""

    def rated(self, *numbers: int) -> None:
        Api().upload(f"/workflows?rater={RATER}", rows(*numbers))
        rate_all(queue(), boot())
        check_all()

    def promoting(self, query: str = "") -> dict[str, Any]:
        answer = Api(role=Role.VIEWER).get(f"/raters/{RATER}/promotion-estimate{query}")
        assert answer.status_code == 200, answer.content
        document: dict[str, Any] = answer.json()
        return document

    def test_it_counts_what_the_archive_would_lose_and_what_that_saved(self) -> None:
        cost(36.0)
        self.rated(*range(20))
        self.rated(*range(10, 40))
        self.rated(*range(40))
        RaterVersion.objects.update(created_at=database_now() - timedelta(days=30))
        commitments.run_once(database_now())

        answer = self.promoting("?days=2")

        assert (answer["entries"], answer["entries_exact"]) == (40, True)
        assert (answer["requests"], answer["hits"], answer["days"]) == (90, 50, 2.0)
        assert answer["hit_rate"] == pytest.approx(50 / 90)
        a_day, whole = answer["a_day"], answer["whole_archive"]
        assert (a_day["requests"], a_day["model_calls"]) == (25, 2)
        # 2.5 batches of 36 s of one replica.
        assert a_day["pool_hours"] == pytest.approx(0.025)
        assert a_day["accelerator_seconds"] == pytest.approx(25 * 28.8)
        assert (whole["requests"], whole["model_calls"], whole["pool_hours"]) == (40, 4, 0.04)
        assert answer["reason"] is None

    def test_stale_ratings_and_those_of_other_versions_are_lost_already(self) -> None:
        self.rated(1, 2, 3)
        first = Rating.objects.order_by("pk").first()
        assert first is not None
        Rating.objects.filter(pk=first.pk).update(produced_at=database_now() - timedelta(days=91))
        Rating.objects.filter(pk=first.pk + 1).update(reusable=False)
        builders.version(Rater.objects.get(pk=RATER), number=2, model_version="v2")

        assert self.promoting()["entries"] == 0
        RaterVersion.objects.filter(number=2).update(number=3)
        Rater.objects.update(current_version=RaterVersion.objects.get(number=1))
        assert self.promoting()["entries"] == 1

    def test_a_large_archive_is_sampled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        version = RaterVersion.objects.get()
        now = database_now()
        Rating.objects.bulk_create(
            Rating(
                fingerprint=uuid4(), rater_version=version, workflow_id=0, score=1.0,
                produced_at=now,
            )
            for _ in range(20_000)
        )  # fmt: skip
        monkeypatch.setattr(promotion, "MOST_PAGES", 100)

        answer = self.promoting()

        assert not answer["entries_exact"]
        assert 12_000 < answer["entries"] < 28_000

    def test_a_young_version_is_not_blown_up_to_a_day(self) -> None:
        cost(36.0)
        RaterVersion.objects.update(created_at=database_now())
        self.rated(1, 2)
        self.rated(1, 2)
        commitments.run_once(database_now())

        answer = self.promoting()

        assert answer["days"] < 0.01
        assert answer["a_day"]["requests"] == 2

    def test_without_a_measure_only_times_are_missing(self) -> None:
        self.rated(1, 2)

        answer = self.promoting()

        assert answer["whole_archive"] == {
            "requests": 2,
            "model_calls": 0,
            "accelerator_seconds": None,
            "pool_hours": None,
        }
        assert "nobody knows" in answer["reason"]

    def test_what_cannot_be_asked_is_refused(self) -> None:
        api = Api()

        assert api.get("/raters/nobody/promotion-estimate").status_code == 404
        assert api.get(f"/raters/{RATER}/promotion-estimate?days=0").status_code == 422

    def test_the_admin_says_it_where_a_rater_is_changed(self, admin_client: Client) -> None:
        cost(36.0)
        self.rated(*range(20))
        page = reverse("admin:fulfillment_rater_change", args=[RATER])

        text = admin_client.get(page).content.decode()

        assert f"20 ratings of {RATER}@1 would answer nothing any more" in text
        assert "hours of all its replicas" in text
