"""What is out: the batches that are leased, by replica and by rater version.

To count them costs some microseconds each. While few are out, every pass does; of more, a count is
believed for a second: what is claimed is added, and what has come back is looked for when somebody
rings for its replica. A ring that is lost costs the rest of that second.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import NamedTuple

from django.db import connection

from fulfillment import arrays, given_up, prepared
from fulfillment.policy import limits
from fulfillment.policy.limits import Matched, Rule, Traffic
from fulfillment.policy.priority import PriorityClass, priority_class

FEW = 300
"""Batches that are counted in every pass."""
BELIEVED = timedelta(seconds=1)

_FACTS = ", v.spec->>'model_id', w.rater_id, w.owner, w.trigger, w.purpose, w.public_id"
_VERSIONS = "JOIN fulfillment_raterversion v ON v.id = w.rater_version_id"


class Lease(NamedTuple):
    """A batch that is out."""

    priority_class: PriorityClass
    version_id: int
    calls: int
    """That it may make at once."""
    matched: Matched = ()
    """The traffic rules that its workflow meets."""


_NONE: Mapping[PriorityClass, int] = MappingProxyType({})


class Held:
    """The leases that the leader knows."""

    def __init__(self) -> None:
        self.rules: Sequence[Rule] = ()
        """The traffic rules that it is counted by."""
        self._rung: set[str] = set()
        self._counted_at: datetime | None = None
        self._messages: dict[int, int] = {}
        """By batch that is out."""
        self._out: Counter[int] = Counter()
        """Batches of each message that are out."""
        self._sent = 0
        self._clear()

    @property
    def total(self) -> int:
        """Batches that are out."""
        return self._batches.total()

    @property
    def messages(self) -> int:
        """Messages that this leader has sent and of which some batch is out still."""
        return len(self._out)

    def send(self, batch_ids: Collection[int]) -> None:
        """Say that batches left in one message."""
        self._sent += 1
        for batch_id in batch_ids:
            self._come_back(batch_id)
            self._messages[batch_id] = self._sent
        self._out[self._sent] = len(batch_ids)

    def _come_back(self, batch_id: int) -> None:
        message = self._messages.pop(batch_id, None)
        if message is not None:
            self._out[message] -= 1
            if not self._out[message]:
                del self._out[message]

    def of(self, version_id: int) -> int:
        """Return the batches of a rater version that are out."""
        return self._batches[version_id]

    def calls(self, replica: str) -> Mapping[PriorityClass, int]:
        """Return the calls that batches of each class may make at once through a replica."""
        return self._calls.get(replica, _NONE)

    def of_rule(self, number: int, replicas: Iterable[str] | None = None) -> int:
        """Return the batches that are out of what meets a rule, through some replicas or in all."""
        if replicas is None:
            return self._of_rule[number, None]
        return sum(self._of_rule[number, replica] for replica in replicas)

    def regulate(self, rules: Sequence[Rule]) -> None:
        """Count by these traffic rules; where they are others, all is counted anew."""
        if rules != self.rules:
            self.rules = rules
            self.forget()

    def ring(self, replicas: Iterable[str]) -> None:
        """Say that batches came back from these replicas."""
        self._rung.update(replicas)

    def forget(self) -> None:
        """Count anew at the next look."""
        self._counted_at = None

    def look(self, now: datetime) -> None:
        """Count what is out, or look for what has come back since."""
        if self._is_believed(now):
            self._look_for({replica for replica in self._rung if self._leases.get(replica)})
        else:
            self._count(now)
        self._rung.clear()

    def add(self, replica: str, leases: Mapping[int, Lease]) -> None:
        """Add batches that were just claimed."""
        # One that was claimed before and came back, which nobody has looked for yet.
        self._drop(replica, leases.keys() & self._leases[replica].keys())
        self._leases[replica].update(leases)
        for lease in leases.values():
            self._calls[replica][lease.priority_class] += lease.calls
            self._batches[lease.version_id] += 1
            self._count_rules(replica, lease, 1)

    def _drop(self, replica: str, batch_ids: Iterable[int]) -> None:
        for batch_id in batch_ids:
            lease = self._leases[replica].pop(batch_id)
            self._come_back(batch_id)
            self._calls[replica][lease.priority_class] -= lease.calls
            self._batches[lease.version_id] -= 1
            self._count_rules(replica, lease, -1)

    def _count_rules(self, replica: str, lease: Lease, batches: int) -> None:
        for number in lease.matched:
            self._of_rule[number, replica] += batches
            self._of_rule[number, None] += batches

    def _is_believed(self, now: datetime) -> bool:
        if self._counted_at is None or self.total <= FEW:
            return False
        return timedelta(0) <= now - self._counted_at < BELIEVED

    def _look_for(self, replicas: set[str]) -> None:
        """Drop what these replicas hold no more."""
        if not replicas:
            return
        with connection.cursor() as cursor:
            prepared.execute(
                cursor,
                # `state + 0`: by primary key, not by the index of all that is leased.
                "SELECT replica, id FROM fulfillment_batch"
                " WHERE id = ANY(%s::bigint[]) AND state + 0 = 1",
                [arrays.integers(b for replica in replicas for b in self._leases[replica])],
            )
            # What left again through another replica has come back from this one.
            held = set(cursor.fetchall())
        for replica in replicas:
            self._drop(replica, [b for b in self._leases[replica] if (replica, b) not in held])

    def _count(self, now: datetime) -> None:
        # Only where there are rules: by workflow there are many more lines.
        facts, versions = (_FACTS, _VERSIONS) if self.rules else ("", "")
        with connection.cursor() as cursor:
            prepared.execute(
                cursor,
                f"""
                SELECT string_agg(b.id::text, ','), b.replica, w.priority, {given_up.BEST_EFFORT},
                       w.rater_version_id, b.calls{facts}
                -- In order: no plan, made when tables were small, reads the index of all open ones.
                FROM (SELECT id, workflow_id, replica, calls FROM fulfillment_batch
                      WHERE state = 1 ORDER BY id LIMIT 1000000) AS b
                JOIN fulfillment_workflow w ON w.id = b.workflow_id {versions}
                {given_up.forecast("%s::timestamptz")}
                GROUP BY 2, 3, 4, 5, 6{", 7, 8, 9, 10, 11, 12" if facts else ""}
                """,
                [now],
            )
            rows = cursor.fetchall()
        self._clear()
        for batch_ids, replica, priority, best_effort, version_id, calls, *of_workflow in rows:
            cls = priority_class(priority, best_effort=best_effort)
            lease = Lease(cls, version_id, calls)
            if of_workflow:
                model_id, *others = of_workflow
                rater, owner, trigger, purpose, public_id = others
                met = limits.matched(
                    self.rules,
                    Traffic(
                        rater=rater,
                        model=model_id,
                        priority_class=cls.name.lower(),
                        owner=owner,
                        trigger=trigger,
                        purpose=purpose,
                        workflow=public_id,
                    ),
                )
                lease = lease._replace(matched=met)
            self.add(replica, dict.fromkeys(map(int, batch_ids.split(",")), lease))
        out = {batch_id for leases in self._leases.values() for batch_id in leases}
        self._messages = {b: message for b, message in self._messages.items() if b in out}
        self._out = Counter(self._messages.values())
        self._counted_at = now

    def _clear(self) -> None:
        self._leases: dict[str, dict[int, Lease]] = defaultdict(dict)
        """By replica and batch."""
        self._calls: dict[str, Counter[PriorityClass]] = defaultdict(Counter)
        self._batches: Counter[int] = Counter()
        """By rater version."""
        self._of_rule: Counter[tuple[int, str | None]] = Counter()
        """Batches by rule and replica, and by rule in all."""
