"""Traffic rules: how much of a model's room the traffic that an operator names may take.

A rule holds for what meets all its conditions, from a load of the model on; it leaves that traffic
a share of the window, a number of batches at a time, or nothing (`block`). Of several rules the
strictest decides, so that their order does not matter, and no rule ever gives more room than there
is. One that does not block leaves a batch at a time: whom it slows down still goes on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor
from typing import Final, NamedTuple

_EPSILON: Final = 1e-9
"""A third of three batches is one."""


class TrafficClass(StrEnum):
    """Priority classes, the most urgent first."""

    HIGH = "high"
    MIDDLE = "middle"
    LOW = "low"
    BEST_EFFORT = "best_effort"


class TrafficTrigger(StrEnum):
    """Who started the work."""

    HUMAN = "human"
    AUTOMATIC = "automatic"


class TrafficPurpose(StrEnum):
    """What it is for."""

    TUNING = "tuning"
    LAUNCH = "launch"
    GUARDRAIL = "guardrail"


class Traffic(NamedTuple):
    """What conditions ask of work; empty for what is not known, which no condition meets."""

    rater: str = ""
    model: str = ""
    priority_class: str = ""
    trigger: str = ""
    purpose: str = ""
    owner: str = ""
    workflow: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule; what is None is no condition, or no limit."""

    name: str
    rater: str | None = None
    model: str | None = None
    priority_class: str | None = None
    trigger: str | None = None
    purpose: str | None = None
    owner: str | None = None
    workflow: str | None = None
    min_load: float = 0.0
    """The share of the window in use from which it holds; 0 for always."""
    max_share: float | None = None
    """Of the model's window, that its traffic may hold."""
    max_batches: int | None = None
    """That its traffic may hold at a time, of all models."""
    block: bool = False
    reason: str = ""

    @property
    def words(self) -> str:
        """What whoever waits for it is told."""
        load = f" from a load of {self.min_load:.0%} on" if self.min_load else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"traffic rule '{self.name}': {self.effect}{load}{why}"

    @property
    def effect(self) -> str:
        """What is left to its traffic."""
        effects = [
            *(["nothing is sent"] if self.block else []),
            *([f"{self.max_share:.0%} of the window"] if self.max_share is not None else []),
            *([f"at most {self.max_batches} at a time"] if self.max_batches is not None else []),
        ]
        return ", ".join(effects)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What the traffic of a rule holds now, in batches."""

    of_model: int = 0
    in_all: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The room of a model, in batches."""

    window: int
    held: int
    """By whoever."""
    free: int
    """That the traffic asked about may take where no rule limits it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How many batches may leave now, and which rules have made it fewer."""

    granted: int
    reasons: tuple[str, ...] = ()


def matches(rule: Rule, traffic: Traffic) -> bool:
    """Say whether traffic meets all conditions of a rule."""
    return (
        rule.rater in (None, traffic.rater)
        and rule.model in (None, traffic.model)
        and rule.priority_class in (None, traffic.priority_class)
        and rule.trigger in (None, traffic.trigger)
        and rule.purpose in (None, traffic.purpose)
        and rule.owner in (None, traffic.owner)
        and rule.workflow in (None, traffic.workflow)
    )


def left(rule: Rule, room: Room, held: Held) -> int | None:
    """Return how many more batches a rule lets its traffic have; None for any number.

    Until the load is reached from which it holds, that much is free of it.
    """
    limits = []
    if rule.block:
        limits.append(0)
    if rule.max_share is not None:
        limits.append(max(1, floor(rule.max_share * room.window + _EPSILON)) - held.of_model)
    if rule.max_batches is not None:
        limits.append(max(1, rule.max_batches) - held.in_all)
    if not limits:
        return None
    before = ceil(rule.min_load * room.window - _EPSILON) - room.held
    return max(0, before, min(limits))


def decide(
    rules: Iterable[Rule], traffic: Traffic, *, room: Room, held: Mapping[str, Held]
) -> Verdict:
    """Return how many batches of some traffic may leave; `held` is by the name of a rule."""
    granted, binding = room.free, list[tuple[int, Rule]]()
    for rule in rules:
        if matches(rule, traffic):
            more = left(rule, room, held.get(rule.name, Held()))
            if more is not None and more < room.free:
                binding.append((more, rule))
                granted = min(granted, more)
    binding.sort(key=lambda each: (each[0], each[1].name))
    return Verdict(granted=granted, reasons=tuple(rule.words for _, rule in binding))
