"""What the calls at the paced servers say: who was served when, and how busy the slots were.

A call's tag is `GROUP:OWNER:CLASS`. Instants are the machine's, in seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tests.benchmarks.paced_server import Call


def tag(group: str, owner: str, priority: str) -> str:
    """Return the first word of the texts of such a workflow."""
    return f"{group}:{owner}:{priority}"


def group_of(call: Call) -> str:
    """Return which part of the run a call is of."""
    return call.tag.split(":")[0]


def owner_of(call: Call) -> str:
    """Return whose workflow a call is of."""
    return call.tag.split(":")[1]


def class_of(call: Call) -> str:
    """Return the class of a call's workflow."""
    return call.tag.split(":")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch of a run."""

    from_s: float
    until_s: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.until_s - self.from_s

    def calls(self, calls: Iterable[Call]) -> list[Call]:
        """Return the calls that began in it."""
        return [call for call in calls if self.from_s <= call.began_s < self.until_s]

    def busy_s(self, calls: Iterable[Call]) -> float:
        """Return the slot-seconds in it in which calls were computed."""
        return sum(
            max(0.0, min(call.ended_s, self.until_s) - max(call.began_s, self.from_s))
            for call in calls
        )


def backlog(calls: Sequence[Call], *, from_s: float, held_s: float) -> Span:
    """Return how long each model had calls that were not sent yet.

    What a model's servers hold takes them `held_s`: so long before its last call began, the last
    one was sent.
    """
    last: dict[str, float] = {}
    for call in calls:
        last[call.model] = call.began_s
    return Span(from_s=from_s, until_s=min(last.values()) - held_s)


def all_wait(calls: Sequence[Call], *, from_s: float, held_s: float) -> Span:
    """Return how long each owner had calls that were not sent yet, at each model."""
    last: dict[tuple[str, str], float] = {}
    for call in calls:
        last[call.model, owner_of(call)] = call.began_s
    return Span(from_s=from_s, until_s=min(last.values()) - held_s)


def by_owner_s(calls: Iterable[Call]) -> dict[str, float]:
    """Return the slot-seconds of each owner."""
    seconds: dict[str, float] = defaultdict(float)
    for call in calls:
        seconds[owner_of(call)] += call.ended_s - call.began_s
    return dict(seconds)


def off_equal(seconds: Collection[float]) -> float:
    """Return how far the share that is farthest from an equal one is off, as a part of it."""
    equal = sum(seconds) / len(seconds)
    return max(abs(each / equal - 1) for each in seconds)


def by_class(calls: Iterable[Call]) -> Counter[str]:
    """Return the calls of each class."""
    return Counter(class_of(call) for call in calls)


def longest_gap_s(calls: Iterable[Call], of: str, span: Span) -> float:
    """Return the longest time in the span in which no call of a class began at some model."""
    began: dict[str, list[float]] = defaultdict(list)
    for call in span.calls(calls):
        began[call.model] += [call.began_s] if class_of(call) == of else []
    return max(
        later - earlier
        for times in began.values()
        for earlier, later in zip([span.from_s, *times], [*times, span.until_s], strict=True)
    )
