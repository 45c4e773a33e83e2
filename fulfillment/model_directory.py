"""What fulfillment must know of models, as protocols: it does not import model management.

The object named by the setting AIRS_MODEL_DIRECTORY satisfies `ModelDirectory`.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from django.conf import settings
from django.utils.module_loading import import_string


class ModelDescription(Protocol):
    """A registered model as raters are bound to it."""

    @property
    def id(self) -> str: ...
    @property
    def protocol(self) -> str:
        """`oip` or `openai`."""

    @property
    def version(self) -> str:
        """Checkpoint digest, or the operator's label and what the server last reported."""


class Replica(Protocol):
    """A live address of a model, and how many batches it may hold."""

    @property
    def key(self) -> str:
        """Stable name, carried in messages and leases; at most 64 characters."""

    @property
    def model_id(self) -> str: ...
    @property
    def version(self) -> str:
        """What it serves; "" when an external server has not said yet."""

    @property
    def label(self) -> str:
        """The operator's name for it: what raters were pinned to before the server had reported."""

    @property
    def window(self) -> int:
        """Batches it may hold (computing and queued)."""

    @property
    def managed(self) -> bool:
        """Whether the window comes from model management (else it is found by adaptation)."""


class ModelDirectory(Protocol):
    """The questions that fulfillment asks about models."""

    def describe(self, model_id: str) -> ModelDescription | None: ...

    def replicas(self, now: datetime) -> Sequence[Replica]:
        """Return what can be sent to now: hosted replicas that are ready, external models."""


def model_directory() -> ModelDirectory:
    """Return the configured directory."""
    directory: ModelDirectory = import_string(settings.AIRS_MODEL_DIRECTORY)
    return directory
