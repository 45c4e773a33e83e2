"""What fulfillment must know of models, as protocols: it does not import model management.

The object named by the setting AIRS_MODEL_DIRECTORY satisfies `ModelDirectory`.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Protocol, runtime_checkable

from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.utils.module_loading import import_string

from fulfillment.policy.limits import Rule

logger = logging.getLogger(__name__)

_LIMITS_BELIEVED = timedelta(seconds=1)


class ModelDescription(Protocol):
    """A registered model as raters are bound to it."""

    @property
    def id(self) -> str: ...
    @property
    def protocol(self) -> str:
        """`oip`, or `openai` for a chat model."""

    @property
    def version(self) -> str:
        """What raters are pinned to and the archive goes by.

        Checkpoint digest, or the operator's label of an external model, which stands for the first
        version that its server reports; the label and the version for any other one.
        """


class Replica(Protocol):
    """A live address of a model, and how many batches it may hold."""

    @property
    def key(self) -> str:
        """Stable name, carried in messages and leases; at most 64 characters."""

    @property
    def model_id(self) -> str: ...
    @property
    def version(self) -> str:
        """What raters that it may rate for are pinned to, as in `ModelDescription`."""

    @property
    def window(self) -> int:
        """Calls it may hold (computing and queued); of an OIP model a batch is one call."""

    @property
    def protocol(self) -> str:
        """`oip`, or `openai`, where each item is a call."""

    @property
    def managed(self) -> bool:
        """Whether the window comes from model management (else it is found by adaptation)."""

    @property
    def seen_at(self) -> datetime | None:
        """When model management last heard of it; None for one that it does not watch."""


class ModelDirectory(Protocol):
    """The questions that fulfillment asks about models."""

    def describe(self, model_id: str) -> ModelDescription | None: ...

    def replicas(self, now: datetime) -> Sequence[Replica]:
        """Return what can be sent to now: hosted replicas that are ready, external models."""


@runtime_checkable
class Prospect(Protocol):
    """What a directory may know beyond it: how many replicas a model will have."""

    def reachable(self, model_id: str, version: str, now: datetime) -> float:
        """Return the replicas of a hosted model that serve a version, or will within minutes."""


@runtime_checkable
class Arrivals(Protocol):
    """What a directory may know beyond it, too: which replicas are on their way."""

    def coming(self, now: datetime) -> Sequence[tuple[str, str]]:
        """Return model and version of replicas that start; "" for a version not known yet."""


@runtime_checkable
class Limited(Protocol):
    """What a directory may know beyond it, too: which traffic may have how much of the room."""

    def limits(self, now: datetime) -> Sequence[Rule]:
        """Return the rules that hold."""


def serves(replica: Replica, model_version: str) -> bool:
    """Say whether a replica rates for raters that are pinned to a version of its model."""
    if not replica.managed:
        return model_version == replica.version
    # Of a model that we run, "" says on either side that the version was not known.
    return not replica.version or model_version in {"", replica.version}


class LastKnown:
    """A directory that goes on with what it last knew while model management is away.

    Replicas keep the time they were last heard of, so that whoever reads it can tell. The database
    being away is not caught: then nothing can be sent.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._replicas: Sequence[Replica] = ()
        self._coming: Sequence[tuple[str, str]] = ()
        self._limits: Sequence[Rule] = ()
        self._limited_at: datetime | None = None
        self._away = False

    def describe(self, model_id: str) -> ModelDescription | None:
        """Ask the directory itself."""
        return self._directory.describe(model_id)

    def replicas(self, now: datetime) -> Sequence[Replica]:
        """Return what can be sent to now, or could when that was last known."""
        self._attempt(self._ask, now)
        return self._replicas

    def coming(self, now: datetime) -> Sequence[tuple[str, str]]:
        """Return what was on its way when replicas were asked for last."""
        return self._coming

    def limits(self, now: datetime) -> Sequence[Rule]:
        """Return the rules that hold, or held within the last second or when last known."""
        # Asked for in each pass; also where the clock was set back.
        if self._limited_at is None or abs(now - self._limited_at) >= _LIMITS_BELIEVED:
            self._attempt(self._ask_limits, now)
        return self._limits

    def _ask(self, now: datetime) -> None:
        self._replicas = self._directory.replicas(now)
        if isinstance(self._directory, Arrivals):
            self._coming = self._directory.coming(now)

    def _ask_limits(self, now: datetime) -> None:
        if isinstance(self._directory, Limited):
            self._limits = self._directory.limits(now)
        self._limited_at = now

    def _attempt(self, ask: Callable[[datetime], None], now: datetime) -> None:
        try:
            ask(now)
        except (OperationalError, InterfaceError):
            raise
        except Exception as error:  # somebody else's code, perhaps over a network
            if not self._away:
                logger.warning("model management is away", extra={"error": repr(error)})
            self._away = True
        else:
            self._away = False


def model_directory() -> ModelDirectory:
    """Return the configured directory."""
    directory: ModelDirectory = import_string(settings.AIRS_MODEL_DIRECTORY)
    return directory
