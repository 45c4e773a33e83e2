"""Cells side by side: each in a process of its own, as many at a time as there are processes.

Workloads travel to the processes as they are, so that nothing is expanded twice. What comes out
does not depend on how many processes there are.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

from airs_site.simulation.cell import Cell, Outcome, run_cell
from airs_site.simulation.engine import Options
from airs_site.simulation.trace import Workload

Told = Callable[[int, float], None]
"""Told the number of a cell and the share of it that is done."""
Submit = Callable[[Cell, Workload, Options], "Future[Outcome]"]

_CONTEXT: Final = get_context("spawn")
_WAIT_S: Final = 0.2
# In a worker, where it tells how far it is.
_shares: Any = None


class Cells:
    """Takes cells to run; `finish` waits for all of them."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._futures: list[Future[Outcome]] = []

    @property
    def count(self) -> int:
        """Cells taken so far."""
        return len(self._futures)

    def take(self, cell: Cell, workload: Workload, options: Options) -> "Future[Outcome]":
        """Run a cell, now or when its turn comes."""
        future: Future[Outcome] = Future()
        number = self.count
        self._futures.append(future)
        future.set_result(run_cell(cell, workload, options, partial(self._told, number)))
        self._told(number, 1.0)
        return future

    def finish(self) -> None:
        """Wait for all cells; raises what the first of them that failed raised."""


class _Processes(Cells):
    def __init__(self, told: Told, pool: ProcessPoolExecutor, shares: Any) -> None:
        super().__init__(told)
        self._pool = pool
        self._shares = shares

    def take(self, cell: Cell, workload: Workload, options: Options) -> "Future[Outcome]":
        future = self._pool.submit(_run, self.count, cell, workload, options)
        self._futures.append(future)
        self._listen()
        return future

    def finish(self) -> None:
        pending: Iterable[Future[Outcome]] = self._futures
        while pending:
            done, pending = wait(pending, timeout=_WAIT_S)
            self._listen()
            for future in done:
                future.result()

    def _listen(self) -> None:
        while not self._shares.empty():
            self._told(*self._shares.get())


@contextmanager
def cells(processes: int, told: Told) -> Iterator[Cells]:
    """Give somebody who runs cells: in this process where one is enough, else in so many others."""
    if processes == 1:
        yield Cells(told)
        return
    shares = _CONTEXT.SimpleQueue()
    with ProcessPoolExecutor(
        processes, mp_context=_CONTEXT, initializer=_begin, initargs=(shares,)
    ) as pool:
        try:
            yield _Processes(told, pool, shares)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(shares: Any) -> None:
    global _shares
    _shares = shares
    # Ctrl-C goes to all processes; only the first one has something to say about it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(number: int, cell: Cell, workload: Workload, options: Options) -> Outcome:
    def tell(share: float) -> None:
        _shares.put((number, share))

    outcome = run_cell(cell, workload, options, tell)
    tell(1.0)
    return outcome
