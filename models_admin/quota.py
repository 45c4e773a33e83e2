"""The quota peek: what could be sent to a model now, and what stands against it.

Who sends knows raters, what they hold and what they wait for: the callable named by the setting
AIRS_QUOTA_SOURCE answers for them. For a model by itself, and where model management stands alone,
what its live servers say is all there is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from django.conf import settings
from django.db.models import Q, Sum
from django.utils.module_loading import import_string

from models_admin import traffic_limits
from models_admin.directory import HEARTBEAT_LIMIT, directory
from models_admin.errors import NotFound
from models_admin.models import ModelServer
from models_admin.policy import traffic_rules
from models_admin.policy.replicas import ServerState
from models_admin.policy.traffic_rules import Room, Traffic, TrafficClass

ROWS_A_BATCH: Final = 12
"""Servers count rows, windows batches: so many make one, as most senders cut them."""
DEFAULT_PRIORITY: Final = 50


class ReasonData(Protocol):
    """Why it is no more."""

    @property
    def code(self) -> str: ...
    @property
    def detail(self) -> str: ...


class QuotaData(Protocol):
    """What could be sent; counts are in batches."""

    @property
    def rater(self) -> str | None:
        """None where a model was asked for."""

    @property
    def model(self) -> str: ...
    @property
    def model_version(self) -> str: ...
    @property
    def priority_class(self) -> str: ...
    @property
    def replicas(self) -> int: ...
    @property
    def calls_a_batch(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def kept_for_high(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def granted(self) -> int: ...
    @property
    def service_s(self) -> float | None: ...
    @property
    def wait_s(self) -> float | None: ...
    @property
    def reasons(self) -> Sequence[ReasonData]: ...


Source = Callable[..., QuotaData | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why it is no more."""

    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What could be sent to a model, by what its servers say."""

    rater: str | None = None
    model: str
    model_version: str
    priority_class: str
    replicas: int
    calls_a_batch: int = 1
    window: int
    held: int
    kept_for_high: int = 0
    free: int
    granted: int
    service_s: float | None
    wait_s: float | None
    reasons: Sequence[ReasonData]


def peek(
    name: str,
    *,
    priority: int | None = None,
    workflow: str | None = None,
    owner: str | None = None,
    now: datetime,
) -> QuotaData:
    """Return what could be sent now for a rater, or to a model of that name.

    With `owner`, only workflows of theirs are known. Raises NotFound, and what the source raises.
    """
    if settings.AIRS_QUOTA_SOURCE:
        source: Source = import_string(settings.AIRS_QUOTA_SOURCE)
        found = source(name, priority=priority, workflow=workflow, owner=owner, now=now)
        if found is not None:
            return found
    return _of_model(name, priority=priority, workflow=workflow, now=now)


def _of_model(model_id: str, *, priority: int | None, workflow: str | None, now: datetime) -> Quota:
    model = directory.describe(model_id)
    if model is None:
        raise NotFound(f"There is no rater and no model {model_id!r}.")
    replicas = [each for each in directory.replicas(now) if each.model_id == model_id]
    window = sum(replica.window for replica in replicas)
    rows, service_s = _measured(model_id, now)
    held = -(-rows // ROWS_A_BATCH)
    cls = class_of(DEFAULT_PRIORITY if priority is None else priority)
    room = Room(window=window, held=min(held, window), free=max(0, window - held))
    verdict = traffic_rules.decide(
        traffic_limits.enabled(),
        Traffic(model=model_id, priority_class=cls, workflow=workflow or ""),
        room=room,
        held={},
    )
    reasons = [Reason(code="traffic_rule", detail=words) for words in verdict.reasons]
    if not replicas:
        reasons.insert(0, Reason(code="no_replica", detail="no replica is ready"))
    elif not room.free:
        detail = f"its servers hold {rows} rows, {ROWS_A_BATCH} to a batch"
        reasons.insert(0, Reason(code="window_full", detail=detail))
    return Quota(
        model=model_id,
        model_version=model.version,
        priority_class=cls,
        replicas=len(replicas),
        window=window,
        held=held,
        free=room.free,
        granted=verdict.granted,
        service_s=service_s,
        wait_s=held * service_s / len(replicas) if replicas and service_s is not None else None,
        reasons=tuple(reasons),
    )


def class_of(priority: int) -> TrafficClass:
    """Return the class of an API score, 0 to 100."""
    if priority >= 67:
        return TrafficClass.HIGH
    return TrafficClass.MIDDLE if priority >= 34 else TrafficClass.LOW


def _measured(model_id: str, now: datetime) -> tuple[int, float | None]:
    """Return the rows that live servers hold, and the seconds they took for a batch."""
    live = Q(state=ServerState.READY, heartbeat_at__gte=now - HEARTBEAT_LIMIT)
    found = ModelServer.objects.filter(live, model=model_id).aggregate(
        held=Sum("queue_rows", default=0),
        busy_s=Sum("busy_seconds", default=0.0),
        rated=Sum("rows_total", default=0),
    )
    rated = found["rated"]
    return found["held"], ROWS_A_BATCH * found["busy_s"] / rated if rated else None
