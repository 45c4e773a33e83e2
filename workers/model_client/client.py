"""Calls models over the Open Inference Protocol and turns whatever a server does into an outcome.

A call has a limit on its whole time, not on each read, and one on the size of its answer. What is
tried again, when and in which parts is the Rating Generator's business.

How warming up is told from overload: a refused connection is a server that is not there yet; a 503
is one if its text says so, or else if `/v2/health/ready` answers no better (asked at most once a
second). A connection refused right after one broke is neither: that server died with our rows in
its hands, which counts as an attempt.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

import orjson
from yarl import URL

from fulfillment.policy.priority import oip_priority
from workers.autoraters.protocol import OipAnswer, OipCall
from workers.model_client.answers import error_text, read_answer
from workers.model_client.endpoint import Endpoint, InvalidEndpoint, Target, target_of
from workers.model_client.outcomes import CallOutcome, Verdict, classify, row_fault
from workers.model_client.retry_after import parse_retry_after
from workers.model_client.wire import Reply, Wire

READY_PROBE_S = 2.0
READY_MEMORY_S = 1.0
MAX_TARGETS = 1_024

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult:
    """What one call came to; `answer` is there on success and only then."""

    outcome: CallOutcome
    answer: OipAnswer | None = None
    code: str = ""
    detail: str = ""
    retry_after_s: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMetadata:
    """What a server says of its model; `outcome` is SUCCESS when it said it."""

    outcome: CallOutcome
    code: str = ""
    detail: str = ""
    versions: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The version that answers; "" where the server names none or several."""
        return self.versions[0] if len(self.versions) == 1 else ""


class ModelClient:
    """Model calls of one event loop. `clock` is asked only for what a date in Retry-After means."""

    def __init__(
        self,
        *,
        clock: Callable[[], datetime],
        max_connections: int = 256,
        max_connections_per_host: int = 64,
    ) -> None:
        self._clock = clock
        self._wire = Wire(
            max_connections=max_connections, max_connections_per_host=max_connections_per_host
        )
        self._targets: dict[tuple[str, str, tuple[tuple[str, str], ...]], Target] = {}
        self._readiness: dict[URL, tuple[float, bool]] = {}
        self._ids = itertools.count(1)

    async def infer(
        self,
        endpoint: Endpoint,
        call: OipCall,
        *,
        rows: int,
        expected_version: str,
        priority: int,
        timeout_s: float,
    ) -> CallResult:
        """Send the call and return what came of it; nothing a server does raises.

        The limit is the smaller of `timeout_s` and the endpoint's own. With `expected_version` an
        answer that names another version, or none, is refused.
        """
        started = asyncio.get_running_loop().time()
        limit_s = min(timeout_s, endpoint.timeout_s)

        async def ask(target: Target) -> OipAnswer | Verdict:
            request_id = f"{next(self._ids):x}"
            parameters = _parameters(priority, limit_s) if endpoint.sends_priority else {}
            try:
                body = _infer_body(call, rows=rows, request_id=request_id, parameters=parameters)
            except orjson.JSONEncodeError:  # lone surrogates, which intake replaces
                return row_fault("invalid_request", rows=rows)
            reply = await self._wire.post(target.infer, target, body)
            if isinstance(reply, Verdict) or reply.status != 200:
                return await self._refusal(target, reply, rows=rows)
            return read_answer(
                reply.body,
                call=call,
                rows=rows,
                request_id=request_id,
                expected_version=expected_version,
            )

        answer = await self._bounded(endpoint, limit_s, ask)
        seconds = asyncio.get_running_loop().time() - started
        if isinstance(answer, Verdict):
            return CallResult(
                outcome=answer.outcome,
                code=answer.code,
                detail=answer.detail,
                retry_after_s=answer.retry_after_s,
                seconds=seconds,
            )
        return CallResult(outcome=CallOutcome.SUCCESS, answer=answer, seconds=seconds)

    async def metadata(self, endpoint: Endpoint, *, timeout_s: float = 5.0) -> ModelMetadata:
        """Ask the server which model it serves; nothing a server does raises."""

        async def ask(target: Target) -> ModelMetadata | Verdict:
            reply = await self._wire.get(target.model, target)
            if isinstance(reply, Verdict) or reply.status != 200:
                return await self._refusal(target, reply, rows=1)
            return _read_metadata(reply.body)

        found = await self._bounded(endpoint, min(timeout_s, endpoint.timeout_s), ask)
        if isinstance(found, Verdict):
            return ModelMetadata(outcome=found.outcome, code=found.code, detail=found.detail)
        return found

    async def close(self) -> None:
        """Close all connections; calls still running end as lost."""
        await self._wire.close()

    async def _bounded(
        self, endpoint: Endpoint, limit_s: float, ask: Callable[[Target], Awaitable[T | Verdict]]
    ) -> T | Verdict:
        """Ask within the total limit; a failure is worded for people, without secrets."""
        try:
            target = self._target(endpoint)
        except InvalidEndpoint as invalid:
            return Verdict(outcome=CallOutcome.PAUSE, code="invalid_endpoint", detail=str(invalid))
        if limit_s <= 0:  # nobody was asked, so nobody was slow
            return Verdict(outcome=CallOutcome.TRANSIENT, code="no_time")
        try:
            async with asyncio.timeout(limit_s):
                found = await ask(target)
        except TimeoutError:
            words = f"no whole answer within {limit_s:g} s"
            found = Verdict(outcome=CallOutcome.OVERLOAD, code="timeout", detail=words)
        if isinstance(found, Verdict):
            return replace(found, detail=target.describe(found.code, found.detail))
        return found

    async def _refusal(self, target: Target, reply: Reply | Verdict, *, rows: int) -> Verdict:
        if isinstance(reply, Verdict):
            return reply
        text = error_text(reply.body)
        verdict = classify(reply.status, text, rows=rows)
        if verdict.code == "unavailable" and not await self._is_ready(target):
            verdict = Verdict(outcome=CallOutcome.WARMING, code="model_warming")
        return replace(
            verdict,
            detail=f"HTTP {reply.status} {text}",
            retry_after_s=parse_retry_after(reply.retry_after, self._clock()),
        )

    async def _is_ready(self, target: Target) -> bool:
        """Say whether the server calls itself ready; where that is not to be had, it is."""
        now = asyncio.get_running_loop().time()
        asked_at, ready = self._readiness.get(target.ready, (-READY_MEMORY_S, True))
        if now - asked_at < READY_MEMORY_S:
            return ready
        try:
            async with asyncio.timeout(READY_PROBE_S):
                reply = await self._wire.get(target.ready, target)
        except TimeoutError:
            ready = True  # overloaded servers are slow, those that start refuse
        else:
            if isinstance(reply, Verdict):
                ready = reply.outcome is not CallOutcome.WARMING
            else:
                ready = reply.status < 500
        self._readiness[target.ready] = (now, ready)
        return ready

    def _target(self, endpoint: Endpoint) -> Target:
        key = (endpoint.url, endpoint.model_name, tuple(endpoint.headers.items()))
        target = self._targets.get(key)
        if target is None:
            if len(self._targets) >= MAX_TARGETS:  # addresses come and go with replicas
                self._targets.clear()
                self._readiness.clear()
            target = self._targets[key] = target_of(endpoint)
        return target


def _parameters(priority: int, limit_s: float) -> dict[str, int]:
    """Return Triton's parameters: its direction of urgency, its microseconds."""
    return {"priority": oip_priority(priority), "timeout": int(limit_s * 1_000_000)}


def _infer_body(
    call: OipCall, *, rows: int, request_id: str, parameters: Mapping[str, int]
) -> bytes:
    if any(len(column) != rows for column in call.inputs.values()):
        raise ValueError(f"every input of the call needs {rows} rows")
    document: dict[str, Any] = {
        "id": request_id,
        "inputs": [
            {"name": name, "shape": [rows, 1], "datatype": "BYTES", "data": column}
            for name, column in call.inputs.items()
        ],
    }
    if not call.all_outputs:
        document["outputs"] = [{"name": name} for name in call.outputs]
    if parameters:
        document["parameters"] = parameters
    return orjson.dumps(document)


def _read_metadata(body: bytes) -> ModelMetadata | Verdict:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return Verdict(
            outcome=CallOutcome.INCOMPLETE, code="bad_answer", detail="no model metadata"
        )
    versions, parameters = document.get("versions"), document.get("parameters")
    return ModelMetadata(
        outcome=CallOutcome.SUCCESS,
        versions=tuple(map(str, versions)) if isinstance(versions, list) else (),
        inputs=_names(document.get("inputs")),
        outputs=_names(document.get("outputs")),
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def _names(tensors: Any) -> tuple[str, ...]:
    if not isinstance(tensors, list):
        return ()
    return tuple(str(tensor.get("name")) for tensor in tensors if isinstance(tensor, dict))
