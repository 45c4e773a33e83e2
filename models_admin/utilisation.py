"""How busy the replicas of hosted models were: sampled by their agent, read by the hour.

Busy is what a server says of its device: at least one of its lanes computed. A replica counts from
the start of its process, so that loading and warming up is time that it did not compute. The duty
cycle is busy seconds over seconds lived; where replicas are taken together, each counts as often as
it holds devices. Of external models nobody knows it. `duty_history` reads it over time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q, Sum

from models_admin.models import ModelConfig, ModelKind, ReplicaSample, UtilizationSample

PERIOD = timedelta(seconds=30)
_CHUNK = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What the replicas of a model did in an hour, or in what of it was sampled."""

    hour_at: datetime
    model_id: str
    busy_s: float
    replica_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run of a replica: started again, it has another key."""

    key: str
    model_id: str
    pool_id: str = ""
    ordinal: int = 0
    host: str = ""
    version: str = ""
    """"" until its server has said it."""
    devices: int = 1


@dataclass(kw_only=True, slots=True)
class _Sum:
    """What a run did since the last sample."""

    run: Run
    busy_s: float = 0.0
    lived_s: float = 0.0


class Sampler:
    """Adds up what an agent sees of its replicas, and stores it each PERIOD.

    An agent that dies takes its servers with it, so nothing is remembered beyond it; less than a
    period is lost.
    """

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._seen: dict[str, tuple[datetime, float]] = {}
        self._sums: dict[tuple[str, str, int], _Sum] = {}
        self._stored_at: datetime | None = None

    def note(self, run: Run, *, busy_s: float, now: datetime) -> None:
        """Take note of a living run of a replica; `busy_s` counts since its start."""
        seen_at, busy_before_s = self._seen.get(run.key, (now, 0.0))
        sums = self._sums.setdefault((run.key, run.pool_id, run.devices), _Sum(run=run))
        sums.run = run
        # The clock may have been set back.
        sums.lived_s += max(0.0, (now - seen_at).total_seconds())
        sums.busy_s += max(0.0, busy_s - busy_before_s)
        self._seen[run.key] = now, busy_s

    def store_if_due(self, now: datetime) -> int:
        """Store what was seen since the last sample, and erase old ones; return rows written.

        Rows are of models, each with those of its replicas. Should the database fail, a period is
        lost: its rows may be there all the same, and no time must count twice.
        """
        before = self._stored_at
        if before is None:
            self._stored_at = now
            return 0
        if timedelta(0) <= now - before < PERIOD:
            return 0
        sums = list(self._sums.values())
        living = {each.run.key for each in sums}
        self._seen = {key: seen for key, seen in self._seen.items() if key in living}
        self._sums, self._stored_at = {}, now
        of_models = self._of_models(sums, now)
        with transaction.atomic():
            UtilizationSample.objects.bulk_create(of_models)
            ReplicaSample.objects.bulk_create(self._of_replica(each, now) for each in sums)
        self._erase(now)
        return len(of_models)

    def _of_replica(self, each: _Sum, now: datetime) -> ReplicaSample:
        return ReplicaSample(
            at=now,
            agent=self._agent,
            model_id=each.run.model_id,
            pool_id=each.run.pool_id,
            ordinal=each.run.ordinal,
            host=each.run.host,
            version=each.run.version,
            devices=each.run.devices,
            busy_s=each.busy_s,
            lived_s=each.lived_s,
        )

    def _of_models(self, sums: Iterable[_Sum], now: datetime) -> list[UtilizationSample]:
        found: dict[tuple[str, str, int], UtilizationSample] = {}
        for each in sums:
            run = each.run
            sample = found.setdefault(
                (run.model_id, run.pool_id, run.devices),
                UtilizationSample(
                    at=now,
                    agent=self._agent,
                    model_id=run.model_id,
                    pool_id=run.pool_id,
                    devices=run.devices,
                    replicas=0,
                    busy_s=0.0,
                    replica_s=0.0,
                ),
            )
            sample.replicas += 1
            sample.busy_s += each.busy_s
            sample.replica_s += each.lived_s
        return list(found.values())

    def _erase(self, now: datetime) -> None:
        """Erase a chunk of what is old: more than a sample adds."""
        too_old = Q(at__lt=now - settings.AIRS_KEEP_QUEUE_SAMPLES, agent=self._agent)
        for samples in (UtilizationSample.objects, ReplicaSample.objects):
            old = samples.filter(too_old).order_by("at")
            if ids := list(old.values_list("pk", flat=True)[:_CHUNK]):
                samples.filter(pk__in=ids).delete()


def hours(since: datetime, until: datetime) -> list[Use]:
    """Return what was sampled in a span, by hour of the clock (UTC) and model."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT date_trunc('hour', at, 'UTC'), model_id, sum(busy_s), sum(replica_s)
            FROM models_admin_utilizationsample WHERE at > %s AND at <= %s
            GROUP BY 1, 2 ORDER BY 1, 2
            """,
            [since, until],
        )
        return [
            Use(hour_at=hour_at, model_id=model_id, busy_s=busy_s, replica_s=replica_s)
            for hour_at, model_id, busy_s, replica_s in cursor.fetchall()
        ]


def duty(
    spans: Sequence[timedelta], *, now: datetime, model_id: str = "", pool_id: str = ""
) -> list[float | None]:
    """Return the duty cycle of a model, or of a pool, in each span up to now.

    None where no replica lived, or nothing was sampled. Of servers that are asked each two seconds
    more may be told than there was, which counts as all of it.
    """
    of = {"model_id": model_id} if model_id else {"pool_id": pool_id}
    samples = UtilizationSample.objects.filter(at__gt=now - max(spans), at__lte=now, **of)
    sums = samples.aggregate(
        **{
            f"{name}_{number}": Sum(
                F(name) * F("devices"), filter=Q(at__gt=now - span), default=0.0
            )
            for number, span in enumerate(spans)
            for name in ("busy_s", "replica_s")
        }
    )
    return [
        min(sums[f"busy_s_{number}"] / lived, 1.0)
        if (lived := sums[f"replica_s_{number}"])
        else None
        for number in range(len(spans))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """How much a model computes at once by default."""

    hosted: bool
    count: int
    """Replicas of a hosted model; calls that an external server may hold."""


def slots() -> dict[str, Slots]:
    """Return the slots of each model."""
    rows = ModelConfig.objects.values_list("id", "kind", "replicas_default", "max_concurrency")
    return {
        model_id: Slots(
            hosted=kind == ModelKind.HOSTED,
            count=max(1, replicas if kind == ModelKind.HOSTED else calls),
        )
        for model_id, kind, replicas, calls in rows
    }
