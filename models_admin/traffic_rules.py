"""Rules for traffic: editing them. What they come to is decided by `policy.traffic_rules`."""

import math
from collections.abc import Mapping
from typing import Any, Final

from django.db import IntegrityError, transaction
from django.db.models import Max

from models_admin.errors import Conflict, NotFound
from models_admin.models import MAX_POSITION, MAX_RULE_BATCHES, ModelConfig, TrafficRule
from models_admin.policy.traffic_rules import TrafficClass, TrafficPurpose, TrafficTrigger
from models_admin.services.audit import audit, changes, settings_of, state
from models_admin.services.problems import ID, Problem, bad_id, one_of, out_of_range, refuse

MOST_RULES: Final = 100
"""Each is asked for each batch that is sent."""
POSITION_STEP: Final = 10
"""Room that a new last rule leaves for others in front of it."""
KIND: Final = "traffic rule"
_CHOICES: Final = {
    "priority_class": TrafficClass,
    "trigger": TrafficTrigger,
    "purpose": TrafficPurpose,
}


def find(rule_id: int) -> TrafficRule:
    """Return a rule; raises NotFound."""
    rule = TrafficRule.objects.filter(pk=rule_id).first()
    if rule is None:
        raise NotFound("There is no such traffic rule.")
    return rule


def next_position() -> int:
    """Return the position behind all rules."""
    last = TrafficRule.objects.aggregate(last=Max("position"))["last"] or 0
    return min(last + POSITION_STEP, MAX_POSITION)


def create(fields: Mapping[str, Any], *, actor: str = "") -> tuple[TrafficRule, bool]:
    """Store a rule, by default behind all others; return it and whether it is new.

    The same rule again changes nothing. Raises InvalidFields, Conflict.
    """
    rule = TrafficRule(**fields)
    existing = TrafficRule.objects.filter(name=rule.name).first()
    if existing is not None:
        given, known = state(rule), state(existing)
        if all(
            given[name] == known[name] for name in given if name in fields or name != "position"
        ):
            return existing, False
    if "position" not in fields:
        rule.position = next_position()
    save(rule, actor=actor)
    return rule, True


def change(rule_id: int, fields: Mapping[str, Any], *, actor: str = "") -> TrafficRule:
    """Change fields of a rule. Raises NotFound, InvalidFields, Conflict."""
    with transaction.atomic():
        rule = _lock(rule_id)
        for name, value in fields.items():
            setattr(rule, name, value)
        save(rule, actor=actor)
    return rule


def save(rule: TrafficRule, *, actor: str = "") -> None:
    """Store a new or a changed rule. Raises NotFound, InvalidFields, Conflict."""
    refuse(problems(rule))
    try:
        with transaction.atomic():
            if rule.pk is None:
                rule.save(force_insert=True)
                audit("traffic_rule_created", rule.name, actor, kind=KIND, detail=settings_of(rule))
                return
            before = state(_lock(rule.pk))
            rule.save(force_update=True)
            if changed := changes(before, state(rule)):
                audit("traffic_rule_changed", rule.name, actor, kind=KIND, detail=changed)
    except IntegrityError as error:
        raise Conflict(
            "Another rule took this name just now; try again.", code="rules_changing"
        ) from error


def remove(rule_id: int, *, actor: str = "") -> None:
    """Delete a rule; what it held back goes on. Raises NotFound."""
    with transaction.atomic():
        rule = _lock(rule_id)
        audit("traffic_rule_deleted", rule.name, actor, kind=KIND, detail=settings_of(rule))
        rule.delete()


def _lock(rule_id: int) -> TrafficRule:
    rule = TrafficRule.objects.select_for_update().filter(pk=rule_id).first()
    if rule is None:
        raise NotFound("There is no such traffic rule.")
    return rule


def problems(rule: TrafficRule) -> list[Problem]:
    """Return why a rule cannot be, a field each; empty when it can."""
    found = [*_names(rule), *_numbers(rule)]
    for field, of in _CHOICES.items():
        if (value := getattr(rule, field)) and value not in list(of):
            found.append(Problem(field=field, code="bad_choice", detail=one_of(list(of))))
    if rule.block and (rule.max_share is not None or rule.max_batches is not None):
        detail = "leaves nothing to limit: it stands alone, without max_share and max_batches"
        found.append(Problem(field="block", code="block_stands_alone", detail=detail))
    elif not rule.block and rule.max_share is None and rule.max_batches is None:
        detail = "a rule needs an effect: max_share, max_batches or block"
        found.append(Problem(field="max_share", code="no_effect", detail=detail))
    return found


def _names(rule: TrafficRule) -> list[Problem]:
    found = []
    others = TrafficRule.objects.exclude(pk=rule.pk)
    if not rule.name.strip() or not rule.name.isprintable():
        found.append(Problem(field="name", code="bad_name", detail="needs printable characters"))
    elif others.filter(name=rule.name).exists():
        found.append(Problem(field="name", code="taken", detail="is that of another rule"))
    if rule.pk is None and others.count() >= MOST_RULES:
        detail = f"there are {MOST_RULES} rules already; delete one"
        found.append(Problem(field="name", code="too_many_rules", detail=detail))
    found += [
        bad_id(field)
        for field in ("rater", "model", "workflow")
        if getattr(rule, field) and not ID.fullmatch(getattr(rule, field))
    ]
    # A rule may outlive its model, and be disabled then.
    if ID.fullmatch(rule.model) and not (
        ModelConfig.objects.filter(pk=rule.model).exists()
        or TrafficRule.objects.filter(pk=rule.pk, model=rule.model).exists()
    ):
        found.append(Problem(field="model", code="unknown_model", detail="is none that exists"))
    found += [
        Problem(field=field, code="bad_text", detail="needs printable characters")
        for field in ("owner", "reason")
        if not getattr(rule, field).isprintable()
    ]
    return found


def _numbers(rule: TrafficRule) -> list[Problem]:
    found = []
    if not 0 <= rule.position <= MAX_POSITION:
        found.append(out_of_range("position", 0, MAX_POSITION))
    if not 0 <= rule.min_load <= 1:
        found.append(out_of_range("min_load", 0, 1))
    share = rule.max_share
    if share is not None and not (math.isfinite(share) and 0 < share <= 1):
        detail = "above 0, up to 1; `block` leaves nothing"
        found.append(Problem(field="max_share", code="out_of_range", detail=detail))
    if rule.max_batches is not None and not 1 <= rule.max_batches <= MAX_RULE_BATCHES:
        found.append(out_of_range("max_batches", 1, MAX_RULE_BATCHES))
    return found
