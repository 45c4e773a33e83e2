"""The shapes of estimates: what a submission, or a new version of a rater, would cost."""

from rest_framework import serializers

from fulfillment.api_schema import (
    EtaShape,
    Plain,
    RowProblem,
    RowShape,
    RowWarning,
    SlugField,
    WholeField,
    WorkflowForm,
    WorkflowParameters,
)
from fulfillment.promotion import DEFAULT_DAYS, MOST_DAYS

_MOST_ROWS = 10**12


class SampleForm(Plain):
    """Of what the rows are a sample."""

    sample_of = WholeField(
        required=False, min_value=1, max_value=_MOST_ROWS,
        help_text="How many rows the real one will have: counts are scaled to it.",
    )  # fmt: skip


class EstimateForm(WorkflowForm, SampleForm):
    """A workflow as JSON, to be estimated."""


class EstimateBody(EstimateForm):
    """The JSON body of `POST /estimates`."""

    requests = RowShape(many=True, required=False)


class EstimateParameters(WorkflowParameters, SampleForm):
    """Query parameters of a file of rows, to be estimated."""


class EstimateFileParameters(EstimateParameters):
    """The same, as the OpenAPI document shows them: a JSON body needs none."""

    rater = SlugField(required=False, help_text="Required unless the body is JSON.")


class RemedyShape(Plain):
    """A change that alone makes it feasible."""

    change = serializers.ChoiceField(
        choices=["deadline_s", "replicas", "calls", "rows", "priority", "best_effort"],
        help_text="`replicas`, or `calls` of an external model at a time, are all in all.",
    )
    to = serializers.JSONField(help_text="A number; for `best_effort` false.")
    detail = serializers.CharField()


class CapacityShape(Plain):
    """What serves the rater's version now, and what it can do."""

    servers = serializers.FloatField()
    kind = serializers.ChoiceField(
        choices=["replicas", "calls"], help_text="Calls that an external model may hold."
    )
    seconds_a_batch = serializers.FloatField(help_text="Of one of them, a moving average.")
    batches_per_s = serializers.FloatField(help_text="Of all together.")
    exact = serializers.BooleanField(
        help_text="Whether it was measured while batches waited; else it is too slow rather."
    )
    measured_requests = serializers.IntegerField()
    measured_at = serializers.DateTimeField()


class EstimateShape(Plain):
    """What would become of a submission if it came now; nothing of it was stored."""

    rater = serializers.CharField()
    rater_version = serializers.CharField(
        allow_null=True, help_text="Null: it would be the first workflow of a new version."
    )
    accepted = serializers.IntegerField(help_text="Of the rows that were sent.")
    rejected = RowProblem(many=True)
    rejected_count = serializers.IntegerField()
    warnings = RowWarning(many=True)
    sample_of = serializers.IntegerField(allow_null=True)
    rows = serializers.IntegerField(
        help_text="That would be accepted. All counts from here on are scaled to `sample_of`."
    )
    hits = serializers.IntegerField(help_text="Rows that the archive answers at once.")
    coalesced = serializers.IntegerField(help_text="Rows that are equal to others.")
    items = serializers.IntegerField(help_text="Distinct ones to be rated.")
    batches = serializers.IntegerField()
    model_calls = serializers.IntegerField(help_text="Without retries.")
    accelerator_seconds = serializers.FloatField(
        allow_null=True, help_text="As the workflow would count them; null: never measured."
    )
    priority = serializers.IntegerField(help_text="That it would get.")
    priority_reason = serializers.CharField()
    deadline_s = serializers.IntegerField()
    eta = EtaShape(allow_null=True)
    feasible = serializers.BooleanField(
        allow_null=True, help_text="Whether all is expected before the deadline; null: not known."
    )
    share_in_time = serializers.FloatField(allow_null=True, help_text="Of its rows.")
    reason = serializers.CharField()
    displaces = serializers.IntegerField(
        help_text="Open workflows that would be promised less for it."
    )
    remedies = RemedyShape(
        many=True, help_text="Each alone makes it feasible, without taking from its own class."
    )
    capacity = CapacityShape(allow_null=True)
    at = serializers.DateTimeField()


class PromotionQuery(Plain):
    """Query parameters of `GET /raters/{id}/promotion-estimate`."""

    days = WholeField(
        required=False, default=DEFAULT_DAYS, min_value=1, max_value=MOST_DAYS,
        help_text="How far back hits are looked at.",
    )  # fmt: skip


class WorkShape(Plain):
    """Work that the archive would no longer save."""

    requests = serializers.IntegerField()
    model_calls = serializers.IntegerField()
    accelerator_seconds = serializers.FloatField(allow_null=True)
    pool_hours = serializers.FloatField(
        allow_null=True, help_text="That all its servers of now would be busy with it."
    )


class PromotionShape(Plain):
    """What another version of a rater would cost."""

    rater = serializers.CharField()
    rater_version = serializers.CharField(allow_null=True, help_text="The current one.")
    entries = serializers.IntegerField(
        help_text="Fresh ratings of it that would answer nothing any more."
    )
    entries_exact = serializers.BooleanField(help_text="Else from a sample of the archive.")
    days = serializers.FloatField(help_text="Looked back at; fewer if the version is younger.")
    requests = serializers.IntegerField(help_text="Of workflows that came in these days.")
    hits = serializers.IntegerField(help_text="Of them answered by the archive.")
    hit_rate = serializers.FloatField(allow_null=True)
    a_day = WorkShape(help_text="At most, on the first day: all hits of a day are work.")
    whole_archive = WorkShape(help_text="At most, in all: each entry is rated anew.")
    servers = serializers.FloatField()
    reason = serializers.CharField(allow_null=True, help_text="Why times are null.")
    at = serializers.DateTimeField()
