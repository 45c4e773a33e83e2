"""The life of one model-server process: listen, load and warm, serve, drain, end.

Or, for `--check`: load, run one row, say so, end.
"""

import asyncio
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from aiohttp import web

from workers.model_server.files import CheckpointRefused
from workers.model_server.scheduler import Room
from workers.model_server.server import ModelServer
from workers.model_server.serving import Options

if TYPE_CHECKING:
    from workers.model_server.device import LoadedModel

logger = logging.getLogger(__name__)

SERVED, FAILED = 0, 1
"""Exit statuses."""
LAST_S = 10
"""For what is left to do after the drain; then the kernel ends the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the command line says."""

    model_name: str
    checkpoint: str
    checkpoint_root: Path | None
    sha256: str | None
    version: str | None
    loader: str
    options: Options
    host: str
    port: int
    room: Room
    largest_body: int
    drain_s: float


async def run(settings: Settings) -> int:
    """Serve one model until SIGTERM or SIGINT; returns the exit status."""
    began_at = time.monotonic()
    told_to_end = asyncio.Event()

    def end() -> None:
        told_to_end.set()
        # Should a device hang, this process still ends and frees it: who told it to may be gone.
        signal.alarm(math.ceil(settings.drain_s) + LAST_S)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    server = ModelServer(
        name=settings.model_name,
        room=settings.room,
        largest_body=settings.largest_body,
        clock=time.monotonic,
    )
    # A call whose client has gone is cancelled, so that its rows do not reach the device.
    runner = web.AppRunner(server.app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
        url = f"http://{settings.host}:{runner.addresses[0][1]}"
        logger.info("listening", extra={"url": url, "pid": os.getpid()})
        model = await load(settings, told_to_end)
        if model is None:
            return SERVED if told_to_end.is_set() else FAILED
        broken = server.serve(model)
        announce(settings, model, url, seconds=time.monotonic() - began_at)
        await first_of(told_to_end, broken)
        logger.info("draining", extra={"device_broken": broken.is_set()})
        finished = await server.drain(settings.drain_s)
        logger.info("drained", extra={"all_answered": finished})
        return SERVED if finished and not broken.is_set() else FAILED
    finally:
        await runner.cleanup()


async def load(settings: Settings, told_to_end: asyncio.Event) -> "LoadedModel | None":
    """The model, or None when it cannot be loaded or the process was told to end meanwhile."""
    stopping = threading.Event()
    loading = asyncio.create_task(asyncio.to_thread(load_in_thread, settings, stopping))
    ending = asyncio.create_task(told_to_end.wait())
    await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
    stopping.set()  # ends the loading after the shapes that are being compiled
    ending.cancel()
    try:
        model = await loading
    except Exception as error:
        if not told_to_end.is_set():
            log_failure(error)
        return None
    return None if told_to_end.is_set() else model


def check(settings: Settings) -> int:
    """Load the model and compute one row in the smallest shape; returns the exit status.

    One line of JSON on stdout says what would be served; a failure is logged as in `run`.
    """
    began_at = time.monotonic()
    try:
        model = load_in_thread(settings, threading.Event(), only_smallest=True)
        rows = model.read({name: ["a"] for name in model.signature.inputs})
        shortest = model.serving.shaping.steps[0]
        # One by one, as only the smallest shape is there.
        vectors = [
            model.device.embed([tokens.ids], shortest) for tokens in (*rows.kept, *rows.once)
        ]
        outputs = model.combine(rows, vectors[0], vectors[-1])
        unusable = [name for name, array in outputs.items() if not np.isfinite(array).all()]
        if unusable:
            raise ArithmeticError(f"{unusable[0]} of one row is not finite")
    except Exception as error:
        log_failure(error)
        return FAILED
    checked = {
        "event": "checked",
        "version": model.version,
        "loader": model.loader,
        "size": model.size,
        "platform": model.platform,
        "devices": model.serving.shaping.devices,
        "max_tokens": model.max_tokens,
        "seconds": round(time.monotonic() - began_at, 3),
    }
    sys.stdout.write(json.dumps(checked) + "\n")
    sys.stdout.flush()
    return SERVED


def log_failure(error: Exception) -> None:
    """The line that tells the host agent why there is no model: a stable code, and its text."""
    if isinstance(error, CheckpointRefused):
        code, detail, trace = error.code, error.detail, None
    else:
        code, detail, trace = "load_failed", f"{type(error).__name__}: {error}", error
    logger.error(
        "model not loaded",
        extra={"code": code, "detail": detail, "reason": f"{code}: {detail}"},
        exc_info=trace,
    )


def load_in_thread(
    settings: Settings, stopping: threading.Event, *, only_smallest: bool = False
) -> "LoadedModel":
    """Imports JAX, which takes a second, only once the server listens."""
    from workers.model_server import device

    return device.load(
        settings.checkpoint,
        root=settings.checkpoint_root,
        sha256=settings.sha256,
        version=settings.version,
        loader_name=settings.loader,
        options=settings.options,
        stopping=stopping.is_set,
        only_smallest=only_smallest,
    )


def announce(settings: Settings, model: "LoadedModel", url: str, *, seconds: float) -> None:
    """The READY line."""
    ready = {
        "url": url,
        "pid": os.getpid(),
        "model_name": settings.model_name,
        "model_version": model.version,
        "platform": model.platform,
        "seconds": round(seconds, 3),
    }
    sys.stdout.write(f"READY {json.dumps(ready)}\n")
    sys.stdout.flush()


async def first_of(*events: asyncio.Event) -> None:
    """Wait for any of the events."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
