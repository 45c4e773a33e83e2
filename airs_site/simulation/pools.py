"""Other pools for the same work: larger or smaller ones, and many small raters instead of few."""

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

from airs_site.simulation.measures import large
from airs_site.simulation.workload import Evaluation, Params


def scaled(params: Params, factor: float) -> Params:
    """Return the parameters with so many times the replicas, each rater with its share of them."""
    wanted = max(len(params.raters), round(params.replicas * factor))
    counts = _shared([rater.default_replicas for rater in params.raters], wanted)
    return replace(
        params,
        replicas=sum(counts),
        raters=tuple(
            replace(
                rater,
                default_replicas=count,
                min_replicas=min(count, round(rater.min_replicas * factor)),
            )
            for rater, count in zip(params.raters, counts, strict=True)
        ),
    )


def with_small_raters(
    params: Params, evaluations: Sequence[Evaluation], count: int
) -> tuple[Params, Sequence[Evaluation]]:
    """Return the same work with `count` small raters instead of those there are.

    Each of those is split by owners. Together they keep their replicas, of which most then start
    with none: that suits only policies that let raters go to zero.
    """
    shown = large({rater.id: rater.default_replicas for rater in params.raters})
    kept = [rater for rater in params.raters if rater.id in shown]
    split = [rater for rater in params.raters if rater.id not in shown]
    parts = {
        rater.id: count // len(split) + (number < count % len(split))
        for number, rater in enumerate(split)
    }
    replicas = sum(rater.default_replicas for rater in split)
    made = [
        replace(rater, id=_part_of(rater.id, number), default_replicas=0, min_replicas=0)
        # The first of each, then the second of each: so replicas go round.
        for number in range(max(parts.values(), default=0))
        for rater in split
        if number < parts[rater.id]
    ]
    made = [
        replace(rater, default_replicas=_share(replicas, len(made), place))
        for place, rater in enumerate(made)
    ]
    moved = [
        replace(evaluation, rater=_part_of(evaluation.rater, _number(evaluation, parts)))
        if evaluation.rater in parts
        else evaluation
        for evaluation in evaluations
    ]
    return replace(params, raters=tuple(kept + made)), moved


def _shared(shares: Sequence[int], total: int) -> list[int]:
    """Return whole numbers in these proportions, each at least 1, that add up to the total."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [max(1, int(number)) for number in exact]
    by_rest = sorted(range(len(shares)), key=lambda n: (counts[n] - exact[n], n))
    while sum(counts) < total:
        counts[by_rest[0]] += 1
        by_rest.append(by_rest.pop(0))
    while sum(counts) > total:
        counts[max(range(len(counts)), key=lambda n: (counts[n], -n))] -= 1
    return counts


def _share(replicas: int, raters: int, place: int) -> int:
    return replicas // raters + (place < replicas % raters)


def _part_of(rater: str, number: int) -> str:
    return f"{rater}.{number + 1}"


def _number(evaluation: Evaluation, parts: dict[str, int]) -> int:
    return crc32(evaluation.owner.encode()) % parts[evaluation.rater]
