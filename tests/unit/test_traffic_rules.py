"""Laws of traffic rules: never more room, nobody starved but by a block, the strictest decides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.models import Purpose, Trigger
from fulfillment.policy.priority import PriorityClass
from models_admin.policy import traffic_rules as policy
from models_admin.policy.traffic_rules import (
    Held,
    Room,
    Rule,
    Traffic,
    TrafficClass,
    TrafficPurpose,
    TrafficTrigger,
)

names = st.sampled_from(["a", "b"])
conditions = st.none() | names
shares = st.floats(0.01, 1.0)
traffic = st.builds(Traffic, *[names] * 7)


@st.composite
def rule(draw: st.DrawFn, *, blocks: bool | None = None) -> Rule:
    block = draw(st.booleans()) if blocks is None else blocks
    share = None if block else draw(st.none() | shares)
    batches = st.integers(1, 40)
    return Rule(
        name=draw(st.text("xyz", min_size=1, max_size=8)),
        rater=draw(conditions),
        model=draw(conditions),
        priority_class=draw(conditions),
        trigger=draw(conditions),
        purpose=draw(conditions),
        owner=draw(conditions),
        workflow=draw(conditions),
        min_load=draw(st.just(0.0) | st.floats(0.0, 1.0)),
        max_share=share,
        max_batches=None if block else draw(batches if share is None else st.none() | batches),
        block=block,
    )


@st.composite
def room(draw: st.DrawFn) -> Room:
    window = draw(st.integers(0, 64))
    held = draw(st.integers(0, window))
    return Room(window=window, held=held, free=draw(st.integers(0, window - held)))


rules = st.lists(rule(), max_size=6, unique_by=lambda each: each.name)
helds = st.dictionaries(
    st.text("xyz", min_size=1, max_size=8),
    st.builds(Held, of_model=st.integers(0, 40), in_all=st.integers(0, 40)),
)


@given(rules, traffic, room(), helds)
def test_rules_never_give_more_room_than_there_is(
    of: list[Rule], some: Traffic, there: Room, held: dict[str, Held]
) -> None:
    found = policy.decide(of, some, room=there, held=held)

    assert 0 <= found.granted <= there.free
    assert bool(found.reasons) == (found.granted < there.free)


@given(st.data(), rules, traffic, room(), helds)
def test_the_order_of_rules_does_not_matter(
    data: st.DataObject, of: list[Rule], some: Traffic, there: Room, held: dict[str, Held]
) -> None:
    shuffled = data.draw(st.permutations(of))

    assert policy.decide(shuffled, some, room=there, held=held) == policy.decide(
        of, some, room=there, held=held
    )


@given(rules, rule(), traffic, room(), helds)
def test_another_rule_never_gives_more(
    of: list[Rule], more: Rule, some: Traffic, there: Room, held: dict[str, Held]
) -> None:
    before = policy.decide(of, some, room=there, held=held)

    assert policy.decide([*of, more], some, room=there, held=held).granted <= before.granted


@given(st.lists(rule(blocks=False), max_size=6), traffic, room())
def test_whoever_is_not_blocked_has_a_batch_at_a_time(
    of: list[Rule], some: Traffic, there: Room
) -> None:
    found = policy.decide(of, some, room=there, held={})

    assert found.granted >= min(1, there.free)


def test_a_share_or_load_that_is_no_binary_number_counts_as_it_is_written() -> None:
    there = Room(window=100, held=7, free=93)

    assert policy.left(Rule(name="share", max_share=0.29), there, Held()) == 29
    assert policy.left(Rule(name="load", block=True, min_load=0.07), there, Held()) == 0


@given(rule(), room(), st.builds(Held, of_model=st.integers(0, 40)), shares, st.floats(0.0, 1.0))
def test_a_stricter_rule_gives_no_more(
    of: Rule, there: Room, held: Held, share: float, load: float
) -> None:
    def left(of: Rule) -> float:
        more = policy.left(of, there, held)
        return float("inf") if more is None else more

    if of.max_share is not None:
        assert left(replace(of, max_share=min(share, of.max_share))) <= left(of)
    assert left(replace(of, min_load=min(load, of.min_load))) <= left(of)
    assert left(replace(of, max_share=None, max_batches=None, block=True)) <= left(of)


@given(rule(), st.integers(1, 64), st.data())
def test_the_more_is_held_the_less_is_left(of: Rule, window: int, data: st.DataObject) -> None:
    few, many = sorted(data.draw(st.tuples(st.integers(0, window), st.integers(0, window))))

    def left(held: int) -> float:
        there = Room(window=window, held=held, free=window - held)
        more = policy.left(of, there, Held(of_model=held, in_all=held))
        return float("inf") if more is None else more

    assert left(many) <= left(few)


@pytest.mark.parametrize(
    ("of", "window", "held", "more"),
    [
        (Rule(name="r", max_share=0.5), 16, Held(of_model=3, in_all=30), 5),
        (Rule(name="r", max_share=1 / 3), 3, Held(), 1),
        (Rule(name="r", max_share=0.01), 16, Held(), 1),
        (Rule(name="r", max_share=0.01), 16, Held(of_model=1), 0),
        (Rule(name="r", max_batches=4), 16, Held(of_model=0, in_all=3), 1),
        (Rule(name="r", max_batches=4, max_share=0.125), 16, Held(of_model=1, in_all=1), 1),
        (Rule(name="r", block=True), 16, Held(), 0),
        (Rule(name="r", max_batches=1), 16, Held(in_all=7), 0),
    ],
)
def test_what_a_rule_leaves(of: Rule, window: int, held: Held, more: int) -> None:
    assert policy.left(of, Room(window=window, held=0, free=window), held) == more


def test_a_rule_with_a_load_holds_once_that_is_reached() -> None:
    of = Rule(name="r", block=True, min_load=0.5)

    assert [
        policy.left(of, Room(window=16, held=held, free=16 - held), Held())
        for held in (0, 7, 8, 16)
    ] == [8, 1, 0, 0]


def test_the_strictest_comes_first_in_words() -> None:
    half = Rule(name="half", max_share=0.5, reason="night run")
    one = Rule(name="one", max_batches=1, min_load=0.25)

    found = policy.decide([half, one], Traffic(), room=Room(window=16, held=8, free=9), held={})

    assert found.granted == 1
    assert found.reasons == (
        "traffic rule 'one': at most 1 at a time from a load of 25% on",
        "traffic rule 'half': 50% of the window (night run)",
    )


def test_words_of_conditions_are_those_of_fulfillment() -> None:
    assert [cls.name.lower() for cls in PriorityClass] == list(TrafficClass)
    assert Trigger.values == list(TrafficTrigger)
    assert Purpose.values == list(TrafficPurpose)
