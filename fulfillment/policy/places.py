"""Places: what each rater of a model gets of the room of the replicas that all of them share.

Classes come first, as within a rater (`ordering`): the highest that waits is served, whoever's it
is, and those below have their credit. Of the raters that have work of that class READY, the one
that holds fewest batches gets the place. So a rater that fills the replicas gives way as its
batches end, and urgent work of one waits for nothing below it of another but what floors let
through.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from fulfillment.policy import ordering
from fulfillment.policy.priority import PriorityClass

Credits = Mapping[PriorityClass, float]
"""What the classes of a model have gained; empty at start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A rater that has something READY, in batches."""

    ready: Mapping[PriorityClass, int]
    most: int
    """That it may get, of all classes."""
    held: int
    """That are out."""


def share(
    contenders: Mapping[int, Contender], room: Mapping[PriorityClass, int], credits: Credits
) -> tuple[Mapping[int, int], Credits]:
    """Return how many batches each may send, and the credits after that.

    `room` is how many batches there may be in all until a class finds no place any more. No place
    stays free while one may take it; among equals the first is served.
    """
    given = dict.fromkeys(contenders, 0)
    left = dict(credits)
    lines = {cls: line for cls in room if (line := _Line(cls, contenders, given)).next()}
    for total in range(max(room.values(), default=0)):
        waiting = [cls for cls, line in lines.items() if total < room[cls] and line.next()]
        if not waiting:
            break
        cls, _ = ordering.next_class(waiting, left)
        lines[cls].serve()
    return given, left


class _Line:
    """The raters that have something READY of a class, the one that holds fewest first."""

    def __init__(
        self, cls: PriorityClass, contenders: Mapping[int, Contender], given: dict[int, int]
    ) -> None:
        self._contenders = contenders
        self._given = given
        """To all classes, by rater."""
        self._left = {key: each.ready.get(cls, 0) for key, each in contenders.items()}
        self._heap = [
            (each.held, place, key)
            for place, (key, each) in enumerate(contenders.items())
            if self._left[key] > 0
        ]
        heapq.heapify(self._heap)

    def next(self) -> bool:
        """Bring to the front whose turn it is; say whether there is anybody."""
        while self._heap:
            known, place, key = self._heap[0]
            rater, given = self._contenders[key], self._given[key]
            if not self._left[key] or given >= rater.most:
                heapq.heappop(self._heap)
            elif rater.held + given > known:
                # It was served in another class.
                heapq.heapreplace(self._heap, (rater.held + given, place, key))
            else:
                return True
        return False

    def serve(self) -> None:
        """Give a place to whose turn it is."""
        key = self._heap[0][2]
        self._given[key] += 1
        self._left[key] -= 1
