"""Measures compiled shapes for the warm-up, within a limit of time, beside whatever else runs.

All trials of a comparison are made in turns, round by round, and each is worth its fastest round:
what others do on the machine only ever adds. A winner then meets the loser again, in turns, and has
to win at the median (`duel`): the fastest of many is flattered by chance.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Final, Protocol, TypeVar

from workers.model_server.tuning import Trial

LEAST_ROUNDS: Final = 3
MOST_ROUNDS: Final = 10
_LEAST_S: Final = 0.02
"""A shorter measurement is repeated until it is this long: starting the threads takes a while."""

Found = TypeVar("Found")


class Runner(Protocol):
    """Runs a compiled shape once and waits for it; any thread may call it."""

    def run(self, rows: int, step: int) -> None: ...


class Watch:
    """Measurements on one device; `limit_s` bounds them all together, not what is between them.

    `interrupted` is called before each and may raise.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        clock: Callable[[], float],
        limit_s: float,
        interrupted: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._left_s = limit_s
        self._ends_at = 0.0
        self._interrupted = interrupted

    def fastest(self, trials: Iterable[Trial], *, limit_s: float) -> dict[Trial, float] | None:
        """Return seconds of each trial; None where time is up before `LEAST_ROUNDS`."""
        wanted = list(dict.fromkeys(trials))
        rounds = self._rounds(
            lambda: {trial: self._seconds(trial) for trial in wanted}, limit_s=limit_s
        )
        return (
            None
            if rounds is None
            else {trial: min(seconds[trial] for seconds in rounds) for trial in wanted}
        )

    def duel(self, old: Sequence[Trial], new: Sequence[Trial], *, limit_s: float) -> float | None:
        """Return how much faster a token is in the second, at the median; None as above."""
        ratios = self._rounds(
            lambda: self._token_seconds(old) / self._token_seconds(new), limit_s=limit_s
        )
        return None if ratios is None else median(ratios)

    def _rounds(self, measure: Callable[[], Found], *, limit_s: float) -> list[Found] | None:
        began_at = self._clock()
        enough_at, self._ends_at = began_at + limit_s, began_at + self._left_s
        rounds: list[Found] = []
        try:
            while len(rounds) < LEAST_ROUNDS or (
                len(rounds) < MOST_ROUNDS and self._clock() < enough_at
            ):
                rounds.append(measure())
        except _TimeIsUp:
            return rounds if len(rounds) >= LEAST_ROUNDS else None
        finally:
            self._left_s -= self._clock() - began_at
        return rounds

    def _token_seconds(self, trials: Sequence[Trial]) -> float:
        return sum(
            self._seconds(trial) / (trial.lanes * trial.rows * trial.step) for trial in trials
        )

    def _seconds(self, trial: Trial) -> float:
        self._interrupted()
        if self._clock() >= self._ends_at:
            raise _TimeIsUp
        calls = 1
        while (seconds := self._time(trial, calls)) < _LEAST_S:
            calls = max(calls + 1, round(calls * _LEAST_S / max(seconds, _LEAST_S / 10)))
        return seconds / calls

    def _time(self, trial: Trial, calls: int) -> float:
        def lane() -> None:
            for _ in range(calls):
                self._runner.run(trial.rows, trial.step)

        with ThreadPoolExecutor(trial.lanes) as lanes:
            began_at = self._clock()
            running = [lanes.submit(lane) for _ in range(trial.lanes)]
            for one in running:
                one.result()
            return self._clock() - began_at


class _TimeIsUp(Exception):
    pass
