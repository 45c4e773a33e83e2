"""Calls models, by OIP or OpenAI-compatible, and turns whatever they do into an outcome.

A call has a limit on its whole time, not on each read, and one on the size of its answer. What is
tried again, when and in which parts is the Rating Generator's business.

How warming up is told from overload: a refused connection is a server that is not there yet; a 503
is one if its text says so, or else if `/v2/health/ready` answers no better (asked at most once a
second). A connection refused right after one broke is neither: that server died with our rows in
its hands, which counts as an attempt.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Generic, TypeVar

import orjson
from aiohttp.abc import AbstractResolver
from yarl import URL

from fulfillment.retry_after import parse_retry_after
from workers.autoraters.protocol import ChatAnswer, ChatCall, OipAnswer, OipCall
from workers.model_client import pairs
from workers.model_client.answers import error_text, other_version, read_answer
from workers.model_client.chat import VLLM, chat_body, chat_priority, read_chat
from workers.model_client.endpoint import Endpoint, InvalidEndpoint, Target, target_of
from workers.model_client.oip import (
    TRITON,
    ModelMetadata,
    infer_body,
    parameters,
    read_metadata,
)
from workers.model_client.outcomes import CallOutcome, Verdict, classify, row_fault
from workers.model_client.pools import FOLLOW_S, Pools
from workers.model_client.wire import Reply, Wire

READY_PROBE_S = 2.0
READY_MEMORY_S = 1.0
MAX_TARGETS = 1_024

T = TypeVar("T")
A = TypeVar("A", OipAnswer, ChatAnswer)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult(Generic[A]):
    """What one call came to; `answer` is there on success and only then."""

    outcome: CallOutcome
    answer: A | None = None
    code: str = ""
    detail: str = ""
    retry_after_s: float | None = None
    seconds: float = 0.0


class ModelClient:
    """Model calls of one event loop. `clock` is asked only for what a date in Retry-After means.

    `resolver` looks names up, by default the system's; each name in use every `follow_s` seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], datetime],
        max_connections: int = 512,
        max_connections_per_host: int = 256,
        resolver: AbstractResolver | None = None,
        follow_s: float = FOLLOW_S,
    ) -> None:
        self._clock = clock
        self._wire = Wire(
            Pools(
                max_connections=max_connections,
                max_connections_per_host=max_connections_per_host,
                resolver=resolver,
                follow_s=follow_s,
            )
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
    ) -> CallResult[OipAnswer]:
        """Send the call and return what came of it; nothing a server does raises.

        The limit is the smaller of `timeout_s` and the endpoint's own. With `expected_version` an
        answer that names another version, or none, is refused. An endpoint with `scoring` is asked
        in its own way, one request after the other where the call needs several.
        """
        limit_s = min(timeout_s, endpoint.timeout_s)

        async def ask_for_pairs(target: Target) -> OipAnswer | Verdict:
            told = chat_priority(priority, endpoint.style(VLLM))
            return await self._scored(
                target, endpoint, call, rows=rows, told=told, expected_version=expected_version
            )

        async def ask(target: Target) -> OipAnswer | Verdict:
            request_id = f"{next(self._ids):x}"
            told = parameters(priority, limit_s) if endpoint.style(TRITON) == TRITON else {}
            try:
                body = infer_body(call, rows=rows, request_id=request_id, parameters=told)
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

        return await self._timed(endpoint, limit_s, ask_for_pairs if endpoint.scoring else ask)

    async def chat(
        self,
        endpoint: Endpoint,
        call: ChatCall,
        *,
        expected_version: str,
        priority: int,
        timeout_s: float,
    ) -> CallResult[ChatAnswer]:
        """Send a chat call, which is for one row; as `infer` in all else."""

        async def ask(target: Target) -> ChatAnswer | Verdict:
            try:
                body = chat_body(
                    call,
                    model_name=endpoint.model_name,
                    priority=chat_priority(priority, endpoint.style(VLLM)),
                )
            except orjson.JSONEncodeError:
                return row_fault("invalid_request", rows=1)
            reply = await self._wire.post(target.chat, target, body)
            if isinstance(reply, Verdict) or reply.status != 200:
                return await self._refusal(target, reply, rows=1)
            return read_chat(reply.body, call=call, expected_version=expected_version)

        return await self._timed(endpoint, min(timeout_s, endpoint.timeout_s), ask)

    async def metadata(self, endpoint: Endpoint, *, timeout_s: float = 5.0) -> ModelMetadata:
        """Ask the server which model it serves; nothing a server does raises."""

        async def ask(target: Target) -> ModelMetadata | Verdict:
            reply = await self._wire.get(target.model, target)
            if isinstance(reply, Verdict) or reply.status != 200:
                return await self._refusal(target, reply, rows=1)
            return read_metadata(reply.body)

        found = await self._bounded(endpoint, min(timeout_s, endpoint.timeout_s), ask)
        if isinstance(found, Verdict):
            return ModelMetadata(outcome=found.outcome, code=found.code, detail=found.detail)
        return found

    async def close(self) -> None:
        """Close all connections; calls still running end as lost."""
        await self._wire.close()

    async def _scored(
        self,
        target: Target,
        endpoint: Endpoint,
        call: OipCall,
        *,
        rows: int,
        told: int | None,
        expected_version: str,
    ) -> OipAnswer | Verdict:
        """Return the score of each row, from as many requests as the endpoint needs for them."""
        if refused := pairs.unsupported(call, endpoint=endpoint.scoring):
            return refused
        scores, version = [0.0] * rows, expected_version
        requests = pairs.requests_of(
            call, endpoint=endpoint.scoring, model_name=endpoint.model_name, priority=told
        )
        for number, request in enumerate(requests):
            try:
                body = pairs.body_of(request)
            except orjson.JSONEncodeError:
                return row_fault("invalid_request", rows=rows)
            reply = await self._wire.post(target.pairs[endpoint.scoring], target, body)
            if isinstance(reply, Verdict) or reply.status != 200:
                return await self._refusal(target, reply, rows=rows)
            found = pairs.read_scores(
                reply.body,
                request,
                endpoint=endpoint.scoring,
                rows=rows,
                expected_version=version,
            )
            if isinstance(found, Verdict):
                return found
            # One call is answered by one version; where the first answer named none, by none.
            if number and found.version != version:
                return other_version(found.version, version)
            version = found.version
            for row, score in zip(request.rows, found.scores, strict=True):
                scores[row] = score
        return OipAnswer(outputs={"score": scores}, model_version=version, notes=call.notes)

    async def _timed(
        self, endpoint: Endpoint, limit_s: float, ask: Callable[[Target], Awaitable[A | Verdict]]
    ) -> CallResult[A]:

        async def ask_safely(target: Target) -> A | Verdict:
            answer = await ask(target)
            if isinstance(answer, Verdict):
                return answer
            # A server may name its model by our key; versions are stored and shown.
            version = target.redact(answer.model_version)
            return replace(answer, model_version=version)

        started = time.monotonic()
        answer = await self._bounded(endpoint, limit_s, ask_safely)
        seconds = time.monotonic() - started
        if isinstance(answer, Verdict):
            return CallResult(
                outcome=answer.outcome,
                code=answer.code,
                detail=answer.detail,
                retry_after_s=answer.retry_after_s,
                seconds=seconds,
            )
        return CallResult(outcome=CallOutcome.SUCCESS, answer=answer, seconds=seconds)

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
        now = time.monotonic()
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
