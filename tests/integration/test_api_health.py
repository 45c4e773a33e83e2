import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client
from pytest_django import Settings

from airs_site import health
from fulfillment.clock import database_now
from fulfillment.models import ExecutorBoot, ServiceRun
from tests.builders import Api

pytestmark = pytest.mark.django_db


def get(path: str) -> Any:
    Api()  # a client makes the static root
    return Client().get(path)


def everything_runs(age: timedelta = timedelta()) -> None:
    at = database_now() - age
    for name in ("dispatcher", "beat"):
        ServiceRun.objects.create(name=name, ran_at=at)
    ExecutorBoot.objects.create(
        boot_id=uuid.uuid4(), host="h", pid=1, slots=8, started_at=at, heartbeat_at=at
    )


def failed(response: Any) -> set[str]:
    return {name for name, check in response.json()["checks"].items() if not check["ok"]}


def test_alive_without_asking_the_database(django_assert_num_queries: Any) -> None:
    Api()

    with django_assert_num_queries(0):
        assert Client().get("/healthz").status_code == 200


def test_ready_when_every_part_runs() -> None:
    everything_runs()

    response = get("/readyz")

    assert (response.status_code, failed(response)) == (200, set())
    assert response.json()["checks"]["executors"]["living"] == 1


def test_not_ready_before_anything_ran() -> None:
    response = get("/readyz")

    assert (response.status_code, failed(response)) == (503, {"dispatcher", "beat", "executors"})


@pytest.mark.parametrize(
    ("age_s", "missing"),
    [(10, set()), (20, {"executors"}), (31, {"dispatcher", "beat", "executors"})],
)
def test_not_ready_when_parts_stand_still(age_s: int, missing: set[str]) -> None:
    everything_runs(timedelta(seconds=age_s))

    assert failed(get("/readyz")) == missing


def test_not_ready_without_a_broker(settings: Settings) -> None:
    everything_runs()
    settings.REDIS_URL = "redis://127.0.0.1:1/0"

    response = get("/readyz")

    assert (response.status_code, failed(response)) == (503, {"broker"})
    assert "127.0.0.1" not in response.content.decode()


def test_not_ready_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> Any:
        raise OperationalError("connection to secret-host failed")

    monkeypatch.setattr(health, "_database", away)

    response = get("/readyz")

    assert (response.status_code, failed(response)) == (503, {"database"})
    assert "secret-host" not in response.content.decode()
