"""The whole way with a model that answers at once: what is left is what AIRS itself costs.

The number of batches a message is set by the model's window, as in life: a window of 6 gives one
batch a message, one of 128 gives up to sixteen.
"""

from collections.abc import Iterator, Sequence

from tests.acceptance.stack import Stack, Stub
from tests.benchmarks import floors, running, texts
from tests.benchmarks.report import Figure, median, number, parts, spread

STORED = "COPY of requests and ratings, one connection"
CALLED = "bare stub loop, batches of 12, 16 calls open"
WINDOWS = {1: 6, 16: 128}
"""Batches a message -> max_concurrency of the model."""


def rater_of(batches: int) -> str:
    """Return the rater whose messages carry so many batches."""
    return f"stub-{batches}"


def register(stack: Stack, stub: Stub) -> None:
    """Make a rater for each number of batches a message, and rate some rows with each.

    So no first connection, import or report of the model's version is part of a figure.
    """
    for batches, window in WINDOWS.items():
        stack.register(stub, rater=rater_of(batches), max_concurrency=window)
        body = texts.bodies(2_000, seed=0, prefix=f"warm{batches}")
        running.rate(stack, rater_of(batches), body)


def bodies(*, rows: int, rounds: int, prefix: str) -> list[bytes]:
    """Return the workflows of some rounds."""
    return [texts.bodies(rows, seed=i, prefix=f"{prefix}{i}") for i in range(rounds)]


def end_to_end(
    stack: Stack, stub: Stub, workflows: Sequence[bytes], *, batches: int, label: str = ""
) -> Iterator[Figure]:
    """Measure workflows of new rows, from the first byte sent to COMPLETED."""
    stored, called, done, cpu_us, runs = [], [], [], [], []
    for body in workflows:
        rows = body.count(b"\n")
        stored.append(floors.copy_outcome(stack, body).rate)
        called.append(floors.bare_calls(stub.url, body))
        run = running.rate(stack, rater_of(batches), body, others={"stub": stub.process.pid})
        runs.append(run)
        done.append(rows / run.finished_s)
        cpu_us.append(run.cost.us(rows))
    middle = sorted(runs, key=lambda run: run.cost.total_s)[len(runs) // 2]
    calls = median([floor.rate for floor in called])
    calls_us = median([1e6 * floor.cpu_s / floor.count for floor in called])
    name = f"stub_{batches}_a_message{label}"
    yield Figure(
        name=f"{name}_requests_per_s",
        value=median(done),
        unit="requests/s",
        ratio_to=STORED,
        ratio=median(done) / median(stored),
        n=rows * len(runs),
        note=f"{median(done) / calls:.2f} of the {CALLED} ({number(calls)}/s);"
        f" rounds {spread(done)}; upload {middle.posted_s:.1f} of {middle.finished_s:.1f} s;"
        f" foreign load {max(run.cost.foreign_cores for run in runs):.1f} cores at most",
    )
    yield Figure(
        name=f"{name}_cpu_us_per_request",
        value=median(cpu_us),
        unit="us CPU",
        n=rows * len(runs),
        ratio_to=f"{CALLED}, CPU of the caller",
        ratio=calls_us / median(cpu_us),
        note=parts(middle.cost.us_each(rows)),
    )
