"""Who can be sent to now, who will be soon, and what that means for each rater version."""

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime

from fulfillment.held import Held
from fulfillment.model_directory import Arrivals, ModelDirectory, Replica, serves
from fulfillment.policy import costs
from fulfillment.ready import VersionLoad
from fulfillment.windows import Room, Windows, reason_to_adapt


class Fleet:
    """The replicas of all models at one moment, those left out that rest."""

    def __init__(
        self, directory: ModelDirectory, *, resting: Collection[str], held: Held, now: datetime
    ) -> None:
        self._held = held
        self._now = now
        self._live: dict[str, list[Replica]] = defaultdict(list)
        self._open: set[str] = set()
        """Models of which some replica is not full, or has a window that is adapted."""
        for replica in directory.replicas(now):
            if replica.key in resting:
                continue
            self._live[replica.model_id].append(replica)
            is_full = sum(held.calls(replica.key).values()) >= replica.window
            if not is_full or reason_to_adapt(replica, isolated=False, now=now):
                self._open.add(replica.model_id)
        self._coming: dict[str, list[str]] = defaultdict(list)
        if isinstance(directory, Arrivals):
            for model_id, version in directory.coming(now):
                self._coming[model_id].append(version)

    def may_take(self, version: VersionLoad) -> bool:
        """Say whether there may be room for a rater version; how much, its room says."""
        return version.model_id in self._open or version.isolated

    def room(self, version: VersionLoad, windows: Windows) -> Room:
        """Return the room of the replicas that serve a rater version."""
        live = self._live.get(version.model_id, ())
        return Room(
            version_id=version.version_id,
            replicas=[replica for replica in live if serves(replica, version.model_version)],
            batch_size=version.batch_size,
            isolated=version.isolated,
            held=self._held,
            windows=windows,
            now=self._now,
            matched=version.matched,
        )

    def requests_per_s(self, version: VersionLoad, room: Room) -> float | None:
        """Return what a rater version can do, None where that is not known.

        What presses and who takes too much is reckoned with it. A replica that the rater might get
        by rebalancing works nothing off, and is not counted; one that starts is: it will be there
        for nearly all of the time until a deadline, and for the minutes that it takes to start all
        deadlines would seem to press.
        """
        servers = room.servers + self._on_their_way(version)
        if version.seconds_a_request is None or not servers:
            return None
        return servers / costs.paced(
            version.seconds_a_request,
            servers=servers,
            calls_a_request=room.calls_a_batch / version.batch_size,
            max_qps=version.max_qps,
        )

    def _on_their_way(self, version: VersionLoad) -> int:
        known = {"", version.model_version}
        return sum(
            not version.model_version or each in known
            for each in self._coming.get(version.model_id, ())
        )
