"""The paper's rebalancing: idle replicas go to the raters with the highest utilisation."""

from itertools import cycle
from typing import Final

from airs_site.simulation.engine import Move, World

PERIOD_S: Final = 300.0
BUSY: Final = 0.7
"""Utilisation from which a rater gets replicas and gives none. It is below what polling and owners'
caps leave of a rater that has more to do than it can; from 0.5 to 0.75 the figures are the same."""


class Utilisation:
    """Moves replicas each five minutes, by the busy share of the last five."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._busy_s = [0.0] * len(world.raters)
        world.call_at(PERIOD_S, self._tick)

    def _tick(self) -> None:
        world = self._world
        load = []
        for rater in range(len(world.raters)):
            until_now = world.busy_until_now(rater)
            busy = (until_now - self._busy_s[rater]) / PERIOD_S
            load.append(busy / max(1, world.pool.allocated(rater)))
            self._busy_s[rater] = until_now
        world.move(self._moves(load))
        world.call_at(world.now + PERIOD_S, self._tick)

    def _moves(self, load: list[float]) -> list[Move]:
        """Deal out what raters that are not busy have idle to those that are, busiest first."""
        busy = sorted((n for n, share in enumerate(load) if share >= BUSY), key=lambda n: -load[n])
        if not busy:
            return []
        receivers = cycle(busy)
        return [
            Move(donor=number, receiver=next(receivers))
            for number, share in enumerate(load)
            if share < BUSY
            for _ in range(self._idle(number))
        ]

    def _idle(self, rater: int) -> int:
        """Return how many replicas a rater has idle, without its minimum."""
        pool = self._world.pool
        ready = pool.ready[rater]
        return max(
            0, min(ready - pool.running[rater], ready - self._world.raters[rater].min_replicas)
        )
