"""The room of a model that several rater versions send to: who gets how much, in which order.

The policy is `policy.places`; here is what it must know of a pass, and what follows from it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

from fulfillment.held import Held
from fulfillment.policy import places
from fulfillment.policy.priority import PriorityClass
from fulfillment.ready import VersionLoad
from fulfillment.windows import Room


def share(
    able: Sequence[VersionLoad],
    slots: Mapping[int, int],
    rooms: Mapping[int, Room],
    *,
    ready: Callable[[VersionLoad], Mapping[PriorityClass, int]],
    held: Held,
    credits: MutableMapping[str, places.Credits],
) -> dict[int, int]:
    """Return the batches that each version may send of those that share a model with others.

    `slots` is what each may send at most, `ready` says what is READY of a version by class.
    `credits`, by model, are changed.
    """
    by_model: dict[str, list[VersionLoad]] = defaultdict(list)
    for version in able:
        by_model[version.model_id].append(version)
    shares: dict[int, int] = {}
    for model_id, versions in by_model.items():
        if len(versions) == 1:
            continue
        contenders = {
            version.version_id: places.Contender(
                ready=ready(version),
                most=slots[version.version_id],
                held=held.of(version.version_id),
            )
            for version in versions
        }
        room = {
            cls: max(rooms[version.version_id].batches(cls) for version in versions)
            for cls in PriorityClass
        }
        given, credits[model_id] = places.share(contenders, room, credits.get(model_id, {}))
        shares |= given
    return shares


def turns(
    able: Sequence[VersionLoad], shares: Mapping[int, int], left: Mapping[int, int]
) -> Iterator[tuple[VersionLoad, int]]:
    """Yield who may send how much now; `left` is what each has left of its slots by then."""
    most = {**left, **shares}
    # Whoever gets more than others comes last, and so stands behind them in the next pass.
    for version in sorted(able, key=lambda version: most[version.version_id]):
        if most[version.version_id]:
            yield version, most[version.version_id]
    # What one left of its share, or what only some of them can have, others may.
    for version in able:
        if version.version_id in shares and left[version.version_id]:
            yield version, left[version.version_id]
