"""Weights of owners in fair sharing: who may have how much of a rater that several wait for."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import Count

from fulfillment import bell
from fulfillment.errors import NotFound
from fulfillment.models import OwnerShare, Workflow

logger = logging.getLogger(__name__)

DEFAULT_WEIGHT = 1.0


def weights() -> Mapping[str, float]:
    """Return the weights that differ from 1, by owner."""
    rows = OwnerShare.objects.exclude(weight=DEFAULT_WEIGHT)
    return dict(rows.order_by().values_list("owner", "weight"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """An owner with a weight, or with work that is under way."""

    owner: str
    weight: float
    note: str
    unfinished_workflows: int


def owners(*, only: str | None = None) -> list[Owner]:
    """Return who has a share or an unfinished workflow, by name; or only the one asked for."""
    unfinished = Workflow.objects.filter(finished_at=None)
    shares = OwnerShare.objects.all()
    if only is not None:
        unfinished, shares = unfinished.filter(owner=only), shares.filter(owner=only)
    counts = dict(unfinished.values_list("owner").annotate(Count("pk")).order_by())
    by_owner = {share.owner: share for share in shares}
    names = {only} if only is not None else counts.keys() | by_owner.keys()
    return [
        Owner(
            owner=name,
            weight=by_owner[name].weight if name in by_owner else DEFAULT_WEIGHT,
            note=by_owner[name].note if name in by_owner else "",
            unfinished_workflows=counts.get(name, 0),
        )
        for name in sorted(names)
    ]


def put(share: OwnerShare, *, actor: str = "") -> None:
    """Give an owner a weight; what waits goes by it from the next pass of the dispatcher on."""
    # Whether there is a row already is the database's to say: two may put the same owner.
    OwnerShare.objects.update_or_create(
        owner=share.owner, defaults={"weight": share.weight, "note": share.note}
    )
    logger.info(
        "owner_share_put owner=%r weight=%g by=%s", share.owner, share.weight, actor or "system"
    )
    bell.ring()


def remove(owner: str, *, actor: str = "") -> None:
    """Give an owner the weight of all others, 1. Raises NotFound."""
    deleted, _ = OwnerShare.objects.filter(owner=owner).delete()
    if not deleted:
        raise NotFound(f"Owner {owner!r} has no share of its own; its weight is 1.")
    logger.info("owner_share_removed owner=%r by=%s", owner, actor or "system")
    bell.ring()
