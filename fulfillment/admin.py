"""Admin pages of Rating Fulfillment.

State is read-only here; actions and forms call one service each. Lists of the big tables never
count or sort them: newest first by key, a count that stops at a cap, filters only where an index
serves. Everything stored is escaped by the templates, nothing is marked safe.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import Expression, Model, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from fulfillment import completion, progress, raters, tokens
from fulfillment.clock import database_now
from fulfillment.errors import FulfillmentError
from fulfillment.models import (
    ApiToken,
    Batch,
    Event,
    ExecutorBoot,
    Rater,
    RaterVersion,
    RatingRequest,
    ServiceRun,
    Workflow,
    request_key,
)
from fulfillment.policy.fingerprint import request_digest
from fulfillment.policy.lifecycle import BatchState, RequestState, WorkflowState

if TYPE_CHECKING:
    AnyPaginator = Paginator[Any]
    AnyAdmin = admin.ModelAdmin[Any]
    AnyForm = forms.ModelForm[Any]
else:  # generic for the type checker only
    AnyPaginator, AnyAdmin, AnyForm = Paginator, admin.ModelAdmin, forms.ModelForm

admin.site.site_header = "AIRS"
admin.site.site_title = "AIRS"
admin.site.index_title = "AI Rater Service"

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
    paginator = CappedPaginator
    sortable_by = ()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


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
    list_select_related = ("workflow",)
    search_fields = ("workflow__public_id",)
    scope = ""

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return NewestFirst

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        title = f"{self.opts.verbose_name_plural}: the newest {COUNT_CAP:,}; {self.scope}"
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if not search_term:
            return queryset, False
        matched = _SEARCH.fullmatch(search_term)
        workflow = matched and Workflow.objects.filter(public_id=matched[1]).first()
        if not matched or not workflow:
            return queryset.none(), False
        return self.of_workflow(queryset, workflow, matched[2]), False

    def of_workflow(
        self, queryset: QuerySet[Any], workflow: Workflow, request_id: str | None
    ) -> QuerySet[Any]:
        """Return the rows of a workflow, or of one of its requests."""
        raise NotImplementedError


@admin.register(RatingRequest)
class RatingRequestAdmin(BigTableAdmin):
    """The state table."""

    scope = "search wf_… for a workflow, wf_…/request-id for one request"
    list_display = (
        "id", "workflow", "request_id", "query_id", "state", "source", "score", "label", "error",
        "attempts", "rated_at",
    )  # fmt: skip
    list_filter = (RequestStateFilter,)

    def of_workflow(
        self, queryset: QuerySet[Any], workflow: Workflow, request_id: str | None
    ) -> QuerySet[Any]:
        # By key range: a request's key starts with its workflow's.
        found = queryset.filter(
            pk__gte=request_key(workflow.pk, 0), pk__lt=request_key(workflow.pk + 1, 0)
        )
        if request_id:
            digest = request_digest(request_id).hex()
            found = found.filter(workflow_id=workflow.pk, request_digest=digest)
        return found


@admin.register(Batch)
class BatchAdmin(BigTableAdmin):
    """Batches, with what happens to them next."""

    scope = "search wf_… for the open ones of a workflow"
    list_display = (
        "id", "workflow", "position", "state", "open_items", "attempts", "lost", "not_before",
        "replica", "lease_until",
    )  # fmt: skip
    list_filter = (BatchStateFilter,)

    def of_workflow(
        self, queryset: QuerySet[Any], workflow: Workflow, request_id: str | None
    ) -> QuerySet[Any]:
        return queryset.filter(workflow=workflow).exclude(state=BatchState.DONE)

    @admin.display(description="open items")
    def open_items(self, batch: Batch) -> str:
        return f"{batch.open_mask.bit_count()} of {len(batch.fingerprints)}"


@admin.register(Workflow)
class WorkflowAdmin(ReadOnlyAdmin):
    """Workflows and how far they are."""

    ordering = ("-pk",)
    list_display = (
        "public_id", "name", "owner", "rater", "state", "how_far", "priority", "created_at",
        "deadline_at", "finished_at",
    )  # fmt: skip
    list_filter = ("state", "rater")
    list_select_related = ("rater", "workflowstats")
    search_fields = ("public_id__exact", "owner__exact", "name__icontains")
    readonly_fields = ("progress",)
    actions = ("cancel",)

    @admin.display(description="progress")
    def how_far(self, workflow: Workflow) -> str:
        """Folded counts: a few seconds old, and free."""
        stats = getattr(workflow, "workflowstats", None)
        if stats is None:
            return ""
        ended = stats.completed + stats.failed + stats.timed_out + stats.cancelled
        lost = stats.failed + stats.timed_out
        return f"{ended} of {stats.received}" + (f", {lost} failed" if lost else "")

    @admin.display(description="progress")
    def progress(self, workflow: Workflow) -> str:
        """Exact counts, for the page of one workflow."""
        counts = progress.read(workflow)["counts"]
        return ", ".join(f"{count} {name}" for name, count in counts.items())

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("fulfillment.change_workflow"))

    @admin.action(description="Cancel selected workflows", permissions=["cancel"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Workflow]) -> None:
        for workflow in queryset:
            try:
                state = WorkflowState(completion.cancel(workflow_id=workflow.pk).state)
            except FulfillmentError as error:
                self.message_user(request, error.detail, messages.ERROR)
            else:
                self.log_change(request, workflow, "Cancelled.")
                self.message_user(request, f"Workflow {workflow.public_id} is {state.name}.")


class RaterForm(AnyForm):
    """Checks a rater as the API does."""

    class Meta:
        model = Rater
        fields = (
            "id", "autorater", "model_id", "mode", "key_level", "freshness_s", "deadline_s",
            "max_qps", "batch_size", "max_attempts", "score_min", "score_max", "integer_scores",
            "prompt_template", "config",
        )  # fmt: skip

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if not self.errors:
            candidate = Rater(**{"id": self.instance.pk, **cleaned})
            for problem in raters.problems(candidate):
                field = "model_id" if problem["field"] == "model" else problem["field"]
                self.add_error(field if field in self.fields else None, problem["detail"])
        return cleaned


@admin.register(Rater)
class RaterAdmin(AnyAdmin):
    """Raters; a change of what decides the score makes a new version."""

    form = RaterForm
    list_display = (
        "id", "autorater", "model_id", "mode", "current_version", "paused_code", "paused_detail",
        "paused_at",
    )  # fmt: skip
    list_select_related = ("current_version",)
    readonly_fields = (
        "current_version", "paused_code", "paused_detail", "paused_at", "created_at",
    )  # fmt: skip
    actions = ("pause", "resume")

    def get_readonly_fields(
        self, request: HttpRequest, obj: Rater | None = None
    ) -> tuple[str, ...]:
        return (*(("id",) if obj else ()), *self.readonly_fields)

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
    list_display = ("public_id", "kind", "workflow", "round", "created_at")
    list_select_related = ("workflow",)
    search_fields = ("public_id__exact", "workflow__public_id__exact")


@admin.register(ExecutorBoot)
class ExecutorBootAdmin(ReadOnlyAdmin):
    """Executors and their heartbeats."""

    ordering = ("-heartbeat_at",)
    list_display = ("boot_id", "host", "pid", "slots", "started_at", "heartbeat_at")


@admin.register(ServiceRun)
class ServiceRunAdmin(ReadOnlyAdmin):
    """When services last ran."""

    ordering = ("name",)
    list_display = ("name", "ran_at")
