"""The queue over time: a sample each half minute, a rater and class, kept for a month.

Sampling is a recovery service: beat or the dispatcher runs it, twice is once too often and harmless
(what ended is counted by whoever marks it sampled, in one transaction with the sample).
"""

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection, transaction

from fulfillment import board
from fulfillment.board import Depth
from fulfillment.models import Flow, QueueSample, ServiceRun
from fulfillment.policy.priority import PriorityClass, priority_class

SERVICE = "queue"
PERIOD = timedelta(seconds=30)
FLOWS = timedelta(minutes=5)
"""How long what ended is kept by workflow, for the pace of each."""
MOST_POINTS = 1_000
_CHUNK = 5_000

Key = tuple[str, PriorityClass]


@dataclass(kw_only=True, slots=True)
class _Ended:
    """What ended of a rater and class since the last sample."""

    ended: int = 0
    worked: int = 0
    model_calls: int = 0
    accelerator_seconds: float = 0.0
    device_seconds: float = 0.0


def run_once(now: datetime) -> int:
    """Sample the queue and erase what is old; return how many rows were written and erased."""
    return _sample(now) + _erase(now)


def _sample(now: datetime) -> int:
    depths = {(d.rater_id, d.priority_class): d for d in board.depths(board.standings(now), now)}
    with transaction.atomic():
        before = _last_run(now)
        ended = _take_flows()
        # One more after the last, so that a series ends at zero and not in the air.
        for key in {*ended, *_sampled_at(before)} - depths.keys():
            depths[key] = Depth(rater_id=key[0], priority_class=key[1])
        QueueSample.objects.bulk_create(
            [
                QueueSample(
                    at=now,
                    period_s=max(0.0, (now - before).total_seconds()),
                    **asdict(depth),
                    **asdict(ended.get(key, _Ended())),
                )
                for key, depth in depths.items()
            ],
            ignore_conflicts=True,
        )
    return len(depths)


def _last_run(now: datetime) -> datetime:
    """Return since when flows are counted: a run that died after its sample left no other mark."""
    ran_at = ServiceRun.objects.filter(pk=SERVICE).values_list("ran_at", flat=True).first()
    sampled_at = QueueSample.objects.order_by("-pk").values_list("at", flat=True).first()
    before = [at for at in (ran_at, sampled_at) if at is not None and at < now]
    return max(before, default=now - PERIOD)


def _sampled_at(at: datetime) -> list[Key]:
    """Return the series that were not empty in the sample of that run."""
    found = QueueSample.objects.filter(at=at, open_requests__gt=0)
    return [(r, PriorityClass(c)) for r, c in found.values_list("rater_id", "priority_class")]


def _take_flows() -> dict[Key, _Ended]:
    ended: dict[Key, _Ended] = {}
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH taken AS (
                UPDATE fulfillment_flow SET sampled = true WHERE NOT sampled RETURNING *
            )
            SELECT w.rater_id, w.priority, w.best_effort, sum(t.ended), sum(t.worked),
                   sum(t.model_calls), sum(t.accelerator_seconds), sum(t.device_seconds)
            FROM taken t JOIN fulfillment_workflow w ON w.id = t.workflow_id GROUP BY 1, 2, 3
            """
        )
        for (
            rater_id,
            priority,
            best_effort,
            count,
            worked,
            calls,
            seconds,
            device_s,
        ) in cursor.fetchall():
            key = rater_id, priority_class(priority, best_effort=best_effort)
            of = ended.setdefault(key, _Ended())
            of.ended += int(count)
            of.worked += int(worked)
            of.model_calls += int(calls)
            of.accelerator_seconds += float(seconds)
            of.device_seconds += float(device_s)
    return ended


def _erase(now: datetime) -> int:
    """Erase a chunk of what is old: more than a run adds."""
    flows = Flow.objects.filter(sampled=True, at__lt=now - FLOWS).delete()[0]
    old = QueueSample.objects.filter(at__lt=now - settings.AIRS_KEEP_QUEUE_SAMPLES)
    ids = list(old.order_by("pk").values_list("pk", flat=True)[:_CHUNK])
    return flows + QueueSample.objects.filter(pk__in=ids).delete()[0]


def read(
    *, rater_id: str | None, since: datetime, until: datetime, step: timedelta
) -> list[dict[str, Any]]:
    """Return the samples of a span by rater, class and step, in the order of time.

    Depths are means of the samples of a step and their highest; ages the highest; rates go over
    the whole step. A step without any work has no entry.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT date_bin(make_interval(secs => %(step_s)s), at, %(since)s) AS bin,
                   rater_id, priority_class,
                   avg(ready)::float8, avg(leased)::float8, avg(delayed)::float8,
                   avg(waiting)::float8, avg(open_requests)::float8, max(open_requests),
                   avg(paused_requests)::float8, max(oldest_s), max(age_p50_s), max(age_p90_s),
                   max(age_p99_s), sum(ended)::float8, sum(worked)::float8,
                   sum(model_calls)::float8, sum(device_seconds)
            FROM fulfillment_queuesample
            WHERE at >= %(since)s AND at < %(until)s
              AND (%(rater)s::text IS NULL OR rater_id = %(rater)s)
            GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
            """,
            {"step_s": step.total_seconds(), "since": since, "until": until, "rater": rater_id},
        )
        return [_point(row, until, step) for row in cursor.fetchall()]


def _point(row: tuple[Any, ...], until: datetime, step: timedelta) -> dict[str, Any]:
    at, rater_id, cls, *values = row
    depth = ("ready", "leased", "delayed", "waiting", "open_requests")
    ages = ("oldest_s", "age_p50_s", "age_p90_s", "age_p99_s")
    seconds = max(1.0, min(step, until - at).total_seconds())
    return {
        "at": at,
        "rater": rater_id,
        "priority_class": PriorityClass(cls).name.lower(),
        **{name: round(value, 1) for name, value in zip(depth, values[:5], strict=True)},
        "most_open_requests": values[5],
        "paused_requests": round(values[6], 1),
        **dict(zip(ages, values[7:11], strict=True)),
        "ended_per_s": round(values[11] / seconds, 3),
        "worked_per_s": round(values[12] / seconds, 3),
        "model_calls_per_s": round(values[13] / seconds, 3),
        "accelerator_seconds": round(values[14], 3),
    }
