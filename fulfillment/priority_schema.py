"""The shapes of rules for priorities and of owners' shares, as the API takes and answers them."""

from typing import Any

from rest_framework import serializers

from fulfillment.api_schema import (
    ChoiceField,
    NumberField,
    Plain,
    SlugField,
    SwitchField,
    TextField,
    WholeField,
)
from fulfillment.models import (
    MAX_CHECKPOINT_AGE_S,
    MAX_POSITION,
    MAX_WEIGHT,
    MIN_WEIGHT,
    PriorityRule,
    Purpose,
    Role,
    Trigger,
)
from fulfillment.owner_shares import Owner
from fulfillment.priority_rules import FIELDS, Preview

_CONDITIONS = ("trigger", "purpose", "owner")
"""Texts whose emptiness is no condition: null in the API."""


class PriorityRuleFields(Plain):
    """A rule; a condition that is null holds for every workflow."""

    position = WholeField(
        required=False, min_value=0, max_value=MAX_POSITION,
        help_text="Of the rules that match, the lowest decides. Behind all others by default.",
    )  # fmt: skip
    name = TextField(max_length=64)
    enabled = SwitchField(required=False)
    trigger = ChoiceField(required=False, allow_null=True, choices=Trigger.choices)
    purpose = ChoiceField(required=False, allow_null=True, choices=Purpose.choices)
    min_role = ChoiceField(
        required=False, choices=Role.choices,
        help_text="Of who sets the priority; it holds for higher roles as well.",
    )  # fmt: skip
    owner = TextField(required=False, allow_null=True, max_length=150)
    rater = SlugField(required=False, allow_null=True)
    max_checkpoint_age_s = WholeField(
        required=False, allow_null=True, min_value=1, max_value=MAX_CHECKPOINT_AGE_S,
        help_text="Only while its rater has had its checkpoint for less than this; a "
        "new-checkpoint launch is purpose `launch` with a week here.",
    )  # fmt: skip
    default_score = WholeField(
        min_value=0, max_value=100, help_text="Given to who asks for nothing."
    )
    ceiling = WholeField(min_value=0, max_value=100, help_text="More is not given.")


class PriorityRuleShape(Plain):
    """A rule."""

    id = serializers.CharField()
    position = serializers.IntegerField()
    name = serializers.CharField()
    enabled = serializers.BooleanField()
    trigger = serializers.ChoiceField(choices=Trigger.choices, allow_null=True)
    purpose = serializers.ChoiceField(choices=Purpose.choices, allow_null=True)
    min_role = serializers.ChoiceField(choices=Role.choices)
    owner = serializers.CharField(allow_null=True)
    rater = serializers.CharField(allow_null=True)
    max_checkpoint_age_s = serializers.IntegerField(allow_null=True)
    default_score = serializers.IntegerField()
    ceiling = serializers.IntegerField()


class PriorityRuleList(Plain):
    """Rules in the order in which they are asked."""

    items = PriorityRuleShape(many=True)
    next = serializers.CharField(allow_null=True)


class PreviewQuery(Plain):
    """Query parameters of `GET /priority-rules/preview`."""

    priority = WholeField(
        required=False,
        min_value=0,
        max_value=100,
        help_text="What is asked for; nothing if absent.",
    )
    owner = TextField(
        required=False, max_length=150, help_text="Somebody that no rule names if absent."
    )
    rater = SlugField(required=False, help_text="One that no rule names if absent.")
    checkpoint_age_s = WholeField(
        required=False, min_value=0, max_value=MAX_CHECKPOINT_AGE_S,
        help_text="Age of the rater's checkpoint; if absent that of the rater, or long ago.",
    )  # fmt: skip


class PreviewItem(Plain):
    """What workflows of one kind would get."""

    trigger = serializers.ChoiceField(choices=Trigger.choices)
    purpose = serializers.ChoiceField(choices=Purpose.choices)
    role = serializers.ChoiceField(choices=Role.choices)
    priority = serializers.IntegerField()
    ceiling = serializers.IntegerField()
    rule = serializers.CharField(allow_null=True, help_text="Its name; null: no rule applies.")
    reason = serializers.CharField()


class PreviewShape(Plain):
    """Who would get what, by the rules as they are."""

    items = PreviewItem(many=True)


class OwnerShareForm(Plain):
    """The share of an owner."""

    weight = NumberField(
        min_value=MIN_WEIGHT, max_value=MAX_WEIGHT,
        help_text="2 means twice the share of an owner of weight 1 while both wait.",
    )  # fmt: skip
    note = TextField(required=False, allow_blank=True, max_length=256, help_text="Why.")


class OwnerShape(Plain):
    """An owner with a share of its own, or with work that is under way."""

    owner = serializers.CharField()
    weight = serializers.FloatField()
    note = serializers.CharField(allow_blank=True)
    unfinished_workflows = serializers.IntegerField()


class OwnerList(Plain):
    """Owners by name."""

    items = OwnerShape(many=True)
    next = serializers.CharField(allow_null=True)


def rule_values(given: dict[str, Any]) -> dict[str, Any]:
    """Return a checked body under the names and values of the table."""
    values = {name: "" if name in _CONDITIONS and v is None else v for name, v in given.items()}
    if "rater" in values:
        values["rater_id"] = values.pop("rater")
    return values


def rule_as_json(rule: PriorityRule) -> dict[str, Any]:
    """Return what clients see of a rule."""
    shown = {name: getattr(rule, name) for name in FIELDS}
    return {
        "id": f"rule_{rule.pk}",
        **{("rater" if n == "rater_id" else n): v for n, v in shown.items()},
        **{name: shown[name] or None for name in _CONDITIONS},
    }


def preview_as_json(of: Preview) -> dict[str, Any]:
    """Return what clients see of a line of the preview."""
    return {
        "trigger": of.trigger,
        "purpose": of.purpose,
        "role": of.role.value,
        "priority": of.decision.score,
        "ceiling": of.decision.ceiling,
        "rule": of.decision.rule or None,
        "reason": of.decision.reason,
    }


def owner_as_json(owner: Owner) -> dict[str, Any]:
    """Return what clients see of an owner."""
    return {
        "owner": owner.owner,
        "weight": owner.weight,
        "note": owner.note,
        "unfinished_workflows": owner.unfinished_workflows,
    }
