"""The paper's rebalancing: idle replicas go to the raters with the highest utilisation."""

from typing import Final

from airs_site.simulation.engine import Move, World

PERIOD_S: Final = 300.0
BUSY: Final = 0.9
"""Utilisation above which a rater gets replicas."""


class Utilisation:
    """Moves replicas each five minutes, by the busy share of the last five."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._busy_s = [0.0] * len(world.raters)
        world.call_at(PERIOD_S, self._tick)

    def _tick(self) -> None:
        world = self._world
        busy = []
        for rater in range(len(world.raters)):
            until_now = world.busy_until_now(rater)
            busy.append((until_now - self._busy_s[rater]) / PERIOD_S)
            self._busy_s[rater] = until_now
        world.move(self._moves(busy))
        world.call_at(world.now + PERIOD_S, self._tick)

    def _moves(self, busy: list[float]) -> list[Move]:
        """Give each idle replica above a minimum to whoever is then the busiest."""
        pool = self._world.pool
        serving = [pool.allocated(rater) for rater in range(len(busy))]
        idle = [
            max(0, min(pool.ready[n] - pool.running[n], pool.ready[n] - rater.min_replicas))
            for n, rater in enumerate(self._world.raters)
        ]
        moves: list[Move] = []
        while any(idle):
            load = [b / max(1, s) for b, s in zip(busy, serving, strict=True)]
            receiver = max(range(len(load)), key=lambda n: (load[n], -n))
            donor = min((n for n, i in enumerate(idle) if i), key=lambda n: (load[n], n))
            if load[receiver] < BUSY or donor == receiver:
                break
            moves.append(Move(donor=donor, receiver=receiver))
            idle[donor] -= 1
            serving[donor] -= 1
            serving[receiver] += 1
        return moves
