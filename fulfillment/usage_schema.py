"""The shapes of accounts of accelerator-seconds."""

from typing import Any

from rest_framework import serializers

from fulfillment.accelerator_use import Account
from fulfillment.api_schema import ChoiceField, InstantField, Plain, WholeField

MOST_ITEMS = 1_000
ITEMS = 100
_BY = ("rater", "owner", "workflow")


class UsageQuery(Plain):
    """Query parameters of `GET /usage`; `from` is a day before `until` by default."""

    until = InstantField(required=False, help_text="Now.")
    by = ChoiceField(required=False, choices=_BY, help_text="`rater` by default.")
    limit = WholeField(required=False, min_value=1, max_value=MOST_ITEMS, help_text="100.")

    def get_fields(self) -> dict[str, Any]:
        """Add the one that is a word of Python."""
        since = InstantField(required=False, help_text="A day before `until`.")
        return {"from": since, **super().get_fields()}


class UseShape(Plain):
    """What one rater, owner or workflow had."""

    rater = serializers.CharField(allow_null=True)
    owner = serializers.CharField(allow_null=True)
    workflow = serializers.CharField(allow_null=True, help_text="Null of one that was erased, too.")
    accelerator_seconds = serializers.FloatField()
    calls = serializers.IntegerField()


class UsageShape(Plain):
    """What there was in the hours of the clock that the span touches, the largest first."""

    until = serializers.DateTimeField()
    by = serializers.ChoiceField(choices=_BY)
    items = UseShape(many=True)
    others = serializers.IntegerField(help_text="More of them, each smaller; in the sums, too.")
    accelerator_seconds = serializers.FloatField(help_text="Of all, the same whatever `by` is.")
    calls = serializers.IntegerField()

    def get_fields(self) -> dict[str, Any]:
        """Add the one that is a word of Python."""
        return {"from": serializers.DateTimeField(), **super().get_fields()}


def account_as_json(account: Account, by: str) -> dict[str, Any]:
    """Return what clients see of an account."""
    return {
        "from": account.since,
        "until": account.until,
        "by": by,
        "items": [
            {
                "rater": use.rater,
                "owner": use.owner,
                "workflow": use.workflow,
                "accelerator_seconds": round(use.device_s, 3),
                "calls": use.calls,
            }
            for use in account.items
        ],
        "others": account.others,
        "accelerator_seconds": round(account.device_s, 3),
        "calls": account.calls,
    }
