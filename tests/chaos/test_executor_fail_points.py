"""The real Rating Generator dies, or loses its database, at each boundary of a message's way.

Its threads and its HTTP client are its own; the model server is another process's thread and keeps
count. A broken connection costs no prediction: what came back is written as soon as the database
is there again.
"""

import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.db import connection

from fulfillment import completion, leases
from fulfillment.clock import database_now
from fulfillment.models import Workflow
from tests import builders
from tests.chaos import laws
from tests.chaos.fail_points import FailPoints, How, watched
from tests.chaos.test_fail_points import SEED
from tests.chaos.world import looker
from tests.executor_stage import Directory, Endpoint
from tests.fakes import instant_oip, pair_of, read_tally
from tests.rating_queue import Queue, Replica, boot, check_all, finished, queue, submit
from workers import patience
from workers.rating_generator import RatingGenerator

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = 7
SAMPLE = 2


@contextmanager
def generator(directory: Directory) -> Iterator[RatingGenerator]:
    """Run an executor process; it tells completion itself, as its task does through Celery."""

    def ring(workflow_ids: object) -> None:
        for workflow_id in workflow_ids:  # type: ignore[attr-defined]
            completion.check(workflow_id)

    made = RatingGenerator(
        boot_id=boot(plugins={"oip_score": "1"}),
        directory=directory,
        utc_now=lambda: datetime.now(UTC),
        ring_completion=ring,
    )
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def dispatcher() -> Queue:
    builders.version(
        builders.rater(autorater="oip_score", max_attempts=4, score_max=4.0), model_version="1"
    )
    return queue(Replica(version="1"))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_PAUSE_S", 0.001)


def rate(dispatcher: Queue, executor: RatingGenerator) -> None:
    dispatcher.wake_and_run()
    for message in dispatcher.take_sent():
        executor.rate(message.batches, task_id=uuid.uuid4())


def play(
    dispatcher: Queue, directory: Directory, tally: Path, points: FailPoints, tag: str
) -> None:
    """Rate a workflow of two batches under fail points, recover, and look at all there is."""
    names = [f"{tag} {number}" for number in range(ROWS)]
    boot(plugins={"oip_score": "1"})
    workflow = submit(names, batch_size=4)
    dispatcher.wake_and_run()
    (message,) = dispatcher.take_sent()
    with looker() as look:
        with generator(directory) as executor:
            with watched(points):
                executor.rate(message.batches, task_id=uuid.uuid4())
            lost = laws.in_flight_items(look) if points.dead else 0
        assert laws.broken(look, laws.ALWAYS) == []
        with generator(directory) as executor:
            for _ in range(3):
                leases.expire(now=database_now() + timedelta(hours=1), trust_heartbeats=False)
                rate(dispatcher, executor)
                check_all()
        assert laws.broken(look, {**laws.ALWAYS, **laws.AT_REST}) == []
    assert finished(workflow) == "COMPLETED"
    predictions = read_tally(tally).predictions
    again = sum(predictions[pair_of(name, name)] - 1 for name in names)
    assert 0 <= again <= lost
    _end_other_sessions()


def _end_other_sessions() -> None:
    """Sessions of the threads that a dead executor leaves behind."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def strike(dispatcher: Queue, tmp_path: Path, how: How, most: int | None) -> None:
    tally = tmp_path / "tally"
    with connection.cursor() as cursor:
        laws.remember_moves(cursor.execute)
    try:
        with instant_oip(tally=tally) as url:
            directory = Directory(endpoints={"r1": Endpoint(url=url)})
            dry = FailPoints(how=how)
            play(dispatcher, directory, tally, dry, "dry")
            every = range(len(dry.passed))
            chosen = random.Random(SEED).sample(every, most) if most else every
            for at in chosen:
                try:
                    play(dispatcher, directory, tally, FailPoints(at=at, how=how), f"{how} {at}")
                except BaseException as error:
                    error.add_note(f"it {how} at boundary {at}: {dry.passed[at]}")
                    raise
        assert not Workflow.objects.filter(finished_at=None).exists()
    finally:
        connection.close()
        with connection.cursor() as cursor:
            laws.forget_moves(cursor.execute)


@pytest.mark.parametrize("how", ["dies", "breaks"])
def test_a_few_boundaries_of_an_executor(dispatcher: Queue, tmp_path: Path, how: How) -> None:
    strike(dispatcher, tmp_path, how, SAMPLE)


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["dies", "breaks"])
def test_every_boundary_of_an_executor(dispatcher: Queue, tmp_path: Path, how: How) -> None:
    strike(dispatcher, tmp_path, how, None)
