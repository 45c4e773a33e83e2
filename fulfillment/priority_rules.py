"""Rules for priorities: editing them, and applying them to a workflow.

A rule acts when a priority is set: when a workflow is made, and when somebody changes it. Editing a
rule changes no workflow that exists.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import product
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Max, Min

from fulfillment.errors import Conflict, InvalidFields, NotFound
from fulfillment.models import (
    MAX_POSITION,
    PriorityRule,
    Purpose,
    Rater,
    RaterVersion,
    Role,
    Trigger,
)
from fulfillment.policy import priority_rules as policy
from fulfillment.policy.priority_rules import Decision, Facts, Rule

logger = logging.getLogger(__name__)

POSITION_STEP = 10
"""Room that a new last rule leaves for others in front of it."""
LONG_AGO = timedelta(days=3_650_000)
"""Age of a checkpoint that no rule takes for new."""
FIELDS = (
    "position", "name", "enabled", "trigger", "purpose", "min_role", "owner", "rater_id",
    "max_checkpoint_age_s", "default_score", "ceiling",
)  # fmt: skip


def decide(
    *,
    asked: int | None,
    trigger: str,
    purpose: str,
    role: Role,
    owner: str,
    version: RaterVersion,
    now: datetime,
) -> Decision:
    """Return the priority of a workflow of this rater version; `role` is that of who asks."""
    rules = active()
    facts = Facts(
        trigger=trigger,
        purpose=purpose,
        rights=role.rank,
        owner=owner,
        rater=version.rater_id,
        checkpoint_age=_age(version, now) if _ask_for_age(rules) else LONG_AGO,
    )
    return policy.decide(rules, facts, asked=asked)


def active() -> list[Rule]:
    """Return the rules that are enabled, as the policy takes them."""
    return [_as_rule(rule) for rule in PriorityRule.objects.filter(enabled=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """What one kind of workflow would get."""

    trigger: str
    purpose: str
    role: Role
    decision: Decision


def preview(
    *,
    asked: int | None = None,
    owner: str = "",
    rater: Rater | None = None,
    checkpoint_age: timedelta | None = None,
    now: datetime,
) -> list[Preview]:
    """Return who would get what: each trigger, purpose and role that may set a priority.

    Without an age it is that of the rater's checkpoint. Without owner or rater the answer is that
    for those that no rule names.
    """
    rules = active()
    if checkpoint_age is None:
        version = rater.current_version if rater else None
        checkpoint_age = _age(version, now) if version else LONG_AGO
    roles = [role for role in Role if role is not Role.VIEWER]
    found = []
    for trigger, purpose, role in product(Trigger, Purpose, roles):
        facts = Facts(
            trigger=trigger,
            purpose=purpose,
            rights=role.rank,
            owner=owner,
            rater=rater.pk if rater else "",
            checkpoint_age=checkpoint_age,
        )
        decision = policy.decide(rules, facts, asked=asked)
        found.append(Preview(trigger=trigger, purpose=purpose, role=role, decision=decision))
    return found


def find(rule_id: int) -> PriorityRule:
    """Return a rule; raise NotFound."""
    rule = PriorityRule.objects.filter(pk=rule_id).first()
    if rule is None:
        raise NotFound("There is no such priority rule.")
    return rule


def next_position() -> int:
    """Return the position behind all rules."""
    last = PriorityRule.objects.aggregate(last=Max("position"))["last"] or 0
    return min(last + POSITION_STEP, MAX_POSITION)


def create(values: Mapping[str, Any], *, actor: str = "") -> tuple[PriorityRule, bool]:
    """Store a rule, by default behind all others; return it and whether it is new.

    The same rule again changes nothing. Raises InvalidFields, and Conflict if another rule took its
    name or position meanwhile.
    """
    rule = PriorityRule(**values)
    existing = PriorityRule.objects.filter(name=rule.name).first()
    compared = [name for name in FIELDS if name != "position" or name in values]
    if existing and all(getattr(existing, name) == getattr(rule, name) for name in compared):
        return existing, False
    if "position" not in values:
        rule.position = next_position()
    save(rule, actor=actor)
    return rule, True


def change(rule_id: int, changes: Mapping[str, Any], *, actor: str = "") -> PriorityRule:
    """Change fields of a rule. Raises NotFound, InvalidFields, Conflict."""
    with transaction.atomic():
        rule = PriorityRule.objects.select_for_update().filter(pk=rule_id).first()
        if rule is None:
            raise NotFound("There is no such priority rule.")
        for name, value in changes.items():
            setattr(rule, name, value)
        save(rule, actor=actor)
    return rule


def save(rule: PriorityRule, *, actor: str = "") -> None:
    """Store a new or a changed rule. Raises InvalidFields, Conflict."""
    found = problems(rule)
    if found:
        places = "; ".join(f"{problem['field']} {problem['detail']}" for problem in found)
        raise InvalidFields(
            f"The rule cannot be: {places}.",
            code=found[0]["code"] if len(found) == 1 else None,
            errors=found,
        )
    is_new = rule.pk is None
    try:
        with transaction.atomic():
            rule.save()
    except IntegrityError as error:
        raise Conflict(
            "Another rule took this name or position, or the rater went, just now; try again.",
            code="rules_changing",
        ) from error
    _audit("created" if is_new else "changed", rule, actor)


def remove(rule_id: int, *, actor: str = "") -> None:
    """Delete a rule; workflows keep the priority that it gave. Raises NotFound."""
    rule = find(rule_id)
    PriorityRule.objects.filter(pk=rule.pk).delete()
    _audit("deleted", rule, actor)


def problems(rule: PriorityRule) -> list[dict[str, str]]:
    """Return why a rule cannot be, a field each; empty when it can."""
    found = []
    if rule.default_score > rule.ceiling:
        found.append(
            _problem("default_score", "above_ceiling", f"must not be above ceiling {rule.ceiling}")
        )
    others = PriorityRule.objects.exclude(pk=rule.pk)
    if others.filter(name=rule.name).exists():
        found.append(_problem("name", "taken", "is that of another rule"))
    holder = others.filter(position=rule.position).first()
    if holder is not None:
        detail = f"{rule.position} is that of rule '{holder.name}'; take another"
        found.append(_problem("position", "taken", detail))
    if rule.rater_id is not None and not Rater.objects.filter(pk=rule.rater_id).exists():
        found.append(_problem("rater", "unknown_rater", "is none that exists"))
    return found


def _problem(field: str, code: str, detail: str) -> dict[str, str]:
    return {"field": field, "code": code, "detail": detail}


def _as_rule(rule: PriorityRule) -> Rule:
    age_s = rule.max_checkpoint_age_s
    return Rule(
        name=rule.name,
        position=rule.position,
        default_score=rule.default_score,
        ceiling=rule.ceiling,
        trigger=rule.trigger or None,
        purpose=rule.purpose or None,
        min_rights=Role(rule.min_role).rank,
        owner=rule.owner or None,
        rater=rule.rater_id,
        max_checkpoint_age=None if age_s is None else timedelta(seconds=age_s),
    )


def _ask_for_age(rules: Sequence[Rule]) -> bool:
    return any(rule.max_checkpoint_age is not None for rule in rules)


def _age(version: RaterVersion, now: datetime) -> timedelta:
    """Return how long ago the rater was first used with this version's model and checkpoint.

    A new prompt or plug-in version makes a new rater version, but no new checkpoint.
    """
    same = {f"spec__{name}": version.spec[name] for name in ("model_id", "model_version")}
    first = RaterVersion.objects.filter(rater_id=version.rater_id, **same).aggregate(
        at=Min("created_at")
    )["at"]
    return now - (first or version.created_at)


def _audit(action: str, rule: PriorityRule, actor: str) -> None:
    logger.info(
        "priority_rule_%s id=%s name=%r by=%s", action, rule.pk, rule.name, actor or "system"
    )
