"""Which replica of a model runs what: slots that are wanted, and the ordinals that have them."""

from collections.abc import Iterable, Mapping
from itertools import count

from models_admin.policy.replicas import Replica, ServerState
from models_admin.policy.rollout import Slot

_OVER = frozenset({ServerState.STOPPED, ServerState.DRAINING})
"""States of a replica without a process that nothing comes back from by itself."""


def assign(
    wanted: Mapping[Slot, int],
    replicas: Iterable[Replica],
    counted: Mapping[int, Slot | None] | None = None,
) -> Mapping[int, Slot]:
    """Return which replica has which slot: those that run it already keep it, the first ones first.

    A new run takes the first ordinal without a process, so that the replica it follows can go on
    meanwhile. `counted` says what replicas count as, where that is not what they were launched for.
    """
    known = sorted(replicas, key=lambda replica: replica.ordinal)
    slots = {replica.ordinal: replica.slot for replica in known} if counted is None else counted
    found: dict[int, Slot] = {}
    left = dict(wanted)
    # What runs or pauses before what is stopped.
    for stopped in (False, True):
        for replica in known:
            slot = slots.get(replica.ordinal)
            is_stopped = replica.seen is None and replica.record.state in _OVER
            if slot is None or is_stopped is not stopped or _is_leaving(replica):
                continue
            if left.get(slot, 0) > 0:
                found[replica.ordinal] = slot if replica.seen is None else replica.slot or slot
                left[slot] -= 1
    taken = found.keys() | {replica.ordinal for replica in known if replica.seen is not None}
    free = (ordinal for ordinal in count() if ordinal not in taken)
    for slot in sorted(left):
        for _ in range(left[slot]):
            found[next(free)] = slot
    return found


def _is_leaving(replica: Replica) -> bool:
    return replica.seen is not None and replica.record.state is ServerState.DRAINING
