"""Why workflows stand behind others: owners over their share, and traffic rules."""

from collections.abc import Iterable
from datetime import datetime

from fulfillment import present, usage
from fulfillment.models import Workflow
from fulfillment.policy import limits
from fulfillment.policy.lifecycle import DISPATCHED
from fulfillment.present import Present


def of(workflows: Iterable[Workflow], now: datetime) -> dict[int, str]:
    """Return, by workflow, why it waits for others, where it does; their versions are read."""
    listed = list(workflows)
    told = usage.standings(listed, now)
    for pk, words in _held_back(listed, now).items():
        told[pk] = "; ".join(filter(None, (words, told.get(pk, ""))))
    return told


def _held_back(workflows: Iterable[Workflow], now: datetime) -> dict[int, str]:
    waiting = [workflow for workflow in workflows if workflow.state in DISPATCHED]
    if not waiting:
        return {}
    rules, directory = present.rules(now)
    met = {w.pk: limits.matched(rules, present.traffic(w)) for w in waiting} if rules else {}
    if not any(met.values()):
        return {}
    moment = Present(now, rules, directory)
    said = {}
    for workflow in waiting:
        if met[workflow.pk]:
            version = workflow.rater_version
            room = moment.room(workflow.rater, version, workflow.batch_size)
            closed = moment.closed(room, met[workflow.pk])
            if closed:
                said[workflow.pk] = f"held back by {', '.join(rule.words for rule in closed)}"
    return said
