"""Keeps the wanted model servers of this machine alive: `manage.py host_models`.

One agent of a name leads (a lock in PostgreSQL), another stands by. Servers outlive a restart of
PostgreSQL, but not the agent: however it ends, they end.
"""

import argparse
import logging
import os
import re
import select
import signal
import sys
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.exceptions import ObjectDoesNotExist
from django.core.management.base import BaseCommand
from django.db import Error, InterfaceError, OperationalError, connection

from models_admin.agent import HostAgent
from models_admin.clock import database_now
from models_admin.local_hosting import LocalBackend

logger = logging.getLogger(__name__)

_PASS_EVERY_S = 1.0


class _Signals:
    """Turns SIGTERM and SIGINT into an end of waiting; a lock would not be safe in a handler."""

    def __init__(self) -> None:
        self.stopped = False
        self._read, self._write = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, seconds: float) -> None:
        select.select([self._read], [], [], seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.stopped:
            self.stopped = True
            os.write(self._write, b"x")


class Command(BaseCommand):
    """Level-triggered: each pass compares all that is wanted with all that lives."""

    help = "Keep the wanted model servers of this machine alive"
    requires_system_checks: list[str] = []  # The agent starts while the database may be away.
    server_command: Sequence[str] = (sys.executable, "-m", "workers.model_server")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--agent",
            type=_agent_name,
            default="local",
            help="name of this agent; it runs the models of pools that name it (default: local)",
        )
        parser.add_argument(
            "--once", action="store_true", help="one pass, then stop what it started"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        signals = _Signals()
        agent = HostAgent(
            name=options["agent"],
            boot_id=uuid.uuid4(),
            backend=LocalBackend(
                logs=settings.AIRS_HOME / "logs",
                cache=settings.AIRS_HOME / "cache" / "jax",
                locks=settings.AIRS_HOME / "devices",
                checkpoint_root=settings.AIRS_CHECKPOINT_ROOT,
                cwd=settings.BASE_DIR,
                environ=os.environ,
                command=self.server_command,
            ),
            checkpoint_root=settings.AIRS_CHECKPOINT_ROOT,
        )
        try:
            _pass(agent)
            while not (signals.stopped or options["once"]):
                signals.wait(_PASS_EVERY_S)
                if not signals.stopped:
                    _pass(agent)
        finally:
            _stop(agent)


def _pass(agent: HostAgent) -> None:
    try:
        if agent.lead():
            agent.run_once(database_now())
        else:
            agent.stand_by()
    except (Error, ObjectDoesNotExist) as error:
        # PostgreSQL restarts, or a row changed or went under us: the next pass sees the truth.
        expected = isinstance(error, OperationalError | InterfaceError | ObjectDoesNotExist)
        logger.warning(
            "host_agent_pass_failed error=%s",
            type(error).__name__,
            exc_info=None if expected else error,
        )
        connection.close()


def _stop(agent: HostAgent) -> None:
    try:
        now = database_now()
    except Error:
        now = None
    agent.stop(now)


def _agent_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise argparse.ArgumentTypeError("1 to 64 letters, digits, - and _")
    return text
