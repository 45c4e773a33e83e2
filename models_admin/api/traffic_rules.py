"""Views of traffic rules."""

import re
from typing import Any, Final

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from models_admin import traffic_rules
from models_admin.api.access import View, actor, answers, given_by
from models_admin.api.fields import Choice, Form, Number, Switch, Text, Whole
from models_admin.errors import NotFound
from models_admin.models import TrafficRule
from models_admin.models.traffic import PURPOSES, TRIGGERS
from models_admin.policy.traffic_rules import TrafficClass

_RULE_ID = re.compile(r"traffic_(\d{1,18})", re.ASCII)
_CONDITIONS: Final = (
    "rater",
    "model",
    "priority_class",
    "trigger",
    "purpose",
    "owner",
    "workflow",
)
"""Texts whose emptiness is no condition: null in the API."""


class TrafficRuleChanges(Form):
    """A rule; a condition that is null holds for all traffic."""

    position = Whole(required=False, help_text="In lists. Behind all others by default.")
    name = Text(required=False, max_length=64)
    enabled = Switch(required=False)
    rater = Text(required=False, allow_null=True, max_length=64)
    model = Text(required=False, allow_null=True, max_length=64)
    priority_class = Choice(required=False, allow_null=True, choices=list(TrafficClass))
    trigger = Choice(required=False, allow_null=True, choices=TRIGGERS)
    purpose = Choice(required=False, allow_null=True, choices=PURPOSES)
    owner = Text(required=False, allow_null=True, max_length=150)
    workflow = Text(required=False, allow_null=True, max_length=64, help_text="Its id, wf_…")
    min_load = Number(
        required=False,
        help_text="The share of the window in use from which the rule holds, 0 to 1.",
    )
    max_share = Number(
        required=False,
        allow_null=True,
        help_text="Of each model's window, up to 1. A batch at a time is left in any case.",
    )
    max_batches = Whole(
        required=False, allow_null=True, help_text="At a time, of all models together."
    )
    block = Switch(required=False, help_text="Nothing is sent.")
    reason = Text(required=False, allow_blank=True, max_length=256)


class TrafficRuleForm(TrafficRuleChanges):
    """A new rule."""

    name = Text(max_length=64)


class TrafficRuleShape(serializers.Serializer[Any]):
    """A rule."""

    id = serializers.CharField()
    position = serializers.IntegerField()
    name = serializers.CharField()
    enabled = serializers.BooleanField()
    rater = serializers.CharField(allow_null=True)
    model = serializers.CharField(allow_null=True)
    priority_class = serializers.ChoiceField(choices=list(TrafficClass), allow_null=True)
    trigger = serializers.ChoiceField(choices=TRIGGERS, allow_null=True)
    purpose = serializers.ChoiceField(choices=PURPOSES, allow_null=True)
    owner = serializers.CharField(allow_null=True)
    workflow = serializers.CharField(allow_null=True)
    min_load = serializers.FloatField()
    max_share = serializers.FloatField(allow_null=True)
    max_batches = serializers.IntegerField(allow_null=True)
    block = serializers.BooleanField()
    reason = serializers.CharField()


class TrafficRuleList(serializers.Serializer[Any]):
    """All rules, which are a hundred at most."""

    items = TrafficRuleShape(many=True)
    next = serializers.CharField(allow_null=True)


class TrafficRulesView(View):
    """All traffic rules, and adding one."""

    @extend_schema(operation_id="list_traffic_rules", responses=answers(TrafficRuleList, 200))
    def get(self, request: Request) -> Response:
        """List the rules by position; of those that hold the strictest decides."""
        return Response({"items": [_shown(r) for r in TrafficRule.objects.all()], "next": None})

    @extend_schema(
        operation_id="create_traffic_rule",
        request=TrafficRuleForm,
        responses=answers(TrafficRuleShape, 201, 400, 409, 422),
    )
    def post(self, request: Request) -> Response:
        """Add a rule; the same one again changes nothing."""
        rule, is_new = traffic_rules.create(
            _fields(given_by(TrafficRuleForm, request)), actor=actor(request)
        )
        shown = _shown(rule)
        return Response(
            shown,
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/traffic-rules/{shown['id']}"},
        )


class TrafficRuleView(View):
    """One traffic rule."""

    @extend_schema(operation_id="get_traffic_rule", responses=answers(TrafficRuleShape, 200, 404))
    def get(self, request: Request, rule_id: str) -> Response:
        """Show a rule."""
        return Response(_shown(traffic_rules.find(_key(rule_id))))

    @extend_schema(
        operation_id="change_traffic_rule",
        request=TrafficRuleChanges,
        responses=answers(TrafficRuleShape, 200, 400, 404, 409, 422),
    )
    def patch(self, request: Request, rule_id: str) -> Response:
        """Change a rule; it holds within two seconds for what is sent from then on."""
        rule = traffic_rules.change(
            _key(rule_id), _fields(given_by(TrafficRuleChanges, request)), actor=actor(request)
        )
        return Response(_shown(rule))

    @extend_schema(
        operation_id="delete_traffic_rule",
        request=None,
        responses=answers(None, 204, 404),
    )
    def delete(self, request: Request, rule_id: str) -> HttpResponse:
        """Delete a rule; what it held back goes on."""
        traffic_rules.remove(_key(rule_id), actor=actor(request))
        return HttpResponse(status=204)


def _key(rule_id: str) -> int:
    matched = _RULE_ID.fullmatch(rule_id)
    if matched is None:
        raise NotFound("There is no such traffic rule.")
    return int(matched[1])


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: given[name] or "" for name in _CONDITIONS if name in given}


def _shown(rule: TrafficRule) -> dict[str, Any]:
    same = (
        *("position", "name", "enabled", "min_load", "max_share", "max_batches", "block"),
        "reason",
    )
    return {
        "id": f"traffic_{rule.pk}",
        **{name: getattr(rule, name) or None for name in _CONDITIONS},
        **{name: getattr(rule, name) for name in same},
    }
