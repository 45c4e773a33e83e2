"""Admin pages of Rating Fulfillment.

State is read-only here; actions and forms call one service each. Lists of the big tables never
count or sort them: newest first by key, a count that stops at a cap, filters only where an index
serves. Everything stored is escaped, by the templates and by `format_html`.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import connection
from django.db.models import DurationField, Expression, ExpressionWrapper, F, Model, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from fulfillment import (
    archive,
    progress,
    promises,
    promotion,
    raters,
    staleness,
    standings,
    tokens,
)
from fulfillment.admin_acts import ACTIONS
from fulfillment.clock import database_now
from fulfillment.models import (
    ApiToken,
    Batch,
    Event,
    ExecutorBoot,
    QueueSample,
    Rater,
    RaterVersion,
    Rating,
    RatingRequest,
    ServiceRun,
    Workflow,
    request_key,
)
from fulfillment.policy.fingerprint import request_digest, url_digest
from fulfillment.policy.lifecycle import BatchState, RequestState

if TYPE_CHECKING:
    AnyPaginator = Paginator[Any]
    AnyAdmin = admin.ModelAdmin[Any]
    AnyForm = forms.ModelForm[Any]
else:  # generic for the type checker only
    AnyPaginator, AnyAdmin, AnyForm = Paginator, admin.ModelAdmin, forms.ModelForm

COUNT_CAP = 10_000
"""Rows that a list counts and pages through; search narrows it to what one looks for."""

_SEARCH = re.compile(r"\s*(wf_[0-9a-f]{32})(?:/(.*))?", re.DOTALL)


class CappedPaginator(AnyPaginator):
    """Counts at most COUNT_CAP rows."""

    @cached_property
    def count(self) -> int:
        rows: QuerySet[Any] = self.object_list[:COUNT_CAP]  # type: ignore[assignment]
        return rows.count()


class NewestFirst(ChangeList):
    """Always in the order of the key: `?o=` cannot ask for a sort that no index serves."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Expression | str]:
        return ["-pk"]


class ReadOnlyAdmin(AnyAdmin):
    """Shows rows; nobody adds, changes or deletes them here."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they count the table once a choice
    paginator = CappedPaginator
    sortable_by = ()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class SeenAdmin(ReadOnlyAdmin):
    """Read-only rows that something alive renews: shows how long ago it did."""

    renewed = ""
    """The field that it writes its time to."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        age = ExpressionWrapper(Now() - F(self.renewed), output_field=DurationField())
        found: QuerySet[Any] = super().get_queryset(request).annotate(age=age)
        return found

    @admin.display(description="seen")
    def seen(self, row: Any) -> str:
        return f"{max(row.age, timedelta()).total_seconds():.0f} s ago"


class _InWorkflow(admin.SimpleListFilter):
    """Filters by state inside the workflow that was searched for; only there an index serves."""

    title = "state"
    parameter_name = "state"
    states: ClassVar[Sequence[RequestState] | Sequence[BatchState]]

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        if not _SEARCH.match(request.GET.get("q", "")):
            return []
        return [(str(int(state)), state.name) for state in self.states]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset.filter(state=int(value)) if value and value.isdecimal() else queryset


class RequestStateFilter(_InWorkflow):
    """By the state of a request."""

    states = tuple(RequestState)


class BatchStateFilter(_InWorkflow):
    """By the state of a batch."""

    states = tuple(state for state in BatchState if state is not BatchState.DONE)


class BigTableAdmin(ReadOnlyAdmin):
    """Read-only and fast with a million rows; found by workflow id."""

    ordering = ("-pk",)
    list_per_page = 100
    list_max_show_all = 100
    list_select_related: ClassVar[bool | tuple[str, ...]] = ("workflow",)
    search_fields = ("workflow__public_id",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return NewestFirst

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        title = f"{capfirst(str(self.opts.verbose_name_plural))}: the newest {COUNT_CAP:,}"
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        return (self.found(queryset, search_term) if search_term else queryset), False

    def found(self, queryset: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Return the rows that were searched for: of a workflow, or of one of its requests."""
        matched = _SEARCH.fullmatch(term)
        workflow = matched and Workflow.objects.filter(public_id=matched[1]).first()
        if not matched or not workflow:
            return queryset.none()
        return self.of_workflow(queryset, workflow, matched[2])

    def of_workflow(
        self, queryset: QuerySet[Any], workflow: Workflow, request_id: str | None
    ) -> QuerySet[Any]:
        """Return the rows of a workflow, or of one of its requests."""
        raise NotImplementedError


def _requests_of(workflow: Workflow, request_id: str | None) -> QuerySet[RatingRequest]:
    # By key range: a request's key starts with its workflow's.
    found = RatingRequest.objects.filter(
        pk__gte=request_key(workflow.pk, 0), pk__lt=request_key(workflow.pk + 1, 0)
    )
    if request_id:
        digest = request_digest(request_id).hex()
        found = found.filter(workflow_id=workflow.pk, request_digest=digest)
    return found


@admin.register(RatingRequest)
class RatingRequestAdmin(BigTableAdmin):
    """The state table."""

    search_help_text = "wf_… for a workflow, wf_…/request-id for one of its requests"
    list_display = (
        "id", "request_id", "query_id", "state", "source", "short_score", "label", "error",
        "attempts", "rated_at", "workflow",
    )  # fmt: skip
    list_filter = (RequestStateFilter,)
    readonly_fields = ("rating",)

    def of_workflow(
        self, queryset: QuerySet[Any], workflow: Workflow, request_id: str | None
    ) -> QuerySet[Any]:
        return queryset & _requests_of(workflow, request_id)

    @admin.display(description="score")
    def short_score(self, request: RatingRequest) -> str:
        return "" if request.score is None else f"{request.score:.4f}"

    @admin.display(description="archived rating")
    def rating(self, request: RatingRequest) -> str | SafeString:
        """Its page says more, unless the rating was erased: the request keeps its copy."""
        if request.rating_id is None:
            return ""
        return _link("rating", "change", request.rating_id, text=f"rating {request.rating_id}")


@admin.register(Batch)
class BatchAdmin(BigTableAdmin):
    """Batches, with what happens to them next."""

    search_help_text = "wf_… for the open ones of a workflow"
    list_display = (
        "id", "position", "state", "open_items", "attempts", "lost", "not_before", "replica",
        "lease_until", "workflow",
    )  # fmt: skip
    list_filter = (BatchStateFilter,)

    def of_workflow(
        self, queryset: QuerySet[Any], workflow: Workflow, request_id: str | None
    ) -> QuerySet[Any]:
        return queryset.filter(workflow=workflow).exclude(state=BatchState.DONE)

    @admin.display(description="open items")
    def open_items(self, batch: Batch) -> str:
        return f"{batch.open_mask.bit_count()} of {len(batch.fingerprints)}"


@admin.register(Rating)
class RatingAdmin(BigTableAdmin):
    """The archive, and what is taken from it."""

    search_help_text = "a fingerprint, the URL of a result, or wf_…/request-id"
    list_display = (
        "id", "rater_version", "score", "label", "produced_at", "reusable", "fingerprint",
    )  # fmt: skip
    list_select_related = ("rater_version",)
    readonly_fields = ("next_use", "computed_for")
    search_fields = ("fingerprint",)

    def found(self, queryset: QuerySet[Any], term: str) -> QuerySet[Any]:
        if term.startswith(("http://", "https://")):
            return queryset.filter(url_digest=UUID(bytes=url_digest(term)))
        with contextlib.suppress(ValueError):
            return queryset.filter(fingerprint=UUID(term))
        return super().found(queryset, term)

    def of_workflow(
        self, queryset: QuerySet[Any], workflow: Workflow, request_id: str | None
    ) -> QuerySet[Any]:
        if not request_id:
            return queryset.none()
        wanted = _requests_of(workflow, request_id).values("fingerprint")[:1]
        return queryset.filter(fingerprint__in=wanted)

    @admin.display(description="for the next equal request")
    def next_use(self, rating: Rating) -> str:
        """Say whether it would be taken, and why not."""
        rater, now = rating.rater_version.rater, database_now()
        if not rating.reusable:
            return "Not taken: its workflow kept it out of the archive."
        freshness = timedelta(seconds=rater.freshness_s)
        with connection.cursor() as cursor:
            entries = archive.look_up(
                cursor, [rating.fingerprint.hex], produced_after=now - freshness, now=now
            )
        entry = entries.get(rating.fingerprint.hex)
        if entry is None:
            return f"Not taken: older than the freshness of {rater.pk}, {freshness}."
        if entry.rating_id != rating.pk:
            return f"Not taken: rating {entry.rating_id} is newer."
        if rater.current_version_id != rating.rater_version_id:
            return f"Taken by workflows of {rating.rater_version} only; there is a newer version."
        return f"Taken until {rating.produced_at + freshness:%Y-%m-%d %H:%M:%SZ}."

    @admin.display(description="computed for")
    def computed_for(self, rating: Rating) -> str | SafeString:
        workflow = Workflow.objects.filter(pk=rating.workflow_id).first()
        if workflow is None:
            return "a workflow that was erased"
        return _link("workflow", "change", workflow.pk, text=workflow.public_id)


@admin.register(Workflow)
class WorkflowAdmin(ReadOnlyAdmin):
    """Workflows and how far they are."""

    ordering = ("-pk",)
    list_display = (
        "public_id", "name", "state", "how_far", "hits", "rater", "owner", "deadline_at",
        "priority", "created_at", "finished_at",
    )  # fmt: skip
    list_filter = ("state", "rater")
    list_select_related = ("rater", "workflowstats")
    search_fields = ("public_id__exact", "owner__exact", "name__icontains")
    search_help_text = "a whole id or owner, or a part of the name"
    readonly_fields = ("progress", "sources", "rows", "forecast", "standing")
    actions = ACTIONS
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("public_id", "name", "owner", "state", "ending_reason", "progress"),
                    *("sources", "forecast", "standing", "rows", "rater_version"),
                    *("priority", "priority_asked", "priority_reason"),
                )
            },
        ),
        (
            "Times",
            {
                "fields": (
                    *("created_at", "closed_at", "round_at", "started_at", "finished_at"),
                    *("deadline_at", "ends_at"),
                )
            },
        ),
        (
            "Settings",
            {
                "fields": (
                    *("trigger", "purpose", "best_effort", "batch_size", "complete_when"),
                    *("max_age_s", "bypass", "no_store", "round"),
                )
            },
        ),
    )

    @admin.display(description="progress")
    def how_far(self, workflow: Workflow) -> str:
        """Folded counts: a few seconds old, and free."""
        stats = getattr(workflow, "workflowstats", None)
        if stats is None:
            return ""
        ended = stats.completed + stats.failed + stats.timed_out + stats.cancelled
        lost = stats.failed + stats.timed_out
        return f"{ended:,} / {stats.received:,}" + (f", {lost:,} failed" if lost else "")

    @admin.display(description="hits")
    def hits(self, workflow: Workflow) -> str:
        """What the archive answered."""
        stats = getattr(workflow, "workflowstats", None)
        if stats is None or not stats.received:
            return ""
        return f"{stats.from_archive:,} ({stats.from_archive / stats.received:.0%})"

    @admin.display(description="progress")
    def progress(self, workflow: Workflow) -> str:
        """Exact counts, for the page of one workflow."""
        return _listed(progress.read(workflow)["counts"])

    @admin.display(description="ratings from")
    def sources(self, workflow: Workflow) -> str:
        return _listed(progress.read(workflow)["sources"])

    @admin.display(description="forecast")
    def forecast(self, workflow: Workflow) -> str:
        """What is expected in time, as it was last said."""
        said = promises.of([workflow.pk]).get(workflow.pk)
        if said is None:
            return "None: nobody knows yet what its rater's work takes."
        kept = {True: "It was kept.", False: "Requests timed out.", None: ""}[said.kept]
        first = "" if said.first_share is None else f"At first {_percent(said.first_share)}. {kept}"
        return (
            f"{_percent(said.share)} in time: {said.reason}. "
            f"Said at {said.made_at:%Y-%m-%d %H:%M:%SZ}. {first}"
        )

    @admin.display(description="behind others")
    def standing(self, workflow: Workflow) -> str:
        """Say why it waits for others, where it does."""
        told = standings.of([workflow], database_now())
        return told.get(workflow.pk, "It is not over its share, and no rule holds it back.")

    @admin.display(description="see its")
    def rows(self, workflow: Workflow) -> SafeString:
        tables = {"ratingrequest": "requests", "batch": "open batches", "event": "events"}
        links = (
            (_link(name, "changelist", text=text, query=f"?q={workflow.public_id}"),)
            for name, text in tables.items()
        )
        return format_html_join(", ", "{}", links)

    def has_act_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("fulfillment.change_workflow"))


def _percent(share: float) -> str:
    """Return a share; only all of it is 100 %."""
    return f"{min(share * 100, 99.9) if share < 1 else 100:.3g} %"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


def _link(table: str, page: str, *args: Any, text: str, query: str = "") -> SafeString:
    address = reverse(f"admin:fulfillment_{table}_{page}", args=args)
    return format_html('<a href="{}{}">{}</a>', address, query, text)


class RaterForm(AnyForm):
    """Checks a rater as the API does."""

    class Meta:
        model = Rater
        fields = (
            "id", "autorater", "model_id", "mode", "key_level", "freshness_s", "deadline_s",
            "max_qps", "batch_size", "max_attempts", "score_min", "score_max", "integer_scores",
            "prompt_template", "config",
        )  # fmt: skip
        labels: ClassVar = {
            "model_id": "Model",
            "freshness_s": "Freshness (s)",
            "deadline_s": "Deadline (s)",
            "max_qps": "Most requests a second",
        }
        help_texts: ClassVar = {
            "model_id": "Id of a registered model",
            "mode": "Integrated: model management says how much may be sent. Isolated: AIRS finds "
            "it out by itself.",
            "key_level": "How much of a request decides its score",
            "freshness_s": "How long a rating is taken from the archive; 7,776,000 s are 90 days",
            "deadline_s": "Of a workflow that names none: no try starts later",
            "max_qps": "Empty: no limit",
            "batch_size": "Items of a model call, 1 to 60",
            "max_attempts": "Tries of an item before it FAILED",
            "config": "Options of the plug-in, as a JSON object",
        }
        # The admin's own widget is too narrow for 7776000 and hides its last digit.
        widgets: ClassVar = {
            "freshness_s": forms.NumberInput(attrs={"class": "vBigIntegerField"}),
            "deadline_s": forms.NumberInput(attrs={"class": "vBigIntegerField"}),
        }

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        candidate = Rater(**{"id": self.instance.pk, **cleaned})
        wrong = set(self.errors)
        for problem in raters.problems(candidate):
            name = problem["field"].split(".")[0]
            field = "model_id" if name == "model" else name
            if field not in wrong:
                self.add_error(field if field in self.fields else None, problem["detail"])
        return cleaned


@admin.register(Rater)
class RaterAdmin(AnyAdmin):
    """Raters; a change of what decides the score makes a new version."""

    form = RaterForm
    list_display = (
        "id", "autorater", "model_id", "mode", "current_version", "sending", "paused_detail",
        "paused_at",
    )  # fmt: skip
    list_select_related = ("current_version",)
    readonly_fields = (
        "current_version", "promoting", "paused_code", "paused_detail", "paused_at", "created_at",
        "staleness",
    )  # fmt: skip
    actions = ("pause", "resume")

    def get_readonly_fields(
        self, request: HttpRequest, obj: Rater | None = None
    ) -> tuple[str, ...]:
        return ("id", *self.readonly_fields) if obj else ()

    @admin.display(description="sending")
    def sending(self, rater: Rater) -> str:
        return f"paused: {rater.paused_code}" if rater.paused_code else "yes"

    @admin.display(description="a new version would cost")
    def promoting(self, rater: Rater) -> str:
        """Say what the archive saves now: a change of what decides the score empties it."""
        if rater.current_version is None:
            return "Nothing: it has no version yet."
        cost = promotion.estimate(rater.pk, now=database_now())
        a_day, whole = cost["a_day"], cost["whole_archive"]
        text = (
            f"{'' if cost['entries_exact'] else 'About '}{cost['entries']:,} ratings of "
            f"{cost['rater_version']} would answer nothing any more; they answered "
            f"{cost['hits']:,} of {cost['requests']:,} requests in {cost['days']:.1f} days. "
            f"At most {a_day['model_calls']:,} model calls more a day, "
            f"{whole['model_calls']:,} in all"
        )
        if a_day["pool_hours"] is None:
            return f"{text}; hours are not known: {cost['reason']}."
        return (
            f"{text}: {a_day['pool_hours']:,.2f} hours of all its replicas a day, "
            f"{whole['pool_hours']:,.2f} in all."
        )

    @admin.display(description="archived scores against new ones")
    def staleness(self, rater: Rater) -> str | SafeString:
        """Show what shadow refresh has found, by the age of the archived score."""
        buckets = staleness.report(rater.pk)["buckets"]
        if not buckets:
            return "Shadow refresh has compared none yet."
        return format_html_join("", "<div>{}</div>", ((_drift(b),) for b in buckets))

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Rater, form: Any, change: bool) -> None:
        if change:
            changes = {name: form.cleaned_data[name] for name in form.changed_data}
            raters.change(rater_id=obj.pk, changes=changes, now=database_now())
        else:
            raters.register(obj, now=database_now())

    @admin.action(description="Pause selected raters", permissions=["change"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Rater]) -> None:
        for rater in queryset:
            raters.pause(
                rater_id=rater.pk,
                code=raters.PAUSED_BY_OPERATOR,
                detail=f"Paused by {request.user}.",
                now=database_now(),
            )
            self.log_change(request, rater, "Paused.")
        self.message_user(request, "Paused; what waits, waits.")

    @admin.action(description="Resume selected raters", permissions=["change"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Rater]) -> None:
        for rater in queryset:
            raters.resume(rater_id=rater.pk)
            self.log_change(request, rater, "Resumed.")
        self.message_user(request, "Resumed.")


def _drift(bucket: Mapping[str, Any]) -> str:
    start, end = (
        None if bound is None else timedelta(seconds=bound)
        for bound in (bucket["age_from_s"], bucket["age_to_s"])
    )
    share = bucket["changed_10_percent_interval"]
    age = f"{start} or older" if end is None else f"{start} to {end}"
    return (
        f"{age}: {bucket['n']} compared, mean difference {bucket['mean_difference']:+.4f}, "
        f"mean absolute difference {bucket['mean_absolute_difference']:.4f}, "
        f"moved by over 10 % of the scale {bucket['changed_10_percent']:.1%} "
        f"({share['low']:.1%} to {share['high']:.1%})"
    )


@admin.register(RaterVersion)
class RaterVersionAdmin(ReadOnlyAdmin):
    """Rater versions."""

    ordering = ("-pk",)
    list_display = ("__str__", "digest", "created_at", "retired_at")
    list_filter = ("rater",)


class TokenForm(AnyForm):
    """A new token."""

    class Meta:
        model = ApiToken
        fields = ("user", "role", "expires_at")

    def clean_expires_at(self) -> Any:
        expires_at = self.cleaned_data["expires_at"]
        if expires_at is not None and expires_at <= database_now():
            raise forms.ValidationError("It would be expired already.")
        return expires_at


@admin.register(ApiToken)
class ApiTokenAdmin(AnyAdmin):
    """Tokens: issued and revoked, never shown again."""

    form = TokenForm
    list_display = ("user", "role", "shown_hint", "created_at", "expires_at")
    list_filter = ("role",)

    @admin.display(description="token")
    def shown_hint(self, token: ApiToken) -> str:
        return f"…{token.hint}"

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: ApiToken, form: Any, change: bool) -> None:
        issued, secret = tokens.issue(
            user=obj.user, role=obj.role, expires_at=obj.expires_at, now=database_now()
        )
        obj.pk = issued.pk
        self.message_user(request, f"The token, shown this once: {secret}", messages.WARNING)


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """Completion events."""

    ordering = ("-pk",)
    list_display = ("public_id", "kind", "workflow", "round", "created_at", "published_at")
    list_select_related = ("workflow",)
    search_fields = ("public_id__exact", "workflow__public_id__exact")


@admin.register(QueueSample)
class QueueSampleAdmin(BigTableAdmin):
    """Depth, age and pace of the queue over time."""

    list_display = (
        "at", "rater_id", "priority_class", "open_requests", "ready", "leased", "delayed",
        "waiting", "paused_requests", "oldest_age", "p90_age", "pace",
    )  # fmt: skip
    list_select_related = ()
    search_fields = ("rater_id",)
    search_help_text = "the id of a rater"

    def found(self, queryset: QuerySet[Any], term: str) -> QuerySet[Any]:
        return queryset.filter(rater_id=term.strip())

    @admin.display(description="oldest")
    def oldest_age(self, sample: QueueSample) -> str:
        return _span(sample.oldest_s)

    @admin.display(description="90 % are younger than")
    def p90_age(self, sample: QueueSample) -> str:
        return _span(sample.age_p90_s)

    @admin.display(description="ended a second")
    def pace(self, sample: QueueSample) -> str:
        return f"{sample.ended / sample.period_s:,.1f}" if sample.period_s else ""


def _span(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


@admin.register(ExecutorBoot)
class ExecutorBootAdmin(SeenAdmin):
    """Executors and their heartbeats."""

    renewed = "heartbeat_at"
    ordering = ("-heartbeat_at",)
    list_display = ("boot_id", "host", "pid", "slots", "started_at", "heartbeat_at", "seen")


@admin.register(ServiceRun)
class ServiceRunAdmin(SeenAdmin):
    """When services last ran."""

    renewed = "ran_at"
    ordering = ("name",)
    list_display = ("name", "ran_at", "seen")
