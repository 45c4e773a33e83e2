"""What a model is asked once for a person, and what comes of it.

The call is made by the callable that AIRS_MODEL_TRIAL names, which is the code that executors call
models with: model management has no client of its own for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from models_admin.directory import EndpointData


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a model is asked: rows of one that scores them, or a message to a chat model."""

    rows: Sequence[tuple[str, str]] = ()
    """Query and text of each."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of the call; `code` and `detail` say why there is no answer, without secrets."""

    code: str = ""
    detail: str = ""
    latency_s: float
    version: str = ""
    """What the answer calls the model."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Of each row what the model put out, by name, and `truncated`: what it cut."""
    content: str = ""
    finish_reason: str = ""
    truncated: bool = False
    """Whether anything was cut, of the texts or of the answer."""


Ask = Callable[[EndpointData, Question, float, datetime], Answer]
"""Makes the call within so many seconds from now; never raises for what a server does."""
