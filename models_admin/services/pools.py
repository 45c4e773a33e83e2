"""Pools: registering and changing them, and what of them is in use."""

from collections.abc import Mapping
from typing import Any, Final

from django.db import IntegrityError, transaction
from django.db.models import F, OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce, Greatest

from models_admin.errors import Conflict
from models_admin.models import AcceleratorPool, ModelConfig, ModelVersion, PoolKind, Rebalancing
from models_admin.services.audit import audit, changes, settings_of, state
from models_admin.services.problems import ID, Problem, bad_id, one_of, out_of_range, refuse
from models_admin.services.rows import named, values

MAX_DEVICES: Final = 100_000


def find_pool(pool_id: str) -> AcceleratorPool:
    """Return a pool with its outlook and `devices_used`; raises NotFound."""
    return named(with_use(AcceleratorPool.objects.select_related("outlook")), pool_id, "pool")


def pool_problems(pool: AcceleratorPool) -> list[Problem]:
    """Return what is wrong with a pool that is about to be stored."""
    problems = []
    for field in ("id", "agent"):
        if not ID.fullmatch(getattr(pool, field)):
            problems.append(bad_id(field))
    if pool.kind not in PoolKind.values:
        problems.append(Problem(field="kind", code="bad_choice", detail=one_of(PoolKind.values)))
    if pool.rebalancing not in Rebalancing.values:
        problems.append(
            Problem(field="rebalancing", code="bad_choice", detail=one_of(Rebalancing.values))
        )
    used = devices_used(pool.pk)
    if not 1 <= pool.devices <= MAX_DEVICES:
        problems.append(out_of_range("devices", 1, MAX_DEVICES))
    elif pool.devices < used:
        problems.append(
            Problem(
                field="devices", code="pool_too_small", detail=f"started models use {used} of them"
            )
        )
    return problems


def register_pool(pool: AcceleratorPool, *, actor: str = "") -> tuple[AcceleratorPool, bool]:
    """Store a new pool; return it and whether it is new. Registering the same again is harmless."""
    refuse(pool_problems(pool))
    existing = AcceleratorPool.objects.filter(pk=pool.pk).first()
    if existing is None:
        try:
            with transaction.atomic():
                pool.save(force_insert=True)
                audit("pool_registered", pool.pk, actor, kind="pool", detail=settings_of(pool))
        except IntegrityError:
            existing = find_pool(pool.pk)
        else:
            return pool, True
    if values(existing) != values(pool):
        raise Conflict(f"There is another pool {pool.pk!r} already.", code="pool_exists")
    return existing, False


def save_pool(pool: AcceleratorPool, *, actor: str = "") -> None:
    """Store a pool as it is, new or changed."""
    with transaction.atomic():
        # Locked first: a model that starts meanwhile needs devices, too.
        stored = AcceleratorPool.objects.select_for_update().filter(pk=pool.pk).first()
        refuse(pool_problems(pool))
        if stored is None:
            pool.save(force_insert=True)
            audit("pool_registered", pool.pk, actor, kind="pool", detail=settings_of(pool))
        elif detail := changes(state(stored), state(pool)):
            pool.save()
            audit("pool_changed", pool.pk, actor, kind="pool", detail=detail)


def change_pool(pool_id: str, changes: Mapping[str, Any], *, actor: str = "") -> AcceleratorPool:
    """Change settings of a pool."""
    with transaction.atomic():
        pool = _lock(pool_id)
        for name, value in changes.items():
            setattr(pool, name, value)
        save_pool(pool, actor=actor)
    return pool


def remove_pool(pool_id: str, *, actor: str = "") -> None:
    """Delete a pool that no model belongs to; what it decided and measured is kept its time."""
    with transaction.atomic():
        pool = _lock(pool_id)
        if models := list(pool.models.order_by("pk").values_list("pk", flat=True)[:5]):
            raise Conflict(
                f"Models belong to pool {pool_id!r} ({', '.join(models)}); give them another pool "
                "first.",
                code="pool_in_use",
            )
        audit("pool_removed", pool_id, actor, kind="pool", detail=settings_of(pool))
        pool.delete()


def devices_used(pool_id: str, *, without: str = "") -> int:
    """Return how many devices of a pool the started models want, one of them left out.

    While a version replaces another, the two together may want more than their model does.
    """
    models = ModelConfig.objects.filter(pool=pool_id, started=True).exclude(pk=without)
    return int(models.aggregate(used=_used())["used"] or 0)


def with_use(pools: QuerySet[AcceleratorPool]) -> QuerySet[AcceleratorPool]:
    """Let each pool have `devices_used`, which says the same, in one statement for all."""
    models = ModelConfig.objects.filter(pool=OuterRef("pk"), started=True).values("pool")
    used = models.annotate(used=_used()).values("used")
    return pools.annotate(devices_used=Coalesce(Subquery(used), 0))


def _used() -> Sum:
    versions = (
        ModelVersion.objects.filter(model=OuterRef("pk"))
        .values("model")
        .annotate(replicas=Sum("replicas"))
        .values("replicas")
    )
    replicas = Greatest(F("wanted_replicas"), Coalesce(Subquery(versions), 0))
    return Sum(replicas * F("devices_per_replica"))


def _lock(pool_id: str) -> AcceleratorPool:
    return named(AcceleratorPool.objects.select_for_update(), pool_id, "pool")
