"""The settings of a model, as services take them."""

from collections.abc import Mapping
from typing import Any, Final, TypedDict


class ModelFields(TypedDict, total=False):
    """Settings of a model, as the API names them; secrets in clear, on their way in only."""

    kind: str
    protocol: str
    endpoint: str
    """`chat` for none that scores."""
    url: str
    model_name: str
    api_key: str | None
    headers: Mapping[str, str] | None
    timeout_s: float
    max_concurrency: int
    sends_priority: bool
    priority_style: str
    """`none` turns priorities off; any other turns them on, unless `sends_priority` is sent too."""
    version: str
    version_label: str
    pool: str | None
    loader: str
    checkpoint: str
    serving: Mapping[str, Any]
    devices_per_replica: int
    replicas_min: int
    replicas_default: int
    replicas_max: int
    window: int
    tunes_window: bool
    pinned: bool


SECRETS: Final = frozenset({"api_key", "headers"})
