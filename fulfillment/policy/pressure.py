"""Deadlines that press: whose work must go now if all that was promised is to be there in time.

Serving the smallest first gets most workflows done, but it leaves the large ones for the end, and
then the end is too late. A deadline presses once what is due by it takes nearly all the time that
is left; what is due by the first such deadline then goes before the rest. Nearly: the slack that
is left over is what small newcomers and the floors of other classes are served from meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

PRESSED: Final = 0.9
"""Share of the time that is left from which a deadline presses."""
_SHORTEST_S: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Open requests of a workflow, dear ones counted for more."""

    workflow_id: int
    requests: float
    deadline_at: datetime


def pressed(
    dues: Sequence[Due], above: Sequence[Due], *, requests_per_s: float, now: datetime
) -> frozenset[int]:
    """Return which workflows are due by the first deadline that presses; none if none does.

    `above` is what goes before: work of higher classes that is due by then takes its time first.
    """
    if requests_per_s <= 0:
        return frozenset()
    own = {due.workflow_id for due in dues}
    met: list[int] = []
    work = 0.0
    for due in sorted((*dues, *above), key=lambda due: (due.deadline_at, due.workflow_id)):
        work += due.requests
        if due.workflow_id in own:
            met.append(due.workflow_id)
            left_s = max(_SHORTEST_S, (due.deadline_at - now).total_seconds())
            if work > PRESSED * requests_per_s * left_s:
                return frozenset(met)
    return frozenset()
