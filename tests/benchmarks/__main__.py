"""`python -m tests.benchmarks [NAME …] [--quick]`: all benchmarks, or some, on stacks of their own.

Prints one table and writes a JSON file a figure to `$AIRS_HOME/bench/`. Each floor is measured in
the same run, so that ratios hold on a machine that others use; docs/benchmarks.md explains them.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tests.acceptance.stack import Stack, Stub
from tests.benchmarks import (
    eta,
    inside,
    large,
    live,
    overload,
    pool_moves,
    real_model,
    report,
    resize,
    running,
    scale,
    shapes,
    sorted_batches,
    storing,
    stub_model,
    urgent,
    window,
)
from tests.benchmarks.report import Figure

BY_THEMSELVES = {
    "live": live.live,
    "pool_moves": pool_moves.pool_moves,
    "window": window.window,
    "resize": resize.resize,
    "overload": overload.overload,
    "length_sorted": sorted_batches.length_sorted,
    "shapes": shapes.shapes,
}
"""Each starts what it needs."""

NAMES = (
    "scale",
    "stub",
    "archive_hits",
    "urgent",
    "ingest",
    "events",
    "real_model",
    "model_server",
    "checker",
    "backlog",
    "archive",
    "exports",
    "queue_look",
    "dispatch_cost",
    "eta",
    *BY_THEMSELVES,
    "large",
)
BY_NAME_ONLY = frozenset({"large", "length_sorted", "resize", "shapes", "window"})
"""Half an hour, and 25 GB of disk; and what explains rather than judges, for minutes."""
INSIDE = ("checker", "backlog", "archive", "exports", "queue_look", "dispatch_cost")
"""Services alone, without a stack."""
WITHOUT_EVENTS = ("flower", "host-agent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured."""

    grouped_rows: int
    single_rows: int
    ingest_rows: int
    backlog: int
    rounds: int
    urgent_rounds: int
    model_rounds: int
    seeds_a_round: int
    scale_s: float
    eta_workflows: int
    large_upload: int
    large_appended: int


FULL = Sizes(
    grouped_rows=50_000, single_rows=12_000, ingest_rows=100_000, backlog=20_000, rounds=2,
    urgent_rounds=5, model_rounds=4, seeds_a_round=3, scale_s=600.0, eta_workflows=16,
    large_upload=1_000_000, large_appended=10_000_000,
)  # fmt: skip
QUICK = Sizes(
    grouped_rows=20_000, single_rows=4_000, ingest_rows=20_000, backlog=8_000, rounds=1,
    urgent_rounds=2, model_rounds=2, seeds_a_round=1, scale_s=30.0, eta_workflows=10,
    large_upload=100_000, large_appended=400_000,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute or two")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(NAMES):
        parser.error(
            f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}"
        )
    left_out = BY_NAME_ONLY | ({"model_server", *BY_THEMSELVES} if chosen.quick else set())
    names = set(chosen.names) or set(NAMES) - left_out
    began_at = time.monotonic()
    figures: list[Figure] = []
    for figure in _figures(names, quick=chosen.quick):
        figures.append(figure)
        report.write([figure])
        _say(f"{time.monotonic() - began_at:4.0f} s  {figure.name} {report.number(figure.value)}")
    report.show(figures)
    _say(f"{len(figures)} files in {report.directory()}, {time.monotonic() - began_at:.0f} s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _figures(names: set[str], *, quick: bool) -> Iterator[Figure]:
    if names - set(INSIDE) - BY_THEMSELVES.keys():
        yield from _run(names, QUICK if quick else FULL)
    for name, run in BY_THEMSELVES.items():
        if name in names:
            yield from run(quick=quick)
    for name in INSIDE:
        if name in names:
            yield from inside.run(name, quick=quick)


def _run(names: set[str], sizes: Sizes) -> Iterator[Figure]:
    with ExitStack() as leave:
        stub = leave.enter_context(running.stub())
        slow = leave.enter_context(running.stub(delay_s=0.05))
        if "eta" in names:
            paced = leave.enter_context(running.stub(delay_s=0.1))
            with running.stack(without=WITHOUT_EVENTS) as stack:
                yield from eta.eta(stack, paced, workflows=sizes.eta_workflows, over_s=20.0)
        if names & {"scale", "stub", "archive_hits", "urgent", "ingest"}:
            with running.stack(without=WITHOUT_EVENTS) as stack:
                yield from _without_events(stack, stub, slow, names, sizes)
        if "large" in names:
            with running.stack(without=WITHOUT_EVENTS) as stack:
                yield from large.large(
                    stack, stub, upload=sizes.large_upload, appended=sizes.large_appended
                )
        if names & {"events", "real_model"}:
            without = () if "real_model" in names else ("host-agent",)
            with running.stack(without=without) as stack:
                yield from _with_events(stack, stub, names, sizes)
    if "model_server" in names:
        yield from _model_server()


def _without_events(
    stack: Stack, stub: Stub, slow: Stub, names: set[str], sizes: Sizes
) -> Iterator[Figure]:
    stub_model.register(stack, stub)
    if "scale" in names:
        for batches, seconds in ((16, sizes.scale_s), (1, min(sizes.scale_s, 60.0))):
            yield from scale.scale(stack, stub, batches=batches, seconds=seconds)
    workflows = stub_model.bodies(rows=sizes.grouped_rows, rounds=sizes.rounds, prefix="grouped")
    if "stub" in names:
        yield from stub_model.end_to_end(stack, stub, workflows, batches=16)
        singles = stub_model.bodies(rows=sizes.single_rows, rounds=sizes.rounds, prefix="one")
        yield from stub_model.end_to_end(stack, stub, singles, batches=1)
    if "archive_hits" in names:
        rater, body = stub_model.rater_of(16), b"".join(workflows)
        if "stub" not in names:
            running.rate(stack, rater, body)
        yield from storing.archive_hits(stack, rater, body, rounds=sizes.rounds)
    if "urgent" in names:
        yield from urgent.urgent(stack, slow, backlog=sizes.backlog, rounds=sizes.urgent_rounds)
    if "ingest" in names:
        yield from storing.ingest(stack, stub, rows=sizes.ingest_rows, rounds=sizes.rounds)


def _with_events(stack: Stack, stub: Stub, names: set[str], sizes: Sizes) -> Iterator[Figure]:
    if "real_model" in names:
        real_model.wait_ready(stack)  # while it compiles, it takes a core
    if "events" in names:
        stub_model.register(stack, stub)
        for batches, rows in ((16, sizes.grouped_rows // 2), (1, sizes.single_rows)):
            workflows = stub_model.bodies(rows=rows, rounds=sizes.rounds, prefix=f"ev{batches}")
            yield from stub_model.end_to_end(
                stack, stub, workflows, batches=batches, label="_with_events"
            )
    if "real_model" in names:
        yield from real_model.real_model(
            stack, seeds_a_round=sizes.seeds_a_round, rounds=sizes.model_rounds
        )


def _model_server() -> Iterable[Figure]:
    from tests.benchmarks import model_server

    rows: list[dict[str, Any]] = model_server.run()
    return (Figure(**row) for row in rows)


if __name__ == "__main__":
    main()
