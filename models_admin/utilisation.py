"""How busy the replicas of hosted models were: sampled by their agent, read by the hour.

Busy is what a server says of its device: at least one of its lanes computed. A replica counts from
the start of its process, so that loading and warming up is time that it did not compute. Replicas
are summed up by model: the duty cycle is busy seconds over replica-seconds. Of external models
nobody knows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import Q, Sum

from models_admin.models import ModelConfig, ModelKind, UtilizationSample

PERIOD = timedelta(seconds=30)
_CHUNK = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What the replicas of a model did in an hour, or in what of it was sampled."""

    hour_at: datetime
    model_id: str
    busy_s: float
    replica_s: float


@dataclass(kw_only=True, slots=True)
class _Sum:
    """What the replicas of a model did since the last sample."""

    busy_s: float = 0.0
    replica_s: float = 0.0
    replicas: set[str] = field(default_factory=set)


class Sampler:
    """Adds up what an agent sees of its replicas, and stores it each PERIOD.

    An agent that dies takes its servers with it, so nothing is remembered beyond it; less than a
    period is lost.
    """

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._seen: dict[str, tuple[datetime, float]] = {}
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._stored_at: datetime | None = None

    def note(
        self, replica: str, *, model_id: str, pool_id: str, busy_s: float, now: datetime
    ) -> None:
        """Take note of a living run of a replica; `busy_s` counts since its start."""
        seen_at, busy_before_s = self._seen.get(replica, (now, 0.0))
        sums = self._sums.setdefault((model_id, pool_id), _Sum())
        # The clock may have been set back.
        sums.replica_s += max(0.0, (now - seen_at).total_seconds())
        sums.busy_s += max(0.0, busy_s - busy_before_s)
        sums.replicas.add(replica)
        self._seen[replica] = now, busy_s

    def store_if_due(self, now: datetime) -> int:
        """Store what was seen since the last sample, and erase old ones; return rows written."""
        before = self._stored_at
        if before is None:
            self._stored_at = now
            return 0
        if timedelta(0) <= now - before < PERIOD:
            return 0
        samples = [
            UtilizationSample(
                at=now,
                agent=self._agent,
                model_id=model_id,
                pool_id=pool_id,
                replicas=len(sums.replicas),
                busy_s=sums.busy_s,
                replica_s=sums.replica_s,
            )
            for (model_id, pool_id), sums in self._sums.items()
        ]
        UtilizationSample.objects.bulk_create(samples)
        living = {replica for sums in self._sums.values() for replica in sums.replicas}
        self._seen = {replica: seen for replica, seen in self._seen.items() if replica in living}
        self._sums, self._stored_at = {}, now
        self._erase(now)
        return len(samples)

    def _erase(self, now: datetime) -> None:
        """Erase a chunk of what is old: more than a sample adds."""
        old = UtilizationSample.objects.filter(
            at__lt=now - settings.AIRS_KEEP_QUEUE_SAMPLES, agent=self._agent
        )
        ids = list(old.order_by("at").values_list("pk", flat=True)[:_CHUNK])
        if ids:
            UtilizationSample.objects.filter(pk__in=ids).delete()


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

    None where no replica lived, or nothing was sampled.
    """
    of = {"model_id": model_id} if model_id else {"pool_id": pool_id}
    samples = UtilizationSample.objects.filter(at__gt=now - max(spans), at__lte=now, **of)
    sums = samples.aggregate(
        **{
            f"{name}_{number}": Sum(name, filter=Q(at__gt=now - span), default=0.0)
            for number, span in enumerate(spans)
            for name in ("busy_s", "replica_s")
        }
    )
    return [
        sums[f"busy_s_{number}"] / lived if (lived := sums[f"replica_s_{number}"]) else None
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
