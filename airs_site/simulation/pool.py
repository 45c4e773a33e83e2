"""The pool of replicas: which rater each serves, what it holds, and how it is moved.

A replica computes one batch at a time and holds up to `window`, the one it computes included; it
takes the highest class first. A moved one drains, never drops its batches, and starts anew for the
rater that gets it.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from airs_site.simulation.work import Batch


class State(IntEnum):
    """Where a replica stands."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    GONE = 3


@dataclass(slots=True, eq=False)
class Replica:
    """One replica."""

    number: int
    rater: int
    state: State
    running: Batch | None = None
    queue: list[tuple[int, int, Batch]] = field(default_factory=list)
    next_rater: int = -1
    """Whom it serves once it has drained."""
    epoch: int = 0
    """Rises whenever what was planned for it no longer holds."""

    @property
    def held(self) -> int:
        """Batches it computes or has queued."""
        return len(self.queue) + (self.running is not None)


class Pool:
    """All replicas; counts a rater are kept, so that no question costs a walk over them."""

    def __init__(self, allocation: Sequence[int], *, window: int) -> None:
        self.window = window
        self.replicas: list[Replica] = []
        raters = len(allocation)
        self.ready = [0] * raters
        self.coming = [0] * raters
        """Replicas that start or drain for a rater."""
        self.held = [0] * raters
        """On all replicas that serve a rater, draining ones included."""
        self.running = [0] * raters
        self.room = [0] * raters
        self._serving: list[list[dict[int, Replica]]] = [
            [{} for _ in range(window + 1)] for _ in range(raters)
        ]
        """By rater and by what they hold, those that hold that the longest first."""
        for rater, count in enumerate(allocation):
            for _ in range(count):
                replica = Replica(number=len(self.replicas), rater=rater, state=State.STARTING)
                self.replicas.append(replica)
                self.coming[rater] += 1
                self.start(replica)

    def start(self, replica: Replica) -> None:
        """Let a starting replica serve."""
        replica.state = State.READY
        self.coming[replica.rater] -= 1
        self.ready[replica.rater] += 1
        self.room[replica.rater] += self.window
        self._list(replica)

    def allocated(self, rater: int) -> int:
        """Return how many replicas serve the rater or will."""
        return self.ready[rater] + self.coming[rater]

    @property
    def size(self) -> int:
        """Replicas that serve, start or drain."""
        return sum(self.ready) + sum(self.coming)

    def serving(self, rater: int) -> Iterator[Replica]:
        """Return the replicas that take a rater's batches."""
        for replicas in self._serving[rater]:
            yield from replicas.values()

    def put(self, batch: Batch, to: Replica | None = None) -> Replica:
        """Hand a batch to a replica of its rater, else to one that holds fewest; it must have room.

        Of several it is the one that has held so many for longest.
        """
        rater = batch.job.rater
        replica = to or next(iter(next(filter(None, self._serving[rater])).values()))
        self._drop(replica)
        heapq.heappush(replica.queue, (batch.rank, batch.number, batch))
        self._list(replica)
        self.room[rater] -= 1
        self.held[rater] += 1
        return replica

    def take_up(self, replica: Replica) -> Batch | None:
        """Let a replica that computes nothing begin its next batch; None if it holds none."""
        if not replica.queue:
            return None
        batch = heapq.heappop(replica.queue)[2]
        replica.running = batch
        self.running[replica.rater] += 1
        return batch

    def end(self, replica: Replica) -> Batch:
        """Take the computed batch off a replica."""
        batch = replica.running
        assert batch is not None
        serves = replica.state is State.READY
        if serves:
            self._drop(replica)
        replica.running = None
        self.running[replica.rater] -= 1
        self.held[replica.rater] -= 1
        if serves:
            self.room[replica.rater] += 1
            self._list(replica)
        return batch

    def drain(self, rater: int, receiver: int) -> Replica | None:
        """Take a replica that holds fewest from a rater, name its next; None if none serves."""
        replica = next((r for held in self._serving[rater] for r in held.values()), None)
        if replica is None:
            return None
        self._withdraw(replica, State.DRAINING)
        replica.next_rater = receiver
        self.coming[receiver] += 1
        return replica

    def hand_over(self, replica: Replica) -> None:
        """Let a drained replica start for its next rater."""
        replica.rater = replica.next_rater
        replica.next_rater = -1
        replica.state = State.STARTING

    def lose(self, replica: Replica) -> list[Batch]:
        """Let a replica vanish; returns what it held."""
        lost = [entry[2] for entry in sorted(replica.queue)]
        if replica.state is State.READY:
            self._withdraw(replica, State.GONE)
        else:
            self.coming[replica.next_rater if replica.next_rater >= 0 else replica.rater] -= 1
            replica.state = State.GONE
        self.held[replica.rater] -= replica.held
        if replica.running is not None:
            self.running[replica.rater] -= 1
            lost.insert(0, replica.running)
            replica.running = None
        replica.queue.clear()
        replica.epoch += 1
        return lost

    def bring_back(self, replica: Replica, rater: int) -> None:
        """Let a vanished replica start for a rater."""
        replica.rater = rater
        replica.next_rater = -1
        replica.state = State.STARTING
        self.coming[rater] += 1

    def _withdraw(self, replica: Replica, state: State) -> None:
        self._drop(replica)
        self.ready[replica.rater] -= 1
        self.room[replica.rater] -= self.window - replica.held
        replica.state = state

    def _list(self, replica: Replica) -> None:
        self._serving[replica.rater][replica.held][replica.number] = replica

    def _drop(self, replica: Replica) -> None:
        del self._serving[replica.rater][replica.held][replica.number]
