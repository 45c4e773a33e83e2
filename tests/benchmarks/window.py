"""What the window of a replica is worth: duty, and how long urgent work takes beside a backlog.

The real model, one replica, a backlog of low priority. For each window: how busy the replica is and
what it rates while nothing urgent comes, then workflows of high priority, one after the other, of
12 and of 120 requests. The floor is the same workflows alone on the stack.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.acceptance.stack import Stack, until
from tests.benchmarks import hosted, running
from tests.benchmarks.hosted import send
from tests.benchmarks.real_model import wait_ready
from tests.benchmarks.report import Figure, number
from tests.benchmarks.watch import Watch, rates, use, watching, within

MODEL, RATER = "minilm", "needs_met"
WINDOWS = (1, 2, 4, 8, 16)
SMALL, LARGE = 12, 120
BACKLOG_PRIORITY, URGENT_PRIORITY = 10, 90
SETTLE_S = 4.0
"""A smaller window is full at first: what is out already is not taken back."""
GOAL = 0.95
ALONE = 0
"""Stands for the stack without a backlog."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured, for each window."""

    backlog_s: float
    small: int
    large: int


FULL = Sizes(backlog_s=12.0, small=20, large=4)
QUICK = Sizes(backlog_s=6.0, small=5, large=1)
BACKLOG_ROWS = 40_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one window came to; alone there is neither duty nor rate."""

    small_s: list[float]
    large_s: list[float]
    duty: float = 0.0
    rate: float = 0.0


def window(*, quick: bool) -> Iterator[Figure]:
    """Measure all windows; print the table and yield what it comes to."""
    sizes = QUICK if quick else FULL
    with running.stack(without=("flower",)) as stack:
        wait_ready(stack)
        chosen = int(send(stack, "GET", f"/models/{MODEL}")["window"])
        _urgent(stack, SMALL, "warm")
        rows = {ALONE: _row(stack, sizes, "alone")}
        with watching(stack) as watch:
            backlog = hosted.bodies(BACKLOG_ROWS, seed=50, prefix="backlog")
            backlog_id = stack.submit(RATER, backlog, priority=BACKLOG_PRIORITY)["id"]
            for size in WINDOWS:
                rows[size] = _with_backlog(stack, watch, size, sizes)
            assert watch.last.waiting[RATER] > max(WINDOWS), "the backlog was too short"
        send(stack, "POST", f"/workflows/{backlog_id}/cancel")
        hosted.wait_all_ended(stack, timeout_s=60)
        hosted.check_nothing_in_vain(stack, [RATER])
    _show(rows)
    yield from _figures(rows, chosen)


def _with_backlog(stack: Stack, watch: Watch, size: int, sizes: Sizes) -> Row:
    send(stack, "PATCH", f"/models/{MODEL}", {"window": size, "tunes_window": False})
    until(
        lambda: 0 < _held(stack) <= size,
        timeout_s=60,
        what=f"the replica holds {size} batches at most",
        every_s=0.2,
    )
    time.sleep(SETTLE_S)
    from_s = time.monotonic()
    time.sleep(sizes.backlog_s)
    looks = within(watch.looks, from_s, time.monotonic())
    ((_, rate),) = rates(looks, RATER, every_s=looks[-1].at_s - looks[0].at_s)
    urgent = _row(stack, sizes, f"window {size}")
    return Row(small_s=urgent.small_s, large_s=urgent.large_s, duty=use(looks).duty, rate=rate)


def _row(stack: Stack, sizes: Sizes, prefix: str) -> Row:
    small_s = [_urgent(stack, SMALL, f"{prefix} small {n}") for n in range(sizes.small)]
    large_s = [_urgent(stack, LARGE, f"{prefix} large {n}") for n in range(sizes.large)]
    return Row(small_s=small_s, large_s=large_s)


def _urgent(stack: Stack, requests: int, prefix: str) -> float:
    body = hosted.bodies(requests, seed=7, prefix=prefix)
    return running.rate(stack, RATER, body, priority=URGENT_PRIORITY).finished_s


def _held(stack: Stack) -> int:
    ((held,),) = stack.query("SELECT count(*) FROM fulfillment_batch WHERE state = 1")
    return int(held)


def _smallest(rows: Mapping[int, Row]) -> int:
    return next((size for size in WINDOWS if rows[size].duty >= GOAL), max(WINDOWS))


def _show(rows: Mapping[int, Row]) -> None:
    best = max(row.rate for row in rows.values())
    table = Table(
        "window", "duty", "requests/s", "of the best", "12 urgent: p50", "p95", "120: p50"
    )
    for size, row in rows.items():
        is_alone = size == ALONE
        table.add_row(
            "alone" if is_alone else str(size),
            "" if is_alone else f"{row.duty:.3f}",
            "" if is_alone else number(row.rate),
            "" if is_alone else f"{row.rate / best:.2f}",
            *(f"{value:.2f} s" for value in _quantiles(row)),
        )
    Console(width=120, highlight=False).print(table)


def _quantiles(row: Row) -> tuple[float, float, float]:
    return (
        float(np.quantile(row.small_s, 0.5)),
        float(np.quantile(row.small_s, 0.95)),
        float(np.quantile(row.large_s, 0.5)),
    )


def _figures(rows: Mapping[int, Row], chosen: int) -> Iterator[Figure]:
    smallest = _smallest(rows)
    best = max(row.rate for row in rows.values())
    yield Figure(
        name="window_smallest",
        value=smallest,
        unit="batches",
        ratio_to=f"the default, {chosen}",
        ratio=chosen / smallest,
        n=len(WINDOWS),
        note=f"the smallest with a duty of {GOAL:g}; its rate is"
        f" {rows[smallest].rate / best:.2f} of the best; duty by window "
        + ", ".join(f"{size}: {rows[size].duty:.3f}" for size in WINDOWS),
    )
    alone_s, *_ = _quantiles(rows[ALONE])
    for size in sorted({smallest, chosen}):
        small_s, p95_s, large_s = _quantiles(rows[size])
        yield Figure(
            name=f"window_{size}_urgent_s",
            value=small_s,
            unit="s",
            ratio_to=f"the same workflow of {SMALL} alone on the stack",
            ratio=alone_s / small_s,
            n=len(rows[size].small_s),
            note=f"{SMALL} requests at window {size}, upload to COMPLETED; p95 {number(p95_s)} s,"
            f" alone {number(alone_s)} s; {LARGE} requests {number(large_s)} s, alone"
            f" {number(_quantiles(rows[ALONE])[2])} s",
        )
