"""Pure policy of the warm-up: which figures of serving pay on this device, from measured seconds.

The table (`serving.SERVING`) was measured on one machine. Here its figures compete with others near
them, step by step: lanes, then tokens of a batch, each by the rate of full batches (`better`); then
the fixed cost of a call (`call_tokens`), from which follow how far less urgent sequences fill a
batch and which row counts are worth compiling (`refined`). The table stays unless another is faster
by `GAIN`: noise is no reason to leave what is known to work.

Nothing here can change a score beyond float rounding, so none of it is part of the version.

Weakness: lengths are weighed alike, as nobody knows at warm-up what texts will come; and a fixed
cost is fitted as if a call's time grew in a straight line with its tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import isqrt, prod
from statistics import mean, median
from typing import Final

from workers.model_server.scheduler import cover
from workers.model_server.serving import Options, Serving

GAIN: Final = 1.05
"""What another figure has to bring, as a ratio of rates."""
ALIKE: Final = 0.98
"""Of settings this near to the best the one with the least on the device wins: whoever is urgent
waits for what computes."""
LONGEST_BATCH_S: Final = 0.5
"""A full batch must not take longer, unless the table's own does."""
FILL: Final = 0.9
"""Share of a full batch's rate up to which less urgent sequences join."""
LANES: Final = (1, 2, 3, 4, 8)
MOST_LANES_OF_A_DEVICE: Final = 3
_SIZES: Final = 32
"""Sizes of a batch that are looked at, of those up to the full one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where it runs."""

    platform: str
    cores: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Calls of one compiled shape, `lanes` of them at a time."""

    rows: int
    step: int
    lanes: int


Seconds = Mapping[Trial, float]
"""Wall seconds of a call while the other lanes compute the same."""


def probes(serving: Serving) -> tuple[int, ...]:
    """Return the steps that are measured, a short and a long one: all would take too long."""
    steps = serving.shaping.steps
    return tuple(sorted({steps[len(steps) // 4], steps[3 * len(steps) // 4]}))


def trials(serving: Serving) -> tuple[Trial, ...]:
    """Return what tells how fast full batches are."""
    return tuple(
        Trial(rows=serving.shaping.rows(step), step=step, lanes=serving.lanes)
        for step in probes(serving)
    )


def call_trials(serving: Serving) -> tuple[Trial, ...]:
    """Return what tells what a call costs beside its tokens."""
    return tuple(
        Trial(rows=rows, step=step, lanes=serving.lanes)
        for step in probes(serving)
        for rows in serving.counts(step)
    )


def other_lanes(serving: Serving, options: Options, machine: Machine) -> list[Serving]:
    """Return the same with other numbers of lanes; on a CPU the lanes share its cores."""
    if options.lanes is not None:
        return []
    most = machine.cores + 1 if machine.platform == "cpu" else MOST_LANES_OF_A_DEVICE
    return [
        replace(serving, lanes=lanes) for lanes in LANES if lanes <= most and lanes != serving.lanes
    ]


def other_sizes(serving: Serving, options: Options) -> list[Serving]:
    """Return the same with batches of half and of twice the tokens, where that makes others."""
    if options.batch_tokens is not None:
        return []
    shaping = serving.shaping
    resized = [
        replace(
            serving,
            shaping=replace(
                shaping, batch_tokens=tokens, fill_tokens=min(tokens, shaping.fill_tokens)
            ),
        )
        for tokens in (shaping.batch_tokens // 2, 2 * shaping.batch_tokens)
        if tokens >= shaping.steps[-1]
    ]
    return [rival for rival in resized if trials(rival) != trials(serving)]


def rate(serving: Serving, seconds: Seconds) -> float | None:
    """Return the geometric mean, over the probes, of tokens a second; None if one is unmeasured."""
    wanted = trials(serving)
    if any(trial not in seconds for trial in wanted):
        return None
    rates = [trial.lanes * trial.rows * trial.step / seconds[trial] for trial in wanted]
    return float(prod(rates) ** (1 / len(rates)))


def better(serving: Serving, rivals: Iterable[Serving], seconds: Seconds) -> Serving:
    """Return the rival that pays, or `serving`."""
    base = rate(serving, seconds)
    if base is None:
        return serving
    longest_s = max(LONGEST_BATCH_S, *(seconds[trial] for trial in trials(serving)))
    gains = {
        rival: found / base
        for rival in rivals
        if (found := rate(rival, seconds)) is not None
        and max(seconds[trial] for trial in trials(rival)) <= longest_s
    }
    most = max(gains.values(), default=1.0)
    worth = [rival for rival, gain in gains.items() if gain >= max(GAIN, ALIKE * most)]
    return min(worth, key=_on_the_device, default=serving)


def call_tokens(seconds: Seconds) -> int | None:
    """Return the fixed cost of a call in tokens; None if no step was measured with two sizes.

    Medians of slopes, not least squares: one disturbed measurement must not decide.
    """
    found = []
    for step in {trial.step for trial in seconds}:
        points = sorted((t.rows * step, s) for t, s in seconds.items() if t.step == step)
        slopes = [(s2 - s1) / (t2 - t1) for (t1, s1), (t2, s2) in combinations(points, 2)]
        if slopes and (slope := median(slopes)) > 0:
            found.append(median(s - slope * t for t, s in points) / slope)
    return max(0, round(median(found))) if found else None


def refined(serving: Serving, fixed_tokens: int) -> Serving:
    """Return the same with what the fixed cost of a call, in tokens of a device, makes better."""
    measured = replace(serving, call_tokens=fixed_tokens)
    finer = replace(measured, row_counts=_finer(serving.row_counts))
    chosen = serving
    for rival in (measured, finer):
        if _cost(chosen, fixed_tokens) >= GAIN * _cost(rival, fixed_tokens):
            chosen = rival
    batch, fill = serving.shaping.batch_tokens, serving.shaping.fill_tokens
    wished = FILL * _share(batch, fixed_tokens)
    if abs(_share(fill, fixed_tokens) / wished - 1) >= GAIN - 1:
        fill = min(batch, max(1, round(fixed_tokens * wished / (1 - wished))))
    return replace(chosen, shaping=replace(serving.shaping, fill_tokens=fill))


def _on_the_device(serving: Serving) -> int:
    return serving.lanes * serving.shaping.batch_tokens


def _share(tokens: int, fixed_tokens: int) -> float:
    """Of the highest rate, what calls of so many tokens have."""
    return tokens / (tokens + fixed_tokens)


def _cost(serving: Serving, fixed_tokens: int) -> float:
    """Return tokens' worth of time a token; half of the work is full batches, half of any size."""
    costs = []
    for step in probes(serving):
        a_device = tuple(n // serving.shaping.devices for n in serving.counts(step))
        full = a_device[-1]
        for rows in range(1, full + 1, max(1, full // _SIZES)):
            calls = cover(rows, counts=a_device, step=step, call_tokens=serving.call_tokens)
            costs.append(sum(fixed_tokens + n * step for n in calls) / (rows * step))
            costs.append(1 + fixed_tokens / (full * step))
    return mean(costs)


def _finer(counts: Sequence[int]) -> tuple[int, ...]:
    """Return row counts with one more between each two."""
    between = {isqrt(low * high) for low, high in pairwise(counts)}
    return tuple(sorted({*counts, *between}))
