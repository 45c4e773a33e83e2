"""Beat follows changes of its schedule, and does not ask for them at each tick."""

import time

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django_celery_beat.models import PeriodicTask  # type: ignore[import-untyped]

from airs_site import beat
from airs_site.celery import app

pytestmark = pytest.mark.django_db


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    # It would close the connection of the test.
    monkeypatch.setattr("django_celery_beat.schedulers.close_old_connections", lambda: None)
    return seconds


def test_the_schedule_is_looked_at_every_two_seconds_at_most(clock: list[float]) -> None:
    scheduler = beat.Scheduler(app=app)
    assert "completion" in scheduler.schedule
    assert app.conf.beat_scheduler == "airs_site.beat:Scheduler"

    with CaptureQueriesContext(
        connection,
    ) as asked:
        for _ in range(20):
            assert "completion" in scheduler.schedule
    assert len(asked) <= 1

    PeriodicTask.objects.get(name="completion").delete()
    assert "completion" in scheduler.schedule
    clock[0] += beat.LOOK_S
    assert "completion" not in scheduler.schedule
