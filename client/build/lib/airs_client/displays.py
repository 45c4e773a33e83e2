"""How a workflow's progress is shown while somebody waits: a bar on a terminal, else lines."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from airs_client import rendering
from airs_client.results import Workflow


class Display(Protocol):
    """Shows each look at a workflow; open it with `with`."""

    def show(self, workflow: Workflow) -> None: ...

    def say(self, text: str) -> None:
        """Talk beside the progress, without disturbing it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def display_on(console: Console, *, clock: Callable[[], float]) -> Display:
    """`clock` gives monotonic seconds."""
    if console.is_terminal and not console.is_dumb_terminal:
        return Bar(console)
    return Lines(lambda line: _print(console, line), clock=clock)


class Bar:
    """A bar that moves, with counts, hit rate and ETA beside it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task("", total=None)

    def show(self, workflow: Workflow) -> None:
        self._progress.update(
            self._task,
            total=workflow.counts.total or None,
            completed=workflow.counts.ended,
            description=rendering.progress_line(workflow),
        )

    def say(self, text: str) -> None:
        _print(self._progress.console, text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


class Lines:
    """A line when the state changes and every few seconds while the counts do; fit for logs."""

    period_s = 5.0

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._state = ""
        self._line = ""
        self._written_s = float("-inf")

    def show(self, workflow: Workflow) -> None:
        line, now_s = rendering.progress_line(workflow), self._clock()
        due = line != self._line and now_s - self._written_s >= self.period_s
        if not due and workflow.state == self._state:
            return
        self._write(line)
        self._state, self._line, self._written_s = workflow.state, line, now_s

    def say(self, text: str) -> None:
        self._write(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
