"""The REST calls as values: how each request is built and how its answer is read.

Pure. `client` sends them, once for synchronous and once for asynchronous callers, and knows nothing
of any single call.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from airs_client import errors
from airs_client.results import (
    Decision,
    Distributions,
    Estimate,
    Event,
    Model,
    Page,
    Pool,
    Rater,
    Rating,
    RatingsPage,
    Submission,
    Workflow,
    decision_from,
    distributions_from,
    estimate_from,
    event_from,
    model_from,
    pool_from,
    rater_from,
    rating_from,
    submission_from,
    workflow_from,
)
from airs_client.uploads import Upload

T = TypeVar("T")

ResultFormat = Literal["jsonl", "csv"]
Act = Literal["close", "pause", "resume", "cancel", "complete"]
FileFormat = Literal["jsonl", "csv", "parquet"]
Rebalancing = Literal["off", "dry_run", "on"]
ModelAct = Literal["start", "stop", "restart"]

_ROOT = "/api/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer as it came; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    retry_after_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[T]):
    """One request and the reader of its answer. `repeatable`: doing it twice does no harm."""

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    read: Callable[[Reply], T]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    upload: Upload | None = None
    document: Mapping[str, Any] | None = None
    """A JSON body."""
    repeatable: bool


def outcome(call: Call[T], reply: Reply) -> T:
    """The value of a call, or the error that the answer stands for."""
    if reply.status >= 400:
        raise errors.from_answer(
            status=reply.status,
            content_type=reply.headers.get("content-type", ""),
            body=reply.body,
            request_id=reply.headers.get("x-request-id", ""),
            retry_after_s=reply.retry_after_s,
        )
    if not 200 <= reply.status < 300:
        target = reply.headers.get("location", "nowhere")
        raise errors.UnexpectedAnswer(f"the server answered {reply.status} and points to {target}")
    return call.read(reply)


def submit(
    upload: Upload,
    *,
    rater: str,
    name: str | None = None,
    priority: int | None = None,
    deadline: timedelta | None = None,
    max_duration: timedelta | None = None,
    complete_when: float | None = None,
    batch_size: int | None = None,
    bypass: bool = False,
    webhook: str | None = None,
    idempotency_key: str | None = None,
) -> Call[Submission]:
    params = _params(
        rater=rater,
        name=name or upload.name,
        priority=priority,
        deadline_s=_seconds(deadline),
        max_duration_s=_seconds(max_duration),
        complete_when=complete_when,
        batch_size=batch_size,
        bypass="true" if bypass else None,
        webhook_url=webhook,
    )
    key = idempotency_key or content_key(upload, params)
    return Call(
        method="POST",
        path=f"{_ROOT}/workflows",
        read=_submission,
        params=params,
        headers={**upload.headers, "Idempotency-Key": key},
        upload=upload,
        repeatable=True,
    )


def estimate(
    upload: Upload,
    *,
    rater: str,
    priority: int | None = None,
    deadline: timedelta | None = None,
    batch_size: int | None = None,
    bypass: bool = False,
    sample_of: int | None = None,
) -> Call[Estimate]:
    params = _params(
        rater=rater,
        priority=priority,
        deadline_s=_seconds(deadline),
        batch_size=batch_size,
        bypass="true" if bypass else None,
        sample_of=sample_of,
    )
    return Call(
        method="POST",
        path=f"{_ROOT}/estimates",
        read=_one(estimate_from),
        params=params,
        headers=upload.headers,
        upload=upload,
        repeatable=True,
    )


def workflow(workflow_id: str) -> Call[Workflow]:
    return _get(f"/workflows/{_segment(workflow_id)}", _one(workflow_from))


def workflows(
    *, state: str | None = None, rater: str | None = None, cursor: str | None = None
) -> Call[Page[Workflow]]:
    params = _params(state=state, rater=rater, cursor=cursor)
    return _get("/workflows", _many(workflow_from), params)


def act(workflow_id: str, name: Act) -> Call[Workflow]:
    return _change(f"/workflows/{_segment(workflow_id)}/{name}", _one(workflow_from))


def retry(workflow_id: str, *, idempotency_key: str) -> Call[Workflow]:
    """The same key makes no further round, should the answer be lost and the call repeated."""
    return Call(
        method="POST",
        path=f"{_ROOT}/workflows/{_segment(workflow_id)}/retry",
        read=_one(workflow_from),
        headers={"Idempotency-Key": idempotency_key},
        repeatable=True,
    )


def change(
    workflow_id: str,
    *,
    name: str | None = None,
    priority: int | None = None,
    deadline: timedelta | None = None,
) -> Call[Workflow]:
    given = {"name": name, "priority": priority, "deadline_s": _seconds(deadline)}
    return Call(
        method="PATCH",
        path=f"{_ROOT}/workflows/{_segment(workflow_id)}",
        read=_one(workflow_from),
        document={field: value for field, value in given.items() if value is not None},
        repeatable=True,
    )


def ratings_page(
    workflow_id: str,
    *,
    format: ResultFormat = "jsonl",
    state: str | None = None,
    cursor: str | None = None,
) -> Call[RatingsPage]:
    params = _params(format=format, state=state, cursor=cursor)

    def read(reply: Reply) -> RatingsPage:
        following = _next_cursor(reply.headers)
        if following is not None and following == cursor:
            raise errors.UnexpectedAnswer(f"the server gives cursor {cursor} as its own successor")
        return RatingsPage(content=reply.body, next=following)

    return _get(f"/workflows/{_segment(workflow_id)}/ratings", read, params)


def ratings_file(workflow_id: str, *, format: FileFormat, state: str | None = None) -> Call[None]:
    """All records as one stream, which cannot be taken up where it broke off."""
    params = _params(format=format, state=state, all="true")
    return _get(f"/workflows/{_segment(workflow_id)}/ratings", lambda _: None, params)


def distributions(workflow_id: str) -> Call[Distributions]:
    return _get(f"/workflows/{_segment(workflow_id)}/distributions", _one(distributions_from))


def events(workflow_id: str) -> Call[Page[Event]]:
    return _get(f"/workflows/{_segment(workflow_id)}/events", _many(event_from))


def raters(*, cursor: str | None = None) -> Call[Page[Rater]]:
    return _get("/raters", _many(rater_from), _params(cursor=cursor))


def rater(rater_id: str) -> Call[Rater]:
    return _get(f"/raters/{_segment(rater_id)}", _one(rater_from))


def models(*, cursor: str | None = None) -> Call[Page[Model]]:
    return _get("/models", _many(model_from), _params(cursor=cursor))


def model(model_id: str) -> Call[Model]:
    return _get(f"/models/{_segment(model_id)}", _one(model_from))


def register_model(document: Mapping[str, Any]) -> Call[Model]:
    """The same registration again changes nothing."""
    return _sent("POST", "/models", _one(model_from), document)


def change_model(model_id: str, changes: Mapping[str, Any]) -> Call[Model]:
    return _sent("PATCH", f"/models/{_segment(model_id)}", _one(model_from), changes)


def remove_model(model_id: str) -> Call[None]:
    return _remove(f"/models/{_segment(model_id)}")


def act_on_model(model_id: str, name: ModelAct) -> Call[Model]:
    """A second restart would replace the replicas once more."""
    path = f"/models/{_segment(model_id)}/{name}"
    return Call(
        method="POST", path=_ROOT + path, read=_one(model_from), repeatable=name != "restart"
    )


def resize_model(model_id: str, replicas: int) -> Call[Model]:
    path = f"/models/{_segment(model_id)}/resize"
    return _sent("POST", path, _one(model_from), {"replicas": replicas})


def model_versions(model_id: str) -> Call[Page[Mapping[str, Any]]]:
    return _get(f"/models/{_segment(model_id)}/versions", _many(lambda raw: raw))


def retire_model_version(model_id: str, version: str) -> Call[Mapping[str, Any]]:
    path = f"/models/{_segment(model_id)}/versions/{_segment(version)}/retire"
    return _change(path, _object_of)


def try_model(
    model_id: str, *, rows: Sequence[tuple[str, str]] = (), message: str | None = None
) -> Call[Mapping[str, Any]]:
    """One real call, which may cost something: it is not repeated."""
    document: dict[str, Any] = {} if message is None else {"message": message}
    if rows:
        document["rows"] = [{"query": query, "text": text} for query, text in rows]
    return Call(
        method="POST",
        path=f"{_ROOT}/models/{_segment(model_id)}/try",
        read=_object_of,
        document=document,
        repeatable=False,
    )


def register_pool(document: Mapping[str, Any]) -> Call[Pool]:
    """The same registration again changes nothing."""
    return _sent("POST", "/pools", _one(pool_from), document)


def change_pool(pool_id: str, changes: Mapping[str, Any]) -> Call[Pool]:
    return _sent("PATCH", f"/pools/{_segment(pool_id)}", _one(pool_from), changes)


def remove_pool(pool_id: str) -> Call[None]:
    return _remove(f"/pools/{_segment(pool_id)}")


def pools(*, cursor: str | None = None) -> Call[Page[Pool]]:
    return _get("/pools", _many(pool_from), _params(cursor=cursor))


def pool(pool_id: str) -> Call[Pool]:
    return _get(f"/pools/{_segment(pool_id)}", _one(pool_from))


def decisions(pool_id: str, *, cursor: str | None = None) -> Call[Page[Decision]]:
    path = f"/pools/{_segment(pool_id)}/decisions"
    return _get(path, _many(decision_from), _params(cursor=cursor))


def rebalance(pool_id: str, mode: Rebalancing) -> Call[Pool]:
    return change_pool(pool_id, {"rebalancing": mode})


def explain(
    row: Mapping[str, Any], *, rater: str, max_age: timedelta | None = None, bypass: bool = False
) -> Call[Mapping[str, Any]]:
    """What the archive has for a row; as a body, so that a whole page fits."""
    given = {"rater": rater, "max_age_s": _seconds(max_age), "bypass": bypass or None, **row}
    return _document("/archive/explain", given)


def purge(
    *,
    rater: str | None = None,
    version: int | None = None,
    url: str | None = None,
    before: datetime | None = None,
    dry_run: bool = True,
) -> Call[Mapping[str, Any]]:
    given = {
        "rater": rater,
        "version": version,
        "url": url,
        "before": before.isoformat() if before else None,
        "dry_run": dry_run,
    }
    return _document("/archive/purge", given)


def purge_state(purge_id: str) -> Call[Mapping[str, Any]]:
    return _get(f"/archive/purges/{_segment(purge_id)}", _object_of)


def ratings_in(page: RatingsPage) -> Iterator[Rating]:
    """The records of a jsonl page; only LF ends a record, whatever the texts contain."""
    for line in page.content.split(b"\n"):
        if line.strip():
            yield rating_from(_object(line))


def content_key(upload: Upload, params: Mapping[str, str]) -> str:
    """Equal for the same bytes sent in the same way, so that a second upload is the first one."""
    parts = [upload.digest, upload.headers, dict(params)]
    encoded = json.dumps(parts, sort_keys=True).encode()
    return f"airs-{hashlib.sha256(encoded).hexdigest()}"


def _submission(reply: Reply) -> Submission:
    # 202 is a new workflow; a server that has seen the key before answers 200 or says so.
    replayed = reply.status == 200 or reply.headers.get("idempotency-replayed") == "true"
    return submission_from(_object_of(reply), replayed=replayed)


def _get(path: str, read: Callable[[Reply], T], params: Mapping[str, str] | None = None) -> Call[T]:
    return Call(method="GET", path=_ROOT + path, read=read, params=params or {}, repeatable=True)


def _change(path: str, read: Callable[[Reply], T]) -> Call[T]:
    """A state change that the API promises to be idempotent."""
    return Call(method="POST", path=_ROOT + path, read=read, repeatable=True)


def _document(path: str, given: Mapping[str, Any]) -> Call[Mapping[str, Any]]:
    """A POST of the members that are not None, which does no harm when it is done twice."""
    return Call(
        method="POST",
        path=_ROOT + path,
        read=_object_of,
        document={name: value for name, value in given.items() if value is not None},
        repeatable=True,
    )


def _sent(
    method: Literal["POST", "PATCH"],
    path: str,
    read: Callable[[Reply], T],
    document: Mapping[str, Any],
) -> Call[T]:
    """A JSON body that does no harm when it is sent twice."""
    return Call(method=method, path=_ROOT + path, read=read, document=document, repeatable=True)


def _remove(path: str) -> Call[None]:
    """Not repeated: what is gone would seem never to have been there."""
    return Call(method="DELETE", path=_ROOT + path, read=lambda _: None, repeatable=False)


def _one(convert: Callable[[Mapping[str, Any]], T]) -> Callable[[Reply], T]:
    return lambda reply: convert(_object_of(reply))


def _many(convert: Callable[[Mapping[str, Any]], T]) -> Callable[[Reply], Page[T]]:
    def read(reply: Reply) -> Page[T]:
        raw = _object_of(reply)
        items = raw.get("items")
        if not isinstance(items, list):
            raise errors.UnexpectedAnswer("the server answered a list call without items")
        following = raw.get("next")
        return Page(
            items=tuple(convert(item) for item in items if isinstance(item, dict)),
            next=_cursor_in(str(following)) if following else None,
            raw=raw,
        )

    return read


def _object_of(reply: Reply) -> Mapping[str, Any]:
    kind = reply.headers.get("content-type", "")
    if "json" not in kind:
        raise errors.UnexpectedAnswer(
            f"the server answered {reply.status} with {kind or 'nothing'} instead of JSON; "
            "is this address an AIRS server?"
        )
    return _object(reply.body)


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise errors.UnexpectedAnswer(f"the server's answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise errors.UnexpectedAnswer("the server's answer is not a JSON object")
    return value


def _next_cursor(headers: Mapping[str, str]) -> str | None:
    if cursor := headers.get("x-next-cursor"):
        return cursor
    for link in headers.get("link", "").split(","):
        target, _, attributes = link.partition(">")
        if 'rel="next"' in attributes or "rel=next" in attributes:
            return _cursor_in(target.strip().lstrip("<"))
    return None


def _cursor_in(following: str) -> str:
    """A cursor given bare or inside the next page's address.

    Only the cursor is taken from an address: the token never goes where an answer points to.
    """
    values = parse_qs(urlsplit(following).query).get("cursor")
    return values[0] if values else following


def _params(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _seconds(duration: timedelta | None) -> int | None:
    return None if duration is None else round(duration.total_seconds())


def _segment(identifier: str) -> str:
    if identifier.strip() in ("", ".", ".."):
        raise errors.UnusableId(f"{identifier!r} is not an id")
    return quote(identifier, safe="")
