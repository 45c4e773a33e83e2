"""Resizing a model while a workflow runs: how deep its pace dips, and how soon it is back.

Twice the same scene: one replica, two, one again. First with servers of a fixed pace
(`paced_server`), as accelerators of their own are: what is lost then, the product lost. Then with
the real model, whose replicas share this machine's cores: a second one brings nothing there, and
its start takes from the first what it needs.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.acceptance.stack import Stack
from tests.benchmarks import hosted, live_stack, running
from tests.benchmarks.hosted import send
from tests.benchmarks.live_stack import BATCH, SERVICE_S
from tests.benchmarks.report import Figure, number
from tests.benchmarks.watch import Look, Watch, rates, watching, within

STEP_S = 2.0
MODEL, POOL = "resized", "bench"
REPLICAS = {"min": 1, "default": 1, "max": 2}
REAL_PACE = 150.0
"""Requests a second, above what a machine of two cores does."""
BACK = 0.9
"""The pace is back when a step has so much of what it comes to."""
SCENE_S = 150.0
"""Of work there is enough for so long; what is left is cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured."""

    stay_s: float
    """With each number of replicas."""


FULL = Sizes(stay_s=20.0)
QUICK = Sizes(stay_s=10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resized:
    """One resize, in steps of STEP_S; instants count from the request for it."""

    before: int
    after: int
    ready_s: float
    """Until so many replicas served."""
    pace_before: float
    pace_after: float
    steps: Sequence[tuple[float, float]]
    """From the request on: (since, requests a second)."""

    @property
    def dip(self) -> float:
        """The lowest pace of a step, in parts of the lower of the paces before and after."""
        return min(rate for _, rate in self.steps) / min(self.pace_before, self.pace_after)

    @property
    def back_s(self) -> float:
        """When the pace was that with the new number of replicas, and stayed."""
        low = [since + STEP_S for since, rate in self.steps if rate < BACK * self.pace_after]
        return max(low, default=0.0)


def resize(*, quick: bool) -> Iterator[Figure]:
    """Resize both; print the paces and yield what it comes to."""
    sizes = QUICK if quick else FULL
    with _paced() as stack:
        yield from _scene(stack, sizes, label="paced", rows=round(SCENE_S * 2 * BATCH / SERVICE_S))
    with _real() as stack:
        yield from _scene(stack, sizes, label="real", rows=round(SCENE_S * REAL_PACE))


@contextlib.contextmanager
def _paced() -> Iterator[Stack]:
    """Start a stack whose servers have a slot of a fixed pace each."""
    with (
        tempfile.TemporaryDirectory(prefix="airs-bench-") as directory,
        running.stack(without=("flower", "host-agent")) as stack,
        live_stack.paced_host(stack, Path(directory)),
    ):
        send(
            stack, "POST", "/pools",
            {"id": POOL, "kind": "cpu", "devices": 2, "agent": live_stack.AGENT},
        )  # fmt: skip
        hosted.host(
            stack, MODEL, pool=POOL, replicas=REPLICAS, autorater="oip_score", checkpoint="tiny:0"
        )
        hosted.wait_replicas(stack, MODEL, 1)
        yield stack


@contextlib.contextmanager
def _real() -> Iterator[Stack]:
    with running.stack(without=("flower",)) as stack:
        hosted.compile_first(stack)
        send(stack, "POST", "/pools", {"id": POOL, "kind": "cpu", "devices": 2})
        hosted.host(stack, MODEL, pool=POOL, replicas=REPLICAS)
        hosted.wait_replicas(stack, MODEL, 1)
        yield stack


def _scene(stack: Stack, sizes: Sizes, *, label: str, rows: int) -> Iterator[Figure]:
    body = hosted.bodies(rows, seed=3, prefix=label)
    with watching(stack) as watch:
        workflow_id = stack.submit(MODEL, body, name=label)["id"]
        time.sleep(sizes.stay_s / 2)  # its upload and its first batches
        first_s = time.monotonic()
        time.sleep(sizes.stay_s)
        resized = [_resized(stack, watch, sizes, before, 3 - before) for before in (1, 2)]
        looks = within(watch.looks, first_s, time.monotonic())
        assert watch.last.waiting.get(MODEL, 0) > 0, "the workflow was too short"
        send(stack, "POST", f"/workflows/{workflow_id}/cancel")
        hosted.wait_all_ended(stack, timeout_s=60)
        counted = hosted.check_nothing_in_vain(stack, [MODEL])
    _show(label, looks)
    for each in resized:
        yield _figure(each, label=label, counted=counted)


def _resized(stack: Stack, watch: Watch, sizes: Sizes, before: int, after: int) -> Resized:
    asked_s = time.monotonic()
    send(stack, "POST", f"/models/{MODEL}/resize", {"replicas": after})
    hosted.wait_replicas(stack, MODEL, after)
    ready_s = time.monotonic()
    time.sleep(sizes.stay_s)
    ((_, pace_before),) = _paces(watch.looks, asked_s - 0.75 * sizes.stay_s, asked_s)
    ended_s = time.monotonic()
    ((_, pace_after),) = _paces(watch.looks, ended_s - 0.75 * sizes.stay_s, ended_s)
    return Resized(
        before=before,
        after=after,
        ready_s=ready_s - asked_s,
        pace_before=pace_before,
        pace_after=pace_after,
        steps=rates(within(watch.looks, asked_s, ended_s), MODEL, every_s=STEP_S),
    )


def _paces(looks: Sequence[Look], from_s: float, until_s: float) -> list[tuple[float, float]]:
    found = within(looks, from_s, until_s)
    return rates(found, MODEL, every_s=found[-1].at_s - found[0].at_s)


def _figure(of: Resized, *, label: str, counted: str) -> Figure:
    name = f"resize_{label}_{of.before}_to_{of.after}"
    return Figure(
        name=f"{name}_dip",
        value=of.dip,
        unit="of the pace",
        ratio_to="the lower of the paces before and after",
        ratio=of.dip,
        n=len(of.steps),
        note=f"the lowest step of {STEP_S:g} s from the request on; {number(of.pace_before)}"
        f" requests/s before, {number(of.pace_after)} after; {of.after} served after"
        f" {number(of.ready_s)} s, the pace was back (and stayed above {BACK:g} of what it came to)"
        f" after {number(of.back_s)} s; {counted}",
    )


def _show(label: str, looks: Sequence[Look]) -> None:
    table = Table("s", "READY", "requests/s", "", title=f"resize, {label}")
    steps = rates(looks, MODEL, every_s=STEP_S)
    most = max(rate for _, rate in steps)
    for since, rate in steps:
        look = next(look for look in looks if look.at_s - looks[0].at_s >= since)
        table.add_row(
            f"{since:.0f}", str(look.ready(MODEL)), number(rate), "█" * round(40 * rate / most)
        )
    Console(width=100, highlight=False).print(table)
