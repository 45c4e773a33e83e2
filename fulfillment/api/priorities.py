"""Rules for priorities, and the shares of owners."""

import re
from datetime import timedelta

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import owner_shares, priority_rules, raters
from fulfillment import priority_schema as schema
from fulfillment.api.base import ApiView, answers, checked_body, checked_query, json_answer
from fulfillment.api_schema import ProblemShape
from fulfillment.authentication import IsOperator, sees_everything
from fulfillment.clock import database_now
from fulfillment.errors import InvalidFields, NotFound
from fulfillment.models import OwnerShare, PriorityRule

_RULE_ID = re.compile(r"rule_(\d{1,18})", re.ASCII)
_MAX_OWNER_CHARACTERS = 150
_GONE = {204: None, (404, "application/problem+json"): ProblemShape}


class PriorityRulesView(ApiView):
    """All rules for priorities, and adding one."""

    writes = IsOperator

    @extend_schema(operation_id="list_priority_rules", responses=answers(schema.PriorityRuleList))
    def get(self, request: Request) -> HttpResponse:
        """List the rules in the order in which they are asked."""
        bodies.query(request, known=())
        items = [schema.rule_as_json(rule) for rule in PriorityRule.objects.all()]
        return json_answer({"items": items, "next": None})

    @extend_schema(
        operation_id="create_priority_rule",
        request=schema.PriorityRuleFields,
        responses=answers(schema.PriorityRuleShape, 201, 400, 409, 415, 422),
    )
    def post(self, request: Request) -> HttpResponse:
        """Add a rule; the same one again changes nothing."""
        given = checked_body(request, schema.PriorityRuleFields)
        rule, is_new = priority_rules.create(schema.rule_values(given), actor=request.user.username)
        return json_answer(
            schema.rule_as_json(rule),
            status=201 if is_new else 200,
            headers={"Location": f"/api/v1/priority-rules/rule_{rule.pk}"},
        )


class PriorityRuleView(ApiView):
    """One rule."""

    writes = IsOperator

    @extend_schema(
        operation_id="get_priority_rule",
        responses=answers(schema.PriorityRuleShape, 200, 404),
    )
    def get(self, request: Request, rule_id: str) -> HttpResponse:
        """Show a rule."""
        bodies.query(request, known=())
        return json_answer(schema.rule_as_json(priority_rules.find(_key(rule_id))))

    @extend_schema(
        operation_id="change_priority_rule",
        request=schema.PriorityRuleFields(partial=True),
        responses=answers(schema.PriorityRuleShape, 200, 400, 404, 409, 415, 422),
    )
    def patch(self, request: Request, rule_id: str) -> HttpResponse:
        """Change a rule; workflows that exist keep their priority."""
        given = checked_body(request, schema.PriorityRuleFields, partial=True)
        rule = priority_rules.change(
            _key(rule_id), schema.rule_values(given), actor=request.user.username
        )
        return json_answer(schema.rule_as_json(rule))

    @extend_schema(operation_id="delete_priority_rule", responses=_GONE)
    def delete(self, request: Request, rule_id: str) -> HttpResponse:
        """Delete a rule; workflows that exist keep their priority."""
        priority_rules.remove(_key(rule_id), actor=request.user.username)
        return HttpResponse(status=204)


class PriorityPreviewView(ApiView):
    """What the rules come to."""

    @extend_schema(
        operation_id="preview_priorities",
        parameters=[schema.PreviewQuery],
        responses=answers(schema.PreviewShape, 200, 404, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """Show who would get what: each trigger, purpose and role."""
        asked = checked_query(request, schema.PreviewQuery)
        age_s = asked.get("checkpoint_age_s")
        found = priority_rules.preview(
            asked=asked.get("priority"),
            owner=asked.get("owner", ""),
            rater=raters.find(asked["rater"]) if "rater" in asked else None,
            checkpoint_age=None if age_s is None else timedelta(seconds=age_s),
            now=database_now(),
        )
        return json_answer({"items": [schema.preview_as_json(line) for line in found]})


class OwnersView(ApiView):
    """Who has work under way, and whose share differs."""

    @extend_schema(operation_id="list_owners", responses=answers(schema.OwnerList))
    def get(self, request: Request) -> HttpResponse:
        """List owners with their weights: oneself, or everybody for operators."""
        bodies.query(request, known=())
        only = None if sees_everything(request) else request.user.username
        items = [schema.owner_as_json(owner) for owner in owner_shares.owners(only=only)]
        return json_answer({"items": items, "next": None})


class OwnerShareView(ApiView):
    """The share of an owner."""

    writes = IsOperator

    @extend_schema(
        operation_id="put_owner_share",
        request=schema.OwnerShareForm,
        responses=answers(schema.OwnerShape, 200, 400, 415, 422),
    )
    def put(self, request: Request, owner: str) -> HttpResponse:
        """Give an owner a weight; what waits goes by it at once."""
        given = checked_body(request, schema.OwnerShareForm)
        if len(owner) > _MAX_OWNER_CHARACTERS or "\0" in owner:
            detail = f"must have at most {_MAX_OWNER_CHARACTERS} characters, none of them NUL"
            raise InvalidFields(
                f"owner {detail}.",
                errors=[{"field": "owner", "code": "bad_id", "detail": detail}],
            )
        owner_shares.put(OwnerShare(owner=owner, **given), actor=request.user.username)
        (shown,) = owner_shares.owners(only=owner)
        return json_answer(schema.owner_as_json(shown))

    @extend_schema(operation_id="delete_owner_share", responses=_GONE)
    def delete(self, request: Request, owner: str) -> HttpResponse:
        """Give an owner the weight of all others, 1."""
        owner_shares.remove(owner, actor=request.user.username)
        return HttpResponse(status=204)


def _key(rule_id: str) -> int:
    matched = _RULE_ID.fullmatch(rule_id)
    if matched is None:
        raise NotFound("There is no such priority rule.")
    return int(matched[1])
