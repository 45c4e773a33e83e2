"""The queue of the service: as it stands, and over time."""

import math
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import board, promises, queue_history, timeline
from fulfillment import queue_schema as schema
from fulfillment.api.base import ApiView, answers, checked_query, find_workflow, json_answer
from fulfillment.clock import database_now
from fulfillment.errors import InvalidFields

_SPAN = timedelta(hours=1)
_FORECASTS = timedelta(days=1)
"""How far back it is told whether forecasts were kept."""
_POINTS = 120
"""Steps of an answer when none is asked for."""


class QueueView(ApiView):
    """The queue now."""

    @extend_schema(operation_id="get_queue", responses=answers(schema.QueueShape, 200))
    def get(self, request: Request) -> HttpResponse:
        """Show what waits and what is out, by rater and class."""
        bodies.query(request, known=())
        now = database_now()
        items = []
        for depth in board.depths(board.standings(now), now):
            shown = asdict(depth)
            rater, cls = shown.pop("rater_id"), shown.pop("priority_class")
            items.append({"rater": rater, "priority_class": cls.name.lower(), **shown})
        return json_answer({"at": now, "items": items, "forecasts": _kept(now)})


class QueueHistoryView(ApiView):
    """The queue over time."""

    @extend_schema(
        operation_id="get_queue_history",
        parameters=[schema.QueueHistoryQuery],
        responses=answers(schema.QueueHistoryShape, 200, 422),
    )
    def get(self, request: Request) -> HttpResponse:
        """Show depth, ages and rates by rater, class and step; the last hour by default."""
        asked = checked_query(request, schema.QueueHistoryQuery)
        until = asked.get("until") or database_now()
        since = asked.get("since") or until - _SPAN
        span = until - since
        if span <= timedelta():
            raise _wrong("since", "not_before", "must be before until")
        if "step_s" in asked:
            step = timedelta(seconds=asked["step_s"])
        else:
            step = timedelta(seconds=max(30, math.ceil(span.total_seconds() / _POINTS)))
        if span > step * queue_history.MOST_POINTS:
            most = f"gives more than {queue_history.MOST_POINTS:,} steps; ask for longer ones"
            raise _wrong("step_s", "out_of_range", most)
        points = queue_history.read(
            rater_id=asked.get("rater"), since=since, until=until, step=step
        )
        return json_answer(
            {"since": since, "until": until, "step_s": step.total_seconds(), "items": points}
        )


class DistributionsView(ApiView):
    """What the requests of a workflow went through."""

    @extend_schema(
        operation_id="get_distributions",
        responses=answers(schema.DistributionsShape, 200, 404),
    )
    def get(self, request: Request, public_id: str) -> HttpResponse:
        """Show how waiting times and attempts are spread; exact for up to 5,000 requests."""
        bodies.query(request, known=())
        workflow = find_workflow(request, public_id)
        return json_answer(timeline.spread(workflow, now=database_now()))


def _kept(now: datetime) -> dict[str, Any]:
    """Return how far forecasts were kept to workflows that ended of late."""
    since = now - _FORECASTS
    found = promises.kept_rate(since, now)
    return {"since": since, **asdict(found), "kept_rate": found.rate}


def _wrong(field: str, code: str, detail: str) -> InvalidFields:
    return InvalidFields(
        f"{field} {detail}.", errors=[{"field": field, "code": code, "detail": detail}]
    )
