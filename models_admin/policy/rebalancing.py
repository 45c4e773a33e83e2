"""Rebalancing: how many replicas of a pool each model gets, by the pressure of deadlines.

A model needs, for each of its deadlines, what is due by then over the time that is left once a
moved replica has started; the largest of these is its need. If all needs fit into the pool they
are met. The spare first goes to models whose backlog, committed or not, would last longer than a
quarter of an hour: an idle replica does nobody good while another model has work. It is shared by
default allocation and not by backlog, or a long backlog that is due in days would take all of it
from a short one that is due in an hour. What is left goes by default allocation too; it is what
absorbs the next arrival. If the needs don't fit, each model with work gets one replica, the highest
pressure first; then each up to its default, the smallest need first; then the rest by need.

A move costs a start-up in which the replica serves nobody, so that only whole replicas move, and
only to a model whose backlog would last longer than that. Nothing is killed: the replica drains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil, floor, inf
from typing import Final

START_UP: Final = timedelta(seconds=240)
SHORTEST: Final = timedelta(seconds=60)
"""A deadline that is nearer, or past, counts as this far: the need stays finite."""
MOST_MOVES: Final = 10
"""A round."""
WORTH_START_UPS: Final = 1.5
"""A move is worth it where a replica's backlog lasts so many start-ups."""
WORTH_START_UPS_TOP: Final = 0.5
"""The same for the model with most replicas by default: there a wrong move costs least."""
CLEAR: Final = timedelta(minutes=15)
"""The spare goes first to whoever has more than it does in so long."""
INCUMBENT: Final = 2.0
"""Where there are fewer replicas than models with work, one leaves for a need so many times that of
the model that has it."""

# What floats leave of a whole replica.
_ALMOST: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Work of a model that is due at one instant, in replica-seconds."""

    deadline_at: datetime
    work_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One model of a pool: what it has, and what it must do."""

    model_id: str
    default: int
    least: int
    """It keeps so many, also without work."""
    replicas: int
    """Those that serve and those that start."""
    dues: Sequence[Due]
    """Committed work."""
    other_s: float = 0.0
    """Work that is not committed, in replica-seconds; it needs somebody, but no speed."""
    most: int | None = None
    """It has no use for more."""
    start_up: timedelta | None = None
    """Until a replica that is moved to it serves, where that was measured."""
    lot: int = 1
    """It works with so many together, and not with a part of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Replicas that leave one model for another."""

    donor: str
    receiver: str
    replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebalance:
    """What to move now, and what each model should have."""

    moves: tuple[Move, ...]
    needs: Mapping[str, float]
    targets: Mapping[str, float]
    shared: str
    """How the replicas are shared out."""
    reason: str


def rebalance(
    models: Sequence[Model],
    now: datetime,
    *,
    start_up: timedelta = START_UP,
    most_moves: int = MOST_MOVES,
) -> Rebalance:
    """Decide one round of moves within a pool; all replicas of its models are the pool."""
    total = sum(model.replicas for model in models)
    needs = {model.model_id: need(model, now, start_up=start_up) for model in models}
    pressures = {model.model_id: _pressure(model, now, start_up) for model in models}
    targets, shared = _targets(models, needs, pressures, total)
    moves = _moves(models, targets, start_up, most_moves)
    wanted = sum(needs.values())
    moved = sum(move.replicas for move in moves)
    return Rebalance(
        moves=tuple(moves),
        needs=needs,
        targets=targets,
        shared=shared,
        reason=f"{wanted:.1f} of {total} replicas are needed: {shared}; {moved} move",
    )


def need(model: Model, now: datetime, *, start_up: timedelta = START_UP) -> float:
    """Return the replicas with which a model meets its deadlines."""
    return min(max(_pressure(model, now, start_up), float(_base(model))), _most(model))


def _pressure(model: Model, now: datetime, start_up: timedelta) -> float:
    """Return the replicas, in parts of one too, that do in time what is committed."""
    due_s = 0.0
    most = 0.0
    for due in sorted(model.dues, key=lambda due: due.deadline_at):
        due_s += due.work_s
        left = max(SHORTEST, due.deadline_at - now - _start_up(model, start_up))
        most = max(most, due_s / left.total_seconds())
    return most


def _base(model: Model) -> int:
    """Return what a model gets before others get more: whoever has work must have somebody."""
    return max(model.least, model.lot if _backlog_s(model) > 0 else 0)


def _targets(
    models: Sequence[Model], needs: Mapping[str, float], pressures: Mapping[str, float], total: int
) -> tuple[Mapping[str, float], str]:
    spare = total - sum(needs.values())
    if spare < 0:
        return (
            _short(models, needs, pressures, total),
            "each gets one, then up to its default, the smallest need first, the rest by need",
        )
    extra = _for_backlogs(models, needs, spare)
    spare -= sum(extra.values())
    defaults = sum(model.default for model in models) or 1
    return {
        model.model_id: min(
            needs[model.model_id] + extra[model.model_id] + spare * model.default / defaults,
            _most(model),
        )
        for model in models
    }, "all are met, the spare goes to long backlogs, by default allocation"


def _short(
    models: Sequence[Model], needs: Mapping[str, float], pressures: Mapping[str, float], total: int
) -> Mapping[str, float]:
    """Share out replicas that are fewer than all need."""
    left = float(total)
    targets: dict[str, float] = {}

    def claim(model: Model) -> tuple[float, float, str]:
        weight = INCUMBENT if model.replicas else 1.0
        return -weight * pressures[model.model_id], -weight * _backlog_s(model), model.model_id

    for model in sorted(models, key=claim):
        lots = floor(min(needs[model.model_id], _base(model), left) / model.lot)
        targets[model.model_id] = given = float(lots * model.lot)
        left -= given
    for model in sorted(models, key=lambda model: (needs[model.model_id], model.model_id)):
        more = min(needs[model.model_id], float(model.default)) - targets[model.model_id]
        given = min(max(0.0, more), left)
        targets[model.model_id] += given
        left -= given
    unmet = {model_id: needs[model_id] - given for model_id, given in targets.items()}
    lacking = sum(unmet.values())
    return {
        model_id: given + left * unmet[model_id] / lacking for model_id, given in targets.items()
    }


def _for_backlogs(
    models: Sequence[Model], needs: Mapping[str, float], spare: float
) -> Mapping[str, float]:
    """Share out spare replicas to those that need longer than CLEAR with what they need.

    They get them in proportion to their defaults, none more than it lacks.
    """
    lacking = {
        model.model_id: min(_backlog_s(model) / CLEAR.total_seconds(), _most(model))
        - needs[model.model_id]
        for model in models
    }
    extra = dict.fromkeys(lacking, 0.0)
    weights = {m.model_id: max(m.default, 1) for m in models if lacking[m.model_id] > _ALMOST}
    while weights and spare > _ALMOST:
        each = spare / sum(weights.values())
        for model_id, weight in weights.items():
            given = min(each * weight, lacking[model_id] - extra[model_id])
            extra[model_id] += given
            spare -= given
        weights = {n: w for n, w in weights.items() if lacking[n] - extra[n] > _ALMOST}
    return extra


def _backlog_s(model: Model) -> float:
    return sum(due.work_s for due in model.dues) + model.other_s


def _most(model: Model) -> float:
    return inf if model.most is None else float(max(model.most, model.least))


def _start_up(model: Model, otherwise: timedelta) -> timedelta:
    return otherwise if model.start_up is None else model.start_up


def _moves(
    models: Sequence[Model], targets: Mapping[str, float], start_up: timedelta, most_moves: int
) -> list[Move]:
    top = max(models, key=lambda model: (model.default, model.model_id), default=None)
    surplus = {model.model_id: model.replicas - targets[model.model_id] for model in models}
    donors = {
        model.model_id: min(floor(surplus[model.model_id] + _ALMOST), model.replicas - model.least)
        for model in models
    }
    # They give also where their surplus is a part of a lot, if somebody has none.
    above = {
        model.model_id: model.replicas - _base(model)
        for model in models
        if surplus[model.model_id] > _ALMOST
    }
    lacks = [
        (targets[model.model_id] - model.replicas, model)
        for model in models
        if _is_worth(model, _start_up(model, start_up), is_top=model is top)
    ]
    counts: dict[tuple[str, str], int] = {}
    left = most_moves
    for lack, receiver in sorted(
        lacks, key=lambda entry: (entry[1].replicas > 0, -entry[0], entry[1].model_id)
    ):
        starves = 0 if receiver.replicas else min(receiver.lot, ceil(lack - _ALMOST))
        wanted = max(floor(lack + _ALMOST), starves)
        while wanted > 0 and left > 0:
            donor = max(donors, key=lambda model_id: (donors[model_id], model_id))
            if donors[donor] < 1:
                givers = [name for name, spare in above.items() if spare > 0]
                if starves < 1 or not givers:
                    break
                donor = max(givers, key=lambda model_id: (surplus[model_id], model_id))
            starves -= 1
            donors[donor] -= 1
            surplus[donor] -= 1
            if donor in above:
                above[donor] -= 1
            counts[donor, receiver.model_id] = counts.get((donor, receiver.model_id), 0) + 1
            wanted -= 1
            left -= 1
    return [
        Move(donor=donor, receiver=receiver, replicas=count)
        for (donor, receiver), count in counts.items()
    ]


def _is_worth(model: Model, start_up: timedelta, *, is_top: bool) -> bool:
    backlog_s = _backlog_s(model)
    each_s = backlog_s / model.replicas if model.replicas else (inf if backlog_s else 0.0)
    start_ups = WORTH_START_UPS_TOP if is_top else WORTH_START_UPS
    return each_s > start_ups * start_up.total_seconds()
