"""What a model call came to, and the one place that decides it from a status and an error text.

The outcome says what to do with the rows and the rater; the code says why, to people and metrics.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class CallOutcome(StrEnum):
    """What the caller has to do next."""

    SUCCESS = "success"
    """Every row has a finite number in every wanted output."""
    OVERLOAD = "overload"
    """Retry later, and send less: 429, 503, 529, a call that took too long."""
    TRANSIENT = "transient"
    """Retry later at the same rate: other 5xx, a lost connection."""
    PERMANENT = "permanent"
    """These rows can never be rated by this model."""
    SPLIT = "split"
    """One of several rows is at fault, or they are too many: ask again in smaller parts."""
    INCOMPLETE = "incomplete"
    """An answer that cannot be used, thrown away whole: ask again in smaller parts."""
    WRONG_VERSION = "wrong_version"
    """Another version of the model answered: ask elsewhere; costs no attempt."""
    PAUSE = "pause"
    """The address, key or model is wrong: stop this rater, keep its rows, tell the operator."""
    WARMING = "warming"
    """The server is not up yet: wait; costs no attempt and says nothing about load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An outcome other than success, before it is timed."""

    outcome: CallOutcome
    code: str
    detail: str = ""
    retry_after_s: float | None = None


CONTEXT_LENGTH = re.compile(
    r"context[ _-]?(?:length|window|size)|string_above_max_length|max_model_len"
    r"|maximum (?:model|sequence|input|prompt) length|maximum number of (?:input )?tokens(?! per)"
    r"|(?:input|prompt|sequence|text) (?:is|was) too long|too many (?:input )?tokens in"
    r"|longer than the (?:specified )?maximum (?:model |sequence )?length"
    r"|input (?:\(\d+ tokens\) )?is too large to process|must have less than \d+ tokens",
    re.IGNORECASE,
)
"""How servers say that a row has more tokens than the model takes; they differ in the status."""

NOT_READY = re.compile(
    r"warming|warm-up|\bloading model\b|(?:is|still|currently) (?:loading|starting|initiali[sz]ing)"
    r"|not (?:yet )?(?:ready|loaded)",
    re.IGNORECASE,
)
MODEL_NOT_READY = re.compile(
    r"\bmodel\b.{0,200}(?:not (?:yet )?(?:ready|loaded)|no available versions)",
    re.IGNORECASE,
)
"""The same said with 400 or 404, as Triton does while it loads a model."""

UNKNOWN_MODEL = re.compile(r"request for unknown model", re.IGNORECASE)
"""Triton's words for a model it does not have; older ones say it with 400."""

NO_PRIORITY = re.compile(
    r"priority scheduling is not enabled|using priority is disabled", re.IGNORECASE
)
"""The words of vLLM (with 400) and SGLang (with 503) where they were not started for priorities.

Every row would meet the same: it is the model's setting that is wrong.
"""

PAUSES = {401: "unauthorized", 403: "forbidden", 404: "not_found"}
OVERLOADS = {429: "rate_limited", 503: "unavailable", 529: "overloaded"}
ROW_FAULTS = {
    400: "invalid_request",
    413: "payload_too_large",
    422: "invalid_request",
}
RETRIED_4XX = frozenset({408, 409, 425})


def classify(status: int, text: str, *, rows: int) -> Verdict:
    """Return what an answer other than 200 means.

    A status that api.md does not name is read by what it is about: a redirect or another 4xx is
    about how we call, not about the rows, so it pauses the rater and keeps them.
    """
    if CONTEXT_LENGTH.search(text):
        return row_fault("context_length_exceeded", rows=rows)
    if status in {400, 503} and NO_PRIORITY.search(text):
        return Verdict(outcome=CallOutcome.PAUSE, code="priority_not_enabled")
    if (status == 503 and NOT_READY.search(text)) or (
        status in {400, 404} and MODEL_NOT_READY.search(text)
    ):
        return Verdict(outcome=CallOutcome.WARMING, code="model_warming")
    if status == 400 and UNKNOWN_MODEL.search(text):
        return Verdict(outcome=CallOutcome.PAUSE, code="not_found")
    if code := ROW_FAULTS.get(status):
        return row_fault(code, rows=rows)
    if code := OVERLOADS.get(status):
        return Verdict(outcome=CallOutcome.OVERLOAD, code=code)
    if status == 501:  # about the call as such: no part of it fares better
        return Verdict(outcome=CallOutcome.PERMANENT, code="not_implemented")
    if 300 <= status < 400:
        return Verdict(outcome=CallOutcome.PAUSE, code="redirect_not_followed")
    if 400 <= status < 500 and status not in RETRIED_4XX:
        return Verdict(outcome=CallOutcome.PAUSE, code=PAUSES.get(status, f"http_{status}"))
    if status < 300:
        return Verdict(outcome=CallOutcome.INCOMPLETE, code="bad_answer")
    return Verdict(outcome=CallOutcome.TRANSIENT, code=f"http_{status}")


def row_fault(code: str, *, rows: int) -> Verdict:
    """Return the verdict on a fault of the rows: final for one row, else to be narrowed down."""
    return Verdict(outcome=CallOutcome.PERMANENT if rows == 1 else CallOutcome.SPLIT, code=code)
