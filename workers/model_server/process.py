"""The life of one model-server process: listen, load and warm, serve, drain, end."""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from workers.model_server.scheduler import Room
from workers.model_server.server import ModelServer

if TYPE_CHECKING:
    from workers.model_server.device import LoadedModel

logger = logging.getLogger(__name__)

SERVED, FAILED = 0, 1
"""Exit statuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the command line says."""

    model_name: str
    checkpoint: str
    checkpoint_root: Path | None
    sha256: str | None
    version: str | None
    lengths: tuple[int, ...] | None
    host: str
    port: int
    room: Room
    largest_body: int
    drain_s: float


async def run(settings: Settings) -> int:
    """Serve one model until SIGTERM or SIGINT; returns the exit status."""
    began_at = time.monotonic()
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
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
            logger.error("model not loaded", extra={"reason": str(error)}, exc_info=error)
        return None
    return None if told_to_end.is_set() else model


def load_in_thread(settings: Settings, stopping: threading.Event) -> "LoadedModel":
    """Imports JAX, which takes a second, only once the server listens."""
    from workers.model_server import device

    return device.load(
        settings.checkpoint,
        root=settings.checkpoint_root,
        sha256=settings.sha256,
        version=settings.version,
        lengths=settings.lengths,
        stopping=stopping.is_set,
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
