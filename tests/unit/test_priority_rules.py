"""The law of priorities: one rule decides, nobody gets more than its ceiling."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.priority_rules import BUILT_IN, Facts, Rule, decide, matches

WEEK = timedelta(days=7)
scores = st.integers(0, 100)
wishes = st.none() | scores


def facts(**changes: Any) -> Facts:
    given = {
        "trigger": "human",
        "purpose": "tuning",
        "rights": 1,
        "owner": "ann",
        "rater": "needs_met",
        "checkpoint_age": timedelta(days=30),
    }
    return Facts(**{**given, **changes})


def rule(name: str = "r", **changes: Any) -> Rule:
    return Rule(**{"name": name, "position": 10, "default_score": 40, "ceiling": 60, **changes})


some_facts = st.builds(
    Facts,
    trigger=st.sampled_from(["human", "automatic"]),
    purpose=st.sampled_from(["tuning", "launch", "guardrail"]),
    rights=st.integers(0, 3),
    owner=st.sampled_from(["ann", "bob"]),
    rater=st.sampled_from(["needs_met", "judge"]),
    checkpoint_age=st.timedeltas(min_value=timedelta(), max_value=timedelta(days=30)),
)
some_rules = st.lists(
    st.builds(
        Rule,
        name=st.text("abc", min_size=1, max_size=3),
        position=st.integers(0, 9),
        default_score=scores,
        ceiling=scores,
        trigger=st.sampled_from([None, "human", "automatic"]),
        purpose=st.sampled_from([None, "tuning", "launch", "guardrail"]),
        min_rights=st.integers(0, 3),
        owner=st.sampled_from([None, "ann", "bob"]),
        rater=st.sampled_from([None, "needs_met", "judge"]),
        max_checkpoint_age=st.sampled_from([None, timedelta(days=1), WEEK]),
    ),
    max_size=6,
    unique_by=(lambda rule: rule.name, lambda rule: rule.position),
)


# Laws


@given(rules=some_rules, of=some_facts, asked=wishes)
def test_a_score_is_always_given_and_never_above_the_ceiling(
    rules: Sequence[Rule], of: Facts, asked: int | None
) -> None:
    decision = decide(rules, of, asked=asked)

    assert 0 <= decision.score <= decision.ceiling <= 100
    if asked is not None:
        assert decision.score == min(asked, decision.ceiling)
    assert decision.clipped == (asked is not None and asked > decision.ceiling)
    assert f"{decision.score} given" in decision.reason
    assert decision.rule in decision.reason


@given(rules=some_rules, of=some_facts, one=scores, other=scores)
def test_who_asks_for_more_never_gets_less(
    rules: Sequence[Rule], of: Facts, one: int, other: int
) -> None:
    less, more = (decide(rules, of, asked=asked).score for asked in sorted((one, other)))

    assert less <= more


@given(rules=some_rules, of=some_facts, asked=wishes, data=st.data())
def test_the_order_in_which_rules_are_given_and_rules_that_do_not_match_are_irrelevant(
    rules: list[Rule], of: Facts, asked: int | None, data: st.DataObject
) -> None:
    decision = decide(rules, of, asked=asked)

    assert decide(data.draw(st.permutations(rules)), of, asked=asked) == decision
    assert decide([r for r in rules if matches(r, of)], of, asked=asked) == decision


@given(rules=some_rules, of=some_facts, asked=wishes)
def test_the_rule_that_decides_matches_and_no_lower_position_does(
    rules: Sequence[Rule], of: Facts, asked: int | None
) -> None:
    decision = decide(rules, of, asked=asked)

    matching = sorted((r.position, r.name) for r in rules if matches(r, of))
    assert decision.rule == (matching[0][1] if matching else BUILT_IN.name)


@given(of=some_facts, asked=wishes)
def test_without_rules_everybody_gets_what_they_ask_for_or_50(of: Facts, asked: int | None) -> None:
    decision = decide([], of, asked=asked)

    assert decision.score == (50 if asked is None else asked)
    assert not decision.clipped


@given(rules=some_rules, of=some_facts, asked=wishes)
def test_more_rights_meet_every_rule_that_fewer_meet(
    rules: Sequence[Rule], of: Facts, asked: int | None
) -> None:
    more = replace(of, rights=3)

    assert all(matches(r, more) for r in rules if matches(r, of))


# Examples


@pytest.mark.parametrize(
    ("condition", "meets", "misses"),
    [
        ({"trigger": "automatic"}, {"trigger": "automatic"}, {"trigger": "human"}),
        ({"purpose": "launch"}, {"purpose": "launch"}, {"purpose": "guardrail"}),
        ({"min_rights": 2}, {"rights": 3}, {"rights": 1}),
        ({"owner": "ann"}, {"owner": "ann"}, {"owner": "Ann"}),
        ({"rater": "judge"}, {"rater": "judge"}, {"rater": "needs_met"}),
        ({"max_checkpoint_age": WEEK}, {"checkpoint_age": timedelta()}, {"checkpoint_age": WEEK}),
    ],
)
def test_a_condition_picks_its_workflows(
    condition: dict[str, Any], meets: dict[str, Any], misses: dict[str, Any]
) -> None:
    picky = rule(**condition)

    assert matches(picky, facts(**meets))
    assert not matches(picky, facts(**misses))


def test_a_new_checkpoint_launch_goes_before_other_launches() -> None:
    rules = [
        rule("launches", position=20, purpose="launch", default_score=60, ceiling=80),
        rule(
            "new checkpoints", position=10, purpose="launch", max_checkpoint_age=WEEK,
            default_score=80, ceiling=95,
        ),
    ]  # fmt: skip

    new = facts(purpose="launch", checkpoint_age=timedelta(days=1))

    assert decide(rules, new, asked=None).score == 80
    assert decide(rules, replace(new, checkpoint_age=WEEK), asked=None).score == 60
    assert decide(rules, replace(new, purpose="tuning"), asked=None).score == 50


@pytest.mark.parametrize(
    ("asked", "changes", "reason"),
    [
        (90, {}, "priority 90 asked, 60 given: rule 'r' has a ceiling of 60"),
        (60, {}, "priority 60 asked, 60 given: rule 'r' has a ceiling of 60"),
        (None, {}, "no priority asked, 40 given: the default of rule 'r'"),
        (None, {"ceiling": 30}, "no priority asked, 30 given: rule 'r' has a ceiling of 30"),
        (70, {"owner": "bob"}, "priority 70 asked, 70 given: no rule applies"),
        (None, {"owner": "bob"}, "no priority asked, 50 given: no rule applies"),
    ],
)
def test_a_reason_says_what_was_asked_given_and_by_which_rule(
    asked: int | None, changes: dict[str, Any], reason: str
) -> None:
    assert decide([rule(**changes)], facts(), asked=asked).reason == reason


@pytest.mark.parametrize("asked", [-1, 101])
def test_a_wish_outside_the_scale_is_refused(asked: int) -> None:
    with pytest.raises(ValueError, match=f"priority {asked} is outside"):
        decide([], facts(), asked=asked)
