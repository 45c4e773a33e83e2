"""What can go wrong when talking to AIRS, one class a cause, and what to do about it.

`ApiError` and its subclasses carry what the server said (RFC 9457 problem details); the others are
found on this side. `remedy` is a sentence for a person, empty when there is nothing useful to say.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airs_client.results import Workflow


class AirsError(Exception):
    """Base of all errors of this package."""

    remedy = ""


class Unreachable(AirsError):
    """No usable answer came: refused, reset, timed out, name not found."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"cannot reach AIRS at {url}: {reason}")
        self.url = url
        self.reason = reason
        self.remedy = "Is the server running (`make up`)? Is AIRS_URL right?"


class UnexpectedAnswer(AirsError):
    """Something answered, but not in the way of AIRS: a proxy, another service, a redirect."""


class UnusableId(AirsError):
    """An id that can name nothing: empty, or a step in a path."""


class SourceUnreadable(AirsError):
    """The rows to send cannot be read, or are not of a kind that can be sent."""


class SourceChanged(AirsError):
    """The file was written to while it was being sent; the server takes nothing of it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} changed while it was being sent; nothing was accepted")
        self.remedy = "Send it again when nothing writes to it any more."


class WaitTimedOut(AirsError):
    """`wait` gave up; the workflow goes on. `workflow` is how it was last seen."""

    def __init__(self, workflow: "Workflow", timeout_s: float) -> None:
        super().__init__(f"workflow {workflow.id} is {workflow.state} after {timeout_s:g} s")
        self.workflow = workflow


class WorkflowNotCompleted(AirsError):
    """The workflow ended other than COMPLETED; `workflow` has the counts of what there is."""

    def __init__(self, workflow: "Workflow") -> None:
        counts = workflow.counts
        super().__init__(
            f"workflow {workflow.id} ended {workflow.state}: "
            f"{counts.completed} of {counts.total} requests completed"
        )
        self.workflow = workflow


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemItem:
    """One fault in the input: `line` of a file (1 is the first) or `field` of a body."""

    code: str
    detail: str
    line: int | None = None
    field: str | None = None


class ApiError(AirsError):
    """The server refused; `code` is stable, `detail` is for people."""

    def __init__(
        self,
        *,
        status: int,
        code: str,
        detail: str,
        items: tuple[ProblemItem, ...] = (),
        request_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.status = status
        self.code = code
        self.detail = detail
        self.items = items
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.remedy = _REMEDY_BY_CODE.get(code) or _REMEDY_BY_STATUS.get(status, "")
        if retry_after_s is not None:
            self.remedy = f"The server asks to wait {retry_after_s:.0f} s before another try."


class AuthError(ApiError):
    """No token, an unknown one, or one that may not do this (401, 403)."""


class NotFound(ApiError):
    """No such workflow, rater, model or pool, or not one that this token may see (404)."""


class Conflict(ApiError):
    """It contradicts the state of things: already finished, other body under the same key (409)."""


class InvalidInput(ApiError):
    """The request or the file cannot be taken as it is (other 4xx)."""


class RateLimited(ApiError):
    """Too many calls, and waiting did not help within the retries (429)."""


class ServerError(ApiError):
    """The server or something before it failed (5xx)."""


def from_answer(
    *,
    status: int,
    content_type: str,
    body: bytes,
    request_id: str = "",
    retry_after_s: float | None = None,
) -> ApiError:
    """The error that an answer with a status of 400 or more stands for, whoever wrote it."""
    problem = _problem(content_type, body)
    return _class_of(status)(
        status=status,
        code=str(problem.get("code") or f"http_{status}"),
        detail=str(problem.get("detail") or problem.get("title") or ""),
        items=_items(problem.get("errors")),
        request_id=str(problem.get("request_id") or request_id),
        retry_after_s=retry_after_s,
    )


def _class_of(status: int) -> type[ApiError]:
    if status >= 500:
        return ServerError
    return {401: AuthError, 403: AuthError, 404: NotFound, 409: Conflict, 429: RateLimited}.get(
        status, InvalidInput
    )


def _problem(content_type: str, body: bytes) -> Mapping[str, Any]:
    # A proxy's HTML page says nothing that the status does not say.
    if "json" not in content_type:
        return {}
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return problem if isinstance(problem, dict) else {}


def _items(errors: object) -> tuple[ProblemItem, ...]:
    if not isinstance(errors, list):
        return ()
    return tuple(
        ProblemItem(
            code=str(error.get("code") or "invalid"),
            detail=str(error.get("detail") or ""),
            line=error["line"] if isinstance(error.get("line"), int) else None,
            field=str(error["field"]) if error.get("field") is not None else None,
        )
        for error in errors
        if isinstance(error, dict)
    )


_REMEDY_BY_CODE = {
    "already_finished": "The workflow had ended; `airs results` has what was rated.",
    "bad_column_type": "Cast the columns named: texts and ids to text, weights to numbers.",
    "bad_encoding": "Compress the file again, or send it as it is.",
    "backlog_full": "The server holds as much waiting work as it may; send it again later.",
    "decompressed_too_large": "Split the file, or raise AIRS_MAX_UPLOAD_BYTES on the server.",
    "duplicate_column": "Rename or drop one of the columns of the same name.",
    "duplicate_request_id": "Give each row a request_id of its own, or leave the ids out.",
    "empty_file": "The file has no rows; each needs a query_text.",
    "idempotency_conflict": "Send with `--again` to make a new workflow.",
    "invalid_parquet": "Write the file again; if it is CSV or JSON Lines, say so by --format.",
    "missing_column": "Name the column with the query `query_text`.",
    "payload_too_large": "Split the file, or raise AIRS_MAX_UPLOAD_BYTES on the server.",
    "truncated_upload": "The upload broke off; send it again, nothing is taken twice.",
    "unclosed_quote": "Close the quote in the line named; write a quote in a cell twice.",
    "unsupported_encoding": "Save the file as UTF-8.",
    "upload_in_progress": "An earlier upload has not ended; try again in a minute.",
}

_REMEDY_BY_STATUS = {
    401: "Set AIRS_API_TOKEN (`make up` prints it, $AIRS_HOME/credentials.json keeps it), "
    "or use a profile.",
    403: "The token may not do this; ask an admin for another role.",
    404: "`airs status` and `airs raters list`, `models list`, `pools list` show what there is.",
    413: "Split the file.",
    415: "AIRS takes JSON Lines, CSV and Parquet, as they are or with gzip.",
    429: "Try again later.",
    502: "Try again later; if it stays so, look at the server's logs.",
    503: "Try again later; if it stays so, look at the server's logs.",
    504: "Try again later; if it stays so, look at the server's logs.",
}
