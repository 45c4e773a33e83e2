"""The backlog: what counts as its bytes, and when there is no room for more."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.db import connection
from pytest_django import Settings

from fulfillment import backlog, folding, intake, raters
from fulfillment.clock import database_now
from fulfillment.errors import BacklogFull
from fulfillment.intake import Submission, WorkflowForm
from fulfillment.models import Batch, BatchPayload, Rater, Rating, RatingRequest, WorkflowStats
from tests import builders
from tests.builders import MODEL, RATER, Api, row

pytestmark = pytest.mark.django_db

ROWS = [row(n) for n in range(30)]


@pytest.fixture(autouse=True)
def _rater(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AIRS_SPOOL = tmp_path / "spool"
    builders.use_plugins(settings)
    raters.register(Rater(id=RATER, autorater="stub", model_id=MODEL), now=database_now())
    monkeypatch.setattr(backlog, "BELIEVED_S", 0.0)
    monkeypatch.setattr(backlog, "_counted", backlog._Count())


def upload(rows: Any = ROWS) -> Any:
    return Api().upload(f"/workflows?rater={RATER}", rows)


def size_of(*models: Any) -> int:
    """Return the bytes of all rows, as PostgreSQL stores them."""
    total = 0
    with connection.cursor() as cursor:
        for model in models:
            table = model._meta.db_table
            cursor.execute(f"SELECT coalesce(sum(pg_column_size(t.*)), 0) FROM {table} t")
            total += cursor.fetchone()[0]
    return total


def test_it_counts_what_an_upload_stored_before_and_after_the_fold() -> None:
    assert backlog.stored_bytes() == 0
    upload()

    before = backlog.stored_bytes()
    folding.fold()

    assert backlog.stored_bytes() == before
    assert before == pytest.approx(size_of(Batch, BatchPayload, RatingRequest), rel=0.5)


def test_rows_that_the_archive_answers_are_no_backlog() -> None:
    upload()
    now = database_now()
    version = raters.find(RATER).current_version
    assert version is not None
    for fingerprint in RatingRequest.objects.values_list("fingerprint", flat=True):
        Rating.objects.create(
            fingerprint=fingerprint, rater_version=version, workflow_id=0, score=1, produced_at=now
        )
    before = backlog.stored_bytes()

    assert upload().json()["hits"] == len(ROWS)

    assert backlog.stored_bytes() == before


def test_a_full_backlog_is_refused_with_507_and_when_to_come_back(settings: Settings) -> None:
    upload()
    settings.AIRS_MAX_BACKLOG_BYTES = backlog.stored_bytes()
    assert upload().status_code == 202

    response = upload()

    assert (response.status_code, response.json()["code"]) == (507, "backlog_full")
    assert response.headers["Retry-After"] == "60"
    assert "AIRS_MAX_BACKLOG_BYTES" in response.json()["detail"]


def test_there_is_room_again_when_rows_are_gone(settings: Settings) -> None:
    upload()
    folding.fold()
    settings.AIRS_MAX_BACKLOG_BYTES = backlog.stored_bytes() - 1
    assert upload().status_code == 507

    WorkflowStats.objects.update(stored_bytes=0)

    assert upload().status_code == 202


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "status"), [(999, 507), (1_000, 202)])
def test_uploads_are_refused_when_the_disk_of_the_embedded_database_is_nearly_full(
    free: int, status: int, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings.AIRS_MIN_FREE_BYTES = 1_000
    settings.AIRS_DATA_DIRECTORY = tmp_path
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(total=9_999, used=0, free=free))

    response = upload()

    assert response.status_code == status
    assert status == 202 or "AIRS_MIN_FREE_BYTES" in response.json()["detail"]


def test_the_disk_of_somebody_elses_database_is_not_ours_to_judge(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AIRS_DATA_DIRECTORY = None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(total=9_999, used=0, free=0))

    assert upload().status_code == 202


def test_a_count_is_believed_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BELIEVED_S", 1_000.0)
    backlog.refuse_if_full()

    with connection.execute_wrapper(_no_statement):
        backlog.refuse_if_full()


def _no_statement(*_: Any) -> Any:
    raise AssertionError("a statement was sent")


def create_empty() -> Submission:
    return intake.create_empty(form=WorkflowForm(rater=RATER), owner="alice", idempotency_key=None)


def test_empty_workflows_are_refused_too(settings: Settings) -> None:
    upload()
    settings.AIRS_MAX_BACKLOG_BYTES = 1

    with pytest.raises(BacklogFull):
        create_empty()
