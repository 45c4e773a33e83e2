"""What the work of raters takes, and how much of it can be done at once.

Learned from the samples of the queue, each looked at once, together with the replicas that live at
that moment: a sample a minute later says little of another number of replicas. What is learned is a
row a rater, which forecasts and estimates read.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from django.db import connection

from fulfillment import windows
from fulfillment.model_directory import ModelDirectory, Prospect, Replica, serves
from fulfillment.models import Rater, RaterCost, RaterVersion
from fulfillment.policy import costs as policy
from fulfillment.policy.costs import Cost, Span
from fulfillment.policy.priority import PriorityClass

REMEMBERED = timedelta(days=1)
"""How far back samples are read of a rater that was never measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What one rater did until a sample of the queue, in all classes."""

    rater_id: str
    at: datetime
    ready: int
    oldest_s: float
    """Age of the oldest of its workflows with READY batches; 0 where none has."""
    worked: int
    call_seconds: float
    device_seconds: float
    period_s: float


class Servers:
    """Who can be sent to: replicas of hosted models, calls that external models may hold."""

    def __init__(self, directory: ModelDirectory, now: datetime) -> None:
        self._directory = directory
        self._now = now
        self._replicas: dict[str, list[Replica]] = defaultdict(list)
        for replica in directory.replicas(now):
            self._replicas[replica.model_id].append(replica)
        adapted = windows.written(self._replicas, now)
        self._limits = {
            window.replica: window.limits[PriorityClass.HIGH]
            for written in adapted.values()
            for window in written
        }

    def of(self, model_id: str) -> float:
        """Return those that live, of all versions of a model."""
        return sum(map(self._size, self._replicas[model_id]))

    def reachable(self, model_id: str, model_version: str) -> float:
        """Return those that serve a version, and those that will within minutes."""
        living = sum(
            self._size(replica)
            for replica in self._replicas[model_id]
            if serves(replica, model_version)
        )
        if isinstance(self._directory, Prospect):
            return max(living, self._directory.reachable(model_id, model_version, self._now))
        return living

    def are_calls(self, model_id: str) -> bool:
        """Say whether a model's servers are calls of an external model, not replicas."""
        return any(not replica.managed for replica in self._replicas[model_id])

    def protocol(self, model_id: str) -> str:
        """Return how the model is called."""
        return next((replica.protocol for replica in self._replicas[model_id]), "oip")

    def _size(self, replica: Replica) -> float:
        if replica.managed:
            return 1.0
        return min(float(replica.window), self._limits.get(replica.key, float(replica.window)))


def learn(servers: Servers, now: datetime) -> int:
    """Learn from the samples since the last time, and count who can be reached; return raters."""
    raters = list(Rater.objects.select_related("current_version"))
    rows = {row.rater_id: row for row in RaterCost.objects.all()}
    since = {
        rater.pk: max(rows[rater.pk].read_to, now - REMEMBERED)
        if rater.pk in rows
        else now - REMEMBERED
        for rater in raters
    }
    models = {rater.pk: rater.model_id for rater in raters}
    spans = _spans(_samples(since, now), since, models)
    shares = _shares(spans, servers, models)
    learned = [
        row
        for rater in raters
        if (row := _learned(rater, rows.get(rater.pk), spans[rater.pk], shares, servers, now))
    ]
    RaterCost.objects.bulk_create(
        learned,
        update_conflicts=True,
        unique_fields=["rater"],
        update_fields=[
            *("seconds_a_request", "call_seconds_a_request", "device_seconds_a_request"),
            *("requests", "exact", "measured_at", "read_to", "servers", "looked_at"),
        ],
    )
    return len(learned)


def of(row: RaterCost) -> Cost:
    """Return what was learned as the policies take it."""
    return Cost(
        seconds=row.seconds_a_request,
        call_seconds=row.call_seconds_a_request,
        device_seconds=row.device_seconds_a_request,
        requests=row.requests,
        is_exact=row.exact,
    )


def seconds_a_batch(
    row: RaterCost, *, servers: float, batch_size: int, is_chat: bool, max_qps: float | None
) -> float:
    """Return the replica-seconds to plan a batch with.

    A chat model takes one item a call, so that a batch is many calls; else it is one.
    """
    seconds = policy.paced(
        row.seconds_a_request,
        servers=servers,
        calls_a_request=1.0 if is_chat else 1 / batch_size,
        max_qps=max_qps,
    )
    return seconds * batch_size


def own(row: RaterCost, *, call_seconds: float, requests: int, batch_size: int) -> float:
    """Return what a workflow's requests take in times of its rater's, by those that it has had."""
    return policy.of_one(
        call_seconds, requests, mean=row.call_seconds_a_request, batch_size=batch_size
    )


def _samples(since: Mapping[str, datetime], now: datetime) -> Iterable[Sample]:
    """Return the samples from then on in the order of time; the first was looked at before."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT r.id, s.* FROM unnest(%s::text[], %s::timestamptz[]) AS r(id, since)
            CROSS JOIN LATERAL (
                SELECT q.at, sum(q.ready)::bigint,
                       coalesce(max(q.oldest_s) FILTER (WHERE q.ready > 0), 0),
                       sum(q.worked)::bigint,
                       sum(q.accelerator_seconds), sum(q.device_seconds), max(q.period_s)
                FROM fulfillment_queuesample q
                WHERE q.rater_id = r.id AND q.at >= r.since AND q.at <= %s
                GROUP BY q.at
            ) AS s ORDER BY s.at
            """,
            [list(since), list(since.values()), now],
        )
        return [
            Sample(
                rater_id=rater_id,
                at=at,
                ready=ready,
                oldest_s=oldest_s,
                worked=worked,
                call_seconds=call_seconds,
                device_seconds=device_seconds,
                period_s=period_s,
            )
            for (
                rater_id,
                at,
                ready,
                oldest_s,
                worked,
                call_seconds,
                device_seconds,
                period_s,
            ) in cursor.fetchall()
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A span of a rater, when it ended, and how long it was."""

    at: datetime
    period_s: float
    span: Span


def _spans(
    samples: Iterable[Sample], since: Mapping[str, datetime], models: Mapping[str, str]
) -> dict[str, list[_Seen]]:
    """Return what raters did from sample to sample."""
    ready: dict[tuple[str, datetime], int] = defaultdict(int)
    oldest_s: dict[tuple[str, datetime], float] = defaultdict(float)
    moments: dict[str, list[datetime]] = defaultdict(list)
    samples = list(samples)
    for sample in samples:
        model_id = models[sample.rater_id]
        if sample.at not in moments[model_id][-1:]:
            moments[model_id].append(sample.at)
        ready[model_id, sample.at] += sample.ready
        oldest_s[model_id, sample.at] = max(oldest_s[model_id, sample.at], sample.oldest_s)
    before = {
        (model_id, at): earlier
        for model_id, times in moments.items()
        for earlier, at in pairwise(times)
    }
    spans: dict[str, list[_Seen]] = defaultdict(list)
    for sample in samples:
        if sample.at == since[sample.rater_id]:
            continue
        model_id = models[sample.rater_id]
        earlier = before.get((model_id, sample.at))
        span = Span(
            requests=sample.worked,
            call_seconds=sample.call_seconds,
            device_seconds=sample.device_seconds,
            # Work that waits for one of a model's raters keeps its replicas busy for all of them.
            # Two small workflows, each seen by one sample, are no work that waited in between.
            is_full=earlier is not None
            and ready[model_id, earlier] > 0
            and ready[model_id, sample.at] > 0
            and oldest_s[model_id, sample.at] >= sample.period_s,
        )
        spans[sample.rater_id].append(_Seen(at=sample.at, period_s=sample.period_s, span=span))
    return spans


def _shares(
    spans: Mapping[str, Sequence[_Seen]], servers: Servers, models: Mapping[str, str]
) -> dict[tuple[str, datetime], float]:
    """Return which share of a model's call seconds was work, by model and sample."""
    calls: dict[tuple[str, datetime], float] = defaultdict(float)
    periods: dict[tuple[str, datetime], float] = {}
    for rater_id, seen in spans.items():
        for of in seen:
            calls[models[rater_id], of.at] += of.span.call_seconds
            periods[models[rater_id], of.at] = of.period_s
    return {
        (model_id, at): policy.worked(
            servers=servers.of(model_id),
            period_s=periods[model_id, at],
            call_seconds=call_seconds,
        )
        for (model_id, at), call_seconds in calls.items()
    }


def _learned(
    rater: Rater,
    row: RaterCost | None,
    seen: Sequence[_Seen],
    shares: Mapping[tuple[str, datetime], float],
    servers: Servers,
    now: datetime,
) -> RaterCost | None:
    cost = of(row) if row else None
    measured_at = row.measured_at if row else now
    read_to = seen[-1].at if seen else (row.read_to if row else now)
    # Without a replica now, who knows how many there were.
    if servers.of(rater.model_id) > 0:
        for each in seen:
            cost = policy.learn(
                cost,
                each.span,
                worked=shares[rater.model_id, each.at],
                batch_size=rater.batch_size,
            )
            measured_at = each.at if each.span.requests else measured_at
    if cost is None:
        return None
    return RaterCost(
        rater=rater,
        seconds_a_request=cost.seconds,
        call_seconds_a_request=cost.call_seconds,
        device_seconds_a_request=cost.device_seconds,
        requests=cost.requests,
        exact=cost.is_exact,
        measured_at=measured_at,
        read_to=read_to,
        servers=reachable_by_current(rater.current_version, servers),
        looked_at=now,
    )


def reachable_by_current(version: RaterVersion | None, servers: Servers) -> float:
    """Return who serves the version that new workflows get."""
    if version is None:
        return 0.0
    return servers.reachable(version.spec["model_id"], version.spec["model_version"])
