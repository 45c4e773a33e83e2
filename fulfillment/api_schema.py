"""The shapes of the REST API: what is taken, checked field by field, and what is answered.

Serializers check small bodies and describe all of them in the OpenAPI document; rows and ratings
never pass through one. A value is taken as its JSON type says and never coerced; query parameters,
which are text, are read by `text=True` in the serializer's context.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import MAXYEAR, MINYEAR, datetime, timedelta
from typing import Any, NoReturn

from rest_framework import serializers

from fulfillment.models import (
    KeyLevel,
    Mode,
    Purpose,
    Rater,
    RaterVersion,
    Role,
    SendWindow,
    Trigger,
    Workflow,
    WorkflowForecast,
)
from fulfillment.policy.addresses import MAX_URL_CHARACTERS
from fulfillment.policy.batching import MAX_BATCH_SIZE
from fulfillment.policy.lifecycle import Act, EndingReason, WorkflowState
from fulfillment.policy.priority import DEFAULT_SCORE, PriorityClass
from fulfillment.policy.webhook_body import WebhookFormat
from fulfillment.raters import MAX_ATTEMPTS, MAX_DEADLINE_S, MAX_FRESHNESS_S
from fulfillment.results import MAX_PAGE, STATES
from fulfillment.windows import EXTERNAL, ISOLATED, SILENT

MIN_SECRET_CHARACTERS = 8

_WHOLE = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False}


class _Typed:
    """Refuses other JSON types than its own; query parameters are text."""

    context: dict[str, Any]

    def is_text(self) -> bool:
        """Say whether the value comes from a query parameter."""
        return bool(self.context.get("text"))


def _refuse(detail: str, code: str = "bad_type") -> NoReturn:
    raise serializers.ValidationError(detail, code=code)


class WholeField(_Typed, serializers.IntegerField):
    """A whole number."""

    def to_internal_value(self, data: Any) -> int:
        whole = _WHOLE.fullmatch(data) if self.is_text() else type(data) is int
        return int(data) if whole else _refuse("Must be a whole number.")


class NumberField(_Typed, serializers.FloatField):
    """A finite number."""

    def to_internal_value(self, data: Any) -> float:
        if not (_NUMBER.fullmatch(data) if self.is_text() else type(data) in (int, float)):
            _refuse("Must be a number.")
        try:
            value = float(data)
        except OverflowError:
            value = math.inf
        return value if math.isfinite(value) else _refuse("Is beyond a double.", "bad_number")


class SwitchField(_Typed, serializers.BooleanField):
    """true or false, and nothing that looks like it."""

    def to_internal_value(self, data: Any) -> bool:
        value = _WORDS.get(data) if self.is_text() else data
        return value if isinstance(value, bool) else _refuse("Must be true or false.")


class InstantField(serializers.DateTimeField):
    """An instant with which can be reckoned: not within a year of the first or the last."""

    def to_internal_value(self, value: Any) -> datetime:
        instant: datetime = super().to_internal_value(value)
        if not MINYEAR < instant.year < MAXYEAR:
            _refuse(f"Must be in the years {MINYEAR + 1} to {MAXYEAR - 1}.", "out_of_range")
        return instant


class TextField(serializers.CharField):
    """A string, kept as sent."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: Any) -> str:
        return data if isinstance(data, str) else _refuse("Must be a string.")


class ChoiceField(serializers.ChoiceField):
    """One of a closed set."""

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, str):
            _refuse("Must be a string.")
        return super().to_internal_value(data)


class ObjectField(serializers.JSONField):
    """A JSON object."""

    def to_internal_value(self, data: Any) -> Any:
        return data if isinstance(data, dict) else _refuse("Must be an object.")


class SlugField(TextField):
    """An id that an operator chooses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=64, **options)

    def to_internal_value(self, data: Any) -> str:
        value = super().to_internal_value(data)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", value):
            _refuse("1 to 64 letters, digits, - and _.", "bad_id")
        return value


WORKFLOW_STATES = tuple(
    state.name for state in WorkflowState if state is not WorkflowState.RECEIVING
)
"""What clients see: a workflow that is being taken in is hidden."""

Plain = serializers.Serializer[Any]
"""Base of shapes that belong to no model."""


class CacheForm(Plain):
    """How a workflow uses the archive."""

    max_age_s = WholeField(
        required=False, allow_null=True, min_value=0, max_value=MAX_FRESHNESS_S,
        help_text="Take archive ratings younger than this only.",
    )  # fmt: skip
    bypass = SwitchField(
        required=False, help_text="Take no archive rating made before this workflow was accepted."
    )
    no_store = SwitchField(required=False, help_text="Do not offer the new ratings to others.")


class WebhookForm(Plain):
    """Where to send events."""

    url = TextField(
        max_length=MAX_URL_CHARACTERS, help_text="http or https, a public host, a usual port."
    )
    secret = TextField(
        required=False, min_length=MIN_SECRET_CHARACTERS, max_length=256, write_only=True,
        help_text="Signs the deliveries: `whsec_` and base64, or any text. Made if left out.",
    )  # fmt: skip
    format = ChoiceField(required=False, choices=list(WebhookFormat))


class WorkflowFields(Plain):
    """Fields of a new workflow, whether in a JSON body or as query parameters of an upload."""

    rater = SlugField()
    name = TextField(required=False, allow_blank=True, max_length=256)
    priority = WholeField(
        required=False, min_value=0, max_value=100,
        help_text="A larger number is more urgent. A rule may give less than is asked for. Left "
        f"out, it is the rule's default, {DEFAULT_SCORE} where none applies.",
    )  # fmt: skip
    best_effort = SwitchField(required=False, help_text="Below every other class.")
    trigger = ChoiceField(required=False, choices=Trigger.choices)
    purpose = ChoiceField(required=False, choices=Purpose.choices)
    batch_size = WholeField(required=False, min_value=1, max_value=MAX_BATCH_SIZE)
    deadline_s = WholeField(
        required=False, min_value=1, max_value=MAX_DEADLINE_S,
        help_text="No new try starts later than this; the rater's by default.",
    )  # fmt: skip
    max_duration_s = WholeField(
        required=False, min_value=1, max_value=MAX_DEADLINE_S,
        help_text="The workflow ends at the latest then.",
    )  # fmt: skip
    complete_when = NumberField(
        required=False, min_value=0.0, max_value=1.0, default=1.0,
        help_text="Share of requests that must have ended for the workflow to count as finished.",
    )  # fmt: skip

    def validate_complete_when(self, value: float) -> float:
        return value if value > 0 else _refuse("Must be above 0.", "out_of_range")


class DryRunForm(Plain):
    """Whether it is meant."""

    dry_run = SwitchField(
        required=False, help_text="Check and estimate it, as `POST /estimates` does; store nothing."
    )


class WorkflowParameters(WorkflowFields, CacheForm, DryRunForm):
    """Query parameters of an upload: the fields of a workflow, those of `cache` flat."""

    close = SwitchField(
        required=False, default=True, help_text="false leaves the workflow open for more rows."
    )
    webhook_url = TextField(
        required=False, max_length=MAX_URL_CHARACTERS,
        help_text="Told of the end. A secret never goes into a query: that of the owner's standing "
        "endpoint of this URL signs, or a new one, which the answer shows.",
    )  # fmt: skip
    webhook_format = ChoiceField(required=False, choices=list(WebhookFormat))


class UploadParameters(WorkflowParameters):
    """The same, as the OpenAPI document shows them: a JSON body needs none."""

    rater = SlugField(required=False, help_text="Required unless the body is JSON.")


class WorkflowChanges(Plain):
    """What may be changed of a workflow while it is worked on."""

    name = TextField(required=False, allow_blank=True, max_length=256)
    priority = WholeField(
        required=False, min_value=0, max_value=100,
        help_text="Of what has not been sent. A rule may give less than is asked for.",
    )  # fmt: skip
    deadline_s = WholeField(
        required=False, min_value=1, max_value=MAX_DEADLINE_S,
        help_text="Counted from when the round was accepted, as in the form.",
    )  # fmt: skip


class RowShape(Plain):
    """A request row. Other fields are kept with the row and are no part of its key."""

    request_id = TextField(required=False, max_length=512, help_text="Unique in the workflow.")
    query_id = TextField(required=False, max_length=512)
    query_text = TextField(help_text="`query` is accepted as an alias.")
    result_id = TextField(required=False, max_length=512)
    url = TextField(required=False, max_length=16_384)
    title = TextField(required=False)
    text = TextField(required=False)
    html = TextField(required=False)
    context = ObjectField(required=False)  # type: ignore[assignment]
    side = ChoiceField(required=False, choices=["test", "base"])
    result_weight = NumberField(required=False)
    query_weight = NumberField(required=False)


class WorkflowForm(WorkflowFields, DryRunForm):
    """A new workflow as JSON. With `requests` and no `close: false` it is closed at once."""

    cache = CacheForm(required=False)
    webhook = WebhookForm(required=False)
    close = SwitchField(required=False, help_text="true by default if there are `requests`.")


class WorkflowBody(WorkflowForm):
    """The JSON body of `POST /workflows`."""

    requests = RowShape(many=True, required=False)


class RowsBody(Plain):
    """The JSON body of `POST /workflows/{id}/requests`; a bare list of rows serves as well."""

    requests = RowShape(many=True)


class RowProblem(Plain):
    """A row that was refused alone."""

    line = serializers.IntegerField(
        help_text="Physical line, index in the list or row of a Parquet file, from 1."
    )
    code = serializers.CharField()
    detail = serializers.CharField()


class RowWarning(Plain):
    """What was repaired in an accepted row."""

    line = serializers.IntegerField()
    request_id = serializers.CharField()
    code = serializers.CharField()


class Acceptance(Plain):
    """What became of the rows of an upload."""

    accepted = serializers.IntegerField()
    hits = serializers.IntegerField(help_text="Answered by the archive at once.")
    coalesced = serializers.IntegerField(help_text="Equal rows inside the upload.")
    pending = serializers.IntegerField(help_text="Distinct items to be rated.")
    rejected = RowProblem(many=True)
    rejected_count = serializers.IntegerField()
    warnings = RowWarning(many=True)


class CountsShape(Plain):
    """Requests by state."""

    total = serializers.IntegerField()
    pending = serializers.IntegerField()
    running = serializers.IntegerField()
    retrying = serializers.IntegerField()
    completed = serializers.IntegerField()
    failed = serializers.IntegerField()
    timed_out = serializers.IntegerField()
    cancelled = serializers.IntegerField()


class SourcesShape(Plain):
    """Completed requests by where their score came from."""

    archive = serializers.IntegerField()
    coalesced = serializers.IntegerField()
    model = serializers.IntegerField()


class EtaShape(Plain):
    """Seconds to the end, and the range that holds four ends in five; see docs/observability.md."""

    seconds = serializers.IntegerField()
    low = serializers.IntegerField()
    high = serializers.IntegerField()
    in_time = serializers.BooleanField(
        help_text="False: `seconds` are past the deadline, or end at the max duration; what is "
        "open then times out."
    )


class FirstForecastShape(Plain):
    """What was said when all rows of a workflow were known."""

    at = serializers.DateTimeField()
    share_in_time = serializers.FloatField()


class ForecastShape(Plain):
    """How much of a workflow is expected in time; see docs/estimates.md."""

    share_in_time = serializers.FloatField(help_text="Of all its requests.")
    eta = EtaShape(allow_null=True, help_text="As it was when the forecast was made.")
    cut = serializers.FloatField(help_text="Batches that do not fit, served as best effort.")
    reason = serializers.CharField()
    made_at = serializers.DateTimeField()
    first = FirstForecastShape(allow_null=True)
    kept = serializers.BooleanField(
        allow_null=True,
        help_text="Of one that ended: whether no request timed out. Null if the client ended it.",
    )


class TimelineShape(Plain):
    """When what happened to a workflow; results count as they end, archive hits included."""

    accepted_at = serializers.DateTimeField()
    closed_at = serializers.DateTimeField(allow_null=True)
    first_dispatch_at = serializers.DateTimeField(allow_null=True)
    first_result_at = serializers.DateTimeField(allow_null=True)
    last_result_at = serializers.DateTimeField(allow_null=True)
    finished_at = serializers.DateTimeField(allow_null=True)
    queued_s = serializers.FloatField(allow_null=True, help_text="Accepted to first dispatch.")
    working_s = serializers.FloatField(allow_null=True, help_text="First dispatch to last result.")
    total_s = serializers.FloatField(allow_null=True, help_text="Accepted to finished.")


class LinksShape(Plain):
    """Addresses that belong to a workflow."""

    self = serializers.CharField()
    ratings = serializers.CharField()
    distributions = serializers.CharField()
    requests = serializers.CharField()
    close = serializers.CharField()
    pause = serializers.CharField()
    resume = serializers.CharField()
    cancel = serializers.CharField()
    complete = serializers.CharField()
    retry = serializers.CharField()
    events = serializers.CharField()


class WorkflowShape(Plain):
    """A workflow and its progress, read in one snapshot."""

    id = serializers.CharField()
    name = serializers.CharField(allow_blank=True)
    rater = serializers.CharField()
    rater_version = serializers.CharField()
    owner = serializers.CharField()
    priority = serializers.IntegerField()
    priority_asked = serializers.IntegerField(
        allow_null=True, help_text="What was asked for when it was last set; a rule may give less."
    )
    priority_reason = serializers.CharField(
        allow_blank=True, help_text="Why `priority` is what it is; blank if from before rules."
    )
    best_effort = serializers.BooleanField()
    trigger = serializers.ChoiceField(choices=Trigger.choices)
    purpose = serializers.ChoiceField(choices=Purpose.choices)
    batch_size = serializers.IntegerField()
    complete_when = serializers.FloatField()
    round = serializers.IntegerField()
    state = serializers.ChoiceField(choices=WORKFLOW_STATES)
    ending_reason = serializers.ChoiceField(
        choices=[reason.value for reason in EndingReason],
        allow_null=True,
        help_text="Why the round was ended early, if it was.",
    )
    counts = CountsShape()
    sources = SourcesShape()
    mean_score = serializers.FloatField(allow_null=True, help_text="Over COMPLETED only.")
    scored = serializers.IntegerField(help_text="How many scores `mean_score` runs over.")
    eta = EtaShape(allow_null=True)
    forecast = ForecastShape(
        allow_null=True, help_text="Null while what its rater's work takes is not known."
    )
    standing = serializers.CharField(
        allow_null=True,
        help_text="Why it waits for others: its owner is over its share, or a traffic rule holds "
        "it back; null where it does not.",
    )
    model_calls = serializers.IntegerField()
    attempts = serializers.IntegerField()
    accelerator_seconds = serializers.FloatField(
        help_text="As its servers tell; calls of a server that does not count as they took."
    )
    created_at = serializers.DateTimeField()
    closed_at = serializers.DateTimeField(allow_null=True)
    started_at = serializers.DateTimeField(allow_null=True)
    finished_at = serializers.DateTimeField(allow_null=True)
    deadline_at = serializers.DateTimeField()
    ends_at = serializers.DateTimeField()
    retry_at = serializers.DateTimeField(
        allow_null=True, help_text="When the latest retry that is planned is due; not in lists."
    )
    timeline = TimelineShape()
    links = LinksShape()


class AttachedWebhook(Plain):
    """The webhook of a new workflow."""

    endpoint = serializers.CharField(help_text="Id below /webhook-endpoints.")
    url = serializers.CharField()
    format = serializers.ChoiceField(choices=list(WebhookFormat))
    secret = serializers.CharField(
        required=False, help_text="If AIRS made it: in answers to this submission only."
    )


class SubmissionShape(WorkflowShape, Acceptance):
    """A workflow and what became of the rows sent with it."""

    webhook = AttachedWebhook(required=False)


class WorkflowList(Plain):
    """Workflows, newest first; `next` is the cursor of the following page."""

    items = WorkflowShape(many=True)
    next = serializers.CharField(allow_null=True)


class RatingShape(Plain):
    """The record of one request; `score` is null unless it is COMPLETED."""

    request_id = serializers.CharField()
    query_id = serializers.CharField(allow_null=True)
    result_id = serializers.CharField(allow_null=True)
    side = serializers.ChoiceField(choices=["test", "base"], allow_null=True)
    state = serializers.ChoiceField(choices=STATES)
    score = serializers.FloatField(allow_null=True)
    label = serializers.CharField(allow_null=True)  # type: ignore[assignment]
    output = serializers.JSONField(allow_null=True)
    source = serializers.ChoiceField(  # type: ignore[assignment]
        choices=["archive", "coalesced", "model"], allow_null=True
    )
    error = serializers.CharField(allow_null=True)
    attempts = serializers.IntegerField()
    rated_at = serializers.DateTimeField(allow_null=True)
    age_s = serializers.IntegerField(
        allow_null=True, help_text="Age of an archive rating when it was taken."
    )
    look = serializers.ChoiceField(
        choices=["hit", "miss", "stale", "bypassed"],
        allow_null=True,
        help_text="What the archive said when the request was accepted.",
    )
    rated_by = serializers.CharField(
        allow_null=True,
        help_text="The workflow whose model call rated it; null: none, or erased since.",
    )
    rater_version = serializers.CharField()
    warnings = serializers.ListField(child=serializers.CharField())
    extra = serializers.JSONField(allow_null=True, help_text="Fields of the row that are not ours.")


class WorkflowQuery(Plain):
    """Query parameters of `GET /workflows`."""

    state = ChoiceField(required=False, choices=WORKFLOW_STATES)
    owner = TextField(required=False, max_length=150)
    rater = SlugField(required=False)
    cursor = TextField(required=False, max_length=200)
    limit = WholeField(required=False, default=100, min_value=1, max_value=500)


class RatingQuery(Plain):
    """Query parameters of `GET /workflows/{id}/ratings`."""

    state = ChoiceField(required=False, choices=STATES)
    format = ChoiceField(required=False, choices=["jsonl", "csv", "parquet"], default="jsonl")
    cursor = TextField(required=False, max_length=200)
    limit = WholeField(required=False, default=MAX_PAGE, min_value=1, max_value=MAX_PAGE)
    all = SwitchField(
        required=False, default=False, help_text="Stream all that follows instead of a page."
    )


class RaterFields(Plain):
    """Settings of a rater."""

    autorater = SlugField()
    model = SlugField()
    mode = ChoiceField(required=False, choices=Mode.choices)
    key_level = ChoiceField(required=False, choices=KeyLevel.choices)
    freshness_s = WholeField(required=False, min_value=1, max_value=MAX_FRESHNESS_S)
    deadline_s = WholeField(required=False, min_value=1, max_value=MAX_DEADLINE_S)
    max_qps = NumberField(required=False, allow_null=True, min_value=0.001, max_value=1e6)
    batch_size = WholeField(required=False, min_value=1, max_value=MAX_BATCH_SIZE)
    max_attempts = WholeField(required=False, min_value=1, max_value=MAX_ATTEMPTS)
    score_min = NumberField(required=False)
    score_max = NumberField(required=False)
    integer_scores = SwitchField(required=False)
    prompt_template = TextField(required=False, allow_blank=True)
    config = ObjectField(required=False)


class RaterForm(RaterFields):
    """A new rater."""

    id = SlugField()
    score_min = NumberField()
    score_max = NumberField()


class RaterChanges(RaterFields):
    """Changes of a rater; what decides the score makes a new version."""

    paused = SwitchField(required=False, help_text="false lets a paused rater send again.")


class PauseShape(Plain):
    """Why a rater sends nothing."""

    code = serializers.CharField()
    detail = serializers.CharField(allow_blank=True)
    at = serializers.DateTimeField(allow_null=True)


class WindowLimits(Plain):
    """Calls that may be out, by class: those of all classes together count."""

    high = serializers.FloatField()
    middle = serializers.FloatField()
    low = serializers.FloatField()
    best_effort = serializers.FloatField()


class WindowShape(Plain):
    """The adaptive window of a replica, as the dispatcher last wrote it."""

    replica = serializers.CharField()
    reason = serializers.ChoiceField(
        choices=[EXTERNAL, ISOLATED, SILENT],
        help_text="Why model management does not tell how much may be sent.",
    )
    ceiling = serializers.IntegerField()
    limits = WindowLimits()
    written_at = serializers.DateTimeField()


class RaterShape(Plain):
    """A rater."""

    id = serializers.CharField()
    autorater = serializers.CharField()
    model = serializers.CharField()
    mode = serializers.ChoiceField(choices=Mode.choices)
    key_level = serializers.ChoiceField(choices=KeyLevel.choices)
    freshness_s = serializers.IntegerField()
    deadline_s = serializers.IntegerField()
    max_qps = serializers.FloatField(allow_null=True)
    batch_size = serializers.IntegerField()
    max_attempts = serializers.IntegerField()
    score_min = serializers.FloatField()
    score_max = serializers.FloatField()
    integer_scores = serializers.BooleanField()
    prompt_template = serializers.CharField(allow_blank=True)
    config = serializers.JSONField()
    version = serializers.IntegerField(allow_null=True)
    paused = PauseShape(allow_null=True)
    windows = WindowShape(
        many=True, help_text="Those of its model that adapt and were used within five minutes."
    )
    created_at = serializers.DateTimeField()


class RaterList(Plain):
    """Raters by id."""

    items = RaterShape(many=True)
    next = serializers.CharField(allow_null=True)


class RaterVersionShape(Plain):
    """A rater version: everything that decides a score."""

    version = serializers.IntegerField()
    rater = serializers.CharField()
    digest = serializers.UUIDField()
    current = serializers.BooleanField()
    spec = serializers.JSONField()
    created_at = serializers.DateTimeField()
    retired_at = serializers.DateTimeField(allow_null=True)


class RaterVersionList(Plain):
    """Versions of a rater, newest first."""

    items = RaterVersionShape(many=True)
    next = serializers.CharField(allow_null=True)


class TokenForm(Plain):
    """A new token."""

    user = TextField(max_length=150)
    role = ChoiceField(choices=Role.choices)
    expires_at = serializers.DateTimeField(required=False, allow_null=True)


class TokenShape(Plain):
    """A token, without its secret."""

    id = serializers.CharField()
    user = serializers.CharField()
    role = serializers.ChoiceField(choices=Role.choices)
    hint = serializers.CharField(help_text="Last characters of the secret.")
    created_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField(allow_null=True)


class IssuedTokenShape(TokenShape):
    """A new token with its secret, which is shown this once."""

    secret = serializers.CharField()


class TokenList(Plain):
    """Tokens, oldest first."""

    items = TokenShape(many=True)
    next = serializers.CharField(allow_null=True)


class ProblemPlace(Plain):
    """One place in the input that is wrong."""

    field = serializers.CharField(required=False)
    line = serializers.IntegerField(required=False)
    code = serializers.CharField()
    detail = serializers.CharField()


class ProblemShape(Plain):
    """RFC 9457 problem document."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField()
    code = serializers.CharField(help_text="Stable; meant for programs.")
    instance = serializers.CharField(help_text="The request's id, as in X-Request-Id.")
    errors = ProblemPlace(many=True, required=False)  # type: ignore[assignment]


def workflow_as_json(
    workflow: Workflow,
    progress: Mapping[str, Any],
    *,
    eta: Mapping[str, int] | None,
    forecast: WorkflowForecast | None,
    standing: str | None,
) -> dict[str, Any]:
    """Return what clients see of a workflow."""
    address = f"/api/v1/workflows/{workflow.public_id}"
    below = ("ratings", "distributions", "requests", "events", "close", *(act.value for act in Act))
    same = (
        "name", "owner", "priority", "priority_asked", "priority_reason", "best_effort",
        "trigger", "purpose", "batch_size", "complete_when", "round", "created_at", "closed_at",
        "started_at", "finished_at", "deadline_at", "ends_at",
    )  # fmt: skip
    return {
        "id": workflow.public_id,
        "rater": workflow.rater_id,
        "rater_version": f"{workflow.rater_id}@{workflow.rater_version.number}",
        "state": WorkflowState(workflow.state).name,
        "ending_reason": workflow.ending_reason or None,
        **{name: getattr(workflow, name) for name in same},
        **progress,
        "eta": eta,
        "forecast": None if forecast is None else forecast_as_json(forecast),
        "standing": standing,
        "links": {
            "self": address,
            **{name: f"{address}/{name}" for name in below},
        },
    }


def forecast_as_json(forecast: WorkflowForecast) -> dict[str, Any]:
    """Return what clients see of a forecast."""
    eta = first = None
    if forecast.eta_s is not None:
        times = (forecast.eta_s, forecast.eta_low_s, forecast.eta_high_s)
        names = ("seconds", "low", "high")
        eta = {
            **{name: math.ceil(s or 0.0) for name, s in zip(names, times, strict=True)},
            "in_time": forecast.made_at + timedelta(seconds=forecast.eta_s) < forecast.deadline_at,
        }
    if forecast.first_at is not None:
        first = {"at": forecast.first_at, "share_in_time": forecast.first_share}
    return {
        "share_in_time": forecast.share,
        "eta": eta,
        "cut": round(forecast.cut_batches, 3),
        "reason": forecast.reason,
        "made_at": forecast.made_at,
        "first": first,
        "kept": forecast.kept,
    }


def rater_as_json(rater: Rater, *, windows: Sequence[SendWindow] = ()) -> dict[str, Any]:
    """Return what clients see of a rater."""
    paused = None
    if rater.paused_code:
        paused = {
            "code": rater.paused_code,
            "detail": rater.paused_detail,
            "at": rater.paused_at,
        }
    same = (
        "autorater", "mode", "key_level", "freshness_s", "deadline_s", "max_qps", "batch_size",
        "max_attempts", "score_min", "score_max", "integer_scores", "prompt_template", "config",
    )  # fmt: skip
    return {
        "id": rater.pk,
        "model": rater.model_id,
        **{name: getattr(rater, name) for name in same},
        "version": rater.current_version.number if rater.current_version else None,
        "paused": paused,
        "windows": [_window_as_json(window) for window in windows],
        "created_at": rater.created_at,
    }


def _window_as_json(window: SendWindow) -> dict[str, Any]:
    limits = zip(PriorityClass, window.limits, strict=True)
    return {
        "replica": window.replica,
        "reason": window.reason,
        "ceiling": window.ceiling,
        "limits": {cls.name.lower(): round(limit, 2) for cls, limit in limits},
        "written_at": window.written_at,
    }


def version_as_json(version: RaterVersion, *, current_id: int | None) -> dict[str, Any]:
    """Return what clients see of a rater version."""
    return {
        "version": version.number,
        "rater": version.rater_id,
        "digest": str(version.digest),
        "current": version.pk == current_id,
        "spec": version.spec,
        "created_at": version.created_at,
        "retired_at": version.retired_at,
    }


def checked(form: Plain) -> Mapping[str, Any]:
    """Return the values of a form that were given or have a default; raise ValidationError."""
    form.is_valid(raise_exception=True)
    values: Mapping[str, Any] = form.validated_data
    return values
