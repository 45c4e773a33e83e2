"""The admin site: its order of tables, and a landing page that says what is going on.

Each section is shown to who may see the tables it reads. It counts what partial indexes hold (work
that is under way) and the newest workflows' folded statistics, never a big table.
"""

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.auth.models import AnonymousUser, User
from django.db import connection
from django.db.models import Count, Sum
from django.http import HttpRequest
from django.template.response import TemplateResponse

from airs_site.health import HEARTBEAT_LIMIT, TICK_LIMIT
from fulfillment.clock import database_now
from fulfillment.models import ExecutorBoot, Rater, ServiceRun, Workflow, WorkflowStats
from fulfillment.policy.lifecycle import BatchState, WorkflowState
from models_admin.models import ModelConfig, ModelKind
from models_admin.policy.replicas import ServerState, summary

NEWEST = 1_000
"""Workflows whose states and sources are summed up."""
COUNTED = 100_000
"""Batches of one state that are counted."""
_ORDER = ("fulfillment", "models_admin", "django_celery_beat", "auth")
_QUEUED = tuple(state for state in BatchState if state is not BatchState.DONE)


class AirsAdminSite(AdminSite):
    """Our tables first; `View site` is gone, for there is none."""

    site_header = site_title = "AIRS"
    index_title = "AI Rater Service"
    site_url = None
    index_template = "airs_site/admin_index.html"

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> list[Any]:
        apps = super().get_app_list(request, app_label)
        known = [app for label in _ORDER for app in apps if app["app_label"] == label]
        return [*known, *(app for app in apps if app not in known)]

    def index(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        overview = _overview(request.user, database_now())
        return super().index(request, {"overview": overview, **(extra_context or {})})


def _overview(user: User | AnonymousUser, now: datetime) -> dict[str, Any]:
    sections: dict[str, Any] = {"flower_url": f"http://127.0.0.1:{settings.FLOWER_PORT}/"}
    if user.has_perm("fulfillment.view_workflow"):
        sections |= {"workflows": _workflows(), "sources": _sources(), "newest": f"{NEWEST:,}"}
    if user.has_perm("fulfillment.view_batch"):
        sections |= {"queue": _queue(), "queue_states": [state.name.lower() for state in _QUEUED]}
    if user.has_perm("fulfillment.view_executorboot"):
        sections["parts"] = _parts(now)
    if user.has_perm("models_admin.view_modelconfig"):
        sections["models"] = [_model(model) for model in _models()]
    return sections


def _newest() -> Any:
    return Workflow.objects.order_by("-pk").values("pk")[:NEWEST]


def _workflows() -> list[dict[str, Any]]:
    """Count workflows by state: all that are under way, and the newest of those that ended."""
    under_way = Workflow.objects.filter(finished_at=None)
    ended = Workflow.objects.filter(pk__in=_newest(), finished_at__isnull=False)
    return [
        {"state": state, "name": WorkflowState(state).name, "count": count}
        for some in (under_way, ended)
        for state, count in some.order_by("state").values_list("state").annotate(Count("pk"))
    ]


def _sources() -> dict[str, str]:
    """Sum up where the ratings of the newest workflows came from."""
    names = ("received", "from_archive", "coalesced", "from_model", "failed", "timed_out")
    stats = WorkflowStats.objects.filter(workflow__in=_newest())
    sums = stats.aggregate(**{name: Sum(name, default=0) for name in names})
    return {name: f"{total:,.0f}" for name, total in sums.items()}


def _queue() -> list[dict[str, Any]]:
    """Count open batches by rater and state, up to a cap for each state."""
    some = "SELECT workflow_id, state FROM fulfillment_batch WHERE state = {} LIMIT {}"
    union = " UNION ALL ".join(f"({some.format(int(state), COUNTED)})" for state in _QUEUED)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT w.rater_id, b.state, count(*) FROM ({union}) b"
            " JOIN fulfillment_workflow w ON w.id = b.workflow_id GROUP BY 1, 2"
        )
        counts = {(rater, state): count for rater, state, count in cursor.fetchall()}
    return [
        {
            "rater": rater.pk,
            "paused": rater.paused_code,
            "counts": [counts.get((rater.pk, state), 0) for state in _QUEUED],
        }
        for rater in Rater.objects.order_by("pk")
    ]


def _parts(now: datetime) -> list[dict[str, Any]]:
    """Say how long ago each part gave a sign of life."""
    ran = dict(ServiceRun.objects.values_list("name", "ran_at"))
    living = ExecutorBoot.objects.filter(heartbeat_at__gte=now - HEARTBEAT_LIMIT)
    beats = list(living.values_list("heartbeat_at", flat=True))
    return [
        _part("dispatcher", ran.get("dispatcher"), now, TICK_LIMIT),
        _part("beat", ran.get("beat"), now, TICK_LIMIT),
        _part(f"executors ({len(beats)})", max(beats, default=None), now, HEARTBEAT_LIMIT),
    ]


def _part(name: str, at: datetime | None, now: datetime, limit: timedelta) -> dict[str, Any]:
    age = None if at is None else max(now - at, timedelta())
    return {
        "name": name,
        "ok": age is not None and age <= limit,
        "age_s": None if age is None else age.total_seconds(),
    }


def _models() -> Any:
    return ModelConfig.objects.prefetch_related("servers").order_by("pk")


def _model(model: ModelConfig) -> dict[str, Any]:
    if model.kind == ModelKind.EXTERNAL:
        return {"id": model.pk, "state": "external"}
    servers = model.servers.all()
    ready = sum(server.state == ServerState.READY for server in servers)
    return {
        "id": model.pk,
        "ready": ready,
        "wanted": model.target_replicas,
        "state": summary([ServerState(server.state) for server in servers]),
        "queue_rows": sum(server.queue_rows for server in servers),
    }
