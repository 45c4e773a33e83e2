"""The HTTP face of the model server: Open Inference Protocol v2 REST on aiohttp. Knows no JAX.

    GET  /v2                                        server metadata
    GET  /v2/health/live, /v2/health/ready          200 or 503
    GET  /v2/models/{m}[/versions/{v}]              model metadata
    GET  /v2/models/{m}[/versions/{v}]/ready        200 or 503
    POST /v2/models/{m}[/versions/{v}]/infer        scores; see protocol.py for inputs and outputs
    GET  /v2/models/{m}[/versions/{v}]/config       Triton's model configuration
    GET  /v2/models/{m}[/versions/{v}]/stats        the light account that the host agent reads,
                                                    with Triton's `model_stats` in it
    POST /v2/repository/index                       the one model and its state
    GET  /metrics                                   Prometheus

It listens from the first moment, so that it is `live` while the model still loads; until `ready`,
and again while it drains, calls get 503 with Retry-After. A refusal is `{"error": text, "code":
code}` with 400 `invalid`, 404 `not_found`, 413 `too_large`, 429 `overloaded` (the queue is full
for this priority; Retry-After), 503 `warming_up`, `draining` or `expired` (the call's `timeout` was
over before its turn), 500 `device_failed`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

from aiohttp import web

from workers.model_server import metadata, protocol
from workers.model_server.batcher import Closed, DeadlinePassed, DeviceFailed
from workers.model_server.loader import Signature
from workers.model_server.meter import Meter
from workers.model_server.metrics import CONTENT_TYPE, Metrics, Outcome
from workers.model_server.scheduler import Room, admit
from workers.model_server.scoring import Model, Scored, Scorer
from workers.model_server.stats import account

logger = logging.getLogger(__name__)

WARMING_UP: tuple[Outcome, str, int] = ("warming_up", "the model is loading", 2)
DRAINING: tuple[Outcome, str, int] = ("draining", "the server is ending: not ready", 1)
QUIET_S = 1.0
LAST_CALLS_S = 3.0
"""A draining server refuses calls until none came for the one, for the other at most."""
PARSED_IN_PLACE_BYTES = 262_144
"""A larger body is parsed in a thread: it would stop the loop for milliseconds."""

SERVER = {"name": "airs-model-server", "version": "1.0", "extensions": protocol.EXTENSIONS}


class ModelServer:
    """One model behind HTTP; `serve` makes it ready, `drain` lets it end."""

    def __init__(
        self, *, name: str, room: Room, largest_body: int, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self._room = room
        self._clock = clock
        self._meter = Meter(started_at=clock())
        self._metrics = Metrics(self._meter, clock=clock)
        self._scorer: Scorer | None = None
        self._phase: Literal["warming_up", "ready", "draining"] = "warming_up"
        self._open_rows = 0
        self._called_at = -QUIET_S
        self._calls_ok = 0
        self._calls_failed = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.app = web.Application(client_max_size=largest_body, middlewares=[json_errors])
        self.app.add_routes(self._routes())

    def serve(self, model: Model) -> asyncio.Event:
        """The model is loaded and warm: take calls from now on. The event: the device is broken."""
        self._scorer = Scorer(model, self._meter, clock=self._clock, observe=self._metrics.batch)
        self._metrics.info.labels(self.name, model.version).set(1)
        self._metrics.ready.set(1)
        self._phase = "ready"
        return self._scorer.broken

    async def drain(self, limit_s: float) -> bool:
        """Refuse new calls and finish the accepted ones; False when the limit came first.

        It lasts until nobody has called for a moment: whoever finds a connection closed under a
        call cannot tell what became of its rows.
        """
        self._phase = "draining"
        self._metrics.ready.set(0)
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        finally:
            if self._scorer is not None:
                self._scorer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_CALLS_S):
                while self._clock() - self._called_at < QUIET_S:
                    await asyncio.sleep(QUIET_S / 4)
        return True

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/v2", self._server),
            web.get("/v2/health/live", self._live),
            web.get("/v2/health/ready", self._ready),
            web.post("/v2/repository/index", self._index),
            web.get("/metrics", self._metrics_page),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                web.get(model, self._metadata),
                web.get(f"{model}/ready", self._model_ready),
                web.get(f"{model}/config", self._config),
                web.get(f"{model}/stats", self._stats),
                web.post(f"{model}/infer", self._infer),
            ]
        return routes

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response(SERVER)

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._phase == "ready"
        return web.json_response({"ready": ready, "live": True}, status=200 if ready else 503)

    async def _model_ready(self, request: web.Request) -> web.Response:
        if (refusal := self._unknown(request)) is not None:
            return refusal
        ready = self._phase == "ready"
        return web.json_response({"name": self.name, "ready": ready}, status=200 if ready else 503)

    async def _metadata(self, request: web.Request) -> web.Response:
        if (refusal := self._unknown(request)) is not None:
            return refusal
        if self._scorer is None:
            return refusal_response(503, *WARMING_UP)
        model = self._scorer.model
        return web.json_response(
            metadata.model_metadata(
                self.name,
                model.version,
                model.signature,
                loader=model.loader,
                size=model.size,
                max_tokens=model.max_tokens,
            )
        )

    async def _config(self, request: web.Request) -> web.Response:
        if (refusal := self._unknown(request)) is not None:
            return refusal
        if self._scorer is None:
            return refusal_response(503, *WARMING_UP)
        model = self._scorer.model
        return web.json_response(
            metadata.model_config(
                self.name, model.signature, model.serving, largest_call=self._room.largest_call
            )
        )

    async def _index(self, request: web.Request) -> web.Response:
        ready = self._phase == "ready"
        version = "" if self._scorer is None else self._scorer.model.version
        entry = {
            "name": self.name,
            "version": version,
            "state": "READY" if ready else "UNAVAILABLE",
            "reason": "" if ready else self._phase,
        }
        return web.json_response([entry])

    async def _stats(self, request: web.Request) -> web.Response:
        if (refusal := self._unknown(request)) is not None:
            return refusal
        body = account(
            self._meter,
            self._clock(),
            name=self.name,
            model=None if self._scorer is None else self._scorer.model,
            calls_ok=self._calls_ok,
            calls_failed=self._calls_failed,
        )
        about = {"phase": self._phase, "ready": self._phase == "ready"}
        return web.json_response({**about, "queue_rows": self._open_rows, **body})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _infer(self, request: web.Request) -> web.Response:
        if (refusal := self._unknown(request)) is not None:
            return refusal
        try:
            body = await request.read()
            started_at = self._called_at = self._clock()
            if self._scorer is None or self._phase != "ready":
                return self._not_serving()
            call = await self._parse(
                body,
                request.headers.get(protocol.HEADER_LENGTH),
                self._scorer.model.signature,
            )
        except web.HTTPRequestEntityTooLarge as error:
            return self._refuse(413, "too_large", f"the body: {error.text}")
        except protocol.BadRequest as error:
            return self._refuse(400, "invalid", str(error))
        if (refusal := self._admit(call)) is not None:
            return refusal
        response = await self._answer(call, started_at)
        if response.status == 200:
            self._metrics.call_seconds.observe(self._clock() - started_at)
        return response

    async def _parse(
        self, body: bytes, json_length: str | None, signature: Signature
    ) -> protocol.InferRequest:
        parse = partial(protocol.parse_infer, body, json_length, signature=signature)
        return parse() if len(body) <= PARSED_IN_PLACE_BYTES else await asyncio.to_thread(parse)

    def _admit(self, call: protocol.InferRequest) -> web.Response | None:
        """A refusal, unless the call may enter the queue."""
        if self._phase != "ready":
            return self._not_serving()
        rows = call.rows
        if rows > self._room.largest_call:
            largest = self._room.largest_call
            return self._refuse(413, "too_large", f"inputs: {rows} rows, at most {largest} a call")
        admission = admit(
            rows=rows,
            priority=call.priority,
            open_rows=self._open_rows,
            room=self._room,
            rows_per_s=self._meter.sequences_per_s(),
        )
        if not admission.admitted:
            return self._refuse(429, "overloaded", admission.reason, admission.retry_after_s)
        return None

    async def _answer(self, call: protocol.InferRequest, started_at: float) -> web.Response:
        """The answer to a call that has been admitted."""
        assert self._scorer is not None
        deadline_at = None if call.timeout_s is None else started_at + call.timeout_s
        outcome: Outcome = "abandoned"  # stays so when the client goes away
        self._take(call.rows)
        try:
            scored = await self._scorer.score(call, deadline_at=deadline_at)
            response = await self._render(call, scored, self._scorer.model)
            outcome = "ok"
            self._meter.predictions += call.rows
            self._calls_ok += 1
        except DeadlinePassed as error:
            outcome = "expired"
            response = refusal_response(503, outcome, f"timeout: {error}")
        except Closed:
            outcome = "draining"
            response = refusal_response(503, *DRAINING)
        except DeviceFailed as error:
            outcome = "device_failed"
            response = refusal_response(500, outcome, str(error))
        finally:
            self._metrics.calls.labels(outcome).inc()
            self._calls_failed += outcome != "ok"
            self._take(-call.rows)
        return response

    async def _render(
        self, call: protocol.InferRequest, scored: Scored, model: Model
    ) -> web.Response:
        render = partial(
            protocol.render_infer,
            call,
            scored.outputs,
            model_name=self.name,
            model_version=model.version,
            parameters={
                "max_tokens": model.max_tokens,
                "compute_us": round(1e6 * scored.compute_s),
            },
            signature=model.signature,
        )
        # Embeddings are hundreds of numbers a row: writing them out would stop the loop.
        vectors = any(scored.outputs[wanted.name].shape[1] > 1 for wanted in call.outputs)
        body = await asyncio.to_thread(render) if vectors else render()
        if body.json_length is None:
            return web.Response(body=body.content, content_type="application/json")
        headers = {protocol.HEADER_LENGTH: str(body.json_length)}
        return web.Response(
            body=body.content, content_type="application/octet-stream", headers=headers
        )

    def _take(self, rows: int) -> None:
        """Account for rows that enter (or, negative, leave) the queue."""
        self._open_rows += rows
        self._metrics.queue_rows.set(self._open_rows)
        if self._open_rows:
            self._empty.clear()
        else:
            self._empty.set()

    def _unknown(self, request: web.Request) -> web.Response | None:
        """404 for another model, or another version than the one that is served."""
        if request.match_info["model"] != self.name:
            return refusal_response(404, "not_found", f"this server has the model {self.name!r}")
        version = request.match_info.get("version")
        served = None if self._scorer is None else self._scorer.model.version
        if version is not None and served is not None and version != served:
            return refusal_response(404, "not_found", f"served is version {served!r}")
        return None

    def _not_serving(self) -> web.Response:
        outcome, detail, retry_after_s = DRAINING if self._phase == "draining" else WARMING_UP
        return self._refuse(503, outcome, detail, retry_after_s)

    def _refuse(
        self, status: int, outcome: Outcome, detail: str, retry_after_s: int | None = None
    ) -> web.Response:
        self._metrics.calls.labels(outcome).inc()
        self._calls_failed += 1
        return refusal_response(status, outcome, detail, retry_after_s)


def refusal_response(
    status: int, code: str, detail: str, retry_after_s: int | None = None
) -> web.Response:
    """The protocol's error body with our stable code beside it."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return web.json_response({"error": detail, "code": code}, status=status, headers=headers)


@web.middleware
async def json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give aiohttp's own refusals (no such route or method) and our faults the protocol's form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)
    except Exception:
        logger.exception("call failed", extra={"path": request.path})
        return web.json_response({"error": "internal error"}, status=500)
