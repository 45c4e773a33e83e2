"""The shapes of the archive's part of the REST API; their field types are api_schema's."""

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from fulfillment.api_schema import ObjectField, Plain, SlugField, SwitchField, TextField, WholeField
from fulfillment.models import KeyLevel, Purge, PurgeStage
from fulfillment.policy.freshness import Look
from fulfillment.raters import MAX_FRESHNESS_S

LOOKS = tuple(look.name.lower() for look in Look)
REFUSALS = ("not_reusable", "in_the_future", "stale", "too_old", "other_version",
            "not_the_newest")  # fmt: skip
BLANKED_BY_URL = (
    "output and extra fields of requests, page text in payloads; open requests end as FAILED "
    "`purged`. States, scores, labels and ids stay. An item goes with all rows that share its text."
)


class ExplainFields(Plain):
    """The rater, the key fields of a row, and how a workflow would use the archive."""

    rater = SlugField()
    query_text = TextField()
    url = TextField(required=False, max_length=16_384)
    title = TextField(required=False)
    text = TextField(required=False)
    html = TextField(required=False)
    max_age_s = WholeField(required=False, min_value=0, max_value=MAX_FRESHNESS_S)
    bypass = SwitchField(required=False)


class ExplainQuery(ExplainFields):
    """The same as query parameters; `context` is the text of a JSON object."""

    context = TextField(required=False)  # type: ignore[assignment]


class ExplainBody(ExplainFields):
    """The same as a JSON body, for rows that are too long for an address."""

    context = ObjectField(required=False)  # type: ignore[assignment]


class EntryShape(Plain):
    """A rating that the archive has for the row."""

    fingerprint = serializers.CharField()
    rater_version = serializers.CharField()
    score = serializers.FloatField()
    label = serializers.CharField(allow_null=True)  # type: ignore[assignment]
    produced_at = serializers.DateTimeField()
    age_s = serializers.IntegerField()
    workflow = serializers.CharField(allow_null=True, help_text="null: erased since.")
    reusable = serializers.BooleanField()
    fresh = serializers.BooleanField()
    refused = serializers.ChoiceField(
        choices=REFUSALS, allow_null=True, help_text="Why it would not be taken; null: it would."
    )


class ExplanationShape(Plain):
    """What a row is known by, and what it would get if it were sent now."""

    rater = serializers.CharField()
    rater_version = serializers.CharField()
    fingerprint = serializers.CharField(help_text="32 hex digits.")
    key_level = serializers.ChoiceField(choices=KeyLevel.choices)
    entered = serializers.ListField(child=serializers.CharField())
    absent = serializers.ListField(child=serializers.CharField(), help_text="It counts, too.")
    ignored = serializers.ListField(
        child=serializers.CharField(), help_text="Given, but no key fields of this rater."
    )
    prompt = serializers.CharField(
        allow_null=True, help_text="What decides at key level `prompt`; else null."
    )
    freshness_s = serializers.IntegerField()
    look = serializers.ChoiceField(choices=LOOKS, help_text="What it would get now.")
    in_flight = serializers.BooleanField(
        help_text="An equal item is being computed: it would be waited for."
    )
    failed = serializers.CharField(
        allow_null=True, help_text="Code by which an equal item failed a moment ago."
    )
    entries = EntryShape(many=True)
    at = serializers.DateTimeField()


class PurgeForm(Plain):
    """What is purged: what meets all criteria given, at least one of rater, url and before."""

    rater = SlugField(required=False)
    version = WholeField(required=False, min_value=1, max_value=2**31 - 1)
    url = TextField(required=False, max_length=16_384, help_text="Exactly as it was sent.")
    before = serializers.DateTimeField(
        required=False, help_text="Ratings made, and workflows created, before then."
    )
    dry_run = SwitchField(required=False, default=True, help_text="false erases.")


class PurgeCounts(Plain):
    """What was erased, or in a dry run would be."""

    ratings = serializers.IntegerField()
    requests = serializers.IntegerField(help_text="Blanked; of a purge by url only.")
    failed = serializers.IntegerField(help_text="Of these: open ones that ended by it.")
    payloads = serializers.IntegerField(help_text="Batches whose page text was blanked.")


class PurgeShape(Plain):
    """One purge."""

    id = serializers.CharField()
    state = serializers.ChoiceField(choices=["running", "done"])
    dry_run = serializers.BooleanField()
    rater = serializers.CharField(allow_null=True)
    version = serializers.IntegerField(allow_null=True)
    by_url = serializers.BooleanField(help_text="The url itself is not kept.")
    before = serializers.DateTimeField(allow_null=True)
    counts = PurgeCounts()
    blanks = serializers.CharField(allow_null=True, help_text="What a purge by url also touches.")
    ordered_by = serializers.CharField()
    created_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)


class PurgeList(Plain):
    """Purges, newest first."""

    items = PurgeShape(many=True)
    next = serializers.CharField(allow_null=True)


class StalenessQuery(Plain):
    """Query parameters of `GET /archive/staleness`."""

    rater = SlugField()


class IntervalShape(Plain):
    """A 95 % confidence interval."""

    low = serializers.FloatField()
    high = serializers.FloatField()


class DriftShape(Plain):
    """How scores of one age differ from what the same rater version says now (new - old)."""

    age_from_s = serializers.IntegerField()
    age_to_s = serializers.IntegerField(allow_null=True)
    n = serializers.IntegerField()
    mean_difference = serializers.FloatField()
    mean_difference_interval = IntervalShape(allow_null=True)
    mean_absolute_difference = serializers.FloatField()
    changed_1_percent = serializers.FloatField(
        help_text="Share that moved by over 1 % of the scale."
    )
    changed_10_percent = serializers.FloatField()
    changed_10_percent_interval = IntervalShape()


class StalenessShape(Plain):
    """What shadow refresh found for a rater."""

    rater = serializers.CharField()
    since = serializers.DateTimeField(allow_null=True)
    until = serializers.DateTimeField(allow_null=True)
    buckets = DriftShape(many=True)


def purge_as_json(purge: Purge) -> Mapping[str, Any]:
    """Return what clients see of a purge."""
    return {
        "id": purge.public_id,
        "state": "done" if purge.stage == PurgeStage.DONE else "running",
        "dry_run": purge.dry_run,
        "rater": purge.rater_id or None,
        "version": purge.version_number,
        "by_url": purge.url_digest is not None,
        "before": purge.before,
        "counts": {
            "ratings": purge.ratings,
            "requests": purge.requests,
            "failed": purge.failed,
            "payloads": purge.payloads,
        },
        "blanks": None if purge.url_digest is None else BLANKED_BY_URL,
        "ordered_by": purge.actor,
        "created_at": purge.created_at,
        "finished_at": purge.finished_at,
    }
