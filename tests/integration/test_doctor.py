"""`manage.py doctor`: each thing that can be wrong is made so, and found with its remedy."""

import io
import json
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection
from pytest_django import Settings

from airs_site.doctor import broker, database, host
from airs_site.doctor.examination import examine
from fulfillment import backlog, doctor, recovery
from fulfillment.clock import database_now
from fulfillment.doctor import Finding, Level
from fulfillment.models import (
    BatchWait,
    Event,
    ExecutorBoot,
    Flight,
    Rater,
    ServiceRun,
    StatsDelta,
    WorkflowStats,
)
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from tests import builders
from tests.rating_queue import Fleet, Replica, threads

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _plugins(settings: Settings) -> None:
    builders.use_plugins(settings)


def here() -> datetime:
    return datetime.now(UTC)


def told(findings: Iterable[Finding]) -> list[tuple[str, str, Level]]:
    """Return what is not OK; it must come with a remedy."""
    wrong = [finding for finding in findings if finding.level is not Level.OK]
    assert all(finding.remedy for finding in wrong)
    return [(finding.check, finding.detail, finding.level) for finding in wrong]


def the_one(findings: Iterable[Finding]) -> tuple[str, Level]:
    """Return detail and level of the one finding that is not OK."""
    ((_, detail, level),) = told(findings)
    return detail, level


def boot(now: datetime, **changes: Any) -> None:
    fields = {"slots": 8, "started_at": now, "heartbeat_at": now, "plugins": {"stub": "1"}}
    ExecutorBoot.objects.create(boot_id=uuid.uuid4(), host="h", pid=1, **fields | changes)


# This host


def test_python_and_packages_of_this_very_installation_are_well() -> None:
    assert told([*host.python(), *host.packages()]) == []


def test_an_old_python_is_found() -> None:
    assert the_one(host.python((3, 10, 4))) == ("3.10.4", Level.FAIL)


def test_missing_packages_and_wrong_versions_are_named(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(
        "# comment\nDjango>=99  # too new\nno-such-package~=1.0\nredis\n"
        "other-system; sys_platform == 'nowhere'\n"
    )

    detail, level = the_one(host.packages(requirements))

    assert level is Level.FAIL
    assert detail.startswith("Django is ")
    assert detail.endswith("; no-such-package is missing")


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("free_gib", "level"), [(0.5, Level.FAIL), (5, Level.WARN), (20, Level.OK)]
)
def test_disks_that_are_nearly_full_are_found(
    free_gib: float, level: Level, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AIRS_DATA_DIRECTORY = None
    usage = Disk(total=100 << 30, used=0, free=int(free_gib * (1 << 30)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    (finding,) = host.disks()

    assert finding.level is level


def test_files_with_secrets_that_others_can_read_are_found(
    settings: Settings, tmp_path: Path
) -> None:
    settings.AIRS_HOME = tmp_path
    file = tmp_path / "credentials.json"
    file.write_text("{}")
    file.chmod(0o600)
    assert told(host.secret_files()) == []

    file.chmod(0o640)

    detail, level = the_one(host.secret_files())
    assert (detail, level) == (f"{file} has mode 0640", Level.FAIL)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


# PostgreSQL


def test_the_embedded_server_is_well() -> None:
    found = [
        *database.version(),
        *database.server_settings(),
        *database.migrations(),
        *database.clock(here),
        *database.transactions(),
    ]

    assert told(found) == []


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("synchronous_commit", "off", Level.FAIL),
        ("work_mem", "1MB", Level.WARN),
        ("jit", "on", Level.WARN),
        ("idle_in_transaction_session_timeout", "0", Level.WARN),
    ],
)
def test_settings_that_cost_safety_or_speed_are_found(name: str, value: str, level: Level) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL {name} = '{value}'")

    detail, found = the_one(database.server_settings())

    assert detail.startswith(f"{name} = ")
    assert found is level


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fsync", "off"),
        ("full_page_writes", "off"),
        ("autovacuum", "off"),
        ("autovacuum_naptime", "60"),
        ("checkpoint_timeout", "300"),
        ("max_wal_size", "1024"),
        ("wal_compression", "lz4"),
        ("shared_buffers", "16384"),
    ],
)
def test_settings_that_need_a_restart_are_judged_by_what_postgres_says(
    name: str, value: str
) -> None:
    assert not database._SETTINGS[name].is_right(value)


def test_a_migration_that_is_not_applied_is_found() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = 'sessions'")

    detail, level = the_one(database.migrations())

    assert (detail, level) == ("1 not applied: sessions.0001_initial", Level.FAIL)


@pytest.mark.parametrize(
    ("skew", "level"), [(4 * SECOND, Level.OK), (-6 * SECOND, Level.WARN), (HOUR, Level.FAIL)]
)
def test_clocks_that_differ_are_found(skew: timedelta, level: Level) -> None:
    (found,) = database.clock(lambda: here() + skew)

    assert found.level is level


def test_too_few_connections_are_found(settings: Settings) -> None:
    assert told(database.connections()) == []
    settings.AIRS_EXECUTOR_CONCURRENCY = 1_000

    detail, level = the_one(database.connections())

    needed = database._WEB + database._CONTROL + database._OTHERS + 1_000
    assert f"{needed} may be needed" in detail
    assert level is Level.WARN


def test_tables_that_vacuum_does_not_keep_up_with_are_found() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE bloated (n int)")
        cursor.execute("INSERT INTO bloated SELECT generate_series(1, 150000)")
        cursor.execute("DELETE FROM bloated")
        # What a session counted is told to others, and seen by it, at the end of its transaction.
        cursor.execute("SELECT pg_stat_get_xact_tuples_deleted('bloated'::regclass)")
        assert cursor.fetchone() == (150_000,)

    bloated = ("bloated", 8_192, 10, 150_000, None)
    assert "bloated has 150000 dead rows" in the_one(database.judge_tables([bloated]))[0]
    assert told(database.judge_tables([("small", 8_192, 10, 50_000, None)])) == []
    assert told(database.tables()) == []


@pytest.mark.django_db(transaction=True)
def test_long_transactions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_LONG_S", -1)

    with threads(1) as pool, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
        found = pool.submit(lambda: list(database.transactions())).result(10)
        cursor.execute("ROLLBACK")

    assert any(f"pid {pid}, idle in transaction" in finding.detail for finding in found)


# The broker


INFO = {
    "redis_version": "7.2.4",
    "valkey_version": "8.1.0",
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "used_memory": 1 << 20,
    "maxmemory": 512 << 20,
}


def test_the_embedded_broker_is_well() -> None:
    assert told(broker.server(here)) == []


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({"redis_version": "5.0.1"}, "broker", Level.FAIL),
        ({"maxmemory_policy": "allkeys-lru"}, "broker eviction", Level.FAIL),
        ({"aof_enabled": 0}, "broker persistence", Level.WARN),
        ({"used_memory": 500 << 20}, "broker memory", Level.WARN),
    ],
)
def test_a_broker_that_may_lose_messages_is_found(
    changes: dict[str, Any], check: str, level: Level
) -> None:
    assert told(broker.judge(INFO)) == []

    ((found, _, found_level),) = told(broker.judge(INFO | changes))

    assert (found, found_level) == (check, level)


def test_workers_that_nobody_started_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_LISTENERS_S", 0.1)

    found = told(broker.listeners())

    assert [detail.split(":")[0] for _, detail, _ in found] == [
        "none takes from the queue control",
        "none takes from the queue ratings",
    ]


def test_workers_are_told_by_the_queues_they_take_from() -> None:
    answers = {"a@h": [{"name": "control"}], "b@h": [{"name": "ratings"}]}

    assert told(broker.judge_listeners(answers)) == []
    assert len(told(broker.judge_listeners({"a@h": [{"name": "control"}]}))) == 1


# Services


def all_run(now: datetime) -> None:
    for name in ("dispatcher", "beat", *recovery.SERVICES):
        recovery.mark(name, now)


def test_services_that_run_are_well() -> None:
    now = database_now()
    all_run(now)

    assert told(doctor.services(now)) == []


@pytest.mark.parametrize("name", ["dispatcher", "beat"])
@pytest.mark.parametrize(("age", "detail"), [(31 * SECOND, "ran 31 s ago"), (None, "never ran")])
def test_what_stands_still_is_found(name: str, age: timedelta | None, detail: str) -> None:
    now = database_now()
    all_run(now)
    if age is None:
        ServiceRun.objects.filter(name=name).delete()
    else:
        recovery.mark(name, now - age)

    assert told(doctor.services(now)) == [(name, detail, Level.FAIL)]


@pytest.mark.parametrize(("name", "level"), [("completion", Level.FAIL), ("retention", Level.WARN)])
def test_late_services_are_named(name: str, level: Level) -> None:
    now = database_now()
    all_run(now)
    recovery.mark(name, now - HOUR)

    assert told(doctor.services(now)) == [("services", f"late: {name}", level)]


def test_a_dispatcher_without_stand_by_is_found() -> None:
    now = database_now()
    assert the_one(doctor.dispatchers(now)) == ("none is connected", Level.FAIL)

    with connection.cursor() as cursor:
        cursor.execute("SET application_name = 'airs-dispatch-1'")
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        assert the_one(doctor.dispatchers(now)) == ("one, none stands by", Level.WARN)
        cursor.execute("RESET application_name")


def test_executors_that_are_gone_are_found() -> None:
    now = database_now()
    boot(now - 16 * SECOND)

    assert the_one(doctor.executors(now)) == ("none lives", Level.FAIL)

    boot(now)
    assert told(doctor.executors(now)) == []


def test_batches_that_never_come_back_are_found() -> None:
    now = database_now()
    boot(now)
    builders.batch(
        builders.workflow(), [0], state=BatchState.LEASED, started_at=now - HOUR - SECOND
    )

    detail, level = the_one(doctor.executors(now))

    assert "1 batches are computed for over an hour" in detail
    assert level is Level.WARN


# The queue


@pytest.mark.parametrize(("size", "level"), [(80, Level.OK), (81, Level.WARN), (101, Level.FAIL)])
def test_a_backlog_near_its_limit_is_found(size: int, level: Level, settings: Settings) -> None:
    settings.AIRS_MAX_BACKLOG_BYTES = 100
    WorkflowStats.objects.filter(pk=builders.workflow().pk).update(stored_bytes=size)

    finding, _ = doctor.queue(database_now())

    assert (finding.level, backlog.stored_bytes()) == (level, size)


def test_progress_that_nobody_folds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MOST_DELTAS", 1)
    workflow = builders.workflow()
    StatsDelta.objects.bulk_create(StatsDelta(workflow=workflow) for _ in range(2))

    assert the_one(doctor.queue(database_now())) == ("2 deltas are not folded", Level.WARN)


def _flight(now: datetime) -> None:
    Flight.objects.create(fingerprint=uuid.uuid4(), batch_id=1, fence=1)


def _lease(now: datetime) -> None:
    builders.batch(builders.workflow(), [0], state=BatchState.LEASED, lease_until=now - 11 * SECOND)


def _retry(now: datetime) -> None:
    builders.batch(builders.workflow(), [0], state=BatchState.DELAYED, not_before=now - 11 * SECOND)


def _waiting(now: datetime) -> None:
    batch = builders.batch(builders.workflow(), [0], state=BatchState.WAITING)
    BatchWait.objects.create(batch_id=batch.pk, fingerprint=uuid.uuid4())


def _receiving(now: datetime) -> None:
    builders.workflow(state=WorkflowState.RECEIVING, closed_at=None, created_at=now - HOUR)


def _nothing_open(now: datetime) -> None:
    builders.workflow(closed_at=now - HOUR)


def _event(now: datetime) -> None:
    workflow = builders.workflow(state=WorkflowState.COMPLETED)
    Event.objects.create(workflow=workflow, round=1, kind="x", data={}, created_at=now - HOUR)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_flight, "flights without a lease"),
        (_lease, "leases past due"),
        (_retry, "retries past due"),
        (_waiting, "batches that wait for nothing"),
        (_receiving, "uploads that nobody goes on with"),
        (_nothing_open, "workflows with nothing open that do not end"),
        (_event, "events that are not passed on"),
    ],
)
def test_what_nobody_moves_on_is_found(make: Callable[[datetime], None], what: str) -> None:
    now = database_now()
    assert told(doctor.orphans(doctor.suspects(now), doctor.suspects(now), now)) == []
    make(now)

    seen = doctor.suspects(now)

    assert told(doctor.orphans(seen, seen, now)) == [("orphans", f"1 {what}", Level.FAIL)]


def test_what_moves_on_between_two_looks_is_no_orphan() -> None:
    now = database_now()
    _flight(now)
    first = doctor.suspects(now)
    Flight.objects.all().delete()
    _flight(now)

    assert told(doctor.orphans(first, doctor.suspects(now), now)) == []


# Raters


FLEET = Fleet()


@pytest.fixture
def fleet(settings: Settings) -> Iterator[Fleet]:
    """Let models be served by one replica."""
    settings.AIRS_MODEL_DIRECTORY = f"{__name__}.FLEET"
    FLEET.live = [Replica()]
    yield FLEET
    FLEET.live = []


def test_raters_that_can_rate_are_well(fleet: Fleet) -> None:
    now = database_now()
    builders.version()
    boot(now)

    assert told(doctor.raters(now)) == []


def test_a_paused_rater_is_found_with_its_reason(fleet: Fleet) -> None:
    now = database_now()
    builders.version()
    boot(now)
    Rater.objects.update(paused_at=now, paused_code="unauthorized", paused_detail="401 from model")

    assert the_one(doctor.raters(now)) == ("paused: unauthorized 401 from model", Level.WARN)


@pytest.mark.parametrize(("is_needed", "level"), [(False, Level.WARN), (True, Level.FAIL)])
def test_a_version_whose_plugin_no_executor_has_is_found(
    fleet: Fleet, is_needed: bool, level: Level
) -> None:
    now = database_now()
    version = builders.version()
    if is_needed:
        builders.workflow(version)
    boot(now, plugins={"stub": "2"})

    assert the_one(doctor.raters(now)) == ("no living executor has stub 1", level)


@pytest.mark.parametrize(("is_needed", "level"), [(False, Level.WARN), (True, Level.FAIL)])
def test_a_rater_whose_model_has_no_replica_is_found(
    fleet: Fleet, is_needed: bool, level: Level
) -> None:
    now = database_now()
    version = builders.version()
    if is_needed:
        builders.workflow(version)
    boot(now)
    fleet.live = []

    assert the_one(doctor.raters(now)) == ("model stub-model has no live replica", level)


def test_a_model_that_has_no_replica_for_want_of_work_is_well(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prospective(Fleet):
        def reachable(self, *asked: Any) -> float:
            return 0.5

    now = database_now()
    builders.workflow(builders.version())
    boot(now)
    monkeypatch.setattr(doctor, "model_directory", Prospective)

    assert told(doctor.raters(now)) == []


# The examination and the command


def test_a_database_that_is_away_is_one_finding_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker, "_LISTENERS_S", 0.1)

    def away() -> Any:
        raise OperationalError("connection refused\nsecond line")
        yield

    monkeypatch.setattr(database, "version", away)

    found = list(examine(here=here, wait=lambda _: None))

    assert found[-1].check == "postgres"
    assert found[-1].detail == "OperationalError: connection refused"
    assert "DATABASE_URL" in found[-1].remedy


def test_a_broker_that_is_away_does_not_keep_the_rest_from_being_examined(
    settings: Settings,
) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"

    found = {finding.check: finding for finding in examine(here=here, wait=lambda _: None)}

    assert found["broker"].level is Level.FAIL
    assert found["migrations"].level is Level.OK


@pytest.mark.django_db(transaction=True)
def test_a_check_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_LISTENERS_S", 0.1)

    def broken() -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")
        yield

    monkeypatch.setattr(database, "tables", broken)

    found = {finding.check: finding for finding in examine(here=here, wait=lambda _: None)}

    assert found["tables"].level is Level.FAIL
    assert "no_such_table" in found["tables"].detail
    assert found["transactions"].level is Level.OK


def finding(level: Level) -> Finding:
    return Finding(check="thing", level=level, detail="as it is", remedy="mend it")


@pytest.mark.parametrize("worst", list(Level))
def test_the_command_prints_a_line_a_check_and_ends_with_the_worst(
    worst: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "airs_site.management.commands.doctor.examine"
    monkeypatch.setattr(command, lambda **_: iter([finding(Level.OK), finding(worst)]))

    for output in ("text", "json"):
        out = io.StringIO()
        try:
            call_command("doctor", output=output, stdout=out, no_color=True)
            code = 0
        except SystemExit as error:
            code = int(str(error.code))
        assert code == (worst is Level.FAIL)
        if output == "json":
            answer = json.loads(out.getvalue())
            assert answer["worst"] == worst
            assert answer["findings"][1] == {
                "check": "thing", "level": worst, "detail": "as it is", "remedy": "mend it",
            }  # fmt: skip
        else:
            assert f"{worst:<4}  thing" in out.getvalue()
            assert "→ mend it" in out.getvalue()
