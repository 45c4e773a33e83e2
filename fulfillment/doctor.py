"""What may be wrong with the queue and those who work on it, as findings with a remedy.

Each check asks a few questions that have an index, at one instant. What stands still may do so for
a moment only: `suspects` is asked twice, some seconds apart, and what both times say counts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from django.conf import settings
from django.db import connection

from fulfillment import backlog, leases, recovery
from fulfillment.control import UPLOAD_SILENCE
from fulfillment.model_directory import Prospect, model_directory
from fulfillment.models import ExecutorBoot, Rater, RaterVersion, ServiceRun, Workflow

STANDS_STILL = timedelta(seconds=30)
"""Dispatcher and beat are taken for dead when they last ran longer ago."""
LOOK_AGAIN = timedelta(seconds=6)
"""Longer than the period of anything that ends what `suspects` finds."""
_LATE = timedelta(seconds=10)
_DELIVERY_LATE = timedelta(minutes=2)
_STUCK = timedelta(hours=1)
_MOST_DELTAS = 100_000


class Level(StrEnum):
    """How bad it is."""

    OK = "OK"
    WARN = "WARN"
    """Works, but not as well or as safely as it could."""
    FAIL = "FAIL"
    """Work stands still, or may be lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one check; `remedy` is empty where nothing is to be done."""

    check: str
    level: Level
    detail: str
    remedy: str = ""


def services(now: datetime) -> Iterator[Finding]:
    """Say whether dispatcher, beat and the services they run have run lately."""
    ran = dict(ServiceRun.objects.values_list("name", "ran_at"))
    for name, remedy in (
        ("dispatcher", "start `manage.py dispatch`; without it nothing is sent"),
        ("beat", "start `celery -A airs_site.celery beat` and a worker of the queue `control`"),
    ):
        yield _by_age(name, ran.get(name), now, STANDS_STILL, remedy)
    if late := recovery.late(now):
        yield Finding(
            check="services",
            level=Level.FAIL if "completion" in late else Level.WARN,
            detail=f"late: {', '.join(late)}",
            remedy="see the log of the control worker for what they fail of",
        )
    else:
        yield Finding(check="services", level=Level.OK, detail=", ".join(recovery.SERVICES))


def _by_age(
    check: str, at: datetime | None, now: datetime, limit: timedelta, remedy: str
) -> Finding:
    if at is None:
        return Finding(check=check, level=Level.FAIL, detail="never ran", remedy=remedy)
    age = max(now - at, timedelta())
    detail = f"ran {age.total_seconds():.0f} s ago"
    if age > limit:
        return Finding(check=check, level=Level.FAIL, detail=detail, remedy=remedy)
    return Finding(check=check, level=Level.OK, detail=detail)


def dispatchers(now: datetime) -> Iterator[Finding]:
    """Say whether one leads and another one stands by."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'airs-dispatch-%%'"
            " AND datname = current_database()"
        )
        (there,) = cursor.fetchone()
    if there >= 2:
        yield Finding(check="dispatchers", level=Level.OK, detail=f"{there}, one of them leads")
    else:
        yield Finding(
            check="dispatchers",
            level=Level.WARN if there else Level.FAIL,
            detail="one, none stands by" if there else "none is connected",
            remedy="start another `manage.py dispatch`; it takes over within a second",
        )


def executors(now: datetime) -> Iterator[Finding]:
    """Say whether executors live, and whether their batches come back."""
    living = ExecutorBoot.objects.filter(heartbeat_at__gt=now - leases.SILENCE)
    slots = sum(living.values_list("slots", flat=True))
    if not slots:
        yield Finding(
            check="executors",
            level=Level.FAIL,
            detail="none lives",
            remedy="start `celery -A airs_site.celery worker -Q ratings -P threads`",
        )
        return
    stuck = _count(
        "SELECT count(*) FROM fulfillment_batch WHERE state = 1 AND started_at < %s", now - _STUCK
    )
    detail = f"{living.count()} with {slots} slots"
    if stuck:
        yield Finding(
            check="executors",
            level=Level.WARN,
            detail=f"{detail}; {stuck} batches are computed for over an hour",
            remedy="look at the executor's log and at the model; restart what hangs: leases end",
        )
    else:
        yield Finding(check="executors", level=Level.OK, detail=detail)


def queue(now: datetime) -> Iterator[Finding]:
    """Say how full the backlog is, and whether progress is folded."""
    size, limit = backlog.stored_bytes(), settings.AIRS_MAX_BACKLOG_BYTES
    detail = f"{size} bytes of {limit}"
    if size > 0.8 * limit:
        yield Finding(
            check="backlog",
            level=Level.FAIL if size > limit else Level.WARN,
            detail=detail,
            remedy="uploads get 507 above it: add model replicas, or raise AIRS_MAX_BACKLOG_BYTES",
        )
    else:
        yield Finding(check="backlog", level=Level.OK, detail=detail)
    deltas = _count("SELECT count(*) FROM fulfillment_statsdelta")
    if deltas > _MOST_DELTAS:
        yield Finding(
            check="progress",
            level=Level.WARN,
            detail=f"{deltas} deltas are not folded",
            remedy="the completion checker does not run or fails: see the control worker's log",
        )
    else:
        yield Finding(check="progress", level=Level.OK, detail=f"{deltas} deltas wait to be folded")


def raters(now: datetime) -> Iterator[Finding]:
    """Say which raters cannot rate: paused, without their plug-in, or without a model."""
    well = True
    for rater in Rater.objects.filter(paused_at__isnull=False).order_by("pk"):
        well = False
        yield Finding(
            check=f"rater {rater.pk}",
            level=Level.WARN,
            detail=f"paused: {rater.paused_code} {rater.paused_detail}".strip(),
            remedy="mend its model, then resume the rater in the admin",
        )
    plugins = _living_plugins(now)
    directory = model_directory()
    served = {replica.model_id for replica in directory.replicas(now)}
    for version, is_needed in _versions_in_use():
        level = Level.FAIL if is_needed else Level.WARN
        spec = version.spec
        if spec["plugin_version"] not in plugins[spec["autorater"]]:
            well = False
            yield Finding(
                check=f"rater {version}",
                level=level,
                detail=f"no living executor has {spec['autorater']} {spec['plugin_version']}",
                remedy="install that version of the plug-in where executors run, or retire the"
                " rater version",
            )
        model = spec["model_id"], spec["model_version"]
        # One that has none for want of work gets one when there is some.
        is_coming = isinstance(directory, Prospect) and directory.reachable(*model, now) > 0
        if spec["model_id"] not in served and not is_coming:
            well = False
            yield Finding(
                check=f"rater {version}",
                level=level,
                detail=f"model {spec['model_id']} has no live replica",
                remedy="start the model, or see why its replicas are not READY in the admin",
            )
    if well:
        yield Finding(check="raters", level=Level.OK, detail="all can rate")


def _living_plugins(now: datetime) -> Mapping[str, set[str]]:
    plugins: dict[str, set[str]] = defaultdict(set)
    living = ExecutorBoot.objects.filter(heartbeat_at__gt=now - leases.SILENCE)
    for names in living.values_list("plugins", flat=True):
        for name, version in names.items():
            plugins[name].add(version)
    return plugins


def _versions_in_use() -> Iterator[tuple[RaterVersion, bool]]:
    """Yield versions that unfinished workflows need, and current ones that none needs now."""
    needed = set(
        Workflow.objects.filter(finished_at=None)
        .order_by()
        .values_list("rater_version_id", flat=True)
        .distinct()
    )
    current = set(
        Rater.objects.filter(current_version__isnull=False).values_list(
            "current_version_id", flat=True
        )
    )
    for version in RaterVersion.objects.filter(
        pk__in=needed | current, retired_at__isnull=True
    ).order_by("rater_id", "number"):
        yield version, version.pk in needed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Suspect:
    """Rows that nobody seems to move on: `rows` selects their keys."""

    what: str
    rows: str
    values: tuple[datetime, ...] = ()
    remedy: str


def _suspects(now: datetime) -> Iterator[_Suspect]:
    dispatcher = "the dispatcher ends them each second: is one leading? See its log"
    yield _Suspect(
        what="flights without a lease",
        rows="""
            SELECT f.fingerprint::text FROM fulfillment_flight f WHERE NOT EXISTS (
                SELECT FROM fulfillment_batch b
                WHERE b.id = f.batch_id AND b.fence = f.fence AND b.state = 1)
        """,
        remedy=dispatcher,
    )
    yield _Suspect(
        what="leases past due",
        rows="SELECT id FROM fulfillment_batch WHERE state = 1 AND lease_until < %s",
        values=(now - _LATE,),
        remedy=dispatcher,
    )
    yield _Suspect(
        what="retries past due",
        rows="SELECT id FROM fulfillment_batch WHERE state = 3 AND not_before < %s",
        values=(now - _LATE,),
        remedy=dispatcher,
    )
    yield _Suspect(
        what="batches that wait for nothing",
        rows="""
            SELECT b.id FROM fulfillment_batch b WHERE b.state = 2 AND NOT EXISTS (
                SELECT FROM fulfillment_batchwait w
                JOIN fulfillment_flight f ON f.fingerprint = w.fingerprint
                WHERE w.batch_id = b.id)
        """,
        remedy=dispatcher,
    )
    yield _Suspect(
        what="uploads that nobody goes on with",
        rows="""
            SELECT w.id FROM fulfillment_workflow w
            WHERE w.finished_at IS NULL AND w.state = 0 AND w.created_at < %s AND NOT EXISTS (
                SELECT FROM fulfillment_upload u WHERE u.workflow_id = w.id AND u.heartbeat_at > %s)
        """,
        # The janitor comes once a minute.
        values=(now - 3 * UPLOAD_SILENCE, now - 3 * UPLOAD_SILENCE),
        remedy="retention removes them each minute: see the control worker's log",
    )
    yield _Suspect(
        what="workflows with nothing open that do not end",
        rows="""
            SELECT w.id FROM fulfillment_workflow w
            WHERE w.finished_at IS NULL AND w.state IN (2, 3, 4) AND w.closed_at < %s AND (
                SELECT b.id FROM fulfillment_batch b
                WHERE b.workflow_id = w.id AND b.state <> 4 AND b.open_mask <> 0
                ORDER BY b.id LIMIT 1) IS NULL
        """,
        values=(now - _LATE,),
        remedy="the completion checker ends them every few seconds: see the control worker's log",
    )


def _suspects_outside(now: datetime) -> Iterator[_Suspect]:
    """Yield what the outside has not been told of."""
    yield _Suspect(
        what="events that are not passed on",
        rows="""
            SELECT id FROM fulfillment_event WHERE published_at IS NULL AND created_at < %s
        """,
        values=(now - STANDS_STILL,),
        remedy="the service `events` passes them on: see the control worker's log",
    )
    yield _Suspect(
        what="webhook deliveries past due",
        rows="""
            SELECT id FROM fulfillment_delivery
            WHERE state = 0 AND due_at < %s AND (lease_until IS NULL OR lease_until < %s)
        """,
        values=(now - _DELIVERY_LATE,) * 2,
        remedy="the service `deliveries` sends them: see the control worker's log",
    )


def suspects(now: datetime) -> dict[str, frozenset[object]]:
    """Return the keys of rows that nobody seems to move on, by what they are."""
    found = {}
    for suspect in (*_suspects(now), *_suspects_outside(now)):
        with connection.cursor() as cursor:
            cursor.execute(f"{suspect.rows} LIMIT 1000", suspect.values)
            found[suspect.what] = frozenset(row[0] for row in cursor.fetchall())
    return found


def orphans(
    first: Mapping[str, frozenset[object]], second: Mapping[str, frozenset[object]], now: datetime
) -> Iterator[Finding]:
    """Say what stood still at both looks."""
    remedies = {s.what: s.remedy for s in (*_suspects(now), *_suspects_outside(now))}
    still = {what: len(first[what] & second[what]) for what in remedies}
    if not any(still.values()):
        yield Finding(check="orphans", level=Level.OK, detail="none")
    for what, count in still.items():
        if count:
            yield Finding(
                check="orphans",
                level=Level.FAIL,
                detail=f"{count if count < 1000 else '1000 or more'} {what}",
                remedy=remedies[what],
            )


def _count(statement: str, *values: datetime) -> int:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        (count,) = cursor.fetchone()
    return int(count)
