"""Options of the model server that a model's `serving` may set, and their bounds.

Each becomes a flag of `python -m workers.model_server`; nothing else reaches its command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """A whole number from `low` to `high`."""

    low: int
    high: int
    meaning: str

    def problem(self, value: Any) -> str | None:
        if type(value) is int and self.low <= value <= self.high:
            return None
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OneOf:
    """One of some words."""

    words: tuple[str, ...]
    meaning: str

    def problem(self, value: Any) -> str | None:
        return None if value in self.words else f"one of {', '.join(self.words)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rising:
    """Up to `most` whole numbers from `low` to `high`, each greater than the one before."""

    low: int
    high: int
    most: int
    meaning: str

    def problem(self, value: Any) -> str | None:
        if (
            isinstance(value, list)
            and 1 <= len(value) <= self.most
            and all(type(each) is int and self.low <= each <= self.high for each in value)
            and all(one < two for one, two in pairwise(value))
        ):
            return None
        return (
            f"a list of 1 to {self.most} rising whole numbers from {self.low} to {self.high}, as "
            "[64, 128, 256]"
        )


OPTIONS: Final[Mapping[str, Between | OneOf | Rising]] = {
    "batch_tokens": Between(
        low=1, high=4_194_304, meaning="tokens, padding included, of one batch on the device"
    ),
    "cached_queries": Between(low=0, high=1_000_000, meaning="vectors of queries that are kept"),
    "dtype": OneOf(
        words=("auto", "f32", "bf16"),
        meaning="number format of matrix products; auto is the device's own, another is another "
        "version of the model",
    ),
    "headroom": Between(
        low=0, high=999_999, meaning="rows of max_queue that only urgent calls may use"
    ),
    "lanes": Between(low=1, high=64, meaning="batches on the devices at a time"),
    "lengths": Rising(
        low=8,
        high=32_768,
        most=64,
        meaning="padded lengths in tokens; texts are cut at the last, which is part of the version",
    ),
    "max_queue": Between(low=1, high=1_000_000, meaning="rows accepted and not yet answered"),
    "tuned": OneOf(
        words=("auto", "off"),
        meaning="whether the first start measures which lanes and batches pay; else a table's",
    ),
}
_DEFAULT_MAX_QUEUE: Final = 2_048
_USUAL_HEADROOM: Final = 4
"""Of max_queue, the part that servers keep for urgent calls if they are told nothing."""


def problems(serving: Any) -> list[str]:
    """Return what is wrong with a `serving` object: the option, what it takes, and what to do."""
    if not isinstance(serving, Mapping):
        return ["it is an object of options"]
    found = []
    for name, value in serving.items():
        option = OPTIONS.get(name)
        if option is None:
            shown = str(name)[:40]
            found.append(f"there is no option {shown!r}: the options are {', '.join(OPTIONS)}")
        elif detail := option.problem(value):
            found.append(f"{name} is {detail} ({option.meaning}); leave it out for the default")
    most = serving.get("max_queue", _DEFAULT_MAX_QUEUE)
    if not found and serving.get("headroom", 0) >= most:
        found.append(f"headroom is smaller than max_queue, which is {most}: lower it")
    return found


def room(serving: Mapping[str, Any]) -> int:
    """Return the rows that a server holds before it refuses any call, however little urgent."""
    most = serving.get("max_queue", _DEFAULT_MAX_QUEUE)
    rows: int = most - serving.get("headroom", most // _USUAL_HEADROOM)
    return rows


def described() -> str:
    """Return the options with their meanings, for people."""
    return "; ".join(f"{name}: {option.meaning}" for name, option in OPTIONS.items())
