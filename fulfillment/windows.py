"""Windows: how much may be out through each replica, and how that is kept over leaders.

A replica of our own has a fixed window, told by model management; an external model has one that
adapts to what its calls meet (`traffic.adapt`). The fixed one is left for an adaptive one of the
same size where the rater is isolated, or where model management has said nothing of the replica
for 30 s: work goes on to the last known address, and the reason is written down.

The leader alone knows the windows, so all executors share one limit. It writes them every few
seconds; a new leader goes on with them instead of opening them anew, which would send a storm to a
model that is overloaded. Where nothing was written for five minutes, a window opens full.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from fulfillment.held import Held, Lease
from fulfillment.model_directory import Replica
from fulfillment.models import SendWindow
from fulfillment.policy import quota, traffic
from fulfillment.policy.limits import Matched
from fulfillment.policy.ordering import MAX_CLAIMS
from fulfillment.policy.priority import PriorityClass

logger = logging.getLogger(__name__)

SIGNAL_LIMIT = timedelta(seconds=30)
"""A replica that model management has not heard of for longer has an adaptive window."""
RECALLED = timedelta(minutes=5)
"""How long a written window is worth more than the operator's own limit."""
FORGOTTEN = timedelta(days=1)

EXTERNAL, ISOLATED, SILENT = "external", "isolated", "model_management_silent"
"""Why a window is adapted."""


@dataclass(kw_only=True, slots=True)
class Windows:
    """The adaptive windows that the leader knows, by replica."""

    open: dict[str, traffic.Window] = field(default_factory=dict)
    used: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Model and reason of those that were used since they were last written."""

    def of(self, replica: Replica, *, reason: str) -> traffic.Window:
        """Return the replica's window, opened when it is new or its ceiling was changed."""
        window = self.open.get(replica.key)
        if window is None and reason == SILENT:
            logger.warning("model management is silent", extra={"replica": replica.key})
        if window is None or window.ceiling != replica.window:
            window = self.open[replica.key] = traffic.open_window(replica.window)
        self.used[replica.key] = (replica.model_id, reason)
        return window


def reason_to_adapt(replica: Replica, *, isolated: bool, now: datetime) -> str:
    """Return why the replica's window is adapted; "" where model management tells it."""
    if not replica.managed:
        return EXTERNAL
    if isolated:
        return ISOLATED
    silent = replica.seen_at is not None and now - replica.seen_at > SIGNAL_LIMIT
    return SILENT if silent else ""


def _meets_none(workflow_id: int) -> Matched:
    return ()


class Room:
    """The free room of the replicas that serve one rater version."""

    def __init__(
        self,
        *,
        version_id: int,
        replicas: Sequence[Replica],
        batch_size: int,
        isolated: bool,
        held: Held,
        windows: Windows,
        now: datetime,
        matched: Callable[[int], Matched] = _meets_none,
    ) -> None:
        """Take who serves, what is out, and which traffic rules a workflow meets."""
        self._version_id = version_id
        self._matched = matched
        self.replicas = replicas
        self.isolated = isolated
        self._held = held
        self._now = now
        # A chat model takes one item a call, so that a batch is many calls.
        self.calls_a_batch = batch_size if any(r.protocol == "openai" for r in replicas) else 1
        self._windows = {
            replica.key: windows.of(replica, reason=reason)
            for replica in replicas
            if (reason := reason_to_adapt(replica, isolated=isolated, now=now))
        }
        self.most = self.batches(PriorityClass.HIGH)

    @property
    def servers(self) -> float:
        """Who serves: replicas that we run, and the calls that external models may hold."""
        return sum(
            1.0 if replica.managed else self._windows[replica.key].limits[PriorityClass.HIGH]
            for replica in self.replicas
        )

    @property
    def window(self) -> int:
        """Batches that all its replicas may hold together: one at least, if there is any."""
        calls = sum(
            int(self._windows[r.key].limits[PriorityClass.HIGH])
            if r.key in self._windows
            else r.window
            for r in self.replicas
        )
        return min(calls, max(1, calls // self.calls_a_batch))

    @property
    def calls_held(self) -> int:
        """Calls that they hold, for whichever rater."""
        return sum(sum(self._held.calls(replica.key).values()) for replica in self.replicas)

    @property
    def held(self) -> int:
        """Batches that they hold, the last of them in part."""
        return -(-self.calls_held // self.calls_a_batch)

    def batches(self, cls: PriorityClass) -> int:
        """Return how many whole batches of a class find room, the last of them in part."""
        return len(self.grants(cls, [self.calls_a_batch] * MAX_CLAIMS))

    def wanted(self, items: int) -> int:
        """Return how many calls a batch of so many items can make at once."""
        return 1 if self.calls_a_batch == 1 else items

    @property
    def most_urgent(self) -> PriorityClass | None:
        """The highest class of which anything is out."""
        held = [self._held.calls(replica.key) for replica in self.replicas]
        return min((cls for calls in held for cls, n in calls.items() if n), default=None)

    @property
    def can_wait(self) -> bool:
        """Say whether all replicas have work enough for now (`quota.can_wait`).

        What waits for an external model waits there for nothing else.
        """
        loads = self._loads(PriorityClass.HIGH)
        return not self._windows and bool(loads) and quota.can_wait(loads)

    def grants(self, cls: PriorityClass, wanted: Sequence[int]) -> list[quota.Grant]:
        """Grant replica and calls to batches of a class, which want so many calls at once each."""
        return quota.grant(self._loads(cls), wanted)

    def _loads(self, cls: PriorityClass) -> list[quota.ReplicaLoad]:
        loads = []
        for replica in self.replicas:
            by_class = self._held.calls(replica.key)
            total = sum(by_class.values())
            window = self._windows.get(replica.key)
            if window is None:
                high = by_class.get(PriorityClass.HIGH, 0)
                kept = (
                    0
                    if cls is PriorityClass.HIGH
                    else quota.kept_for_high(replica.window, held=high)
                )
                free = replica.window - total - kept
            else:
                free = traffic.room(window, by_class, cls, now=self._now)
            loads.append(
                quota.ReplicaLoad(
                    key=replica.key,
                    version=replica.version,
                    window=total + max(free, 0),
                    held=total,
                )
            )
        return loads

    def take(
        self,
        cls: PriorityClass,
        granted: Mapping[int, quota.Grant],
        workflows: Mapping[int, int],
    ) -> None:
        """Count batches that were just sent, for all raters; `workflows` are theirs."""
        for batch_id, grant in granted.items():
            met = self._matched(workflows[batch_id])
            lease = Lease(cls, self._version_id, grant.calls, met)
            self._held.add(grant.replica, {batch_id: lease})


def recall(now: datetime) -> Windows:
    """Return the windows as the last leader wrote them, those that are not too old."""
    rows = SendWindow.objects.filter(written_at__gte=now - RECALLED)
    return Windows(
        open={
            row.replica: traffic.Window(
                ceiling=row.ceiling,
                limits=tuple(row.limits),
                dropped_at=tuple(row.dropped_at),
            )
            for row in rows
            if len(row.limits) == len(row.dropped_at) == len(PriorityClass)
        }
    )


def remember(windows: Windows, now: datetime) -> None:
    """Write the windows that were used since the last time; forget those nobody used for a day."""
    SendWindow.objects.bulk_create(
        [
            SendWindow(
                replica=replica,
                model_id=model_id,
                ceiling=windows.open[replica].ceiling,
                limits=list(windows.open[replica].limits),
                dropped_at=list(windows.open[replica].dropped_at),
                reason=reason,
                written_at=now,
            )
            for replica, (model_id, reason) in sorted(windows.used.items())
        ],
        update_conflicts=True,
        unique_fields=["replica"],
        update_fields=["model_id", "ceiling", "limits", "dropped_at", "reason", "written_at"],
    )
    windows.used = {}
    SendWindow.objects.filter(written_at__lt=now - FORGOTTEN).delete()


def written(model_ids: Collection[str], now: datetime) -> Mapping[str, list[SendWindow]]:
    """Return the windows of models that are in use, by model, for people."""
    found: dict[str, list[SendWindow]] = defaultdict(list)
    rows = SendWindow.objects.filter(model_id__in=model_ids, written_at__gte=now - RECALLED)
    for row in rows.order_by("replica"):
        found[row.model_id].append(row)
    return found
