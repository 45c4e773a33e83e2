"""The whole way with a model that answers at once: what is left is what AIRS itself costs.

The number of batches a message is set by the model's window, as in life: a window of 6 gives one
batch a message, one of 128 gives eight.
"""

from collections.abc import Iterator

from tests.acceptance.stack import Stack, Stub
from tests.benchmarks import floors, running, texts
from tests.benchmarks.report import Figure, median, number, parts, spread

STORED = "COPY of requests and ratings, one connection"
CALLED = "bare stub loop, batches of 12, 16 calls open"
WINDOWS = {1: 6, 8: 128}
"""Batches a message -> max_concurrency of the model."""


def rater_of(batches: int) -> str:
    """Return the rater whose messages carry so many batches."""
    return f"stub-{batches}"


def register(stack: Stack, stub: Stub) -> None:
    """Make a rater for each number of batches a message."""
    for batches, window in WINDOWS.items():
        stack.register(stub, rater=rater_of(batches), max_concurrency=window)
    # The first version that a server reports is stored; let that be over before anything counts.
    for batches in WINDOWS:
        warm_up(stack, batches)


def warm_up(stack: Stack, batches: int) -> None:
    """Rate a few rows, so that no first connection or import is part of a figure."""
    body = texts.bodies(2_000, seed=0, prefix=f"warm{batches}")
    running.rate(stack, rater_of(batches), body, others={})


def end_to_end(
    stack: Stack,
    stub: Stub,
    *,
    batches: int,
    rows: int,
    rounds: int,
    label: str = "",
    seed: int = 100,
) -> Iterator[Figure]:
    """Measure workflows of new rows, from the first byte sent to COMPLETED."""
    stored, called, done, cpu_us, runs = [], [], [], [], []
    for round_ in range(rounds):
        body = texts.bodies(rows, seed=seed + round_, prefix=f"e2e{label}{batches}-{seed + round_}")
        running.settle(stack)
        stored.append(floors.copy_outcome(stack, body).rate)
        called.append(floors.bare_calls(stub.url, body).rate)
        run = running.rate(stack, rater_of(batches), body, others={"stub": stub.process.pid})
        runs.append(run)
        done.append(rows / run.finished_s)
        cpu_us.append(run.cost.us(rows))
    middle = sorted(runs, key=lambda run: run.cost.total_s)[len(runs) // 2]
    name = f"stub_{batches}_a_message{label}"
    yield Figure(
        name=f"{name}_requests_per_s",
        value=median(done),
        unit="requests/s",
        ratio_to=STORED,
        ratio=median(done) / median(stored),
        n=rows * rounds,
        note=f"{median(done) / median(called):.2f} of the {CALLED} ({number(median(called))}/s);"
        f" rounds {spread(done)}; upload {middle.posted_s:.1f} of {middle.finished_s:.1f} s;"
        f" foreign load {max(run.cost.foreign_cores for run in runs):.1f} cores at most",
    )
    yield Figure(
        name=f"{name}_cpu_us_per_request",
        value=median(cpu_us),
        unit="us CPU",
        n=rows * rounds,
        note=parts(middle.cost.us_each(rows)),
    )
