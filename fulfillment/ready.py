"""What is READY, by rater version, and in which order it is served.

Reading it costs some microseconds a workflow that waits. While few wait, every pass reads it
anew; of more, a reading is believed for a while that grows with what it took (so that reading
takes a fifth of the time at most), less what has been claimed since, and less long once somebody
rang. What is missed meanwhile (a retry that came due) is seen at the next reading; what is gone (a
workflow that was cancelled), the claim finds. Lines are made of a version's workflows when they are
asked for: most versions have no room while a reading is believed.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import orjson
from django.db import connection

from fulfillment import given_up, prepared
from fulfillment.models import Mode
from fulfillment.policy import fairness, limits, lines, ordering
from fulfillment.policy.fairness import Usage
from fulfillment.policy.limits import Matched, Rule, Traffic
from fulfillment.policy.priority import PriorityClass, priority_class

READY_LOOK = 128
"""READY batches counted a workflow: more than most passes can send of one."""
FEW = 100
"""Workflows that are read in every pass."""
BELIEVED, BELIEVED_AFTER_RING = 4, 1
"""How long a reading of more is believed, in times of what it took."""
LONGEST = timedelta(seconds=2)
_NOBODY: Mapping[int, Usage] = MappingProxyType({})
_NOT_REGULATED: "Mapping[int, Kind]" = MappingProxyType({})
Kind = tuple[PriorityClass, Matched]
"""The class of a workflow, and the traffic rules that it meets."""
_NOTHING: Counter[int] = Counter()


@dataclass(kw_only=True, slots=True)
class VersionLoad:
    """What may be sent of one rater version."""

    version_id: int
    rater_id: str
    model_id: str
    model_version: str
    autorater: str
    plugin_version: str
    max_qps: float | None
    isolated: bool
    seconds_a_request: float | None
    """Of a replica, or of a call of an external model; None while nothing was measured."""
    batch_size: int
    """The largest of its workflows."""
    ready: int
    """Batches of all its workflows."""
    rows: Sequence[Sequence[Any]]
    """A workflow each, as read."""
    read_at: datetime
    usage: Usage
    order: lines.Order | None = None
    """Its lines, once they were asked for."""
    kind_of: Mapping[int, Kind]
    """Of each workflow, where any meets a traffic rule; else of none."""
    kinds: Mapping[Kind, int]
    """READY batches, where any meets a rule."""
    _open: dict[frozenset[int], lines.Order] = field(default_factory=dict)

    @property
    def workflows(self) -> int:
        """How many have batches READY."""
        return len(self.rows)

    def line_up(self, requests_per_s: float | None) -> lines.Order:
        """Return its lines as they were when it was read, of a rater that can do so much."""
        if self.order is None:
            self.order = lines.line_up(
                [_load(row) for row in self.rows],
                self.read_at,
                usage=fairness.aged(self.usage, self.read_at),
                requests_per_s=requests_per_s,
                weights={row[8]: row[9] for row in self.rows if row[9] is not None},
            )
        return self.order

    def without(self, closed: frozenset[int]) -> lines.Order:
        """Return its lines, which were asked for before, without the traffic of some rules."""
        assert self.order is not None
        if not closed:
            return self.order
        if closed not in self._open:
            held_back = {w for w, (_, met) in self.kind_of.items() if not closed.isdisjoint(met)}
            self._open[closed] = lines.without(self.order, held_back)
        return self._open[closed]

    def matched(self, workflow_id: int) -> Matched:
        """Return the traffic rules that a workflow meets."""
        return self.kind_of[workflow_id][1] if workflow_id in self.kind_of else ()

    def left_of_kinds(self, taken: Mapping[int, int]) -> Mapping[Kind, int]:
        """Return the READY batches that are left of each kind; `taken` left since, by workflow."""
        left = Counter(self.kinds)
        for workflow_id, batches in taken.items():
            left[self.kind_of[workflow_id]] -= batches
        return left

    def ready_of(self, workflow_id: int) -> int:
        """Return the batches of a workflow in its lines."""
        lines = self.order.values() if self.order else ()
        return next((n for line in lines if (n := line.ready.get(workflow_id))), 0)


@dataclass(kw_only=True, slots=True)
class Sight:
    """The last reading, and what was claimed of it."""

    versions: Sequence[VersionLoad] = ()
    workflows: int = 0
    taken: dict[int, Counter[int]] = field(default_factory=dict)
    """Batches claimed since, by rater version and workflow."""
    short: set[int] = field(default_factory=set)
    """Versions of which less was sent than was claimed since, or more is READY than was counted:
    what is READY of them now, only another reading tells."""
    read_at: datetime | None = None
    took: timedelta = timedelta()
    rung: bool = False
    rules: Sequence[Rule] = ()

    def regulate(self, rules: Sequence[Rule]) -> None:
        """Go by these traffic rules; where they are others, what was read is read again."""
        if rules != self.rules:
            self.rules, self.read_at = rules, None

    def ring(self) -> None:
        """Somebody says that work has come or changed."""
        self.rung = True

    def take(self, version: VersionLoad, picks: Iterable[ordering.Pick]) -> None:
        """Count what is claimed."""
        taken = self.taken.setdefault(version.version_id, Counter())
        for pick in picks:
            taken[pick.workflow_id] += pick.batches
            if taken[pick.workflow_id] >= READY_LOOK:
                self.short.add(version.version_id)

    def give_back(self, version: VersionLoad, put_back: Mapping[int, int]) -> None:
        """Count what was claimed and is READY again, batches by workflow."""
        self.taken[version.version_id].subtract(put_back)

    def use_up(self, version: VersionLoad, workflow_ids: Iterable[int]) -> None:
        """Count all of workflows as claimed: a claim found that this reading is wrong about them.

        What is READY of them after all, the next one finds.
        """
        taken = self.taken[version.version_id]
        for workflow_id in workflow_ids:
            taken[workflow_id] = version.ready_of(workflow_id)

    def look(self, now: datetime, usages: Mapping[int, Usage] = _NOBODY) -> Sequence[VersionLoad]:
        """Return what is READY, read now or a moment ago.

        `usages` is what owners were served of late, by rater version.
        """
        if not self._is_believed(now):
            began_s = time.perf_counter()
            self.versions, self.read_at, self.rung = read(now, usages, self.rules), now, False
            self.workflows = sum(version.workflows for version in self.versions)
            self.taken.clear()
            self.short.clear()
            self.took = timedelta(seconds=time.perf_counter() - began_s)
        return self.versions

    def line_up(self, version: VersionLoad, requests_per_s: float | None) -> lines.Order:
        """Return the lines of a version; making them is part of what the reading took."""
        began_s = time.perf_counter()
        order = version.line_up(requests_per_s)
        self.took += timedelta(seconds=time.perf_counter() - began_s)
        return order

    def taken_of(self, version: VersionLoad) -> Counter[int]:
        """Return the batches claimed since, by workflow."""
        return self.taken.get(version.version_id, _NOTHING)

    def wanted(self, version: VersionLoad) -> int:
        """Return the READY batches that are left of a version."""
        taken = self.taken.get(version.version_id)
        return version.ready - taken.total() if taken else version.ready

    def _is_believed(self, now: datetime) -> bool:
        if self.read_at is None or self.workflows <= FEW:
            return False
        times = BELIEVED_AFTER_RING if self.rung else BELIEVED
        # Counted from before it was read.
        believed = min(LONGEST, (1 + times) * self.took)
        return timedelta(0) <= now - self.read_at < believed


def read(
    now: datetime, usages: Mapping[int, Usage] = _NOBODY, rules: Sequence[Rule] = ()
) -> list[VersionLoad]:
    """Read what is READY, by rater version, and which traffic rules it meets."""
    # Asked for only where there are rules: of thousands of workflows it takes a while.
    facts = ", w.trigger, w.purpose, w.public_id" if rules else ""
    with connection.cursor() as cursor:
        prepared.execute(
            cursor,
            f"""
            SELECT w.rater_version_id, w.rater_id, r.max_qps, r.mode, v.spec::text,
                   c.seconds_a_request, ready.batches, w.batch_size, w.owner, o.weight, w.id,
                   w.priority, {given_up.BEST_EFFORT}, coalesce(w.round_at, w.created_at),
                   least(w.deadline_at, w.ends_at),
                   w.next_position - s.completed - s.failed - s.timed_out - s.cancelled{facts}
            FROM fulfillment_workflow w
            JOIN fulfillment_rater r ON r.id = w.rater_id AND r.paused_at IS NULL
            JOIN fulfillment_raterversion v ON v.id = w.rater_version_id
            JOIN fulfillment_workflowstats s ON s.workflow_id = w.id
            LEFT JOIN fulfillment_ratercost c ON c.rater_id = w.rater_id
            {given_up.forecast("%s::timestamptz")}
            LEFT JOIN fulfillment_ownershare o ON o.owner = w.owner
            CROSS JOIN LATERAL (
                SELECT count(*) AS batches FROM (
                    -- Without the order the planner scans the table for a quick 128.
                    SELECT FROM fulfillment_batch b WHERE b.workflow_id = w.id AND b.state = 0
                    ORDER BY b.position LIMIT %s::bigint) AS b
            ) AS ready
            WHERE w.finished_at IS NULL AND w.state IN (1, 2)
              AND least(w.deadline_at, w.ends_at) > %s::timestamptz AND v.retired_at IS NULL
              AND ready.batches > 0
            """,
            [now, READY_LOOK, now],
        )
        rows = cursor.fetchall()
    by_version: dict[int, list[Sequence[Any]]] = defaultdict(list)
    for row in rows:
        by_version[row[0]].append(row)
    return [
        _version(of_version, now, usages.get(version_id, Usage()), rules)
        for version_id, of_version in by_version.items()
    ]


def _version(
    rows: Sequence[Sequence[Any]], now: datetime, usage: Usage, rules: Sequence[Rule]
) -> VersionLoad:
    version_id, rater_id, max_qps, mode, text, seconds = rows[0][:6]
    spec = _spec(text)
    kind_of = _kinds(rows, spec["model_id"], rules) if rules else _NOT_REGULATED
    kinds: Counter[Kind] = Counter()
    if kind_of:
        for row in rows:
            kinds[kind_of[row[10]]] += row[6]
    return VersionLoad(
        version_id=version_id,
        rater_id=rater_id,
        model_id=spec["model_id"],
        model_version=spec["model_version"],
        autorater=spec["autorater"],
        plugin_version=spec["plugin_version"],
        max_qps=max_qps,
        isolated=mode == Mode.ISOLATED,
        seconds_a_request=seconds,
        batch_size=max(row[7] for row in rows),
        ready=sum(row[6] for row in rows),
        rows=rows,
        read_at=now,
        usage=usage,
        kind_of=kind_of,
        kinds=kinds,
    )


def _kinds(
    rows: Sequence[Sequence[Any]], model_id: str, rules: Sequence[Rule]
) -> Mapping[int, Kind]:
    """Return the kinds of a version's workflows, none where no rule is met."""
    kinds: dict[int, Kind] = {}
    for row in rows:
        cls = priority_class(row[11], best_effort=row[12])
        traffic = Traffic(
            rater=row[1],
            model=model_id,
            priority_class=cls.name.lower(),
            owner=row[8],
            trigger=row[16],
            purpose=row[17],
            workflow=row[18],
        )
        kinds[row[10]] = cls, limits.matched(rules, traffic)
    return kinds if any(met for _, met in kinds.values()) else _NOT_REGULATED


@lru_cache(maxsize=1_000)
def _spec(text: str) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = orjson.loads(text)
    return spec


def _load(row: Sequence[Any]) -> lines.Load:
    ready, batch_size, owner, _, workflow_id, priority, best_effort, since, deadline_at, open_ = (
        row[6:16]
    )
    return lines.Load(
        workflow_id=workflow_id,
        owner=owner,
        priority_class=priority_class(priority, best_effort=best_effort),
        ready_batches=ready,
        open_requests=max(open_, 1),
        submitted_at=since,
        deadline_at=deadline_at,
        batch_size=batch_size,
    )
