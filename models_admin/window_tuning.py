"""Finds the window of each hosted model: the smallest with which its replicas do all they can.

Each minute it is looked whether a model has had more work than its window let through: there is
some for minutes, and its replicas hold what they may. Between two such looks what servers did
is due to the window alone, and `policy.windows` says which window comes next. While there
is less to do, or nobody tells, windows stay as they are.

All of a round is one transaction: killed anywhere, a minute is lost.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connection, transaction

from models_admin import demand, serving
from models_admin.demand import Silence, VersionDemand
from models_admin.directory import HEARTBEAT_LIMIT
from models_admin.models import ModelConfig, ModelKind, ModelServer, TunedWindow, tuned_window
from models_admin.policy.replicas import ServerState
from models_admin.policy.windows import Measure, folded, tune

logger = logging.getLogger(__name__)

PERIOD: Final = timedelta(seconds=60)
LEAST_APART: Final = timedelta(seconds=30)
"""Of two rounds: a tick that comes twice counts once."""
MOST_APART: Final = timedelta(seconds=150)
"""Of two looks between which nobody was idle: what was longer ago says nothing of meanwhile."""
ENOUGH_WORK: Final = 1.5 * PERIOD
"""For each replica, at both ends of a period: then it had work all along."""
HELD: Final = 0.5
"""Of the window; more may be on its way at the moment of the look."""
_LOCK: Final = "models_admin.window_tuning"

_Seen = dict[str, tuple[float, int, float]]
"""Seconds busy and tokens by run of a replica, and when in seconds."""


def run_once(now: datetime) -> int:
    """Do a round; return how many windows were measured."""
    models = ModelConfig.objects.filter(kind=ModelKind.HOSTED, started=True, tunes_window=True)
    if not models.exists():
        return 0
    # Asked outside of any transaction: it is somebody else's code.
    signal, held = demand.ask(now), demand.held(now)
    if isinstance(signal, Silence) or held is None:
        return 0
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [_LOCK])
        (is_alone,) = cursor.fetchone()
        if not is_alone:
            return 0
        servers = _ready(now)
        return sum(
            _look(
                model,
                # Others may have none of the work, or all: what they do is due to something else.
                [each for each in servers[model.pk] if each.version == model.version],
                _work_s(signal.of_models.get(model.pk, ()), model.version),
                held,
                now,
            )
            for model in models.select_related("tuned_window").order_by("pk")
        )


def _ready(now: datetime) -> Mapping[str, Sequence[ModelServer]]:
    found = defaultdict(list)
    live = ModelServer.objects.filter(
        state=ServerState.READY, heartbeat_at__gte=now - HEARTBEAT_LIMIT
    )
    for server in live.order_by("ordinal"):
        found[server.model_id].append(server)
    return found


def _work_s(versions: Iterable[VersionDemand], version: str) -> float:
    """Return what there is to do for a version; "" is work for any."""
    return sum(demand.work_s(each) for each in versions if each.version in ("", version))


def _look(
    model: ModelConfig,
    servers: Sequence[ModelServer],
    work_s: float,
    held: Mapping[str, int],
    now: datetime,
) -> bool:
    """Measure a model's window, if it was full since the last look, and tune it."""
    row, is_fresh = _row_of(model, now)
    if not is_fresh and timedelta(0) <= now - row.at < LEAST_APART:
        return False
    is_full = (
        bool(servers)
        and work_s >= ENOUGH_WORK.total_seconds() * len(servers)
        and sum(held.get(each.key, 0) for each in servers) >= HELD * row.window * len(servers)
    )
    before, since = _seen(row), now - row.at
    seen = _seconds(servers) if is_full else {}
    measure = _measure(before, seen, now) if timedelta(0) < since <= MOST_APART else None
    row.seen, row.at = {key: list(each) for key, each in seen.items()}, now
    if measure is not None:
        _tune(row, measure, fits=_fits(row.window, servers, serving.room(model.serving)))
    row.save()
    return measure is not None


def _row_of(model: ModelConfig, now: datetime) -> tuple[TunedWindow, bool]:
    """Return what is known of a model's window, and whether that begins anew."""
    row = tuned_window(model)
    if row is not None:
        return row, False
    fresh = TunedWindow(
        model=model,
        window=model.window,
        start=model.window,
        version=model.version,
        reason="not measured yet",
        at=now,
    )
    # What is there is of another version or another figure.
    fresh._state.adding = getattr(model, "tuned_window", None) is None
    return fresh, True


def _seconds(servers: Sequence[ModelServer]) -> _Seen:
    return {
        each.key: (each.busy_seconds, each.tokens_total, each.heartbeat_at.timestamp())
        for each in servers
        if each.heartbeat_at is not None
    }


def _seen(row: TunedWindow) -> _Seen:
    found: dict[str, Any] = row.seen
    return {key: (each[0], each[1], each[2]) for key, each in found.items()}


def _measure(before: _Seen, after: _Seen, now: datetime) -> Measure | None:
    """Return what replicas did that were there all along; None where none was."""
    busy_s = tokens = lived_s = 0.0
    for key in before.keys() & after.keys():
        busy_s += max(0.0, after[key][0] - before[key][0])
        tokens += max(0, after[key][1] - before[key][1])
        lived_s += max(0.0, after[key][2] - before[key][2])
    if not lived_s:
        return None
    # Of servers that are asked each two seconds more may be told than there was.
    return Measure(busy=min(busy_s / lived_s, 1.0), pace=tokens / busy_s if busy_s else 0.0, at=now)


def _fits(window: int, servers: Sequence[ModelServer], rows: int) -> int | None:
    """Return the window with which servers that hold so many rows refuse none; None for any."""
    held = max((server.queue_rows for server in servers), default=0)
    return window * rows // held if held else None


def _tune(row: TunedWindow, measure: Measure, *, fits: int | None) -> None:
    measures = {
        int(window): Measure(busy=each[0], pace=each[1], at=datetime.fromisoformat(each[2]))
        for window, each in row.measures.items()
    }
    measures[row.window] = folded(measures.get(row.window), measure)
    tuned = tune(row.window, measures, start=row.start, now=measure.at, fits=fits)
    if tuned.window != row.window:
        logger.info(
            "window tuned model=%s window=%d before=%d: %s",
            row.model_id,
            tuned.window,
            row.window,
            tuned.reason,
        )
    row.window, row.reason = tuned.window, tuned.reason
    row.measures = {
        str(window): [round(each.busy, 4), round(each.pace, 1), each.at.isoformat()]
        for window, each in sorted(measures.items())
    }
