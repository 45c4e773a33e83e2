"""What becomes of a batch in the hands of an executor: values that its calls fill in.

One event loop writes them; they are read when the calls of the batch are over, or (parts of it) on
the loop itself.
"""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import orjson

from fulfillment.leases import Taken
from fulfillment.policy.batching import indices_of
from fulfillment.scores import Scored
from workers.autoraters import OipAnswer, Rated, RaterSpec, Unusable
from workers.model_client import CallOutcome, CallResult

CALL_LIMIT = timedelta(seconds=120)
"""The longest call: endpoints with a longer time limit are cut to it."""
MOST_COMPUTE_US = 86_400_000_000
"""A day of one device, or a minute of a thousand: no call takes more, whatever its server says."""
SHORTEST_CALL_S = 1.0
"""A retry with less time than this until its deadline is not started."""

FREE = frozenset({CallOutcome.WARMING, CallOutcome.WRONG_VERSION, CallOutcome.PAUSE})
"""Outcomes that cost no attempt: nobody looked at the rows."""

_UNKEPT = re.compile("[\0\ud800-\udfff]")
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in JSON text, behind an even number of backslashes."""


class EndpointData(Protocol):
    """How to call a replica, as model management says."""

    url: str
    model_name: str
    headers: Mapping[str, str]
    timeout_s: float
    sends_priority: bool
    priority_style: str
    """In whose direction urgency is told; "" for what is usual for the protocol."""
    scoring: str
    """By which endpoint of an OpenAI-compatible server rows are scored; "" for all others."""
    managed: bool
    version: str
    """What its answers call themselves; "" when an external server has not said yet."""
    key_version: str
    """What raters are pinned to whose ratings those answers are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why sent items of a batch are to be tried again."""

    code: str
    detail: str = ""
    retry_after_s: float | None = None
    costs_attempt: bool = True
    pauses: bool = False


@dataclass(kw_only=True, slots=True)
class Work:
    """What has become of a batch so far."""

    taken: Taken
    spec: RaterSpec
    least_priority: int = 0
    """Models are called with this API score at least."""
    began_at: float = field(default_factory=time.monotonic)
    scored: dict[int, Scored] = field(default_factory=dict)
    answered_at: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    for_good: set[int] = field(default_factory=set)
    said: dict[int, str] = field(default_factory=dict)
    """Failed item -> what the model or its server said, as JSON text."""
    troubles: dict[int, Trouble] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    """Items whose end is in the database, while others are still being computed."""
    reported: str = ""
    """The version an external server named, other than the one that counts."""
    calls: int = 0
    further: int = 0
    """Of the calls, those that the dispatcher could not foresee."""
    seconds: float = 0.0
    """Of calls, waits in a server's queue included."""
    device_s: float = 0.0
    """Of accelerators, as `device_seconds` says."""
    succeeded: int = 0
    overloaded: int = 0
    refused_at: float = 0.0
    """When the last call was sent that met overload (monotonic)."""
    away: int = 0
    """Calls that found nobody, or a server that is warming up."""
    halted: Trouble | None = None
    """Why no further call is made: the server refuses, whatever the item. What was not asked waits
    for it without a cost."""
    stopped: bool = False
    """The lease could not be extended: no further call. What is there is written if the fence still
    holds, which it does where only the workflow was paused or ended."""

    def left_s(self) -> float:
        """Return the time until the workflow's deadline, by the database's clock."""
        at_start_s = (self.taken.deadline_at - self.taken.taken_at).total_seconds()
        return at_start_s - (time.monotonic() - self.began_at)

    def unsettled(self) -> list[int]:
        """Return the items that were sent and have neither an end nor a trouble."""
        ended = {*self.scored, *self.failed, *self.troubles, *self.written}
        return [item for item in indices_of(self.taken.sent) if item not in ended]

    def fail(self, item: int, code: str, *, output: Mapping[str, object] | None = None) -> None:
        """End an item for good: others would fare no better with it."""
        self.failed[item] = code
        self.for_good.add(item)
        if output:
            self.said[item] = kept_json(output)

    def settle(self, items: Sequence[int], outcomes: Sequence[Scored | Unusable]) -> None:
        """Take what the plug-in made of an answer, one outcome an item."""
        answered_at = time.monotonic()
        for item, outcome in zip(items, outcomes, strict=True):
            self.answered_at[item] = answered_at
            if isinstance(outcome, Unusable):
                self.fail(item, outcome.code, output=outcome.output)
            else:
                self.scored[item] = outcome

    def count(self, result: CallResult[Any], *, cut: bool) -> None:
        """Count a call; `cut` says that its time was shorter than the endpoint's own limit."""
        # Nobody computed anything where nobody was, or where one only warms up.
        away = result.outcome is CallOutcome.WARMING
        self.away += away
        self.calls += not away
        self.seconds += result.seconds
        self.device_s += 0.0 if away else device_seconds(result)
        match result.outcome:
            case CallOutcome.SUCCESS | CallOutcome.PERMANENT | CallOutcome.SPLIT:
                self.succeeded += 1  # it was served: the server is not overloaded
            # One that we did not wait for may be as quick as ever.
            case CallOutcome.OVERLOAD if not (cut and result.code == "timeout"):
                self.overloaded += 1
                self.refused_at = max(self.refused_at, time.monotonic() - result.seconds)

    def postpone(self, items: Iterable[int], result: CallResult[Any]) -> None:
        """Let items be tried again for what a call met; end all calls that would meet the same."""
        trouble = Trouble(
            code=result.code,
            detail=result.detail,
            retry_after_s=result.retry_after_s,
            costs_attempt=result.outcome not in FREE,
            pauses=result.outcome is CallOutcome.PAUSE,
        )
        self.troubles |= dict.fromkeys(items, trouble)
        refused = result.outcome is CallOutcome.OVERLOAD and not result.code.endswith("timeout")
        if refused or result.outcome in FREE:
            self.halted = Trouble(
                code=result.code,
                detail=result.detail,
                retry_after_s=result.retry_after_s,
                costs_attempt=False,
                pauses=trouble.pauses,
            )


def device_seconds(result: CallResult[Any]) -> float:
    """Return what a call took of accelerators: as its answer says, else as long as it was.

    Our model server tells a call's share of its devices' time, in microseconds.
    """
    answer = result.answer
    told = answer.parameters.get("compute_us") if isinstance(answer, OipAnswer) else None
    if not isinstance(told, int | float) or isinstance(told, bool):
        return result.seconds
    # NaN is in no range.
    if 0 <= told <= MOST_COMPUTE_US:
        return told / 1_000_000
    return result.seconds


def scored(rated: Rated, *, url_digest: str | None) -> Scored | Unusable:
    """Turn what a plug-in says into what is stored; raise ValueError for text that cannot be."""
    if not math.isfinite(rated.score):
        return Unusable(code="not_finite", detail=f"the plug-in answered {rated.score}")
    if not rated.label and rated.output is None and not rated.warnings:
        return Scored(rated.score, url_digest=url_digest)
    output = None if rated.output is None else orjson.dumps(rated.output).decode()
    text = "".join((rated.label, *rated.warnings))
    text.encode()  # no lone surrogates either
    if "\0" in text or _NUL.search(output or ""):
        raise ValueError("PostgreSQL keeps no NUL")
    return Scored(
        score=rated.score,
        label=rated.label or None,
        output=output,
        warnings=rated.warnings,
        url_digest=url_digest,
    )


def kept_json(output: Mapping[str, object]) -> str:
    """Return the JSON of what was said about a failure, without what PostgreSQL cannot keep."""
    kept = {
        name: _UNKEPT.sub("\ufffd", value) if isinstance(value, str) else value
        for name, value in output.items()
    }
    return orjson.dumps(kept, default=str).decode()
