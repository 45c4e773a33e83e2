"""Options of the model server that a model's `serving` may set, and their bounds.

Each becomes a flag of `python -m workers.model_server`; nothing else reaches its command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """A whole number from `low` to `high`."""

    low: int
    high: int


OPTIONS: Final = {
    # Rows that are accepted and not yet answered, and those of them only urgent calls may use.
    "max_queue": Between(low=1, high=1_000_000),
    "headroom": Between(low=0, high=999_999),
}
_DEFAULT_MAX_QUEUE: Final = 2_048


def problems(serving: Any) -> list[str]:
    """Return what is wrong with a `serving` object."""
    if not isinstance(serving, Mapping):
        return ["it is an object of options"]
    found = []
    for name, value in serving.items():
        bounds = OPTIONS.get(name)
        if bounds is None:
            found.append(f"the options are {', '.join(sorted(OPTIONS))}")
        elif type(value) is not int or not bounds.low <= value <= bounds.high:
            found.append(f"{name} is a whole number from {bounds.low} to {bounds.high}")
    if not found and serving.get("headroom", 0) >= serving.get("max_queue", _DEFAULT_MAX_QUEUE):
        found.append("headroom is smaller than max_queue")
    return found
