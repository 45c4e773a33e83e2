"""What owners were served of late: kept over leaders, and told to those over their share.

The leader alone knows it. It writes down every few seconds whoever counts; a new leader goes on
with that, so that a flood does not begin anew with each. What is lost is a little fairness.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from fulfillment.models import OwnerUsage, Workflow
from fulfillment.policy import fairness, ordering
from fulfillment.policy.fairness import OverShare, Usage
from fulfillment.policy.lifecycle import DISPATCHED

MOST_WRITTEN = 200
"""Owners of a rater version: those who were served most while others waited."""
REMEMBERED = timedelta(hours=6)
"""After six half-lives there is little left."""
TOLD = timedelta(seconds=60)
"""How long an owner is told that it is over its share, after it was last written."""


def remember(
    orders: Mapping[int, ordering.Memory],
    over: Mapping[int, Mapping[str, OverShare]],
    now: datetime,
) -> None:
    """Write what changed since it was last written; forget what nobody is served of any more."""
    rows = [
        row
        for version_id, order in orders.items()
        if order.usage.at is not None
        for row in _rows(version_id, order.usage, over.get(version_id, {}), now)
    ]
    OwnerUsage.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["rater_version", "owner"],
        update_fields=["recent", "contended", "used", "allowed", "written_at"],
    )
    OwnerUsage.objects.filter(written_at__lt=now - REMEMBERED).delete()


def recall(now: datetime) -> dict[int, ordering.Memory]:
    """Return what the last leader wrote, by rater version, aged to now."""
    recent: dict[int, dict[str, float]] = {}
    contended: dict[int, dict[str, float]] = {}
    for row in OwnerUsage.objects.filter(written_at__gt=now - REMEMBERED):
        usage = fairness.aged(
            Usage(
                at=row.written_at,
                recent={row.owner: row.recent},
                contended={row.owner: row.contended},
            ),
            now,
        )
        recent.setdefault(row.rater_version_id, {}).update(usage.recent)
        contended.setdefault(row.rater_version_id, {}).update(usage.contended)
    return {
        version_id: ordering.Memory(
            usage=Usage(at=now, recent=recent[version_id], contended=contended[version_id])
        )
        for version_id in recent
    }


def standings(workflows: Iterable[Workflow], now: datetime) -> dict[int, str]:
    """Return, by workflow, why its owner stands behind the others, where it does."""
    waiting = [workflow for workflow in workflows if workflow.state in DISPATCHED]
    if not waiting:
        return {}
    rows = OwnerUsage.objects.filter(
        rater_version__in={workflow.rater_version_id for workflow in waiting},
        owner__in={workflow.owner for workflow in waiting},
        used__isnull=False,
        written_at__gt=now - TOLD,
    )
    reasons = {
        (row.rater_version_id, row.owner): OverShare(used=row.used, allowed=row.allowed).reason
        for row in rows
        if row.used is not None and row.allowed is not None
    }
    return {
        workflow.pk: reasons[key]
        for workflow in waiting
        if (key := (workflow.rater_version_id, workflow.owner)) in reasons
    }


def _rows(
    version_id: int, usage: Usage, over: Mapping[str, OverShare], now: datetime
) -> list[OwnerUsage]:
    counting = sorted(
        {*usage.recent, *usage.contended},
        key=lambda owner: (
            owner not in over,
            -usage.contended.get(owner, 0.0),
            -usage.recent.get(owner, 0.0),
        ),
    )
    return [
        OwnerUsage(
            rater_version_id=version_id,
            owner=owner,
            recent=usage.recent.get(owner, 0.0),
            contended=usage.contended.get(owner, 0.0),
            used=over[owner].used if owner in over else None,
            allowed=over[owner].allowed if owner in over else None,
            written_at=now,
        )
        for owner in counting[:MOST_WRITTEN]
    ]
