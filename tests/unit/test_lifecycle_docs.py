"""docs/lifecycle.md says what the tables say."""

import re
from collections import defaultdict
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from fulfillment.policy.lifecycle import (
    REQUEST_MOVES,
    WORKFLOW_MOVES,
    Act,
    Refusal,
    RequestState,
    WorkflowState,
    act_upon,
)

S = TypeVar("S", bound=IntEnum)

PAGE = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text()
DIAGRAMS = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)


def drawn(diagram: str, states: type[S]) -> Mapping[S, frozenset[S]]:
    """Return the moves that a diagram draws between states."""
    moves: dict[S, set[S]] = defaultdict(set)
    for before, after in re.findall(r"^\s*(\w+) --> (\w+)", diagram, re.MULTILINE):
        moves[states[before]].add(states[after])
    return {state: frozenset(moves[state]) for state in states}


def test_the_diagram_of_workflows_is_the_table() -> None:
    assert drawn(DIAGRAMS[0], WorkflowState) == WORKFLOW_MOVES


def test_the_diagram_of_requests_is_the_table() -> None:
    assert drawn(DIAGRAMS[1], RequestState) == REQUEST_MOVES


def test_every_state_of_a_workflow_is_explained() -> None:
    explained = re.findall(r"^\| ([A-Z]+) \|", PAGE, re.MULTILINE)

    assert explained == [state.name for state in WorkflowState]


def test_the_table_of_acts_is_what_they_do() -> None:
    table = PAGE[PAGE.index("| act |") :].partition("\n\n")[0]
    header, _, *rows = table.splitlines()
    states = [WorkflowState[name] for name in cells(header)[1:]]

    for act, row in zip(Act, rows, strict=True):
        name, *said = cells(row)
        assert name == act.value
        assert said == [words(act, state) for state in states]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def words(act: Act, state: WorkflowState) -> str:
    target = act_upon(act, state, is_closed=True, round=1)
    if isinstance(target, Refusal):
        return f"`{target.value}`"
    return "same" if target is state else target.name
