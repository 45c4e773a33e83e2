"""Workflows that traffic rules block, whatever the load: nothing of them leaves.

They are no work that replicas could do: nobody plans with it and no replica moves for it, until an
operator changes the rule.
"""

from collections.abc import Sequence
from datetime import datetime

from fulfillment import present
from fulfillment.models import Workflow
from fulfillment.policy import limits
from fulfillment.policy.lifecycle import DISPATCHED


def workflows(now: datetime) -> frozenset[int]:
    """Return the workflows of those that are sent that are blocked."""
    rules = blocking(now)
    if not rules:
        return frozenset()
    sent = Workflow.objects.filter(finished_at=None, state__in=DISPATCHED)
    return frozenset(
        workflow.pk
        for workflow in sent.select_related("rater_version").iterator()
        if is_blocked(workflow, rules)
    )


def blocking(now: datetime) -> Sequence[limits.Rule]:
    """Return the rules that let nothing leave, whatever the load."""
    rules, _ = present.rules(now)
    return [rule for rule in rules if rule.block and not rule.min_load]


def is_blocked(workflow: Workflow, rules: Sequence[limits.Rule]) -> bool:
    """Say whether one of the rules holds for a workflow, whose rater version is read."""
    return bool(limits.matched(rules, present.traffic(workflow)))
