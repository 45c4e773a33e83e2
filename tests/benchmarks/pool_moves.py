"""Two models share four device slots; the work moves from one to the other, and replicas follow.

A whole stack with the real model hosted twice, under two names, in a pool that is rebalanced each
minute by beat. One of them has an evaluation that would take the pool a quarter of an hour, the
other a small workflow after another, so that both have a backlog all the time. Then the large one
is cancelled, and one as large comes to the other model.

The machine has fewer cores than the pool has slots: replicas share them. How busy they are is what
counts here, not how fast.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.acceptance.stack import Stack, until
from tests.benchmarks import hosted, running
from tests.benchmarks.hosted import send
from tests.benchmarks.report import Figure, number
from tests.benchmarks.watch import Look, Use, Watch, use, watching, within

MODELS = ("north", "south")
POOL = "bench"
SLOTS = 4
MANY, FEW = 3, 1
PERIOD_S = 60.0
LARGE_ROWS = 72_000
SMALL_ROWS = 360
SMALL_BATCHES = 40
"""Less than so many of the small work wait: there comes more."""
FOLLOWS_WITHIN_S = 2 * PERIOD_S
LEARNED_WITHIN_S = 300.0
LEARNED = "SELECT count(*) FROM fulfillment_ratercost WHERE exact AND rater_id = ANY(%s)"
DECISIONS = """
    SELECT reason FROM models_admin_rebalancedecision WHERE pool_id = %s AND applied ORDER BY id
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured."""

    moves: int
    stay_s: float
    """How long the work stays where it is once replicas have followed."""


FULL = Sizes(moves=2, stay_s=25.0)
QUICK = Sizes(moves=1, stay_s=10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """One move of the work; instants are the watch's."""

    at_s: float
    wanted_s: float
    """Until other numbers of replicas were wanted."""
    ready_s: float
    """Until they served."""


@dataclass(kw_only=True)
class Scene:
    """The large and the small work, as they are submitted."""

    stack: Stack
    watch: Watch
    numbers: Iterator[int]
    large: str = ""

    def submit(self, model: str, rows: int) -> str:
        """Submit a workflow of new rows."""
        n = next(self.numbers)
        body = hosted.bodies(rows, seed=n % 7, prefix=f"{n}")
        return str(self.stack.submit(model, body, name=f"{model}-{n}")["id"])

    def feed(self, model: str) -> None:
        """Let a model always have some work."""
        if self.watch.last.waiting.get(model, 0) < SMALL_BATCHES:
            self.submit(model, SMALL_ROWS)
            time.sleep(0.5)  # until the watch has seen it

    def move(self, to: str, body: bytes) -> float:
        """Cancel the large work, and submit as much for another model; return when."""
        other = _other(to)
        while self.watch.last.waiting.get(other, 0) == 0:
            self.submit(other, SMALL_ROWS)
        if self.large:
            self.submit(other, SMALL_ROWS)
            send(self.stack, "POST", f"/workflows/{self.large}/cancel")
        at_s = time.monotonic()
        self.large = str(self.stack.submit(to, body, name=f"large-{to}")["id"])
        return at_s


def pool_moves(*, quick: bool) -> Iterator[Figure]:
    """Let the work move; yield how soon replicas follow, and how busy they are."""
    sizes = QUICK if quick else FULL
    large = {
        n: hosted.bodies(LARGE_ROWS, seed=100 + n, prefix=f"large {n}")
        for n in range(sizes.moves + 1)
    }
    with running.stack(without=("flower",)) as stack:
        _register(stack)
        with watching(stack) as watch:
            scene = Scene(stack=stack, watch=watch, numbers=itertools.count(1000))
            _measure_first(scene, large[0])
            from_s = time.monotonic()
            moved = []
            for n in range(sizes.moves):
                to = MODELS[(n + 1) % 2]
                moved.append(_moved(scene, to, large[n + 1]))
                _stay(scene, to, sizes.stay_s)
            until_s = time.monotonic()
            send(stack, "POST", f"/workflows/{scene.large}/cancel")
            hosted.wait_all_ended(stack, timeout_s=60)
            counted = hosted.check_nothing_in_vain(stack, MODELS)
            looks = within(watch.looks, from_s, until_s)
        yield _follows(moved, counted, [reason for (reason,) in stack.query(DECISIONS, POOL)])
        yield from _duty(looks)


def _register(stack: Stack) -> None:
    hosted.compile_first(stack)
    send(stack, "POST", "/pools", {"id": POOL, "kind": "cpu", "devices": SLOTS})
    for model in MODELS:
        hosted.host(stack, model, pool=POOL, replicas={"min": 0, "default": 2, "max": SLOTS})
    for model in MODELS:
        hosted.wait_replicas(stack, model, 2)


def _measure_first(scene: Scene, body: bytes) -> None:
    """Let both raters be measured, and replicas be where the work is to begin with."""
    first, other = MODELS
    scene.feed(other)
    scene.move(first, body)
    send(scene.stack, "PATCH", f"/pools/{POOL}", {"rebalancing": "on"})

    def learned() -> bool:
        scene.feed(other)
        return scene.stack.query(LEARNED, list(MODELS)) == [(2,)]

    until(learned, timeout_s=LEARNED_WITHIN_S, what="both raters are measured", every_s=0.3)
    _followed(scene, first)
    _stay(scene, first, 5.0)


def _moved(scene: Scene, to: str, body: bytes) -> Moved:
    at_s = scene.move(to, body)
    wanted_s = _followed(scene, to)
    return Moved(at_s=at_s, wanted_s=wanted_s - at_s, ready_s=time.monotonic() - at_s)


def _followed(scene: Scene, to: str) -> float:
    """Wait until the replicas are where the work is; return when that was decided."""
    decided_s = 0.0

    def are_there() -> bool:
        nonlocal decided_s
        scene.feed(_other(to))
        if not decided_s and _wanted(scene.stack) == {to: MANY, _other(to): FEW}:
            decided_s = time.monotonic()
        look = scene.watch.last
        return look.ready(to) >= MANY and look.ready(_other(to)) == FEW

    until(
        are_there,
        timeout_s=FOLLOWS_WITHIN_S + PERIOD_S,
        what=f"{MANY} replicas of {to} serve, and {FEW} of the other",
        every_s=0.2,
    )
    return decided_s


def _stay(scene: Scene, at: str, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        scene.feed(_other(at))
        time.sleep(0.2)


def _wanted(stack: Stack) -> dict[str, int]:
    return dict(
        stack.query(
            "SELECT id, wanted_replicas FROM models_admin_modelconfig WHERE id = ANY(%s)",
            list(MODELS),
        )
    )


def _other(model: str) -> str:
    return next(other for other in MODELS if other != model)


def _follows(moved: list[Moved], counted: str, reasons: list[str]) -> Figure:
    worst = max(moved, key=lambda each: each.ready_s)
    return Figure(
        name="pool_moves_follow_s",
        value=worst.ready_s,
        unit="s",
        ratio_to=f"two rebalance periods, {FOLLOWS_WITHIN_S:.0f} s",
        ratio=FOLLOWS_WITHIN_S / worst.ready_s,
        n=len(moved),
        note=f"from the move of the work until {MANY} replicas serve where it is, the worst of"
        f" {', '.join(f'{each.ready_s:.0f}' for each in moved)} s; decided after"
        f" {', '.join(f'{each.wanted_s:.0f}' for each in moved)} s (a round comes each"
        f" {PERIOD_S:.0f} s), the rest is drain and start; {counted}; last decision: {reasons[-1]}",
    )


def _duty(looks: list[Look]) -> Iterator[Figure]:
    ready = use(looks, backlog=_all_wait)
    yield Figure(
        name="pool_moves_duty",
        value=ready.duty,
        unit="of replica-seconds",
        ratio_to="all READY replicas busy all the time; goal 0.95",
        ratio=ready.duty,
        n=len(looks),
        note=f"busy seconds, as servers told, over the {ready.lived_s:.0f} s for which replicas"
        f" were READY while both models had unsent batches; by model"
        f" {', '.join(f'{model} {number(_of(looks, model).duty)}' for model in MODELS)}",
    )
    alive = use(looks, counts=lambda run, state: True)
    slots_s = SLOTS * (looks[-1].at_s - looks[0].at_s)
    yield Figure(
        name="pool_moves_duty_of_slots",
        value=alive.busy_s / slots_s,
        unit="of slot-seconds",
        ratio_to="all slots busy all the time, also while a replica drains, stops and starts",
        ratio=alive.busy_s / slots_s,
        n=len(looks),
        note=f"{SLOTS} slots for {slots_s / SLOTS:.0f} s; what is missing beside the figure above"
        " is what replicas took to move",
    )


def _of(looks: list[Look], model: str) -> Use:
    return use(
        looks,
        counts=lambda run, state: state == "READY" and run[0] == model,
        backlog=_all_wait,
    )


def _all_wait(look: Look) -> bool:
    return all(look.waiting.get(model, 0) > 0 for model in MODELS)
