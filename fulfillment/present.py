"""The room of raters as it is now, for people: as the dispatcher would find it, read anew.

What only the leader knows (which replicas rest, what of a `max_qps` is used up) is not in it.
"""

from collections.abc import Sequence
from datetime import datetime

from fulfillment import regulation, windows
from fulfillment.held import Held
from fulfillment.model_directory import LastKnown, ModelDirectory, model_directory, serves
from fulfillment.models import Mode, Rater, RaterVersion, Workflow
from fulfillment.policy import limits
from fulfillment.policy.priority import PriorityClass, priority_class
from fulfillment.windows import Room


class Present:
    """One moment: replicas, windows, what is out, and the traffic rules that hold."""

    def __init__(
        self, now: datetime, rules: Sequence[limits.Rule], directory: ModelDirectory
    ) -> None:
        self.held = Held()
        self.held.regulate(rules)
        self.held.look(now)
        self.windows = windows.recall(now)
        self.replicas = directory.replicas(now)
        self.now = now

    def room(self, rater: Rater, version: RaterVersion, batch_size: int) -> Room:
        """Return the room of the replicas that serve a version of a rater."""
        model_id, model_version = version.spec["model_id"], version.spec["model_version"]
        return Room(
            version_id=version.pk,
            replicas=[
                replica
                for replica in self.replicas
                if replica.model_id == model_id and serves(replica, model_version)
            ],
            batch_size=batch_size,
            isolated=rater.mode == Mode.ISOLATED,
            held=self.held,
            windows=self.windows,
            now=self.now,
        )

    def closed(self, room: Room, met: limits.Matched) -> list[limits.Rule]:
        """Return the rules of these that let nothing more leave into a room."""
        gate = regulation.gate(room, self.held)
        return [self.held.rules[number] for number in met if number in gate.closed]

    def may_leave(
        self, room: Room, met: limits.Matched, batches: int
    ) -> tuple[int, list[limits.Rule]]:
        """Return how many of so many batches rules let leave, and which of these let fewer."""
        gate = regulation.gate(room, self.held)
        left = {number: more for number in met if (more := gate.left(number)) is not None}
        fewer = sorted((more, number) for number, more in left.items() if more < batches)
        rules = [self.held.rules[number] for _, number in fewer]
        return min([batches, *left.values()]), rules


def rules(now: datetime) -> tuple[Sequence[limits.Rule], ModelDirectory]:
    """Return the traffic rules that hold, and who told them.

    None are known while model management is away, which stops nobody from looking at workflows.
    """
    directory = LastKnown(model_directory())
    return regulation.rules(directory, now), directory


def traffic(workflow: Workflow, cls: PriorityClass | None = None) -> limits.Traffic:
    """Return what rules ask of a workflow, whose rater version is read."""
    own = priority_class(workflow.priority, best_effort=workflow.best_effort)
    return limits.Traffic(
        rater=workflow.rater_id,
        model=workflow.rater_version.spec["model_id"],
        priority_class=(own if cls is None else cls).name.lower(),
        trigger=workflow.trigger,
        purpose=workflow.purpose,
        owner=workflow.owner,
        workflow=workflow.public_id,
    )
