"""The event log of a workflow, as a list or as a stream that follows it (server-sent events).

A stream keeps a thread of its web process while it lasts, so there are few of them at a time
(AIRS_EVENT_FOLLOWERS a process; the next one is told to wait or to poll), and each ends after
LONGEST_S: clients of server-sent events come back by themselves and go on after `Last-Event-ID`.
Between two looks it holds no transaction.
"""

import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any, Final

import orjson
from django.conf import settings
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request

from fulfillment import api_bodies as bodies
from fulfillment import api_schema as schema
from fulfillment import progress
from fulfillment.api.base import ApiView, answers, find_workflow, json_answer
from fulfillment.errors import TooManyFollowers
from fulfillment.models import Event, Workflow
from fulfillment.policy.lifecycle import FINISHED, WorkflowState

LOOK_EVERY_S: Final = 1.0
HEARTBEAT_S: Final = 10.0
"""Silence after which a comment goes out: it also shows whether the client is still there."""
LONGEST_S: Final = 300.0
COME_BACK_MS: Final = 2_000
STREAM: Final = "text/event-stream"


class EventShape(schema.Plain):
    """What happened to a workflow: one completion event a round."""

    id = serializers.CharField(help_text="Also the `webhook-id` of its deliveries.")
    type = serializers.CharField(help_text="`workflow.completed`, `.partial`, `.failed` …")
    round = serializers.IntegerField()
    data = serializers.JSONField()  # type: ignore[assignment]
    created_at = serializers.DateTimeField()


class EventList(schema.Plain):
    """Events, oldest first."""

    items = EventShape(many=True)
    next = serializers.CharField(allow_null=True)


class WorkflowEventsView(ApiView):
    """The events of a workflow."""

    @extend_schema(
        operation_id="list_workflow_events",
        parameters=[
            OpenApiParameter(
                name="Last-Event-ID",
                location=OpenApiParameter.HEADER,
                description="Of a stream: the last event that was seen; it goes on after it.",
            )
        ],
        responses={
            **answers(EventList, 200, 404),
            (200, STREAM): OpenApiTypes.STR,
            204: None,
        },
    )
    def get(self, request: Request, public_id: str) -> HttpResponseBase:
        """List events, or (with `Accept: text/event-stream`) follow until the round has ended.

        A stream sends `progress` events with the counts when they change, then the completion event
        and ends. Nothing is left to follow after `Last-Event-ID`: 204, which ends reconnecting.
        """
        bodies.query(request, known=())
        workflow = find_workflow(request, public_id)
        if STREAM not in request.headers.get("Accept", ""):
            found = Event.objects.filter(workflow=workflow).order_by("pk")
            return json_answer({"items": [_as_json(event) for event in found], "next": None})
        seen = _seen(workflow, request.headers.get("Last-Event-ID", ""))
        if seen and seen.round == workflow.round and workflow.state in FINISHED:
            return HttpResponse(status=204)
        return StreamingHttpResponse(
            Follower(workflow.pk, after=seen.pk if seen else 0),
            content_type=STREAM,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )


_places = threading.Lock()
_taken = 0


class Follower:
    """The chunks of one stream; holds a place from its making until `close`, which Django calls."""

    def __init__(
        self,
        workflow_id: int,
        *,
        after: int,
        look_every_s: float = LOOK_EVERY_S,
        longest_s: float = LONGEST_S,
    ) -> None:
        """Raise TooManyFollowers when all places of this process are taken."""
        global _taken
        with _places:
            if _taken >= settings.AIRS_EVENT_FOLLOWERS:
                raise TooManyFollowers(settings.AIRS_EVENT_FOLLOWERS)
            _taken += 1
        self._workflow_id, self._after = workflow_id, after
        self._look_every_s, self._longest_s = look_every_s, longest_s
        self._closed = threading.Event()

    def close(self) -> None:
        """Give the place back; twice is harmless."""
        global _taken
        with _places:
            if not self._closed.is_set():
                self._closed.set()
                _taken -= 1

    def __iter__(self) -> Iterator[bytes]:
        began_s = spoke_s = monotonic()
        yield f"retry: {COME_BACK_MS}\n\n".encode()
        told: Any = None
        while monotonic() - began_s < self._longest_s:
            # The workflow before its events: the event is there once the state is a final one.
            workflow = Workflow.objects.filter(pk=self._workflow_id).first()
            if workflow is None:
                return
            shown = _progress(workflow)
            if shown != told:
                told, spoke_s = shown, monotonic()
                yield _chunk("progress", shown)
            for event in self._new_events():
                spoke_s = monotonic()
                yield _chunk(event.kind, _as_json(event), event_id=event.public_id)
            if workflow.state in FINISHED:
                return
            if monotonic() - spoke_s >= HEARTBEAT_S:
                spoke_s = monotonic()
                yield b": heartbeat\n\n"
            self._closed.wait(self._look_every_s)

    def _new_events(self) -> Iterator[Event]:
        found = Event.objects.filter(workflow_id=self._workflow_id, pk__gt=self._after)
        for event in found.order_by("pk"):
            self._after = event.pk
            yield event


def _seen(workflow: Workflow, event_id: str) -> Event | None:
    return Event.objects.filter(workflow=workflow, public_id=event_id[:40]).first()


def _progress(workflow: Workflow) -> dict[str, Any]:
    counted = progress.read(workflow)
    return {
        "id": workflow.public_id,
        "state": WorkflowState(workflow.state).name,
        "round": workflow.round,
        "counts": counted["counts"],
        "sources": counted["sources"],
    }


def _as_json(event: Event) -> dict[str, Any]:
    return {
        "id": event.public_id,
        "type": event.kind,
        "round": event.round,
        "data": event.data,
        "created_at": event.created_at,
    }


def _chunk(name: str, data: Any, *, event_id: str = "") -> bytes:
    # JSON of orjson has no line break, which would end the field.
    text = orjson.dumps(data, option=orjson.OPT_UTC_Z)
    of_id = f"id: {event_id}\n".encode() if event_id else b""
    return b"%bevent: %b\ndata: %b\n\n" % (of_id, name.encode(), text)
