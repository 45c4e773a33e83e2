"""The traffic rules that are enabled, as plain values: what whoever sends goes by."""

from collections.abc import Sequence

from models_admin.models import TrafficRule
from models_admin.policy.traffic_rules import Rule


def enabled() -> Sequence[Rule]:
    """Return the rules that hold, in one statement."""
    return tuple(as_rule(row) for row in TrafficRule.objects.filter(enabled=True))


def as_rule(row: TrafficRule) -> Rule:
    """Return a stored rule as policies take it."""
    return Rule(
        name=row.name,
        rater=row.rater or None,
        model=row.model or None,
        priority_class=row.priority_class or None,
        trigger=row.trigger or None,
        purpose=row.purpose or None,
        owner=row.owner or None,
        workflow=row.workflow or None,
        min_load=row.min_load,
        max_share=row.max_share,
        max_batches=row.max_batches,
        block=row.block,
        reason=row.reason,
    )
