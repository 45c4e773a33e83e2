"""What can be wrong with a request to model management, named for what happened.

Each error carries the HTTP status, the stable `code` and, for input, the list of places that api
clients get; one handler of the site turns them into RFC 9457, the admin into form errors.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ModelsAdminError(Exception):
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


class InvalidFields(ModelsAdminError):
    """Some fields cannot work; `errors` names each."""

    status = 422
    code = "invalid_fields"


class CheckpointRefused(ModelsAdminError):
    """The checkpoint cannot be served; the text never says what lies outside the root."""

    status = 422
    code = "checkpoint_refused"


class NotFound(ModelsAdminError):
    """No such model or pool."""

    status = 404
    code = "not_found"


class Conflict(ModelsAdminError):
    """The object's state does not allow this; `code` says which conflict it is."""

    status = 409
    code = "conflict"
