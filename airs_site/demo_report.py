"""The demo's report: what was computed, how busy the model was, whether the scores make sense."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airs_client.results import Rating, Workflow
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

QUERIES_SHOWN = 3
BARS = 10
_BAR_WIDTH = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One submission of the sample. `predictions` and `busy_s` are the model server's own."""

    title: str
    workflow: Workflow
    ratings: Sequence[Rating]
    seconds: float
    predictions: int
    busy_s: float

    @property
    def duty_cycle(self) -> float:
        return min(1.0, self.busy_s / self.seconds) if self.seconds else 0.0


def render(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], *, width: int) -> RenderableType:
    """Return the report of two runs of the same rows."""
    first = runs[0]
    return Group(
        Text("\nWhat was done", style="bold"),
        _work(runs),
        Text("\nHow the scores are distributed", style="bold"),
        _distribution(first.ratings),
        Text("\nBest and worst results of three queries", style="bold"),
        _examples(first.ratings, rows, width=width),
    )


def _work(runs: Sequence[Run]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run.title.split(",")[0], justify="right")
    lines: dict[str, Callable[[Run], str]] = {
        "state": lambda r: r.workflow.state,
        "requests completed": lambda r: f"{r.workflow.counts.completed} of {len(r.ratings)}",
        "answered by the archive": lambda r: str(r.workflow.sources.archive),
        "equal to another row (coalesced)": lambda r: str(r.workflow.sources.coalesced),
        "computed by the model": lambda r: str(r.workflow.sources.model),
        "predictions counted by the model server": lambda r: str(r.predictions),
        "model calls": lambda r: str(r.workflow.model_calls),
        "seconds": lambda r: f"{r.seconds:.1f}",
        "duty cycle of the model server": lambda r: f"{r.duty_cycle:.0%}",
        "mean score (0 to 4)": lambda r: _score(r.workflow.mean_score),
    }
    for name, value in lines.items():
        table.add_row(name, *(value(run) for run in runs))
    return table


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _distribution(ratings: Sequence[Rating]) -> Table:
    scores = [rating.score for rating in ratings if rating.score is not None]
    counts = [0] * BARS
    for score in scores:
        counts[min(int(score / 4 * BARS), BARS - 1)] += 1
    table = Table(box=None, pad_edge=False, show_header=False)
    most = max(counts, default=0) or 1
    for number, count in enumerate(counts):
        low, high = 4 * number / BARS, 4 * (number + 1) / BARS
        table.add_row(
            f"{low:.1f} to {high:.1f}", "█" * round(_BAR_WIDTH * count / most), str(count)
        )
    return table


def _examples(ratings: Sequence[Rating], rows: Sequence[Mapping[str, Any]], *, width: int) -> Table:
    """Show the two best and the two worst distinct results of the first queries."""
    texts = {row["request_id"]: row for row in rows}
    by_query: dict[str, dict[str, Rating]] = defaultdict(dict)
    for rating in ratings:
        if rating.score is not None and rating.query_id:
            row = texts[rating.request_id]
            by_query[rating.query_id].setdefault(_words(row), rating)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", style="bold")
    table.add_column()
    table.add_column(max_width=max(40, width - 32))
    for query_id in list(by_query)[:QUERIES_SHOWN]:
        ordered = sorted(by_query[query_id].items(), key=lambda found: -(found[1].score or 0.0))
        query = texts[ordered[0][1].request_id]["query_text"]
        table.add_row("", "", Text(query, style="italic"))
        for words, rating in [*ordered[:2], *ordered[-2:]]:
            table.add_row(_score(rating.score), rating.label or "", Text(words))
    return table


def _words(row: Mapping[str, Any]) -> str:
    text = f"{row.get('title') or ''}: {row.get('text') or '(HTML page)'}"
    return text if len(text) <= 90 else f"{text[:89]}…"
