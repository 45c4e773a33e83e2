"""The shapes of what the API tells of the queue, and of the ways of a workflow's requests."""

from rest_framework import serializers

from fulfillment.api_schema import InstantField, Plain, SlugField, WholeField
from fulfillment.policy.priority import PriorityClass

CLASSES = tuple(cls.name.lower() for cls in PriorityClass)
"""What `priority_class` may say."""


class QueueHistoryQuery(Plain):
    """Query parameters of `GET /queue/history`."""

    rater = SlugField(required=False)
    since = InstantField(required=False, help_text="An hour before `until`.")
    until = InstantField(required=False, help_text="Now.")
    step_s = WholeField(required=False, min_value=30, max_value=30 * 86_400)


class BucketShape(Plain):
    """Values above the bound of the bucket before."""

    up_to = serializers.FloatField(allow_null=True)
    count = serializers.IntegerField()


class SummaryShape(Plain):
    """How values are spread; a quantile is the least value that has its share at or below it."""

    n = serializers.IntegerField()
    mean = serializers.FloatField()
    p50 = serializers.FloatField()
    p90 = serializers.FloatField()
    p99 = serializers.FloatField()
    max = serializers.FloatField()
    histogram = BucketShape(many=True)


class DistributionsShape(Plain):
    """What a workflow's requests went through; of a large one, a sample that stays the same."""

    requests = serializers.IntegerField()
    looked_at = serializers.IntegerField()
    exact = serializers.BooleanField(help_text="Whether all requests were looked at.")
    waited_s = SummaryShape(
        allow_null=True, help_text="Upload to rating, of what the archive did not answer at once."
    )
    open_s = SummaryShape(allow_null=True, help_text="Upload to now, of what is still open.")
    attempts = SummaryShape(allow_null=True, help_text="Of what ended and was tried.")


class AgesShape(Plain):
    """Ages of open requests, by when their workflows were accepted."""

    oldest_s = serializers.FloatField(allow_null=True)
    age_p50_s = serializers.FloatField(allow_null=True)
    age_p90_s = serializers.FloatField(allow_null=True)
    age_p99_s = serializers.FloatField(allow_null=True)


class DepthShape(AgesShape):
    """The queue of one rater and class."""

    rater = serializers.CharField()
    priority_class = serializers.ChoiceField(choices=CLASSES)
    ready = serializers.IntegerField(help_text="Batches, derived from the open requests.")
    leased = serializers.IntegerField()
    delayed = serializers.IntegerField()
    waiting = serializers.IntegerField()
    workflows = serializers.IntegerField()
    open_requests = serializers.IntegerField()
    paused_requests = serializers.IntegerField()


class KeptShape(Plain):
    """What was said of workflows when they came, and what became of it; those that ended."""

    since = serializers.DateTimeField()
    promised = serializers.IntegerField(help_text="Said to be all in time.")
    kept = serializers.IntegerField(help_text="Of these, without a request that timed out.")
    doubted = serializers.IntegerField(help_text="Said to be in time in part only.")
    doubted_whole = serializers.IntegerField(help_text="Of these, all in time after all.")
    kept_rate = serializers.FloatField(allow_null=True, help_text="`kept` over `promised`.")


class QueueShape(Plain):
    """The queue now."""

    at = serializers.DateTimeField()
    items = DepthShape(many=True)
    forecasts = KeptShape(help_text="Of the last day.")


class PointShape(AgesShape):
    """A rater and class in one step: mean depths, highest ages, rates."""

    at = serializers.DateTimeField()
    rater = serializers.CharField()
    priority_class = serializers.ChoiceField(choices=CLASSES)
    ready = serializers.FloatField()
    leased = serializers.FloatField()
    delayed = serializers.FloatField()
    waiting = serializers.FloatField()
    open_requests = serializers.FloatField()
    most_open_requests = serializers.IntegerField()
    paused_requests = serializers.FloatField()
    ended_per_s = serializers.FloatField()
    worked_per_s = serializers.FloatField(help_text="Rated or failed by work.")
    model_calls_per_s = serializers.FloatField()
    accelerator_seconds = serializers.FloatField()


class QueueHistoryShape(Plain):
    """The queue over time, in the order of time; a step without work has no entry."""

    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    step_s = serializers.FloatField()
    items = PointShape(many=True)
