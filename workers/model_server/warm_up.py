"""Makes a device ready: compiles its shapes, and chooses its figures by a short measurement.

The first start of a model on a machine compiles the table's shapes, measures them with a few others
(`tuning` says which, `measuring` how) and keeps what was chosen beside the compiled shapes; later
starts compile that alone. Where nothing can be chosen, for whatever reason, the table's figures
serve as well.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Protocol

from workers.model_server import tuning
from workers.model_server.kept_figures import KeptFigures
from workers.model_server.measuring import Watch
from workers.model_server.serving import Options, Serving
from workers.model_server.tuning import Machine, Trial

logger = logging.getLogger(__name__)

LIMIT_S: Final = 20.0
"""For all measurements of a start, without what they compile: on a busy machine; else they take
some 13 s for a model of 20 MFLOP a token on two cores, and less for smaller ones."""
_OF_CALLS, _OF_LANES, _OF_SIZES, _OF_DUEL = 0.05, 0.2, 0.2, 0.15
"""Shares of the limit after which a comparison has had rounds enough."""
_WORTH_S: Final = 0.003
"""A full batch that is over sooner costs less than the call that brings its rows."""


class WarmupStopped(Exception):
    """The process was told to end before the model was ready."""


class Shapes(Protocol):
    """A device whose shapes are compiled when asked for."""

    def compile(
        self, stopping: Callable[[], bool], shapes: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Compile shapes that are not yet (None: all that are served)."""

    def run(self, rows: int, step: int) -> None:
        """Run a compiled shape once."""

    def adopt(self, serving: Serving) -> None:
        """Serve with these figures; forget shapes that they do not need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The figures that serve, and why these."""

    serving: Serving
    reason: str
    is_final: bool = True
    """Else the next start looks anew."""

    @property
    def account(self) -> dict[str, Any]:
        """For the log and for `/stats`."""
        return {**self.serving.figures, "reason": self.reason}


def warm_up(
    device: Shapes,
    table: Serving,
    options: Options,
    *,
    kept: KeptFigures | None,
    machine: Machine,
    stopping: Callable[[], bool],
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = perf_counter,
) -> Chosen:
    """Compile every shape that will be served, and return with which figures.

    Without `kept` nothing is measured. Raises WarmupStopped.
    """
    chosen = _without_measuring(table, options, kept)
    if chosen is None:
        assert kept is not None
        with kept.measuring() as alone:
            chosen = (
                _measured(device, table, options, machine, stopping, limit_s, clock)
                if alone
                else Chosen(
                    serving=table,
                    reason="the table's: another server is measuring",
                    is_final=False,
                )
            )
            if chosen.is_final:
                kept.write(chosen.serving, chosen.reason)
    device.adopt(chosen.serving)
    device.compile(stopping)
    logger.info("figures chosen", extra=chosen.account)
    return chosen


def _without_measuring(table: Serving, options: Options, kept: KeptFigures | None) -> Chosen | None:
    if options.tuned == "off":
        return Chosen(serving=table, reason="the table's: tuning is off")
    if kept is None:
        return Chosen(serving=table, reason="the table's: there is no place to keep others")
    if (found := kept.read(table)) is not None:
        serving, reason = found
        return Chosen(serving=serving, reason=f"{reason} (kept from an earlier start)")
    return None


def _measured(
    device: Shapes,
    table: Serving,
    options: Options,
    machine: Machine,
    stopping: Callable[[], bool],
    limit_s: float,
    clock: Callable[[], float],
) -> Chosen:
    device.compile(stopping)
    step = table.shaping.steps[-1]
    full_s = min(_seconds(device, table.shaping.rows(step), step, clock) for _ in range(3))
    if full_s < _WORTH_S:
        return Chosen(
            serving=table, reason=f"the table's: a full batch takes {1e3 * full_s:.1f} ms"
        )
    return _Tuner(device, stopping, limit_s=limit_s, clock=clock).choose(table, options, machine)


def _seconds(device: Shapes, rows: int, step: int, clock: Callable[[], float]) -> float:
    began_at = clock()
    device.run(rows, step)
    return clock() - began_at


class _Tuner:
    """Compiles what is to be tried, measures it, asks the policy."""

    def __init__(
        self,
        device: Shapes,
        stopping: Callable[[], bool],
        *,
        limit_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._device = device
        self._stopping = stopping
        self._limit_s = limit_s
        self._watch = Watch(device, clock=clock, limit_s=limit_s, interrupted=self._interrupted)

    def choose(self, table: Serving, options: Options, machine: Machine) -> Chosen:
        calls = self._watch.fastest(tuning.call_trials(table), limit_s=_OF_CALLS * self._limit_s)
        fixed = None if calls is None else tuning.call_tokens(calls)
        if fixed is None:
            return Chosen(
                serving=table,
                reason="the table's: too slow to measure others in time",
                is_final=False,
            )
        found = self._better(table, tuning.other_lanes(table, options, machine), _OF_LANES)
        found = self._better(found, tuning.other_sizes(found, options), _OF_SIZES)
        gain = None if found == table else self._duel(table, found)
        reason = f"a call costs {fixed} tokens"
        if gain is None or gain < tuning.GAIN:
            return Chosen(
                serving=tuning.refined(table, fixed),
                reason=f"{reason}; no other lanes or batches are faster than the table's",
            )
        return Chosen(
            serving=tuning.refined(found, fixed),
            reason=f"{reason}; full batches are {gain:.2f} times as fast as the table's",
        )

    def _duel(self, table: Serving, found: Serving) -> float | None:
        return self._watch.duel(
            tuning.trials(table), tuning.trials(found), limit_s=_OF_DUEL * self._limit_s
        )

    def _better(self, serving: Serving, rivals: Sequence[Serving], share: float) -> Serving:
        trials = [trial for each in (serving, *rivals) for trial in tuning.trials(each)]
        if not rivals or not self._compiled(trials):
            return serving
        seconds = self._watch.fastest(trials, limit_s=share * self._limit_s)
        return serving if seconds is None else tuning.better(serving, rivals, seconds)

    def _compiled(self, trials: Iterable[Trial]) -> bool:
        """Whether all could be: a batch of twice the tokens may be more than the memory holds."""
        try:
            self._device.compile(self._stopping, sorted({(t.rows, t.step) for t in trials}))
        except WarmupStopped:
            raise
        except Exception as error:
            logger.warning("shapes not tried", extra={"error": repr(error)})
            return False
        return True

    def _interrupted(self) -> None:
        if self._stopping():
            raise WarmupStopped
