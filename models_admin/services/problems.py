"""Problems: what is wrong with which field, and refusing them."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models_admin.errors import InvalidFields

ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One reason why a field cannot work."""

    field: str
    code: str
    detail: str


def refuse(problems: Sequence[Problem]) -> None:
    """Raise InvalidFields if there is a problem."""
    if problems:
        names = ", ".join(sorted({problem.field for problem in problems}))
        raise InvalidFields(
            f"Cannot work with {names}; see `errors`.",
            # A lone problem lends its code to the answer, so that clients need not look deeper.
            code=problems[0].code if len(problems) == 1 else None,
            errors=[dataclasses.asdict(problem) for problem in problems],
        )


def bad_id(field: str) -> Problem:
    """What an id may be."""
    return Problem(field=field, code="bad_id", detail="1 to 64 letters, digits, - and _")


def out_of_range(field: str, low: float, high: float) -> Problem:
    """Say between what a number must lie."""
    return Problem(field=field, code="out_of_range", detail=f"from {low:g} to {high:g}")


def one_of(values: Sequence[str]) -> str:
    """Say what there is to choose from."""
    return f"one of {', '.join(values)}"
