"""The duty cycle over time: of a model and its replicas, of a pool and its models.

Read from what the host agents sampled. A step in which nothing was sampled has no bucket: whether
nothing lived then or nobody looked, there is no duty cycle to tell.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from django.db import connection

Key = TypeVar("Key")

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
MOST_STEPS: Final = 500
MOST_LINES: Final = 50
"""Replicas of a model, or models of a pool, that are told apart: those that lived longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch of time in equal steps, which begin at the same instants in every span."""

    since: datetime
    until: datetime
    step: timedelta

    @classmethod
    def ending(cls, now: datetime, length: timedelta, step: timedelta) -> "Span":
        """Return the steps that the time up to now touches; the last one may not be over."""
        since = now - length
        return cls(since=since - (since - _EPOCH) % step, until=now, step=step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What replicas did in a step."""

    at: datetime
    """Begin of the step."""
    busy_s: float
    """Seconds in which they computed, of all together."""
    replica_s: float
    """Seconds that they lived, of all together."""
    busy_device_s: float
    device_s: float
    """The same, each replica counted as often as it holds devices."""

    @property
    def duty(self) -> float | None:
        """Busy over lived by device; None where nothing lived.

        Servers are asked each two seconds, so that over half a minute it may come out above one.
        """
        return min(self.busy_device_s / self.device_s, 1.0) if self.device_s else None


Line = Sequence[Bucket]
Replica = tuple[str, int]
"""Agent and ordinal."""


def of_model(model_id: str, span: Span) -> Line:
    """Return the duty cycle of a model."""
    found = _read(
        "models_admin_utilizationsample", "replica_s", "model_id", "model_id", model_id, span
    )
    return together(found.values())


def of_replicas(model_id: str, span: Span) -> Mapping[Replica, Line]:
    """Return the duty cycle of each replica of a model, through all its runs."""
    found = _read(
        "models_admin_replicasample", "lived_s", "agent, ordinal", "model_id", model_id, span
    )
    return {(agent, ordinal): line for (agent, ordinal), line in found.items()}


def of_models(pool_id: str, span: Span) -> Mapping[str, Line]:
    """Return the duty cycle of each model in a pool, removed models included."""
    found = _read(
        "models_admin_utilizationsample", "replica_s", "model_id", "pool_id", pool_id, span
    )
    return {model_id: line for (model_id,), line in found.items()}


def together(lines: Iterable[Line]) -> Line:
    """Return the sum of lines of one span."""
    at_once: dict[datetime, list[Bucket]] = defaultdict(list)
    for line in lines:
        for bucket in line:
            at_once[bucket.at].append(bucket)
    return [
        Bucket(
            at=at,
            busy_s=sum(each.busy_s for each in buckets),
            replica_s=sum(each.replica_s for each in buckets),
            busy_device_s=sum(each.busy_device_s for each in buckets),
            device_s=sum(each.device_s for each in buckets),
        )
        for at, buckets in sorted(at_once.items())
    ]


def longest(lines: Mapping[Key, Line], most: int = MOST_LINES) -> dict[Key, Line]:
    """Return the lines of those that lived longest, in their order."""
    by_age = sorted(lines, key=lambda key: -sum(bucket.device_s for bucket in lines[key]))
    kept = set(by_age[:most])
    return {key: line for key, line in lines.items() if key in kept}


def _read(
    table: str, lived: str, keys: str, owner: str, owner_id: str, span: Span
) -> dict[tuple[Any, ...], Line]:
    """Return the lines of a model or pool by what they are told apart by, in its order."""
    with connection.cursor() as cursor:
        # A sample is of the time before it: one at a border belongs to the step that ends there.
        cursor.execute(
            f"""
            SELECT date_bin(%(step)s::interval, at - interval '1 microsecond', %(since)s),
                sum(busy_s), sum({lived}), sum(busy_s * devices), sum({lived} * devices), {keys}
            FROM {table} WHERE {owner} = %(id)s AND at > %(since)s AND at <= %(until)s
            GROUP BY {keys}, 1 ORDER BY {keys}, 1
            """,
            {
                "id": owner_id,
                "since": span.since,
                "until": span.until,
                "step": f"{span.step.total_seconds()} seconds",
            },
        )
        lines: dict[tuple[Any, ...], list[Bucket]] = defaultdict(list)
        for at, busy_s, replica_s, busy_device_s, device_s, *key in cursor.fetchall():
            lines[tuple(key)].append(
                Bucket(
                    at=at,
                    busy_s=busy_s,
                    replica_s=replica_s,
                    busy_device_s=busy_device_s,
                    device_s=device_s,
                )
            )
        return dict(lines)
