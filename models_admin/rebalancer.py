"""The rebalancer: each minute, replicas of a pool move to where the work is.

A round reads what models have to do (`demand`), asks the policy (`policy.allotment`) and writes how
many replicas are wanted, the decision and the outlook in one transaction under the locks of the
pool and its models, so that killed anywhere it has done all or nothing. It starts and ends no
server: host agents bring about what is wanted, and start a replica only when its devices are free.

Whoever resizes a model pins it for an hour. A model keeps a replica for each old version of it that
has work, whatever else it has to do; what it wants beyond that while versions replace one another
is nobody else's. A model whose replicas fail to start gets no more of them.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db import connection, transaction

from models_admin import decisions, demand, prospects
from models_admin.demand import Signal, Silence, VersionDemand
from models_admin.models import (
    AcceleratorPool,
    ModelConfig,
    ModelKind,
    ModelServer,
    ModelVersion,
    Outcome,
    PoolOutlook,
    RebalanceDecision,
    Rebalancing,
)
from models_admin.policy.allotment import Allotment, Change, Member, allot
from models_admin.policy.rebalancing import Due
from models_admin.policy.replicas import ServerState
from models_admin.policy.rollout import VersionState
from models_admin.services import devices_used

logger = logging.getLogger(__name__)

LEAST_APART: Final = timedelta(seconds=30)
"""Of two rounds: a tick that comes twice counts once."""
DRAIN: Final = timedelta(seconds=30)
"""After which a device that another model gives up is usually free."""
FAILS_AFTER: Final = 2
"""Deaths in a row after which a replica counts as one that does not start."""

_LOCK: Final = "models_admin.rebalancer."


def run_once(now: datetime) -> int:
    """Do a round for each pool that is due; return how many."""
    pools = AcceleratorPool.objects.exclude(rebalancing=Rebalancing.OFF).order_by("pk")
    due = list(pools.values_list("pk", flat=True))
    rounds = 0
    if due:
        # Asked outside of any transaction: it is somebody else's code.
        signal = demand.ask(now)
        rounds = sum(_round(pool_id, signal, now) for pool_id in due)
    decisions.erase(now)
    return rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    """A pool and its started models, all locked, and what their agents last saw."""

    pool: AcceleratorPool
    models: Sequence[ModelConfig]
    servers: Mapping[str, Sequence[ModelServer]]


def _round(pool_id: str, signal: Signal | Silence, now: datetime) -> bool:
    """Do one round for a pool; False if somebody else does or did, or there is nothing to do."""
    with transaction.atomic():
        found = _locked(pool_id, now)
        if found is None:
            return False
        _measure(found)
        if isinstance(signal, Silence):
            allotment, outcome = _as_it_is(signal), signal.outcome
        else:
            allotment = _allotment(found, signal, now)
            outcome = Outcome.MOVES if allotment.changes else Outcome.STEADY
        applied = bool(allotment.changes) and found.pool.rebalancing == Rebalancing.ON
        if applied:
            _apply(found, allotment.changes, now)
        _keep(found.pool, allotment, outcome, signal.age, applied=applied, now=now)
    return True


def _locked(pool_id: str, now: datetime) -> _Pool | None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [_LOCK + pool_id]
        )
        (is_alone,) = cursor.fetchone()
    if not is_alone:
        return None
    # Models before their pool, as services lock them.
    models = list(
        ModelConfig.objects.select_for_update()
        .filter(pool=pool_id, kind=ModelKind.HOSTED)
        .order_by("pk")
    )
    pool = AcceleratorPool.objects.select_for_update().filter(pk=pool_id).first()
    started = [model for model in models if model.started]
    if pool is None or pool.rebalancing == Rebalancing.OFF or not started:
        return None
    # One whose clock was set back since does not wait for that time.
    last = PoolOutlook.objects.filter(pk=pool_id).first()
    if last is not None and timedelta(0) <= now - last.at < LEAST_APART:
        return None
    servers: dict[str, list[ModelServer]] = defaultdict(list)
    for server in ModelServer.objects.filter(model__in=started).order_by("ordinal"):
        servers[server.model_id].append(server)
    return _Pool(pool=pool, models=started, servers=servers)


def _measure(found: _Pool) -> None:
    """Remember how long replicas took to start, also for when there is none."""
    for model in found.models:
        took = [
            (server.ready_at - server.started_at).total_seconds()
            for server in found.servers.get(model.pk, ())
            if server.state == ServerState.READY and server.ready_at and server.started_at
        ]
        if took and max(took) != model.start_up_s:
            model.start_up_s = max(took)
            model.save(update_fields=["start_up_s"])


def _as_it_is(silence: Silence) -> Allotment:
    return Allotment(changes=(), needs={}, targets={}, reason=f"{silence.reason}; nothing moves")


def _allotment(found: _Pool, signal: Signal, now: datetime) -> Allotment:
    versions = prospects.new_versions(found.models)
    olds = defaultdict(list)
    for row in ModelVersion.objects.filter(
        model__in=found.models,
        state__in=["", VersionState.RETIRING, VersionState.RETIRED],
        is_withdrawn=False,
    ):
        olds[row.model_id].append(row)
    members = [
        _member(
            model,
            found.servers.get(model.pk, ()),
            signal.of_models.get(model.pk, ()),
            versions[model.pk],
            olds[model.pk],
            now,
        )
        for model in found.models
    ]
    # A model may have come to the pool since its others were locked.
    elsewhere = devices_used(found.pool.pk) - sum(each.replicas * each.devices for each in members)
    return allot(members, found.pool.devices - elsewhere, now)


def _member(
    model: ModelConfig,
    servers: Sequence[ModelServer],
    demanded: Sequence[VersionDemand],
    new_versions: Set[str],
    olds: Sequence[ModelVersion],
    now: datetime,
) -> Member:
    """Return what the policy must know of a model.

    Replicas that it gets serve its present version: an old one with work is owed one replica,
    however much that is.
    """
    present = [each for each in demanded if each.version in new_versions]
    waiting = {each.version for each in demanded if demand.work_s(each)}
    waiting &= {row.version for row in olds} - new_versions
    # Of what cannot be done just now (its rater pauses) there is no demand, but it is owed.
    held = waiting | {row.version for row in olds if row.replicas}
    start_up = None
    if model.start_up_s is not None:
        start_up = timedelta(seconds=model.start_up_s) + DRAIN
    return Member(
        model_id=model.pk,
        replicas=model.wanted_replicas,
        least=min(max(model.replicas_min, len(held)), model.replicas_max),
        default=model.replicas_default,
        most=model.wanted_replicas if any(map(_fails, servers)) else model.replicas_max,
        devices=model.devices_per_replica,
        dues=[
            Due(deadline_at=due.deadline_at, work_s=due.work_s)
            for each in present
            for due in each.dues
        ],
        other_s=sum(each.other_s for each in present) + len(waiting),
        start_up=start_up,
        is_pinned=model.is_pinned(now),
    )


def _fails(server: ModelServer) -> bool:
    pausing = {ServerState.BACKOFF, ServerState.FAILED}
    return server.state in pausing and server.failures >= FAILS_AFTER


def _apply(found: _Pool, changes: Sequence[Change], now: datetime) -> None:
    models = {model.pk: model for model in found.models}
    for change in changes:
        model = models[change.model_id]
        model.wanted_replicas, model.updated_at = change.after, now
        model.save(update_fields=["wanted_replicas", "updated_at"])
        logger.info(
            "rebalanced pool=%s model=%s replicas=%d before=%d",
            found.pool.pk,
            model.pk,
            change.after,
            change.before,
        )


def _keep(
    pool: AcceleratorPool,
    allotment: Allotment,
    outcome: Outcome,
    age: timedelta | None,
    *,
    applied: bool,
    now: datetime,
) -> None:
    age_s = None if age is None else age.total_seconds()
    outlook = PoolOutlook(
        pool=pool,
        at=now,
        needs=dict(allotment.needs),
        reason=allotment.reason,
        signal_age_s=age_s,
    )
    PoolOutlook.objects.bulk_create(
        [outlook],
        update_conflicts=True,
        unique_fields=["pool"],
        update_fields=["at", "needs", "reason", "signal_age_s"],
    )
    decisions.keep(
        RebalanceDecision(
            pool_id=pool.pk,
            at=now,
            mode=pool.rebalancing,
            outcome=outcome,
            applied=applied,
            moves=[
                {"model": each.model_id, "before": each.before, "after": each.after}
                for each in allotment.changes
            ],
            needs=dict(allotment.needs),
            targets=dict(allotment.targets),
            reason=allotment.reason,
            signal_age_s=age_s,
        )
    )
