"""What the server answers, as typed values.

Readers are lenient: an unknown field is kept in `raw`, a missing one takes the default, so that
client and server of different age get along.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

Raw = Mapping[str, Any]
T = TypeVar("T")

TERMINAL_STATES = frozenset({"COMPLETED", "PARTIAL", "FAILED", "CANCELLED"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Requests of a workflow by state."""

    total: int = 0
    pending: int = 0
    running: int = 0
    retrying: int = 0
    completed: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.timed_out + self.cancelled


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where the completed requests have their rating from."""

    archive: int = 0
    coalesced: int = 0
    model: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share answered by the archive; None before anything is completed."""
        known = self.archive + self.coalesced + self.model
        return self.archive / known if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Eta:
    """Seconds to the end: the estimate and the range that it probably lies in."""

    seconds: float
    low: float | None = None
    high: float | None = None
    in_time: bool = True
    """False: some of it times out by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """How much of a workflow is expected before its deadline, and why not all."""

    share_in_time: float
    cut: float = 0.0
    reason: str = ""
    made_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When what happened to a workflow; None for what has not."""

    accepted_at: datetime | None = None
    closed_at: datetime | None = None
    first_dispatch_at: datetime | None = None
    first_result_at: datetime | None = None
    last_result_at: datetime | None = None
    finished_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How values are spread."""

    n: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributions:
    """What the requests of a workflow went through; unless `exact`, a sample of them."""

    requests: int = 0
    looked_at: int = 0
    exact: bool = True
    waited_s: Spread | None = None
    """Upload to rating, of what the archive did not answer at once."""
    open_s: Spread | None = None
    """Upload to now, of what is still open."""
    attempts: Spread | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workflow:
    """One evaluation workflow as the server last described it."""

    id: str
    name: str = ""
    rater: str = ""
    owner: str = ""
    priority: int | None = None
    priority_asked: int | None = None
    priority_reason: str = ""
    state: str = ""
    counts: Counts = Counts()
    sources: Sources = Sources()
    mean_score: float | None = None
    scored: int = 0
    eta: Eta | None = None
    forecast: Forecast | None = None
    standing: str = ""
    """Why its owner is served after others; empty where it is not."""
    created_at: datetime | None = None
    closed_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deadline_at: datetime | None = None
    timeline: Timeline = Timeline()
    model_calls: int = 0
    attempts: int = 0
    accelerator_seconds: float = 0.0
    raw: Raw = field(default_factory=dict, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def priority_clipped(self) -> bool:
        """Whether a rule gave less than was asked for; `priority_reason` says which."""
        asked, given = self.priority_asked, self.priority
        return asked is not None and given is not None and given < asked


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProblem:
    """A row that was refused (or taken with a warning) alone, by its line in what was sent."""

    line: int | None
    code: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What happened to a workflow; the same `id` is the `webhook-id` of its deliveries."""

    id: str
    type: str
    round: int = 1
    data: Raw = field(default_factory=dict)
    created_at: datetime | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Webhook:
    """Who is told of a workflow's end; `secret` signs, and is there if the server made it."""

    endpoint: str
    url: str
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What became of an upload. `replayed`: the same upload had been taken before."""

    workflow: Workflow
    accepted: int = 0
    rejected: tuple[RowProblem, ...] = ()
    warnings: tuple[RowProblem, ...] = ()
    webhook: Webhook | None = None
    replayed: bool = False
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that alone would have it done in time: of a field of the workflow, of `rows`, of
    `replicas` or `calls`."""

    change: str
    to: Any
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What would become of rows if they were submitted now; nothing of it was stored.

    Counts from `rows` on are scaled to `sample_of`, if that was given. What is None nobody knows.
    """

    rater: str = ""
    accepted: int = 0
    rejected: tuple[RowProblem, ...] = ()
    sample_of: int | None = None
    rows: int = 0
    hits: int = 0
    coalesced: int = 0
    items: int = 0
    batches: int = 0
    model_calls: int = 0
    accelerator_seconds: float | None = None
    deadline_s: int | None = None
    priority: int | None = None
    eta: Eta | None = None
    feasible: bool | None = None
    share_in_time: float | None = None
    reason: str = ""
    displaces: int = 0
    remedies: tuple[Remedy, ...] = ()
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rating:
    """The record of one request; `score` is None unless `state` is COMPLETED."""

    request_id: str
    state: str
    query_id: str | None = None
    result_id: str | None = None
    side: str | None = None
    score: float | None = None
    label: str | None = None
    output: Any = None
    source: str | None = None
    error: Any = None
    attempts: int = 0
    rated_at: datetime | None = None
    age_s: float | None = None
    look: str | None = None
    rated_by: str | None = None
    rater_version: str | None = None
    warnings: tuple[Any, ...] = ()
    extra: Any = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rater:
    """A rater that workflows can name."""

    id: str
    autorater: str = ""
    model: str = ""
    mode: str = ""
    score_min: float | None = None
    score_max: float | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that raters call."""

    id: str
    kind: str = ""
    protocol: str = ""
    state: str = ""
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Devices that models share, and whether replicas move between these."""

    id: str
    kind: str = ""
    devices: int = 0
    devices_used: int = 0
    rebalancing: str = ""
    """`off`, `dry_run` or `on`."""
    found: str = ""
    """What the rebalancer last found; empty before its first round."""
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Another number of replicas for a model."""

    model: str
    before: int
    after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A round of the rebalancer; its moves were made if it is `applied`."""

    id: int
    at: datetime | None = None
    mode: str = ""
    outcome: str = ""
    applied: bool = False
    moves: tuple[Move, ...] = ()
    reason: str = ""
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page(Generic[T]):
    """Part of a list; `next` is the cursor of the following part, None at the end."""

    items: tuple[T, ...]
    next: str | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RatingsPage:
    """Part of a result file in the format asked for, and the cursor of the part after it."""

    content: bytes
    next: str | None = None


def workflow_from(raw: Raw) -> Workflow:
    return Workflow(
        id=_text(raw, "id"),
        name=_text(raw, "name"),
        rater=_name(raw, "rater"),
        owner=_name(raw, "owner"),
        priority=_whole(raw, "priority"),
        priority_asked=_whole(raw, "priority_asked"),
        priority_reason=_text(raw, "priority_reason"),
        state=_text(raw, "state"),
        counts=Counts(**{name: _count(_mapping(raw, "counts"), name) for name in _COUNTS}),
        sources=Sources(**{name: _count(_mapping(raw, "sources"), name) for name in _SOURCES}),
        mean_score=_number(raw, "mean_score"),
        scored=_count(raw, "scored"),
        eta=_eta(raw.get("eta")),
        forecast=_forecast(raw.get("forecast")),
        standing=_text(raw, "standing"),
        created_at=_instant(raw, "created_at"),
        closed_at=_instant(raw, "closed_at"),
        started_at=_instant(raw, "started_at"),
        finished_at=_instant(raw, "finished_at"),
        deadline_at=_instant(raw, "deadline_at"),
        timeline=Timeline(**{name: _instant(_mapping(raw, "timeline"), name) for name in _TIMES}),
        model_calls=_count(raw, "model_calls"),
        attempts=_count(raw, "attempts"),
        accelerator_seconds=_number(raw, "accelerator_seconds") or 0.0,
        raw=raw,
    )


def submission_from(raw: Raw, *, replayed: bool = False) -> Submission:
    return Submission(
        workflow=workflow_from(raw),
        accepted=_count(raw, "accepted"),
        rejected=_row_problems(raw.get("rejected")),
        warnings=_row_problems(raw.get("warnings")),
        webhook=_webhook(raw.get("webhook")),
        replayed=replayed,
        raw=raw,
    )


def estimate_from(raw: Raw) -> Estimate:
    feasible, remedies = raw.get("feasible"), raw.get("remedies")
    return Estimate(
        rater=_name(raw, "rater"),
        accepted=_count(raw, "accepted"),
        rejected=_row_problems(raw.get("rejected")),
        sample_of=_whole(raw, "sample_of"),
        rows=_count(raw, "rows"),
        hits=_count(raw, "hits"),
        coalesced=_count(raw, "coalesced"),
        items=_count(raw, "items"),
        batches=_count(raw, "batches"),
        model_calls=_count(raw, "model_calls"),
        accelerator_seconds=_number(raw, "accelerator_seconds"),
        deadline_s=_whole(raw, "deadline_s"),
        priority=_whole(raw, "priority"),
        eta=_eta(raw.get("eta")),
        feasible=feasible if isinstance(feasible, bool) else None,
        share_in_time=_number(raw, "share_in_time"),
        reason=_text(raw, "reason"),
        displaces=_count(raw, "displaces"),
        remedies=tuple(
            Remedy(change=_text(each, "change"), to=each.get("to"), detail=_text(each, "detail"))
            for each in (remedies if isinstance(remedies, list) else ())
            if isinstance(each, Mapping)
        ),
        raw=raw,
    )


def event_from(raw: Raw) -> Event:
    data = raw.get("data")
    return Event(
        id=_text(raw, "id"),
        type=_text(raw, "type"),
        round=_count(raw, "round"),
        data=data if isinstance(data, dict) else {},
        created_at=_instant(raw, "created_at"),
        raw=raw,
    )


def _webhook(raw: Any) -> Webhook | None:
    if not isinstance(raw, dict):
        return None
    return Webhook(
        endpoint=_text(raw, "endpoint"),
        url=_text(raw, "url"),
        secret=_optional_text(raw, "secret"),
    )


def rating_from(raw: Raw) -> Rating:
    warnings = raw.get("warnings")
    return Rating(
        request_id=_text(raw, "request_id"),
        state=_text(raw, "state"),
        query_id=_optional_text(raw, "query_id"),
        result_id=_optional_text(raw, "result_id"),
        side=_optional_text(raw, "side"),
        score=_number(raw, "score"),
        label=_optional_text(raw, "label"),
        output=raw.get("output"),
        source=_optional_text(raw, "source"),
        error=raw.get("error"),
        attempts=_count(raw, "attempts"),
        rated_at=_instant(raw, "rated_at"),
        age_s=_number(raw, "age_s"),
        look=_optional_text(raw, "look"),
        rated_by=_optional_text(raw, "rated_by"),
        rater_version=_optional_text(raw, "rater_version"),
        warnings=tuple(warnings) if isinstance(warnings, list) else (),
        extra=raw.get("extra"),
        raw=raw,
    )


def rater_from(raw: Raw) -> Rater:
    return Rater(
        id=_text(raw, "id"),
        autorater=_text(raw, "autorater"),
        model=_name(raw, "model"),
        mode=_text(raw, "mode"),
        score_min=_number(raw, "score_min"),
        score_max=_number(raw, "score_max"),
        raw=raw,
    )


def model_from(raw: Raw) -> Model:
    return Model(
        id=_text(raw, "id"),
        kind=_text(raw, "kind"),
        protocol=_text(raw, "protocol"),
        state=_text(raw, "state"),
        raw=raw,
    )


def pool_from(raw: Raw) -> Pool:
    return Pool(
        id=_text(raw, "id"),
        kind=_text(raw, "kind"),
        devices=_count(raw, "devices"),
        devices_used=_count(raw, "devices_used"),
        rebalancing=_text(raw, "rebalancing"),
        found=_text(_mapping(raw, "outlook"), "reason"),
        raw=raw,
    )


def decision_from(raw: Raw) -> Decision:
    moves = raw.get("moves")
    return Decision(
        id=_count(raw, "id"),
        at=_instant(raw, "at"),
        mode=_text(raw, "mode"),
        outcome=_text(raw, "outcome"),
        applied=raw.get("applied") is True,
        moves=tuple(
            Move(model=_text(m, "model"), before=_count(m, "before"), after=_count(m, "after"))
            for m in (moves if isinstance(moves, list) else ())
            if isinstance(m, Mapping)
        ),
        reason=_text(raw, "reason"),
        raw=raw,
    )


def distributions_from(raw: Raw) -> Distributions:
    return Distributions(
        requests=_count(raw, "requests"),
        looked_at=_count(raw, "looked_at"),
        exact=raw.get("exact") is not False,
        waited_s=_spread(raw.get("waited_s")),
        open_s=_spread(raw.get("open_s")),
        attempts=_spread(raw.get("attempts")),
        raw=raw,
    )


_TIMES = tuple(Timeline.__dataclass_fields__)
_COUNTS = tuple(Counts.__dataclass_fields__)
_SOURCES = tuple(Sources.__dataclass_fields__)


def _eta(raw: object) -> Eta | None:
    if not isinstance(raw, Mapping) or (seconds := _number(raw, "seconds")) is None:
        return None
    return Eta(
        seconds=seconds,
        low=_number(raw, "low"),
        high=_number(raw, "high"),
        in_time=raw.get("in_time") is not False,
    )


def _forecast(raw: object) -> Forecast | None:
    if not isinstance(raw, Mapping) or (share := _number(raw, "share_in_time")) is None:
        return None
    return Forecast(
        share_in_time=share,
        cut=_number(raw, "cut") or 0.0,
        reason=_text(raw, "reason"),
        made_at=_instant(raw, "made_at"),
    )


def _spread(raw: object) -> Spread | None:
    if not isinstance(raw, Mapping):
        return None
    values = {name: _number(raw, name) or 0.0 for name in ("p50", "p90", "p99", "max")}
    return Spread(n=_count(raw, "n"), **values)


def _row_problems(raw: object) -> tuple[RowProblem, ...]:
    if not isinstance(raw, list):
        return ()
    return tuple(
        RowProblem(line=_whole(row, "line"), code=_text(row, "code"), detail=_text(row, "detail"))
        for row in raw
        if isinstance(row, Mapping)
    )


def _mapping(raw: Raw, name: str) -> Raw:
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(raw: Raw, name: str) -> str:
    return _optional_text(raw, name) or ""


def _optional_text(raw: Raw, name: str) -> str | None:
    value = raw.get(name)
    return None if value is None else str(value)


def _name(raw: Raw, name: str) -> str:
    """A reference, which the server may give as an id or as an object that has one."""
    value = raw.get(name)
    return _text(value, "id") if isinstance(value, Mapping) else _text(raw, name)


def _number(raw: Raw, name: str) -> float | None:
    value = raw.get(name)
    return float(value) if isinstance(value, int | float) else None


def _whole(raw: Raw, name: str) -> int | None:
    value = raw.get(name)
    return value if isinstance(value, int) else None


def _count(raw: Raw, name: str) -> int:
    return _whole(raw, name) or 0


def _instant(raw: Raw, name: str) -> datetime | None:
    try:
        return datetime.fromisoformat(_text(raw, name))
    except ValueError:
        return None
