"""PostgreSQL: version, settings, migrations, connections, tables, and what holds them up."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from airs_site.embedded import OLDEST_POSTGRES
from fulfillment.doctor import Finding, Level
from fulfillment.models import ExecutorBoot

_MIB = 1 << 20
SKEW_WARN_S, SKEW_FAIL_S = 5.0, 60.0
_LONG_S, _ENDLESS_S = 60, 600
_WEB, _CONTROL, _OTHERS = 32, 4, 8
"""Connections of the web server's threads, of the control worker's, and of all the rest."""


def version() -> Iterator[Finding]:
    """Say whether PostgreSQL answers and is new enough; raises what the database raises."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('server_version_num')::int")
        (number,) = cursor.fetchone()
    if number // 10_000 < OLDEST_POSTGRES:
        yield Finding(
            check="postgres",
            level=Level.FAIL,
            detail=f"version {number // 10_000}",
            remedy=f"upgrade it: AIRS needs PostgreSQL {OLDEST_POSTGRES} or later",
        )
    else:
        yield Finding(
            check="postgres",
            level=Level.OK,
            detail=f"version {number // 10_000}.{number % 10_000}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """A setting of the server, and why it should be so."""

    is_right: Callable[[str], bool]
    wanted: str
    why: str
    level: Level = Level.WARN


def _at_least(value: int, unit: int = 1) -> Callable[[str], bool]:
    return lambda text: int(text) * unit >= value


_LOSES = "a crash of the server may lose ratings that were acknowledged"
_SETTINGS: dict[str, _Wanted] = {
    "fsync": _Wanted(is_right="on".__eq__, wanted="on", why=_LOSES, level=Level.FAIL),
    "full_page_writes": _Wanted(is_right="on".__eq__, wanted="on", why=_LOSES, level=Level.FAIL),
    "synchronous_commit": _Wanted(
        is_right=lambda text: text not in {"off", "local"},
        wanted="on",
        why=_LOSES,
        level=Level.FAIL,
    ),
    "autovacuum": _Wanted(
        is_right="on".__eq__,
        wanted="on",
        why="batches and flights live for seconds: claims get slower by the minute without it",
        level=Level.FAIL,
    ),
    "autovacuum_naptime": _Wanted(
        is_right=lambda text: int(text) <= 15,
        wanted="10s",
        why="flights and progress rows live for seconds and fill their tables with dead ones",
    ),
    "checkpoint_timeout": _Wanted(
        is_right=_at_least(900),
        wanted="30min",
        why="just after a checkpoint a rating writes up to 6 kB of WAL: make them rare",
    ),
    "max_wal_size": _Wanted(
        is_right=_at_least(4 << 30, _MIB),
        wanted="8GB",
        why="a small one forces checkpoints before their time",
    ),
    "wal_compression": _Wanted(
        is_right="off".__eq__, wanted="off", why="payloads are compressed already"
    ),
    "shared_buffers": _Wanted(
        is_right=_at_least(256 * _MIB, 8192),
        wanted="256MB, or a quarter of the memory",
        why="indexes of the archive are read at random",
    ),
    "work_mem": _Wanted(
        is_right=_at_least(4 * _MIB, 1024), wanted="4MB", why="sorts would go to disk"
    ),
    "jit": _Wanted(
        is_right="off".__eq__,
        wanted="off (AIRS asks for it; a connection pooler may drop that)",
        why="compiling takes longer than any statement here",
    ),
    "idle_in_transaction_session_timeout": _Wanted(
        is_right=lambda text: 0 < int(text) <= 60_000,
        wanted="5s (AIRS asks for it; a connection pooler may drop that)",
        why="a process that stops inside a transaction must not keep its locks",
    ),
}


def server_settings() -> Iterator[Finding]:
    """Say which settings of the server cost safety or speed, as they hold on our connections."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, setting, current_setting(name) FROM pg_settings WHERE name = ANY(%s)",
            [list(_SETTINGS)],
        )
        rows = cursor.fetchall()
    wrong = False
    for name, setting, shown in rows:
        wanted = _SETTINGS[name]
        if not wanted.is_right(setting):
            wrong = True
            yield Finding(
                check="postgres settings",
                level=wanted.level,
                detail=f"{name} = {shown}: {wanted.why}",
                remedy=f"set {name} to {wanted.wanted} and reload or restart PostgreSQL",
            )
    if not wrong:
        yield Finding(check="postgres settings", level=Level.OK, detail="as they should be")


def migrations() -> Iterator[Finding]:
    """Say whether the tables are those of this code."""
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if plan:
        names = ", ".join(f"{m.app_label}.{m.name}" for m, _ in plan[:5])
        yield Finding(
            check="migrations",
            level=Level.FAIL,
            detail=f"{len(plan)} not applied: {names}",
            remedy="stop all processes, then manage.py migrate",
        )
    else:
        yield Finding(check="migrations", level=Level.OK, detail="all applied")


def clock(here: Callable[[], datetime]) -> Iterator[Finding]:
    """Compare this host's clock with PostgreSQL's, which decides."""
    before = here()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        (there,) = cursor.fetchone()
    yield by_skew("clock of PostgreSQL", before, there, here())


def by_skew(check: str, before: datetime, there: datetime, after: datetime) -> Finding:
    """Judge a clock that was read between two looks at ours."""
    skew_s = max((before - there).total_seconds(), (there - after).total_seconds(), 0.0)
    detail = f"{skew_s:.1f} s from this host's"
    level = Level.OK if skew_s < SKEW_WARN_S else Level.WARN
    return Finding(
        check=check,
        level=Level.FAIL if skew_s >= SKEW_FAIL_S else level,
        detail=detail,
        remedy="" if level is Level.OK else "run a time service (chrony, ntpd) on both",
    )


def connections() -> Iterator[Finding]:
    """Compare the connections there are, and those that may come, with max_connections."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
                   current_setting('max_connections')::int
                   - current_setting('superuser_reserved_connections')::int
            """
        )
        used, most = cursor.fetchone()
    threads = settings.AIRS_EXECUTOR_CONCURRENCY * max(1, ExecutorBoot.objects.count())
    needed = _WEB + _CONTROL + _OTHERS + threads
    detail = f"{used} of {most} in use, {needed} may be needed by one web server and the executors"
    if used > 0.9 * most:
        level = Level.FAIL
    elif used > 0.7 * most or needed > most:
        level = Level.WARN
    else:
        level = Level.OK
    yield Finding(
        check="connections",
        level=level,
        detail=detail,
        remedy="" if level is Level.OK else "raise max_connections, or run fewer threads",
    )


def tables() -> Iterator[Finding]:
    """Say how large the tables are, and which ones vacuum does not keep up with."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT relname, pg_total_relation_size(relid), n_live_tup, n_dead_tup,
                   greatest(last_autovacuum, last_vacuum)
            FROM pg_stat_user_tables ORDER BY 2 DESC
            """
        )
        yield from judge_tables(cursor.fetchall())


def judge_tables(rows: Sequence[tuple[str, int, int, int, Any]]) -> Iterator[Finding]:
    """Judge (name, bytes, live rows, dead rows, last vacuum) of tables, the largest first."""
    bloated = [row for row in rows if row[3] > 100_000 + 0.5 * row[2]]
    for name, _, live, dead, vacuumed in bloated:
        yield Finding(
            check="tables",
            level=Level.WARN,
            detail=f"{name} has {dead} dead rows beside {live}, vacuumed {vacuumed or 'never'}",
            remedy=f"VACUUM ANALYZE {name}; if it comes again, end long transactions and give"
            " autovacuum more workers",
        )
    if not bloated:
        largest = ", ".join(f"{row[0]} {row[1] / _MIB:.0f} MiB" for row in rows[:3])
        yield Finding(check="tables", level=Level.OK, detail=largest)


def transactions() -> Iterator[Finding]:
    """Say which transactions hold back vacuum: they slow claims down within seconds."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT format('%%s (pid %%s, %%s)', coalesce(nullif(application_name, ''), usename),
                          pid, state),
                   extract(epoch FROM clock_timestamp() - xact_start)
            FROM pg_stat_activity
            WHERE backend_type = 'client backend'
              AND xact_start < clock_timestamp() - make_interval(secs => %s)
            UNION ALL
            SELECT format('prepared transaction %%s', gid),
                   extract(epoch FROM clock_timestamp() - prepared)
            FROM pg_prepared_xacts
            WHERE prepared < clock_timestamp() - make_interval(secs => %s)
            """,
            [_LONG_S, _LONG_S],
        )
        rows: list[tuple[str, Any]] = cursor.fetchall()
    for who, age_s in rows:
        yield Finding(
            check="transactions",
            level=Level.FAIL if age_s > _ENDLESS_S else Level.WARN,
            detail=f"{who} is open for {age_s:.0f} s: vacuum cannot remove what it may see",
            remedy="end it (SELECT pg_terminate_backend(pid)); read in short pages",
        )
    if not rows:
        yield Finding(check="transactions", level=Level.OK, detail=f"none over {_LONG_S} s")
