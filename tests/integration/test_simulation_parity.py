"""The simulator does what the services do: the same events at the same instants (tests.parity).

That the scenario would tell is shown besides: both sides call the same functions, so each rule of
theirs is made another for a run of the simulator alone.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from random import Random
from types import ModuleType
from typing import Any

import pytest
from pytest_django import Settings

from airs_site.simulation import kept
from airs_site.simulation.kept import SCORES
from airs_site.simulation.policies import ordered
from fulfillment.policy import commitments, fairness, lines, ordering, pressure, quota
from fulfillment.policy.ordering import DEFAULT_SHARES
from fulfillment.policy.priority import PriorityClass
from tests import builders
from tests.builders import DIRECTORY
from tests.parity.scenario import Event, Scenario, Work
from tests.parity.services import served
from tests.parity.simulator import simulated

HIGH, MIDDLE, LOW, BEST = PriorityClass

# Ratings 0 to 400 are asked for again and again, at once and later.
SHARED = [
    Work(at_s=0.0, owner="ann", ratings=[(0, 200)]),
    Work(at_s=1.1, owner="bob", ratings=[(100, 150)], priority_class=LOW),
    Work(at_s=2.2, owner="cy", ratings=[(60, 30), (240, 100)], priority_class=MIDDLE),
    Work(at_s=3.3, owner="dee", ratings=[(60, 30), (2000, 60)], priority_class=BEST),
    Work(at_s=31.7, owner="ann", ratings=[(180, 200)], priority_class=MIDDLE),
    Work(at_s=33.9, owner="ann", ratings=[(0, 12)]),
    Work(at_s=150.3, owner="bob", ratings=[(0, 90)], priority_class=BEST),
]
# Too much until its deadlines: some of these are given up, and some are late in part.
URGENT = [
    Work(at_s=40.2, owner="cy", ratings=[(3000, 300)], deadline_s=160.7),
    Work(at_s=50.6, owner="bob", ratings=[(4000, 250)], deadline_s=200.4, priority_class=MIDDLE),
    Work(at_s=61.9, owner="dee", ratings=[(5000, 280)], deadline_s=310.9),
    Work(
        at_s=75.1, owner="ann", ratings=[(3000, 90), (6000, 100)], deadline_s=420.2,
        priority_class=LOW,
    ),
]  # fmt: skip
# Large ones whose deadlines press while small ones keep coming; the second does not fit.
LARGE = [
    Work(at_s=700.3, owner="ann", ratings=[(6500, 200)]),
    Work(at_s=701.3, owner="dee", ratings=[(7000, 500)], deadline_s=300.6),
    *(
        Work(at_s=702.7 + 11 * n, owner=f"small {n}", ratings=[(8000 + 36 * n, 36)])
        for n in range(16)
    ),
    Work(at_s=1100.3, owner="dee", ratings=[(9000, 400)], deadline_s=150.6),
]
# One owner floods the other rater, where others come now and then.
FLOOD = [
    Work(
        at_s=10.4, owner="cy", rater=1, ratings=[(10_000, 90)], priority_class=LOW,
        deadline_s=1000.6,
    ),
    *(
        Work(
            at_s=15.4 + n, owner="flo", rater=1, ratings=[(20_000 + 120 * n, 120)],
            deadline_s=1100.5,
        )
        for n in range(10)
    ),
    Work(at_s=20.9, owner="dee", rater=1, ratings=[(12_000, 90)], priority_class=BEST),
    Work(at_s=300.8, owner="ann", rater=1, ratings=[(13_000, 200)]),
    *(
        Work(at_s=100.8 + 110 * n, owner="bob", rater=1, ratings=[(11_000 + 18 * n, 30)])
        for n in range(8)
    ),
]  # fmt: skip
# Middle priority alone, and a deadline that is near for some of its time.
EVENING = [
    Work(at_s=1900.3, owner="ann", rater=1, ratings=[(30_000, 200)], priority_class=MIDDLE),
    Work(
        at_s=1900.9, owner="dee", rater=1, ratings=[(31_000, 250)], priority_class=MIDDLE,
        deadline_s=600.7,
    ),
]  # fmt: skip
DAY = Scenario(
    replicas=(3, 1),
    window=8,
    stored=[(150, 40)],
    bad=frozenset({7, 70, 205, 333}),
    works=sorted([*SHARED, *URGENT, *LARGE, *FLOOD, *EVENING], key=lambda work: work.at_s),
)


@pytest.fixture(autouse=True)
def _stage(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    builders.use_plugins(settings)
    monkeypatch.setattr(ordered, "ORDER_AGE_S", 0.0)
    yield
    DIRECTORY.live = []


@pytest.fixture(scope="module")
def day() -> Sequence[Event]:
    """Return what a day is in the simulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "ORDER_AGE_S", 0.0)
        return simulated(DAY)


def first_difference(expected: Sequence[Event], found: Sequence[Event]) -> str:
    """Return where two lists part, with what goes before; empty where they don't."""
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            before = "\n".join(f"  {event}" for event in expected[max(0, place - 8) : place])
            return f"{before}\nsimulator: {one}\nservices:  {other}"
    if len(expected) != len(found):
        return f"the simulator has {len(expected)} events, the services have {len(found)}"
    return ""


def same(expected: Sequence[Event], found: Sequence[Event]) -> None:
    """Fail where two lists part."""
    if difference := first_difference(expected, found):
        pytest.fail(difference, pytrace=False)


@pytest.mark.django_db
def test_a_day_of_some_hundred_batches_is_the_same(day: Sequence[Event]) -> None:
    same(day, served(DAY))


def test_the_day_has_all_that_may_happen(day: Sequence[Event]) -> None:
    happened = Counter(event.what for event in day)
    outcomes = [event.detail for event in day if event.what == "outcome"]
    hits, computed, free, failed, late = (sum(column) for column in zip(*outcomes, strict=True))
    told = Counter(event.detail[1] for event in day if event.what == "dispatch")

    assert 300 < happened["dispatch"] == happened["finish"]
    assert happened["given up"] > happened["committed"] > 0
    assert min(hits, computed, free, failed, late) > 0
    # All classes, and batches that went before a class above theirs.
    assert {*SCORES.values()} < {*told}


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (ordering, "DEFAULT_SHARES", {**DEFAULT_SHARES, MIDDLE: 0.4}),
        (ordering, "DEFAULT_SHARES", {**DEFAULT_SHARES, LOW: 0.1}),
        (ordering, "DEFAULT_SHARES", {**DEFAULT_SHARES, BEST: 0.04}),
        (ordering, "TURN_EVERY", 10),
        (ordering, "FREE_EVERY", 2),
        (lines, "LEAST_SLACK", 1.0),
        (fairness, "RECENT", timedelta(minutes=1)),
        (fairness, "RECENT_WEIGHT", 0.0),
        (fairness, "LONG", timedelta(minutes=1)),
        (fairness, "LEAST_SEEN", timedelta(hours=2)),
        (fairness, "OWNER_SHARE", 1.0),
        (pressure, "PRESSED", 0.5),
        (commitments, "NEW_MARGIN", 0.45),
        (commitments, "OLD_MARGIN", 0.3),
        (commitments, "OWNER_SHARE", 1.0),
        (quota, "KEPT_FOR_HIGH", 0),
        (kept, "travel_step", lambda step, cls, waiting: step),
    ],
)
def test_the_day_would_tell_if_a_rule_were_another(
    monkeypatch: pytest.MonkeyPatch, day: Sequence[Event], module: ModuleType, name: str, value: Any
) -> None:
    monkeypatch.setattr(module, name, value)

    assert first_difference(day, simulated(DAY))


def drawn(seed: int) -> Scenario:
    """Return a small scenario: a few workflows that overlap, of all classes, soon due or not."""
    chance = Random(seed)
    works = []
    for at_s in sorted(
        chance.choice([0.0, chance.uniform(0, 600), chance.uniform(0, 100)])
        for _ in range(chance.randint(4, 9))
    ):
        rater = chance.choice([0, 0, 0, 1])
        start = 1000 * rater + chance.randrange(300)
        works.append(
            Work(
                at_s=round(at_s, 1),
                owner=chance.choice("abc"),
                rater=rater,
                priority_class=chance.choice([HIGH, HIGH, MIDDLE, LOW, LOW, BEST]),
                ratings=chance.choice(
                    [
                        [(start, chance.randint(1, 90))],
                        # Every other one, so that batches are answered in part.
                        [(start + 2 * n, 1) for n in range(chance.randint(1, 60))],
                    ]
                ),
                deadline_s=chance.choice([7200.3, 500.7, 200.1, 90.2]),
                cost=chance.choice([0.5, 1.0, 1.5]),
            )
        )
    return Scenario(
        works=works,
        replicas=(chance.randint(1, 3), 1),
        window=chance.choice([1, 2, 4, 8, 16]),
        late_s=chance.choice([None, 45.05, 110.05]),
        stored=[(100, 20)],
        bad=frozenset(chance.sample(range(1400), 60)),
    )


@pytest.mark.django_db
@pytest.mark.parametrize("seed", [0, 5, 50, 63, 111, 157, 171, 235])
def test_small_scenarios_are_the_same(seed: int) -> None:
    scenario = drawn(seed)

    same(simulated(scenario), served(scenario))


@pytest.mark.django_db
def test_places_that_a_class_may_not_have_go_to_another_in_the_same_pass() -> None:
    scenario = replace(drawn(318), window=8)

    same(simulated(scenario), served(scenario))
