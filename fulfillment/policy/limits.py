"""Limits: what traffic rules leave of a model's room, while that is filled batch by batch.

Operators write rules (model management keeps them). Each holds for what meets all its conditions;
it leaves that a share of the model's window, a number of batches at a time, or nothing. Which
workflows meet which rules is found once, when they are read; here is counted how much of each is
out. A rule is *closed* while nothing more of its traffic may leave. It never opens by what is sent,
and one that does not block is open while nothing of its traffic is out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Final, NamedTuple, Protocol

from fulfillment.policy.priority import PriorityClass

_EPSILON: Final = 1e-9
"""A third of three batches is one."""

Matched = tuple[int, ...]
"""The rules that a workflow meets, by their number."""


class Rule(Protocol):
    """A rule; what is None is no condition, or no limit."""

    @property
    def name(self) -> str: ...
    @property
    def rater(self) -> str | None: ...
    @property
    def model(self) -> str | None: ...
    @property
    def priority_class(self) -> str | None:
        """`high`, `middle`, `low` or `best_effort`."""

    @property
    def trigger(self) -> str | None: ...
    @property
    def purpose(self) -> str | None: ...
    @property
    def owner(self) -> str | None: ...
    @property
    def workflow(self) -> str | None:
        """Public id."""

    @property
    def min_load(self) -> float:
        """The share of the window in use from which it holds; 0 for always."""

    @property
    def max_share(self) -> float | None:
        """Of the model's window, that its traffic may hold."""

    @property
    def max_batches(self) -> int | None:
        """That its traffic may hold at a time, of all models."""

    @property
    def block(self) -> bool: ...
    @property
    def words(self) -> str:
        """What whoever waits for it is told."""


class Traffic(NamedTuple):
    """What conditions ask of a workflow."""

    rater: str
    model: str
    priority_class: str
    trigger: str
    purpose: str
    owner: str
    workflow: str


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


def matched(rules: Sequence[Rule], traffic: Traffic) -> Matched:
    """Return the numbers of the rules that hold for some traffic."""
    return tuple(number for number, rule in enumerate(rules) if matches(rule, traffic))


class Gate:
    """What rules leave to the raters of a model while room is filled; taking changes it."""

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        window: int,
        held: int,
        of_model: Sequence[int],
        in_all: Sequence[int],
    ) -> None:
        """Take the model's window and what of it is held, in batches; and by rule what its traffic
        holds of the model, and in all."""
        self._rules = rules
        self._window = window
        self._held = held
        self._of_model = list(of_model)
        self._in_all = list(in_all)
        self._by_load = [number for number, rule in enumerate(rules) if rule.min_load]
        self._closed = frozenset(n for n in range(len(rules)) if self.left(n) == 0)

    @property
    def closed(self) -> frozenset[int]:
        """The rules of whose traffic nothing may leave."""
        return self._closed

    def left(self, number: int) -> int | None:
        """Return how many more batches a rule lets its traffic have; None for any number.

        Until the load is reached from which it holds, that much is free of it.
        """
        rule = self._rules[number]
        limits = []
        if rule.block:
            limits.append(0)
        if rule.max_share is not None:
            share = max(1, floor(rule.max_share * self._window + _EPSILON))
            limits.append(share - self._of_model[number])
        if rule.max_batches is not None:
            limits.append(max(1, rule.max_batches) - self._in_all[number])
        if not limits:
            return None
        before = ceil(rule.min_load * self._window - _EPSILON) - self._held
        return max(0, before, min(limits))

    def take(self, matched: Matched) -> bool:
        """Count a batch that leaves; say whether a rule is closed by it."""
        self._held += 1
        for number in matched:
            self._of_model[number] += 1
            self._in_all[number] += 1
        changed = {*matched, *self._by_load} - self._closed
        closed = {number for number in changed if self.left(number) == 0}
        self._closed |= closed
        return bool(closed)

    def may_leave(
        self, ready: Mapping[tuple[PriorityClass, Matched], int]
    ) -> dict[PriorityClass, int]:
        """Return how much of what is READY rules let leave, by class, the highest first.

        It is none only where nothing may leave; where rules overlap, or begin with a load, it may
        be a little more or less than what then does.
        """
        left = [self.left(number) for number in range(len(self._rules))]
        may: Counter[PriorityClass] = Counter()
        for (cls, matched), batches in sorted(ready.items()):
            for number in matched:
                more = left[number]
                batches = batches if more is None else min(batches, more)
            may[cls] += batches
            for number in matched:
                more = left[number]
                left[number] = None if more is None else more - batches
        return dict(may)
