"""Traffic rules in the dispatcher: a rater's room is filled with what they let leave.

The counting is in `policy.limits`; here is what it must know of a pass. Where no rule holds for a
rater version nothing of this is asked.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from fulfillment.held import Held
from fulfillment.model_directory import Limited, ModelDirectory
from fulfillment.policy import limits, lines, ordering
from fulfillment.policy.priority import PriorityClass
from fulfillment.ready import VersionLoad
from fulfillment.windows import Room


def rules(directory: ModelDirectory, now: datetime) -> Sequence[limits.Rule]:
    """Return the rules that hold, of a directory that has some."""
    return directory.limits(now) if isinstance(directory, Limited) else ()


def gate(room: Room, held: Held) -> limits.Gate:
    """Return what rules leave of a room now.

    Shares are of its replicas alone: what is out to those of another version of the model takes
    nothing of them.
    """
    keys = [replica.key for replica in room.replicas]
    return limits.Gate(
        held.rules,
        window=room.window,
        held=room.held,
        of_model=[
            0 if rule.max_share is None else held.of_rule(number, keys)
            for number, rule in enumerate(held.rules)
        ],
        in_all=[held.of_rule(number) for number in range(len(held.rules))],
    )


def may_leave(
    version: VersionLoad, room: Room, held: Held, taken: Mapping[int, int]
) -> dict[PriorityClass, int]:
    """Return how many of a version's READY batches rules let leave, by class."""
    return gate(room, held).may_leave(version.left_of_kinds(taken))


def fill(
    version: VersionLoad,
    order: lines.Order,
    gate: limits.Gate | None,
    *,
    room: int,
    memory: ordering.Memory,
    taken: Mapping[int, int],
) -> ordering.Decision:
    """Fill the room from the classes of an order, with what rules let leave where there are any.

    Each time that a rule is closed by what was picked, the rest is filled without its traffic.
    """
    if gate is None:
        return ordering.fill(order, room=room, memory=memory, taken=taken)
    picked: Counter[int] = Counter()
    gone = Counter(taken)
    while True:
        open_lines = {c: line for c, line in version.without(gate.closed).items() if c in order}
        decision = ordering.fill(
            open_lines,
            room=room - picked.total(),
            memory=memory,
            taken=gone,
            stop=lambda workflow_id: gate.take(version.matched(workflow_id)),
        )
        if not decision.picks:
            break
        memory = _in_line(order, open_lines, memory, decision.memory)
        for pick in decision.picks:
            picked[pick.workflow_id] += pick.batches
            gone[pick.workflow_id] += pick.batches
    picks = tuple(ordering.Pick(workflow_id=w, batches=n) for w, n in picked.items())
    return replace(decision, picks=picks, memory=memory)


def _in_line(
    order: lines.Order, served: lines.Order, before: ordering.Memory, after: ordering.Memory
) -> ordering.Memory:
    """Let owners that are held back keep their turn: they were served longest ago."""
    queues = dict(after.queues)
    for cls, line in order.items():
        there = served[cls].owner_ready if cls in served else {}
        back = [o for o in before.queues.get(cls, ()) if o in line.owner_ready and o not in there]
        if back:
            queues[cls] = (*back, *queues.get(cls, ()))
    return replace(after, queues=queues)
