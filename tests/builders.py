"""Rows and bodies for tests: valid by default, each argument changes one thing.

`use_plugins` gives fulfillment a plug-in and a model directory of its own, so that tests of
fulfillment need neither `workers` nor `models_admin`.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import orjson
from django.test import Client
from pytest_django import Settings

from fulfillment import tokens
from fulfillment.model_directory import Replica
from fulfillment.models import (
    ApiToken,
    Batch,
    Rater,
    RaterVersion,
    RatingRequest,
    Role,
    Workflow,
    WorkflowStats,
    request_key,
)
from fulfillment.policy.fingerprint import request_digest, version_digest
from fulfillment.policy.lifecycle import FINISHED, BatchState, RequestState, Source, WorkflowState
from fulfillment.raters import Spec

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
MODEL = "stub-model"
RATER = "stub-rater"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a plug-in finds wrong."""

    field: str
    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """A plug-in's description; it refuses a config with `broken` in it."""

    name: str
    version: str = "1"
    key_fields: tuple[str, ...] = ("query_text", "url", "title", "html", "text", "context")
    key_level: str = "result"
    protocol: str = "oip"
    prompt: Callable[[Mapping[str, Any], Any], str] | None = None

    @property
    def check(self) -> Callable[[Any], Sequence[Problem]]:
        return lambda spec: (
            [Problem(field="config", code="bad_config", detail="it says that it is broken")]
            if "broken" in spec.config
            else []
        )


@dataclass(kw_only=True, slots=True)
class Model:
    """A model as a directory describes it."""

    id: str
    protocol: str = "oip"
    version: str = "v1"


@dataclass(kw_only=True, slots=True)
class Directory:
    """A model directory in memory."""

    models: dict[str, Model] = field(default_factory=dict)
    live: list[Replica] = field(default_factory=list)

    def describe(self, model_id: str) -> Model | None:
        return self.models.get(model_id)

    def replicas(self, now: datetime) -> Sequence[Replica]:
        return list(self.live)


DIRECTORY = Directory()
PLUGINS: dict[str, Plugin] = {}


def describe(name: str) -> Plugin:
    """Return a plug-in of PLUGINS; named by AIRS_RATER_PLUGINS in tests that `use_plugins`."""
    return PLUGINS[name]


def use_plugins(changed: Settings) -> None:
    """Let fulfillment see one plug-in `stub` (`chat` speaks another protocol) and one model."""
    changed.AIRS_RATER_PLUGINS = "tests.builders.describe"
    changed.AIRS_MODEL_DIRECTORY = "tests.builders.DIRECTORY"
    PLUGINS.clear()
    PLUGINS["stub"] = Plugin(name="stub")
    PLUGINS["chat"] = Plugin(name="chat", protocol="openai")
    DIRECTORY.models = {MODEL: Model(id=MODEL)}
    DIRECTORY.live = []


def rater(rater_id: str = RATER, **changes: Any) -> Rater:
    """Store a rater without a version."""
    fields = {"autorater": "stub", "model_id": MODEL, "created_at": NOW, **changes}
    return Rater.objects.create(id=rater_id, **fields)


def version(of: Rater | None = None, *, number: int = 1, model_version: str = "v1") -> RaterVersion:
    """Store a rater version and make it the current one."""
    of = of or rater()
    spec = Spec(
        rater_id=of.pk,
        autorater=of.autorater,
        plugin_version="1",
        model_id=of.model_id,
        model_version=model_version,
        key_level=of.key_level,
        score_min=of.score_min,
        score_max=of.score_max,
        integer_scores=of.integer_scores,
        prompt_template=of.prompt_template,
        config=of.config,
    )
    made = RaterVersion.objects.create(
        rater=of,
        number=number,
        digest=UUID(bytes=version_digest(**asdict(spec))),
        spec=asdict(spec),
        created_at=NOW,
    )
    Rater.objects.filter(pk=of.pk).update(current_version=made)
    of.current_version = made
    return made


def workflow(
    of: RaterVersion | None = None,
    *,
    state: WorkflowState = WorkflowState.RUNNING,
    stats: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Workflow:
    """Store a workflow and its stats; by default closed and running."""
    of = of or RaterVersion.objects.first() or version()
    finished = state in FINISHED
    fields: dict[str, Any] = {
        "owner": "alice",
        "created_at": NOW,
        "closed_at": None if state == WorkflowState.OPEN else NOW,
        "finished_at": NOW if finished else None,
        "deadline_at": NOW + timedelta(hours=2),
        "ends_at": changes.get("deadline_at", NOW + timedelta(hours=2)) + timedelta(hours=1),
        **changes,
    }
    made = Workflow.objects.create(rater=of.rater, rater_version=of, state=state, **fields)
    WorkflowStats.objects.create(workflow=made, **(stats or {}))
    return made


def request(
    of: Workflow,
    position: int,
    *,
    request_id: str | None = None,
    state: RequestState = RequestState.PENDING,
    **changes: Any,
) -> RatingRequest:
    """Store a request row; a COMPLETED one gets a score from the model."""
    request_id = request_id if request_id is not None else f"row-{position + 1}"
    fields: dict[str, Any] = {"fingerprint": uuid.uuid4()}
    if state == RequestState.COMPLETED:
        fields |= {"score": 2.5, "source": Source.MODEL, "rated_at": NOW, "attempts": 1}
    if state == RequestState.FAILED:
        fields |= {"error": "invalid_request"}
    return RatingRequest.objects.create(
        id=request_key(of.pk, position),
        workflow=of,
        request_id=request_id,
        request_digest=UUID(bytes=request_digest(request_id)),
        state=state,
        **{**fields, **changes},
    )


def batch(
    of: Workflow,
    positions: Sequence[int],
    *,
    item_of: Sequence[int] | None = None,
    state: BatchState = BatchState.READY,
    open_mask: int | None = None,
    **changes: Any,
) -> Batch:
    """Store a batch, by default of one item a position, all of them open."""
    item_of = list(range(len(positions))) if item_of is None else list(item_of)
    items = max(item_of) + 1
    full = (1 << items) - 1
    fields: dict[str, Any] = {}
    if state == BatchState.LEASED:
        fields = {"lease_until": NOW + timedelta(minutes=1), "started_at": NOW, "sent_mask": full}
    if state == BatchState.DELAYED:
        fields = {"not_before": NOW + timedelta(minutes=1), "attempts": 1}
    return Batch.objects.create(
        workflow=of,
        position=positions[0],
        positions=list(positions),
        item_of=item_of,
        fingerprints=[uuid.uuid4() for _ in range(items)],
        open_mask=(0 if state == BatchState.DONE else full) if open_mask is None else open_mask,
        state=state,
        **{**fields, **changes},
    )


def token(user: str = "alice", role: str = Role.SUBMITTER, **changes: Any) -> str:
    """Store a token and return its secret."""
    _, secret = tokens.issue(user=user, role=role, expires_at=None, now=NOW)
    if changes:
        ApiToken.objects.filter(digest=tokens.digest(secret)).update(**changes)
    return secret


def row(number: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a valid request row."""
    return {
        "request_id": f"r{number}",
        "query_text": f"query {number}",
        "url": f"https://shop.example/{number}",
        "text": f"page {number}",
        **changes,
    }


def ndjson(rows: Sequence[Any]) -> bytes:
    """Return rows as a body, one a line; bytes and strings go in as they are."""
    return b"".join(
        (r if isinstance(r, bytes) else r.encode() if isinstance(r, str) else orjson.dumps(r))
        + b"\n"
        for r in rows
    )


class Api:
    """A caller of the REST API with a token of its own."""

    def __init__(self, user: str = "alice", role: str = Role.SUBMITTER) -> None:
        self.client = Client(raise_request_exception=False)
        self.headers = {"Authorization": f"Bearer {token(user, role)}"}

    def get(self, path: str, **headers: str) -> Any:
        """GET below /api/v1."""
        return self.client.get(f"/api/v1{path}", headers=self._with(headers))

    def post(
        self, path: str, body: Any = b"", *, kind: str = "application/json", **headers: str
    ) -> Any:
        """POST below /api/v1; what is no bytes goes as JSON."""
        return self._send("POST", path, body, kind, headers)

    def patch(self, path: str, body: Any) -> Any:
        """PATCH below /api/v1."""
        return self._send("PATCH", path, body, "application/json", {})

    def put(self, path: str, body: Any) -> Any:
        """PUT below /api/v1."""
        return self._send("PUT", path, body, "application/json", {})

    def delete(self, path: str) -> Any:
        """DELETE below /api/v1."""
        return self.client.delete(f"/api/v1{path}", headers=self.headers)

    def upload(self, path: str, rows: Sequence[Any] | bytes, **headers: str) -> Any:
        """POST rows as NDJSON."""
        body = rows if isinstance(rows, bytes) else ndjson(rows)
        return self.post(path, body, kind="application/x-ndjson", **headers)

    def _send(
        self, method: str, path: str, body: Any, kind: str, headers: Mapping[str, str]
    ) -> Any:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        return self.client.generic(
            method, f"/api/v1{path}", data, content_type=kind, headers=self._with(headers)
        )

    def _with(self, headers: Mapping[str, str]) -> dict[str, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return {**self.headers, **named}


def records(response: Any) -> list[dict[str, Any]]:
    """Return the records of a streamed jsonl answer."""
    return [orjson.loads(line) for line in response.getvalue().splitlines()]
