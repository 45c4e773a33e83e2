"""Which priority a workflow gets: what its client asks for, clipped to the ceiling of one rule.

Of the rules that match a workflow the one with the lowest position decides, alone: ceilings do not
add up, and no order in which rules were stored matters. Where none matches, the built-in rule does,
which clips nothing. `best_effort` is a class of its own below all scores and no rule's business.

A *new-checkpoint launch* is a workflow of purpose `launch` whose rater came to its model checkpoint
a short while ago: a rule with `purpose="launch"` and a `max_checkpoint_age`. Its archive is empty
yet, so that all of it is work for the model, and people wait for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from fulfillment.policy.priority import DEFAULT_SCORE, check_score


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What workflows that meet all its conditions get; None is no condition."""

    name: str
    position: int
    default_score: int
    ceiling: int
    trigger: str | None = None
    purpose: str | None = None
    min_rights: int = 0
    """Rank of the requester's role, 0 for the lowest: it holds for higher ones as well."""
    owner: str | None = None
    rater: str | None = None
    max_checkpoint_age: timedelta | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What rules ask of a workflow and of who wants its priority."""

    trigger: str
    purpose: str
    rights: int
    """Rank of the requester's role: of the owner at first, later of who changes the priority."""
    owner: str
    rater: str
    checkpoint_age: timedelta
    """Since the rater was first used with the checkpoint that the workflow is pinned to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The priority given."""

    score: int
    asked: int | None
    ceiling: int
    rule: str
    """Name of the rule that decided; empty for the built-in one."""
    reason: str

    @property
    def clipped(self) -> bool:
        """Whether the client asked for more than it got."""
        return self.asked is not None and self.score < self.asked


BUILT_IN = Rule(name="", position=0, default_score=DEFAULT_SCORE, ceiling=100)
"""Decides where no rule matches."""


def decide(rules: Iterable[Rule], facts: Facts, *, asked: int | None) -> Decision:
    """Return the priority (0-100) of a workflow whose client asked for one, or for none."""
    if asked is not None:
        check_score(asked)
    matching = (rule for rule in rules if matches(rule, facts))
    rule = min(matching, key=lambda rule: (rule.position, rule.name), default=BUILT_IN)
    score = min(rule.default_score if asked is None else asked, rule.ceiling)
    return Decision(
        score=score,
        asked=asked,
        ceiling=rule.ceiling,
        rule=rule.name,
        reason=_reason(rule, asked, score),
    )


def matches(rule: Rule, facts: Facts) -> bool:
    """Say whether a workflow meets all conditions of a rule."""
    return (
        rule.trigger in (None, facts.trigger)
        and rule.purpose in (None, facts.purpose)
        and rule.min_rights <= facts.rights
        and rule.owner in (None, facts.owner)
        and rule.rater in (None, facts.rater)
        and (rule.max_checkpoint_age is None or facts.checkpoint_age < rule.max_checkpoint_age)
    )


def _reason(rule: Rule, asked: int | None, score: int) -> str:
    wish = "no priority" if asked is None else f"priority {asked}"
    given = f"{wish} asked, {score} given"
    if rule is BUILT_IN:
        return f"{given}: no rule applies"
    if asked is None and score == rule.default_score:
        return f"{given}: the default of rule '{rule.name}'"
    return f"{given}: rule '{rule.name}' has a ceiling of {rule.ceiling}"
