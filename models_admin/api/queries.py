"""What the query of an address asks for; what is wrong with it joins the caller's problems."""

import re
from collections.abc import Collection
from typing import Final

from django.http import QueryDict

from models_admin.services.problems import Problem

_WHOLE: Final = re.compile(r"[0-9]{1,7}", re.ASCII)


def unknown(query: QueryDict, known: Collection[str]) -> list[Problem]:
    """Return the parameters that a call does not know."""
    return [
        Problem(field=name, code="unknown_field", detail="is none of this call")
        for name in sorted(set(query) - set(known))
    ]


def whole(name: str, asked: str, low: int, high: int, problems: list[Problem]) -> int:
    """Return a whole number; `low` in place of one that cannot be."""
    if _WHOLE.fullmatch(asked) and low <= int(asked) <= high:
        return int(asked)
    detail = f"a whole number from {low:,} to {high:,}"
    problems.append(Problem(field=name, code="out_of_range", detail=detail))
    return low
