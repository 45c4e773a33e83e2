"""A window over a burst of refusals, in virtual time: the course that case S-11 asks for.

A server of 200 ms serves 100 calls a second; for 30 s it refuses six calls in ten, in bursts. Two
workers report what they met a while later, the leader sends what fits into the window.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from fulfillment.policy.priority import PriorityClass
from fulfillment.policy.traffic import Signal, Window, adapt, open_window, room

START = datetime(2026, 3, 1, tzinfo=UTC)
CLS = PriorityClass.MIDDLE
CEILING = 20
SERVICE_S = 0.2
REFUSAL_S = 0.01
REPORT_S = 0.05
"""From the end of a call until the leader hears of it."""


@dataclass
class Course:
    """What became of the calls of one model."""

    window: Window
    served: Counter[int] = field(default_factory=Counter)
    """By second."""
    sent: Counter[int] = field(default_factory=Counter)
    drops: list[float] = field(default_factory=list)
    lowest: float = CEILING

    def rate(self, start_s: int, end_s: int) -> float:
        """Return the calls served a second between two instants."""
        return sum(self.served[s] for s in range(start_s, end_s)) / (end_s - start_s)


def run(
    *, seconds: float, refuses: Callable[[float], bool], service_s: float = SERVICE_S
) -> Course:
    """Keep a model busy for so long; each event is a call whose end was reported."""
    course = Course(window=open_window(CEILING))
    out = 0
    ends: list[tuple[float, int, float, bool]] = []
    now_s, number = 0.0, 0
    while now_s < seconds:
        for _ in range(_room(course.window, out, now_s)):
            refused = refuses(now_s)
            took = REFUSAL_S if refused else service_s
            number += 1
            course.sent[int(now_s)] += 1
            heapq.heappush(ends, (now_s + took + REPORT_S, number, now_s, refused))
            out += 1
        if not ends:  # all of the window cools
            now_s += REPORT_S
            continue
        now_s, _, sent_s, refused = heapq.heappop(ends)
        out -= 1
        course.served[int(now_s)] += not refused
        before = course.window.limits[CLS]
        course.window = adapt(
            course.window,
            [
                Signal(
                    priority_class=CLS,
                    succeeded=not refused,
                    overloaded=refused,
                    refused_at=START + timedelta(seconds=sent_s),
                )
            ],
            START + timedelta(seconds=now_s),
        )
        if course.window.limits[CLS] < before:
            course.drops.append(now_s)
        course.lowest = min(course.lowest, course.window.limits[CLS])
    return course


def _room(window: Window, out: int, now_s: float) -> int:
    return room(window, {CLS: out}, CLS, now=START + timedelta(seconds=now_s))


def burst(now_s: float) -> bool:
    """Refuse six calls in ten from the 60th to the 90th second, in bursts of 0.6 s."""
    return 60 <= now_s < 90 and now_s % 1 < 0.6


def test_a_burst_of_refusals_halves_the_rate_within_ten_seconds_and_it_comes_back() -> None:
    course = run(seconds=390, refuses=burst)

    full = course.rate(30, 60)
    assert course.sent[70] <= full / 2
    assert course.rate(70, 90) <= full / 2
    assert course.lowest >= 1
    assert course.rate(380, 390) >= 0.9 * full
    back = next(s for s in range(90, 390) if course.rate(s, s + 5) >= 0.9 * full)
    assert back - 90 < 60, "it comes back within a minute, not just five"


def test_one_burst_is_one_cut() -> None:
    course = run(seconds=95, refuses=burst)

    by_burst = Counter(int(at) for at in course.drops)
    assert set(by_burst.values()) == {1}
    assert set(by_burst) <= set(range(60, 91))


def test_a_slow_model_is_cut_once_for_the_calls_it_was_sent_at_once() -> None:
    """Time-outs of 20 s come back one after the other; they were all sent to the same window."""
    course = run(seconds=30, refuses=lambda now_s: False, service_s=20)
    assert not course.drops

    window = open_window(CEILING)
    for second in range(20, 30):
        refused = Signal(priority_class=CLS, overloaded=2, refused_at=START)
        window = adapt(window, [refused], START + timedelta(seconds=second))

    assert window.limits[CLS] == CEILING * 0.7


def test_another_model_does_not_notice() -> None:
    beside = run(seconds=120, refuses=lambda now_s: False)

    assert beside.rate(60, 90) >= 0.9 * beside.rate(30, 60)
    assert not beside.drops


def test_large_and_slow_models_come_back_within_five_minutes() -> None:
    """1,000 calls of 5 s: one call a round trip would take an hour and a half."""
    window = replace(open_window(1_000), limits=(1.0,) * 4)
    seconds = 0.0
    while window.limits[CLS] < 900:
        window = adapt(
            window,
            [Signal(priority_class=CLS, succeeded=int(window.limits[CLS]))],
            START + timedelta(seconds=seconds),
        )
        seconds += 5

    assert seconds <= 300


@settings(max_examples=20, deadline=None)
@given(share=st.floats(0.05, 0.95), seed=st.integers(0, 1_000))
def test_any_share_of_refusals_ends_in_full_recovery(share: float, seed: int) -> None:
    chance = random.Random(seed)
    course = run(seconds=60, refuses=lambda now_s: now_s < 10 and chance.random() < share)

    assert course.lowest >= 1
    assert course.window.limits[CLS] >= 0.9 * CEILING
