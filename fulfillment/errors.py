"""What can be wrong with a request to Rating Fulfillment, named for what happened.

Each error carries the HTTP status, the stable `code` and, for input, the list of places that
api clients get (`{"line"|"field", "code", "detail"}`); one handler turns them into RFC 9457.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class FulfillmentError(Exception):
    """Base of the refusals of this app; `extra` is added to the problem document."""

    status = 400
    code = "bad_request"

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        errors: Sequence[Mapping[str, Any]] = (),
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.code
        self.errors = list(errors)
        self.extra = extra


class InvalidFields(FulfillmentError):
    """Some fields of a request cannot work; `errors` names each."""

    status = 422
    code = "invalid_fields"


class BadUpload(FulfillmentError):
    """A file is refused whole: nothing of it was stored."""

    status = 422
    code = "bad_upload"


class MalformedBody(FulfillmentError):
    """The body cannot be read at all."""

    status = 400
    code = "invalid_json"


class UploadTooLarge(FulfillmentError):
    """More bytes than the limit, counted after decompression."""

    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(FulfillmentError):
    """A content type or encoding that intake does not take."""

    status = 415
    code = "unsupported_media_type"


class BacklogFull(FulfillmentError):
    """The backlog has reached AIRS_MAX_BACKLOG_BYTES."""

    status = 507
    code = "backlog_full"


class NotFound(FulfillmentError):
    """No such object, or not one that the caller may see."""

    status = 404
    code = "not_found"


class Forbidden(FulfillmentError):
    """The token's role does not allow this."""

    status = 403
    code = "forbidden"


class Conflict(FulfillmentError):
    """The object's state does not allow this; `code` says which conflict it is."""

    status = 409
    code = "conflict"


class RaterUnavailable(FulfillmentError):
    """The rater cannot take a workflow now (its model is gone, its plug-in is not installed)."""

    status = 422
    code = "rater_unavailable"


class TooManyFollowers(FulfillmentError):
    """All places for event streams of this web process are taken."""

    status = 503
    code = "too_many_followers"

    def __init__(self, places: int) -> None:
        super().__init__(
            f"This process follows {places} event streams already; try again, or ask "
            "GET /workflows/{id} every few seconds.",
            retry_after_s=5,
        )
