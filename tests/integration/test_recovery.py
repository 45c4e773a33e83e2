"""Recovery services: run by whoever is there, by one at a time, and never forgotten."""

from datetime import datetime, timedelta

import pytest

from fulfillment import recovery
from fulfillment.clock import database_now
from fulfillment.models import ServiceRun
from fulfillment.recovery import Service
from tests.rating_queue import queue, submit, threads

pytestmark = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)


class Broken(Exception):
    """What a service under test dies of."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """Replace the services by one that notes when it ran and one that breaks."""
    ran: list[datetime] = []

    def note(now: datetime) -> int:
        ran.append(now)
        return 1

    def fail(now: datetime) -> int:
        raise Broken

    monkeypatch.setattr(
        recovery,
        "SERVICES",
        {
            "noting": Service(run_once=note, period=timedelta(seconds=5)),
            "broken": Service(run_once=fail, period=timedelta(seconds=5)),
        },
    )
    return ran


def test_running_a_service_marks_when_it_ran(runs: list[datetime]) -> None:
    now = database_now()

    assert recovery.run("noting", now)
    assert recovery.run("noting", now + timedelta(seconds=1))

    assert runs == [now, now + timedelta(seconds=1)]
    assert ServiceRun.objects.get(name="noting").ran_at == now + timedelta(seconds=1)


def test_a_service_that_breaks_is_not_marked_and_can_run_again(runs: list[datetime]) -> None:
    for _ in range(2):
        with pytest.raises(Broken):
            recovery.run("broken", database_now())

    assert not ServiceRun.objects.exists()


@with_commits
def test_one_session_at_a_time_runs_a_service(
    runs: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = database_now()
    met: list[bool] = []

    def run_beside(at: datetime) -> int:
        with threads(1) as pool:
            met.append(pool.submit(recovery.run, "noting", now).result(10))
        return 1

    beside = Service(run_once=run_beside, period=timedelta(seconds=5))
    monkeypatch.setattr(recovery, "SERVICES", {"noting": beside})

    assert recovery.run("noting", now)

    assert met == [False]
    assert runs == []


@pytest.mark.parametrize(
    ("age_s", "late"), [(0, False), (9, False), (11, True), (-9, False), (-3_600, True)]
)
def test_a_service_is_late_after_two_periods_or_when_the_clock_was_set_back(
    runs: list[datetime], age_s: int, late: bool
) -> None:
    now = database_now()
    recovery.mark("noting", now - timedelta(seconds=age_s))
    recovery.mark("broken", now)

    assert recovery.late(now) == (["noting"] if late else [])


def test_a_service_that_never_ran_is_late(runs: list[datetime]) -> None:
    assert recovery.late(database_now()) == ["noting", "broken"]


def test_marks_of_processes_are_not_taken_for_services() -> None:
    now = database_now()
    recovery.mark("dispatcher", now)

    assert recovery.late(now) == list(recovery.SERVICES)


def test_the_completion_service_ends_workflows() -> None:
    workflow = submit(["a"], ends_in=timedelta(0), deadline_in=timedelta(0))
    now = database_now()

    assert recovery.run("completion", now)

    workflow.refresh_from_db()
    assert workflow.finished_at is not None
    assert queue().run().sent == 0
